"""Logging to the terminal and to the rule's log file, and progress bars for long work."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from tqdm import tqdm

Item = TypeVar("Item")

_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"


def get_logger(name: str) -> logging.Logger:
    """Return the logger of one module; ``name`` is its ``__name__``."""
    return logging.getLogger(name)


def configure_logging(log_file: Path | None) -> None:
    """Send records to stderr and, when given, to ``log_file`` (replaced, its folder made)."""
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stderr)]
    if log_file is not None:
        log_file.parent.mkdir(parents=True, exist_ok=True)
        handlers.append(logging.FileHandler(log_file, mode="w", encoding="utf-8"))
    logging.basicConfig(level=logging.INFO, format=_FORMAT, handlers=handlers, force=True)
    logging.captureWarnings(True)


def progress(
    items: Iterable[Item], description: str, total: int | None = None, unit: str = "it"
) -> Iterator[Item]:
    """Iterate over ``items`` with a bar on stderr that stays readable in a log file."""
    interval_s = 0.2 if sys.stderr.isatty() else 5.0
    yield from tqdm(
        items, desc=description, total=total, unit=unit, mininterval=interval_s, file=sys.stderr
    )
