"""One process of a worker: loads the program's push consumer, runs it, and tells its supervisor how it stands.

    python -m protomq_cli.worker_process app.orders:consumer NUMBER PIPE

On the pipe, a file number that it inherits, it writes a line of JSON a second: {"is_running": true, "open": 0, ...}, PushCounts beside it.
Where nobody reads it any more the supervisor is gone, and the process stops by itself.

Exit codes: 0 all that was begun is done, 1 something was not, 2 the program cannot be loaded, 3 no server answers.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

from protomq_cli.exits import ExitCode

if TYPE_CHECKING:
    from protomq import AsyncPushConsumer, PushConsumer

TELL_S: Final = 1.0
TELL_SOON_S: Final = 0.05
"""Until it runs."""


_TAKE_OUT: Final = "take that out of the program, or put it below `if __name__ == \"__main__\":`"


class LoadError(Exception):
    """The program is not there, or is none."""


def load_consumer(target: str) -> PushConsumer | AsyncPushConsumer:
    """The consumer that `module:name` names, or what the function of that name makes. Raises LoadError."""
    from protomq import AsyncPushConsumer, PushConsumer

    with _nothing_runs(target):
        found = _named(target)
        if not isinstance(found, PushConsumer | AsyncPushConsumer) and callable(found):
            if found in (PushConsumer, AsyncPushConsumer):
                raise LoadError(f"{target} is the class: name a consumer that the module makes, as in consumer = PushConsumer(\"billing\")")
            _check_makes_one(target, found)
            found = found()
    if inspect.iscoroutine(found):
        found.close()
        raise LoadError(f"{target} is a coroutine function: the worker calls it where no loop runs, write def instead of async def")
    if not isinstance(found, PushConsumer | AsyncPushConsumer):
        raise LoadError(f"{target} is no PushConsumer or AsyncPushConsumer, nor a function that returns one: {found!r}")
    if found._consumer is not None:
        raise LoadError(f"{target} is started where it is made: the worker calls run() itself, {_TAKE_OUT}")
    return found


def _check_makes_one(target: str, function: Callable[..., Any]) -> None:
    """Raises LoadError for a listener: a call of it would run its body without a message."""
    from protomq import AsyncPushConsumer, PushConsumer

    module_name = target.partition(":")[0]
    for name, consumer in vars(sys.modules[module_name]).items():
        if isinstance(consumer, PushConsumer | AsyncPushConsumer) and consumer._listens(function):
            raise LoadError(f"{target} is a listener of {module_name}:{name}: write {module_name}:{name}")
    try:
        inspect.signature(function).bind()
    except ValueError:  # A function in C that tells nothing.
        return
    except TypeError:
        raise LoadError(
            f"{target} takes arguments, so it makes no consumer: name the consumer that it listens to"
        ) from None


@contextmanager
def _nothing_runs(target: str) -> Iterator[None]:
    """While a program is loaded, a consumer's `run` would never return, and sys.exit() says nothing."""
    from protomq import AsyncPushConsumer, PushConsumer

    def refuse(_: object) -> NoReturn:
        raise LoadError(f"{target} calls run() where it is loaded: the worker calls it itself, {_TAKE_OUT}")

    kinds: tuple[Any, ...] = (PushConsumer, AsyncPushConsumer)
    runs = [kind.run for kind in kinds]
    for kind in kinds:
        kind.run = refuse
    try:
        yield
    except SystemExit as error:
        raise LoadError(f"{target} calls sys.exit({error.code!r}) where it is loaded: {_TAKE_OUT}") from error
    finally:
        for kind, run in zip(kinds, runs, strict=True):
            kind.run = run


def _named(target: str) -> object:
    module_name, colon, path = target.partition(":")
    if not colon or not module_name or not path:
        raise LoadError(f"{target!r} is no MODULE:NAME, as in app.orders:consumer")
    if "/" in module_name or module_name.startswith(".") or module_name.endswith(".py"):
        raise LoadError(f"{target!r} names a file, not a module: {_module_text(module_name, path)}")
    try:
        found: object = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
            raise LoadError(f"there is no module {error.name!r} here, in {os.getcwd()}, or installed") from error
        raise
    for name in path.split("."):
        try:
            found = getattr(found, name)
        except AttributeError:
            raise LoadError(f"module {module_name!r} has no {path!r}") from None
    return found


def _module_text(file_name: str, path: str) -> str:
    """What to write instead of a file's name."""
    here = Path.cwd()
    file = Path(os.path.normpath(here / file_name.removesuffix(".py")))
    if not file.is_relative_to(here):
        return f"write {file.name}:{path}, and start the worker in {file.parent}"
    return f"write {'.'.join(file.relative_to(here).parts).lstrip('.')}:{path}"


def main(arguments: list[str]) -> int:
    """Runs it; the exit code."""
    target, number, pipe = arguments[0], int(arguments[1]), int(arguments[2])
    # Nothing that the program starts keeps the pipe open when this process is gone.
    os.set_inheritable(pipe, False)
    # Until the consumer runs there is nothing to drain.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    sys.path.insert(0, os.getcwd())
    try:
        consumer = load_consumer(target)
    except LoadError as error:
        _say(f"worker {number}: {error}\n")
        return ExitCode.USAGE
    except Exception as error:
        _say(f"worker {number}: {target} cannot be loaded\n{_program_trace(error)}")
        return ExitCode.USAGE
    if not logging.getLogger().handlers:
        logging.basicConfig(
            level=logging.INFO, format=f"%(asctime)s worker {number} %(levelname)s %(name)s %(message)s"
        )
    return run(consumer, number, pipe)


def _say(text: str) -> None:
    """To stderr. Where that takes nothing, the exit code is to say the same all the same."""
    with suppress(OSError):
        sys.stderr.write(text)


def _program_trace(error: Exception) -> str:
    """The trace without the frames that load the program."""
    trace = traceback.TracebackException.from_exception(error)
    ours = (__file__, importlib.__file__)
    trace.stack = traceback.StackSummary.from_list(
        [frame for frame in trace.stack if frame.filename not in ours and not frame.filename.startswith("<frozen importlib")]
    )
    return "".join(trace.format())


def run(consumer: PushConsumer | AsyncPushConsumer, number: int, pipe: int) -> int:
    """Until somebody ends it; the exit code."""
    from protomq import PushConsumer
    from protomq.errors import (
        ConfigurationError,
        InvalidArgumentError,
        ProtomqError,
        UnsupportedError,
    )

    teller = _Teller(consumer, pipe)
    threading.Thread(target=teller.run, name="protomq-worker-tells", daemon=True).start()
    try:
        if isinstance(consumer, PushConsumer):
            left_count = consumer.run()
        else:
            left_count = asyncio.run(consumer.run())
    except (ConfigurationError, InvalidArgumentError, UnsupportedError) as error:
        # A filter that is none, say: the same at the next try, as what cannot be loaded.
        _say(f"worker {number}: {error}\n")
        return ExitCode.USAGE
    except ProtomqError as error:
        _say(f"worker {number}: {error}\n")
        return ExitCode.UNREACHABLE if error.retriable else ExitCode.FAILURE
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    finally:
        # With what was done since, while it drained most of all.
        with suppress(OSError):
            teller.tell()
    return ExitCode.FAILURE if left_count else ExitCode.OK


class _Teller:
    """Tells the supervisor how the consumer stands: now and then, and at the end."""

    def __init__(self, consumer: PushConsumer | AsyncPushConsumer, pipe: int) -> None:
        self._consumer = consumer
        self._pipe = pipe
        self._lock = threading.Lock()

    def tell(self) -> bool:
        """Whether it runs. Raises OSError if the supervisor is gone. What is told last is the newest."""
        with self._lock:
            is_running = self._consumer.is_running
            said = {"is_running": is_running, **self._consumer.counts._asdict()}
            os.write(self._pipe, json.dumps(said).encode() + b"\n")
        return is_running

    def run(self) -> None:
        """For ever; a supervisor that is gone ends the consumer."""
        waits = threading.Event()
        while True:
            try:
                is_running = self.tell()
            except OSError:
                os.kill(os.getpid(), signal.SIGTERM)
                return
            waits.wait(TELL_S if is_running else TELL_SOON_S)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    # Listeners that hang are on threads that are nobody's any more.
    os._exit(code)
