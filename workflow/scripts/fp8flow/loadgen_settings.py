"""The job of one LoadGen run, LoadGen's settings for it, and its requests.

Official settings are those of the mlperf.conf inside the LoadGen wheel plus our user.conf (MLPerf
Inference v6.1). LoadGen reads them correctly only once per process: one process per run.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from fp8flow.client import check_urls, request_body
from fp8flow.errors import FlowError

# MLPerf Inference v6.1, llama3.1-8b in datacenter: data set size, seeds and latency limits.
OFFICIAL_ROWS = 13_368
SEEDS = {
    "qsl_rng_seed": 2_085_463_073_848_966_840,
    "sample_index_rng_seed": 2_747_215_439_041_700_203,
    "schedule_rng_seed": 16_159_082_839_903_944_936,
}
LIMITS_MS = {"Server": (2000.0, 100.0), "Interactive": (500.0, 30.0)}
LOADGEN_MODELS = {
    "Offline": "llama3_1-8b",
    "Server": "llama3_1-8b",
    "Interactive": "llama3_1-8b-interactive",
}
MODES = ("performance", "accuracy")


@dataclass(frozen=True)
class LoadJob:
    """Everything that one run needs; the keys of job.json.

    Attributes:
        dataset: samples.parquet of the evaluation set.
        base_urls: ``http://host:port`` of each server; queries go to them in turn.
        model: served model name.
        scenario: Offline, Server or Interactive (LoadGen's Server with tighter limits).
        mode: performance or accuracy.
        official: settings from LoadGen's built-in mlperf.conf; needs all 13,368 rows.
        why: why the settings are not the official ones; goes into the result.
        target_qps: Poisson rate, or expected rate of Offline.
        min_duration_ms: shortest performance run; means nothing in an accuracy run.
        min_queries: smallest number of queries; None: the official number, or one data set.
        ttft_limit_ms: p99 TTFT limit; None: the benchmark's. Not with ``official``.
        tpot_limit_ms: p99 TPOT limit; None: the benchmark's. Not with ``official``.
        max_output_tokens: cap on the answer's length.
        min_output_tokens: shorter answers are counted in the outcome.
        max_connections: most requests in flight, at all servers together.
        request_timeout_s: a request that takes longer fails.
        request_fields: fields of the request body that the backend needs beyond the common ones.
        output_dir: attempt folder; gets the logs, queries.parquet, outcome.json.
        tokenizer: tokenizer.json, for servers that stream text without token ids.
        audit_config: audit.config of a compliance test.
        stop_after_consecutive_failures: the run is given up after so many failures in a row.
        progress_interval_s: time between two lines of progress.
    """

    dataset: Path
    base_urls: Sequence[str]
    model: str
    scenario: str
    mode: str
    target_qps: float
    output_dir: Path
    max_output_tokens: int
    min_duration_ms: int = 600_000
    min_output_tokens: int = 1
    min_queries: int | None = None
    ttft_limit_ms: float | None = None
    tpot_limit_ms: float | None = None
    official: bool = False
    why: str = ""
    max_connections: int = 512
    request_timeout_s: float = 600.0
    request_fields: dict[str, Any] = field(default_factory=dict)
    tokenizer: Path | None = None
    audit_config: Path | None = None
    stop_after_consecutive_failures: int = 50
    progress_interval_s: float = 5.0

    def __post_init__(self) -> None:
        check_urls(self.base_urls)
        for name, value, allowed in (
            ("scenario", self.scenario, tuple(LOADGEN_MODELS)),
            ("mode", self.mode, MODES),
        ):
            if value not in allowed:
                raise FlowError(f"job: {name} is {value!r}; allowed: {', '.join(allowed)}")
        if self.official and not (self.ttft_limit_ms is None and self.tpot_limit_ms is None):
            raise FlowError("job: ttft_limit_ms and tpot_limit_ms cannot go with official settings")
        if self.audit_config is not None and not self.audit_config.is_file():
            raise FlowError(f"job: audit_config {self.audit_config} does not exist")

    @property
    def loadgen_scenario(self) -> str:
        """LoadGen's name of the scenario; Interactive is a Server run with other limits."""
        return "Offline" if self.scenario == "Offline" else "Server"

    @property
    def limits_ms(self) -> tuple[float, float] | None:
        """The p99 limits (TTFT, TPOT) in force; None for Offline, which has none."""
        if self.scenario not in LIMITS_MS:
            return None
        ttft, tpot = LIMITS_MS[self.scenario]
        return (self.ttft_limit_ms or ttft, self.tpot_limit_ms or tpot)

    @property
    def requested_duration_ms(self) -> int | None:
        """The shortest run asked for; None for accuracy, which asks for each sample once."""
        return self.min_duration_ms if self.mode == "performance" else None

    @classmethod
    def read(cls, path: Path) -> LoadJob:
        """Read job.json.

        Raises:
            FlowError: if it is not JSON, a key is unknown or missing, or a value is not allowed.
        """
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise FlowError(f"cannot read the job {path}: {error}") from error
        known = {entry.name for entry in fields(cls)}
        if unknown := sorted(data.keys() - known):
            raise FlowError(f"{path}: unknown keys {unknown}; allowed: {sorted(known)}")
        for name in ("dataset", "output_dir", "tokenizer", "audit_config"):
            if data.get(name) is not None:
                data[name] = Path(data[name])
        try:
            return cls(**data)
        except TypeError as error:
            raise FlowError(f"{path}: {error}") from error


def user_conf_text(job: LoadJob, rows: int) -> str:
    """Return user.conf with what LoadGen lets a submitter set; also a record of explicit runs."""
    scenario = job.loadgen_scenario
    values: dict[str, float | int] = {"target_qps": job.target_qps}
    if job.requested_duration_ms is not None:
        values["min_duration"] = job.requested_duration_ms
    if job.min_queries is not None or not job.official:
        values["min_query_count"] = job.min_queries or rows
    if not job.official:
        values["performance_sample_count_override"] = rows
        if job.limits_ms is not None:
            values["ttft_latency"], values["tpot_latency"] = job.limits_ms
    return "".join(f"*.{scenario}.{key} = {value:.15g}\n" for key, value in values.items())


def make_settings(job: LoadJob, rows: int, user_conf: Path) -> Any:
    """Return LoadGen's TestSettings for ``job`` and a data set of ``rows`` samples.

    Call it once per process: LoadGen leaves seeds at zero on a second FromConfig.

    Raises:
        FlowError: if official settings are asked for another number of rows, or LoadGen cannot
            read user.conf.
    """
    import mlperf_loadgen as lg

    settings = lg.TestSettings()
    if job.official:
        if rows != OFFICIAL_ROWS:
            raise FlowError(
                f"official settings need {OFFICIAL_ROWS} rows; {job.dataset} has {rows}"
            )
        failed = settings.FromConfig(
            str(user_conf), LOADGEN_MODELS[job.scenario], job.loadgen_scenario, 1
        )
        if failed:
            raise FlowError(f"LoadGen cannot read {user_conf}")
    else:
        _set_explicitly(settings, job, rows)
    settings.scenario = getattr(lg.TestScenario, job.loadgen_scenario)
    mode = "AccuracyOnly" if job.mode == "accuracy" else "PerformanceOnly"
    settings.mode = getattr(lg.TestMode, mode)
    return settings


def _set_explicitly(settings: Any, job: LoadJob, rows: int) -> None:
    """Set what mlperf.conf would, for a data set of another size (LoadGen, mlperf.conf v6.1)."""
    for name, seed in SEEDS.items():
        setattr(settings, name, seed)
    settings.use_token_latencies = True
    settings.sample_concatenate_permutation = True
    settings.performance_sample_count_override = rows
    if job.requested_duration_ms is not None:
        settings.min_duration_ms = job.requested_duration_ms
    settings.min_query_count = job.min_queries or rows
    settings.server_target_qps = job.target_qps
    settings.offline_expected_qps = job.target_qps
    settings.server_target_latency_ns = 0
    if job.limits_ms is not None:
        settings.ttft_latency, settings.tpot_latency = (round(v * 1e6) for v in job.limits_ms)


def read_bodies(job: LoadJob) -> tuple[list[bytes], list[int]]:
    """Return request bodies and input lengths (tokens) of all rows, in index order.

    Raises:
        FlowError: if the file cannot be read, is empty, or its index is not 0, 1, 2, ...
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    bodies: list[bytes] = []
    lengths: list[int] = []
    try:
        with pq.ParquetFile(job.dataset) as file:
            for batch in file.iter_batches(batch_size=256, columns=["index", "token_ids"]):
                first = len(bodies)
                if batch["index"].to_pylist() != list(range(first, first + len(batch))):
                    raise FlowError(f"{job.dataset}: the index column is not 0, 1, 2, ...")
                for ids in batch["token_ids"].to_pylist():
                    bodies.append(
                        request_body(job.model, ids, job.max_output_tokens, job.request_fields)
                    )
                    lengths.append(len(ids))
    except (OSError, pa.ArrowException) as error:
        raise FlowError(f"cannot read the data set {job.dataset}: {error}") from error
    if not bodies:
        raise FlowError(f"the data set {job.dataset} has no rows")
    return bodies, lengths
