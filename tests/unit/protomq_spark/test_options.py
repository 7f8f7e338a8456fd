"""Options of the Spark source and sink: names, aliases, contradictions."""

from __future__ import annotations

import pytest

pytest.importorskip("pyarrow", reason="protomq-spark needs pyarrow")
pytest.importorskip("protomq_spark", reason="clients/spark is not installed")

from protomq_spark.options import (
    EARLIEST,
    LATEST,
    OptionError,
    ReadOptions,
    parse_read_options,
    parse_write_options,
)

BASE = {"protomq.namesrv": "host:9876", "subscribe": "orders"}


def read(streaming: bool = False, /, **options: str) -> ReadOptions:
    return parse_read_options(BASE | options, streaming=streaming)


def test_defaults_are_those_of_kafkas_connector() -> None:
    batch, stream = read(), read(True)
    assert (batch.start.word, batch.end.word) == (EARLIEST, LATEST)
    assert stream.start.word == LATEST
    assert batch.fail_on_data_loss
    assert batch.min_partitions == 0
    assert "headers" not in batch.columns


def test_names_are_compared_without_regard_to_case() -> None:
    options = {"PROTOMQ.NAMESRV": "h:1", "Subscribe": "a, b,a", "MAXOFFSETSPERTRIGGER": "7"}
    parsed = parse_read_options(options, streaming=True)
    assert parsed.subscription.topics == ("a", "b")
    assert parsed.offsets_max == 7


def test_names_of_rocketmq_spark_are_aliases() -> None:
    options = {
        "nameServer": "h:1",
        "topic": "t",
        "group": "g",
        "subExpression": "a || b",
        "pullBatchSize": "64",
    }
    parsed = parse_read_options(options, streaming=True)
    assert parsed.client.namesrv == "h:1"
    assert parsed.subscription.topics == ("t",)
    assert (parsed.group, parsed.tags, parsed.pull_count_max) == ("g", ("a", "b"), 64)


def test_an_alias_beside_its_original_is_refused_by_both_names() -> None:
    with pytest.raises(OptionError, match="'subscribe' and 'topic' mean the same"):
        read(topic="t")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"startingOfsets": "earliest"}, "startingOfsets.*is 'startingOffsets' meant"),
        ({"kafka.bootstrap.servers": "x"}, "kafka.bootstrap.servers"),
        ({"sql": "a > 1"}, "'sql': this version has no SQL filters"),
        ({"protomq.accessKey": "me"}, "'protomq.accessKey': this version has no authentication"),
        ({"subscribePattern": "a.*"}, "subscribe and subscribePattern"),
        ({"assign": '{"t":[0]}'}, "subscribe and assign"),
        ({"maxOffsetsPerTrigger": "5"}, "'maxOffsetsPerTrigger' is for a stream"),
        ({"startingOffsets": "latest"}, "cannot be latest"),
        ({"startingOffsets": '{"orders":{"0":-1}}'}, "cannot be latest"),
        ({"endingOffsets": "earliest"}, "cannot be earliest"),
        ({"endingOffsets": '{"orders":{"0":-2}}'}, "cannot be earliest"),
        ({"startingOffsets": "soon"}, "'startingOffsets' is no JSON"),
        ({"startingOffsets": '{"orders":{"x":1}}'}, "'startingOffsets'"),
        ({"startingOffsets": '{"orders":{"0":-3}}'}, "-3"),
        ({"startingOffsets": '{"orders":{"0":true}}'}, "'startingOffsets'"),
        ({"startingTimestamp": "yesterday"}, "'startingTimestamp' must be a whole number"),
        ({"failOnDataLoss": "no"}, "'failOnDataLoss' must be"),
        ({"corruptRecords": "drop"}, "'corruptRecords' must be one of"),
        ({"columns": "body,colour"}, "no column colour"),
        ({"columns": "body", "includeHeaders": "true"}, "'includeHeaders'"),
        ({"minPartitions": "0"}, "'minPartitions' must be 1"),
        ({"minPartitions": "9", "maxPartitions": "8"}, "'minPartitions' is above"),
        ({"maxPartitions": "8", "maxRecordsPerPartition": "5"}, "'maxPartitions' and 'maxRecords"),
        ({"tags": "*||a"}, "'tags'"),
        ({"tags": "a|b"}, r"'tags': no tag has a \|, as 'a\|b' has"),
        ({"protomq.transport": "http"}, "'protomq.transport' must be one of"),
    ],
)
def test_a_wrong_option_is_refused_by_name(options: dict[str, str], named: str) -> None:
    with pytest.raises(OptionError, match=named):
        read(**options)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"endingOffsets": "latest"}, "'endingOffsets' is for a batch"),
        ({"maxTriggerDelay": "5m"}, "'maxTriggerDelay'"),
        ({"minOffsetsPerTrigger": "9", "maxOffsetsPerTrigger": "8"}, "is above"),
        (
            {"minOffsetsPerTrigger": "9", "maxTriggerDelay": "soon"},
            "'maxTriggerDelay' must be like",
        ),
    ],
)
def test_a_wrong_option_of_a_stream_is_refused_by_name(options: dict[str, str], named: str) -> None:
    with pytest.raises(OptionError, match=named):
        read(True, **options)


def test_whether_batch_or_stream_may_be_open() -> None:
    assert parse_read_options(BASE | {"endingOffsets": "latest"}).end.word == LATEST
    assert parse_read_options(BASE | {"maxOffsetsPerTrigger": "5"}).offsets_max == 5


def test_a_source_needs_a_name_server_and_one_subscription() -> None:
    with pytest.raises(OptionError, match=r"protomq\.namesrv"):
        parse_read_options({"subscribe": "a"})
    with pytest.raises(OptionError, match="exactly one"):
        parse_read_options({"protomq.namesrv": "h:1"})


def test_a_time_for_all_goes_before_times_and_those_before_offsets() -> None:
    times = '{"orders":{"0":5}}'
    both = read(startingOffsetsByTimestamp=times, startingOffsets="earliest").start
    assert both.times == {"orders": {"0": 5}}
    assert read(startingTimestamp="9", startingOffsetsByTimestamp=times).start.time_ms == 9


def test_a_query_has_a_group_of_its_own_unless_the_user_names_one() -> None:
    assert read(True).group_of("3f") == "spark-protomq-source-3f"
    assert read(True, groupIdPrefix="mine").group_of("3f") == "mine-3f"
    assert read(True, groupIdPrefix="mine", group="g").group_of("3f") == "g"


def test_durations_have_units() -> None:
    parsed = read(True, minOffsetsPerTrigger="1", maxTriggerDelay="2m")
    assert parsed.trigger_delay_max_s == 120


def test_a_sink_refuses_what_it_does_not_know() -> None:
    assert parse_write_options({"protomq.namesrv": "h:1", "topic": "t"}).topic == "t"
    with pytest.raises(OptionError, match="the sink has no option 'subscribe'"):
        parse_write_options(BASE)
    ok = {"protomq.namesrv": "h:1", "checkpointLocation": "/x", "queryName": "q"}
    assert parse_write_options(ok).topic == ""
