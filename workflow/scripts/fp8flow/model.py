"""The model folder: brought together from its source and checked before anything is spent on it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fp8flow.errors import FlowError
from fp8flow.gguf_model import PACKAGE, find_gguf, unpack_gguf, unpack_tokenizer
from fp8flow.log import get_logger
from fp8flow.model_folder import (
    FOLDER_PATTERNS,
    check_model_folder,
    copy_tokenizer,
    take_folder,
)
from fp8flow.synthetic_model import write_synthetic

DEMO_SOURCE = f"package:{PACKAGE}"
_COMMIT = re.compile(r"[0-9a-f]{40}")
_logger = get_logger(__name__)


def _download(model_id: str | None, revision: str | None, trust_remote_code: bool) -> Path:
    """Return the snapshot of a pinned hub revision in the user's hub cache.

    huggingface_hub takes HF_TOKEN, HF_HOME and HF_HUB_OFFLINE from the environment, and resumes a
    download that was interrupted.
    """
    if not model_id:
        raise FlowError("model.source is hub, but model.id is not set; give owner/name")
    if not _COMMIT.fullmatch(revision or ""):
        raise FlowError(
            f"model.revision is {revision!r}, but must be a commit hash of 40 hex digits, so that "
            f"the model cannot change; see the repository's history, huggingface.co/{model_id}"
        )
    from huggingface_hub import snapshot_download

    patterns = list(FOLDER_PATTERNS) + (["*.py"] if trust_remote_code else [])
    _logger.info("getting %s at %s from the hub or its local cache", model_id, revision)
    try:
        snapshot = snapshot_download(
            model_id, revision=revision, allow_patterns=patterns, ignore_patterns=["*/*"]
        )
    except (OSError, ValueError) as error:
        raise FlowError(_download_advice(model_id, revision, error)) from error
    return Path(snapshot)


def _download_advice(model_id: str, revision: str | None, error: Exception) -> str:
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        advice = "accept its licence on the hub and set HF_TOKEN in the environment"
    elif isinstance(error, errors.RepositoryNotFoundError):
        advice = "check model.id; a private model needs HF_TOKEN in the environment"
    elif isinstance(error, errors.RevisionNotFoundError):
        advice = "check model.revision"
    else:
        advice = "check the network, HF_ENDPOINT and HF_HUB_OFFLINE, or use model.source: local"
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return f"cannot get {model_id} at {revision} from the hub: {reason} Next: {advice}."


def _from_hub(settings: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    trust = bool(settings["trust_remote_code"])
    snapshot = _download(settings["id"], settings["revision"], trust)
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
    _take_tokenizer(geometry["tokenizer"], folder)
    write_synthetic(geometry, folder)
    notes = ["random weights: outputs are meaningless, only sizes and speeds are realistic"]
    return {"seed": geometry["seed"], "submittable": False, "notes": notes}


def _take_tokenizer(source: str, folder: Path) -> None:
    if source == DEMO_SOURCE:
        unpack_tokenizer(find_gguf(), folder)
        return
    origin = Path(source)
    if not origin.is_dir():
        raise FlowError(
            f"model.synthetic.tokenizer is {source!r}; allowed are {DEMO_SOURCE} and a local folder"
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
