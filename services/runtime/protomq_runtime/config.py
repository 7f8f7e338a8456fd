"""Makes one frozen dataclass, with a section for each component, from a file, the environment and flags.

Later wins: defaults of the dataclass, the file (YAML or TOML), environment variables, flags. `store.flush_mode` in the file is
`PROTOMQ_STORE_FLUSH_MODE` in the environment and `store.flush_mode` among the flags. Every error names the place where the wrong
value stands and what would be right. Sizes may be written `1GiB` in fields that end in `_bytes`, times `15s` in fields that end in
`_ms` or `_s`. Checks of ranges and relations belong into `__post_init__` of the dataclasses: a ValueError there becomes a ConfigError.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import re
import tomllib
import types
import typing
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any, Final, TypeVar

_Config = TypeVar("_Config")

ENVIRONMENT_PREFIX: Final = "PROTOMQ"
_SIZE_UNITS: Final = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
_TIME_UNITS_MS: Final = {"MS": 1.0, "S": 1e3, "M": 60e3, "MIN": 60e3, "H": 3600e3, "D": 86400e3}
_NUMBER_WITH_UNIT: Final = re.compile(r"\s*(-?[0-9][0-9_]*(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")

_FIELD_NAME: Final = re.compile(r"[a-z_][a-z0-9_]*(?:\.[a-z_][a-z0-9_]*)*")


class ConfigError(ValueError):
    """The configuration cannot be used. The message is one line for the operator."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Origin:
    """Where a value comes from, for error messages."""

    source: str
    key: str

    def __str__(self) -> str:
        return f"{self.source}: {self.key}" if self.key else self.source

    def child(self, name: str) -> _Origin:
        return _Origin(self.source, f"{self.key}.{name}" if self.key else name)


def load_config(
    config_class: type[_Config],
    path: Path | str | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, object] | None = None,
) -> _Config:
    """The configuration. `flags` go by dotted name; those that are None were not given. Raises ConfigError."""
    text = None if path is None else _read(Path(path))
    return _build_from(config_class, path, text, environment, flags)


def variables_of(config_class: type[Any]) -> list[str]:
    """The environment variables that `load_config` reads."""
    return [variable_of(key) for key in _leaves(config_class, "")]


def variable_of(key: str) -> str:
    """The environment variable of a field by its dotted name."""
    return f"{ENVIRONMENT_PREFIX}_{key.replace('.', '_').upper()}"


def parse_size_bytes(text: str) -> int:
    """Bytes for `65536`, `64KiB`, `1.5 GiB`. Raises ValueError."""
    number, unit = _number_and_unit(text)
    if unit.upper() not in _SIZE_UNITS:
        raise ValueError(f"{text!r} is no size; units are B, KiB, MiB, GiB, TiB")
    return round(number * _SIZE_UNITS[unit.upper()])


def parse_time_ms(text: str) -> float:
    """Milliseconds for `250ms`, `15s`, `10min`, `72h`, `3d`. Raises ValueError; a bare number has no unit and is none of them."""
    number, unit = _number_and_unit(text)
    if unit.upper() not in _TIME_UNITS_MS:
        raise ValueError(f"{text!r} is no time; units are ms, s, min, h, d")
    return number * _TIME_UNITS_MS[unit.upper()]


def _number_and_unit(text: str) -> tuple[float, str]:
    match = _NUMBER_WITH_UNIT.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a number with a unit")
    return float(match[1]), match[2]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = "it is no text in UTF-8" if isinstance(error, UnicodeDecodeError) else error.strerror or error
        raise ConfigError(f"{path}: cannot be read: {why}") from error


def _build_from(
    config_class: type[_Config],
    path: Path | str | None,
    text: str | None,
    environment: Mapping[str, str] | None,
    flags: Mapping[str, object] | None,
) -> _Config:
    tree: dict[str, Any] = {}
    origins: dict[str, _Origin] = {}
    if text is not None:
        tree = _parse_file(Path(str(path)), text)
        _note_origins(tree, _Origin(str(path), ""), "", origins)
    variables = os.environ if environment is None else environment
    for key in _leaves(config_class, ""):
        name = variable_of(key)
        if name in variables:
            _put(tree, key, variables[name], _Origin("environment", name), origins)
    for key, value in (flags or {}).items():
        if value is not None:
            _put(tree, key, value, _Origin("flag", key), origins)
    built = _build(config_class, tree, "", _Origin(str(path or "configuration"), ""), origins)
    return typing.cast(_Config, built)


def _parse_file(path: Path, text: str) -> dict[str, Any]:
    if path.suffix == ".toml":
        try:
            return tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{path}: {error}") from None
    if path.suffix in (".yaml", ".yml"):
        import yaml  # Only where such a file is used: it costs 20 ms.

        class Loader(yaml.SafeLoader):
            """A key that stands twice is an error: in YAML the last one wins without a word."""

            def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
                names: set[str] = set()
                for key, _ in node.value:
                    if key.value in names:
                        raise yaml.constructor.ConstructorError(
                            None, None, f"{key.value} stands twice", key.start_mark
                        )
                    names.add(key.value)
                return super().construct_mapping(node, deep)

        try:
            tree = Loader(text).get_single_data()
        except yaml.YAMLError as error:
            # The parser was given a text, not a file, and says so with each line and column.
            why = " ".join(str(error).split()).replace('in "<unicode string>", line', "in line")
            raise ConfigError(f"{path}: {why}") from None
        if tree is None:
            return {}
        if not isinstance(tree, dict):
            raise ConfigError(
                f"{path}: sections with fields are expected, this is a {type(tree).__name__}"
            )
        return tree
    raise ConfigError(f"{path}: a configuration is a .yaml, .yml or .toml file")


def _note_origins(
    tree: Mapping[str, Any], origin: _Origin, prefix: str, origins: dict[str, _Origin]
) -> None:
    for name, value in tree.items():
        key = f"{prefix}{name}"
        origins[key] = origin.child(str(name))
        if isinstance(value, dict):
            _note_origins(value, origins[key], f"{key}.", origins)


def _put(
    tree: dict[str, Any], key: str, value: object, origin: _Origin, origins: dict[str, _Origin]
) -> None:
    *sections, name = key.split(".")
    for section in sections:
        child = tree.setdefault(section, {})
        if not isinstance(child, dict):
            raise ConfigError(f"{origin}: {section} is a value, not a section")
        tree = child
    tree[name] = value
    origins[key] = origin


def _leaves(config_class: type[Any], prefix: str) -> list[str]:
    """Dotted names of all fields that are values."""
    leaves = []
    for name, kind in _fields(config_class).items():
        key = f"{prefix}{name}"
        leaves += (
            _leaves(kind, f"{key}.")
            if dataclasses.is_dataclass(kind) and isinstance(kind, type)
            else [key]
        )
    return leaves


def _fields(config_class: type[Any]) -> dict[str, Any]:
    kinds = typing.get_type_hints(config_class)
    return {
        field.name: kinds[field.name] for field in dataclasses.fields(config_class) if field.init
    }


def _build(
    config_class: type[Any],
    tree: object,
    prefix: str,
    origin: _Origin,
    origins: Mapping[str, _Origin],
) -> Any:
    if not isinstance(tree, dict):
        raise ConfigError(f"{origin}: a section is expected, this is {tree!r}")
    fields = _fields(config_class)
    values = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        here = origins.get(key, origin)
        if name not in fields:
            near = difflib.get_close_matches(str(name), fields, 1)
            raise ConfigError(
                f"{here}: there is no such field" + (f"; do you mean {near[0]}?" if near else "")
            )
        values[name] = _convert(fields[name], value, key, here, origins)
    try:
        return config_class(**values)
    except ConfigError:
        raise
    except (ValueError, TypeError) as error:
        raise ConfigError(_with_places(str(error), config_class, prefix, origin, origins)) from None


def _with_places(text: str, config_class: type[Any], prefix: str, origin: _Origin, origins: Mapping[str, _Origin]) -> str:
    """What a dataclass says of its fields, with where the values of those that it names come from."""
    leaves = {f"{prefix}{leaf}" for leaf in _leaves(config_class, "")}
    words = _FIELD_NAME.findall(text)
    keys = [key for word in words for key in (word, f"{prefix}{word}") if key in leaves]
    sources = dict.fromkeys(
        (f"{found.source}: {found.key}" if found.source == "environment" else found.source)
        for key in keys
        if (found := origins.get(key)) is not None
    )
    if not sources:
        return f"{origin}: {text}"
    # The first name is that of the culprit, most often without its section.
    if text.startswith(words[0]) and f"{prefix}{words[0]}" in leaves:
        text = f"{prefix}{text}"
    return f"{', '.join(sources)}: {text}"


def _convert(
    kind: Any, value: Any, key: str, origin: _Origin, origins: Mapping[str, _Origin]
) -> Any:
    """The value as the field's type wants it."""
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _build(kind, value, f"{key}.", origin, origins)
    outer = typing.get_origin(kind)
    arguments = typing.get_args(kind)
    if outer in (typing.Union, types.UnionType):
        if value is None or (isinstance(value, str) and value.lower() in ("none", "null")):
            return None
        (kind,) = [argument for argument in arguments if argument is not type(None)]
        return _convert(kind, value, key, origin, origins)
    if outer is typing.Literal:
        if value not in arguments:
            raise ConfigError(
                f"{origin}: one of {', '.join(map(str, arguments))} is expected, this is {value!r}"
            )
        return value
    if outer is tuple:
        items = (
            [item.strip() for item in value.split(",") if item.strip()]
            if isinstance(value, str)
            else value
        )
        if not isinstance(items, list | tuple):
            raise ConfigError(f"{origin}: a list is expected, this is {value!r}")
        return tuple(_convert(arguments[0], item, key, origin, origins) for item in items)
    if outer is not None and issubclass(outer, Mapping):
        if not isinstance(value, dict):
            raise ConfigError(f"{origin}: a section is expected, this is {value!r}")
        return {
            str(name): _convert(
                arguments[1], item, f"{key}.{name}", origins.get(f"{key}.{name}", origin), origins
            )
            for name, item in value.items()
        }
    try:
        return _convert_scalar(kind, value, key)
    except ValueError as error:
        raise ConfigError(f"{origin}: {error}") from None


def _convert_scalar(kind: Any, value: Any, key: str) -> Any:
    if isinstance(kind, type) and issubclass(kind, Enum):
        for member in kind:
            if value == member.value or (isinstance(value, str) and value.upper() == member.name):
                return member
        raise ValueError(
            f"one of {', '.join(member.name for member in kind)} is expected, this is {value!r}"
        )
    if kind is bool:
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lower() in (
            "true",
            "yes",
            "on",
            "1",
            "false",
            "no",
            "off",
            "0",
        ):
            return value.lower() in ("true", "yes", "on", "1")
        raise ValueError(f"true or false is expected, this is {value!r}")
    if kind in (int, float):
        return _convert_number(kind, value, key)
    if kind is Path and isinstance(value, str | Path):
        if value == "":
            raise ValueError("a path is expected, this is empty; the current folder is '.'")
        return Path(value).expanduser()
    if kind is str and isinstance(value, str | int | float) and not isinstance(value, bool):
        return str(value)
    name = {Path: "path", str: "text"}.get(kind) or getattr(kind, "__name__", kind)
    raise ValueError(f"a {name} is expected, this is {value!r}")


def _convert_number(kind: type[int] | type[float], value: Any, key: str) -> int | float:
    if isinstance(value, str):
        if found := re.fullmatch(r"\s*-?[0-9_]+(\.[0-9]+)?(e[+-]?[0-9]+)?\s*", value, re.IGNORECASE):
            value = float(value) if any(found.groups()) else int(value)
        elif key.endswith(("_bytes", "_bytes_per_s")):
            value = parse_size_bytes(value)
        elif key.endswith("_ms"):
            value = parse_time_ms(value)
        elif key.endswith("_s"):
            value = parse_time_ms(value) / 1000
    if isinstance(value, bool) or not isinstance(value, int | float) or not -math.inf < value < math.inf:
        raise ValueError(f"a number is expected, this is {value!r}")
    if kind is int and value != int(value):
        raise ValueError(f"a whole number is expected, this is {value!r}")
    return kind(value)
