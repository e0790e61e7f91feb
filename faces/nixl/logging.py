"""NIXL's loggers, which are named under "nixl" and write to standard output at the level of ``NIXL_LOG_LEVEL``."""

from __future__ import annotations

import functools
import logging
import os
import sys

_LEVELS = {
    "TRACE": logging.DEBUG,
    "DEBUG": logging.DEBUG,
    "INFO": logging.INFO,
    "WARN": logging.WARNING,
    "ERROR": logging.ERROR,
    "FATAL": logging.CRITICAL,
}


class _Standard(logging.StreamHandler):  # type: ignore[type-arg]
    """A handler that always writes to the current `sys.stdout`, which a program may replace."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stdout
        super().emit(record)


@functools.cache
def _root() -> logging.Logger:
    root = logging.getLogger("nixl")
    name = os.environ.get("NIXL_LOG_LEVEL", "")
    root.setLevel(_LEVELS.get(name.upper(), logging.INFO))
    if not root.handlers:
        handler = _Standard(sys.stdout)
        text = "%(asctime)s NIXL %(levelname)-7s %(filename)s:%(lineno)d %(message)s"
        handler.setFormatter(logging.Formatter(text, "%Y-%m-%d %H:%M:%S"))
        root.addHandler(handler)
        root.propagate = False
    if name and name.upper() not in _LEVELS:
        root.warning("NIXL_LOG_LEVEL is ignored: expected one of %s, not %r", ", ".join(_LEVELS), name)
    return root


def get_logger(name: str) -> logging.Logger:
    return _root().getChild(name.lstrip("_"))
