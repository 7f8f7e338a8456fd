"""An external scaler for KEDA: it says how far a consumer group is behind, so that KEDA runs as many members as that needs.

    python deploy/keda/scaler.py --listen 0.0.0.0:9090 --namesrv namesrv:9876

The trigger of a ScaledObject says which group (scaled_object.yaml). Rules:

- The metric is the lag of the group in one topic over all queues; a queue in which the group has committed nothing counts whole.
- More members than queues would have nothing to do. So the metric ends at queues times `lagThreshold`, unless `allowIdleMembers` is "true".
- The group is active while its lag is over `activationLag`. So KEDA may go down to no member at all.
- What is not known is no number: if a broker does not answer, KEDA gets an error, and keeps what it has.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from protomq import Admin, GroupLag, ProtomqError

sys.path.insert(0, str(Path(__file__).parent))
import externalscaler_pb2 as pb  # Its folder is no package.

LAG_THRESHOLD = 1_000
WATCH_INTERVAL_S = 1.0
"""Between two looks for StreamIsActive."""
THREADS = 16
"""Each StreamIsActive takes one; more callers than threads wait."""


class IllegalTriggerError(ValueError):
    """The metadata of a trigger make no sense; the text says what to write."""


@dataclass(frozen=True)
class Trigger:
    """What a ScaledObject wants to know."""

    group: str
    topic: str
    lag_threshold: int = LAG_THRESHOLD
    activation_lag: int = 0
    allow_idle_members: bool = False

    @classmethod
    def read(cls, metadata: Mapping[str, str]) -> Trigger:
        """Raises IllegalTriggerError."""
        for name in ("group", "topic"):
            if not metadata.get(name):
                raise IllegalTriggerError(f"the trigger's metadata need {name!r}")
        idle = metadata.get("allowIdleMembers", "false")
        if idle not in ("true", "false"):
            raise IllegalTriggerError(f"allowIdleMembers is \"true\" or \"false\", not {idle!r}")
        return cls(
            metadata["group"],
            metadata["topic"],
            _number(metadata, "lagThreshold", LAG_THRESHOLD, 1),
            _number(metadata, "activationLag", 0, 0),
            idle == "true",
        )

    @property
    def metric_name(self) -> str:
        """By which KEDA asks."""
        return f"protomq-lag-{self.group}-{self.topic}"

    def is_active(self, lags: Sequence[GroupLag]) -> bool:
        """Whether one member is needed at least."""
        return sum(each.lag for each in lags) > self.activation_lag

    def metric(self, lags: Sequence[GroupLag]) -> int:
        """KEDA wants this divided by `lag_threshold` members."""
        lag = sum(each.lag for each in lags)
        return lag if self.allow_idle_members else min(lag, len(lags) * self.lag_threshold)


def _number(metadata: Mapping[str, str], name: str, default: int, least: int) -> int:
    text = metadata.get(name, str(default))
    if not text.isdecimal() or int(text) < least:
        raise IllegalTriggerError(f"{name} is a whole number, {least} at least, not {text!r}")
    return int(text)


class Scaler:
    """The methods of ExternalScaler. Any thread."""

    def __init__(self, lags_of: Callable[[str, str], Sequence[GroupLag]]) -> None:
        """`lags_of`: of a group in a topic, one for each queue."""
        self._lags_of = lags_of

    def is_active(self, request: Any, context: grpc.ServicerContext) -> Any:
        """Whether there is anything to do."""
        trigger = _trigger(request, context)
        return pb.IsActiveResponse(result=trigger.is_active(self._lags(trigger, context)))

    def stream_is_active(self, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        """The same at first, then whenever it changes."""
        trigger = _trigger(request, context)
        ended = threading.Event()
        context.add_callback(ended.set)
        told: bool | None = None
        while not ended.is_set():
            active = trigger.is_active(self._lags(trigger, context))
            if active is not told:
                told = active
                yield pb.IsActiveResponse(result=active)
            ended.wait(WATCH_INTERVAL_S)

    def get_metric_spec(self, request: Any, context: grpc.ServicerContext) -> Any:
        """How much lag one member can bear."""
        trigger = _trigger(request, context)
        spec = pb.MetricSpec(
            metricName=trigger.metric_name,
            targetSize=trigger.lag_threshold,
            targetSizeFloat=trigger.lag_threshold,
        )
        return pb.GetMetricSpecResponse(metricSpecs=[spec])

    def get_metrics(self, request: Any, context: grpc.ServicerContext) -> Any:
        """The lag."""
        trigger = _trigger(request.scaledObjectRef, context)
        value = trigger.metric(self._lags(trigger, context))
        metric = pb.MetricValue(
            metricName=request.metricName, metricValue=value, metricValueFloat=value
        )
        return pb.GetMetricsResponse(metricValues=[metric])

    def _lags(self, trigger: Trigger, context: grpc.ServicerContext) -> Sequence[GroupLag]:
        try:
            return self._lags_of(trigger.group, trigger.topic)
        except ProtomqError as error:
            context.abort(grpc.StatusCode.UNAVAILABLE, f"the lag is not known: {error}")
            raise

    def handlers(self) -> grpc.GenericRpcHandler:
        """For a grpc.Server."""
        unary, ref = grpc.unary_unary_rpc_method_handler, pb.ScaledObjectRef.FromString
        methods = {
            "IsActive": unary(self.is_active, ref, pb.IsActiveResponse.SerializeToString),
            "StreamIsActive": grpc.unary_stream_rpc_method_handler(
                self.stream_is_active, ref, pb.IsActiveResponse.SerializeToString
            ),
            "GetMetricSpec": unary(
                self.get_metric_spec, ref, pb.GetMetricSpecResponse.SerializeToString
            ),
            "GetMetrics": unary(
                self.get_metrics,
                pb.GetMetricsRequest.FromString,
                pb.GetMetricsResponse.SerializeToString,
            ),
        }
        return grpc.method_handlers_generic_handler("externalscaler.ExternalScaler", methods)


def _trigger(ref: Any, context: grpc.ServicerContext) -> Trigger:
    try:
        return Trigger.read(ref.scalerMetadata)
    except IllegalTriggerError as error:
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        raise


def main() -> None:
    """Serves until SIGTERM."""
    parser = argparse.ArgumentParser(description="KEDA external scaler: the lag of consumer groups")
    parser.add_argument("--listen", default="127.0.0.1:9090", metavar="HOST:PORT")
    parser.add_argument("--namesrv", default=os.environ.get("PROTOMQ_NAMESRV_ADDR"), metavar="HOST:PORT[;...]")
    arguments = parser.parse_args()
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    with Admin(namesrv=arguments.namesrv) as admin, ThreadPoolExecutor(THREADS) as pool:
        server = grpc.server(pool, options=[("grpc.so_reuseport", 0)])
        server.add_generic_rpc_handlers([Scaler(admin.group_lag).handlers()])
        port = server.add_insecure_port(arguments.listen)
        server.start()
        sys.stdout.write(f"READY port={port}\n")
        sys.stdout.flush()
        stop.wait()
        server.stop(1.0).wait()


if __name__ == "__main__":
    main()
