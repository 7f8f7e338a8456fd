"""What clients have in common: threads, sockets and what they have promised brokers belong to the process that made them."""

from __future__ import annotations

from typing import Any, NoReturn

from .errors import WrongTypeError


class OfOneProcess:
    """A client, which is neither pickled (for multiprocessing, or Spark's executors) nor copied."""

    def __reduce_ex__(self, _: Any) -> NoReturn:
        raise WrongTypeError(
            f"{type(self).__name__} belongs to the process that made it, and cannot be pickled or copied: make one where it is used"
        )
