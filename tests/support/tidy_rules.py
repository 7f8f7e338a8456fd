"""The rules of the tree that a machine can judge. Each takes the packages and gives what breaks it, a line for each.

    imports      packages point one way, modules in no circle, the store's layers downwards; the store knows neither gRPC nor asyncio;
                 whoever uses the SDK uses its public names
    clocks       read where `CLOCKS` says, random numbers drawn where `RANDOMNESS` says
    threads      started where `THREADS` says
    words        one word for one thing (CONTRIBUTING.md), comments above the code that they are about, sentences that end in time
    the rest     no print in libraries and services, no other programs, nothing loaded by name

An entry of a table that nothing needs any more breaks its rule too.
"""

from __future__ import annotations

import ast
import graphlib
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

from tests.support.sentences import (
    WORDS_MAX,
    Sentence,
    docstrings_of,
    messages_of,
    sentences_of_docstring,
    sentences_of_document,
)

FOLDERS: Final = {
    "protomq": "clients/python/protomq",
    "protomq_runtime": "services/runtime/protomq_runtime",
    "protomq_namesrv": "services/namesrv/protomq_namesrv",
    "protomq_ha": "services/ha/protomq_ha",
    "protomq_broker": "services/broker/protomq_broker",
    "protomq_spark": "clients/spark/protomq_spark",
    "protomq_cli": "cli/protomq_cli",
}
MAY_IMPORT: Final = {
    "protomq": {"protomq"},
    "protomq_runtime": {"protomq_runtime", "protomq"},
    "protomq_namesrv": {"protomq_namesrv", "protomq_runtime", "protomq"},
    "protomq_ha": {"protomq_ha"},
    "protomq_broker": {"protomq_broker", "protomq_ha", "protomq_runtime", "protomq"},
    "protomq_spark": {"protomq_spark", "protomq"},
    "protomq_cli": set(FOLDERS),
}
LATE_IMPORTS: Final = {"protomq.__main__": "protomq_cli"}
"""What may import upwards: it hands over to the command line where that is installed."""
SDK_FOR_SERVERS: Final = ("protomq.v1", "protomq.wire")
"""What a server may use of the SDK: stubs and bytes, no client."""
USERS_OF_THE_SDK: Final = (
    "clients/spark", "cli", "tools", "examples", "tests/bench", "tests/examples",
)  # fmt: skip
"""Folders in which the SDK has no private names: what they need others need too."""
SERVICES: Final = ("protomq_runtime", "protomq_namesrv", "protomq_ha", "protomq_broker")
STORE: Final = "protomq_broker.store"
STORE_LAYERS: Final = ("files", "log", "queues", "index", "state", "timer", "start", "housekeeping", "", "tools")
"""The folders of the store, lowest first; "" is what joins them: the modules beside the folders."""
STORE_VALUES: Final = ("errors", "config", "derived")
"""Modules beside the folders that any layer may use."""

CLOCKS: Final = {
    "protomq_runtime.clock": "hands time in to all that is not named here",
    "protomq_runtime.call": "deadlines of calls",
    "protomq_runtime.grpc_server": "deadlines of calls",
    "protomq_runtime.lane": "its event loop",
    "protomq_runtime.lane_calls": "deadlines of calls",
    "protomq_runtime.remoting_client": "deadlines of calls",
    "protomq_runtime.remoting_server": "its event loop",
    "protomq_runtime.server": "the grace of a stop",
    "protomq_runtime.telemetry_flush": "the grace of a stop",
    "protomq_runtime.testing": "a lane that runs when a test says so",
    "protomq_broker.admin_service": "deadlines of calls",
    "protomq_broker.broker": "how long a start waits",
    "protomq_broker.filtered_pulls": "how long a filter may keep its lane",
    "protomq_broker.name_check": "how long a start waits",
    "protomq_broker.plain_body_workers": "deadlines of calls",
    "protomq_broker.registration": "the grace of a stop",
    "protomq_broker.said_once": "how often a line is logged",
    "protomq_broker.store.housekeeping.housekeeping": "the hour of a time that was handed in",
    "protomq_broker.write_permit": "deadlines of calls",
}
"""Of the services and the wire: modules that read a clock, and what for. All others are given one, so that tests can move it."""
CLOCK_MODULES: Final = ("time", "datetime")
RANDOMNESS: Final = {
    "protomq_broker.broker": "the store's id and incarnations, handed in to the store",
    "protomq_broker.elected_broker": "the number of an election that has none",
    "protomq_broker.send_service": "the id of the broker as a producer",
    "protomq_broker.testing.simdisk": "what a power cut leaves, by a seed that is handed in",
}
"""Of the services and the wire: modules that draw random numbers."""
RANDOM_MODULES: Final = ("random", "secrets", "uuid", "os.urandom")
THREADS: Final = {
    "protomq_runtime.lane": "a lane",
    "protomq_runtime.metrics_page": "the page's server",
    "protomq_runtime.remoting_server": "the acceptor",
    "protomq_runtime.server": "waits for threads without holding up the event loop",
    "protomq_runtime.telemetry_flush": "exporters that may hang at the end",
    "protomq_broker.filters.filter_book": "filters that are compiled",
    "protomq_broker.confirmed_file": "writes down now and then what is confirmed",
    "protomq_broker.elected_broker": "opens and closes stores without holding up the event loop",
    "protomq_broker.filter_follower": "copies the filter modules of the master",
    "protomq_broker.leadership_driver": "asks etcd, and looks at the clock",
    "protomq_broker.ha_follower": "fetches the log of the master",
    "protomq_broker.replica_healing": "fetches from a replica what is damaged",
    "protomq_broker.broker_process": "starts and stops without holding up the event loop",
    "protomq_broker.name_check": "asks all name servers at once",
    "protomq_broker.plain_body_workers": "bodies to unpack",
    "protomq_broker.registration": "one for each name server",
    "protomq_broker.timer_mover": "delivers what is due",
    "protomq_broker.store.log.flusher": "flusher and housekeeping of a store",
    "protomq._async_steps": "a function that blocks",
    "protomq._daemon_threads": "functions that may never return",
    "protomq._grpc_transport": "closes a channel whose calls may never end",
    "protomq._loop_watch": "what blocks an event loop",
    "protomq._member_stand_in": "the calls of members whose event loop is blocked",
    "protomq._send_lines": "lines and their senders",
    "protomq._end_lines": "goes on in the place of a caller that was interrupted",
    "protomq._member_thread": "the calls of a member of a group",
    "protomq._pull_multiplexer": "pulls of a consumer",
    "protomq._push_consumer": "its poll, its listeners, what goes back",
    "protomq._request_calls": "callers that wait for replies, one thread for each broker",
    "protomq._routes": "a route that is refreshed",
    "protomq._told_ends": "decisions on their way",
    "protomq._trace": "traces on their way",
    "protomq._transaction_producer": "what brokers ask, one thread for each",
    "protomq.testing.broker": "brokers started from asyncio, and their watchdog",
    "protomq.testing.fakes": "the proxy's connections",
    "protomq_spark.pipelines.report": "the progress of a query",
    "protomq_spark.pulling": "answers that are read ahead",
    "protomq_spark.sender": "requests in flight",
    "protomq_cli.bench_loads": "the receiver of a measurement",
    "protomq_cli.child": "the watchdog of a server that starts",
    "protomq_cli.completion": "a broker that may not answer a shell's question",
    "protomq_cli.load": "callers of a measurement",
    "protomq_cli.side_by_side": "questions to several brokers",
    "protomq_cli.worker_metrics": "the page's server",
    "protomq_cli.worker_process": "tells the supervisor how it stands",
}
"""Modules that start threads, and what these are for."""
THREAD_MAKERS: Final = (
    "threading.Thread",
    "threading.Timer",
    "_thread.start_new_thread",
    "concurrent.futures.ThreadPoolExecutor",
    "concurrent.futures.ProcessPoolExecutor",
    "multiprocessing.Process",
    "asyncio.to_thread",
)
WORDS: Final = {
    r"\banew\b": "rebuild, rewrite, again",
    r"\bpass(ed|es|ing)? over(?! the)\b": "skip",
    r"\bspoil(t|ed)\b": "failed, damaged",
    r"\b(at most|after|for) so (many|much|long)\b": "a number, or its name",
    r"\bin front of\b": "before",
    r"\bfail(s|ed)? of\b": "failed, and why",
    r"\bdeal(s|t)? with\b": "finish, do",
    r"\b(tells?|told) of\b": "report, say, learn",
}
"""Words for which there is a plainer one, or for which the glossary of CONTRIBUTING.md has another; and that one."""
LONG_STILL: Final = {"CHANGELOG.md": "history", "docs/benchmarks.md": "tables of figures", "docs/profiles.md": "a laboratory's book"}
"""Pages whose sentences may be longer than `WORDS_MAX`, and why."""

SECTIONS_BY_SUBJECT: Final = ("### Added", "### Changed", "### Fixed")
"""Of the changelog: a reader looks for what concerns one part of the system."""

LOADERS: Final = ("eval", "exec", "os.system", "os.popen", "yaml.load")
PROGRAM_MODULES: Final = ("subprocess", "multiprocessing", "pickle", "marshal", "shelve")


@dataclass(frozen=True)
class Module:
    """A module of the tree; `name` is absolute, a package's is that of its folder."""

    name: str
    path: Path

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.path.read_text("utf-8"))

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """All of the tree. To walk it takes longer than what the rules look for there."""
        return tuple(ast.walk(self.tree))

    @property
    def package(self) -> str:
        """The outermost."""
        return self.name.partition(".")[0]

    def origin(self, node: ast.ImportFrom) -> str:
        """Absolute name of what `from ... import` names first."""
        folder = self.name.split(".")
        if self.path.name != "__init__.py":
            folder.pop()
        parents = folder[: len(folder) - node.level + 1] if node.level else []
        return ".".join([*parents, *([node.module] if node.module else [])])

    @cached_property
    def imports(self) -> tuple[str, ...]:
        """Absolute names of all that is imported: of a module, and of each name in it."""
        found = []
        for node in self.nodes:
            if isinstance(node, ast.Import):
                found += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                origin = self.origin(node)
                found += [origin, *(f"{origin}.{alias.name}" for alias in node.names)]
        return tuple(found)

    @cached_property
    def uses(self) -> frozenset[str]:
        """Absolute names of what it uses, called or not, whatever it calls them: `time.monotonic`, `threading.Thread`, `print`."""
        named: dict[str, str] = {}
        for node in self.nodes:
            if isinstance(node, ast.Import):
                named |= {alias.asname: alias.name for alias in node.names if alias.asname}
            elif isinstance(node, ast.ImportFrom):
                origin = self.origin(node)
                named |= {alias.asname or alias.name: f"{origin}.{alias.name}" for alias in node.names}
        found = set()
        for node in self.nodes:
            words: list[str] = []
            while isinstance(node, ast.Attribute):
                words.append(node.attr)
                node = node.value
            if isinstance(node, ast.Name):
                found.add(".".join((named.get(node.id, node.id), *reversed(words))))
        return frozenset(found)


Modules = Mapping[str, Module]
Rule = Callable[[Modules], Iterator[str]]


def modules_of(root: Path) -> dict[str, Module]:
    """All modules of the packages that there are, but for generated ones."""
    found = {}
    for package, folder in FOLDERS.items():
        for path in sorted((root / folder).rglob("*.py")):
            parts = path.relative_to(root / folder).with_suffix("").parts
            if "v1" not in parts:
                name = ".".join((package, *(part for part in parts if part != "__init__")))
                found[name] = Module(name, path)
    return found


def users_of_the_sdk(root: Path) -> dict[str, Module]:
    """All modules that stand on the SDK; their names are those of their paths."""
    return {
        name: Module(name, path)
        for folder in USERS_OF_THE_SDK
        for path in sorted((root / folder).rglob("*.py"))
        if (name := ".".join(path.relative_to(root).with_suffix("").parts))
    }


def is_under(name: str, prefixes: Collection[str]) -> bool:
    """Whether it is one of them, or stands in one."""
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


# -- imports -----------------------------------------------------------------------------------------------------------


def packages_point_one_way(modules: Modules) -> Iterator[str]:
    for module in modules.values():
        for name in module.imports:
            top = name.partition(".")[0]
            if top not in FOLDERS or LATE_IMPORTS.get(module.name) == top:
                continue
            if top not in MAY_IMPORT[module.package]:
                yield f"{module.path}: imports {name}"
            elif module.package in SERVICES and top == "protomq" and name != "protomq":
                if not is_under(name, SDK_FOR_SERVERS):
                    yield f"{module.path}: a server imports {name} of the SDK"


def no_module_imports_itself_through_others(modules: Modules) -> Iterator[str]:
    """Imports in functions are late, and make no circle; those for type checkers count."""
    graph = {name: set(_early_imports(module, modules)) - {name} for name, module in modules.items()}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        circle = list(error.args[1])
        yield f"{modules[circle[0]].path}: a circle of imports: " + " <- ".join(circle)


def _early_imports(module: Module, modules: Modules) -> Iterator[str]:
    """Those of `modules` that it imports when it is imported. `from package import module` is of the module, not of the package."""
    for node in _early_statements(module.tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
            continue
        origin = module.origin(node)
        for alias in node.names:
            name = f"{origin}.{alias.name}"
            found = name if name in modules else origin
            if found in modules:
                yield found


def _early_statements(tree: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from _early_statements(node)


def layers_of_the_store_point_one_way(modules: Modules) -> Iterator[str]:
    for module in _store_of(modules):
        own = _layer(module.name)
        if own in STORE_VALUES:
            own = ""
        for name in module.imports:
            if is_under(name, (STORE,)) and name != STORE and name in modules:
                layer = _layer(name)
                if layer not in STORE_VALUES and STORE_LAYERS.index(layer) > STORE_LAYERS.index(own):
                    yield f"{module.path}: imports {name} of a layer above"


def _layer(name: str) -> str:
    """Of a module of the store; those that any layer may use are layers of their own."""
    first = name.removeprefix(STORE).lstrip(".").partition(".")[0]
    return first if first in STORE_LAYERS or first in STORE_VALUES else ""


def the_store_knows_neither_grpc_nor_asyncio_nor_the_runtime(modules: Modules) -> Iterator[str]:
    for module in _store_of(modules):
        for name in module.imports:
            if is_under(name, ("grpc", "asyncio", "protomq_runtime")):
                yield f"{module.path}: imports {name}"
        if any(isinstance(node, ast.AsyncFunctionDef | ast.Await) for node in module.nodes):
            yield f"{module.path}: has coroutines"


def _store_of(modules: Modules) -> Iterator[Module]:
    return (module for name, module in modules.items() if is_under(name, (STORE,)))


def users_of_the_sdk_use_its_public_names(modules: Modules) -> Iterator[str]:
    for module in modules.values():
        for name in module.imports:
            top, *parts = name.split(".")
            if top == "protomq" and any(part.startswith("_") and not part.startswith("__") for part in parts):
                yield f"{module.path}: imports {name}, which is private"


# -- clocks, randomness, threads ---------------------------------------------------------------------------------------


def clocks_are_read_in_their_place(modules: Modules) -> Iterator[str]:
    yield from _only_in(CLOCKS, _handed_their_time(modules), _reads_a_clock, "reads a clock")
    for module in _store_of(modules):
        for name in module.uses:
            if is_under(name, ("time",)) and name not in ("time", "time.localtime"):
                yield f"{module.path}: the store uses {name}"


def random_numbers_are_drawn_in_their_place(modules: Modules) -> Iterator[str]:
    yield from _only_in(RANDOMNESS, _handed_their_time(modules), _is_random, "draws random numbers")


def threads_are_started_in_their_place(modules: Modules) -> Iterator[str]:
    yield from _only_in(THREADS, modules, _starts_threads, "starts threads")


def _handed_their_time(modules: Modules) -> Modules:
    """Services, and the part of the SDK that they share."""
    return {
        name: module
        for name, module in modules.items()
        if module.package in SERVICES or is_under(name, ("protomq.wire",))
    }


def _reads_a_clock(module: Module) -> bool:
    imports = any(is_under(name, CLOCK_MODULES) for name in module.imports)
    return imports or any(name.endswith("loop.time") for name in module.uses)


def _is_random(module: Module) -> bool:
    imports = any(is_under(name, RANDOM_MODULES) for name in module.imports)
    return imports or "os.urandom" in module.uses


def _starts_threads(module: Module) -> bool:
    return any(
        name in THREAD_MAKERS or name.endswith(".run_in_executor") for name in module.uses
    )


def _only_in(
    places: Mapping[str, str], modules: Modules, does: Callable[[Module], bool], what: str
) -> Iterator[str]:
    for name, module in modules.items():
        if does(module) != (name in places):
            yield f"{module.path}: {what}" if name not in places else f"{name} is listed, and no longer {what}"


# -- words -------------------------------------------------------------------------------------------------------------


def one_word_names_one_thing(modules: Modules) -> Iterator[str]:
    for module in modules.values():
        yield from words_with_others(module.path, module.path.read_text("utf-8"))


def words_with_others(path: Path, text: str) -> Iterator[str]:
    """A line for each word of `WORDS` that stands in a text: source or document."""
    for words, better in WORDS.items():
        for match in re.finditer(words, text, re.IGNORECASE):
            line = text.count("\n", 0, match.start()) + 1
            yield f"{path}:{line}: {match.group()!r}: say {better}"


def comments_stand_above_the_code(modules: Modules) -> Iterator[str]:
    """Not behind the bracket that ends a statement of several lines, nor behind a signature."""
    for module in modules.values():
        lines = module.path.read_text("utf-8").splitlines()
        for number, line in enumerate(lines, 1):
            if match := re.match(r"\s*([)\]}]+:?|(?:async )?def .*:|class .*:) +# (?!noqa|type:|fmt:)", line):
                yield f"{module.path}:{number}: a comment behind {match[1]!r}: put it above"


def sentences_of_docstrings_end_in_time(modules: Modules) -> Iterator[str]:
    """Those of every docstring; pages: `long_sentences_of_page`."""
    for module in modules.values():
        for line, text in docstrings_of(module.tree, private=True):
            for sentence in sentences_of_docstring(text):
                yield from _long(f"{module.path}:{line + sentence.line - 1}", sentence)


def sentences_of_messages_end_in_time(modules: Modules) -> Iterator[str]:
    """Errors that are raised, log lines, helps of options."""
    for module in modules.values():
        for line, text in messages_of(module.tree):
            for sentence in sentences_of_docstring(text):
                yield from _long(f"{module.path}:{line}", sentence)


def long_sentences_of_page(name: str, text: str) -> Iterator[str]:
    """`name`: of a page of Markdown, from the root of the tree."""
    if name not in LONG_STILL:
        for sentence in sentences_of_document(text):
            yield from _long(f"{name}:{sentence.line}", sentence)


def misplaced_entries(changelog: str) -> Iterator[str]:
    """Entries of a changelog, and its headings, that stand twice; entries of Added, Changed and Fixed that stand under no subject."""
    heading = subject = ""
    found: list[str] = []
    for line in changelog.splitlines():
        if line.startswith("#### "):
            subject = line
        elif line.startswith("### "):
            heading, subject = line, ""
            found.append(line)
        elif line.startswith("- "):
            found.append(line)
            if not subject and heading in SECTIONS_BY_SUBJECT:
                yield f"without a subject: {line}"
        elif line.startswith("  ") and found:
            found[-1] += " " + line.strip()
    for text, count in Counter(found).items():
        if count > 1:
            yield f"twice: {text}"


def _long(place: str, sentence: Sentence) -> Iterator[str]:
    if sentence.words > WORDS_MAX:
        yield f"{place}: {sentence.words} words, {WORDS_MAX} at most: make two sentences of {sentence.text!r}"


# -- the rest ----------------------------------------------------------------------------------------------------------


def libraries_and_services_do_not_print(modules: Modules) -> Iterator[str]:
    for module in modules.values():
        if module.package in ("protomq", *SERVICES) and module.path.name != "__main__.py":
            if "print" in module.uses:
                yield f"{module.path}: prints"


def services_start_no_programs_and_load_nothing_by_name(modules: Modules) -> Iterator[str]:
    for module in modules.values():
        if module.package in SERVICES:
            yield from (
                f"{module.path}: imports {name}"
                for name in module.imports
                if is_under(name, PROGRAM_MODULES)
            )
            yield from (f"{module.path}: uses {name}" for name in module.uses if name in LOADERS)


RULES: Final[tuple[Rule, ...]] = (
    packages_point_one_way,
    no_module_imports_itself_through_others,
    layers_of_the_store_point_one_way,
    the_store_knows_neither_grpc_nor_asyncio_nor_the_runtime,
    clocks_are_read_in_their_place,
    random_numbers_are_drawn_in_their_place,
    threads_are_started_in_their_place,
    one_word_names_one_thing,
    comments_stand_above_the_code,
    sentences_of_docstrings_end_in_time,
    sentences_of_messages_end_in_time,
    libraries_and_services_do_not_print,
    services_start_no_programs_and_load_nothing_by_name,
)
