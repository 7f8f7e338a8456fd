"""The bare loops that bound what a Python server can do: `python -m tests.bench.limits remoting|grpc|sendfile|mapped`.

Each prints the same ready line as a broker and is driven by the same clients over the same bytes; it does nothing but move them.

    remoting FOLDER   receives a frame, writes it to a preallocated file of 1 GiB (a new one when it is full), answers
    grpc              grpc.aio: receives the bytes, answers with a few
    sendfile FILE     answers each frame with the next so many bytes of the file, by os.sendfile
    mapped FILE       the same from a mapping, as a master sends what was just written to its slave
"""

from __future__ import annotations

import asyncio
import mmap
import os
import selectors
import socket
import struct
import sys
from pathlib import Path
from typing import Final

from protomq.wire.frames import HEADER, HEADER_SIZE_BYTES, LENGTH_SIZE_BYTES, MAGIC, encode_answer

_SEGMENT_SIZE_BYTES: Final = 1 << 30
_BUFFER_BYTES: Final = 4 << 20
_ANSWER: Final = b"\x08\x01\x18\x01\x20\x80\x02"
"""As large as a SendResponse."""
_SIZE: Final = struct.Struct("<Q")


def main() -> None:
    """Serve until killed."""
    kind = sys.argv[1]
    if kind == "grpc":
        asyncio.run(_serve_grpc())
        return
    path = Path(sys.argv[2])
    loop: _FileWriter | _FileSender
    if kind == "remoting":
        loop = _FileWriter(path)
    else:
        loop = _MappedSender(path) if kind == "mapped" else _FileSender(path)
    listener = socket.create_server(("127.0.0.1", 0))
    print(f"ready remoting=127.0.0.1:{listener.getsockname()[1]}", flush=True)
    selector = selectors.EpollSelector()
    selector.register(listener, selectors.EVENT_READ)
    buffer = bytearray(_BUFFER_BYTES)
    while True:
        for key, _ in selector.select():
            if key.fileobj is listener:
                connection, _ = listener.accept()
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
                _greet(connection)
                selector.register(connection, selectors.EVENT_READ)
            else:
                assert isinstance(key.fileobj, socket.socket)
                # Blocking: a bare loop may wait for the rest of a frame, its clients have sent it all.
                if not loop.serve(key.fileobj, buffer):
                    selector.unregister(key.fileobj)
                    key.fileobj.close()


def _greet(connection: socket.socket) -> None:
    """Takes the hello and answers with an empty welcome."""
    head = connection.recv(len(MAGIC) + HEADER_SIZE_BYTES, socket.MSG_WAITALL)
    header = HEADER.unpack_from(head, len(MAGIC))
    connection.recv(header[0] + LENGTH_SIZE_BYTES - HEADER_SIZE_BYTES, socket.MSG_WAITALL)
    connection.sendall(encode_answer(0, 0, 0))


class _FileWriter:
    """Frame -> file -> answer."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._count = 0
        self._open_segment()

    def _open_segment(self) -> None:
        path = self._folder / f"{self._count:020d}"
        self._file = os.open(path, os.O_RDWR | os.O_CREAT)
        os.posix_fallocate(self._file, 0, _SEGMENT_SIZE_BYTES)
        self._position = 0
        self._count += 1

    def serve(self, connection: socket.socket, buffer: bytearray) -> bool:
        """One frame; False when the caller has hung up."""
        view = memoryview(buffer)
        filled = connection.recv_into(view, _BUFFER_BYTES)
        if not filled:
            return False
        length, request_id, method_id, _flags, _status, _timeout = HEADER.unpack_from(buffer)
        size = length + LENGTH_SIZE_BYTES
        while filled < size:
            received = connection.recv_into(view[filled:size], 0, socket.MSG_WAITALL)
            if not received:
                return False
            filled += received
        if self._position + size > _SEGMENT_SIZE_BYTES:
            os.close(self._file)
            self._open_segment()
        os.pwrite(self._file, view[HEADER_SIZE_BYTES:size], self._position)
        self._position += size
        connection.sendall(encode_answer(request_id, method_id, len(_ANSWER)) + _ANSWER)
        return True


class _FileSender:
    """Frame -> region of the file."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDONLY)
        self._size = os.fstat(self._file).st_size
        self._position = 0

    def serve(self, connection: socket.socket, buffer: bytearray) -> bool:
        """One frame; False when the caller has hung up."""
        filled = connection.recv_into(buffer, HEADER_SIZE_BYTES + _SIZE.size, socket.MSG_WAITALL)
        if not filled:
            return False
        _length, request_id, method_id, _flags, _status, _timeout = HEADER.unpack_from(buffer)
        (size,) = _SIZE.unpack_from(buffer, HEADER_SIZE_BYTES)
        if self._position + size > self._size:
            self._position = 0
        connection.sendall(encode_answer(request_id, method_id, size), socket.MSG_MORE)
        end = self._position + size
        while self._position < end:
            self._position += self._send(connection, end - self._position)
        return True

    def _send(self, connection: socket.socket, size_bytes: int) -> int:
        return os.sendfile(connection.fileno(), self._file, self._position, size_bytes)


class _MappedSender(_FileSender):
    """The same from a mapping."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        mapping = mmap.mmap(self._file, self._size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        mapping.madvise(mmap.MADV_RANDOM)
        self._memory = memoryview(mapping)

    def _send(self, connection: socket.socket, size_bytes: int) -> int:
        return connection.send(self._memory[self._position : self._position + size_bytes])


async def _serve_grpc() -> None:
    import grpc
    import grpc.aio

    async def answer(request: bytes, context: object) -> bytes:
        return _ANSWER

    class Handlers(grpc.GenericRpcHandler):
        def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
            return grpc.unary_unary_rpc_method_handler(answer)

    server = grpc.aio.server(
        options=[("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", -1)]
    )
    server.add_generic_rpc_handlers((Handlers(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"ready grpc=127.0.0.1:{port}", flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    main()
