"""The evaluation set: articles in, prompts with token ids out, as parquet."""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from fp8flow.articles import Article, Source, batches
from fp8flow.errors import FlowError
from fp8flow.log import get_logger, progress
from fp8flow.prompts import (
    Template,
    TextDigest,
    check_template,
    encode_prompts,
    make_prompts,
    template_sha256,
)
from fp8flow.records import sha256_file
from fp8flow.synthetic_data import NOTE, Lengths, describe, random_rows

# MLPerf Inference v6.1 rules, table of datacenter benchmarks: CNN/DailyMail 3.0.0, validation.
OFFICIAL_ROWS = 13368
SAMPLES = "samples.parquet"
_BATCH_ROWS = 256
_LISTED = 5


@dataclass(frozen=True)
class Sample:
    """One prepared row; ``token_ids`` is the whole prompt unless a limit cut it."""

    index: int
    article: Article
    prompt: str
    token_ids: list[int]


@dataclass
class TokenCounts:
    """Lengths of the prompts, tokens."""

    lengths: array[int] = field(default_factory=lambda: array("l"))

    def summary(self) -> dict[str, Any]:
        """Return min, mean, max and total."""
        total = sum(self.lengths)
        return {
            "min": min(self.lengths),
            "mean": round(total / len(self.lengths), 3),
            "max": max(self.lengths),
            "total": total,
        }


@dataclass
class TokenCheck:
    """Comparison of our token ids with those that the source carries (``tok_input``)."""

    compared: int = 0
    mismatches: int = 0
    first: dict[str, Any] | None = None

    def update(self, article: Article, index: int, ours: Sequence[int]) -> None:
        """Compare one row, if the source gives its token ids."""
        theirs = article.token_ids
        if theirs is None:
            return
        self.compared += 1
        if list(ours) == theirs:
            return
        self.mismatches += 1
        if self.first is None:
            pairs = enumerate(zip(ours, theirs, strict=False))
            place = next((n for n, (a, b) in pairs if a != b), min(len(ours), len(theirs)))
            self.first = {
                "index": index,
                "position": place,
                "ours": list(ours[place : place + 4]),
                "source": theirs[place : place + 4],
                "our_length": len(ours),
                "source_length": len(theirs),
            }

    def summary(self, template: Template) -> dict[str, Any]:
        """Return the outcome: identical, different, or why nothing was compared."""
        if template != "reference" and self.compared:
            return {"state": "not compared", "reason": f"dataset.template is {template}"}
        if not self.compared:
            return {"state": "not compared", "reason": "the source has no token ids"}
        state = "different" if self.mismatches else "identical"
        return {
            "state": state,
            "compared": self.compared,
            "mismatches": self.mismatches,
            "first_mismatch": self.first,
        }


def prepare_samples(
    rows: Iterator[Article], tokenizer: Any, template: Template
) -> Iterator[list[Sample]]:
    """Yield prepared rows in batches, in order.

    Raises:
        FlowError: for a row without an article.
    """
    check_template(tokenizer, template)
    start = 0
    for batch in batches(rows, _BATCH_ROWS):
        for article in batch:
            if not article.text.strip():
                raise FlowError(f"{article.where} (id {article.id}): the article is empty")
        prompts = make_prompts(tokenizer, [article.text for article in batch], template)
        ids = encode_prompts(tokenizer, prompts, template)
        triples = zip(batch, prompts, ids, strict=True)
        yield [Sample(start + n, *triple) for n, triple in enumerate(triples)]
        start += len(batch)


def asked_lengths(source: Source, samples: int | None) -> tuple[Lengths, int]:
    """Return lengths and number of the rows of a synthetic set.

    Raises:
        FlowError: if either is not configured.
    """
    if source.lengths is None or samples is None:
        key = "synthetic" if source.lengths is None else "samples"
        raise FlowError(
            f"{source.section}.source is {source.kind}, but {source.section}.{key} is not set; "
            "random prompts need their lengths and their number"
        )
    return source.lengths, samples


def synthetic_samples(
    source: Source, tokenizer: Any, samples: int | None
) -> Iterator[list[Sample]]:
    """Yield rows of random tokens in batches; the text of the prompt is a label.

    Raises:
        FlowError: if lengths or number of rows are missing or impossible.
    """
    lengths, rows = asked_lengths(source, samples)
    index = 0
    for batch in random_rows(lengths, rows, tokenizer, source.section):
        prepared = []
        for row in batch:
            identity = f"random-{source.section}-{lengths.seed}-{index}"
            where = f"{source.section}.synthetic, row {index}"
            article = Article(identity, row.label, row.reference, where)
            prepared.append(Sample(index, article, row.label, row.token_ids))
            index += 1
        yield prepared


def schema(*, with_reference: bool) -> Any:
    """Return the parquet schema of a prepared set."""
    import pyarrow as pa

    fields = [
        ("index", pa.int64()),
        ("id", pa.string()),
        ("prompt", pa.string()),
        ("token_ids", pa.list_(pa.int32())),
        ("input_tokens", pa.int32()),
    ]
    return pa.schema([*fields, ("reference", pa.string())] if with_reference else fields)


def write_samples(
    path: Path, samples: Iterator[list[Sample]], *, with_reference: bool
) -> Iterator[Sample]:
    """Write prepared rows to parquet, batch by batch, and pass each on."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    layout = schema(with_reference=with_reference)
    with pq.ParquetWriter(path, layout) as writer:
        for batch in samples:
            rows = [
                {
                    "index": sample.index,
                    "id": sample.article.id,
                    "prompt": sample.prompt,
                    "token_ids": sample.token_ids,
                    "input_tokens": len(sample.token_ids),
                    "reference": sample.article.highlights,
                }
                for sample in batch
            ]
            writer.write_table(pa.Table.from_pylist(rows, layout))
            yield from batch


@dataclass
class Digests:
    """Digests over all rows: ids one a line, prompts ended by NUL, ids as length and int32."""

    ids: TextDigest = field(default_factory=TextDigest)
    prompts: TextDigest = field(default_factory=lambda: TextDigest("\0"))
    tokens: Any = field(default_factory=hashlib.sha256)
    seen: Counter[str] = field(default_factory=Counter)

    def update(self, sample: Sample) -> None:
        """Add one row."""
        self.ids.update([sample.article.id])
        self.prompts.update([sample.prompt])
        self.tokens.update(_little_endian([len(sample.token_ids), *sample.token_ids]))
        self.seen[sample.article.id] += 1

    def duplicates(self) -> list[str]:
        """Return the ids that occur more than once."""
        return [identity for identity, count in self.seen.items() if count > 1]

    def summary(self) -> dict[str, str]:
        """Return the digests by name."""
        return {
            "ids_sha256": self.ids.hexdigest(),
            "prompt_sha256": self.prompts.hexdigest(),
            "token_ids_sha256": self.tokens.hexdigest(),
        }


def _little_endian(values: Sequence[int]) -> bytes:
    import numpy as np

    return np.asarray(values, dtype="<i4").tobytes()


def wanted_rows(source: Source, samples: int | None) -> Iterator[Article]:
    """Return the first ``samples`` rows of a source, or all of them."""
    return source.rows() if samples is None else islice(source.rows(), samples)


def check_references(samples: Iterator[list[Sample]]) -> Iterator[list[Sample]]:
    """Pass rows on, refusing one whose reference summary is missing: it could not be scored.

    Raises:
        FlowError: naming the row.
    """
    for batch in samples:
        for sample in batch:
            if not (sample.article.highlights or "").strip():
                where, identity = sample.article.where, sample.article.id
                raise FlowError(f"{where} (id {identity}): the highlights are empty")
        yield batch


def build_dataset(
    folder: Path,
    source: Source,
    tokenizer: Any,
    *,
    template: Template,
    samples: int | None = None,
    max_input_tokens: int | None = None,
) -> dict[str, Any]:
    """Write ``samples.parquet`` into ``folder`` and return what there is to say about it.

    Args:
        folder: an existing folder.
        source: where the articles come from.
        tokenizer: tokenizer of the model that is measured.
        template: ``reference`` or ``chat``.
        samples: first N rows only; None uses all.
        max_input_tokens: refuse prompts longer than this many tokens; None sets no limit.

    Raises:
        FlowError: for rows that cannot be used, too few rows, or prompts over the limit.
    """
    if source.is_synthetic:
        prepared = synthetic_samples(source, tokenizer, samples)
    else:
        prepared = prepare_samples(wanted_rows(source, samples), tokenizer, template)
    prepared = check_references(prepared)
    digests, counts, check = Digests(), TokenCounts(), TokenCheck()
    too_long: list[str] = []
    first_ids: set[int | None] = set()
    written = write_samples(folder / SAMPLES, prepared, with_reference=True)
    for sample in progress(written, "prompts", total=samples, unit="row"):
        digests.update(sample)
        counts.lengths.append(len(sample.token_ids))
        first_ids.add(sample.token_ids[0] if sample.token_ids else None)
        if template == "reference":
            check.update(sample.article, sample.index, sample.token_ids)
        if max_input_tokens is not None and len(sample.token_ids) > max_input_tokens:
            too_long.append(f"row {sample.index} (id {sample.article.id}): {counts.lengths[-1]}")
    _check_row_count(source, len(counts.lengths), samples)
    _check_lengths(too_long, max_input_tokens)
    return {
        **describe_source(source, template, tokenizer),
        **_dataset_result(digests, counts),
        "is_official_size": len(counts.lengths) == OFFICIAL_ROWS and not source.is_synthetic,
        "token_check": _report_check(check, template),
        "starts_with_bos": starts_with_bos(first_ids, tokenizer),
    }


def _dataset_result(digests: Digests, counts: TokenCounts) -> dict[str, Any]:
    rows, duplicates = len(counts.lengths), digests.duplicates()
    if duplicates:
        get_logger(__name__).warning(
            "%d id(s) occur more than once, for example %s", len(duplicates), duplicates[0]
        )
    return {
        "rows": rows,
        "unique_ids": len(digests.seen),
        "duplicate_ids": duplicates[:_LISTED],
        **digests.summary(),
        "input_tokens": counts.summary(),
    }


def _check_row_count(source: Source, rows: int, samples: int | None) -> None:
    what = str(source.file or source.hub_id)
    if not rows:
        raise FlowError(f"{source.section}: {what} has no rows")
    if samples is not None and rows < samples:
        raise FlowError(
            f"{source.section}.samples is {samples}, but {what} has {rows} rows; "
            f"use at most {rows}" + (", or null for all" if source.section == "dataset" else "")
        )


def _check_lengths(too_long: list[str], limit: int | None) -> None:
    if too_long:
        listed = "\n  ".join(too_long[:_LISTED])
        more = f"\n  and {len(too_long) - _LISTED} more" if len(too_long) > _LISTED else ""
        raise FlowError(
            f"{len(too_long)} prompt(s) have more than dataset.max_input_tokens = {limit} tokens; "
            f"prompts are never cut:\n  {listed}{more}\n"
            "Raise the limit (and the engine's maximum input length), or set it to null."
        )


def _report_check(check: TokenCheck, template: Template) -> dict[str, Any]:
    summary = check.summary(template)
    if summary["state"] == "different":
        get_logger(__name__).warning(
            "token ids differ from the source's tok_input in %d of %d rows; first: %s. "
            "The model's tokenizer is not the one the file was made with.",
            check.mismatches,
            check.compared,
            check.first,
        )
    return summary


def describe_source(source: Source, template: Template, tokenizer: Any) -> dict[str, Any]:
    """Return where rows come from, for a record; file names without their folders.

    Args:
        source: where the rows come from.
        template: template of the prompts; random tokens have none.
        tokenizer: tokenizer of the prompts.
    """
    file = source.file
    made: dict[str, str | None] = {
        "ids": "given by the source" if source.has_ids else "SHA-1 of the article",
        "template": template,
        "template_sha256": template_sha256(template),
    }
    if source.is_synthetic:
        made = {"ids": "row numbers", "template": "none", "template_sha256": None}
    return {
        "source": source.kind,
        "file": file.name if file else None,
        "file_sha256": sha256_file(file) if file else None,
        "hub_id": source.hub_id if source.kind == "hub" else None,
        "revision": source.revision if source.kind == "hub" else None,
        "split": source.split if source.kind == "hub" else None,
        **made,
        "synthetic": describe(source.lengths, tokenizer) if source.lengths else None,
        "notes": [NOTE] if source.is_synthetic else [],
    }


def starts_with_bos(first_ids: set[int | None], tokenizer: Any) -> bool | None:
    """Return whether every prompt begins with BOS; None if the tokenizer has no BOS.

    Args:
        first_ids: the first token ids that occur; None stands for a prompt without tokens.
        tokenizer: the tokenizer they are from.
    """
    if tokenizer.bos_token_id is None:
        return None
    return first_ids == {tokenizer.bos_token_id}


def read_column(path: Path, name: str) -> Iterator[Any]:
    """Yield the values of one column of a parquet file without holding all of them."""
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(_BATCH_ROWS, columns=[name]):
            yield from batch.column(0).to_pylist()
