"""The example of an external scaler for KEDA, as a process of its own, asked over gRPC as KEDA asks."""

from __future__ import annotations

import importlib.util
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import grpc
import pytest

from protomq import Admin, GroupLag, MessageQueue, Producer, PullConsumer
from protomq.testing import Broker

KEDA = Path(__file__).resolve().parents[2] / "deploy" / "keda"
PATIENCE_S = 60.0


def loaded(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, KEDA / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


pb: Any = loaded("externalscaler_pb2")
scaler: Any = loaded("scaler")


class Keda:
    """Asks a scaler about one trigger."""

    def __init__(self, channel: grpc.Channel, **metadata: str) -> None:
        self._channel = channel
        self.ref = pb.ScaledObjectRef(name="billing", namespace="default", scalerMetadata=metadata)

    def _method(self, name: str, answer: Any) -> Any:
        path = f"/externalscaler.ExternalScaler/{name}"
        make = self._channel.unary_stream if name.startswith("Stream") else self._channel.unary_unary
        return make(path, lambda request: request.SerializeToString(), answer.FromString)

    def is_active(self) -> bool:
        return bool(self._method("IsActive", pb.IsActiveResponse)(self.ref, timeout=PATIENCE_S).result)

    def spec(self) -> tuple[str, int]:
        (spec,) = self._method("GetMetricSpec", pb.GetMetricSpecResponse)(self.ref, timeout=PATIENCE_S).metricSpecs
        assert spec.targetSizeFloat == spec.targetSize
        return spec.metricName, spec.targetSize

    def metric(self) -> int:
        request = pb.GetMetricsRequest(scaledObjectRef=self.ref, metricName=self.spec()[0])
        (value,) = self._method("GetMetrics", pb.GetMetricsResponse)(request, timeout=PATIENCE_S).metricValues
        assert (value.metricName, value.metricValueFloat) == (request.metricName, value.metricValue)
        return int(value.metricValue)

    def watch(self) -> Any:
        return self._method("StreamIsActive", pb.IsActiveResponse)(self.ref, timeout=PATIENCE_S)


@pytest.fixture
def channel(protomq_server: Broker) -> Iterator[grpc.Channel]:
    """To a scaler of this broker."""
    command = [sys.executable, str(KEDA / "scaler.py"), "--listen", "127.0.0.1:0", "--namesrv", protomq_server.namesrv]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            port = process.stdout.readline().split("port=")[1].strip()
            with grpc.insecure_channel(f"127.0.0.1:{port}") as made:
                yield made
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE_S) == 0
        finally:
            process.kill()


def test_the_scaler_follows_the_lag_of_the_group(
    protomq_server: Broker, channel: grpc.Channel
) -> None:
    topic = "keda-orders"
    with Admin(namesrv=protomq_server.namesrv) as admin:
        admin.create_topic(topic, write_queues=2, read_queues=2)
    trigger = {"group": "billing", "topic": topic, "lagThreshold": "3"}
    keda, eager = Keda(channel, **trigger), Keda(channel, **trigger, allowIdleMembers="true")
    calm = Keda(channel, **trigger, activationLag="10")
    assert keda.spec() == (f"protomq-lag-billing-{topic}", 3)
    assert (keda.is_active(), keda.metric()) == (False, 0)
    watched = keda.watch()
    assert next(watched).result is False
    with Producer(namesrv=protomq_server.namesrv) as producer:
        for number in range(10):
            producer.send(topic, b"%d" % number)
    assert next(watched).result is True
    assert (keda.is_active(), calm.is_active()) == (True, False)
    assert (keda.metric(), eager.metric()) == (2 * 3, 10), "a third member would have no queue"
    with PullConsumer("billing", namesrv=protomq_server.namesrv) as consumer:
        consumer.subscribe(topic)
        count = 0
        while count < 10:
            count += len(consumer.poll(PATIENCE_S))
        consumer.commit()
    assert next(watched).result is False
    assert (keda.is_active(), keda.metric()) == (False, 0)
    watched.cancel()


def refusal(keda: Keda) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        keda.is_active()
    return caught.value.code(), caught.value.details() or ""


@pytest.mark.parametrize(
    ("metadata", "text"),
    [
        ({"topic": "t"}, "need 'group'"),
        ({"group": "g"}, "need 'topic'"),
        ({"group": "g", "topic": "t", "lagThreshold": "0"}, "lagThreshold is a whole number, 1 at least"),
        ({"group": "g", "topic": "t", "activationLag": "-1"}, "activationLag is a whole number"),
        ({"group": "g", "topic": "t", "allowIdleMembers": "yes"}, "allowIdleMembers"),
    ],
)  # fmt: skip
def test_a_trigger_that_makes_no_sense_is_refused(metadata: dict[str, str], text: str) -> None:
    with pytest.raises(scaler.IllegalTriggerError, match=text):
        scaler.Trigger.read(metadata)


def test_what_is_not_known_is_an_error_and_no_number(channel: grpc.Channel) -> None:
    code, text = refusal(Keda(channel, group="billing"))
    assert (code, "'topic'" in text) == (grpc.StatusCode.INVALID_ARGUMENT, True)
    code, text = refusal(Keda(channel, group="billing", topic="keda-nowhere"))
    assert (code, "keda-nowhere" in text) == (grpc.StatusCode.UNAVAILABLE, True)


def test_the_metric_ends_where_members_would_have_no_queue() -> None:
    def lags(*counts: int) -> list[GroupLag]:
        return [GroupLag(MessageQueue("t", "b", n), 0, lag, lag, 0.0) for n, lag in enumerate(counts)]

    trigger = scaler.Trigger("g", "t", 100, 5)
    assert trigger.metric(lags(50, 40)) == 90
    assert trigger.metric(lags(5_000, 0)) == 200
    assert [trigger.is_active(lags(count, 0)) for count in (0, 5, 6)] == [False, False, True]
