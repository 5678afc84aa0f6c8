"""Content identity of source files, cheap enough to be taken at every start.

Time stamps say nothing about content: copying tools keep old ones, checkouts set new ones.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

WHOLE_BYTES = 256 << 20
SAMPLES = 256
SAMPLE_BYTES = 64 << 10


def fingerprint(path: Path) -> str:
    """Return a digest of a file's content.

    Up to 256 MiB every byte counts. Of larger files (weights) it is the size and 256 blocks of
    64 KiB spread evenly over the file, first and last included: retrained, requantized or
    truncated weights differ there; a change of single bytes elsewhere may not.
    """
    stat = path.stat()
    return _fingerprint(str(path.absolute()), stat.st_size, stat.st_mtime_ns)


@cache
def _fingerprint(path: str, size: int, mtime_ns: int) -> str:
    digest = hashlib.sha256()
    with Path(path).open("rb") as stream:
        if size <= WHOLE_BYTES:
            return f"sha256:{hashlib.file_digest(stream, 'sha256').hexdigest()}"
        for number in range(SAMPLES):
            stream.seek((size - SAMPLE_BYTES) * number // (SAMPLES - 1))
            digest.update(stream.read(SAMPLE_BYTES))
    return f"sampled:{size}:{digest.hexdigest()}"
