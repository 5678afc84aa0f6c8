"""Products and their records: what was made, from what, and proof that it is still intact.

A product is a JSON record, with or without files beside it. The record is written last and by
rename, so a product either has a complete record or does not exist. Record layout::

    {"schema": "fp8flow/1", "rule": ..., "spec": {...}, "inputs": {name: digest},
     "input_lineages": [...], "lineage": ...,
     "files": {relative path: {"sha256": ..., "bytes": ...}}, "digest": ...,
     "result": {...}, "tools": {...}, "host": {...}, "modules": [...], "started_at": ...,
     "duration_s": ..., "seal": ...}

``digest`` covers the files (or the result, for a record without files), not time or host: two
runs with the same outcome have the same digest. ``seal`` covers the whole record, so a value
that was edited later is noticed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import shutil
import socket
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fp8flow.errors import FlowError
from fp8flow.spec import Spec, canonical_json, sha256_text
from fp8flow.tools import installed_versions

SCHEMA = "fp8flow/1"
MANIFEST = "manifest.json"
NOTE = ".fp8flow-product.json"
_CHUNK_BYTES = 1 << 22


def sha256_file(path: Path) -> str:
    """Return the SHA-256 hex digest of a file, read in chunks."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def sha256_files(paths: Sequence[Path]) -> list[str]:
    """Return the digests of files, several read at a time: hashing leaves the interpreter free."""
    with ThreadPoolExecutor(min(len(paths), os.cpu_count() or 1) or 1) as pool:
        return list(pool.map(sha256_file, paths))


def describe_files(root: Path, names: list[str] | None = None) -> dict[str, dict[str, Any]]:
    """Return ``{relative path: {"sha256", "bytes"}}`` for the files below ``root``.

    Args:
        root: the folder that paths are relative to.
        names: the files to describe; all but the manifest when left out.
    """
    if names is None:
        found = (p for p in sorted(root.rglob("*")) if p.is_file())
        names = [p.relative_to(root).as_posix() for p in found if p != root / MANIFEST]
    paths = [root / name for name in names]
    return {
        name: {"sha256": digest, "bytes": path.stat().st_size}
        for name, path, digest in zip(names, paths, sha256_files(paths), strict=True)
    }


def content_digest(files: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    """Return the digest of a product's content: its files, or its result if it has none."""
    return sha256_text(canonical_json(files or result))


def lineage(spec: Mapping[str, Any], inputs: Iterable[str]) -> str:
    """Return the identity of how a product came about: its spec and the lineages of its inputs."""
    return sha256_text(canonical_json({"spec": spec, "inputs": sorted(inputs)}))


def record_seal(data: Mapping[str, Any]) -> str:
    """Return the digest of everything in a record but the seal itself."""
    return sha256_text(canonical_json({key: data[key] for key in data if key != "seal"}))


def host_facts() -> dict[str, Any]:
    """Return what identifies the machine in a record."""
    return {
        "hostname": socket.gethostname(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "cpu_count": os.cpu_count(),
    }


def atomic_write_text(path: Path, text: str) -> None:
    """Write ``text`` so that a reader sees either the old file or the whole new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@dataclass(frozen=True)
class Record:
    """A record as read from disk; ``root`` is the folder its file names are relative to."""

    path: Path
    data: dict[str, Any]

    @property
    def root(self) -> Path:
        """Folder of the record."""
        return self.path.parent

    @property
    def digest(self) -> str:
        """Content digest."""
        return str(self.data["digest"])

    @property
    def result(self) -> dict[str, Any]:
        """What the rule has to say about its product."""
        result: dict[str, Any] = self.data["result"]
        return result

    @property
    def spec(self) -> dict[str, Any]:
        """The spec it was made with."""
        spec: dict[str, Any] = self.data["spec"]
        return spec


def read_record(path: Path) -> Record:
    """Read a record.

    Raises:
        FlowError: if it is missing, not JSON, not a record of this schema, or was edited.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise FlowError(f"{path} is missing; run the rule that makes it") from error
    except (OSError, ValueError) as error:
        raise FlowError(f"{path} cannot be read as a record: {error}") from error
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise FlowError(f"{path} is not a record of schema {SCHEMA}; delete it and run again")
    if data.get("seal") != record_seal(data):
        raise FlowError(
            f"{path} was edited after it was written: its seal does not match; delete it and run "
            "snakemake again"
        )
    return Record(path, data)


def verify_record(path: Path) -> Record:
    """Read a record and compare every file it lists with what is on disk.

    Raises:
        FlowError: naming each file that is missing or differs.
    """
    record = read_record(path)
    problems = []
    whole = []
    for name, expected in record.data["files"].items():
        file = record.root / name
        if not file.is_file():
            problems.append(f"{name} is missing")
        elif file.stat().st_size != expected["bytes"]:
            problems.append(f"{name} has {file.stat().st_size} bytes, not {expected['bytes']}")
        else:
            whole.append(name)
    digests = sha256_files([record.root / name for name in whole])
    for name, digest in zip(whole, digests, strict=True):
        if digest != record.data["files"][name]["sha256"]:
            problems.append(f"{name} has other content than recorded")
    if path.name == MANIFEST:
        problems += [f"{name} was added" for name in _foreign(record.root, record.data["files"])]
    if problems:
        listed = "\n  ".join(problems)
        raise FlowError(
            f"the product of {path} was changed after it was made:\n  {listed}\n"
            f"Delete {path} and run snakemake again to rebuild it."
        )
    return record


def _compose(
    spec: Spec,
    inputs: Mapping[str, Record],
    files: dict[str, dict[str, Any]],
    result: dict[str, Any],
    started: float,
) -> dict[str, Any]:
    ancestry = {record.data["lineage"] for record in inputs.values()}
    data = {
        "schema": SCHEMA,
        "rule": spec.rule,
        "spec": spec.as_dict(),
        "inputs": {name: record.digest for name, record in inputs.items()},
        "input_lineages": sorted(ancestry),
        "lineage": lineage(spec.as_dict(), ancestry),
        "files": files,
        "digest": content_digest(files, result),
        "result": result,
        "tools": installed_versions(spec.tools),
        "host": host_facts(),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "modules": sorted(name for name in sys.modules if name.startswith("fp8flow.")),
        "started_at": datetime.fromtimestamp(started, UTC).isoformat(timespec="seconds"),
        "duration_s": round(time.time() - started, 3),
    }
    # As it will be read back, so that the seal of what is on disk can be compared.
    data = json.loads(json.dumps(data, allow_nan=False))
    return data | {"seal": record_seal(data)}


def _dump(data: dict[str, Any]) -> str:
    return json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def write_record(
    path: Path,
    spec: Spec,
    result: dict[str, Any],
    *,
    inputs: Mapping[str, Record] | None = None,
    files: list[str] | None = None,
    started: float | None = None,
) -> Record:
    """Write the record of a product whose files (relative to the record) are already there.

    Args:
        path: where the record goes.
        spec: what it was made with.
        result: what there is to say about it; plain JSON types.
        inputs: records of the products that it was made from.
        files: files that belong to it, relative to the record's folder.
        started: start of the work, seconds since the epoch.
    """
    described = describe_files(path.parent, files or [])
    data = _compose(spec, inputs or {}, described, result, started or time.time())
    atomic_write_text(path, _dump(data))
    return Record(path, data)


@dataclass
class ProductBuilder:
    """A product in the making: put files into ``folder`` and facts into ``result``."""

    folder: Path
    result: dict[str, Any] = field(default_factory=dict)


@contextlib.contextmanager
def build_product(
    manifest: Path, spec: Spec, inputs: Mapping[str, Record] | None = None
) -> Iterator[ProductBuilder]:
    """Make a product folder that appears whole or not at all.

    Work goes to a sibling folder; on success its manifest is written and the folder takes the
    place of an older one. On failure the sibling is removed and the older product stays.

    Args:
        manifest: ``<product folder>/manifest.json``.
        spec: what it is made with.
        inputs: records of the products it is made from.

    Raises:
        FlowError: if the folder holds anything that is not an older product of the same rule.
    """
    started = time.time()
    manifest = manifest.absolute()
    destination = manifest.parent
    _require_replaceable(manifest, spec.rule)
    destination.parent.mkdir(parents=True, exist_ok=True)
    _sweep(destination)
    working = destination.with_name(f".{destination.name}.{os.getpid()}.making")
    shutil.rmtree(working, ignore_errors=True)
    working.mkdir()
    try:
        builder = ProductBuilder(working)
        yield builder
        files = describe_files(working)
        atomic_write_text(working / NOTE, json.dumps({"rule": spec.rule, "files": sorted(files)}))
        data = _compose(spec, inputs or {}, files, builder.result, started)
        atomic_write_text(working / manifest.name, _dump(data))
        _swap_in(working, destination)
    finally:
        shutil.rmtree(working, ignore_errors=True)


def _require_replaceable(manifest: Path, rule: str) -> None:
    """Refuse to replace a folder with anything in it that this rule did not make.

    Snakemake deletes the manifest before the job, so what a product consists of is noted in a
    file of its own.
    """
    folder = manifest.parent
    if manifest.name != MANIFEST:
        raise FlowError(f"--output {manifest}: must be FOLDER/{MANIFEST}; FOLDER is replaced")
    if not folder.exists():
        return
    own: set[str] = set()
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        noted = json.loads((folder / NOTE).read_text(encoding="utf-8"))
        own = set(noted["files"]) if noted["rule"] == rule else own
    if foreign := _foreign(folder, own):
        shown = ", ".join(foreign[:3]) + (", ..." if len(foreign) > 3 else "")
        raise FlowError(
            f"{folder} holds files that {rule} did not make ({shown}) and would be replaced; give "
            "an empty folder, or move them away"
        )


def _foreign(folder: Path, own: Iterable[str]) -> list[str]:
    """Return the files of a product's folder that belong to none of its records."""
    known = {NOTE, MANIFEST, *own}
    found = (p.relative_to(folder).as_posix() for p in folder.rglob("*") if not p.is_dir())
    return sorted(name for name in found if name not in known and not _is_record(folder, name))


def _is_record(folder: Path, name: str) -> bool:
    """Tell whether a file is the record of another rule that lies in a product's folder."""
    if "/" in name or not name.endswith(".json"):
        return False
    try:
        read_record(folder / name)
    except FlowError:
        return False
    return True


def _sweep(destination: Path) -> None:
    """Remove what killed jobs left beside a product, and put back a product they had set aside."""
    for left in destination.parent.glob(f".{destination.name}.*.*"):
        pid, kind = left.name.rsplit(".", 2)[1:]
        if not pid.isdigit() or kind not in ("making", "old") or Path(f"/proc/{pid}").exists():
            continue
        if kind == "old" and not destination.exists():
            left.rename(destination)
        else:
            shutil.rmtree(left, ignore_errors=True)


def _swap_in(working: Path, destination: Path) -> None:
    retired = destination.with_name(f".{destination.name}.{os.getpid()}.old")
    if destination.exists():
        destination.rename(retired)
    working.rename(destination)
    shutil.rmtree(retired, ignore_errors=True)


def new_attempt(folder: Path) -> Path:
    """Create and return the next ``attempts/<n>`` below ``folder``; earlier ones stay."""
    attempts = folder / "attempts"
    attempts.mkdir(parents=True, exist_ok=True)
    number = max((int(p.name) for p in attempts.iterdir() if p.name.isdigit()), default=0)
    while True:
        number += 1
        try:
            (attempts / str(number)).mkdir()
        except FileExistsError:
            continue
        return attempts / str(number)
