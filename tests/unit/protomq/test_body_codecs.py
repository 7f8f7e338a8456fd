"""Body codecs: values to bodies and back, by type; what a message says of itself; what is refused."""

from __future__ import annotations

import subprocess
import sys
import traceback
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Annotated, Any, Literal, TypedDict

import pydantic
import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp
from hypothesis import given
from hypothesis import strategies as st

from protomq import body_codecs
from protomq.body_codecs import (
    CONTENT_TYPE,
    SCHEMA,
    BodyCodec,
    JsonCodec,
    decode_body,
    encode_body,
    register_body_codec,
)
from protomq.errors import ClientError, SchemaError, WrongTypeError


class Order(pydantic.BaseModel):
    number: int
    customer: str = pydantic.Field(alias="customerName", default="")


class Refund(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(title="shop.Refund")
    kind: Literal["refund"] = "refund"
    cents: int


class Payment(pydantic.BaseModel):
    kind: Literal["payment"] = "payment"
    cents: int


class Row(TypedDict):
    carrier: str


def decoded(body: bytes, type_: Any, properties: Mapping[str, str] | None = None) -> Any:
    return decode_body(body, lambda: properties or {}, type_)


TEXTS = st.text(st.characters(codec="utf-8"))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=8,
)


@given(st.dictionaries(TEXTS, JSON, max_size=4) | st.lists(JSON, max_size=4))
def test_dicts_and_lists_come_back_from_json(value: Any) -> None:
    body, properties = encode_body(value, None)
    assert properties == {CONTENT_TYPE: "application/json"}
    assert decoded(body, type(value), properties) == value


@pytest.mark.parametrize(
    ("value", "body", "properties"),
    [
        (b"plain", b"plain", None),
        (bytearray(b"plain"), b"plain", None),
        (memoryview(b"plain"), b"plain", None),
        ("grüß", "grüß".encode(), {CONTENT_TYPE: "text/plain; charset=utf-8"}),
        ({"a": [1, "ü"]}, '{"a":[1,"ü"]}'.encode(), {CONTENT_TYPE: "application/json"}),
        (Order(number=7, customerName="Ann"), b'{"number":7,"customerName":"Ann"}', {CONTENT_TYPE: "application/json", SCHEMA: "Order"}),
        (Refund(cents=5), b'{"kind":"refund","cents":5}', {CONTENT_TYPE: "application/json", SCHEMA: "shop.Refund"}),
        (Duration(seconds=3), b"\x08\x03", {CONTENT_TYPE: "application/protobuf", SCHEMA: "google.protobuf.Duration"}),
    ],
)
def test_a_value_becomes_a_body_that_says_what_it_is(value: Any, body: bytes, properties: Mapping[str, str] | None) -> None:
    assert encode_body(value, None) == (body, properties)
    if not isinstance(value, bytearray | memoryview):
        assert decoded(body, type(value), properties) == value
        # A client in another language says nothing of its bodies.
        assert decoded(body, type(value)) == value


def test_properties_of_the_sender_stay() -> None:
    own = {CONTENT_TYPE: "application/vnd.shop+json", "tenant": "a"}
    body, properties = encode_body({"a": 1}, own)
    assert properties == own
    assert decoded(body, dict, properties) == {"a": 1}
    assert encode_body("a", {"tenant": "a"})[1] == {CONTENT_TYPE: "text/plain; charset=utf-8", "tenant": "a"}
    assert own == {CONTENT_TYPE: "application/vnd.shop+json", "tenant": "a"}


@pytest.mark.parametrize(
    ("type_", "body", "said", "text"),
    [
        (Order, b'{"number":"x"}', {}, r"^Order: number: Input should be a valid integer, .*$"),
        (Order, b"\xff", {}, "Order: Invalid JSON"),
        (Order, b"{}", {CONTENT_TYPE: "application/protobuf"}, "Order: the body is application/protobuf, not application/json"),
        (dict, b"[1]", {}, "dict: the JSON is a list"),
        (list, b"{}", {}, "list: the JSON is a dict"),
        (dict, b"{", {}, "dict: Expecting property name"),
        (dict, b"[" * 100_000, {}, "dict: "),
        (dict, b"{}", {CONTENT_TYPE: "text/csv"}, "dict: the body is text/csv, not application/json"),
        (str, b"\xff", {}, "str: 'utf-8' codec can't decode"),
        (Duration, b"\xff\xff", {}, "Duration: Error parsing message"),
        (Duration, b"", {SCHEMA: "google.protobuf.Timestamp"}, "the body is google.protobuf.Timestamp, not google.protobuf.Duration"),
        (Duration, b"", {CONTENT_TYPE: "application/json"}, "the body is application/json, not application/protobuf"),
    ],
)
def test_what_is_not_what_was_asked_for_is_a_schema_error(
    type_: type, body: bytes, said: Mapping[str, str], text: str
) -> None:
    with pytest.raises(SchemaError, match=text):
        decoded(body, type_, said)


def test_a_schema_error_does_not_tell_the_values() -> None:
    with pytest.raises(SchemaError) as caught:
        decoded(b'{"number":"4111-1111"}', Order)
    assert "4111" not in str(caught.value)
    assert "https" not in str(caught.value)
    assert isinstance(caught.value, ValueError)


class Colour(StrEnum):
    RED = "red"


Tagged = Annotated[Refund | Payment, pydantic.Discriminator("kind")]


@pytest.mark.parametrize(
    ("type_", "body", "text"),
    [
        (Order, b'{"number":"4111-1111"}', "Order: number: Input should be a valid integer"),
        (Order, b"{4111-1111", "Order: Invalid JSON"),
        (dict, b"{4111-1111", "dict: Expecting property name"),
        (Colour, b"4111-1111", "Colour: the text is none of its values"),
        (Tagged, b'{"kind":"4111-1111"}', "kind is none of 'refund', 'payment'"),
    ],
)
def test_what_a_log_shows_of_a_schema_error_has_no_values_either(type_: Any, body: bytes, text: str) -> None:
    with pytest.raises(SchemaError) as caught:
        decoded(body, type_)
    shown = "".join(traceback.format_exception(caught.value))
    assert text in shown
    assert "4111" not in shown


@pytest.mark.parametrize("content_type", ["Application/JSON; charset=utf-8", "application/vnd.shop.order+json"])
def test_content_types_are_compared_as_media_types(content_type: str) -> None:
    assert decoded(b'{"number":1}', Order, {CONTENT_TYPE: content_type}) == Order(number=1)
    assert decoded(b"", Duration, {CONTENT_TYPE: "application/x-protobuf"}) == Duration()
    # JSON is text, too.
    assert decoded(b'{"number":1}', str, {CONTENT_TYPE: content_type}) == '{"number":1}'


def test_kinds_of_dict_and_hints_with_parameters() -> None:
    assert decoded(b'{"carrier":"UA"}', Row) == {"carrier": "UA"}
    assert decoded(b'{"a":1}', dict[str, int]) == {"a": 1}
    ordered = decoded(b'{"a":1}', OrderedDict)
    assert type(ordered) is OrderedDict
    assert encode_body(ordered, None)[0] == b'{"a":1}'


def test_unions_of_models_take_what_fits() -> None:
    assert decoded(b'{"kind":"payment","cents":5}', Refund | Payment) == Payment(cents=5)
    told_by_kind = Annotated[Refund | Payment, pydantic.Field(discriminator="kind")]
    assert decoded(b'{"kind":"refund","cents":5}', told_by_kind) == Refund(cents=5)
    with pytest.raises(SchemaError, match="kind"):
        decoded(b'{"kind":"gift","cents":5}', told_by_kind)


@pytest.mark.parametrize("value", [None, 5, 1.5, (1,), {1}, object(), Timestamp])
def test_what_has_no_codec_is_refused(value: object) -> None:
    with pytest.raises(WrongTypeError, match="register_body_codec adds others"):
        encode_body(value, None)


@pytest.mark.parametrize("value", [{"a": float("nan")}, {"a": {1}}, ["\ud800"], "\ud800"])
def test_what_cannot_be_encoded_is_refused(value: object) -> None:
    with pytest.raises(WrongTypeError, match="cannot be encoded"):
        encode_body(value, None)


def test_a_type_without_codec_is_no_fault_of_the_message() -> None:
    with pytest.raises(ClientError, match="no body codec decodes int"):
        decoded(b"5", int)


@dataclass(frozen=True)
class Point:
    x: int
    y: int


class PointCodec(BodyCodec):
    content_type = "application/vnd.point"

    def handles(self, type_: Any) -> bool:
        return bool(type_ is Point)

    def encode(self, value: Any) -> bytes:
        return b"%d %d" % tuple(asdict(value).values())

    def decode(self, body: bytes, type_: Any) -> Any:
        x, y = map(int, body.split())
        return type_(x, y)


def test_a_codec_of_the_user_is_asked_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_codecs, "_codecs", list(body_codecs._codecs))
    monkeypatch.setattr(body_codecs, "_known", {})
    with pytest.raises(WrongTypeError):
        encode_body(Point(1, 2), None)
    register_body_codec(PointCodec())
    body, properties = encode_body(Point(1, 2), None)
    assert (body, properties) == (b"1 2", {CONTENT_TYPE: "application/vnd.point"})
    assert decoded(body, Point, properties) == Point(1, 2)
    with pytest.raises(SchemaError, match=r"Point: the body is application/json, not application/vnd\.point"):
        decoded(body, Point, {CONTENT_TYPE: "application/json"})
    with pytest.raises(SchemaError, match="not enough values"):
        decoded(b"1", Point)

    class Terse(JsonCodec):
        content_type = "application/terse+json"

    register_body_codec(Terse())
    assert encode_body({}, None)[1] == {CONTENT_TYPE: "application/terse+json"}
    with pytest.raises(WrongTypeError):
        register_body_codec(Terse)  # type: ignore[arg-type]


def test_pydantic_is_not_imported_unless_it_is_used() -> None:
    code = (
        "import sys; from protomq import Producer; from protomq.body_codecs import encode_body, decode_body\n"
        "from protomq._push_results import Listener\n"
        "def listen(order: dict): ...\n"
        "encode_body({}, None), decode_body(b'{}', dict, dict), Listener.of(listen)\n"
        "sys.exit('pydantic' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
