"""CEL expressions, through Google's own library (`pip install 'protomq-broker[cel]'`), ready to be asked about runs of records.

An expression is typed when it is compiled and gives true or false. What names there are: VARIABLES. An evaluation that fails (a property
that is not there, a text that is no number) is no match. The library bounds 32 expressions within each other, and what its macros (all,
exists, map) visit. That bounds neither time nor memory, so `cel_cost.py` does, before an expression is a filter. Patterns are RE2's.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Final

from numpy.typing import NDArray

from protomq.v1.record_pb2 import Record
from protomq.wire.record import encode_message_id

from .cel_cost import COST_MAX_NS, largest_message
from .cel_patterns import pattern_of
from .cel_tree import Literal, Tree, calls_of, tree_of
from .errors import FilterError, FilterUnavailableError
from .fields import parse_record
from .filter_book import Matches

log = logging.getLogger(__name__)

LENGTH_MAX: Final = 4_096
_NO_FRONT_MAX_BYTES: Final = 1 << 10
"""Of a record: its topic, the trailer, and their tags."""

_Read = Callable[[Record], Any]
VARIABLES: Final[Mapping[str, tuple[str, _Read]]] = {
    "TAGS": ("STRING", lambda record: record.tag),
    "KEYS": ("STRING", lambda record: " ".join(record.keys)),
    "properties": ("MAP", lambda record: dict(record.properties)),
    "size": ("INT", lambda record: len(record.body)),
    "bornTime": ("INT", lambda record: record.born_time_ms),
    "storeTime": ("INT", lambda record: record.store_time_ms),
    "queueId": ("INT", lambda record: record.queue_id),
    "queueOffset": ("INT", lambda record: record.queue_offset),
    "shardingKey": ("STRING", lambda record: record.attributes.sharding_key),
    "bornHost": ("STRING", lambda record: record.attributes.born_host),
    "messageId": (
        "STRING",
        lambda record: encode_message_id(
            record.producer_id, record.producer_epoch, record.sequence
        ),
    ),
}
"""Type, and where it comes from; `size` is the function of CEL as well, which wants brackets."""

_PLACE: Final = re.compile(r"<input>:(\d+):(\d+): (.*)")


class CelFilter:
    """Any thread. A `Filter` of filter_book.py; of tags a CEL expression tells nothing."""

    tags: frozenset[bytes] = frozenset()
    records_min = 1
    records_max = 4

    def __init__(self, expression: str) -> None:
        """Raises FilterError, and FilterUnavailableError where the library is missing."""
        cel, environment = _environment()
        if len(expression) > LENGTH_MAX:
            raise FilterError(
                f"the expression has {len(expression)} characters, at most {LENGTH_MAX} are allowed",
                expression,
                LENGTH_MAX,
            )
        if not expression.strip():
            raise FilterError("the expression is empty", expression, len(expression))
        try:
            expression.encode()
            self._compiled = environment.compile(expression)
        except UnicodeEncodeError as error:
            raise FilterError("the text is not valid Unicode", expression, error.start) from None
        except RuntimeError as error:
            raise _refused(str(error), expression) from None
        result = self._compiled.return_type()
        if result != cel.Type.BOOL:
            raise FilterError(
                f"a filter is true or false, this one gives {result}", expression, 0, ("a condition",)
            )
        types = {name: kind for name, (kind, _) in VARIABLES.items()}
        tree = tree_of(self._compiled.serialize())
        _check_patterns(tree, expression)
        self._largest = largest_message(tree, expression, types)
        self._expression, self._has_told = expression, False
        named = set(re.findall(r"[A-Za-z_]\w*", expression))
        self._wanted = [(name, read) for name, (_, read) in VARIABLES.items() if name in named]
        self._needs_body = "size" in named

    def matching(self, data: bytes, starts: NDArray[Any], sizes: NDArray[Any]) -> Matches:
        """As of Filter."""
        found: list[int] = []
        evaluate, wanted = self._compiled.eval, self._wanted
        for index, (start, size) in enumerate(zip(starts.tolist(), sizes.tolist(), strict=True)):
            record = parse_record(data, start, start + size, with_body=self._needs_body)
            if (
                len(record.properties) > self._largest.property_count
                or record.ByteSize() - len(record.body) > self._largest.front_bytes + _NO_FRONT_MAX_BYTES
            ):
                self._tell_of_large_message(record)
                continue
            try:
                value = evaluate(data={name: read(record) for name, read in wanted}).value()
            except (RuntimeError, ValueError):
                continue
            if value is True:
                found.append(index)
        return Matches(found, len(starts))

    def _tell_of_large_message(self, record: Record) -> None:
        if not self._has_told:
            self._has_told = True
            log.warning(
                "a message of topic %s is too large for the CEL filter %.200s, and does not match: an evaluation could take more than 5 ms."
                " The filter does for messages of up to %d properties, and %d octets beside the body (not logged again for this filter)",
                record.topic, self._expression, self._largest.property_count, self._largest.front_bytes,
            )  # fmt: skip


@lru_cache(1)
def _environment() -> tuple[Any, Any]:
    try:
        from cel_expr_python import cel
    except ImportError:
        raise FilterUnavailableError(
            "this broker has no CEL: pip install 'protomq-broker[cel]' where it runs"
        ) from None
    kinds = {
        "STRING": cel.Type.STRING,
        "INT": cel.Type.INT,
        "MAP": cel.Type.Map(cel.Type.STRING, cel.Type.STRING),
    }
    variables = {name: kinds[kind] for name, (kind, _) in VARIABLES.items()}
    return cel, cel.NewEnv(variables=variables)


@lru_cache(1)
def _pattern_test() -> Any:
    return _environment()[1].compile("''.matches(TAGS)")


def _check_patterns(tree: Tree, expression: str) -> None:
    """Raises FilterError for a text that is no pattern. The library says so only when it looks for it.

    Of patterns that together could take too long, the rest is not tried: `largest_message` refuses the expression.
    """
    left_ns = COST_MAX_NS
    for call in calls_of(tree):
        pattern = call.arguments[1] if call.function == "matches" else None
        if not isinstance(pattern, Literal) or pattern.text is None:
            continue
        text = pattern.text.decode()
        left_ns -= pattern_of(text).compile_ns
        if left_ns < 0:
            return
        result = _pattern_test().eval(data={"TAGS": text})
        if result.type() == _environment()[0].Type.ERROR:
            why = re.sub(r"^[A-Z_]+: |invalid regular expression: ", "", str(result.value()))
            raise FilterError(f"the text is no pattern: {why[:200]}", expression, pattern.position)


def _refused(text: str, expression: str) -> FilterError:
    found = _PLACE.search(text)
    if found is None:
        return FilterError(re.sub(r"^[A-Z_]+: | \[[A-Z_]+\]$", "", text)[:300], expression)
    line, column = int(found[1]), int(found[2])
    said = re.sub(r" \[[A-Z_]+\]$", "", found[3])
    lines = expression.split("\n")
    position = sum(len(part) + 1 for part in lines[: line - 1]) + column - 1
    expected: tuple[str, ...] = ()
    if wanted := re.search(r"expecting \{?(.+?)\}?$", said):
        expected = tuple(re.findall(r"(?<=')[^',]+(?=')|[A-Z_]{2,}", wanted[1]))
    return FilterError(said[:300], expression, position, expected)
