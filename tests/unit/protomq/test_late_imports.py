"""A fork in the midst of an import: the child must not wait for a thread that it does not have."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import resolve_name
from pathlib import Path

import pytest

import protomq

SDK = Path(protomq.__file__).parent

FIRST_CALL = """
import asyncio, importlib.abc, os, signal, sys, threading, time, warnings
from protomq import AsyncProducer, Producer
from protomq._transport import SyncTransport
from protomq.errors import NoRouteError
warnings.simplefilter("ignore")  # It forks with threads, that is the matter here.

importing = threading.Event()

class Slow(importlib.abc.MetaPathFinder):
    # Makes the import last: the fork is to fall into it.
    def find_spec(self, name, *_):
        if name == "{module}":
            importing.set()
            time.sleep(0.5)

sys.meta_path.insert(0, Slow())

def send():
    try:
        Producer(namesrv="127.0.0.1:1").send("x", b"", timeout_s=2)
    except NoRouteError:
        pass

async def send_from_coroutine():
    async with AsyncProducer(namesrv="127.0.0.1:1", send_timeout_s=2) as producer:
        try:
            await producer.send("x", b"")
        except NoRouteError:
            pass

def send_async():
    asyncio.run(send_from_coroutine())

def open_grpc():
    SyncTransport()._grpc_link("127.0.0.1:1").close()

thread = threading.Thread(target={function})
thread.start()
assert importing.wait(60)
child = os.fork()
if child == 0:
    signal.alarm(20)
    {function}()
    os._exit(0)
thread.join()
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.parametrize(
    ("function", "module"),
    [
        ("send", "protomq.v1.route_service_pb2"),
        ("send_async", "protomq.v1.route_service_pb2"),
        ("open_grpc", "protomq._grpc_transport"),
        ("open_grpc", "grpc._channel"),  # The first channel imports it.
    ],
)
def test_a_child_forked_during_the_first_call_calls(function: str, module: str) -> None:
    program = FIRST_CALL.format(function=function, module=module)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def late_imports() -> Iterator[tuple[str, str]]:
    """(place, module) of each import within a function that does not stand under `fork_waits`."""
    for path in sorted(SDK.rglob("*.py")):
        parts = path.relative_to(SDK).parts
        if parts[0] in ("testing", "v1") or path.name in ("__main__.py", "codecs.py"):
            continue  # The codecs may not be installed; `load_needed_modules` asks for all of them.
        package = ".".join(("protomq", *parts[:-1]))
        for node in ast.parse(path.read_text()).body:
            for function in ast.walk(node):
                if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                    for line, module in unguarded(function.body, package):
                        yield f"{path.name}:{line}", module


def unguarded(body: list[ast.stmt], package: str) -> Iterator[tuple[int, str]]:
    for statement in body:
        if isinstance(statement, ast.With) and any(
            isinstance(item.context_expr, ast.Name) and item.context_expr.id == "fork_waits"
            for item in statement.items
        ):
            continue
        if isinstance(statement, ast.Import):
            for alias in statement.names:
                yield statement.lineno, alias.name
        elif isinstance(statement, ast.ImportFrom):
            base = resolve_name("." * statement.level + (statement.module or ""), package)
            for alias in statement.names:
                # `from .v1 import x_pb2` names a module, `from .x import y` something in it.
                within = (SDK.parent / Path(*base.split("."), alias.name + ".py")).exists()
                yield statement.lineno, f"{base}.{alias.name}" if within else base
        else:
            for name in ("body", "orelse", "finalbody"):
                yield from unguarded(getattr(statement, name, []), package)
            for handler in getattr(statement, "handlers", []):
                yield from unguarded(handler.body, package)


def test_a_late_import_is_done_when_a_client_is_there_or_makes_forks_wait() -> None:
    code = "import sys, protomq; protomq.Producer(); protomq.PullConsumer(); protomq.Admin(); print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    loaded = set(done.stdout.split())
    found = list(late_imports())
    assert len(found) > 10  # It looks where imports are.
    assert [place for place in found if place[1] not in loaded] == []
