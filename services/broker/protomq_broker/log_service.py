"""LogService: gives the bytes of the log for backups and healing. It runs on the admin lane, so that a cold disk does not delay slaves.

It gives only bytes that are on stable storage and confirmed, so no fail-over takes them back. A call has no session: the broker keeps no
log for its caller.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, cast

from google.protobuf.message import DecodeError

from protomq.v1.log_service_pb2 import ReadLogRequest, ReadLogResponse
from protomq.wire.record import encode_varint
from protomq_runtime.dispatch import raw
from protomq_runtime.errors import Code, ServiceError, invalid_argument, unparsable

from .ha_service import GRPC_SIZE_MAX_BYTES
from .store_errors import to_service_error

if TYPE_CHECKING:
    from protomq_runtime.call import Call
    from protomq_runtime.regions import Region

    from .store.store import Store

_LOG_TAG: Final = bytes((ReadLogResponse.LOG_FIELD_NUMBER << 3 | 2,))


class LogService:
    """Implements protomq.v1.LogService."""

    def __init__(self, store: Store, broker_name: str, transfer_size_bytes: int) -> None:
        """`transfer_size_bytes`: most bytes of the log in one answer."""
        self._store = store
        self._broker_name = broker_name
        self._transfer_size_bytes = transfer_size_bytes

    @raw
    def read_log(self, call: Call) -> None:
        """See the service."""
        try:
            self._answer(call, ReadLogRequest.FromString(bytes(call.payload)))
        except DecodeError:
            call.fail(unparsable("protomq.v1.ReadLogRequest"))
        except Exception as error:
            call.fail(to_service_error(error))

    def _answer(self, call: Call, request: ReadLogRequest) -> None:
        if request.broker_name not in ("", self._broker_name):
            raise ServiceError(
                Code.NOT_FOUND,
                "BROKER_NOT_FOUND",
                f"this is broker {self._broker_name}, not {request.broker_name!r}",
                metadata={"broker_name": request.broker_name},
            )
        for field in ("position", "size_max_bytes"):
            if getattr(request, field) < 0:
                raise invalid_argument(field, "must be 0 or above")
        store = self._store
        # Read the start before the end: then the record that reports the log's start is before the end.
        first = store.min_position
        end = min(store.readable_position, store.flushed_position)
        epoch_position, epoch = store.epochs.last[:2]
        header = ReadLogResponse(
            broker_name=self._broker_name,
            first_position=first,
            end_position=end,
            segment_size_bytes=store.config.segment_size_bytes,
            epoch=epoch,
            epoch_position=epoch_position,
        ).SerializeToString()
        size_bytes = min(request.size_max_bytes, self._transfer_size_bytes)
        if call.transport == "grpc":
            size_bytes = min(size_bytes, GRPC_SIZE_MAX_BYTES)
        size_bytes = min(size_bytes, end - request.position)
        regions = (
            store.log_regions(request.position, request.position + size_bytes)
            if size_bytes > 0
            else []
        )
        found_bytes = sum(region.size_bytes for region in regions)
        if found_bytes:
            header += _LOG_TAG + encode_varint(found_bytes)
        # The store's regions have the same three fields as the runtime's.
        call.answer(header, cast("list[Region]", regions), found_bytes)
