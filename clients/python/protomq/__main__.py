"""`python -m protomq`: the command `protomq`; without a command of its own, `protomq standalone`."""

import sys


def main() -> None:
    try:
        from protomq_cli.__main__ import run
    except ModuleNotFoundError as error:
        if error.name != "protomq_cli":
            raise  # It is installed, and something in it is broken: that is for the trace to tell.
        sys.stderr.write("protomq: the server is not installed; run `pip install .` in a checkout of protomq\n")
        sys.exit(2)
    arguments = sys.argv[1:]
    if not arguments or arguments[0].startswith("-"):
        arguments = ["standalone", *arguments]
    sys.argv = ["protomq", *arguments]
    sys.exit(run())


if __name__ == "__main__":
    main()
