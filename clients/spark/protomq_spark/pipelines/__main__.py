"""Command line of the pipelines."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from types import ModuleType

from . import backfill, flights, reconcile, transform
from .report import RunReport

PIPELINES: dict[str, ModuleType] = {
    "backfill": backfill,
    "flights": flights,
    "reconcile": reconcile,
    "transform": transform,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a pipeline; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m protomq_spark.pipelines", description=__doc__)
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
    parsed = parser.parse_args(arguments)
    if shutil.which("java") is None and not os.environ.get("JAVA_HOME"):
        sys.stderr.write(
            "Spark needs a JDK 17 or newer (apt-get install openjdk-17-jre-headless)\n"
        )
        return 69
    from pyspark.sql import SparkSession

    # Workers are started with this interpreter, which has the packages, unless the cluster says otherwise.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.appName(f"protomq {parsed.pipeline}")  # type: ignore[attr-defined, unused-ignore]
    if parsed.master:
        builder = builder.master(parsed.master)
    builder = builder.config("spark.sql.session.timeZone", "UTC")
    spark = builder.config("spark.ui.showConsoleProgress", "false").getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    report = RunReport(parsed.pipeline, vars(parsed))
    try:
        PIPELINES[parsed.pipeline].run(spark, parsed, report)
    finally:
        if parsed.report:
            report.write(parsed.report)
        spark.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
