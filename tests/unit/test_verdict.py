"""Every rule has a case that breaks it, and breaks nothing else; the limits are exact."""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from result_tree import ROWS, SCORES, ResultTree, make_results

import assemble_submission
import print_summary
import validate_submission
from fp8flow import calibration, dataset, early_stopping, loadgen_settings
from fp8flow.cli import script_main
from fp8flow.code_hash import code_hash
from fp8flow.errors import FlowError
from fp8flow.evidence import Evidence, gather, recomputed_differences
from fp8flow.pipeline import BACKENDS, PROGRAMS
from fp8flow.records import Record, read_record, verify_record
from fp8flow.report import rule_view
from fp8flow.report_data import STATUS_ORDER
from fp8flow.rules import RuleBook, load_rules, rules_file
from fp8flow.source_copy import CHECKOUT, run_code_hash
from fp8flow.verdict import failing_ids, judge, table, unproven_ids

BOOK = load_rules(rules_file("v6.1"))
TEST06 = "compliance-test06"
Change = Callable[[Evidence], None]


def assemble(tree: ResultTree) -> ResultTree:
    add, run = assemble_submission.add_arguments, assemble_submission.run
    assert script_main("x", add, run, tree.assemble_arguments()) == 0
    return tree


def evidence_of(tree: ResultTree) -> Evidence:
    runs, scores = map(Path, tree.runs()), map(Path, tree.of("scores"))
    return gather(tree.submission, list(runs), list(scores), BOOK.data)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> ResultTree:
    scenarios = ("Offline", "Server", "Interactive")
    folder = tmp_path_factory.mktemp("results") / "results"
    tree = make_results(folder, scenarios=scenarios)
    return assemble(tree)


@pytest.fixture(scope="module")
def base(tree: ResultTree) -> Evidence:
    evidence = evidence_of(tree)
    del evidence.scenarios["Interactive"]
    return evidence


@pytest.fixture
def evidence(base: Evidence, tmp_path: Path) -> Evidence:
    """A copy whose records and tree can be changed."""
    fresh = copy.deepcopy(base)
    shutil.copytree(base.submission.root, tmp_path / "submission")
    fresh.submission = Record(tmp_path / "submission" / "manifest.json", fresh.submission.data)
    return fresh


def failing(evidence: Evidence, book: RuleBook = BOOK) -> set[str]:
    return set(failing_ids(judge(book, evidence)))


def rule_of(evidence: Evidence, name: str, scenario: str | None = None) -> dict[str, Any]:
    rules = judge(BOOK, evidence)["rules"]
    return next(r for r in rules if r["id"] == name and r["scenario"] == scenario)


def run_of(evidence: Evidence, scenario: str, mode: str) -> dict[str, Any]:
    return getattr(evidence.scenarios[scenario], mode).result


def change(scenario: str, mode: str, path: str, value: Any) -> Change:
    """Return a change of one value in the result of a run or score."""

    def apply(evidence: Evidence) -> None:
        place = run_of(evidence, scenario, mode)
        *parents, last = path.split("/")
        for key in parents:
            place = place[key]
        place[last] = value

    return apply


def fact(path: str, value: Any) -> Change:
    """Return a change of one fact of the submission record."""

    def apply(evidence: Evidence) -> None:
        place: Any = evidence.facts
        *parents, last = path.split("/")
        for key in parents:
            place = place[key]
        place[last] = value

    return apply


def forged(evidence: Evidence) -> None:
    evidence.recomputed["Server"]["accuracy"] = ["throughput"]


def several(*changes: Change) -> Change:
    def apply(evidence: Evidence) -> None:
        for one in changes:
            one(evidence)

    return apply


def system(**values: Any) -> Change:
    """Return a change of the systems JSON."""

    def apply(evidence: Evidence) -> None:
        path = evidence.root / "systems" / "gpu-server.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return apply


def in_folder(scenario: str, name: str, edit: Callable[[str], str] | None) -> Change:
    """Return an edit of a file of a scenario, or its removal."""

    def apply(evidence: Evidence) -> None:
        path = evidence.folder(scenario) / name
        if edit is None:
            path.unlink()
        else:
            path.write_text(edit(path.read_text()))

    return apply


def drop_document(evidence: Evidence) -> None:
    (evidence.root / "documentation/calibration.md").write_text("")


def drop_source(evidence: Evidence) -> None:
    shutil.rmtree(evidence.root / "src")


def edit_source(name: str, added: str | None) -> Change:
    """Return an addition to a copied source file, or its removal."""

    def apply(evidence: Evidence) -> None:
        path = evidence.root / "src/llama3.1-8b/fp8flow" / name
        assert path.is_file()
        if added is None:
            path.unlink()
        else:
            path.write_text(path.read_text() + added)

    return apply


def other_code(evidence: Evidence) -> None:
    evidence.scenarios["Server"].accuracy.spec["code"] = "0" * 64


def drop_server(evidence: Evidence) -> None:
    del evidence.scenarios["Server"]


def drop_key(evidence: Evidence) -> None:
    path = evidence.root / "systems" / "gpu-server.json"
    fields = json.loads(path.read_text())
    del fields["hw_notes"]
    path.write_text(json.dumps(fields))


def newer_run(evidence: Evidence) -> None:
    evidence.scenarios["Offline"].performance.data["digest"] = "newer"


def other_server_settings(evidence: Evidence) -> None:
    run_of(evidence, "Server", "accuracy")["server"]["settings"]["max_batch_size"] = 4


def add_problem(evidence: Evidence) -> None:
    evidence.problems.append("accuracy/run.json: outputs.parquet has other content than recorded")


LOADGEN_SETTINGS = "settings/effective"
CASES: dict[str, Change] = {
    "required-scenarios": drop_server,
    "product-records-intact": add_problem,
    "submission-up-to-date": newer_run,
    "model-official": fact("model/revision", "0" * 40),
    "dataset-size": fact("dataset/rows", 13_367),
    "dataset-official": fact("dataset/split", "test"),
    "prompt-template": fact("dataset/template", "chat"),
    "calibration-list": fact("calibration/list_sha256", "0" * 64),
    "calibration-tokens": fact("calibration/token_check", {"state": "different", "reason": "x"}),
    "quantization-described": fact("checkpoint/method", "int4_search"),
    "system-keys": system(cooling=""),
    "system-values": system(status="soon"),
    "system-datacenter": system(system_type="edge"),
    "system-ecc": fact("system/ecc/host/on", False),
    "system-is-the-one-measured": fact("system/host/hostname", "another-node"),
    "documents-present": drop_document,
    "ingress-bandwidth": fact("system/network_data_path", None),
    "source-present": drop_source,
    "run-complete": change("Offline", "accuracy", "state", "failed"),
    "no-failed-responses": change("Server", "performance", "counts/failed", 1),
    "no-empty-responses": change("Server", "scores", "responses/empty", 1),
    "settings-official": change("Offline", "performance", "settings/source", "explicit"),
    "loadgen-version": change("Offline", "accuracy", "loadgen/version", "6.0.17 @ 0000000000"),
    "loadgen-mode": change("Server", "accuracy", f"{LOADGEN_SETTINGS}/test_mode", "SubmissionRun"),
    "loadgen-valid": change("Offline", "performance", "loadgen/valid", False),
    "loadgen-errors": change("Server", "accuracy", "loadgen/errors", ["n_tokens: 1"]),
    "seeds": change("Server", "performance", f"{LOADGEN_SETTINGS}/schedule_rng_seed", "42"),
    "min-duration-configured": change(
        "Server", "performance", f"{LOADGEN_SETTINGS}/min_duration_ms", 599_999
    ),
    "duration-measured": change("Offline", "performance", "duration_s", 599.999),
    "performance-sample-count": change(
        "Server", "performance", f"{LOADGEN_SETTINGS}/performance_sample_count", 5000
    ),
    "query-count": change("Server", "performance", f"{LOADGEN_SETTINGS}/min_query_count", ROWS + 1),
    "samples-per-query": change(
        "Offline", "performance", f"{LOADGEN_SETTINGS}/samples_per_query", ROWS - 1
    ),
    "equal-issue": change(
        "Offline", "performance", f"{LOADGEN_SETTINGS}/sample_concatenate_permutation", False
    ),
    "token-latencies": change(
        "Server", "performance", "settings/requested/use_token_latencies", False
    ),
    "latency-ttft": change("Server", "performance", "latency_ns/ttft/p99", 2_000_000_000),
    "latency-tpot": change("Server", "performance", "latency_ns/tpot/p99", 100_000_000),
    "early-stopping": change("Server", "performance", "loadgen/early_stopping_met", False),
    "output-tokens-max": change("Offline", "accuracy", "settings/max_output_tokens", 48),
    "output-tokens-min": change("Offline", "performance", "tokens/output_min", 0),
    "greedy-decoding": change(
        "Server", "performance", "settings/request_fields", {"temperature": 0.7}
    ),
    "prefix-reuse-off": change("Server", "performance", "server/prefix_reuse", True),
    "same-system": other_server_settings,
    "throughput-units": change("Offline", "performance", "throughput/tokens_per_sample", 4.0),
    "result-recomputed": forged,
    "client-agrees-with-loadgen": change(
        "Server", "performance", "disagreements", ["tokens: 1, 2"]
    ),
    "token-counts": change("Offline", "accuracy", "tokens/usage_mismatches", 1),
    "one-token-answers": change("Server", "performance", "tokens/output_min", 1),
    "accuracy-log-matches-client": change("Server", "scores", "client_check/token_mismatches", 1),
    "accuracy-samples": several(
        change("Server", "scores", "responses/scored", ROWS - 1),
        change("Server", "scores", "responses/missing", 1),
    ),
    "accuracy-rouge1": change("Offline", "scores", "rouge1", 38.3914),
    "accuracy-rouge2": change("Offline", "scores", "rouge2", 15.7484),
    "accuracy-rougel": change("Offline", "scores", "rougeL", 24.2507),
    "accuracy-rougelsum": change("Offline", "scores", "rougeLsum", 35.4350),
    "accuracy-gen-len": change("Offline", "scores", "gen_len", 7_350_879),
    "required-files": in_folder("Server", "performance/run_1/mlperf_log_summary.txt", None),
    "measurements-keys": in_folder(
        "Offline", "measurements.json", lambda t: t.replace('"No"', '""')
    ),
    "user-conf": in_folder("Server", "user.conf", lambda t: t.replace("600000", "120000")),
    "accuracy-log-hash": in_folder(
        "Offline", "accuracy/accuracy.txt", lambda t: t.replace("hash=", "hash=0")
    ),
    "accuracy-text": in_folder(
        "Offline", "accuracy/accuracy.txt",
        lambda t: t.replace("7350880", "np.int64(7350880)"),
    ),
}  # fmt: skip
# A score that differs from accuracy.txt is seen there as well.
ALSO = {name: {"accuracy-text"} for name in CASES if name.startswith("accuracy-")}
ALSO["accuracy-samples"] = {"accuracy-log-matches-client"}
ALSO["accuracy-text"] = ALSO["accuracy-log-hash"] = ALSO["accuracy-log-matches-client"] = set()
ALSO["output-tokens-min"] = {"one-token-answers"}


def test_only_test06_is_missing(evidence: Evidence) -> None:
    result = judge(BOOK, evidence)
    assert failing(evidence) == {TEST06}
    assert unproven_ids(result) == []
    assert result["submittable"] is False


def add_test06(evidence: Evidence) -> Path:
    for scenario in evidence.scenarios:
        path = evidence.folder(scenario) / "TEST06" / "verify_accuracy.txt"
        path.parent.mkdir()
        path.write_text(
            "First token check pass: Skipped\nEOS check pass: True\n"
            "Sample length check pass: True\nTEST06 verification complete\n"
        )
    return path


def test_with_test06_the_submission_is_submittable(evidence: Evidence) -> None:
    path = add_test06(evidence)
    assert judge(BOOK, evidence)["submittable"] is True
    path.write_text(path.read_text().replace("EOS check pass: True", "EOS check pass: False"))
    assert failing(evidence) == {TEST06}


def test_every_rule_has_a_case_that_breaks_it() -> None:
    assert {rule.id for rule in BOOK.rules} == CASES.keys() | {TEST06}


def test_a_forged_result_is_found_in_the_raw_logs(tree: ResultTree) -> None:
    """An edit with a seal of its own is still contradicted by the attempt's files."""
    run = evidence_of(tree).scenarios["Offline"].performance
    assert recomputed_differences(run) == []
    forged_run = copy.deepcopy(run)
    forged_run.result["throughput"]["output_tokens_per_s"] *= 10
    forged_run.result["tokens"]["usage_mismatches"] = 7
    differing = ["throughput", "tokens.usage_mismatches"]
    assert recomputed_differences(forged_run) == differing


def test_a_check_that_crashes_fails_its_rule(evidence: Evidence) -> None:
    evidence.scenarios["Server"].performance.result["latency_ns"] = "gone"
    result = judge(BOOK, evidence)
    crashed = [r for r in result["rules"] if "could not be checked" in str(r["measured"])]
    assert {"latency-ttft", "latency-tpot"} <= {rule["id"] for rule in crashed}
    assert all(rule["status"] == "fail" for rule in crashed)


@pytest.mark.parametrize("name", CASES)
def test_breaking_one_rule_fails_that_rule_alone(evidence: Evidence, name: str) -> None:
    CASES[name](evidence)
    assert failing(evidence) - {TEST06} == {name} | ALSO.get(name, set())


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("model-official", fact("model/submittable", False)),
        ("model-official", fact("model/id", "someone/else")),
        (
            "model-official",
            several(fact("model/source", "local"), fact("model/parameters", 134_515_008)),
        ),
        ("dataset-size", fact("dataset/unique_ids", ROWS - 1)),
        ("dataset-official", fact("dataset/source", "demo")),
        ("prompt-template", fact("dataset/starts_with_bos", False)),
        ("prompt-template", fact("dataset/starts_with_bos", None)),
        ("prompt-template", fact("dataset/token_check", {"state": "different"})),
        ("calibration-list", fact("calibration/allowed_in_closed", False)),
        ("quantization-described", fact("checkpoint/calibration", None)),
        ("system-keys", drop_key),
        ("system-values", system(submitter="other")),
        ("system-values", system(accelerators_per_node="one")),
        ("system-ecc", fact("system/ecc/accelerators/on", None)),
        ("ingress-bandwidth", system(host_networking="Ethernet")),
        ("calibration-tokens", fact("calibration/token_check", None)),
        ("system-is-the-one-measured", fact("system/host/cpu_count", 3)),
        ("system-is-the-one-measured", fact("system/host/platform", "Linux-1")),
        ("system-is-the-one-measured", fact("system/host", {})),
        ("system-is-the-one-measured", fact("system/stack/transformers", "4.46.2")),
        ("source-present", edit_source("workflow/scripts/fp8flow/client.py", "STOP = 1\n")),
        ("source-present", edit_source("workflow/scripts/loadgen_worker.py", None)),
        ("source-present", edit_source("Snakefile", None)),
        ("source-present", other_code),
        ("client-agrees-with-loadgen", change("Offline", "accuracy", "disagreements", ["x"])),
        ("token-counts", change("Server", "performance", "tokens/usage_mismatches", None)),
        ("token-counts", change("Server", "accuracy", "tokens/recount_total", ROWS * 4)),
        ("token-counts", change("Server", "accuracy", "tokens/recount_total", None)),
        ("one-token-answers", change("Offline", "accuracy", "tokens/output_min", 1)),
        ("accuracy-log-matches-client", change("Offline", "scores", "client_check", None)),
        (
            "accuracy-log-matches-client",
            change("Offline", "scores", "client_check", {"compared": 0, "reason": "missing"}),
        ),
        ("accuracy-log-matches-client", change("Server", "scores", "client_check/compared", 1)),
        (
            "accuracy-log-matches-client",
            change("Server", "scores", "client_check/text_mismatches", 134),
        ),
        (
            "accuracy-log-matches-client",
            change("Server", "scores", "client_check/not_in_outputs", 1),
        ),
        ("no-failed-responses", change("Server", "performance", "counts/completed", ROWS - 1)),
        ("no-empty-responses", change("Server", "performance", "counts/empty", 3)),
        ("loadgen-valid", change("Server", "performance", "loadgen/valid", None)),
        ("duration-measured", change("Server", "performance", "duration_s", None)),
        ("latency-ttft", change("Server", "performance", "latency_ns/ttft", None)),
        ("latency-tpot", change("Server", "performance", "latency_ns/tpot/source", "queries")),
        ("output-tokens-max", change("Server", "accuracy", "tokens/output_max", 129)),
        ("greedy-decoding", change("Server", "accuracy", "settings/request_fields", {"top_k": 5})),
        *(
            ("greedy-decoding", change("Server", "performance", "settings/request_fields", fields))
            for fields in (
                {"repetition_penalty": 1.3},
                {"ignore_eos": True},
                {"min_tokens": 128},
                {"stop": ["."]},
            )
        ),
        ("prefix-reuse-off", fact("probe/prefix_reuse", True)),
        ("prefix-reuse-off", fact("probe/reuse", None)),
        ("same-system", fact("checkpoint/digest", "another")),
        ("accuracy-samples", change("Server", "scores", "responses/duplicates", 1)),
        ("required-files", in_folder("Offline", "README.md", lambda _: "")),
        ("user-conf", in_folder("Offline", "user.conf", lambda _: "*.Server.min_duration=600000")),
        (
            "accuracy-log-hash",
            in_folder("Server", "accuracy/mlperf_log_accuracy.json", lambda t: t * 2),
        ),
    ],
)  # fmt: skip
def test_further_ways_to_break_a_rule(evidence: Evidence, name: str, broken: Change) -> None:
    broken(evidence)
    assert failing(evidence) - {TEST06} == {name}


@pytest.mark.parametrize(
    "still_good",
    [
        change("Offline", "performance", "duration_s", 600.0),
        change("Server", "performance", "latency_ns/ttft/p99", 1_999_999_999),
        change("Server", "performance", "latency_ns/tpot/p99", 99_999_999),
        change("Server", "performance", f"{LOADGEN_SETTINGS}/min_query_count", ROWS),
        change("Server", "accuracy", "tokens/output_max", 128),
        system(hw_notes="", accelerators_per_node="0"),
        fact("calibration", None),
        several(fact("calibration", None), fact("checkpoint/method", "none")),
        fact("calibration/token_check", {"state": "identical"}),
        change("Server", "scores", "client_check/text_mismatches", 133),
        change("Server", "accuracy", "tokens/recount_total", round(ROWS * 3 * 1.004)),
        fact("system/ecc/accelerators", {"on": None, "origin": "N/A"}),
    ],
)
def test_what_is_just_good_enough(evidence: Evidence, still_good: Change) -> None:
    still_good(evidence)
    expected = set()
    if evidence.facts["calibration"] is None and evidence.facts["checkpoint"]["method"] != "none":
        expected = {"quantization-described"}
    assert failing(evidence) - {TEST06} == expected


LOCAL_MODEL = several(fact("model/source", "local"), fact("model/id", None))
LATE = several(
    change("Server", "performance", "measured_from", "issued"),
    change("Server", "performance", "measured_from_reason", "the seed is not known"),
)


@pytest.mark.parametrize(
    ("names", "doubt", "words"),
    [
        ({"model-official"}, LOCAL_MODEL, "origin cannot be proven"),
        (
            {"dataset-official"},
            several(fact("dataset/source", "mlcommons"), fact("dataset/file", "cnn_eval.json")),
            "cnn_eval.json, SHA-256 None; its origin cannot be proven",
        ),
        (
            {"dataset-official"},
            several(fact("dataset/source", "file"), fact("dataset/file", "my.jsonl")),
            "my.jsonl",
        ),
        (
            {"calibration-list"},
            several(fact("calibration/source", "file"), fact("calibration/file", "texts.jsonl")),
            "texts from texts.jsonl",
        ),
        ({"latency-ttft", "latency-tpot", "early-stopping"}, LATE, "the seed is not known"),
    ],
)
def test_what_cannot_be_proven_blocks_until_it_is_attested(
    evidence: Evidence, names: set[str], doubt: Change, words: str
) -> None:
    add_test06(evidence)
    doubt(evidence)
    result = judge(BOOK, evidence)
    assert (set(unproven_ids(result)), failing_ids(result)) == (names, [])
    assert result["submittable"] is False
    assert "attested" not in table(result).splitlines()[0]
    assert all(f"{name} " in table(result) for name in names)
    doubtful = [rule for rule in result["rules"] if rule["status"] == "unproven"]
    assert all(words in rule["measured"] and not rule["attested"] for rule in doubtful)
    evidence.submission.result["attested"] = sorted(names)
    result = judge(BOOK, evidence)
    assert result["submittable"] is True
    assert set(unproven_ids(result)) == names
    assert f"{len(names)} of them only attested" in table(result)
    assert all(r["attested"] for r in result["rules"] if r["status"] == "unproven")


def test_report_and_summary_count_unproven_rules_as_not_met(evidence: Evidence) -> None:
    LOCAL_MODEL(evidence)
    result = judge(BOOK, evidence)
    rule = next(rule for rule in result["rules"] if rule["status"] == "unproven")
    assert rule["status"] in STATUS_ORDER
    assert rule_view(rule)["fix"] == rule["fix"]
    verdict = Record(Path("verdict.json"), {"result": result})
    assert print_summary.remarks([], verdict)[0].startswith("3 of ")
    evidence.submission.result["attested"] = ["model-official"]
    verdict = Record(Path("verdict.json"), {"result": judge(BOOK, evidence)})
    assert print_summary.remarks([], verdict)[0].startswith("2 of ")
    rule = next(rule for rule in verdict.result["rules"] if rule["status"] == "unproven")
    assert rule_view(rule)["fix"] == ""
    assert "attested by the submitter" in rule_view(rule)["measured"]


def test_times_from_issue_do_not_excuse_a_failure(evidence: Evidence) -> None:
    several(LATE, CASES["latency-ttft"])(evidence)
    assert rule_of(evidence, "latency-ttft", "Server")["status"] == "fail"


def test_run_that_does_not_say_where_its_times_start_is_unproven(evidence: Evidence) -> None:
    run = run_of(evidence, "Server", "performance")
    run |= {"measured_from": None, "measured_from_reason": None}
    assert rule_of(evidence, "early-stopping", "Server")["status"] == "unproven"


def test_attesting_does_not_excuse_a_failure(evidence: Evidence) -> None:
    add_test06(evidence)
    evidence.submission.result["attested"] = ["model-official", "seeds"]
    several(LOCAL_MODEL, fact("model/parameters", 134_515_008))(evidence)
    rule = rule_of(evidence, "model-official")
    assert (rule["status"], rule["attested"]) == ("fail", False)
    assert rule_of(evidence, "seeds", "Server")["attested"] is False
    assert judge(BOOK, evidence)["submittable"] is False


def test_attesting_what_is_no_rule_is_an_error(evidence: Evidence) -> None:
    evidence.submission.result["attested"] = ["model-oficial"]
    with pytest.raises(FlowError, match="names model-oficial"):
        judge(BOOK, evidence)


def test_difference_between_described_and_measured_system_is_named(evidence: Evidence) -> None:
    fact("system/stack/transformers", "4.46.2")(evidence)
    measured = rule_of(evidence, "system-is-the-one-measured")["measured"]
    differing = measured["described, measured"]["Server accuracy"]
    assert differing.keys() == {"transformers"}
    assert differing["transformers"][0] == "4.46.2"


def test_code_of_a_run_is_that_of_the_pipeline() -> None:
    scripts = CHECKOUT / "workflow" / "scripts"
    for backend, program in BACKENDS.items():
        for rule in ("run_performance", "run_accuracy"):
            programs = (*PROGRAMS[rule].scripts, *program.scripts)
            assert run_code_hash(CHECKOUT, rule, backend) == code_hash(scripts, programs)


@pytest.mark.parametrize(
    ("value", "good"),
    [(7_350_879, False), (7_350_880, True), (8_984_408, True), (8_984_409, False), (None, False)],
)
def test_window_of_gen_len(evidence: Evidence, value: int | None, good: bool) -> None:
    run_of(evidence, "Server", "scores")["gen_len"] = value
    assert (rule_of(evidence, "accuracy-gen-len", "Server")["status"] == "pass") is good


def test_accuracy_gates_are_those_of_the_benchmark() -> None:
    limits = {r.limit["key"]: r.limit for r in BOOK.rules if r.id.startswith("accuracy-rouge")}
    gates = {key: limit["reference"] * limit["least"] for key, limit in limits.items()}
    assert gates.keys() == SCORES.keys()
    for key, gate in gates.items():
        # Scores have four decimals: the smallest that passes, and the one below it.
        assert SCORES[key] >= gate > round(SCORES[key] - 0.0001, 4)


def test_constants_of_the_code_are_those_of_the_rules() -> None:
    limits = {rule.id: rule.limit for rule in BOOK.rules}
    assert BOOK.data["samples"] == loadgen_settings.OFFICIAL_ROWS == dataset.OFFICIAL_ROWS == ROWS
    assert limits["seeds"] == {name: str(seed) for name, seed in loadgen_settings.SEEDS.items()}
    for scenario, limits_ms in loadgen_settings.LIMITS_MS.items():
        given = [limits["latency-ttft"][scenario], limits["latency-tpot"][scenario]]
        assert given == [value * 1e6 for value in limits_ms] == limits["early-stopping"][scenario]
    assert limits["calibration-list"]["sha256"] == calibration.OFFICIAL_LIST_SHA256
    constants = BOOK.data["early_stopping"]
    assert constants["percentile"] == early_stopping.PERCENTILE
    assert constants["confidence"] == early_stopping.CONFIDENCE


def test_offline_has_no_latency_limits(evidence: Evidence) -> None:
    for name in ("latency-ttft", "latency-tpot", "early-stopping"):
        rule = rule_of(evidence, name, "Offline")
        assert (rule["status"], rule["measured"]) == ("not_applicable", None)
        assert rule_of(evidence, name, "Server")["status"] == "pass"


def test_interactive_is_held_to_its_own_limits(tree: ResultTree) -> None:
    evidence = evidence_of(tree)
    assert rule_of(evidence, "latency-ttft", "Interactive")["limit"] == "< 500 ms"
    broken = {"latency-ttft", "latency-tpot", "early-stopping"}
    assert failing(evidence) == broken | {TEST06}
    assert rule_of(evidence, "early-stopping", "Interactive")["measured"][
        "tpot over the limit"
    ] == (f"{ROWS:,} of {ROWS:,}")


def test_open_division_has_no_accuracy_gates(evidence: Evidence) -> None:
    evidence.submission.result["division"] = "open"
    system(division="open")(evidence)
    run_of(evidence, "Server", "scores")["rouge1"] = 1.0
    fact("model/submittable", False)(evidence)
    assert rule_of(evidence, "accuracy-rouge1", "Server")["status"] == "not_applicable"
    assert failing(evidence) == {TEST06, "accuracy-text"}


def test_rules_say_where_they_are_written_and_what_to_do(evidence: Evidence) -> None:
    for rule in judge(BOOK, evidence)["rules"]:
        assert rule["source"] and rule["fix"] and rule["title"]
        assert (rule["limit"] is None) == (rule["status"] == "not_applicable")


def test_table_has_one_line_for_each_failing_rule(evidence: Evidence) -> None:
    CASES["duration-measured"](evidence)
    head, names, *lines, advice = table(judge(BOOK, evidence)).splitlines()
    applicable = sum(r["status"] != "not_applicable" for r in judge(BOOK, evidence)["rules"])
    assert head == f"NOT SUBMITTABLE: {applicable - 3} of {applicable} rules that apply are met"
    assert names.split() == ["rule", "scenario", "status", "found", "asked", "for"]
    assert [line.split()[:2] for line in lines] == [
        ["duration-measured", "Offline"],
        [TEST06, "Offline"],
        [TEST06, "Server"],
    ]
    assert "599.999 s" in lines[0] and ">= 600 s" in lines[0]
    assert "fix" in advice


def test_zero_is_shown_as_found(evidence: Evidence) -> None:
    run_of(evidence, "Server", "scores")["rouge1"] = 0.0
    line = next(x for x in table(judge(BOOK, evidence)).splitlines() if "accuracy-rouge1" in x)
    assert " 0.0 " in line


def without_logs(run: dict[str, Any]) -> None:
    """Make a run as build_run_result describes it when LoadGen left nothing readable."""
    run |= {"state": "failed", "reason": "cannot read LoadGen's log", "duration_s": None}
    run["loadgen"] = {"version": None, "valid": None}
    run["settings"] |= {"effective": {}, "requested": {}}
    run["latency_ns"] = dict.fromkeys(("ttft", "tpot", "latency"))
    for block in ("throughput", "tokens"):
        run[block] = dict.fromkeys(run[block])
    run["counts"] |= {"completed": 0, "failed": run["counts"]["issued"]}


def test_runs_without_logs_are_judged(evidence: Evidence) -> None:
    for scenario in evidence.scenarios.values():
        for mode in ("performance", "accuracy"):
            without_logs(run_of(evidence, scenario.name, mode))
        scores = scenario.scores.result
        scores |= dict.fromkeys((*SCORES, "gen_len")) | {"state": "failed", "reason": "nothing"}
        scores["responses"] |= {"scored": 0, "missing": ROWS}
    broken = failing(evidence)
    expected = {"run-complete", "no-failed-responses", "loadgen-version", "loadgen-valid", "seeds"}
    expected |= {"loadgen-errors", "duration-measured", "latency-ttft", "throughput-units"}
    expected |= {"ingress-bandwidth", "query-count", "accuracy-rouge1", "output-tokens-min"}
    assert expected <= broken
    rule = rule_of(evidence, "duration-measured", "Offline")
    assert rule["measured"] == "not measured"
    assert verdict_is_json(judge(BOOK, evidence))


def verdict_is_json(result: dict[str, Any]) -> bool:
    return json.loads(json.dumps(result, allow_nan=False)) == result


def validate(tree: ResultTree, *more: str) -> int:
    add, run = validate_submission.add_arguments, validate_submission.run
    return script_main("x", add, run, [*tree.validate_arguments(), *more])


def test_script_writes_the_verdict_and_exits_0(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = assemble(make_results(tmp_path / "results", rows=400))
    assert validate(tree) == 0
    record = verify_record(tree.submission.with_name("verdict.json"))
    failed = set(failing_ids(record.result))
    # A small set alone breaks what depends on the number of samples, and nothing else.
    assert failed == {
        "dataset-size", "performance-sample-count", "samples-per-query", "accuracy-samples",
        "early-stopping", TEST06,
    }  # fmt: skip
    assert "NOT SUBMITTABLE" in capsys.readouterr().out
    assert read_record(tree.submission).digest in record.data["inputs"].values()


def test_changed_file_is_a_failing_rule_not_a_crash(tmp_path: Path) -> None:
    tree = assemble(make_results(tmp_path / "results", rows=400))
    log = tree.results / "fp8/Server/performance/attempts/1/mlperf_log_summary.txt"
    log.write_text("better numbers")
    document = tree.submission.parent / "closed/acme/documentation/calibration.md"
    document.unlink()
    assert validate(tree) == 0
    rules = read_record(tree.submission.with_name("verdict.json")).result["rules"]
    intact = next(rule for rule in rules if rule["id"] == "product-records-intact")
    assert intact["status"] == "fail"
    assert any("mlperf_log_summary.txt" in text for text in intact["measured"])
    assert any("calibration.md is missing" in text for text in intact["measured"])


def test_missing_record_is_an_error(tmp_path: Path) -> None:
    tree = make_results(tmp_path / "results", rows=400)
    assert validate(tree) == 1


def test_rules_without_a_check_are_refused(evidence: Evidence, tmp_path: Path) -> None:
    data = yaml.safe_load(rules_file("v6.1").read_text())
    data["rules"] = [rule for rule in data["rules"] if rule["id"] != "seeds"]
    path = tmp_path / "rules.yaml"
    path.write_text(yaml.safe_dump(data))
    with pytest.raises(FlowError, match="scenario scope: seeds"):
        judge(load_rules(path), evidence)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda d: d["rules"][0].pop("fix"), "lacks fix"),
        (lambda d: d["rules"][0].update(scope="all"), "allowed: submission, scenario"),
        (lambda d: d["rules"][0].update(limits=1), "unknown keys: limits"),
        (lambda d: d["rules"][0].update(id="Not Kebab"), "kebab-case"),
        (lambda d: d["rules"].append(d["rules"][0]), "double rule ids: required-scenarios"),
        (lambda d: d.pop("rules"), "list of rules"),
    ],
)
def test_broken_rules_file_is_refused(tmp_path: Path, edit: Callable, words: str) -> None:
    data = yaml.safe_load(rules_file("v6.1").read_text())
    edit(data)
    path = tmp_path / "rules.yaml"
    path.write_text(yaml.safe_dump(data))
    with pytest.raises(FlowError, match=words):
        load_rules(path)


def test_unknown_round_is_refused() -> None:
    with pytest.raises(FlowError, match=r"v9\.9\.yaml"):
        load_rules(rules_file("v9.9"))


def test_program_shows_help() -> None:
    program = [sys.executable, validate_submission.__file__, "--help"]
    assert "--limits" in subprocess.run(program, capture_output=True, text=True, check=True).stdout
