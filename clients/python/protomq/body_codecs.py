"""Body codecs: values to bodies and back, chosen by type.

    producer.send("orders", Order(number=1))            # a pydantic model, a protobuf message, str, dict or list

    @consumer.on("orders")
    def bill(order: Order): ...                         # by the listener's type hint

    order = message.value(Order)                        # of a message that was polled or received

The codec of a value says in the properties of its message what the body is, for consumers in any language:

    property        value
    content-type    text/plain; charset=utf-8 | application/json | application/protobuf | that of a codec of yours
    schema          the full name of a protobuf message, the name of a pydantic model; none of str, dict and list

Rules:
- A body that is bytes passes by all of this: no property, no look-up. A property that the sender has set himself stays as it is.
- What a consumer asks for decides how a body is decoded. A message without these properties (from a client in another language) is
  decoded, too; one whose properties say something else is refused.
- Nobody imports pydantic here: whoever has a model has imported it.

Another library gets a codec by a subclass of BodyCodec and `register_body_codec`.
"""

from __future__ import annotations

import json
import sys
import threading
import types
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from enum import Enum
from functools import lru_cache
from typing import Any, ClassVar, Final, TypeVar, cast

from ._interrupts import comes_of_signal
from .errors import SchemaError, WrongTypeError

__all__ = ["CONTENT_TYPE", "SCHEMA", "BodyCodec", "decode_body", "encode_body", "register_body_codec"]

CONTENT_TYPE: Final = "content-type"
"""The property that says what a body is: a media type, as in HTTP."""
SCHEMA: Final = "schema"
"""The property that names the schema of a body. A name that SQL92 filters can use: sql="schema = 'Order'"."""

_T = TypeVar("_T")
_to_json: Final = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


class BodyCodec(ABC):
    """How values of some types become bodies, and bodies values. Any thread; it keeps nothing between two calls."""

    content_type: ClassVar[str]
    """What its bodies are: a media type, "application/json"."""

    @abstractmethod
    def handles(self, type_: Any) -> bool:
        """Whether it is for values of this type, or for what a type hint says. Its answer is remembered."""

    @abstractmethod
    def encode(self, value: Any) -> bytes:
        """The body of a value. What it raises becomes a WrongTypeError."""

    @abstractmethod
    def decode(self, body: bytes, type_: Any) -> Any:
        """The value of that type in a body. What it raises becomes a SchemaError: the message will not get better."""

    def schema(self, type_: Any) -> str:
        """The name of the type's schema; "": it has none."""
        return ""

    def refusal(self, type_: Any, content_type: str, schema: str) -> str:
        """Why a body that says this of itself is none of that type; "" if it may be one. Both are "" where the sender said nothing."""
        if not content_type or _media_type(content_type) == _media_type(self.content_type):
            return ""
        return f"the body is {content_type}, not {self.content_type}"


def register_body_codec(codec: BodyCodec) -> None:
    """Makes a codec known to all producers and consumers of this process. The last one that handles a type has it, before ours."""
    if not isinstance(codec, BodyCodec):
        raise WrongTypeError(f"a body codec is an instance of BodyCodec, not {codec!r}")
    with _registering:
        _codecs.insert(0, codec)
        _known.clear()


def codec_of(type_: Any) -> BodyCodec | None:
    """The codec of a type, or of a type hint; None: there is none."""
    try:
        return _known[type_]
    except KeyError:
        pass
    except TypeError:  # A hint that cannot be hashed.
        return _find(type_)
    with _registering:
        codec = _find(type_)
        if len(_known) >= _KNOWN_MAX:
            _known.clear()
        _known[type_] = codec
    return codec


def encode_body(value: Any, properties: Mapping[str, str] | None) -> tuple[bytes, Mapping[str, str] | None]:
    """The body of a value, and its properties with what its codec says. Raises WrongTypeError."""
    if isinstance(value, bytes):
        return value, properties
    if isinstance(value, bytearray | memoryview):
        return bytes(value), properties
    type_ = type(value)
    codec = codec_of(type_)
    if codec is None:
        raise WrongTypeError(f"a body is bytes, or what a body codec encodes, not {_name(type_)}: {_HAVE_ONE}")
    try:
        body = codec.encode(value)
    except MemoryError:
        raise
    except Exception as error:
        if comes_of_signal(error):
            raise
        raise WrongTypeError(f"a body of type {_name(type_)} cannot be encoded: {error}") from error
    said = {CONTENT_TYPE: codec.content_type}
    if schema := codec.schema(type_):
        said[SCHEMA] = schema
    if properties is None:
        return body, said
    given: Any = properties
    # What is no mapping is refused where properties are checked.
    return body, {**said, **given} if isinstance(given, Mapping) else given


def decode_body(body: bytes, properties: Callable[[], Mapping[str, str]], type_: type[_T]) -> _T:
    """The value in a body. `properties`: gives them, if they are needed. Raises SchemaError, WrongTypeError for a type without codec."""
    if type_ is bytes:
        return cast(_T, body)
    codec = codec_of(type_)
    if codec is None:
        raise WrongTypeError(f"no body codec decodes {_name(type_)}: {_HAVE_ONE}")
    said = properties()
    reason = codec.refusal(type_, said.get(CONTENT_TYPE, ""), said.get(SCHEMA, ""))
    if reason:
        raise SchemaError(f"{_name(type_)}: {reason}")
    try:
        return cast(_T, codec.decode(body, type_))
    except MemoryError:
        raise
    except Exception as error:
        if comes_of_signal(error):
            raise
        raise SchemaError(f"{_name(type_)}: {error}") from error


class TextCodec(BodyCodec):
    """str: UTF-8. It reads what says that it is something else, too: JSON is text."""

    content_type = "text/plain; charset=utf-8"

    def handles(self, type_: Any) -> bool:
        """See BodyCodec."""
        return isinstance(type_, type) and issubclass(type_, str)

    def encode(self, value: Any) -> bytes:
        """See BodyCodec."""
        return str.encode(value)

    def decode(self, body: bytes, type_: Any) -> Any:
        """See BodyCodec."""
        text = body.decode()
        if issubclass(type_, Enum):
            return _member(text, type_)
        return text if type_ is str else type_(text)

    def refusal(self, type_: Any, content_type: str, schema: str) -> str:
        """See BodyCodec."""
        return ""


class JsonCodec(BodyCodec):
    """dict and list, TypedDicts too: JSON in UTF-8. What a dict has in it is not checked."""

    content_type = "application/json"

    def handles(self, type_: Any) -> bool:
        """See BodyCodec."""
        return _json_container(type_) is not None

    def encode(self, value: Any) -> bytes:
        """See BodyCodec. Raises TypeError and ValueError for what JSON has no way to write, NaN among it."""
        return _to_json(value).encode()

    def decode(self, body: bytes, type_: Any) -> Any:
        """See BodyCodec."""
        container = _json_container(type_)
        assert container is not None
        value = json.loads(body)
        if not isinstance(value, container):
            raise ValueError(f"the JSON is a {type(value).__name__}")
        own = typing.get_origin(type_) or type_
        return value if own is container or typing.is_typeddict(own) else own(value)

    def refusal(self, type_: Any, content_type: str, schema: str) -> str:
        """See BodyCodec."""
        return _no_json(content_type)


class ProtobufCodec(BodyCodec):
    """Messages of generated protobuf classes. Their schema is compared: any bytes that parse would do as any message otherwise."""

    content_type = "application/protobuf"

    def handles(self, type_: Any) -> bool:
        """See BodyCodec."""
        module = sys.modules.get("google.protobuf.message")
        return module is not None and isinstance(type_, type) and issubclass(type_, module.Message)

    def encode(self, value: Any) -> bytes:
        """See BodyCodec."""
        return cast(bytes, value.SerializeToString())

    def decode(self, body: bytes, type_: Any) -> Any:
        """See BodyCodec."""
        return type_.FromString(body)

    def schema(self, type_: Any) -> str:
        """The full name: "shop.v1.Order"."""
        return str(type_.DESCRIPTOR.full_name)

    def refusal(self, type_: Any, content_type: str, schema: str) -> str:
        """See BodyCodec."""
        if content_type and _media_type(content_type) not in _PROTOBUF_TYPES:
            return f"the body is {content_type}, not {self.content_type}"
        if schema and schema != type_.DESCRIPTOR.full_name:
            return f"the body is {schema}, not {type_.DESCRIPTOR.full_name}"
        return ""


class PydanticCodec(BodyCodec):
    """pydantic models (2 or newer), and unions of them: JSON, as `model_dump_json(by_alias=True)` writes it.

    Models are validated, and not compared by name: what a service calls Order may be an OrderIn of another one.
    """

    content_type = "application/json"

    def handles(self, type_: Any) -> bool:
        """See BodyCodec."""
        pydantic = sys.modules.get("pydantic")
        if pydantic is None:
            return False
        bare = _bare(type_)
        parts = typing.get_args(bare) if typing.get_origin(bare) in (typing.Union, types.UnionType) else (bare,)
        return all(isinstance(part, type) and issubclass(part, pydantic.BaseModel) for part in parts)

    def encode(self, value: Any) -> bytes:
        """See BodyCodec."""
        return cast(str, value.model_dump_json(by_alias=True)).encode()

    def decode(self, body: bytes, type_: Any) -> Any:
        """See BodyCodec. Raises ValueError with what is wrong with each field, and without the values: they may be secret."""
        try:
            return _validator(type_)(body)
        except sys.modules["pydantic"].ValidationError as error:
            found = error.errors(include_url=False, include_input=False)
        # Not where it was caught: a trace would have pydantic's own error beside it, with the values.
        raise ValueError("; ".join(": ".join(filter(None, (".".join(map(str, one["loc"])), _without_value(one)))) for one in found))

    def schema(self, type_: Any) -> str:
        """The name of the model, or the title that its configuration has."""
        config = getattr(type_, "model_config", {})
        return str(config.get("title") or getattr(type_, "__name__", ""))

    def refusal(self, type_: Any, content_type: str, schema: str) -> str:
        """See BodyCodec."""
        return _no_json(content_type)


def _without_value(found: Mapping[str, Any]) -> str:
    """What pydantic has against a field. Of its messages only this one has the value in it."""
    if found["type"] != "union_tag_invalid":
        return str(found["msg"])
    return f"{str(found['ctx']['discriminator']).strip(chr(39))} is none of {found['ctx']['expected_tags']}"


def _member(text: str, type_: type[Enum]) -> Enum:
    """The member of an enumeration. Its own error would have the text in it."""
    try:
        return type_(text)
    except ValueError:
        pass
    raise ValueError("the text is none of its values")


@lru_cache(maxsize=256)
def _validator(type_: Any) -> Callable[[bytes], Any]:
    if isinstance(type_, type):
        return cast(Any, type_).model_validate_json  # type: ignore[no-any-return]
    return sys.modules["pydantic"].TypeAdapter(type_).validate_json  # type: ignore[no-any-return]


def _media_type(content_type: str) -> str:
    return content_type.partition(";")[0].strip().lower()


def _no_json(content_type: str) -> str:
    media_type = _media_type(content_type)
    if not media_type or media_type == "application/json" or media_type.endswith("+json"):
        return ""
    return f"the body is {content_type}, not application/json"


def _json_container(type_: Any) -> type | None:
    """dict or list, if it is one of them, or a kind of it."""
    own = typing.get_origin(type_) or type_
    if not isinstance(own, type):
        return None
    return next((container for container in (dict, list) if issubclass(own, container)), None)


def _bare(type_: Any) -> Any:
    """A type hint without what `Annotated` says beside it."""
    return typing.get_args(type_)[0] if typing.get_origin(type_) is typing.Annotated else type_


def _name(type_: Any) -> str:
    return type_.__name__ if isinstance(type_, type) else str(type_)


def _find(type_: Any) -> BodyCodec | None:
    return next((codec for codec in _codecs if codec.handles(type_)), None)


_HAVE_ONE: Final = (
    "str, dict, list, protobuf messages and pydantic models have one, protomq.body_codecs.register_body_codec adds others"
)
_PROTOBUF_TYPES: Final = ("application/protobuf", "application/x-protobuf", "application/vnd.google.protobuf")
_KNOWN_MAX: Final = 4096
_registering: Final = threading.Lock()
_codecs: Final[list[BodyCodec]] = [TextCodec(), PydanticCodec(), ProtobufCodec(), JsonCodec()]
_known: Final[dict[Any, BodyCodec | None]] = {}
