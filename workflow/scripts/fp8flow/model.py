"""The model folder: brought together from its source and checked before anything is spent on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fp8flow.errors import FlowError
from fp8flow.generated_tokenizer import GENERATED, write_tokenizer
from fp8flow.gguf_model import PACKAGE, find_gguf, unpack_gguf, unpack_tokenizer
from fp8flow.hub import download_snapshot
from fp8flow.log import get_logger
from fp8flow.model_folder import (
    FOLDER_PATTERNS,
    check_model_folder,
    copy_tokenizer,
    take_folder,
)
from fp8flow.synthetic_model import write_synthetic

DEMO_SOURCE = f"package:{PACKAGE}"
_logger = get_logger(__name__)


def _from_hub(settings: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    trust = bool(settings["trust_remote_code"])
    patterns = (*FOLDER_PATTERNS, *(["*.py"] if trust else []))
    snapshot = download_snapshot("model", settings["id"], settings["revision"], patterns)
    check_model_folder(snapshot, trust_remote_code=trust)
    take_folder(snapshot, folder, trust_remote_code=trust)
    return {"id": settings["id"], "revision": settings["revision"], "submittable": True}


def _from_local(settings: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    if not settings["path"]:
        raise FlowError("model.source is local, but model.path is not set; give the model folder")
    source = Path(settings["path"])
    trust = bool(settings["trust_remote_code"])
    check_model_folder(source, trust_remote_code=trust)
    take_folder(source, folder, trust_remote_code=trust)
    notes = ["taken from a local folder; its origin is not known to fp8flow"]
    return {"submittable": True, "notes": notes}


def _from_package(settings: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    facts = unpack_gguf(find_gguf(), folder)
    kinds = ", ".join(f"{count} {kind}" for kind, count in facts["tensor_types"].items())
    notes = [
        f"from {facts['file']} of the package {PACKAGE} (Q4_1 GGUF; tensors: {kinds}), "
        "dequantised to bf16: not the original bf16 weights"
    ]
    return {"revision": facts["sha256"], "gguf": facts, "submittable": False, "notes": notes}


def _from_synthetic(settings: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    geometry = settings["synthetic"]
    if not geometry:
        raise FlowError(
            "model.source is synthetic, but model.synthetic is not set; give the geometry"
        )
    _take_tokenizer(geometry, folder)
    write_synthetic(geometry, folder)
    notes = ["random weights: outputs are meaningless, only sizes and speeds are realistic"]
    if geometry["tokenizer"] == GENERATED:
        notes.append("generated tokenizer: made-up words, only its size is realistic")
    return {"seed": geometry["seed"], "submittable": False, "notes": notes}


def _take_tokenizer(geometry: Mapping[str, Any], folder: Path) -> None:
    source = geometry["tokenizer"]
    if source == GENERATED:
        write_tokenizer(geometry["vocab_size"], geometry["max_position_embeddings"], folder)
        return
    if source == DEMO_SOURCE:
        unpack_tokenizer(find_gguf(), folder)
        return
    origin = Path(source)
    if not origin.is_dir():
        raise FlowError(
            f"model.synthetic.tokenizer is {source!r}; allowed are {DEMO_SOURCE}, {GENERATED} and "
            "a local folder"
        )
    copy_tokenizer(origin, folder)


_SOURCES: dict[str, Callable[[Mapping[str, Any], Path], dict[str, Any]]] = {
    "hub": _from_hub,
    "local": _from_local,
    DEMO_SOURCE: _from_package,
    "synthetic": _from_synthetic,
}


def fetch_model(settings: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Bring the model of the config section ``model`` into ``folder`` and check it.

    Args:
        settings: the section: source, id, revision, path, trust_remote_code, synthetic.
        folder: an existing empty folder.

    Returns:
        source, id, revision (commit, or sha256 of the GGUF file), architecture, parameters, dtype,
        bytes (of the weights), rope, submittable, notes.

    Raises:
        FlowError: if the source is unknown, cannot be reached, or is not a whole safe model.
    """
    source = settings["source"]
    if source not in _SOURCES:
        raise FlowError(f"model.source is {source!r}; allowed are {', '.join(sorted(_SOURCES))}")
    facts = _SOURCES[source](settings, folder)
    checked = check_model_folder(folder, trust_remote_code=bool(settings["trust_remote_code"]))
    for path in folder.iterdir():
        # Some writers leave weights readable by their owner only.
        if path.stat().st_nlink == 1:
            path.chmod(0o644)
    _logger.info(
        "%s: %d parameters, %s, %d bytes of weights",
        checked["architecture"], checked["parameters"], checked["dtype"], checked["bytes"],
    )  # fmt: skip
    return {"source": source, "id": None, "revision": None, "notes": [], **facts, **checked}
