"""`python -m protomq_namesrv`: a name server without the command line package."""

from __future__ import annotations

import argparse
import gc
import logging
import sys
from pathlib import Path


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m protomq_namesrv", description="Run a name server."
    )
    parser.add_argument(
        "--host", help="listen here; 0.0.0.0: on all interfaces (default: 127.0.0.1)"
    )
    parser.add_argument("--port", type=int, help="gRPC port; 0: a free one (default: 9876)")
    parser.add_argument(
        "--remoting-port", type=int, help="remoting port; 0: a free one (default: 9877)"
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings, YAML or TOML")
    return parser.parse_args()


def _main() -> int:
    arguments = _parse()
    logging.basicConfig(
        level=logging.INFO,
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    # What modules leave in memory is no garbage: a fifth of a start went into looking for some.
    gc.disable()
    from protomq_runtime.config import ConfigError

    from .main import run

    gc.freeze()
    gc.enable()
    try:
        return run(
            host=arguments.host,
            port=arguments.port,
            remoting_port=arguments.remoting_port,
            config_file=arguments.config,
        )
    except (ConfigError, OSError) as error:
        sys.stderr.write(f"protomq namesrv: {error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(_main())
