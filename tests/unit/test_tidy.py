"""The tree keeps the rules of tests/support/tidy_rules.py: directions of imports, clocks and randomness in their place, no print, no stray
threads. Each rule is shown to find what breaks it, in a tree made for that."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.support import tidy_rules
from tests.support.page_links import lost_links, targets_of
from tests.support.sentences import WORDS_MAX
from tests.support.tidy_rules import CLOCKS, FOLDERS, RANDOMNESS, RULES, THREADS, Rule, modules_of

ROOT = Path(__file__).resolve().parents[2]
TREE = modules_of(ROOT)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_tree_keeps(rule: Rule) -> None:
    assert not list(rule(TREE))


def test_whoever_uses_the_sdk_uses_its_public_names() -> None:
    users = tidy_rules.users_of_the_sdk(ROOT)
    assert {Path(*name.split(".")).parts[0] for name in users} >= {"clients", "cli", "tests", "examples"}
    assert not list(tidy_rules.users_of_the_sdk_use_its_public_names(users))


@pytest.mark.parametrize(
    ("text", "private"),
    [
        ("from protomq._routes import Routes", True),
        ("from protomq import Admin, _methods", True),
        ("def f():\n    import protomq._types", True),
        ("from protomq import Admin, __version__\nfrom protomq.calls import Calls\nfrom protomq.wire import record", False),
        ("from .rows import _text", False),
    ],
)
def test_a_private_name_of_the_sdk_is_found(text: str, private: bool, tmp_path: Path) -> None:
    path = tmp_path / "cli" / "protomq_cli" / "x.py"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    found = list(
        tidy_rules.users_of_the_sdk_use_its_public_names(tidy_rules.users_of_the_sdk(tmp_path))
    )
    assert bool(found) is private


def test_what_the_tables_name_is_there() -> None:
    assert {name.partition(".")[0] for name in TREE} == set(FOLDERS)
    assert not {*CLOCKS, *RANDOMNESS, *THREADS, *tidy_rules.LATE_IMPORTS} - set(TREE)


LONG = "Word" + " word" * (WORDS_MAX - 1)
PLANTED = (
    (tidy_rules.packages_point_one_way, "protomq_broker.x", "from protomq_cli import main"),
    (tidy_rules.packages_point_one_way, "protomq_runtime.x", "def f():\n    import protomq_broker.store"),
    (tidy_rules.packages_point_one_way, "protomq_namesrv.x", "from protomq.errors import ProtomqError"),
    (tidy_rules.packages_point_one_way, "protomq.x", "import protomq_runtime"),
    (tidy_rules.packages_point_one_way, "protomq_spark.x", "from protomq_cli.main import main"),
    (tidy_rules.no_module_imports_itself_through_others, "protomq.x", "from .y import a"),
    (tidy_rules.layers_of_the_store_point_one_way, "protomq_broker.store.log.x", "from protomq_broker.store.queues.y import a"),
    (tidy_rules.layers_of_the_store_point_one_way, "protomq_broker.store.files.x", "from ..y import a"),
    (tidy_rules.the_store_knows_neither_grpc_nor_asyncio_nor_the_runtime, "protomq_broker.store.x", "import asyncio"),
    (tidy_rules.the_store_knows_neither_grpc_nor_asyncio_nor_the_runtime, "protomq_broker.store.log.x", "from grpc import aio"),
    (tidy_rules.the_store_knows_neither_grpc_nor_asyncio_nor_the_runtime, "protomq_broker.store.x", "import protomq_runtime.clock"),
    (tidy_rules.the_store_knows_neither_grpc_nor_asyncio_nor_the_runtime, "protomq_broker.store.x", "async def f():\n    pass"),
    (tidy_rules.clocks_are_read_in_their_place, "protomq_broker.x", "import time\nnow = time.time()"),
    (tidy_rules.clocks_are_read_in_their_place, "protomq_namesrv.x", "from time import monotonic as m\nf = m"),
    (tidy_rules.clocks_are_read_in_their_place, "protomq_runtime.x", "def f():\n    from datetime import datetime"),
    (tidy_rules.clocks_are_read_in_their_place, "protomq_runtime.x", "async def f(loop):\n    loop.time()"),
    (tidy_rules.clocks_are_read_in_their_place, "protomq.wire.x", "import time"),
    (tidy_rules.clocks_are_read_in_their_place, "protomq_broker.store.housekeeping.housekeeping", "import time\ntime.monotonic()"),
    (tidy_rules.clocks_are_read_in_their_place, "protomq_runtime.clock", "reads = 'none any more'"),
    (tidy_rules.random_numbers_are_drawn_in_their_place, "protomq_broker.x", "import random"),
    (tidy_rules.random_numbers_are_drawn_in_their_place, "protomq_broker.store.x", "from uuid import uuid4"),
    (tidy_rules.random_numbers_are_drawn_in_their_place, "protomq_namesrv.x", "import os\nos.urandom(8)"),
    (tidy_rules.random_numbers_are_drawn_in_their_place, "protomq.wire.x", "import secrets"),
    (tidy_rules.random_numbers_are_drawn_in_their_place, "protomq_broker.send_service", "draws = 'none any more'"),
    (tidy_rules.threads_are_started_in_their_place, "protomq_broker.x", "import threading as t\nt.Thread(target=print).start()"),
    (tidy_rules.threads_are_started_in_their_place, "protomq_namesrv.x", "from threading import Thread\nclass A(Thread):\n    pass"),
    (tidy_rules.threads_are_started_in_their_place, "protomq.x", "from concurrent.futures import ThreadPoolExecutor as T\nT(2)"),
    (tidy_rules.threads_are_started_in_their_place, "protomq_cli.x", "import asyncio\nasync def f():\n    await asyncio.to_thread(f)"),
    (tidy_rules.threads_are_started_in_their_place, "protomq_runtime.x", "async def f(loop):\n    loop.run_in_executor(None, f)"),
    (tidy_rules.threads_are_started_in_their_place, "protomq_runtime.lane", "starts = 'none any more'"),
    (tidy_rules.one_word_names_one_thing, "protomq.x", "# The index is made anew."),
    (tidy_rules.one_word_names_one_thing, "protomq_broker.store.x", "text = 'damage is passed over'"),
    (tidy_rules.one_word_names_one_thing, "protomq_cli.x", "text = 'Give up after so long.'"),
    (tidy_rules.one_word_names_one_thing, "protomq.x", "text = 'a minus in front of a number'"),
    (tidy_rules.one_word_names_one_thing, "protomq_ha.x", "# What a delivery failed of."),
    (tidy_rules.one_word_names_one_thing, "protomq_broker.x", "# Its messages are dealt with."),
    (tidy_rules.one_word_names_one_thing, "protomq_broker.x", "# The listener is told of the queue."),
    (tidy_rules.sentences_of_docstrings_end_in_time, "protomq.x", f'"""Says {LONG}."""'),
    (tidy_rules.sentences_of_docstrings_end_in_time, "protomq_broker.x", f'def _f():\n    """Short.\n\n    - {LONG}\n      and.\n    """'),
    (tidy_rules.sentences_of_docstrings_end_in_time, "protomq_cli.x", f'class A:\n    b: int = 1\n    """Says {LONG}: (`code` too)."""'),
    (tidy_rules.sentences_of_docstrings_end_in_time, "protomq_spark.x", f'async def f():\n    """Short. {LONG} more!"""'),
    (tidy_rules.sentences_of_messages_end_in_time, "protomq.x", f"raise ValueError(f'{{a}}: {LONG}')"),
    (tidy_rules.sentences_of_messages_end_in_time, "protomq_broker.x", f"raise E(1, f'Short. ' '{LONG}' + ' a', b={{}}) from e"),
    (tidy_rules.sentences_of_messages_end_in_time, "protomq_ha.x", f"log.warning('%s: {LONG}', a)"),
    (tidy_rules.sentences_of_messages_end_in_time, "protomq_cli.x", f"a = Option('--b', help='{LONG}, too.')"),
    (tidy_rules.comments_stand_above_the_code, "protomq.x", "a = (\n    1\n)  # One."),
    (tidy_rules.comments_stand_above_the_code, "protomq_runtime.x", "if (\n    True\n):  # Always.\n    pass"),
    (tidy_rules.comments_stand_above_the_code, "protomq_spark.x", "def f():  # Nothing.\n    pass"),
    (tidy_rules.libraries_and_services_do_not_print, "protomq_runtime.x", "print('x')"),
    (tidy_rules.libraries_and_services_do_not_print, "protomq.x", "say = print"),
    (tidy_rules.services_start_no_programs_and_load_nothing_by_name, "protomq_broker.x", "import pickle"),
    (tidy_rules.services_start_no_programs_and_load_nothing_by_name, "protomq_namesrv.x", "from subprocess import run"),
    (tidy_rules.services_start_no_programs_and_load_nothing_by_name, "protomq_runtime.x", "eval('1')"),
    (tidy_rules.services_start_no_programs_and_load_nothing_by_name, "protomq_runtime.x", "import os\nos.system('true')"),
)  # fmt: skip
"""A rule, a module, and what it says that breaks the rule."""
BESIDE = {
    "protomq.y": "from .x import b",
    "protomq_broker.store.y": "a = 1",
    "protomq_broker.store.queues.y": "from protomq_broker.store.log import y\nfrom ..errors import e",
    "protomq_broker.store.log.y": "from protomq.wire import record",
    "protomq_broker.store.errors": "e = 1",
    "protomq_runtime.y": "class Timer:\n    pass\nTimer()",
    "protomq_broker.a": "if TYPE_CHECKING:\n    from .b import x",
    "protomq_broker.b": "def f():\n    from . import a",
    "protomq.z": "a = (\n    1,  # One.\n)  # noqa: RUF100\n# Once more, a pass over the rows; so far, so many rows.",
    "protomq.w": f'"""{LONG}. {LONG}!\n\n    {LONG} code\n    row  {LONG}\n\n- {LONG}\n- `{LONG} {LONG}`."""',
    "protomq.v": f"raise ValueError('{LONG}. {LONG}', f'{{a}} b')\nlog.error('{LONG}', '{LONG} {LONG}')\na = '{LONG} {LONG}'",
    "protomq_spark.y": "import time, random, subprocess\nprint(eval('1'))",
    "protomq.__main__": "from protomq_cli.main import main\nprint(main)",
}
"""What breaks no rule, and stands beside it: of it the rules find nothing."""


def write_tree(root: Path, modules: dict[str, str]) -> None:
    for name, text in modules.items():
        package, *parts = name.split(".")
        path = root / FOLDERS[package] / ("/".join(parts) + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.parametrize(("rule", "name", "text"), PLANTED)
def test_a_rule_finds_what_breaks_it(rule: Rule, name: str, text: str, tmp_path: Path) -> None:
    write_tree(tmp_path, BESIDE)
    assert not list(rule(modules_of(tmp_path)))
    write_tree(tmp_path, {name: text})
    (*found,) = rule(modules_of(tmp_path))
    assert found
    assert all(name.rpartition(".")[2] in line for line in found), found


FOLDERS_OF_PAGES = ("docs", "services", "deploy", "examples", "clients", "cli")
PAGES = sorted([*ROOT.glob("*.md"), *(path for folder in FOLDERS_OF_PAGES for path in (ROOT / folder).rglob("*.md"))])


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_sentences_of_a_page_end_in_time(page: Path) -> None:
    assert not list(tidy_rules.long_sentences_of_page(str(page.relative_to(ROOT)), page.read_text()))


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (f"{LONG}. {LONG}.\n\n# {LONG} {LONG}\n\n```\n{LONG} {LONG}\n```\n\n    {LONG} {LONG}\n", 0),
        (f"[{LONG}](docs/{LONG.replace(' ', '_')}) `{LONG} {LONG}`", 1),
        (f"{LONG} more.", 1),
        (f"- {LONG}\n  more\n- {LONG}", 1),
        (f"| {LONG} | {LONG} |\n|---|---|\n| {LONG} more | e.g. {LONG} |", 2),
        (f"{LONG} · {LONG}; more", 1),
        (f"<!-- {LONG} -->\n{LONG}.", 0),
    ],
)
def test_a_long_sentence_of_a_page_is_found(text: str, count: int) -> None:
    assert len(list(tidy_rules.long_sentences_of_page("docs/x.md", text))) == count
    assert not list(tidy_rules.long_sentences_of_page("CHANGELOG.md", text))


def test_pages_lead_to_what_is_there() -> None:
    texts = {page: page.read_text() for page in PAGES}
    targets = targets_of((ROOT / "Makefile").read_text())
    assert "test" in targets
    assert not [line for page in PAGES for line in lost_links(page, texts, targets)]


@pytest.mark.parametrize(
    ("text", "lost"),
    [
        ("[a](#the-log)", ""),
        ("[a](y.md#a-b), [b](y.md), `make test`, `make soak X=1`, [c](https://example.org/#no), make it", ""),
        ("[a](#a-log)", "no heading #a-log"),
        ("[a](z.md)", "no z.md"),
        ("[a](y.md#a_c)", "no heading #a_c"),
        ("`make chaoss`", "no target chaoss"),
        ("    make tests", "no target tests"),
    ],
)
def test_a_link_that_leads_nowhere_is_found(text: str, lost: str, tmp_path: Path) -> None:
    page, other = tmp_path / "x.md", tmp_path / "y.md"
    texts = {page: f"# The log\n\n{text}\n", other: "## `A` [b](x.md)\n"}
    for path, written in texts.items():
        path.write_text(written)
    found = list(lost_links(page, texts, targets_of("test: unit\n\ttrue\nsoak chaos:\n")))
    assert [lost in line for line in found] == ([True] if lost else [])


def test_pages_with_long_sentences_are_there_and_have_some() -> None:
    for name in tidy_rules.LONG_STILL:
        assert list(tidy_rules.long_sentences_of_page(f"./{name}", (ROOT / name).read_text())), name


def test_documents_and_the_contract_say_one_word_for_one_thing() -> None:
    pages = [*PAGES, *ROOT.glob("proto/**/*.proto")]
    assert len(pages) > 20
    history = ROOT / "CHANGELOG.md"
    assert not [line for page in pages if page != history for line in tidy_rules.words_with_others(page, page.read_text())]


LOST_HEAD = re.compile(r"\(#\d+(?:, #\d+)*\)\.\s+[a-z].*")
"""Behind the end of an entry: the rest of one whose first lines a merge has put elsewhere."""


@pytest.mark.parametrize(
    ("text", "is_whole"),
    [
        ("- A is quicker (#1, #2).\n- `b` is back. B,\n  too (#3).\n\n### Changed\n", True),
        ("- A is quicker (#1, #2).\n  through less. B is back (#3).\n", False),
    ],
)
def test_an_entry_that_has_lost_its_first_lines_is_found(text: str, is_whole: bool) -> None:
    assert (LOST_HEAD.search(text) is None) is is_whole


def test_entries_of_the_changelog_have_their_first_lines() -> None:
    assert not LOST_HEAD.findall((ROOT / "CHANGELOG.md").read_text())


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("### Fixed\n\n#### Pop\n\n- A (#1).\n- B\n  C.\n", ""),
        ("### Fixed\n\n- A (#1).\n\n#### Pop\n\n- B.\n", "without a subject: - A (#1)."),
        ("### Fixed\n\n#### Pop\n\n- A\n  b.\n\n### Changed\n\n#### Pop\n\n- A b.\n", "twice: - A b."),
        ("### Added\n\n#### Pop\n\n- A.\n\n### Added\n\n#### Pop\n\n- B.\n", "twice: ### Added"),
    ],
)
def test_an_entry_of_the_changelog_that_stands_twice_or_nowhere_is_found(text: str, found: str) -> None:
    assert list(tidy_rules.misplaced_entries(text)) == ([found] if found else [])


def test_entries_of_the_changelog_stand_once_and_by_subject() -> None:
    """Two branches that both write the page make one with everything twice, if they are merged by `union`."""
    assert not list(tidy_rules.misplaced_entries((ROOT / "CHANGELOG.md").read_text()))


def test_every_rule_has_something_planted() -> None:
    assert {rule for rule, _, _ in PLANTED} == set(RULES)


def test_importing_the_sdk_does_not_import_grpc() -> None:
    code = "import sys, protomq; protomq.Producer, protomq.PullConsumer; sys.exit('grpc' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_server_starts_without_what_only_some_servers_need() -> None:
    seldom = ("importlib.metadata", "http.server", "opentelemetry.sdk", "wasmtime", "pydantic")
    code = (
        "import sys\n"
        "import protomq_cli.standalone\n"
        f"sys.exit(str([name for name in {seldom} if name in sys.modules] or ''))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert not done.stderr.strip()


@pytest.mark.parametrize("package", ["protomq", "protomq_broker", "protomq_namesrv", "protomq_runtime", "protomq_spark"])
def test_a_package_says_the_version_that_it_is_installed_as(package: str) -> None:
    folder = ROOT / FOLDERS[package]
    project = tomllib.loads((folder.parent / "pyproject.toml").read_text())
    found = re.search(r'^__version__ = "(.+)"$', (folder / "__init__.py").read_text(), re.MULTILINE)
    assert found is not None
    assert found[1] == project["project"]["version"]
