"""docs/settings.md has every setting of the servers, with the defaults of the code."""

from __future__ import annotations

import pytest

from protomq_runtime.config import load_config, variable_of, variables_of
from tools.settings_docs import PAGE, ROCKETMQ, SERVERS, default_text, settings_of, written_anew


def test_the_page_about_settings_has_the_tables_of_the_source() -> None:
    page = PAGE.read_text("utf-8")
    assert page == written_anew(page), "run .venv/bin/python tools/settings_docs.py"
    changed = page.replace("| `store.sync_flush` |", "| `store.sync` |")
    assert changed != written_anew(changed) == page


@pytest.mark.parametrize("title", SERVERS)
def test_each_setting_is_there_with_what_it_means_and_a_default_that_a_server_reads(title: str) -> None:
    config, settings = SERVERS[title], list(settings_of(SERVERS[title]))
    assert sorted(variable_of(each.key) for each in settings) == sorted(variables_of(type(config)))
    assert all(each.meaning for each in settings)
    assert set(ROCKETMQ[title]) <= {each.key for each in settings}
    environment = {variable_of(each.key): each.default for each in settings if each.default}
    assert load_config(type(config), environment=environment) == config


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("x_ms", 43_200_000, "12h"),
        ("x_ms", 90_000, "90s"),
        ("x_ms", 0, "0"),
        ("x_size_bytes", 64 << 30, "64GiB"),
        ("x_bytes_per_s", 8 << 20, "8MiB"),
        ("x_count_max", 10_000, "10000"),
        ("x", False, "false"),
        ("x", "", ""),
        ("x", (), ""),
        ("x", 0.75, "0.75"),
    ],
)
def test_a_default_is_written_as_a_file_may_have_it(name: str, value: object, text: str) -> None:
    assert default_text(name, value) == text
