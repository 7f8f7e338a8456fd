"""A Python for Spark that has its imports done: what Spark starts is a fork of a process that has them.

Spark starts a Python for each streaming query, for each kind of worker, and for each worker that failed. Each imports pyarrow,
protomq_spark and pyspark, and that from a zip of sources, which Spark puts first on the path: it is compiled each time. That is a
second of CPU, most of what a short query costs. On a busy machine it takes longer than Spark waits: "Python worker failed to connect
back" comes after ten seconds, a bound that no setting changes.

`warm_python` gives the path of an executable for PYSPARK_PYTHON. It hands its arguments, environment and standard streams to the process
that has the imports, and ends with the fork. The real Python runs what is no module, and all once that process is gone.
"""

from __future__ import annotations

import ast
import fcntl
import gc
import importlib
import io
import os
import select
import shlex
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.forked_python import run_only, take_streams

ROOT = Path(__file__).resolve().parents[2]
_WARM = (
    "pandas",
    "pyspark.worker",
    "pyspark.sql.worker.commit_data_source_write",
    "pyspark.sql.worker.create_data_source",
    "pyspark.sql.worker.data_source_pushdown_filters",
    "pyspark.sql.worker.lookup_data_sources",
    "pyspark.sql.worker.plan_data_source_read",
    "pyspark.sql.worker.python_streaming_sink_runner",
    "pyspark.sql.worker.write_into_data_source",
    "protomq_spark.batches",
    "protomq_spark.log_source",
    "protomq_spark.source",
    "protomq_spark.udf",
)
"""What Spark's workers are and what they import of ours; but for the reader of a stream, which is run as a program."""
_REQUEST_SIZE_MAX_BYTES = 1 << 17

# In a Python that imports as little as can be. The real one takes over where the warm one is gone.
_CLIENT = """\
import os, socket, sys
python, name, *arguments = sys.argv[1:]
connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
try:
    connection.connect("\\0" + name)
except OSError:
    os.execv(python, [python, *arguments])
request = repr((arguments, dict(os.environ), os.getcwd())).encode()
socket.send_fds(connection, [request], [0, 1, 2])
os.close(0)
os.close(1)
connection.recv(1)
"""


@contextmanager
def warm_python(folder: Path) -> Iterator[str]:
    """The path of the executable, which is in `folder`."""
    client, executable = folder / "client.py", folder / "python"
    name = f"protomq-python-{uuid.uuid4()}"
    client.write_text(_CLIENT)
    python = shlex.quote(sys.executable)
    # -I -S: without the site packages, whose start costs more than all the rest.
    warm = f"exec {python} -I -S {shlex.quote(str(client))} {python} {name}"
    executable.write_text(f'#!/bin/sh\n[ "$1" = -m ] && {warm} "$@"\nexec {python} "$@"\n')
    executable.chmod(0o755)
    # As pyspark sets it for its workers: a text has the same hash in all of them.
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    command = [sys.executable, "-m", __name__, name]
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == b"warm\n"
        yield str(executable)


def serve(address: str) -> socket.socket | None:
    """A connection, in a fork that is to become what is asked for; None at the end of the standard input."""
    for module in _WARM:
        importlib.import_module(module)
    # pyarrow's allocator has a thread, and starts another in a fork. Any other would be missing there.
    names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    assert len([name for name in names if name != "jemalloc_bg_thd"]) == 1, names
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listening.bind(f"\0{address}")  # No file: a name that goes with the process.
    listening.listen(64)
    print("warm", flush=True)
    poller = select.poll()
    for watched in (sys.stdin.fileno(), listening.fileno()):
        poller.register(watched, select.POLLIN)
    while True:
        if any(watched == sys.stdin.fileno() for watched, _ in poller.poll()):
            return None
        connection, _ = listening.accept()
        if not os.fork():
            listening.close()
            return connection
        connection.close()


def become(connection: socket.socket) -> None:
    """Runs the module that is asked for; whoever asked waits for the end of the connection, which is that of this process."""
    request, streams, *_ = socket.recv_fds(connection, _REQUEST_SIZE_MAX_BYTES, 3)
    (_, module, *arguments), environment, folder = ast.literal_eval(request.decode())
    take_streams(streams)
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(write_through=True)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # Spark ends a process by SIGTERM: whoever asked ends by it, and the kernel passes it on when the connection ends.
    fcntl.fcntl(connection, fcntl.F_SETSIG, signal.SIGTERM)
    fcntl.fcntl(connection, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(connection, fcntl.F_SETFL, os.O_ASYNC)
    run_only(module, arguments, environment, folder)


if __name__ == "__main__":
    asked = serve(sys.argv[1])
    if asked is not None:
        become(asked)
