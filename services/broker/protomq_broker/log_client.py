"""Reads the log of another broker over its remoting port. Backups and the healing of damage use it."""

from __future__ import annotations

from types import TracebackType
from typing import Final

from protomq.v1 import log_service_pb2 as pb
from protomq.v1 import options_pb2
from protomq_runtime.addresses import Address
from protomq_runtime.remoting_client import RemotingClient

from .store.tools.backup_source import SourceLook

CALL_TIMEOUT_S: Final = 10.0
PART_SIZE_BYTES: Final = 1 << 20

_SERVICE: Final = pb.DESCRIPTOR.services_by_name["LogService"]
_READ_LOG: Final = int(
    _SERVICE.methods_by_name["ReadLog"].GetOptions().Extensions[options_pb2.remoting].method_id
)


class LogClient:
    """One connection, one thread. A source of backups (`LogSource`)."""

    def __init__(
        self,
        address: Address,
        client_id: str,
        broker_name: str = "",
        *,
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> None:
        """Connects. `broker_name`: name that the broker must have; "": any. `timeout_s`: of connecting, and of each call.

        Raises OSError, ServiceError.
        """
        self._broker_name = broker_name
        self._timeout_s = timeout_s
        self._client = RemotingClient(address, options_pb2.LANE_ADMIN, client_id, timeout_s=timeout_s)

    def __enter__(self) -> LogClient:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connection."""
        self._client.close()

    def look(self) -> SourceLook:
        """Returns how far the log goes. Raises OSError, ServiceError."""
        answer = self._ask(0, 0)
        return SourceLook(
            answer.broker_name,
            answer.segment_size_bytes,
            answer.first_position,
            answer.end_position,
            epoch=answer.epoch,
            epoch_position=answer.epoch_position,
        )

    def read(self, position: int, size_max_bytes: int) -> bytes:
        """See LogSource. Raises OSError, ServiceError."""
        return self._ask(position, min(size_max_bytes, PART_SIZE_BYTES)).log

    def sealed_path(self, base_position: int) -> str:
        """See LogSource. Returns "" since the files are on another machine."""
        return ""

    def _ask(self, position: int, size_max_bytes: int) -> pb.ReadLogResponse:
        request = pb.ReadLogRequest(
            broker_name=self._broker_name, position=position, size_max_bytes=size_max_bytes
        )
        payload = self._client.call(_READ_LOG, request.SerializeToString(), self._timeout_s)
        return pb.ReadLogResponse.FromString(payload)
