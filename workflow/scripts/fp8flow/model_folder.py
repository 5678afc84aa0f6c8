"""A Hugging Face model folder: complete, loadable and safe, and how it is copied."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fp8flow.errors import FlowError
from fp8flow.rope import read_dtype, read_rope
from fp8flow.weights import read_folder, read_json, refuse_lfs_pointer, weight_files

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "tokenizer.model", "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
# Any one of them is enough to load a tokenizer.
_TOKENIZER_CORES = ("tokenizer.json", "tokenizer.model", "vocab.json")
# Top-level files of a hub repository; weights in other formats and subfolders are left out.
FOLDER_PATTERNS = (
    "*.json",
    "*.safetensors",
    "*.jinja",
    "*.txt",
    "tokenizer.model",
    "*LICENSE*",
    "*.md",
)


def check_model_folder(folder: Path, *, trust_remote_code: bool = False) -> dict[str, Any]:
    """Check that a model folder is complete and loadable.

    Args:
        folder: Hugging Face model folder.
        trust_remote_code: whether the model may bring its own Python code.

    Returns:
        architecture, parameters (count), dtype, bytes (of the weights) and rope.

    Raises:
        FlowError: naming what is missing, truncated, a Git-LFS pointer or unsafe.
    """
    if not folder.is_dir():
        raise FlowError(f"the model folder {folder} does not exist; check model.path")
    if not (folder / "config.json").is_file():
        raise FlowError(f"{folder} has no config.json, so it is no Hugging Face model folder")
    config = read_json(folder / "config.json")
    _check_config(folder, config, trust_remote_code)
    check_tokenizer(folder)
    tensors = read_folder(folder)
    return {
        "architecture": config["architectures"][0],
        "parameters": sum(tensor.elements for tensor in tensors.values()),
        "dtype": read_dtype(config),
        "bytes": sum(path.stat().st_size for path in weight_files(folder)),
        "rope": read_rope(config).as_dict(),
    }


def _check_config(folder: Path, config: Mapping[str, Any], trust_remote_code: bool) -> None:
    if not config.get("architectures"):
        raise FlowError(
            f"{folder}/config.json names no architectures; ModelOpt needs it, for example "
            '"architectures": ["LlamaForCausalLM"]'
        )
    if config.get("auto_map") and not trust_remote_code:
        raise FlowError(
            f"{folder} wants to run its own Python code ({config['auto_map']}); read that code "
            "and set model.trust_remote_code: true, or choose another model"
        )
    if quantized := config.get("quantization_config"):
        raise FlowError(
            f"{folder} is already quantized ({quantized.get('quant_method', 'unknown method')}); "
            "give the original bf16 or fp16 model"
        )


def check_tokenizer(folder: Path) -> None:
    """Check that a folder holds the files of a tokenizer.

    Raises:
        FlowError: if it has none, or one is empty or a Git-LFS pointer.
    """
    present = [name for name in TOKENIZER_FILES if (folder / name).is_file()]
    if not any(name in present for name in _TOKENIZER_CORES):
        raise FlowError(
            f"{folder} has no tokenizer: none of {', '.join(_TOKENIZER_CORES)} is there; "
            "copy the tokenizer files of the same model into it"
        )
    for name in present:
        refuse_lfs_pointer(folder / name)
        if not (folder / name).stat().st_size:
            raise FlowError(f"{folder / name} has 0 bytes; copy the tokenizer file again")


def take_folder(source: Path, folder: Path, *, trust_remote_code: bool) -> None:
    """Bring a checked model folder into ``folder``: weights as hard links, the rest as copies.

    Links save disk space; where the file system cannot link, weights are copied. Settings are
    always copied, so that editing the product never changes the source.
    """
    patterns = FOLDER_PATTERNS + (("*.py",) if trust_remote_code else ())
    weights = {path.name for path in weight_files(source)}
    for path in sorted({path for pattern in patterns for path in source.glob(pattern)}):
        if path.name == "manifest.json" or path.name.startswith(".") or not path.is_file():
            continue
        if path.suffix == ".safetensors" and path.name not in weights:
            continue
        target = folder / path.name
        if path.name in weights:
            link_or_copy(path.resolve(), target)
        else:
            shutil.copyfile(path, target)


def link_or_copy(source: Path, target: Path) -> None:
    """Make ``target`` a hard link to ``source``, or a copy where the file system cannot link."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy the tokenizer files that ``source`` has, byte for byte.

    Raises:
        FlowError: if ``source`` has no whole tokenizer.
    """
    check_tokenizer(source)
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
