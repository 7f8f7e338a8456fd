"""The command `protomq`: the tree of commands, and the one place where errors become exit codes.

Grammar: noun, then verb (`topic list`). Words that stand alone run a server (`standalone`, `namesrv`, `broker`) or move
messages (`send`, `pull`, `consume`).
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Final, NamedTuple

import typer

from protomq_cli import (
    agreeing,
    backups,
    bench,
    clusters,
    completion,
    dead_letters,
    delays,
    draining,
    filters,
    group_locks,
    group_members,
    group_offsets,
    group_settings,
    groups,
    health,
    in_sync,
    leading,
    logs,
    messages,
    pops,
    replication,
    requests,
    sending,
    servers,
    spreading,
    topics,
    tracks,
    transactions,
    worker,
)
from protomq_cli.connection import translate
from protomq_cli.environment import check_environment
from protomq_cli.exits import EXIT_CODES_HELP, CliError, ExitCode, error_line, wants_json_errors
from protomq_cli.output import (
    ALL_DONE,
    NO_OUTPUT,
    escape_what_cannot_be_written,
    flush_stdout,
    forget_reader,
)
from protomq_cli.quick_values import convert_quickly

SERVERS = "Run a server"
MESSAGES = "Move messages"
ADMINISTRATION = "Look and change"
TOOLS = "Tools"

_WORDS = [
    (re.compile(pattern), words)
    for pattern, words in (
        (r"\bValue error, ", ""),
        (r"Input should be a valid integer, .*", "a whole number is expected"),
        (r"Input should be greater than or equal to (\S+)", r"it is \1 at least"),
        (r"Input should be less than or equal to (\S+)", r"it is \1 at most"),
    )
]


class Command(NamedTuple):
    """What a word runs, and under which heading the help shows it."""

    function: Callable[..., Any]
    heading: str


class Group(NamedTuple):
    """A noun, and what its verbs run."""

    help_text: str
    heading: str
    verbs: Mapping[str, Callable[..., Any]]


COMMANDS: Final[Mapping[str, Command | Group]] = {
    "standalone": Command(servers.standalone, SERVERS),
    "namesrv": Command(servers.namesrv, SERVERS),
    "broker": Command(servers.broker, SERVERS),
    "send": Command(sending.send, MESSAGES),
    "request": Command(requests.request, MESSAGES),
    "recall": Command(delays.recall, MESSAGES),
    "pull": Command(messages.pull, MESSAGES),
    "consume": Command(messages.consume, MESSAGES),
    "pop": Command(pops.pop, MESSAGES),
    "worker": Command(worker.worker, MESSAGES),
    "health": Command(health.health, SERVERS),
    "topic": Group(
        "Topics: list, create, describe, delete.",
        ADMINISTRATION,
        {
            "list": topics.list_topics, "create": topics.create, "describe": topics.describe,
            "delete": topics.delete,
        },
    ),
    "group": Group(
        "Consumer groups: list, offsets, settings, delete.",
        ADMINISTRATION,
        {
            "list": groups.list_groups, "offsets": groups.offsets, "commit": groups.commit,
            "delete": groups.delete, "lag": group_offsets.lag, "reset": group_offsets.reset,
            "clone": group_offsets.clone, "info": group_members.info, "locks": group_locks.locks,
            "members": group_members.members, "set": group_settings.set_group, "show": group_settings.show,
        },
    ),
    "filter": Group(
        "Filters that users write, as WebAssembly modules.",
        ADMINISTRATION,
        {"deploy": filters.deploy, "list": filters.list_filters, "delete": filters.delete},
    ),
    "transaction": Group(
        "Half messages that nobody has committed or rolled back.",
        ADMINISTRATION,
        {
            "list": transactions.list_transactions, "show": transactions.show, "commit": transactions.commit,
            "rollback": transactions.rollback,
        },
    ),
    "dlq": Group(
        "Dead letters: messages that groups could not process.",
        ADMINISTRATION,
        {"list": dead_letters.list_groups, "show": dead_letters.show, "replay": dead_letters.replay},
    ),
    "trace": Group(
        "What clients did with a message.",
        ADMINISTRATION,
        {"show": tracks.trace},
    ),
    "message": Group(
        "Find single messages.",
        ADMINISTRATION,
        {"query": messages.query, "track": tracks.track},
    ),
    "cluster": Group(
        "Brokers and name servers: list, status, spread, drain, forget.",
        ADMINISTRATION,
        {
            "list": clusters.list_brokers, "status": clusters.status, "drain": draining.drain,
            "forget": clusters.forget, "spread": spreading.spread, "namesrv": agreeing.name_servers,
        },
    ),
    "ha": Group(
        "Replication: masters and slaves; who leads.",
        ADMINISTRATION,
        {
            "status": replication.status, "wait": in_sync.wait_in_sync, "switch": leading.switch,
            "demote": leading.demote, "promote": leading.promote, "forget": replication.forget,
            "cancel": leading.cancel,
        },
    ),
    "log": Group(
        "The commit log on disk: dump, verify, repair, epochs.",
        TOOLS,
        {"dump": logs.dump, "verify": logs.verify, "repair": logs.repair, "epochs": logs.epochs},
    ),
    "bench": Group(
        "Measure, as RocketMQ's benchmarks do.",
        TOOLS,
        {"producer": bench.producer, "batch": bench.batch, "consumer": bench.consumer, "latency": bench.latency},
    ),
    "backup": Command(backups.backup, TOOLS),
    "restore": Command(backups.restore, TOOLS),
    "completion": Command(completion.print_completion, TOOLS),
    "version": Command(servers.version, TOOLS),
}
"""In the order in which the help shows them."""


_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


def _new_app(**settings: Any) -> typer.Typer:
    # Boxes and colours for people; for a pipe the plain form, which needs half of the time.
    mode = "rich" if sys.stdout.isatty() and os.environ.get("TERM") != "dumb" else None
    return typer.Typer(
        rich_markup_mode=mode,  # type: ignore[arg-type]
        context_settings=_SETTINGS,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        **settings,
    )


def _print_version(wanted: bool) -> None:
    if wanted:
        servers.print_version()
        raise typer.Exit


def build_app(words: Sequence[str] = ()) -> typer.Typer:
    """The tree of commands. Where `words` begin with a command's, the tree has that one alone: all of them take 0.1 s to build."""
    app = _new_app(epilog=EXIT_CODES_HELP)

    @app.callback()
    def root(
        version: Annotated[
            bool,
            typer.Option(
                "--version", callback=_print_version, is_eager=True, help="Print the version."
            ),
        ] = False,
    ) -> None:
        """RocketMQ rebuilt in Python, gRPC and protobuf first.

        First steps: `protomq standalone`, then in another terminal `protomq
        send flights hello` and `protomq pull flights`.

        The name server is the one of --namesrv, else of
        PROTOMQ_NAMESRV_ADDR, else of the line `namesrv = "HOST:PORT"` in
        ~/.config/protomq/config.toml, else one on this machine.
        """
        check_environment()

    for name in COMMANDS.keys() & set(words[:1]) or COMMANDS:
        found = COMMANDS[name]
        if isinstance(found, Command):
            app.command(name, rich_help_panel=found.heading)(found.function)
        else:
            child = _new_app(help=found.help_text)
            for verb in found.verbs.keys() & set(words[1:2]) or found.verbs:
                child.command(verb)(found.verbs[verb])
            app.add_typer(child, name=name, rich_help_panel=found.heading)
    return app


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if completion.COMPLETE_VARIABLE in os.environ:
        _complete()
    escape_what_cannot_be_written()
    try:
        command = typer.main.get_command(build_app(arguments))
        convert_quickly(command)
        # Not command.main(): it ends the process by itself when the reader of a pipe goes away.
        with command.make_context("protomq", list(arguments)) as context:
            command.invoke(context)
        flush_stdout(ALL_DONE)
    except typer.Exit as ended:
        return ended.exit_code
    except (KeyboardInterrupt, typer.Abort, EOFError):
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        forget_reader()
        return ExitCode.OK
    except CliError as error:
        return _report(error, arguments)
    except typer.TyperException as error:
        return _report(_usage_error(error), arguments)
    except Exception as error:
        known = _help_error(error, arguments) or translate(error)
        if known is None:
            raise
        return _report(known, arguments)
    return ExitCode.OK


def _complete() -> None:
    """Answers the shell and ends the process."""
    # Typer has no public name for it; its own --install-completion guesses the shell and is left out.
    from typer.completion import completion_init  # type: ignore[attr-defined]

    completion_init()
    typer.main.get_command(build_app()).main([], prog_name="protomq")


def _report(error: CliError, arguments: list[str]) -> int:
    as_json = wants_json_errors(arguments)
    if error.reason != NO_OUTPUT and (lost := _stdout_error()) is not None:
        _say(error_line(lost, as_json=as_json))
    _say(error_line(error, as_json=as_json))
    return error.exit_code


def _help_error(error: Exception, arguments: Sequence[str]) -> CliError | None:
    """What is wrong with stdout, if the help cannot be written there: typer writes it."""
    if not isinstance(error, OSError) or error.filename or not {"-h", "--help"}.intersection(arguments):
        return None
    forget_reader()
    return CliError(ExitCode.FAILURE, NO_OUTPUT, f"stdout cannot be written: {error.strerror or error}")


def _stdout_error() -> CliError | None:
    """What is wrong with stdout, if what was printed cannot be written there; a reader that has gone is no error."""
    try:
        flush_stdout()
    except BrokenPipeError:
        forget_reader()
    except CliError as error:
        forget_reader()
        return error
    return None


def _say(text: str) -> None:
    """To stderr. Where that takes nothing, the exit code says what there is to say."""
    try:
        sys.stderr.write(text + "\n")
        sys.stderr.flush()
    except OSError:
        forget_reader(sys.stderr)


def _usage_error(error: typer.TyperException) -> CliError:
    """What typer found wrong, in one line, with the command that explains it."""
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "protomq"
    message = _plain(error.format_message().rstrip("."))
    if type(error).__name__ == "NoArgsIsHelpError":
        # The message is the whole help text: shown as it is, and still an error.
        _say(error.format_message())
        message = "a command is missing"
    join = " " if message.endswith("?") else "; "
    return CliError(ExitCode.USAGE, "USAGE", f"{message}{join}`{path} --help` explains")


def _plain(message: str) -> str:
    """Typer's words for a wrong value in those of this command line."""
    for pattern, words in _WORDS:
        message = pattern.sub(words, message)
    return message


if __name__ == "__main__":
    sys.exit(main())
