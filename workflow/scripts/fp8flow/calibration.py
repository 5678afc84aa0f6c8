"""The calibration set: the first N rows of an id list, in list order, duplicates kept.

MLPerf Inference v6.1 rules, Closed division: quantization may use only the provided calibration
set or a part of it. For llama3.1-8b that is a list of 1,000 ids (998 different ones) of the train
split of CNN/DailyMail 3.0.0 (mlcommons/inference, calibration/CNNDailyMail/calibration-list.txt).
"""

from __future__ import annotations

import hashlib
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from fp8flow.articles import Article, Source
from fp8flow.dataset import (
    SAMPLES,
    Digests,
    Sample,
    TokenCheck,
    TokenCounts,
    describe_source,
    prepare_samples,
    synthetic_samples,
    write_samples,
)
from fp8flow.errors import FlowError
from fp8flow.log import get_logger, progress
from fp8flow.prompts import Template

OFFICIAL_LIST_SHA256 = "4de1bc2bcf345ba8fc118788455dfaf2e09530fd9ed4daedf2b15661324ad9a7"
OFFICIAL_DATASETS = ("abisee/cnn_dailymail", "cnn_dailymail", "ccdv/cnn_dailymail")
OFFICIAL_REVISION = "3.0.0"
_LARGEST_LIST_BYTES = 64 << 20
_TIMEOUT_S = 60
_LISTED = 5


@dataclass(frozen=True)
class IdList:
    """Document ids in calibration order, with the SHA-256 of the bytes they were read from."""

    origin: str
    sha256: str
    ids: tuple[str, ...]

    @property
    def is_official(self) -> bool:
        """Whether this is the list that MLCommons provides, byte by byte."""
        return self.sha256 == OFFICIAL_LIST_SHA256


def read_id_list(origin: str, sha256: str | None) -> IdList:
    """Read ids, one a line, from a file or an http(s) URL.

    Args:
        origin: path or URL.
        sha256: expected SHA-256 of the bytes; required for a URL.

    Raises:
        FlowError: if it cannot be read, is empty, or has another digest.
    """
    content = _download(origin, sha256) if "://" in origin else _read(Path(origin))
    found = hashlib.sha256(content).hexdigest()
    if sha256 is not None and found != sha256.lower():
        raise FlowError(
            f"calibration.id_list {origin} has SHA-256 {found}, but calibration.id_list_sha256 is "
            f"{sha256.lower()}; check the file, or correct the digest if the change is intended"
        )
    try:
        lines = content.decode("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise FlowError(f"calibration.id_list {origin} is not text: {error}") from error
    ids = tuple(line.strip() for line in lines if line.strip())
    if not ids:
        raise FlowError(f"calibration.id_list {origin} is empty")
    return IdList(origin, found, ids)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise FlowError(f"calibration.id_list: cannot read {path}: {error.strerror}") from error


def _download(url: str, sha256: str | None) -> bytes:
    if sha256 is None:
        raise FlowError(
            f"calibration.id_list is a URL ({url}), so calibration.id_list_sha256 is required"
        )
    if not url.startswith(("https://", "http://")):
        raise FlowError(f"calibration.id_list: {url} must start with https:// or http://")
    get_logger(__name__).info("downloading %s", url)
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as response:  # noqa: S310 (http only)
            content: bytes = response.read(_LARGEST_LIST_BYTES + 1)
    except (OSError, urllib.error.URLError) as error:
        raise FlowError(
            f"calibration.id_list: cannot download {url}: {error}; use a local copy of the list"
        ) from error
    if len(content) > _LARGEST_LIST_BYTES:
        raise FlowError(f"calibration.id_list: {url} is larger than {_LARGEST_LIST_BYTES} bytes")
    return content


def select_rows(source: Source, id_list: IdList | None, samples: int) -> Iterator[Article]:
    """Return the calibration rows: the first ``samples`` of the list, in list order.

    Without a list, the first rows of the source. A source without ids (the MLCommons
    calibration file) must itself be in list order, which duplicate ids and texts must confirm.

    Raises:
        FlowError: if the list or the source is too short, or the source lacks ids of the list.
    """
    if id_list is None:
        return _first_rows(source, samples)
    if samples > len(id_list.ids):
        raise FlowError(
            f"calibration.samples is {samples}, but {id_list.origin} has {len(id_list.ids)} ids; "
            f"use at most {len(id_list.ids)}"
        )
    wanted = id_list.ids[:samples]
    if source.has_ids:
        return _look_up(source, wanted)
    return iter(_in_list_order(source, id_list)[:samples])


def _first_rows(source: Source, samples: int) -> Iterator[Article]:
    rows = 0
    for article in islice(source.rows(), samples):
        rows += 1
        yield article
    if rows < samples:
        raise FlowError(
            f"calibration.samples is {samples}, but {source.file or source.hub_id} has {rows} "
            f"rows; use at most {rows}"
        )


def _look_up(source: Source, wanted: Sequence[str]) -> Iterator[Article]:
    missing, found = set(wanted), {}
    for article in progress(source.rows(), "looking up calibration ids", unit="row"):
        if article.id in missing:
            found[article.id] = article
            missing.remove(article.id)
            if not missing:
                break
    if missing:
        listed = [identity for identity in dict.fromkeys(wanted) if identity in missing]
        raise FlowError(
            f"{len(missing)} of {len(set(wanted))} ids of calibration.id_list are not in "
            f"{source.file or f'{source.hub_id} ({source.split})'}: {', '.join(listed[:_LISTED])}"
            f"{', ...' if len(listed) > _LISTED else ''}. The list and the source do not belong "
            "together; the official list needs the train split of CNN/DailyMail 3.0.0."
        )
    return (found[identity] for identity in wanted)


def _in_list_order(source: Source, id_list: IdList) -> list[Article]:
    articles = list(source.rows())
    if len(articles) != len(id_list.ids):
        raise FlowError(
            f"{source.file} has {len(articles)} rows, but {id_list.origin} has "
            f"{len(id_list.ids)} ids; a file without ids must follow the list row by row"
        )
    text_of: dict[str, str] = {}
    for identity, article in zip(id_list.ids, articles, strict=True):
        if text_of.setdefault(identity, article.text) != article.text:
            raise FlowError(
                f"{article.where}: id {identity} occurs twice in {id_list.origin} with different "
                "articles in the file; the file is not in list order"
            )
    pairs = zip(id_list.ids, articles, strict=True)
    return [replace(article, id=identity) for identity, article in pairs]


def cut(samples: Iterator[list[Sample]], max_length: int) -> Iterator[list[Sample]]:
    """Pass rows on with token ids cut to ``max_length`` tokens; the prompt text stays whole."""
    for batch in samples:
        yield [replace(sample, token_ids=sample.token_ids[:max_length]) for sample in batch]


def build_calibration(
    folder: Path,
    source: Source,
    tokenizer: Any,
    *,
    template: Template,
    id_list: IdList | None,
    samples: int,
    max_length: int,
) -> dict[str, Any]:
    """Write ``samples.parquet`` into ``folder`` and return what there is to say about it.

    Args:
        folder: an existing folder.
        source: where the articles come from.
        tokenizer: tokenizer of the model that is quantized.
        template: ``reference`` or ``chat``.
        id_list: which documents, in order; None takes the source's own order.
        samples: number of rows.
        max_length: longest sequence in tokens; longer ones are cut, which the result counts.

    Raises:
        FlowError: for rows that cannot be used, missing ids, or too few of them.
    """
    digests, counts, whole, check = Digests(), TokenCounts(), TokenCounts(), TokenCheck()
    if source.is_synthetic:
        _refuse_list(id_list)
        prepared = synthetic_samples(source, tokenizer, samples)
    else:
        prepared = prepare_samples(select_rows(source, id_list, samples), tokenizer, template)

    def measured() -> Iterator[list[Sample]]:
        for batch in prepared:
            for sample in batch:
                whole.lengths.append(len(sample.token_ids))
                if template == "reference":
                    check.update(sample.article, sample.index, sample.token_ids)
            yield batch

    written = write_samples(folder / SAMPLES, cut(measured(), max_length), with_reference=False)
    for sample in progress(written, "calibration prompts", total=samples, unit="row"):
        digests.update(sample)
        counts.lengths.append(len(sample.token_ids))
    reasons = closed_obstacles(source, id_list, template)
    return {
        **describe_source(source, template, tokenizer),
        "rows": len(counts.lengths),
        "unique_ids": len(digests.seen),
        "duplicate_ids": digests.duplicates()[:_LISTED],
        **digests.summary(),
        **_describe_list(id_list),
        "allowed_in_closed": not reasons,
        "reason": "; ".join(reasons) or "a part of the official calibration list, in list order",
        "max_length": max_length,
        "truncated_rows": sum(length > max_length for length in whole.lengths),
        "tokens_cut": sum(whole.lengths) - sum(counts.lengths),
        "tokens_total": sum(counts.lengths),
        "input_tokens": counts.summary(),
        "token_check": check.summary(template),
    }


def _refuse_list(id_list: IdList | None) -> None:
    if id_list is not None:
        raise FlowError(
            "calibration.source is synthetic, so calibration.id_list has nothing to choose from; "
            "set it to null"
        )


def _describe_list(id_list: IdList | None) -> dict[str, Any]:
    if id_list is None:
        return {"list_sha256": None, "list_rows": None, "official_list": False}
    return {
        "list_sha256": id_list.sha256,
        "list_rows": len(id_list.ids),
        "official_list": id_list.is_official,
    }


def closed_obstacles(source: Source, id_list: IdList | None, template: Template) -> list[str]:
    """Return why this calibration set is not allowed in Closed; nothing if it is.

    Whether a local file really holds the articles of the ids it names cannot be seen from here;
    its digest is in the record.
    """
    reasons = []
    if id_list is None:
        reasons.append("no id list: give calibration.id_list, the list that MLCommons provides")
    elif not id_list.is_official:
        reasons.append(
            f"the id list is not the official one (SHA-256 {id_list.sha256}, official "
            f"{OFFICIAL_LIST_SHA256})"
        )
    if source.is_synthetic:
        reasons.append("random tokens are not an MLPerf calibration set")
    if source.kind == "demo":
        reasons.append("the demo articles are not an MLPerf calibration set")
    official_hub = source.hub_id in OFFICIAL_DATASETS and source.revision == OFFICIAL_REVISION
    if source.kind == "hub" and not official_hub:
        reasons.append(f"{source.hub_id} {source.revision} is not CNN/DailyMail 3.0.0")
    if template != "reference":
        reasons.append(f"the prompt template is {template}, not the reference one")
    return reasons
