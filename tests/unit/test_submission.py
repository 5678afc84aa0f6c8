"""The tree: which files, from what, with which hash; and products that do not belong together."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from result_tree import (
    HARNESS,
    SUBMISSION,
    ResultTree,
    config,
    make_results,
    scenario_settings,
    write_run,
    write_scores,
)

import assemble_submission as script
from fp8flow.cli import script_main
from fp8flow.config import SubmissionConfig, demo_config
from fp8flow.config_file import load_config
from fp8flow.errors import FlowError
from fp8flow.pipeline import Pipeline
from fp8flow.records import read_record, verify_record, write_record
from fp8flow.source_copy import CHECKOUT, git_revision, source_files
from fp8flow.spec import Spec
from fp8flow.submission import (
    Inputs,
    check_inputs,
    consistency_problems,
    group_scenarios,
    truncate_accuracy_log,
)

ROWS = 2000
SCENARIO_FILES = {
    "README.md",
    "user.conf",
    "measurements.json",
    "performance/run_1/mlperf_log_detail.txt",
    "performance/run_1/mlperf_log_summary.txt",
    "accuracy/mlperf_log_detail.txt",
    "accuracy/mlperf_log_summary.txt",
    "accuracy/mlperf_log_accuracy.json",
    "accuracy/accuracy.txt",
}


def assemble(tree: ResultTree) -> int:
    return script_main("x", script.add_arguments, script.run, tree.assemble_arguments())


@pytest.fixture
def tree(tmp_path: Path) -> ResultTree:
    return make_results(tmp_path / "results", rows=ROWS)


def inputs_of(tree: ResultTree) -> Inputs:
    names = ("model", "dataset", "checkpoint", "probe", "system", "calibration")
    shared = {name: tree.records[name] for name in names}
    records = tree.records.items()
    runs = [r for name, r in records if name.endswith((" performance", " accuracy"))]
    scores = [r for name, r in records if name.endswith(" scores")]
    return Inputs(**shared, scenarios=group_scenarios(runs, scores))


def test_tree_has_exactly_the_files_of_a_submission(tree: ResultTree) -> None:
    assert assemble(tree) == 0
    root = tree.submission.parent / "closed" / "acme"
    there = {p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file()}
    expected = {"systems/gpu-server.json", "documentation/calibration.md"}
    expected |= {"documentation/system_architecture.md"}
    for scenario in ("Offline", "Server"):
        folder = f"results/gpu-server/llama3.1-8b/{scenario}"
        expected |= {f"{folder}/{name}" for name in SCENARIO_FILES}
    source = {name for name in there if name.startswith("src/llama3.1-8b/")}
    assert there - source == expected
    names = {Path(name).name for name in source}
    assert {"README.md", "config.yaml", "commands.json", "Server-performance.json"} <= names
    verify_record(tree.submission)


def test_system_json_has_submitter_and_the_engine_that_ran(tree: ResultTree) -> None:
    assemble(tree)
    path = tree.submission.parent / "closed/acme/systems/gpu-server.json"
    fields = json.loads(path.read_text())
    assert len(fields) == 35
    assert (fields["submitter"], fields["division"]) == ("acme", "closed")
    assert fields["framework"].startswith("transformers ")


def test_configuration_in_src_can_be_used_again(tree: ResultTree) -> None:
    given = demo_config().model_dump(mode="json")
    effective = {key: value for key, value in given.items() if key not in ("run", "report")}
    effective |= {"harness": HARNESS, "submission": SUBMISSION | {"variant": "fp8"}}
    effective["scenarios"] |= {name: scenario_settings(name) for name in tree.scenarios}
    settings = {"submission": SUBMISSION, "config": effective}
    arguments = tree.assemble_arguments()
    arguments[1] = Spec("assemble_submission", settings).canonical()
    assert script_main("x", script.add_arguments, script.run, arguments) == 0
    path = tree.submission.parent / "closed/acme/src/llama3.1-8b/config.yaml"
    again = load_config([path]).config.model_dump(mode="json")
    assert {key: again[key] for key in effective} == effective


def test_accuracy_log_is_cut_and_hashed_as_the_official_tool_does(tmp_path: Path) -> None:
    whole, copy = tmp_path / "whole.json", tmp_path / "copy.json"
    text = "".join(f"{n:08d}" for n in range(5000))
    whole.write_text(text)
    digest = truncate_accuracy_log(whole, copy, 4096)
    assert digest == hashlib.sha256(text.encode()).hexdigest()
    assert copy.read_text() == f"{text[:4096]}\n\n...\n\n{text[-4096:]}"
    assert copy.stat().st_size == 8199


def test_short_accuracy_log_stays_whole(tmp_path: Path) -> None:
    whole, copy = tmp_path / "whole.json", tmp_path / "copy.json"
    whole.write_text("[]")
    truncate_accuracy_log(whole, copy, 4096)
    assert copy.read_text() == "[]"


def test_accuracy_text_ends_with_the_hash_of_the_whole_log(tree: ResultTree) -> None:
    assemble(tree)
    folder = tree.submission.parent / "closed/acme/results/gpu-server/llama3.1-8b/Offline/accuracy"
    attempt = tree.results / "fp8/Offline/accuracy/attempts/1/mlperf_log_accuracy.json"
    lines = (folder / "accuracy.txt").read_text().splitlines()
    assert lines[1:] == [f"hash={hashlib.sha256(attempt.read_bytes()).hexdigest()}"]
    assert "'gen_len': 7350880" in lines[0]
    assert (folder / "mlperf_log_accuracy.json").stat().st_size == 8199


def test_result_holds_what_the_verdict_needs(tree: ResultTree) -> None:
    assemble(tree)
    result = read_record(tree.submission).result
    assert result["facts"]["dataset"]["rows"] == ROWS
    assert result["facts"]["calibration"]["official_list"] is True
    assert result["facts"]["probe"]["prefix_reuse"] is False
    assert set(result["scenarios"]) == {"Offline", "Server"}
    assert (tree.submission.parent / result["scenarios"]["Server"]["folder"]).is_dir()


def test_all_belongs_together(tree: ResultTree) -> None:
    assert consistency_problems(inputs_of(tree), config(tree.scenarios)) == []


def remake(tree: ResultTree, name: str, **result: Any) -> None:
    """Write a shared record again with another result, as a rebuilt product has."""
    old = tree.records[name]
    tree.records[name] = write_record(
        old.path,
        Spec(old.spec["rule"], old.spec["settings"]),
        old.result | result,
        inputs={n: r for n, r in tree.records.items() if n in old.data["inputs"]},
    )


def other_dataset(tree: ResultTree) -> None:
    remake(tree, "dataset", prompt_sha256="other")


def other_checkpoint(tree: ResultTree) -> None:
    remake(tree, "checkpoint", device="other")


def other_model(tree: ResultTree) -> None:
    remake(tree, "model", parameters=1)


def other_calibration(tree: ResultTree) -> None:
    remake(tree, "calibration", rows=24)


def other_harness(tree: ResultTree) -> None:
    respec(tree, "Offline accuracy", "harness", HARNESS | {"max_output_tokens": 48})


def other_engine(tree: ResultTree) -> None:
    respec(tree, "Server accuracy", "engine", {"backend": "other", "serve": {}})


def other_rate(tree: ResultTree) -> None:
    wanted = scenario_settings("Server") | {"target_qps": 99.0}
    respec(tree, "Server performance", "scenario_settings", wanted)


def respec(tree: ResultTree, name: str, key: str, value: Any) -> None:
    """Write a run record again with another setting in its spec."""
    tree.records[name].spec["settings"][key] = value


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (other_dataset, "another data set"),
        (other_checkpoint, "another checkpoint"),
        (other_model, "another model"),
        (other_calibration, "another calibration set"),
        (other_harness, "performance and accuracy run differ in harness.max_output_tokens"),
        (other_engine, "differ in engine.backend"),
        (other_rate, "differs from the configuration in scenario_settings.target_qps"),
    ],
)
def test_products_that_do_not_belong_together_are_refused(
    tree: ResultTree, change: Callable[[ResultTree], None], words: str
) -> None:
    change(tree)
    with pytest.raises(FlowError, match="run snakemake") as refused:
        check_inputs(inputs_of(tree), config(tree.scenarios))
    assert words in str(refused.value)


def test_scores_of_an_earlier_run_are_refused(tree: ResultTree) -> None:
    log = tree.results / "fp8/Offline/accuracy/attempts/1/mlperf_log_summary.txt"
    log.write_text("another run")
    old = tree.records["Offline accuracy"]
    tree.records["Offline accuracy"] = write_record(
        old.path,
        Spec("run_accuracy", old.spec["settings"]),
        old.result,
        inputs={n: tree.records[n] for n in ("checkpoint", "dataset")},
        files=sorted(old.data["files"]),
    )
    problems = consistency_problems(inputs_of(tree), config(tree.scenarios))
    assert len(problems) == 1
    assert "accuracy.json was made from another run" in problems[0]


def test_changed_file_stops_the_assembly(tree: ResultTree) -> None:
    (tree.results / "fp8/Offline/performance/attempts/1/user.conf").write_text("tampered")
    assert assemble(tree) == 1
    assert not tree.submission.exists()


def test_scenario_without_accuracy_is_refused(tree: ResultTree) -> None:
    runs = [tree.records["Offline performance"]]
    with pytest.raises(FlowError, match="Offline has no record for: accuracy, scores"):
        group_scenarios(runs, [])


def test_scenarios_come_in_the_order_of_the_benchmark(tmp_path: Path) -> None:
    names = ("Interactive", "Offline", "Server")
    tree = make_results(tmp_path / "results", rows=50, scenarios=names)
    assert list(inputs_of(tree).scenarios) == ["Offline", "Server", "Interactive"]


def source_of(tree: ResultTree) -> Path:
    return tree.submission.parent / "closed/acme/src/llama3.1-8b"


def test_source_in_src_plans_the_same_products(tree: ResultTree) -> None:
    given = demo_config().model_dump(mode="json")
    effective = {key: value for key, value in given.items() if key not in ("run", "report")}
    del effective["variants"]
    effective |= {"harness": HARNESS, "submission": SUBMISSION}
    effective["scenarios"] |= {name: scenario_settings(name) for name in tree.scenarios}
    arguments = tree.assemble_arguments()
    settings = {"submission": SUBMISSION, "config": effective}
    arguments[1] = Spec("assemble_submission", settings).canonical()
    assert script_main("x", script.add_arguments, script.run, arguments) == 0
    loaded = load_config([source_of(tree) / "config.yaml"])
    copied = Pipeline(loaded, source_of(tree) / "fp8flow").products
    original = Pipeline(loaded, CHECKOUT).products
    assert copied.keys() == original.keys()
    for name, product in original.items():
        assert copied[name].spec == product.spec, name
    assert (source_of(tree) / "fp8flow/resources/demo/validation.jsonl").is_file()
    assert not list(source_of(tree).rglob("__pycache__"))


def test_articles_of_the_demo_are_left_out_where_they_are_not_used(tree: ResultTree) -> None:
    assert assemble(tree) == 0
    resources = source_of(tree) / "fp8flow/resources"
    assert {path.name for path in resources.iterdir()} == {
        "contracts",
        "mlperf",
        "nltk",
        "report",
        "templates",
    }


def test_assembling_again_gives_the_same_tree(tree: ResultTree) -> None:
    assert assemble(tree) == 0
    first = read_record(tree.submission).digest
    assert assemble(tree) == 0
    assert read_record(tree.submission).digest == first


def git(folder: Path, *arguments: str) -> str:
    names = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    command = ["git", *names, "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_revision_of_a_checkout(tmp_path: Path) -> None:
    (tmp_path / "workflow").mkdir()
    (tmp_path / "workflow/a.py").write_text("x = 1\n")
    assert git_revision(tmp_path)["note"] == "not a git checkout"
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "-m", "first")
    commit = git(tmp_path, "rev-parse", "HEAD")
    (tmp_path / "notes.txt").write_text("no part of the source")
    assert git_revision(tmp_path) == {"commit": commit, "dirty": False, "note": ""}
    (tmp_path / "workflow/b.py").write_text("y = 1\n")
    assert git_revision(tmp_path)["dirty"] is True
    # A copy inside another repository is not that repository's commit.
    assert git_revision(tmp_path / "workflow")["note"] == "not a git checkout"


def test_half_a_checkout_is_refused(tmp_path: Path) -> None:
    (tmp_path / "workflow").mkdir()
    with pytest.raises(FlowError, match="no Snakefile, envs, resources"):
        list(source_files(tmp_path, {}))


def test_attesting_what_is_no_rule_is_refused_early(tree: ResultTree) -> None:
    settings = {
        "submission": SUBMISSION | {"attested": ["model-oficial"]},
        "config": config(tree.scenarios),
    }
    arguments = tree.assemble_arguments()
    arguments[1] = Spec("assemble_submission", settings).canonical()
    assert script_main("x", script.add_arguments, script.run, arguments) == 1
    assert not tree.submission.exists()
    with pytest.raises(ValueError, match="has no rule model-oficial"):
        SubmissionConfig(submitter="a", variant="fp8", attested=["model-oficial"])
    SubmissionConfig(submitter="a", variant="fp8", attested=["model-official"])


def test_double_record_is_refused(tree: ResultTree) -> None:
    run = tree.records["Offline performance"]
    with pytest.raises(FlowError, match="Offline has two performance records"):
        group_scenarios([run, run], [])


def test_variant_without_calibration(tmp_path: Path) -> None:
    tree = make_results(tmp_path / "results", rows=ROWS, scenarios=("Offline",))
    checkpoint = tree.records["checkpoint"]
    settings = {"quantization": {"method": "none", "kv_cache": "auto", "kv_scales": "cast",
                                 "exclude": []}}  # fmt: skip
    nothing = dict.fromkeys(("weight_scale", "input_scale", "k_scale", "v_scale"))
    changes = {"method": "none", "calibration": None, "scales": {"total": nothing}}
    tree.records["checkpoint"] = write_record(
        checkpoint.path, Spec("quantize", settings), checkpoint.result | changes,
        inputs={"model": tree.records["model"]},
    )  # fmt: skip
    remake(tree, "probe")
    for mode in ("performance", "accuracy"):
        attempt = tree.results / f"fp8/Offline/{mode}/attempts"
        attempt.rename(attempt.with_name(f"{mode} old"))
        tree.records[f"Offline {mode}"] = write_run(tree, "Offline", mode, None, ROWS)
    tree.records["Offline scores"] = write_scores(tree, "Offline", ROWS)
    arguments = tree.assemble_arguments()
    del arguments[arguments.index("--calibration") + 1]
    assert script_main("x", script.add_arguments, script.run, arguments) == 0
    root = tree.submission.parent / "closed/acme"
    text = (root / "documentation/calibration.md").read_text()
    assert "nothing was calibrated" in text
    folder = root / "results/gpu-server/llama3.1-8b/Offline"
    content = json.loads((folder / "measurements.json").read_text())
    assert content["weight_data_types"] == "bfloat16"
    assert content["weight_transformations"] == "none"


def test_run_that_was_cut_short_is_put_in_as_it_is(tmp_path: Path) -> None:
    tree = make_results(tmp_path / "results", rows=ROWS, scenarios=("Server",))
    old = tree.records["Server performance"]
    log = old.root / "attempts/1/mlperf_log_summary.txt"
    log.unlink()
    nothing = dict.fromkeys(("output_tokens_per_s", "samples_per_s", "tokens_per_sample"))
    changes = {
        "state": "failed",
        "reason": "the server was gone",
        "duration_s": None,
        "throughput": nothing | {"definition": "x"},
        "latency_ns": dict.fromkeys(("ttft", "tpot", "latency")),
    }
    files = [name for name in old.data["files"] if not name.endswith("summary.txt")]
    tree.records["Server performance"] = write_record(
        old.path, Spec("run_performance", old.spec["settings"]), old.result | changes,
        inputs={n: tree.records[n] for n in ("checkpoint", "dataset")}, files=files,
    )  # fmt: skip
    assert assemble(tree) == 0
    folder = tree.submission.parent / "closed/acme/results/gpu-server/llama3.1-8b/Server"
    text = (folder / "README.md").read_text()
    assert "the server was gone" in text
    assert "not known" in text
    assert not (folder / "performance/run_1/mlperf_log_summary.txt").exists()


def test_program_shows_help() -> None:
    program = [sys.executable, script.__file__]
    shown = subprocess.run([*program, "--help"], capture_output=True, text=True, check=True).stdout
    assert "--accuracies" in shown
