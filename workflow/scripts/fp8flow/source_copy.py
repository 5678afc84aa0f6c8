"""The workflow's own source in src/ of a submission, and which revision it is.

What is copied is enough to run the workflow again; results, notes of tools and, unless they are
used, the articles of the demo are left out.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fp8flow.code_hash import code_hash
from fp8flow.errors import FlowError

CHECKOUT = Path(__file__).resolve().parents[3]
# Names in src/<benchmark>.
SOURCE, REVISION = "fp8flow", "source.json"
_NEEDED = ("Snakefile", "workflow", "envs", "resources")
_COPIED = (*_NEEDED, "profiles", "Makefile", "LICENSE")
_DEMO = Path("resources/demo")
_SCRIPTS = Path("workflow/scripts")
_TIMEOUT_S = 60


def _is_source(path: Path, uses_demo: bool) -> bool:
    """Tell whether a file, relative to the checkout, is copied."""
    if any(part.startswith(".") or part == "__pycache__" for part in path.parts):
        return False
    return uses_demo or _DEMO not in path.parents


def source_files(checkout: Path, config: Mapping[str, Any]) -> Iterator[Path]:
    """Yield the files that are copied, relative to the checkout, in order.

    Args:
        checkout: the workflow's folder.
        config: the effective configuration.

    Raises:
        FlowError: if the checkout lacks a part.
    """
    if missing := [name for name in _NEEDED if not (checkout / name).exists()]:
        raise FlowError(f"{checkout} is no whole checkout of fp8flow: no {', '.join(missing)}")
    sections = (config.get("dataset") or {}, config.get("calibration") or {})
    uses_demo = any(section.get("source") == "demo" for section in sections)
    for name in _COPIED:
        top = checkout / name
        for path in [top] if top.is_file() else sorted(top.rglob("*")):
            relative = path.relative_to(checkout)
            if path.is_file() and _is_source(relative, uses_demo):
                yield relative


def copy_source(checkout: Path, target: Path, config: Mapping[str, Any]) -> None:
    """Copy the workflow's source; see :func:`source_files`."""
    for name in source_files(checkout, config):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(checkout / name, target / name)


def _git(checkout: Path, *arguments: str) -> str:
    # Without optional locks, git writes nothing: a job leaves the checkout as it is.
    command = ["git", "--no-optional-locks", "-C", str(checkout), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
    return done.stdout.strip()


def git_revision(checkout: Path) -> dict[str, Any]:
    """Return ``commit`` and ``dirty`` of a checkout, None where not known, and a ``note``.

    Only what is copied counts as a change; a checkout that merely lies inside another repository
    is none.
    """
    nothing = {"commit": None, "dirty": None, "note": "not a git checkout"}
    if not (checkout / ".git").exists():
        return nothing
    try:
        commit = _git(checkout, "rev-parse", "HEAD")
        changes = _git(checkout, "status", "--porcelain", "--", *_COPIED)
    except (OSError, subprocess.SubprocessError) as error:
        lines = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        return nothing | {"note": f"git cannot tell: {lines[0] if lines else error}"}
    note = "with changes that are not committed" if changes else ""
    return {"commit": commit, "dirty": bool(changes), "note": note}


def run_code_hash(source: Path, rule: str, backend: str) -> str:
    """Return the code hash of a run's rule, computed from copied sources.

    Args:
        source: ``src/<benchmark>/fp8flow`` of a submission.
        rule: run_performance or run_accuracy.
        backend: the engine; its module and, if it has one, its server program count.

    Raises:
        FlowError: if a program is missing or cannot be parsed.
    """
    root = source / _SCRIPTS
    programs = [f"{rule}.py", "loadgen_worker.py", f"fp8flow/backends/{backend}.py"]
    server = f"serve_{backend}.py"
    return code_hash(root, [*programs, *([server] if (root / server).is_file() else [])])
