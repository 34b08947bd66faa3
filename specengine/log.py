"""Logging set-up; owns the format and `warn_once`, knows nothing about what is logged.

logger = get_logger(__name__)
warn_once(logger, "no compiler was found; the reference operations serve")
"""

from __future__ import annotations

import logging
from functools import cache


def get_logger(name: str) -> logging.Logger:
    return logging.getLogger(name)


def configure(level: str = "info") -> None:
    """Sends the package's records to stderr, one line each."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S"))
    root = logging.getLogger("specengine")
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    root.propagate = False


@cache
def warn_once(logger: logging.Logger, message: str) -> None:
    """Warns about a fallback the first time it happens in this process."""
    logger.warning(message)
