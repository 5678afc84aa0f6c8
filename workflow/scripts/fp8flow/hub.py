"""Snapshots of pinned revisions from the Hugging Face hub."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from fp8flow.errors import FlowError
from fp8flow.log import get_logger

_COMMIT = re.compile(r"[0-9a-f]{40}")
_logger = get_logger(__name__)


def download_snapshot(
    section: str, repository: str | None, revision: str | None, patterns: Sequence[str]
) -> Path:
    """Return the snapshot of a pinned hub revision in the user's hub cache.

    huggingface_hub takes HF_TOKEN, HF_HOME and HF_HUB_OFFLINE from the environment, and resumes a
    download that was interrupted.

    Args:
        section: config section with the keys source, id, revision; for messages.
        repository: owner/name.
        revision: commit hash.
        patterns: names of the files in the repository's top folder.

    Raises:
        FlowError: if it is not pinned or cannot be had, with what to do.
    """
    if not repository:
        raise FlowError(f"{section}.source is hub, but {section}.id is not set; give owner/name")
    if not _COMMIT.fullmatch(revision or ""):
        raise FlowError(
            f"{section}.revision is {revision!r}, but must be a commit hash of 40 hex digits, so "
            "that the files cannot change; see the repository's history, "
            f"huggingface.co/{repository}"
        )
    from huggingface_hub import snapshot_download

    _logger.info("getting %s at %s from the hub or its local cache", repository, revision)
    try:
        snapshot = snapshot_download(
            repository, revision=revision, allow_patterns=list(patterns), ignore_patterns=["*/*"]
        )
    except (OSError, ValueError) as error:
        raise FlowError(_advice(section, repository, revision, error)) from error
    return Path(snapshot)


def _advice(section: str, repository: str, revision: str | None, error: Exception) -> str:
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        advice = "accept its licence on the hub and set HF_TOKEN in the environment"
    elif isinstance(error, errors.RepositoryNotFoundError):
        advice = f"check {section}.id; a private repository needs HF_TOKEN in the environment"
    elif isinstance(error, errors.RevisionNotFoundError):
        advice = f"check {section}.revision"
    else:
        advice = (
            f"check the network, HF_ENDPOINT and HF_HUB_OFFLINE, or use {section}.source: local"
        )
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return f"cannot get {repository} at {revision} from the hub: {reason} Next: {advice}."
