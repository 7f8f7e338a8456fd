"""What each error means stands in one table of the code: the contract, the SDK, docs/wire.md and whoever raises agree with it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from protomq.errors import error_from_status
from protomq.v1 import error_pb2
from protomq.wire.status import RpcStatus, decode_status
from protomq_runtime.errors import DEFINITE_KEY, RULES, Code, ServiceError

ROOT = Path(__file__).parents[2]
RELAYS = {"remoting_client.py", "name_server_connections.py"}
"""They pass on what a peer answered."""
CONSTRUCTORS = "services/runtime/protomq_runtime/errors.py"


class Raised(NamedTuple):
    """A `ServiceError(...)` in the code."""

    place: str
    code: str
    reason: str
    metadata: frozenset[str]


def raised() -> Iterator[Raised]:
    for path in sorted((ROOT / "services").rglob("*.py")) + sorted((ROOT / "cli").rglob("*.py")):
        if path.name in RELAYS:
            continue
        text = path.read_text("utf-8")
        # Each worker collects these anew: to parse only the files with such a call takes a fifth of the time.
        if not re.search(r"(ServiceError|invalid_argument)\(", text):
            continue
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.Call):
                continue
            name, place = getattr(node.func, "id", ""), str(path.relative_to(ROOT))
            if name == "ServiceError":
                yield read_call(node, place)
            elif name == "invalid_argument":
                keys = read_keys(node, place)
                yield Raised(f"{place}:{node.lineno}", "INVALID_ARGUMENT", "INVALID_ARGUMENT", keys)


def read_call(node: ast.Call, path: str) -> Raised:
    place = f"{path}:{node.lineno}"
    code, reason = node.args[:2]
    assert isinstance(code, ast.Attribute), f"{place}: the code is not written as Code.NAME"
    assert isinstance(reason, ast.Constant), f"{place}: the reason is not written out"
    return Raised(place, code.attr, str(reason.value), read_keys(node, path))


def read_keys(node: ast.Call, path: str) -> frozenset[str]:
    place = f"{path}:{node.lineno}"
    keys: frozenset[str] = frozenset()
    for keyword in node.keywords:
        if keyword.arg != "metadata":
            continue
        if isinstance(keyword.value, ast.DictComp | ast.Name) and path == CONSTRUCTORS:
            continue  # `corrupt_log`: its arguments are its keys; `invalid_argument`: its callers are looked at
        assert isinstance(keyword.value, ast.Dict), f"{place}: the metadata are no literal"
        keys = frozenset(ast.literal_eval(key) for key in keyword.value.keys if key is not None)
        assert len(keys) == len(keyword.value.keys), f"{place}: the keys are not all written out"
    return keys


ALL_RAISED = list(raised())


def test_every_reason_of_the_contract_has_a_rule() -> None:
    prefix = "ERROR_REASON_"
    names = {name.removeprefix(prefix) for name, _ in error_pb2.ErrorReason.items()}
    assert set(RULES) == names - {"UNSPECIFIED"}


@pytest.mark.parametrize("call", ALL_RAISED, ids=lambda call: call.place)
def test_whoever_raises_keeps_to_the_rule(call: Raised) -> None:
    rule = RULES[call.reason]
    assert rule.code.name == call.code
    assert call.metadata <= {*rule.metadata, *rule.optional}
    assert set(rule.metadata) <= call.metadata


def test_calls_are_found() -> None:
    assert len(ALL_RAISED) > 20
    assert {call.reason for call in ALL_RAISED} >= set(RULES) - {"OFFSET_NOT_FOUND"}


def documented() -> dict[str, tuple[str, bool, set[str], set[str]]]:
    rows = {}
    for line in (ROOT / "docs/wire.md").read_text("utf-8").splitlines():
        match = re.fullmatch(
            r"\| `([A-Z_]+)` \| ([A-Z_]+) \| (true|false) \| ([^|]*)\| [^|]+ \|", line
        )
        if match is None:
            continue
        reason, code, definite, metadata = match.groups()
        always, _, optional = metadata.partition("(")
        assert reason not in rows, f"{reason} stands there twice"
        keys = re.compile(r"`([a-z_]+)`")
        rows[reason] = (
            code,
            definite == "true",
            set(keys.findall(always)),
            set(keys.findall(optional)),
        )
    return rows


def test_the_table_of_the_documents_is_that_of_the_code() -> None:
    assert documented() == {
        reason: (rule.code.name, rule.definite, set(rule.metadata), set(rule.optional))
        for reason, rule in RULES.items()
    }


@pytest.mark.parametrize("reason", RULES)
def test_the_sdk_means_the_same_by_it(reason: str) -> None:
    rule = RULES[reason]
    silent = error_from_status(RpcStatus(int(rule.code), "", reason))  # of an older server
    told = error_from_status(ServiceError(rule.code, reason, "").to_status())
    assert (silent.code, silent.definite) == (told.code, told.definite) == (rule.code, rule.definite)
    assert DEFINITE_KEY not in told.metadata


@pytest.mark.parametrize("reason", RULES)
def test_definite_is_on_the_wire(reason: str) -> None:
    rule = RULES[reason]
    status = decode_status(ServiceError(rule.code, reason, "", metadata={"a": "b"}).encode())
    assert status.metadata == {"a": "b", "definite": "true" if rule.definite else "false"}


def test_what_the_wire_says_goes_before_the_table_of_the_sdk() -> None:
    for text, definite in (("true", True), ("false", False)):
        for reason in ("INTERNAL", "SYSTEM_BUSY", "OF_A_LATER_VERSION"):
            error = error_from_status(RpcStatus(8, "", reason, {"definite": text}))
            assert error.definite is definite


def test_a_peers_word_is_passed_on() -> None:
    relayed = ServiceError(Code.ABORTED, "OF_A_LATER_VERSION", "", metadata={"definite": "true"})
    assert relayed.to_status().metadata["definite"] == "true"
    assert ServiceError(Code.ABORTED, "X", "").to_status().metadata["definite"] == "false"
