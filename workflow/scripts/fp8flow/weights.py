"""Safetensors weights of a model folder, read by their headers: names, dtypes, shapes, sizes.

Nothing here loads a weight, so a folder of any size is checked in milliseconds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8flow.errors import FlowError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
FP8_DTYPE = "F8_E4M3"
# Bytes per element of the safetensors dtypes that a language model uses.
_ELEMENT_BYTES = {
    "F64": 8, "I64": 8, "F32": 4, "I32": 4, "U32": 4, "BF16": 2, "F16": 2, "I16": 2,
    FP8_DTYPE: 1, "F8_E5M2": 1, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
_LENGTH_BYTES = 8
# The format caps its header at 100 MB; a larger number means that the file is something else.
_MAX_HEADER_BYTES = 100_000_000
_LFS_MARK = b"version https://git-lfs"


@dataclass(frozen=True)
class TensorInfo:
    """One tensor as its file's header describes it.

    Attributes:
        file: the safetensors file.
        dtype: safetensors name, for example ``BF16`` or ``F8_E4M3``.
        shape: sizes of its dimensions; empty for a scalar.
        offset: where its data begins in the file, bytes.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int = 0

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object.

    Raises:
        FlowError: if the file is missing, a Git-LFS pointer, or not a JSON object.
    """
    refuse_lfs_pointer(path)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FlowError(f"{path} cannot be read as JSON: {error}; fetch the model again") from error
    if not isinstance(data, dict):
        raise FlowError(f"{path} must hold a JSON object; fetch the model again")
    return data


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write a JSON object with sorted keys, so that equal content gives equal bytes."""
    text = json.dumps(data, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    path.write_text(text, encoding="utf-8")


def refuse_lfs_pointer(path: Path) -> None:
    """Stop at a Git-LFS pointer, which stands for a file that was never downloaded.

    Raises:
        FlowError: with the file's name and size.
    """
    try:
        with path.open("rb") as stream:
            start = stream.read(len(_LFS_MARK))
    except OSError as error:
        raise FlowError(
            f"{path} cannot be read: {error.strerror}; fetch the model again"
        ) from error
    if start == _LFS_MARK:
        raise FlowError(
            f"{path} is a Git-LFS pointer of {path.stat().st_size} bytes, not the file itself; "
            "run `git lfs pull` in its checkout or download the model again"
        )


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """Return the entries of a safetensors header and where the data begins, bytes."""
    refuse_lfs_pointer(path)
    size = path.stat().st_size
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
        if size < _LENGTH_BYTES or length > min(size - _LENGTH_BYTES, _MAX_HEADER_BYTES):
            raise FlowError(
                f"{path} is truncated or no safetensors file: {size} bytes, "
                f"header of {length} bytes announced; download it again"
            )
        text = stream.read(length)
    try:
        header = json.loads(text)
    except ValueError as error:
        raise FlowError(
            f"{path} ({size} bytes) has a header that is not JSON: {error}; download it again"
        ) from error
    if not isinstance(header, dict):
        raise FlowError(f"{path} ({size} bytes) has no safetensors header; download it again")
    header.pop("__metadata__", None)
    _check_size(path, size, _LENGTH_BYTES + length, header)
    return header, _LENGTH_BYTES + length


def _check_size(path: Path, size: int, data_start: int, header: Mapping[str, Any]) -> None:
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        expected = math.prod(entry["shape"]) * _ELEMENT_BYTES.get(entry["dtype"], 0)
        if expected and end - begin != expected:
            raise FlowError(
                f"{path}: tensor {name} takes {end - begin} bytes, but its shape needs {expected}; "
                "the file is damaged, download it again"
            )
    announced = data_start + max((e["data_offsets"][1] for e in header.values()), default=0)
    if size != announced:
        raise FlowError(
            f"{path} has {size} bytes, but its header announces {announced}; "
            "it is truncated or damaged, download it again"
        )


def read_tensors(path: Path) -> dict[str, TensorInfo]:
    """Return the tensors of one safetensors file by name.

    Raises:
        FlowError: for a Git-LFS pointer, a truncated file, or a damaged header.
    """
    header, start = _header(path)
    return {
        name: TensorInfo(
            path, entry["dtype"], tuple(entry["shape"]), start + entry["data_offsets"][0]
        )
        for name, entry in header.items()
    }


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a model folder: the single file, or the index's shards.

    Raises:
        FlowError: if there are none, a shard is missing, or the index names one outside the folder.
    """
    index = folder / INDEX_FILE
    if not index.is_file():
        if (folder / SINGLE_FILE).is_file():
            return [folder / SINGLE_FILE]
        found = ", ".join(sorted(p.name for p in folder.iterdir())) or "nothing"
        raise FlowError(
            f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}; found: {found}. "
            "Only safetensors weights are read; convert others with transformers' save_pretrained."
        )
    names = sorted(set(_weight_map(index).values()))
    for name in names:
        if name in ("", ".", "..") or "/" in name or "\\" in name:
            raise FlowError(f"{index} names a shard outside its folder: {name!r}; it is not safe")
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise FlowError(
            f"{folder} lacks {len(missing)} of the {len(names)} shards in {INDEX_FILE}: "
            f"{', '.join(missing)}; download them"
        )
    return [folder / name for name in names]


def _weight_map(index: Path) -> dict[str, str]:
    entries = read_json(index).get("weight_map")
    if not isinstance(entries, dict) or not all(isinstance(v, str) for v in entries.values()):
        raise FlowError(f"{index} has no weight_map of names to files; download it again")
    return entries


def read_folder(folder: Path) -> dict[str, TensorInfo]:
    """Return all tensors of a model folder by name.

    Raises:
        FlowError: if a file is missing, truncated or a pointer, or the index and the shards differ.
    """
    tensors: dict[str, TensorInfo] = {}
    for path in weight_files(folder):
        tensors.update(read_tensors(path))
    index = folder / INDEX_FILE
    if index.is_file() and (lost := sorted(set(_weight_map(index)) - set(tensors))):
        raise FlowError(
            f"{index} lists {len(lost)} tensors that its shards do not hold, such as {lost[0]}; "
            "index and shards are of different versions, download them together"
        )
    return tensors
