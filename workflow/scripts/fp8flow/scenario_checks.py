"""Checks of one scenario, one function per rule id (see resources/mlperf)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fp8flow.backends import differing_settings
from fp8flow.early_stopping import passes
from fp8flow.evidence import NOT_MEASURED, Evidence, Finding, doubtful, found
from fp8flow.loadgen_log import ACCURACY_LOG
from fp8flow.records import Record, sha256_file
from fp8flow.rules import FAIL, UNPROVEN
from fp8flow.submission import SCORES, Scenario, attempt_folder

Check = Callable[[Evidence, Scenario, Any], Finding]
SCENARIO_CHECKS: dict[str, Check] = {}
MODES = ("performance", "accuracy")


def check(name: str) -> Callable[[Check], Check]:
    """Register the check of a rule."""

    def register(function: Check) -> Check:
        SCENARIO_CHECKS[name] = function
        return function

    return register


def both(scenario: Scenario) -> Iterator[tuple[str, Record]]:
    """Yield mode and record of both runs."""
    yield "performance", scenario.performance
    yield "accuracy", scenario.accuracy


def effective(run: Record, key: str) -> Any:
    """Return a setting that LoadGen had in force; None if its log does not say."""
    return run.result["settings"].get("effective", {}).get(key)


def per_mode(scenario: Scenario, read: Callable[[Record], Any]) -> dict[str, Any]:
    """Return one value for each run."""
    return {mode: read(run) for mode, run in both(scenario)}


def equal(values: Mapping[str, Any], wanted: Any) -> Finding:
    """Return pass if all values are the wanted one."""
    unique = list({repr(value): value for value in values.values()}.values())
    measured = unique[0] if len(unique) == 1 else dict(values)
    good = all(type(value) is type(wanted) and value == wanted for value in values.values())
    return found(good, NOT_MEASURED if measured is None else measured, wanted)


def seconds(value: float | None) -> str:
    """Return a duration as text."""
    return NOT_MEASURED if value is None else f"{value:,.3f} s"


def milliseconds(value_ns: float | None) -> str:
    """Return a latency as text, exact to the nanosecond near a limit."""
    return (
        NOT_MEASURED
        if value_ns is None
        else f"{value_ns / 1e6:,.6f}".rstrip("0").rstrip(".") + " ms"
    )


@check("run-complete")
def run_complete(_: Evidence, scenario: Scenario, limit: Any) -> Finding:
    """Both runs have the state complete."""
    states = per_mode(scenario, lambda run: run.result["state"])
    reasons = {m: r.result["reason"] for m, r in both(scenario) if r.result["reason"]}
    scores = scenario.scores.result
    if scores.get("state", "complete") != "complete":
        states["scores"], reasons["scores"] = scores["state"], scores.get("reason")
    outcome = equal(states, "complete")
    return Finding(outcome.status, reasons or outcome.measured, "complete")


@check("no-failed-responses")
def no_failed_responses(_: Evidence, scenario: Scenario, limit: int) -> Finding:
    """No query failed in either run, and all that were issued came back."""
    counts = per_mode(scenario, lambda run: run.result["counts"])
    lost = {m: max(c["failed"], c["issued"] - c["completed"]) for m, c in counts.items()}
    return equal(lost, limit)


@check("no-empty-responses")
def no_empty_responses(_: Evidence, scenario: Scenario, limit: int) -> Finding:
    """No answer is without text, by the client's and by the scorer's count."""
    values = per_mode(scenario, lambda run: run.result["counts"]["empty"])
    values["scores"] = scenario.scores.result["responses"]["empty"]
    return equal(values, limit)


@check("settings-official")
def settings_official(_: Evidence, scenario: Scenario, limit: str) -> Finding:
    """Both runs used LoadGen's built-in settings."""
    sources = per_mode(scenario, lambda run: run.result["settings"]["source"])
    outcome = equal(sources, limit)
    whys = {r.result["settings"].get("why") for _, r in both(scenario)} - {"", None}
    why = f" ({'; '.join(sorted(whys))})" if whys else ""
    return Finding(outcome.status, f"{outcome.measured}{why}", limit)


@check("loadgen-version")
def loadgen_version(_: Evidence, scenario: Scenario, limit: Mapping[str, str]) -> Finding:
    """LoadGen's version and revision are tagged ones."""
    allowed = {f"{version} @ {revision}" for version, revision in limit.items()}
    versions = per_mode(scenario, lambda run: run.result["loadgen"].get("version"))
    shown = ", ".join(sorted({str(v or NOT_MEASURED) for v in versions.values()}))
    return found(set(versions.values()) <= allowed, shown, " or ".join(sorted(allowed)))


@check("loadgen-mode")
def loadgen_mode(_: Evidence, scenario: Scenario, limit: Mapping[str, str]) -> Finding:
    """The logs are of the scenario and of the modes they stand for."""
    name = "Offline" if scenario.name == "Offline" else "Server"
    wanted = {mode: f"{name} {limit[mode]}" for mode in MODES}
    seen = per_mode(
        scenario, lambda run: f"{effective(run, 'scenario')} {effective(run, 'test_mode')}"
    )
    return found(seen == wanted, seen, wanted)


@check("loadgen-valid")
def loadgen_valid(_: Evidence, scenario: Scenario, limit: str) -> Finding:
    """The performance run is VALID."""
    block = scenario.performance.result["loadgen"]
    words = {True: "VALID", False: "INVALID", None: NOT_MEASURED}[block["valid"]]
    reason = block.get("invalid_reason")
    return found(block["valid"] is True, f"{words}: {reason}" if reason else words, limit)


@check("loadgen-errors")
def loadgen_errors(_: Evidence, scenario: Scenario, limit: int) -> Finding:
    """Neither log has errors."""
    errors = per_mode(scenario, lambda run: run.result["loadgen"].get("errors"))
    if None in errors.values():
        return Finding(FAIL, NOT_MEASURED, limit)
    return equal({mode: len(listed) for mode, listed in errors.items()}, limit)


@check("seeds")
def seeds(_: Evidence, scenario: Scenario, limit: Mapping[str, str]) -> Finding:
    """All seeds of both runs are those of the round."""
    wrong = {
        f"{mode} {key}": str(effective(run, key) or NOT_MEASURED)
        for mode, run in both(scenario)
        for key, value in limit.items()
        if str(effective(run, key)) != value
    }
    return found(not wrong, wrong or "the seeds of the round", dict(limit))


@check("min-duration-configured")
def min_duration_configured(_: Evidence, scenario: Scenario, limit: int) -> Finding:
    """LoadGen's minimum duration in force."""
    value = effective(scenario.performance, "min_duration_ms")
    shown = NOT_MEASURED if value is None else f"{value:,} ms"
    return found(value is not None and value >= limit, shown, f">= {limit:,} ms")


@check("duration-measured")
def duration_measured(_: Evidence, scenario: Scenario, limit: int) -> Finding:
    """The performance run really lasted that long."""
    value = scenario.performance.result["duration_s"]
    good = value is not None and value * 1e3 >= limit
    return found(good, seconds(value), f">= {limit / 1e3:,g} s")


@check("performance-sample-count")
def performance_sample_count(_: Evidence, scenario: Scenario, limit: int) -> Finding:
    """LoadGen drew from all samples."""
    return equal(per_mode(scenario, lambda r: effective(r, "performance_sample_count")), limit)


def issued_queries(run: Record) -> int | None:
    """Return the number of queries: Offline has one of many samples."""
    issued = int(run.result["counts"]["issued"])
    if run.result["scenario"] != "Offline":
        return issued
    samples = effective(run, "samples_per_query")
    return issued // samples if samples else None


@check("query-count")
def query_count(_: Evidence, scenario: Scenario, limit: Any) -> Finding:
    """At least as many queries as LoadGen's minimum."""
    run = scenario.performance
    least, issued = effective(run, "min_query_count"), issued_queries(run)
    if least is None or issued is None:
        return Finding(FAIL, NOT_MEASURED, "LoadGen's minimum")
    return found(issued >= least, issued, f">= {least:,}")


@check("samples-per-query")
def samples_per_query(_: Evidence, scenario: Scenario, limit: int) -> Finding:
    """The Offline query holds at least one data set."""
    value = effective(scenario.performance, "samples_per_query")
    good = value is not None and value >= limit
    good = good and scenario.performance.result["counts"]["issued"] >= limit
    return found(good, NOT_MEASURED if value is None else value, f">= {limit:,}")


@check("equal-issue")
def equal_issue(_: Evidence, scenario: Scenario, limit: bool) -> Finding:
    """Every sample is issued equally often."""
    value = effective(scenario.performance, "sample_concatenate_permutation")
    return equal({"performance": value}, limit)


@check("token-latencies")
def token_latencies(_: Evidence, scenario: Scenario, limit: bool) -> Finding:
    """LoadGen was asked to measure token latencies."""
    requested = scenario.performance.result["settings"].get("requested", {})
    return equal({"performance": requested.get("use_token_latencies")}, limit)


def _latency(scenario: Scenario, kind: str, limit: Mapping[str, int]) -> Finding:
    """Compare a p99 by LoadGen with its limit; equal is too slow already."""
    series = scenario.performance.result["latency_ns"].get(kind)
    least = limit[scenario.name]
    value = series["p99"] if series else None
    good = value is not None and series["source"] == "loadgen" and value < least
    shown = milliseconds(value)
    if value is not None and series["source"] != "loadgen":
        shown += " (by the client, LoadGen has none)"
    return _from_schedule(scenario, found(good, shown, f"< {milliseconds(least)}"))


def _from_schedule(scenario: Scenario, finding: Finding) -> Finding:
    """Return a pass as unproven if the client's times start at issue.

    They should start at the scheduled time, as LoadGen's do: a client that issues late would
    otherwise hide its own delay.
    """
    result = scenario.performance.result
    series = result["latency_ns"].get("latency") or {}
    origin = result.get("measured_from", series.get("from"))
    if origin == "scheduled":
        return finding
    why = result.get("measured_from_reason") or result.get("scheduled") or "no reason recorded"
    start = "at issue" if origin == "issued" else "at an unknown time"
    return doubtful(finding, f"the client's times start {start}, not at the scheduled time: {why}")


@check("latency-ttft")
def latency_ttft(_: Evidence, scenario: Scenario, limit: Mapping[str, int]) -> Finding:
    """TTFT p99 is strictly below its limit."""
    return _latency(scenario, "ttft", limit)


@check("latency-tpot")
def latency_tpot(_: Evidence, scenario: Scenario, limit: Mapping[str, int]) -> Finding:
    """TPOT p99 is strictly below its limit."""
    return _latency(scenario, "tpot", limit)


@check("early-stopping")
def early_stopping(_: Evidence, scenario: Scenario, limit: Mapping[str, Any]) -> Finding:
    """LoadGen's criterion is met, and so it is by our own count of the queries over the limits."""
    met = scenario.performance.result["loadgen"].get("early_stopping_met")
    own = _over_limits(scenario.performance, limit[scenario.name])
    shown = {"LoadGen": {True: "met", False: "not met", None: NOT_MEASURED}[met], **own[1]}
    finding = found(met is True and own[0], shown, "met by LoadGen and by queries.parquet")
    return _from_schedule(scenario, finding)


def _over_limits(run: Record, limits_ns: Any) -> tuple[bool, dict[str, str]]:
    """Return whether few enough queries are over the limits, and how many are."""
    import pyarrow.parquet as pq

    from fp8flow.runs import latencies

    path = attempt_folder(run) / "queries.parquet"
    if not path.is_file():
        return False, {"client": NOT_MEASURED}
    series = latencies(pq.read_table(path).to_pylist())
    good, shown = True, {}
    for kind, limit in zip(("ttft", "tpot"), limits_ns, strict=True):
        values = getattr(series, kind)
        over = sum(value > limit for value in values)
        good = good and passes(len(values), over)
        shown[f"{kind} over the limit"] = f"{over:,} of {len(values):,}"
    return good, shown


@check("output-tokens-max")
def output_tokens_max(_: Evidence, scenario: Scenario, limit: int) -> Finding:
    """The cap is the benchmark's, and no answer is longer."""
    caps = per_mode(scenario, lambda run: run.result["settings"].get("max_output_tokens"))
    outcome = equal(caps, limit)
    longest = max((r.result["tokens"]["output_max"] or 0) for _, r in both(scenario))
    good = outcome.status == "pass" and longest <= limit
    return found(good, f"cap {outcome.measured}, longest answer {longest}", f"cap {limit}")


@check("output-tokens-min")
def output_tokens_min(_: Evidence, scenario: Scenario, limit: int) -> Finding:
    """Every answer has at least the least number of tokens."""
    least = per_mode(scenario, lambda run: run.result["settings"].get("min_output_tokens"))
    shortest = [run.result["tokens"]["output_min"] for _, run in both(scenario)]
    outcome = equal(least, limit)
    good = outcome.status == "pass" and None not in shortest and min(shortest) >= limit
    shown = f"set to {outcome.measured}, shortest answer {min((s or 0) for s in shortest)}"
    return found(good, shown, f"set to {limit}, shortest answer >= {limit}")


@check("greedy-decoding")
def greedy_decoding(
    _: Evidence, scenario: Scenario, limit: Mapping[str, list[Any] | None]
) -> Finding:
    """Every request field is known to leave decoding greedy; the common part of a request is.

    ``limit`` lists the values that a field may have; None: it cannot change the answer.
    """
    fields = per_mode(scenario, lambda run: run.result["settings"].get("request_fields"))
    if None in fields.values():
        return Finding(FAIL, NOT_MEASURED, "greedy")
    given = {
        f"{mode} {key}": (key, value) for mode in fields for key, value in fields[mode].items()
    }
    wrong = {
        name: value
        for name, (key, value) in given.items()
        if key not in limit or (limit[key] is not None and value not in (limit[key] or ()))
    }
    return found(not wrong, wrong or "greedy", "greedy")


@check("prefix-reuse-off")
def prefix_reuse_off(evidence: Evidence, scenario: Scenario, limit: bool) -> Finding:
    """Read back as off in both runs where the engine tells, and shown to be off by the probe."""
    values = per_mode(scenario, lambda run: run.result["server"].get("prefix_reuse"))
    probe = evidence.facts["probe"]
    values["probe"] = probe.get("prefix_reuse")
    silent = None in values.values()
    off = all(value is limit or value is None for value in values.values())
    shown = (probe.get("reuse") or {}).get("prefix_reuse")
    values["probe, repeated prompts"] = shown
    if off and silent and shown is None:
        return Finding(UNPROVEN, values, limit)
    return found(off and shown is limit, values, limit)


@check("same-system")
def same_system(evidence: Evidence, scenario: Scenario, limit: Any) -> Finding:
    """Both runs have the same engine settings, checkpoint and data set, those of the submission."""
    performance, accuracy = scenario.performance, scenario.accuracy
    differing = [
        key
        for key in ("engine", "model", "harness")
        if performance.spec["settings"].get(key) != accuracy.spec["settings"].get(key)
    ]
    settings = [run.result["server"].get("settings") or {} for run in (performance, accuracy)]
    if differing_settings(*settings):
        differing.append("server settings read back")
    for name in ("checkpoint", "dataset"):
        digest = evidence.facts[name]["digest"]
        inputs = (run.data["inputs"].get(name) for _, run in both(scenario))
        if set(inputs) != {digest}:
            differing.append(name)
    return found(not differing, differing or "the same", "the same")


@check("throughput-units")
def throughput_units(_: Evidence, scenario: Scenario, limit: Mapping[str, float]) -> Finding:
    """Tokens/s over samples/s is tokens per sample."""
    block = scenario.performance.result["throughput"]
    tokens, samples = block["output_tokens_per_s"], block["samples_per_s"]
    if not tokens or not samples:
        return Finding(FAIL, NOT_MEASURED, "tokens/s and samples/s")
    ratio, per_sample = tokens / samples, block["tokens_per_sample"]
    close = abs(ratio - per_sample) <= limit["relative_tolerance"] * per_sample
    shown = f"{tokens:,.2f} tokens/s, {samples:,.4f} samples/s, {ratio:,.2f} tokens per sample"
    return found(close, shown, f"ratio {per_sample:,.2f}")


@check("client-agrees-with-loadgen")
def client_agrees_with_loadgen(_: Evidence, scenario: Scenario, limit: int) -> Finding:
    """No number differs between LoadGen's log and the client's own count."""
    listed = {
        mode: [
            *(run.result.get("disagreements") or ()),
            *(run.result["loadgen"].get("disagreements") or ()),
        ]
        for mode, run in both(scenario)
    }
    differing = {mode: texts for mode, texts in listed.items() if texts}
    return found(not differing, differing or limit, limit)


@check("result-recomputed")
def result_recomputed(evidence: Evidence, scenario: Scenario, limit: int) -> Finding:
    """The result of both runs follows from their raw logs and queries."""
    differing = evidence.recomputed[scenario.name]
    shown = {mode: parts for mode, parts in differing.items() if parts}
    return found(not shown, shown or "confirmed", "confirmed")


@check("token-counts")
def token_counts(_: Evidence, scenario: Scenario, limit: Mapping[str, float]) -> Finding:
    """The server counts as the client does, and so does tokenizing the answers' texts again.

    Text that was tokenized again can have a few tokens more or less without any error, above all
    where an answer was cut; a server or client that counts wrongly is off in every answer.
    """
    wrong, shares = {}, []
    for mode, run in both(scenario):
        tokens = run.result["tokens"]
        if (usage := tokens.get("usage_mismatches")) != 0:
            wrong[f"{mode}, usage"] = NOT_MEASURED if usage is None else f"{usage:,} differ"
        expected, again = tokens.get("recount_expected"), tokens.get("recount_total")
        if expected is None or again is None:
            wrong[f"{mode}, tokenized again"] = tokens.get("recount_reason") or NOT_MEASURED
            continue
        off = abs(again - expected)
        shares.append(off / expected if expected else 0.0)
        if off > max(limit["always_allowed"], limit["share"] * expected):
            wrong[f"{mode}, tokenized again"] = f"{again:,} tokens instead of {expected:,}"
    shown = wrong or f"usage agrees, tokenized again {max(shares):.2%} off"
    asked = f"usage agrees, tokenized again at most {limit['share']:.2%} off"
    return found(not wrong, shown, asked)


@check("one-token-answers")
def one_token_answers(_: Evidence, scenario: Scenario, limit: int) -> Finding:
    """No answer is so short that it has no TPOT."""
    shortest = per_mode(scenario, lambda run: run.result["tokens"]["output_min"])
    known = [count for count in shortest.values() if count is not None]
    good = len(known) == len(shortest) and min(known) >= limit
    shown = f"shortest answer {min(known)}" if known else NOT_MEASURED
    return found(good, shown, f"shortest answer >= {limit}")


@check("accuracy-log-matches-client")
def accuracy_log_matches_client(
    _: Evidence, scenario: Scenario, limit: Mapping[str, float]
) -> Finding:
    """What LoadGen logged, and was scored, is what the client received, token by token.

    Texts may differ in a few answers: a server can hold back half a character at a cut end.
    """
    compared = scenario.scores.result.get("client_check") or {}
    asked = "every scored answer as received"
    if not compared.get("compared"):
        return Finding(FAIL, compared.get("reason") or NOT_MEASURED, asked)
    count, scored = compared["compared"], scenario.scores.result["responses"]["scored"]
    allowed = {"token_mismatches": 0.0, "not_in_outputs": 0.0}
    allowed["text_mismatches"] = max(limit["always_allowed"], limit["share"] * count)
    wrong = {
        name: compared.get(name)
        for name, most in allowed.items()
        if compared.get(name) is None or compared[name] > most
    }
    good = not wrong and count == scored
    return found(good, f"{count:,} as received" if good else {"compared": count, **wrong}, asked)


@check("accuracy-samples")
def accuracy_samples(_: Evidence, scenario: Scenario, limit: int) -> Finding:
    """Each sample was asked and scored exactly once."""
    counts = scenario.scores.result["responses"]
    good = counts["expected"] == counts["scored"] == limit
    good = good and counts["missing"] == counts["duplicates"] == 0
    good = good and scenario.accuracy.result["counts"]["completed"] == limit
    shown = {key: counts[key] for key in ("scored", "missing", "duplicates")}
    return found(good, counts["scored"] if good else shown, limit)


def _accuracy(_: Evidence, scenario: Scenario, limit: Mapping[str, Any]) -> Finding:
    """Compare a metric with its share of the reference, as plain floating-point numbers."""
    value = scenario.scores.result.get(limit["key"])
    least = limit["reference"] * limit["least"]
    most = limit["reference"] * limit["most"] if "most" in limit else None
    text = f">= {round(least, 6)}" if most is None else f"{least:,.1f} .. {most:,.1f}"
    good = value is not None and value >= least and (most is None or value <= most)
    return found(good, NOT_MEASURED if value is None else value, text)


for _name in ("rouge1", "rouge2", "rougel", "rougelsum", "gen-len"):
    SCENARIO_CHECKS[f"accuracy-{_name}"] = _accuracy


def _missing_files(folder: Path, names: list[str]) -> list[str]:
    found_files = ((name, folder / name) for name in names)
    return [name for name, path in found_files if not path.is_file() or not path.stat().st_size]


@check("required-files")
def required_files(evidence: Evidence, scenario: Scenario, limit: list[str]) -> Finding:
    """All files are there and none is empty."""
    missing = _missing_files(evidence.folder(scenario.name), limit)
    shown = {"missing or empty": missing} if missing else f"{len(limit)} files"
    return found(not missing, shown, f"{len(limit)} files")


@check("measurements-keys")
def measurements_keys(evidence: Evidence, scenario: Scenario, limit: list[str]) -> Finding:
    """All fields of measurements.json have a value."""
    path = evidence.folder(scenario.name) / "measurements.json"
    content = evidence.json_file(path) or {}
    missing = [key for key in limit if not content.get(key)]
    shown = {"missing or empty": missing} if missing else f"{len(limit)} fields"
    return found(not missing, shown, f"{len(limit)} fields")


@check("user-conf")
def user_conf(evidence: Evidence, scenario: Scenario, limit: int) -> Finding:
    """The last min_duration for the scenario in user.conf."""
    path = evidence.folder(scenario.name) / "user.conf"
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    name = "Offline" if scenario.name == "Offline" else "Server"
    values = re.findall(rf"^\s*\S+\.{name}\.min_duration\s*=\s*(\d+)\s*$", text, re.MULTILINE)
    shown = f"{int(values[-1]):,} ms" if values else "not set"
    return found(bool(values) and int(values[-1]) >= limit, shown, f">= {limit:,} ms")


@check("accuracy-log-hash")
def accuracy_log_hash(evidence: Evidence, scenario: Scenario, limit: Mapping[str, int]) -> Finding:
    """The hash is that of the whole log of the accuracy run, and the copy is small enough."""
    folder = evidence.folder(scenario.name) / "accuracy"
    whole, copy = attempt_folder(scenario.accuracy) / ACCURACY_LOG, folder / ACCURACY_LOG
    asked = f"the hash of the whole log, at most {limit['largest_bytes']:,} bytes"
    if not whole.is_file() or not copy.is_file() or not (folder / SCORES).is_file():
        return Finding(FAIL, "a file is missing", asked)
    text = (folder / SCORES).read_text(encoding="utf-8")
    hashes = re.findall(r"^hash=(\w+)$", text, re.MULTILINE)
    size = copy.stat().st_size
    right = hashes == [sha256_file(whole)]
    shown = f"{'right' if right else 'wrong or missing'} hash, {size:,} bytes"
    return found(right and size <= limit["largest_bytes"], shown, asked)


@check("accuracy-text")
def accuracy_text(evidence: Evidence, scenario: Scenario, limit: Mapping[str, str]) -> Finding:
    """accuracy.txt holds the scores in the form that the official checker finds."""
    path = evidence.folder(scenario.name) / "accuracy" / SCORES
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    wrong = {}
    for key, pattern in limit.items():
        match = re.search(pattern, text)
        value = scenario.scores.result.get(key)
        if match is None or value is None or float(match[1]) != float(value):
            wrong[key] = match[1] if match else "not found"
    return found(not wrong, wrong or f"{len(limit)} values", "the values of accuracy.json")


@check("compliance-test06")
def compliance_test06(evidence: Evidence, scenario: Scenario, limit: Mapping[str, Any]) -> Finding:
    """verify_accuracy.txt says that all parts of TEST06 passed."""
    path = evidence.folder(scenario.name) / limit["file"]
    if not path.is_file():
        return Finding(FAIL, "not run", "passed")
    lines = {line.strip() for line in path.read_text(encoding="utf-8").splitlines()}
    missing = [options[0] for options in limit["lines"] if not lines & set(options)]
    return found(not missing, {"not said": missing} if missing else "passed", "passed")
