"""Checks of the submission as a whole, one function per rule id (see resources/mlperf)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fp8flow.documents import ingress_rows, nic_capacity_gbit
from fp8flow.errors import FlowError
from fp8flow.evidence import NOT_MEASURED, Evidence, Finding, doubtful, found
from fp8flow.records import Record
from fp8flow.rules import FAIL, NOT_APPLICABLE
from fp8flow.source_copy import SOURCE, run_code_hash

Check = Callable[[Evidence, Any], Finding]
SUBMISSION_CHECKS: dict[str, Check] = {}
_LISTED = 8
UNPROVABLE = "its origin cannot be proven"


def check(name: str) -> Callable[[Check], Check]:
    """Register the check of a rule."""

    def register(function: Check) -> Check:
        SUBMISSION_CHECKS[name] = function
        return function

    return register


@check("required-scenarios")
def required_scenarios(evidence: Evidence, limit: Mapping[str, list[str]]) -> Finding:
    """The scenarios that must be there are."""
    there = set(evidence.scenarios) & set(evidence.submission.result["scenarios"])
    good = set(limit["all_of"]) <= there and bool(set(limit["one_of"]) & there)
    asked = f"{', '.join(limit['all_of'])} and {' or '.join(limit['one_of'])}"
    return found(good, ", ".join(sorted(there)) or "none", asked)


@check("product-records-intact")
def product_records_intact(evidence: Evidence, limit: Any) -> Finding:
    """No file differs from what its record says."""
    return found(not evidence.problems, evidence.problems[:_LISTED] or "intact", "intact")


@check("submission-up-to-date")
def submission_up_to_date(evidence: Evidence, limit: Any) -> Finding:
    """The tree was made from the runs and scores that are judged."""
    used = set(evidence.submission.data["inputs"].values())
    stale = [
        f"{name} {kind}"
        for name, scenario in evidence.scenarios.items()
        for kind, record in scenario.records().items()
        if record.digest not in used
    ]
    return found(not stale, {"newer than the tree": stale} if stale else "up to date", "up to date")


@check("model-official")
def model_official(evidence: Evidence, limit: Mapping[str, Any]) -> Finding:
    """The hub id and revision; a local folder of the same geometry may still be a fine-tune."""
    facts = evidence.facts["model"]
    asked = f"{limit['ids'][0]} at {limit['revision']}"
    if not facts["submittable"]:
        return Finding(FAIL, f"{facts['source']}: not the benchmark's weights", asked)
    if facts["source"] == "hub":
        good = facts["id"] in limit["ids"] and facts["revision"] == limit["revision"]
        return found(good, f"{facts['id']} at {facts['revision']}", asked)
    good = all(facts[key] == limit[key] for key in ("architecture", "parameters"))
    shown = f"local folder: {facts['architecture']}, {facts['parameters']:,} parameters"
    return doubtful(found(good, shown, asked), UNPROVABLE)


@check("dataset-size")
def dataset_size(evidence: Evidence, limit: int) -> Finding:
    """The evaluation set has all rows, and each is another sample."""
    facts = evidence.facts["dataset"]
    rows, ids = facts["rows"], facts["unique_ids"]
    shown = rows if rows == ids else f"{rows:,} rows, {ids:,} different ids"
    return found(rows == ids == limit, shown, limit)


@check("dataset-official")
def dataset_official(evidence: Evidence, limit: Mapping[str, Any]) -> Finding:
    """The set comes from the benchmark's source; a file may hold anything."""
    facts = evidence.facts["dataset"]
    asked = f"{limit['ids'][0]} {limit['revision']}, {limit['split']}"
    if facts["source"] not in limit["sources"]:
        return Finding(FAIL, facts["source"], asked)
    if facts["source"] != "hub":
        shown = f"{facts['file']}, SHA-256 {facts['file_sha256']}"
        return doubtful(found(bool(facts["file"]), shown, asked), UNPROVABLE)
    good = facts["hub_id"] in limit["ids"]
    good = good and all(facts[key] == limit[key] for key in ("revision", "split"))
    return found(good, f"{facts['hub_id']} {facts['revision']}, {facts['split']}", asked)


@check("prompt-template")
def prompt_template(evidence: Evidence, limit: Mapping[str, str]) -> Finding:
    """The prompts are the reference's, begin with BOS, and agree with given token ids."""
    facts = evidence.facts["dataset"]
    compared = (facts.get("token_check") or {}).get("state")
    good = facts["template"] == limit["template"] and facts["starts_with_bos"] is True
    good = good and compared != "different"
    bos = {True: "with BOS", False: "without BOS", None: "tokenizer has no BOS"}
    shown = f"{facts['template']}, {bos[facts['starts_with_bos']]}"
    if compared == "different":
        shown += ", token ids differ from the source's"
    return found(good, shown, f"{limit['template']}, with BOS")


@check("calibration-list")
def calibration_list(evidence: Evidence, limit: Mapping[str, Any]) -> Finding:
    """The calibration set is a part of the provided list; texts of a file are only named so."""
    facts = evidence.facts["calibration"]
    asked = f"a part of the list with SHA-256 {limit['sha256'][:16]}..., {limit['rows']:,} rows"
    if facts is None:
        return Finding(NOT_APPLICABLE, "no calibration set", asked)
    good = facts["list_sha256"] == limit["sha256"] and facts["rows"] <= limit["rows"]
    good = good and facts["allowed_in_closed"] is True
    finding = found(good, f"{facts['rows']:,} rows: {facts['reason']}", asked)
    if facts["source"] == "hub":
        return finding
    where = facts["file"] or facts["source"]
    return doubtful(finding, f"texts from {where}, which cannot be proven to be those of the list")


@check("calibration-tokens")
def calibration_tokens(evidence: Evidence, limit: Any) -> Finding:
    """Token ids agree with those that the source holds, if it holds any."""
    facts = evidence.facts["calibration"]
    asked = "the source's token ids, where it has them"
    if facts is None:
        return Finding(NOT_APPLICABLE, "no calibration set", asked)
    compared = facts.get("token_check") or {}
    state = compared.get("state", NOT_MEASURED)
    reason = compared.get("reason")
    shown = f"{state}: {reason}" if reason else state
    return found(state in ("identical", "not compared"), shown, asked)


@check("quantization-described")
def quantization_described(evidence: Evidence, limit: Mapping[str, list[str]]) -> Finding:
    """The method is one that is described, and what it calibrates is on the record."""
    facts = evidence.facts["checkpoint"]
    method = facts["method"]
    good = method in limit["methods"]
    if method in limit["calibrated"]:
        good = good and bool(facts["calibration"]) and evidence.facts["calibration"] is not None
    shown = f"{method}, KV cache {facts['kv_cache']}"
    return found(good, shown, " or ".join(limit["methods"]))


@check("system-keys")
def system_keys(evidence: Evidence, limit: Mapping[str, list[str]]) -> Finding:
    """All fields are there, and all but some have a value."""
    system = evidence.system
    missing = [key for key in limit["keys"] if key not in system]
    needed = (key for key in limit["keys"] if key not in limit["may_be_empty"])
    empty = [key for key in needed if key in system and not system[key]]
    shown: Any = f"{len(limit['keys'])} fields"
    if missing or empty:
        shown = {"missing": missing, "empty": empty}
    return found(not missing and not empty, shown, f"{len(limit['keys'])} fields")


def _is_integer(value: Any) -> bool:
    try:
        int(value)
    except (TypeError, ValueError):
        return False
    return True


@check("system-values")
def system_values(evidence: Evidence, limit: Mapping[str, list[str]]) -> Finding:
    """Values from closed lists, whole numbers, and names equal to the folders'."""
    system, result = evidence.system, evidence.submission.result
    wrong = {
        key: system.get(key)
        for key in ("status", "system_type")
        if str(system.get(key)).lower() not in limit[key]
    }
    wrong |= {k: system.get(k) for k in limit["integers"] if not _is_integer(system.get(k))}
    for key in ("submitter", "division"):
        if str(system.get(key)).lower() != str(result[key]).lower():
            wrong[key] = system.get(key)
    return found(not wrong, wrong or "allowed values", "allowed values")


@check("system-datacenter")
def system_datacenter(evidence: Evidence, limit: str) -> Finding:
    """The system is described as a datacenter system."""
    kind = str(evidence.system.get("system_type", NOT_MEASURED))
    return found(limit in kind.split(","), kind, limit)


@check("system-ecc")
def system_ecc(evidence: Evidence, limit: Any) -> Finding:
    """ECC is on in all memories that the system has."""
    states = evidence.facts["system"]["ecc"]
    words = {True: "on", False: "off", None: "not known"}
    shown = {
        name: state["origin"] if state["origin"] == "N/A" else words[state["on"]]
        for name, state in states.items()
    }
    good = all(state["on"] is True or state["origin"] == "N/A" for state in states.values())
    return found(good, shown, "on")


@check("system-is-the-one-measured")
def system_is_the_one_measured(evidence: Evidence, limit: Mapping[str, list[str]]) -> Finding:
    """The node that is described is the node of every run, with the same packages."""
    facts = evidence.facts["system"]
    asked = "host and packages of the runs"
    differing = {}
    for scenario in evidence.scenarios.values():
        for mode, run in (("performance", scenario.performance), ("accuracy", scenario.accuracy)):
            pairs = list(_host_pairs(facts, run, limit["host"]))
            if wrong := {key: [mine, theirs] for key, mine, theirs in pairs if mine != theirs}:
                differing[f"{scenario.name} {mode}"] = wrong
    if not all((facts.get("host") or {}).get(key) for key in limit["host"]):
        return Finding(FAIL, "the description does not say which host it is of", asked)
    shown: Any = {"described, measured": differing} if differing else facts["host"]["hostname"]
    return found(not differing, shown, asked)


def _host_pairs(
    facts: Mapping[str, Any], run: Record, keys: list[str]
) -> Iterator[tuple[str, Any, Any]]:
    """Yield what is compared, its value in the description and its value in a run."""
    described, measured = facts.get("host") or {}, run.data.get("host") or {}
    for key in keys:
        yield key, described.get(key), measured.get(key)
    stack, tools = facts.get("stack") or {}, run.data.get("tools") or {}
    for name in sorted(stack.keys() & tools.keys()):
        yield name, stack[name], tools[name]


@check("documents-present")
def documents_present(evidence: Evidence, limit: list[str]) -> Finding:
    """The documents are there and not empty."""
    paths = {name: evidence.root / name for name in limit}
    missing = [n for n, path in paths.items() if not path.is_file() or not path.stat().st_size]
    shown = {"missing or empty": missing} if missing else f"{len(limit)} documents"
    return found(not missing, shown, f"{len(limit)} documents")


@check("ingress-bandwidth")
def ingress_bandwidth(evidence: Evidence, limit: Any) -> Finding:
    """The network cards carry what the fastest scenario takes in, over a stated data path."""
    runs = {name: scenario.performance for name, scenario in evidence.scenarios.items()}
    rows = ingress_rows(runs, **evidence.constants["ingress_bandwidth"])
    rates = [row["gbit_per_s"] for row in rows]
    if not rates or None in rates:
        return Finding(FAIL, NOT_MEASURED, "throughput x 2048 x dtype_size")
    capacity = nic_capacity_gbit(evidence.system)
    path = evidence.facts["system"]["network_data_path"]
    carried = "speed not known" if capacity is None else f"{capacity:g} Gb/s"
    shown = f"{carried}, data path {'described' if path else 'not described'}"
    good = capacity is not None and capacity >= max(rates) and bool(path)
    return found(good, shown, f">= {max(rates):.6f} Gb/s, data path described")


@check("source-present")
def source_present(evidence: Evidence, limit: Mapping[str, Any]) -> Finding:
    """The workflow's source is there, and its code is what the runs were made with."""
    folder = evidence.root / limit["folder"] / str(evidence.submission.result["benchmark"])
    asked = "the source that made the runs"
    paths = {name: folder / name for name in limit["files"]}
    missing = [n for n, path in paths.items() if not path.is_file() or not path.stat().st_size]
    if missing:
        return Finding(FAIL, {"missing or empty": missing}, asked)
    if wrong := list(_other_code(evidence, folder / SOURCE)):
        return Finding(FAIL, {"made with other code": wrong}, asked)
    count = sum(path.is_file() for path in folder.rglob("*"))
    revision = evidence.submission.result.get("source") or {}
    words = (f"commit {revision['commit']}" if revision.get("commit") else "", revision.get("note"))
    return found(True, ", ".join([f"{count} files", *filter(None, words)]), asked)


def _other_code(evidence: Evidence, source: Path) -> Iterator[str]:
    """Yield the runs whose code hash is not that of the source, or why it has none."""
    for scenario in evidence.scenarios.values():
        for mode, run in (("performance", scenario.performance), ("accuracy", scenario.accuracy)):
            backend = str(run.spec["settings"]["engine"]["backend"])
            try:
                code = run_code_hash(source, f"run_{mode}", backend)
            except FlowError as error:
                yield f"{scenario.name} {mode}: {error}"
                continue
            if code != run.spec["code"]:
                yield f"{scenario.name} {mode}"
