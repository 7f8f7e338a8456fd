"""What a program most likely does by mistake, told so that its author sees it.

A RuntimeWarning is shown by default, with the line that calls. The log gets the same words where the program has set one up; else
they would stand on stderr twice.
"""

from __future__ import annotations

import logging
import warnings


def warn(logger: logging.Logger, text: str, stacklevel: int = 1) -> None:
    """Tells `text` to the log and in a RuntimeWarning; `stacklevel` 1: about the line that calls this function."""
    if logger.hasHandlers():
        logger.warning("%s", text)
    warnings.warn(text, RuntimeWarning, stacklevel=stacklevel + 1)
