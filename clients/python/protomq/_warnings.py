"""What a program most likely does by mistake, told so that its author sees it.

The SDK's log is silent until the program sets up logging. A RuntimeWarning is shown by default, with the line that calls; the log
gets the same words.
"""

from __future__ import annotations

import logging
import warnings


def warn(logger: logging.Logger, text: str, stacklevel: int = 1) -> None:
    """Tells `text` to the log and in a RuntimeWarning; `stacklevel` 1: about the line that calls this function."""
    logger.warning("%s", text)
    warnings.warn(text, RuntimeWarning, stacklevel=stacklevel + 1)
