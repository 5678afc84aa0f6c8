"""Checks of the submission as a whole, one function per rule id (see resources/mlperf)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fp8flow.documents import ingress_rows, nic_capacity_gbit
from fp8flow.evidence import FAIL, NOT_APPLICABLE, NOT_MEASURED, Evidence, Finding, found

Check = Callable[[Evidence, Any], Finding]
SUBMISSION_CHECKS: dict[str, Check] = {}
_LISTED = 8


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
    """The hub id and revision, or a local folder with the geometry of the model."""
    facts = evidence.facts["model"]
    asked = f"{limit['ids'][0]} at {limit['revision']}"
    if not facts["submittable"]:
        return Finding(FAIL, f"{facts['source']}: not the benchmark's weights", asked)
    if facts["source"] == "hub":
        good = facts["id"] in limit["ids"] and facts["revision"] == limit["revision"]
        return found(good, f"{facts['id']} at {facts['revision']}", asked)
    good = all(facts[key] == limit[key] for key in ("architecture", "parameters"))
    shown = f"local folder: {facts['architecture']}, {facts['parameters']:,} parameters"
    return found(good, f"{shown}; its origin cannot be proven", asked)


@check("dataset-size")
def dataset_size(evidence: Evidence, limit: int) -> Finding:
    """The evaluation set has all rows."""
    rows = evidence.facts["dataset"]["rows"]
    return found(rows == limit, rows, limit)


@check("dataset-official")
def dataset_official(evidence: Evidence, limit: Mapping[str, Any]) -> Finding:
    """The set comes from the benchmark's source; a file's origin is shown by its digest."""
    facts = evidence.facts["dataset"]
    asked = f"{limit['ids'][0]} {limit['revision']}, {limit['split']}"
    if facts["source"] not in limit["sources"]:
        return Finding(FAIL, facts["source"], asked)
    if facts["source"] != "hub":
        shown = f"{facts['file']}, SHA-256 {facts['file_sha256']}; its origin cannot be proven"
        return found(bool(facts["file"]), shown, asked)
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
    """The calibration set is a part of the provided list."""
    facts = evidence.facts["calibration"]
    asked = f"a part of the list with SHA-256 {limit['sha256'][:16]}..., {limit['rows']:,} rows"
    if facts is None:
        return Finding(NOT_APPLICABLE, "no calibration set", asked)
    good = facts["list_sha256"] == limit["sha256"] and facts["rows"] <= limit["rows"]
    good = good and facts["allowed_in_closed"] is True
    return found(good, f"{facts['rows']:,} rows: {facts['reason']}", asked)


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
def source_present(evidence: Evidence, limit: str) -> Finding:
    """The folder is there and holds files."""
    files = [path for path in (evidence.root / limit).rglob("*") if path.is_file()]
    return found(bool(files), f"{len(files)} files", "at least one file")
