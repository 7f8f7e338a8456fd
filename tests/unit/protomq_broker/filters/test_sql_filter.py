"""SQL92 filters over raw records: no match is lost by the search for constants, and the walk through records finds what protobuf finds."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protomq.v1.record_pb2 import Record
from protomq.wire.record import RecordTemplate, encode_record_field, encode_varint
from protomq_broker.filters import fields, sql_filter
from protomq_broker.filters.fields import FieldReader
from protomq_broker.filters.search import records_with
from protomq_broker.filters.sql_filter import SqlFilter
from tests.unit.protomq_broker.filters.run_helpers import all_matching, run_of
from tests.unit.protomq_broker.filters.sql_reference import expressions, matches, messages, text_of

TEMPLATE = RecordTemplate("flights", 7, 1)
SEAL = b"\x12\x33" + bytes(51)


def field(tag, *parts):
    data = b"".join(parts)
    return tag + encode_varint(len(data)) + data


def wide(tag, data):
    """A field whose length is written wider than needed, as protobuf allows."""
    size = len(data)
    return tag + bytes((size & 0x7F | 0x80, size >> 7 & 0x7F | 0x80, 0)) + data


def entry(name, text, way):
    name, text = name.encode(), text.encode()
    if way == "reversed":
        return field(b"\x22", field(b"\x12", text), field(b"\x0a", name))
    if way == "wide":
        return wide(b"\x22", wide(b"\x0a", name) + wide(b"\x12", text))
    if way == "twice":
        return field(b"\x22", field(b"\x0a", name), field(b"\x12", b"other")) + field(
            b"\x22", field(b"\x0a", name), field(b"\x12", text)
        )
    if way == "bare" and not text:
        return field(b"\x22", field(b"\x0a", name))
    return field(b"\x22", field(b"\x0a", name), field(b"\x12", text))


ways = st.sampled_from(("plain", "plain", "plain", "reversed", "wide", "twice", "bare"))


@st.composite
def records(draw, message=None):
    """(record field, properties)"""
    properties = draw(messages) if message is None else message
    front = field(b"\x12", b"key") if draw(st.booleans()) else b""
    front += b"".join(entry(name, text, draw(ways)) for name, text in sorted(properties.items()))
    body = draw(st.sampled_from((b"", b"x", b"\x22\x07\x0a\x01a\x12\x02xy", b"5" * 200)))
    return encode_record_field(TEMPLATE.encode(body, 0, 0, front=front)), properties


def joined(fields, gaps=b""):
    data, starts = b"", []
    for field in fields:
        starts.append(len(data))
        data += field + gaps
    return data, np.array(starts), np.array([len(field) for field in fields])


@given(st.lists(records(), min_size=1, max_size=6), expressions, st.booleans(), st.sampled_from((b"", SEAL)))
@settings(max_examples=200)
def test_a_run_of_records_is_filtered_as_its_messages_are_one_by_one(made, expression, is_long, gap):
    made = made * 24 if is_long else made  # Long runs are walked with numpy.
    run = joined([record for record, _ in made], gap)
    wanted = [i for i, (_, message) in enumerate(made) if matches(expression, message)]
    assert all_matching(SqlFilter(text_of(expression)), *run) == wanted


def sent(body=b"", **named):
    record = Record(body=body, **named)
    record.properties.update({})
    return encode_record_field(
        record.SerializeToString(deterministic=True)
        + TEMPLATE.encode(b"", 0x0102, 1_700_000_000_123)[2:]
    )


NAMES = ("TAGS", "KEYS", "a", "size", "bornTime", "queueId", "bornHost", "shardingKey", "messageId")


@pytest.mark.parametrize("count", [1, 40])
def test_the_messages_own_fields(count):
    full = sent(b"body", keys=["k1", "k2"], tag="t", properties={"a": "1"},
                attributes={"sharding_key": "s", "born_host": "h"})  # fmt: skip
    bare = sent()
    over = sent(b"body", keys=["k1"], properties={"size": "7", "TAGS": "no", "bornTime": ""})
    rows = FieldReader(NAMES).rows(*joined([full, bare, over] * count))
    message_id = b"0000000000000007000000010000000000000102"
    assert list(rows) == [
        (b"t", b"k1 k2", b"1", 4, 1_700_000_000_123, 0, b"h", b"s", message_id),
        (None, None, None, 0, 1_700_000_000_123, 0, None, None, message_id),
        (None, b"k1", None, b"7", b"", 0, None, None, message_id),
    ] * count
    walked = FieldReader(NAMES[:6]).rows(*joined([full, bare, over] * count))
    assert list(walked) == [row[:6] for row in rows]


@pytest.mark.parametrize(
    ("expression", "tags", "patterns"),
    [
        ("TAGS = 'x'", {b"x"}, {b"\x01x", b"\x00x"}),
        ("TAGS IN ('x', 'y') AND a > 5", {b"x", b"y"}, {b"\x01x", b"\x00x", b"\x01y", b"\x00y"}),
        ("TAGS = 'x' OR TAGS = 'y'", {b"x", b"y"}, {b"\x01x", b"\x00x", b"\x01y", b"\x00y"}),
        ("TAGS = 'x' OR a = 'long text'", set(), {b"\x01x", b"\x00x", b"long text"}),
        ("TAGS <> 'x'", set(), set()),
        ("a = 'long text' AND b = 'y'", set(), {b"long text"}),
        ("a = 'long text' OR b > 5", set(), {b"long text", b"\x01b", b"\x00b"}),
        ("a > 5 AND delay > 6", set(), {b"delay"}),
        ("NOT (a <> 'long text')", set(), {b"long text"}),
        ("NOT (a = 'long text')", set(), {b"\x01a", b"\x00a"}),
        ("'long text' <> delay", set(), set()),
        ("delay CONTAINS 'part'", set(), {b"part"}),
        ("NOT (delay NOT CONTAINS 'part')", set(), set()),
        ("NOT (delay NOT IN ('long text'))", set(), {b"long text"}),
        ("delay IS NULL", set(), set()),
        ("delay IS NOT NULL", set(), {b"delay"}),
        ("delay = ''", set(), {b"delay"}),
        ("KEYS = 'key 1'", set(), set()),
        ("KEYS CONTAINS 'key-1'", set(), {b"key-1"}),
        ("size = 'long'", set(), set()),
        ("delay = 'long' OR TRUE", set(), set()),
    ],
)
def test_what_every_match_contains(expression, tags, patterns):
    made = SqlFilter(expression)
    assert made.tags == tags
    assert set(made._patterns) == patterns


@given(
    st.lists(st.binary(max_size=6), min_size=1),
    st.sampled_from((b"", b"\x00\x01")),
    st.lists(st.binary(min_size=1, max_size=2), min_size=1),
)
def test_the_search_finds_the_records_that_contain_a_pattern(contents, gap, patterns):
    data, starts, sizes = joined(contents, gap)
    wanted = [i for i, content in enumerate(contents) if any(p in content for p in patterns)]
    assert records_with(data, starts.tolist(), (starts + sizes).tolist(), patterns) == wanted


RICH = {"properties": {f"{i:x}": "1" for i in range(2_500)}}


def test_few_records_with_very_many_properties_do_not_make_the_walk_long(monkeypatch):
    """Each step of it costs as much for one record as for a hundred."""
    walked = []
    lengths = fields._lengths

    def note(*of):
        walked.append(of)
        return lengths(*of)

    monkeypatch.setattr(fields, "_lengths", note)
    run = run_of(*[{"properties": {"c": "2"}}] * 50, RICH, *[{"properties": {"c": "1"}}] * 50)
    assert SqlFilter("c = '1'").matching(*run).indexes == list(range(50, 101))
    assert len(walked) < 60


@pytest.mark.parametrize("expression", ["c = '1'", "c CONTAINS '1'", "c > 0", "shardingKey IS NULL AND c = '1'"])
def test_a_filter_looks_at_few_records_at_once_that_have_very_many_properties(expression):
    """Protobuf takes a millisecond for each of these."""
    run = run_of(*[RICH] * 30)
    made = SqlFilter(expression)
    assert made.matching(*run).examined <= 2
    assert all_matching(made, *run) == list(range(30))


def test_a_filter_asks_its_rule_about_few_records_at_once_if_it_compares_much():
    run = run_of(*[{"properties": {"a": "5.5"}}] * 1_000)
    one, many = SqlFilter("a > 5"), SqlFilter(" OR ".join(["a > 5"] * 30))
    heavy = SqlFilter(" OR ".join(["a > 5.4"] * 500))
    assert [made.matching(*run).examined for made in (one, many, heavy)] == [256, 37, 4]
    assert heavy.records_min == 4
    among = SqlFilter("a IN ({})".format(", ".join(f"'{number}'" for number in range(400))))
    assert among.matching(*run_of(*[{"properties": {"a": "5"}}] * 200)).examined == 200
    assert all_matching(heavy, *run) == list(range(1_000))


def test_what_protobuf_is_asked_about_begins_with_small_pieces():
    assert SqlFilter("shardingKey = 'x'").records_min == 4
    assert SqlFilter("a = 'x'").records_min == 2_048


def test_large_bodies_are_neither_searched_nor_copied(monkeypatch):
    body = b"D99" * 10_000
    some = [{"body": body, "properties": {"dest": "D99"}}, {"body": body}, {"properties": {"dest": "D99"}}]
    run = run_of(*some)
    monkeypatch.setattr(sql_filter, "records_with", None)
    parsed = []

    def parse(data):
        parsed.append(len(data))
        return Record.FromString(data)

    monkeypatch.setattr(fields, "Record", SimpleNamespace(FromString=parse))
    assert all_matching(SqlFilter("dest = 'D99'"), *run) == [0, 2]
    assert max(parsed) < 500
    assert all_matching(SqlFilter("size = 30000"), *run) == [0, 1]
    assert max(parsed) > 30_000


@given(records())
def test_a_record_without_its_body_is_the_same_otherwise(made):
    data, _ = made
    whole = fields.parse_record(data, 0, len(data), with_body=True)
    without = fields.parse_record(data, 0, len(data), with_body=False)
    whole.ClearField("body")
    assert without == whole
