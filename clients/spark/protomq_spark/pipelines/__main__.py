"""Command line of the pipelines: python -m protomq_spark.pipelines NAME --namesrv host:port ...

With spark-submit, this file is the application: spark-submit ... "$(python -m protomq_spark.pipelines --file)" NAME ...
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING

if not __package__:  # Started by spark-submit: this folder is no place to import from.
    sys.path = [path for path in sys.path if path != os.path.dirname(os.path.abspath(__file__))]

from protomq.errors import ProtomqError
from protomq_spark.archive_table import ArchiveError
from protomq_spark.offsets import DataLossError
from protomq_spark.pipelines import archive, backfill, dlq, flights, lag, reconcile, transform
from protomq_spark.pipelines.report import RunReport, say

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PIPELINES: dict[str, ModuleType] = {
    "archive": archive,
    "backfill": backfill,
    "dlq": dlq,
    "flights": flights,
    "lag": lag,
    "reconcile": reconcile,
    "transform": transform,
}


class PrintFile(argparse.Action):
    """--file: where this file is, for spark-submit."""

    def __call__(self, *_: object) -> None:
        sys.stdout.write(os.path.abspath(__file__) + "\n")
        sys.exit(0)


def make_parser() -> argparse.ArgumentParser:
    """All pipelines with their arguments."""
    parser = argparse.ArgumentParser(prog="python -m protomq_spark.pipelines", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--file", action=PrintFile, nargs=0, help="print the path for spark-submit")
    names = parser.add_subparsers(dest="pipeline", required=True, metavar="NAME")
    for name, module in PIPELINES.items():
        summary = (module.__doc__ or "").splitlines()[0]
        command = names.add_parser(name, help=summary, description=module.__doc__)
        command.formatter_class = argparse.RawDescriptionHelpFormatter
        command.add_argument("--namesrv", required=True, help="host:port of a name server")
        command.add_argument(
            "--master", default="", help="local[2] and the like; spark-submit's if not given"
        )
        command.add_argument("--report", default="", help="folder for report.json and report.png")
        module.add_arguments(command)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a pipeline; the exit code: 0, 1 (failed, or differences found), 69 (no Java), 130 (Ctrl-C)."""
    parsed = make_parser().parse_args(arguments)
    module = PIPELINES[parsed.pipeline]
    report = RunReport(parsed.pipeline, vars(parsed))
    if getattr(module, "needs_spark", lambda _: True)(parsed):
        if shutil.which("java") is None and not os.environ.get("JAVA_HOME"):
            say("Spark needs a JDK 17 or newer (apt-get install openjdk-17-jre-headless)")
            return 69
        spark = start_spark(parsed)
    else:
        spark = None
    try:
        module.run(spark, parsed, report)
    except KeyboardInterrupt:
        report.error = "stopped by Ctrl-C"
        say(report.error)
        return 130
    except (ArchiveError, DataLossError, ProtomqError, ValueError, OSError) as error:
        report.error = f"{type(error).__name__}: {error}"
        say(f"{parsed.pipeline}: {error}")
        return 1
    except BaseException as error:
        report.error = f"{type(error).__name__}: {error}"
        raise
    finally:
        if parsed.report:
            report.write(parsed.report)
        if spark is not None:
            spark.stop()
    return 0


def start_spark(parsed: argparse.Namespace) -> SparkSession:
    """The session."""
    from pyspark.sql import SparkSession

    # Workers are started with this interpreter, which has the packages, unless the cluster says otherwise.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.appName(f"protomq {parsed.pipeline}")  # type: ignore[attr-defined, unused-ignore]
    if parsed.master:
        builder = builder.master(parsed.master)
    builder = builder.config("spark.sql.session.timeZone", "UTC")
    spark = builder.config("spark.ui.showConsoleProgress", "false").getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    return spark


if __name__ == "__main__":
    sys.exit(main())
