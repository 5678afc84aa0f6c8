"""Pinned tool versions: what the lock file says, what is installed, and whether they agree."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import metadata
from pathlib import Path

from fp8flow.errors import FlowError

_PIN = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;]+)(?:\s*;\s*(.+))?$")


def _normalise(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _marker_holds(marker: str | None) -> bool:
    if marker is None:
        return True
    from packaging.markers import Marker

    return Marker(marker).evaluate()


def prefer_own_interpreter() -> None:
    """Make ``python`` in jobs the interpreter that runs Snakemake.

    An environment that Snakemake activates for a rule still comes first.
    """
    own = str(Path(sys.executable).parent)
    os.environ["PATH"] = os.pathsep.join([own, os.environ.get("PATH", os.defpath)])


def locked_versions(lock_files: Iterable[Path], names: Iterable[str]) -> dict[str, str]:
    """Return the pinned version of each distribution in ``names`` from requirements locks.

    Raises:
        FlowError: if one of them is not pinned there.
    """
    pins: dict[str, str] = {}
    for lock_file in lock_files:
        pins |= _pins(lock_file.read_text(encoding="utf-8"))
    wanted = {name: pins.get(_normalise(name)) for name in names}
    if missing := sorted(name for name, version in wanted.items() if version is None):
        raise FlowError(f"no lock file in envs/ pins {', '.join(missing)}; run `make lock`")
    return {name: version for name, version in sorted(wanted.items()) if version is not None}


@cache
def _pins(lock: str) -> dict[str, str]:
    pins = {}
    for line in lock.splitlines():
        match = _PIN.match(line.strip())
        if match and _marker_holds(match[3]):
            pins[_normalise(match[1])] = match[2]
    return pins


def installed_versions(names: Iterable[str]) -> dict[str, str]:
    """Return the installed version of each distribution; ``missing`` where there is none."""
    versions = {}
    for name in sorted(names):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "missing"
    return versions


def check_tools(pinned: Mapping[str, str]) -> None:
    """Compare installed versions with the pinned ones; a local suffix such as +cpu is ignored.

    Args:
        pinned: versions by distribution; ``X.*`` allows every version that begins with ``X.``.

    Raises:
        FlowError: listing every difference.
    """
    installed = installed_versions(pinned)
    wrong = [
        f"{name}: pinned {version}, installed {installed[name]}"
        for name, version in sorted(pinned.items())
        if not _agree(installed[name].split("+")[0], version.split("+")[0])
    ]
    if wrong:
        listed = "\n  ".join(wrong)
        raise FlowError(
            f"the environment differs from the lock file:\n  {listed}\n"
            "Run `make install`, or pin what is installed with `make lock`."
        )


def _agree(installed: str, pinned: str) -> bool:
    if pinned.endswith(".*"):
        return f"{installed}.".startswith(pinned.removesuffix("*"))
    return installed == pinned
