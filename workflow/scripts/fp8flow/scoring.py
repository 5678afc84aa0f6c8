"""ROUGE of an accuracy run, as the MLPerf reference computes it.

Source: mlcommons/inference, language/llama3.1-8b/evaluation.py (v6.1): responses with a sample
index seen before are dropped; token ids are decoded without special tokens; texts are stripped,
split into sentences and joined by newlines; ROUGE with stemmer per sample; mean times 100, four
decimals; ``gen_len`` counts the characters of the joined predictions. A missing response is
absent from the mean there, and so it is here, but it is counted and makes the score incomplete.

The reference pins transformers 4.46.2, which removes spaces before punctuation when the
tokenizer's ``clean_up_tokenization_spaces`` says so (Llama 3.1's does); transformers 5 ignores
that flag for BPE, so it is applied here.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import signal
import tempfile
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from fp8flow.errors import FlowError
from fp8flow.log import get_logger, progress
from fp8flow.prompts import load_tokenizer
from fp8flow.sentences import Splitter, describe_sentence_data, load_splitter

METRICS = ("rouge1", "rouge2", "rougeL", "rougeLsum")
ACCURACY_LOG = "mlperf_log_accuracy.json"
OUTPUTS = "outputs.parquet"
_CHUNK_SAMPLES = 64
_SAMPLES_PER_PROCESS = 512  # below that, a process costs more time to start than it saves
_LISTED = 20
_PR_SET_PDEATHSIG = 1
_TOKEN_BYTES = 4


@dataclass
class Responses:
    """Responses of one run.

    Attributes:
        token_ids: token ids by sample index, in the order of the log; the first response counts.
        duplicates: sample indices of further responses, dropped as the reference does.
    """

    token_ids: dict[int, Any] = field(default_factory=dict)
    duplicates: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class SampleScore:
    """What one response scored.

    Attributes:
        text: the decoded response, as it is.
        characters: length of the prediction with its sentences joined by newlines.
        fmeasures: F-measures (0 to 1) in the order of ``METRICS``.
    """

    text: str
    characters: int
    fmeasures: tuple[float, ...]


def read_responses(path: Path, expected: int) -> Responses:
    """Read LoadGen's ``mlperf_log_accuracy.json`` with int32 token ids.

    Args:
        path: the log.
        expected: number of samples in the data set.

    Raises:
        FlowError: if it is missing, cut, or does not belong to the data set.
    """
    import numpy as np

    responses = Responses()
    for number, entry in enumerate(_read_log(path)):
        where = f"{path}, entry {number}"
        try:
            index, data = int(entry["qsl_idx"]), bytes.fromhex(entry["data"])
        except (KeyError, TypeError, ValueError) as error:
            raise FlowError(f"{where} is no LoadGen response: {error!r}") from error
        if not 0 <= index < expected:
            raise FlowError(
                f"{where} is for sample {index}, but the data set has {expected} samples; "
                "run and data set do not belong together"
            )
        if len(data) % _TOKEN_BYTES:
            raise FlowError(f"{where} has {len(data)} bytes, which are no int32 token ids")
        if index in responses.token_ids:
            responses.duplicates.append(index)
            continue
        responses.token_ids[index] = ids = np.frombuffer(data, "<i4")
        if ids.size and ids.min() < 0:
            raise FlowError(f"{where} has the negative token id {ids.min()}")
    return responses


def read_run(
    path: Path, expected: int, run: Mapping[str, Any]
) -> tuple[Responses, tuple[str, ...]]:
    """Read the responses of a run, and what keeps their score from being complete.

    A run that failed may have left no log or a cut one: that is its result, not an error.

    Args:
        path: LoadGen's accuracy log.
        expected: number of samples in the data set.
        run: result of the run's record.
    """
    if run.get("state", "complete") == "complete":
        return read_responses(path, expected), ()
    problem = f"the accuracy run is {run['state']}: {run.get('reason') or 'no reason given'}"
    try:
        return read_responses(path, expected), (problem,)
    except FlowError as error:
        return Responses(), (problem, f"{error}")


def _read_log(path: Path) -> list[Any]:
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise FlowError(f"{path} is missing: the accuracy run left no responses") from error
    except (OSError, ValueError) as error:
        raise FlowError(f"{path} cannot be read, it is cut or damaged: {error}") from error
    if not isinstance(entries, list):
        raise FlowError(f"{path} must be a JSON array of responses")
    return entries


def join_sentences(text: str, splitter: Splitter) -> str:
    """Return the stripped text with one sentence a line, as ROUGE-Lsum expects it."""
    return "\n".join(splitter.tokenize(text.strip()))


def decode(tokenizer: Any, responses: Sequence[Any]) -> list[str]:
    """Return the text of each response (token ids) without special tokens, spaces as they are."""
    texts: list[str] = tokenizer.batch_decode(
        list(responses), skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    return texts


def clean_up(tokenizer: Any, text: str) -> str:
    """Return the text as transformers 4.46 decodes it: see the head of this module."""
    if not tokenizer.clean_up_tokenization_spaces:
        return text
    return str(tokenizer.clean_up_tokenization(text))


class Scorer:
    """Scores responses; made once per process, because loading its parts takes seconds."""

    def __init__(self, tokenizer: Any, cache: Path) -> None:
        """Load sentence data and metric.

        Args:
            tokenizer: tokenizer of the model that gave the responses.
            cache: folder for the copies that ``evaluate`` makes of a metric.
        """
        self._tokenizer = tokenizer
        self._splitter = load_splitter()
        self._metric = _load_metric(cache)

    def score(self, responses: Sequence[Any], references: Sequence[str]) -> list[SampleScore]:
        """Return the scores of responses (token ids), in order."""
        texts = decode(self._tokenizer, responses)
        predictions = [
            join_sentences(clean_up(self._tokenizer, text), self._splitter) for text in texts
        ]
        targets = [join_sentences(reference, self._splitter) for reference in references]
        scores = self._metric.compute(predictions=predictions, references=targets, use_stemmer=True)
        rows = zip(*(scores[name] for name in METRICS), strict=True)
        return [
            SampleScore(text, len(prediction), fmeasures)
            for text, prediction, fmeasures in zip(texts, predictions, rows, strict=True)
        ]


def _load_metric(cache: Path) -> Any:
    import evaluate

    from fp8flow.metrics import rouge

    logging.getLogger("absl").setLevel(logging.WARNING)  # one line per chunk otherwise
    # evaluate reads its cache folders from the environment once, when it is first imported.
    evaluate.config.HF_MODULES_CACHE = cache / "modules"
    return evaluate.load(rouge.__file__, cache_dir=str(cache / "metrics"), keep_in_memory=True)


_scorer: Scorer | None = None


def _start_worker(tokenizer: Path, trust_remote_code: bool, cache: Path) -> None:
    """Prepare a worker process; it must not outlive its parent."""
    global _scorer
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    own = cache / str(os.getpid())
    _scorer = Scorer(load_tokenizer(tokenizer, trust_remote_code=trust_remote_code), own)


def _score_chunk(chunk: tuple[list[Any], list[str]]) -> list[SampleScore]:
    if _scorer is None:
        raise RuntimeError("the worker was not started")
    return _scorer.score(*chunk)


def score_all(
    responses: Mapping[int, Any],
    references: Sequence[str],
    tokenizer: Path,
    *,
    trust_remote_code: bool = False,
    processes: int | None = None,
) -> dict[int, SampleScore]:
    """Score all responses, in parallel if there are many; order and result do not depend on it.

    Args:
        responses: token ids by sample index.
        references: reference summaries by sample index.
        tokenizer: model folder.
        trust_remote_code: let the model folder run its own Python code.
        processes: number of processes; None chooses from the cores and the work.
    """
    order = list(responses)
    chunks = [order[n : n + _CHUNK_SAMPLES] for n in range(0, len(order), _CHUNK_SAMPLES)]
    work = (([responses[i] for i in chunk], [references[i] for i in chunk]) for chunk in chunks)
    count = min(processes or _useful_processes(len(order)), max(len(chunks), 1))
    with tempfile.TemporaryDirectory(prefix="fp8flow-rouge-") as folder:
        parts = _parts(work, count, tokenizer, trust_remote_code, Path(folder))
        with contextlib.closing(parts):
            bar = progress(parts, "ROUGE", total=len(chunks), unit="chunk")
            scores = [score for part in bar for score in part]
    return dict(zip(order, scores, strict=True))


def _useful_processes(samples: int) -> int:
    return max(1, min(len(os.sched_getaffinity(0)), samples // _SAMPLES_PER_PROCESS))


def _parts(
    work: Iterator[tuple[list[Any], list[str]]],
    processes: int,
    tokenizer: Path,
    trust_remote_code: bool,
    cache: Path,
) -> Generator[list[SampleScore], None, None]:
    if processes == 1:
        scorer = Scorer(load_tokenizer(tokenizer, trust_remote_code=trust_remote_code), cache)
        yield from (scorer.score(*chunk) for chunk in work)
        return
    pool = ProcessPoolExecutor(
        processes,
        mp_context=get_context("spawn"),
        initializer=_start_worker,
        initargs=(tokenizer, trust_remote_code, cache),
    )
    try:
        yield from pool.map(_score_chunk, work)
    except BrokenProcessPool as error:
        raise FlowError(
            f"a scoring process ended unexpectedly, probably for lack of memory "
            f"({processes} processes); use --processes 1"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def mean_scores(scores: Sequence[SampleScore]) -> dict[str, float]:
    """Return the mean F-measure of each metric times 100, rounded to four decimals."""
    import numpy as np

    return {
        name: float(round(np.mean([score.fmeasures[n] for score in scores]) * 100, 4))
        for n, name in enumerate(METRICS)
    }


def accuracy_text(result: Mapping[str, Any]) -> str:
    """Return the line that the reference prints: a Python dict, scores as text, counts bare."""
    if result["rouge1"] is None:
        return f"no score: {result['reason']}\n"
    values: dict[str, Any] = {name: f"{result[name]}" for name in METRICS}
    values |= {"gen_len": int(result["gen_len"]), "gen_num": int(result["gen_num"])}
    return f"{values}\n"


def summarize(
    responses: Responses,
    scores: Mapping[int, SampleScore],
    expected: int,
    problems: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the result of an accuracy record.

    ``state`` is complete, incomplete (a response is missing or the run had problems), or failed
    (nothing to score; scores are None).

    Args:
        responses: what the run answered.
        scores: score of each answered sample.
        expected: number of samples in the data set.
        problems: what else keeps the score from being complete.
    """
    missing = [index for index in range(expected) if index not in responses.token_ids]
    empty = sorted(index for index, score in scores.items() if not score.text.strip())
    duplicates, reasons = responses.duplicates, list(problems)
    if missing:
        reasons.append(f"{len(missing)} of {expected} responses are missing")
    nothing: dict[str, float | None] = dict.fromkeys(METRICS)
    return {
        "state": "failed" if not scores else "incomplete" if reasons else "complete",
        "reason": "; ".join(reasons) or None,
        **(mean_scores(list(scores.values())) if scores else nothing),
        "gen_len": sum(score.characters for score in scores.values()) if scores else None,
        "gen_num": len(scores),
        "responses": {
            "expected": expected,
            "scored": len(scores),
            "missing": len(missing),
            "empty": len(empty),
            "duplicates": len(duplicates),
        },
        "listed": {
            "missing": missing[:_LISTED],
            "empty": empty[:_LISTED],
            "duplicates": duplicates[:_LISTED],
            "all_in": "accuracy_samples.parquet",
        },
        "sentence_data": describe_sentence_data(),
        "definition": "ROUGE F-measure with stemmer, mean x 100 over the scored responses; "
        "gen_len in characters",
    }


def compare_with_client(
    outputs: Path, responses: Responses, scores: Mapping[int, SampleScore]
) -> dict[str, Any]:
    """Compare the harness log with what the client received.

    Args:
        outputs: the client's parquet with index, token_ids and text.
        responses: responses of the harness log.
        scores: decoded texts by sample index.

    Returns:
        ``compared``, numbers of differing token ids, of differing texts, and of responses that
        only one side has; for texts, white space at both ends does not count.
    """
    if not outputs.is_file():
        return {"compared": 0, "reason": f"{outputs.name} is missing"}
    seen: set[int] = set()
    tokens: list[int] = []
    texts: list[int] = []
    for row in _client_rows(outputs):
        index = row["index"]
        if index in seen or index not in scores:
            continue
        seen.add(index)
        if row["token_ids"] != responses.token_ids[index].tolist():
            tokens.append(index)
        if (row["text"] or "").strip() != scores[index].text.strip():
            texts.append(index)
    if tokens or texts:
        get_logger(__name__).warning(
            "%s differs from the harness log: token ids of %d and texts of %d of %d responses",
            outputs.name,
            len(tokens),
            len(texts),
            len(seen),
        )
    return {
        "compared": len(seen),
        "token_mismatches": len(tokens),
        "text_mismatches": len(texts),
        "not_in_outputs": len(scores.keys() - seen),
        "first_mismatches": sorted({*tokens, *texts})[:_LISTED],
    }


def _client_rows(outputs: Path) -> Iterator[dict[str, Any]]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(outputs) as file:
        for batch in file.iter_batches(1024, columns=["index", "token_ids", "text"]):
            yield from batch.to_pylist()


def write_sample_scores(
    path: Path, responses: Responses, scores: Mapping[int, SampleScore], expected: int
) -> None:
    """Write one row per sample of the data set, missing ones with empty scores.

    Columns: index, state (scored, empty, missing), responses (how many), the four F-measures
    (0 to 1), output_tokens, characters (of the newline-joined prediction).
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    times = dict.fromkeys(responses.token_ids, 1)
    for index in responses.duplicates:
        times[index] += 1
    rows = [_sample_row(i, responses, scores.get(i), times.get(i, 0)) for i in range(expected)]
    layout = pa.schema(
        [("index", pa.int64()), ("state", pa.string()), ("responses", pa.int32())]
        + [(name, pa.float64()) for name in METRICS]
        + [("output_tokens", pa.int32()), ("characters", pa.int32())]
    )
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        pq.write_table(pa.Table.from_pylist(rows, layout), temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _sample_row(
    index: int, responses: Responses, score: SampleScore | None, times: int
) -> dict[str, Any]:
    if score is None:
        return {"index": index, "state": "missing", "responses": times}
    return {
        "index": index,
        "state": "scored" if score.text.strip() else "empty",
        "responses": times,
        **dict(zip(METRICS, score.fmeasures, strict=True)),
        "output_tokens": len(responses.token_ids[index]),
        "characters": score.characters,
    }
