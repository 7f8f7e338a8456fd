"""Configuration from every source, and an error that names the place for every mistake."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Literal

import pytest

from protomq_runtime.config import (
    ConfigError,
    load_config,
    parse_size_bytes,
    parse_time_ms,
)


class FlushMode(Enum):
    ASYNC_FLUSH = "async"
    SYNC_FLUSH = "sync"


@dataclass(frozen=True)
class LaneSection:
    threads: int = 1
    depth_max: int = 100

    def __post_init__(self) -> None:
        if self.threads < 1:
            raise ValueError(f"threads must be at least 1, it is {self.threads}")


@dataclass(frozen=True)
class StoreSection:
    flush_mode: FlushMode = FlushMode.ASYNC_FLUSH
    segment_size_bytes: int = 1 << 30
    retention_ms: int = 72 * 3_600_000
    disk_ratio: float = 0.75
    corruption: Literal["refuse", "quarantine"] = "refuse"
    root: Path = Path("store")
    scrub_bytes_per_s: int = 8 << 20


@dataclass(frozen=True)
class Config:
    name: str = "broker"
    auto_create: bool = True
    namesrv: tuple[str, ...] = ()
    advertised: str | None = None
    store: StoreSection = StoreSection()
    lanes: Mapping[str, LaneSection] = field(default_factory=dict)


def load(
    path: Path | None = None, environment: Mapping[str, str] | None = None, **flags: object
) -> Config:
    dotted = {key.replace("__", "."): value for key, value in flags.items()}
    return load_config(Config, path, environment=environment or {}, flags=dotted)


def write(tmp_path: Path, name: str, text: str) -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


YAML = """
name: broker-a
auto_create: no
namesrv: [a:9876, b:9876]
store:
  flush_mode: SYNC_FLUSH
  segment_size_bytes: 64MiB
  retention_ms: 12h
lanes:
  send: {depth_max: 7}
"""
TOML = """
name = "broker-a"
auto_create = false
namesrv = ["a:9876", "b:9876"]
[store]
flush_mode = "sync"
segment_size_bytes = 67108864
retention_ms = 43200000
[lanes.send]
depth_max = 7
"""


def test_without_anything_the_defaults_stand():
    assert load() == Config()


@pytest.mark.parametrize(("name", "text"), [("a.yaml", YAML), ("a.yml", YAML), ("a.toml", TOML)])
def test_a_file_is_read(tmp_path, name, text):
    assert load(write(tmp_path, name, text)) == Config(
        "broker-a",
        False,
        ("a:9876", "b:9876"),
        None,
        StoreSection(FlushMode.SYNC_FLUSH, 64 << 20, 12 * 3_600_000),
        {"send": LaneSection(depth_max=7)},
    )


def test_environment_wins_over_the_file_and_flags_over_both(tmp_path):
    path = write(tmp_path, "a.yaml", YAML)
    variables = {
        "PROTOMQ_NAME": "broker-b",
        "PROTOMQ_STORE_FLUSH_MODE": "async_flush",
        "PROTOMQ_NAMESRV": "c:1, d:2",
    }
    config = load(path, variables, name="broker-c", advertised=None, store__disk_ratio=0.5)
    assert config.name == "broker-c"
    assert config.store.flush_mode is FlushMode.ASYNC_FLUSH
    assert config.store.disk_ratio == 0.5
    assert config.store.segment_size_bytes == 64 << 20
    assert config.namesrv == ("c:1", "d:2")


def test_values_of_the_environment_become_what_the_fields_are():
    variables = {
        "PROTOMQ_AUTO_CREATE": "off",
        "PROTOMQ_ADVERTISED": "host:1",
        "PROTOMQ_STORE_SEGMENT_SIZE_BYTES": "1.5 GiB",
        "PROTOMQ_STORE_RETENTION_MS": "90",
        "PROTOMQ_STORE_ROOT": "/data",
    }
    config = load(None, variables)
    assert (config.auto_create, config.advertised) == (False, "host:1")
    assert config.store == StoreSection(
        segment_size_bytes=3 << 29, retention_ms=90, root=Path("/data")
    )


def test_a_flag_reaches_into_a_table_of_sections():
    assert load(lanes__send__threads=3).lanes == {"send": LaneSection(3)}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nam: x", r"a\.yaml: nam: there is no such field; do you mean name\?"),
        (
            "store: {flush_mod: x}",
            r"a\.yaml: store\.flush_mod: there is no such field; do you mean flush_mode\?",
        ),
        ("name: a\nname: b", r"a\.yaml: name stands twice .*line 2"),
        ("store: 3", r"a\.yaml: store: a section is expected, this is 3"),
        (
            "store: {flush_mode: never}",
            r"store\.flush_mode: one of ASYNC_FLUSH, SYNC_FLUSH is expected, this is 'never'",
        ),
        (
            "store: {segment_size_bytes: 3 pounds}",
            r"store\.segment_size_bytes: '3 pounds' is no size; units are B, KiB",
        ),
        ("store: {retention_ms: soon}", r"store\.retention_ms: 'soon' is not a number with a unit"),
        (
            "store: {segment_size_bytes: 1.5}",
            r"segment_size_bytes: a whole number is expected, this is 1\.5",
        ),
        ("store: {disk_ratio: true}", r"disk_ratio: a number is expected, this is True"),
        ("store: {segment_size_bytes: .nan}", r"segment_size_bytes: a number is expected, this is nan"),
        ("store: {segment_size_bytes: 1e999}", r"segment_size_bytes: a number is expected, this is inf"),
        ("auto_create: perhaps", r"auto_create: true or false is expected, this is 'perhaps'"),
        ("name: [a]", r"name: a text is expected, this is \['a'\]"),
        ("namesrv: 3", r"namesrv: a list is expected, this is 3"),
        ("lanes: {send: {threads: 0}}", r"a\.yaml: lanes\.send\.threads must be at least 1, it is 0"),
        ("lanes: 3", r"lanes: a section is expected, this is 3"),
        ("[1, 2]", r"a\.yaml: sections with fields are expected, this is a list"),
        ("a: b: c", r"a\.yaml: mapping values are not allowed here in line 1, column 5: a"),
    ],
)
def test_a_mistake_in_a_file_is_named_with_its_place(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message) as caught:
        load(write(tmp_path, "a.yaml", text))
    assert "\n" not in str(caught.value)


def test_an_empty_path_is_not_the_current_folder(tmp_path):
    with pytest.raises(ConfigError, match="a path is expected, this is empty"):
        load(write(tmp_path, "a.yaml", "store: {root: ''}"))
    assert load(write(tmp_path, "b.yaml", "store: {root: .}")).store.root == Path()


def test_a_mistake_elsewhere_is_named_with_its_place(tmp_path):
    with pytest.raises(ConfigError, match="environment: PROTOMQ_AUTO_CREATE: true or false"):
        load(None, {"PROTOMQ_AUTO_CREATE": "x"})
    with pytest.raises(ConfigError, match=r"flag: store\.disk_ratio: a number"):
        load(store__disk_ratio="x")
    with pytest.raises(ConfigError, match=r"flag: store\.nothing: there is no such field"):
        load(store__nothing=1)
    with pytest.raises(ConfigError, match=r"none\.yaml: cannot be read"):
        load(tmp_path / "none.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"binary\.yaml: cannot be read: it is no text in UTF-8$"):
        load(tmp_path / "binary.yaml")
    with pytest.raises(ConfigError, match=r"\.yaml, \.yml or \.toml"):
        load(write(tmp_path, "a.ini", ""))
    with pytest.raises(ConfigError, match=r"a\.toml"):
        load(write(tmp_path, "a.toml", "a = "))


@dataclass(frozen=True)
class PageSection:
    listen: str = ""
    series_max: int = 1

    def __post_init__(self) -> None:
        if self.listen and ":" not in self.listen:
            raise ValueError(f"listen: {self.listen!r} has no port")
        if self.series_max < 0:
            raise ValueError(f"page.series_max is {self.series_max}; it must be 0 or more")


@dataclass(frozen=True)
class Related:
    master: str = ""
    page: PageSection = PageSection()

    def __post_init__(self) -> None:
        if self.master and self.page.listen:
            raise ValueError("master and page.listen exclude each other")


@pytest.mark.parametrize(
    ("text", "environment", "flags", "message"),
    [
        (None, {"PROTOMQ_PAGE_LISTEN": "1"}, {}, "environment: PROTOMQ_PAGE_LISTEN: page.listen: '1' has no port"),
        (None, {"PROTOMQ_PAGE_SERIES_MAX": "-1"}, {}, "environment: PROTOMQ_PAGE_SERIES_MAX: page.series_max is -1; it must be 0 or more"),
        (None, {}, {"page.listen": "1"}, "flag: page.listen: '1' has no port"),
        ("page: {listen: '1'}", {}, {}, "a.yaml: page.listen: '1' has no port"),
        ("page: {listen: 'h:1'}", {"PROTOMQ_PAGE_LISTEN": "1"}, {}, "environment: PROTOMQ_PAGE_LISTEN: page.listen: '1' has no port"),
        (
            "page: {listen: 'h:1'}", {"PROTOMQ_MASTER": "x"}, {},
            "environment: PROTOMQ_MASTER, a.yaml: master and page.listen exclude each other",
        ),
        ("page: {listen: 'h:1'}\nmaster: x", {}, {}, "a.yaml: master and page.listen exclude each other"),
    ],
)  # fmt: skip
def test_a_value_out_of_range_is_named_with_its_place(tmp_path, text, environment, flags, message):
    path = None if text is None else write(tmp_path, "a.yaml", text)
    with pytest.raises(ConfigError) as caught:
        load_config(Related, path, environment=environment, flags=flags)
    assert str(caught.value).replace(f"{tmp_path}/", "") == message


def test_a_field_with_named_choices_takes_one_of_them():
    assert load(None, {"PROTOMQ_STORE_CORRUPTION": "quarantine"}).store.corruption == "quarantine"
    with pytest.raises(ConfigError, match="one of refuse, quarantine is expected, this is 'maybe'"):
        load(store__corruption="maybe")


def test_an_empty_file_is_a_file(tmp_path):
    assert load(write(tmp_path, "a.yaml", "")) == Config()


def test_a_rate_is_a_size(tmp_path):
    config = load(write(tmp_path, "a.yaml", "store: {scrub_bytes_per_s: 4KiB}"))
    assert config.store.scrub_bytes_per_s == 4096


@pytest.mark.parametrize("text", ["1e-6", "1E-06", "1.0e-6", "0.000001", "'1e-6'"])
def test_a_number_may_have_an_exponent(tmp_path, text):
    # YAML 1.1 takes an exponent behind a number without a point for text.
    assert load(write(tmp_path, "a.yaml", f"store: {{disk_ratio: {text}}}")).store.disk_ratio == 1e-6
    assert load(None, {"PROTOMQ_STORE_DISK_RATIO": text.strip("'")}).store.disk_ratio == 1e-6


def test_sizes_and_times_have_units():
    assert [parse_size_bytes(text) for text in ("7", "64KiB", "1.5 MiB", "2gib")] == [
        7,
        65536,
        3 << 19,
        2 << 30,
    ]
    assert [parse_time_ms(text) for text in ("250ms", "15s", "10min", "72h", "3d")] == [
        250,
        15e3,
        6e5,
        2592e5,
        2592e5,
    ]
    for text in ("15", "s", "1 fortnight"):
        with pytest.raises(ValueError, match=re.escape(text)):
            parse_time_ms(text)
