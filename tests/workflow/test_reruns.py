"""The rerun contract: which edit reruns which jobs, exactly.

Proves the plan, not the programs: jobs are stand-ins that only write their records.
"""

from __future__ import annotations

import copy
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from plan import execute, working_directory

from fp8flow.code_hash import INFRASTRUCTURE, closure
from fp8flow.config import Config, demo_config
from fp8flow.config_file import models_in
from fp8flow.pipeline import BACKENDS, PROGRAMS, Pipeline

PACKAGE = {
    "assemble_submission",
    "validate_submission",
    "render_report",
}
OFFLINE = {f"{rule} fp8 Offline" for rule in ("run_performance", "run_accuracy", "score_accuracy")}
SERVER = {f"{rule} fp8 Server" for rule in ("run_performance", "run_accuracy", "score_accuracy")}
RUNS = OFFLINE | SERVER
SERVING = {"probe_server fp8"} | RUNS | PACKAGE
QUANTIZE = {"quantize fp8"} | SERVING
CALIBRATION = {"prepare_calibration"} | QUANTIZE
DATASET = {"prepare_dataset"} | SERVING
EVERYTHING = {"fetch_model", "prepare_dataset"} | CALIBRATION

# Config key -> (another valid value, jobs that rerun). Every key of the demo is here.
CASES: dict[str, tuple[Any, set[str]]] = {
    "run.name": ("other", set()),
    "model.id": ("some/model", EVERYTHING),
    "model.revision": ("0" * 40, EVERYTHING),
    "model.name": ("renamed", SERVING),
    "model.trust_remote_code": (True, EVERYTHING),
    "dataset.id": ("other/set", DATASET | CALIBRATION),
    "dataset.revision": ("2.0.0", DATASET | CALIBRATION),
    "dataset.split": ("test", DATASET),
    "dataset.template": ("reference", DATASET | CALIBRATION),
    "dataset.samples": (24, DATASET),
    "dataset.max_input_tokens": (16384, DATASET),
    "calibration.samples": (16, CALIBRATION),
    "calibration.max_length": (24, CALIBRATION),
    "calibration.batch_size": (24, QUANTIZE),
    "calibration.id_list_sha256": ("0" * 64, CALIBRATION),
    "quantization.method": ("fp8_dynamic", QUANTIZE),
    "quantization.kv_cache": ("auto", QUANTIZE),
    "quantization.kv_scales": ("calibrated", QUANTIZE),
    "quantization.exclude": (["lm_head", "*mlp*"], QUANTIZE),
    "engine.replicas": (2, SERVING),
    "engine.serve.max_batch_size": (4, SERVING),
    "engine.serve.max_batch_tokens": (16384, SERVING),
    "engine.serve.kv_cache_tokens": (1024, SERVING),
    "harness.max_output_tokens": (64, RUNS | PACKAGE),
    "harness.min_output_tokens": (4, RUNS | PACKAGE),
    "harness.max_connections": (48, RUNS | PACKAGE),
    "harness.request_timeout_s": (48.0, RUNS | PACKAGE),
    "harness.warmup_requests": (1, RUNS | PACKAGE),
    "scenarios.Offline.target_qps": (0.5, OFFLINE | PACKAGE),
    "scenarios.Offline.min_duration_ms": (20_000, {"run_performance fp8 Offline"} | PACKAGE),
    "scenarios.Offline.min_queries": (24, {"run_performance fp8 Offline"} | PACKAGE),
    "scenarios.Offline.ttft_limit_ms": (24.0, OFFLINE | PACKAGE),
    "scenarios.Offline.tpot_limit_ms": (24.0, OFFLINE | PACKAGE),
    "scenarios.Server.target_qps": (1.0, SERVER | PACKAGE),
    "scenarios.Server.min_duration_ms": (10_000, {"run_performance fp8 Server"} | PACKAGE),
    "scenarios.Server.min_queries": (24, {"run_performance fp8 Server"} | PACKAGE),
    "scenarios.Server.ttft_limit_ms": (24.0, SERVER | PACKAGE),
    "scenarios.Server.tpot_limit_ms": (24.0, SERVER | PACKAGE),
    "scenarios.Interactive": (
        {"target_qps": 0.5},
        {
            f"{rule} fp8 Interactive"
            for rule in ("run_performance", "run_accuracy", "score_accuracy")
        }
        | PACKAGE,
    ),
    "submission.submitter": ("someone", PACKAGE),
    "submission.division": ("open", PACKAGE),
    "submission.attested": (["model-official"], PACKAGE),
    "report.title": ("Another title", {"render_report"}),
}
# Keys with one allowed value, keys that need files or a matching source, and names of folders:
# each has a test of its own below or in tests/unit/test_config.py.
ELSEWHERE = {
    "run.results",
    "model.source",
    "model.path",
    "dataset.source",
    "dataset.path",
    "calibration.source",
    "calibration.path",
    "calibration.id_list",
    "engine.backend",
    "run.lock",
    "quantization.stack",
    "harness.name",
    "variants",
    "submission.benchmark",
    "submission.round",
    "submission.variant",
}


def config_keys(model: type = Config, prefix: str = "") -> set[str]:
    keys: set[str] = set()
    for name, field in model.model_fields.items():
        key = f"{prefix}{field.alias or name}"
        # Of several engines the demo has the first; the others have a contract of their own.
        inner = models_in(field.annotation)[:1]
        keys |= config_keys(inner[0], f"{key}.") if inner else {key}
    return keys


def edited(key: str, value: Any) -> dict[str, Any]:
    data = copy.deepcopy(demo_config().model_dump(mode="json"))
    node = data
    *parents, last = key.split(".")
    for part in parents:
        node = node[part]
    node[last] = value
    return data


def write_config(checkout: Path, data: dict[str, Any]) -> None:
    (checkout / "config" / "config.yaml").write_text(yaml.safe_dump(data))


def test_every_config_key_has_a_case() -> None:
    system = {key for key in config_keys() if key.startswith("system.")}
    sections = ("model.synthetic.", "dataset.synthetic.", "calibration.synthetic.")
    optional = {key for key in config_keys() if key.startswith((*sections, "quantization.given."))}
    interactive = {key for key in config_keys() if key.startswith("scenarios.Interactive.")}
    known = (CASES.keys() - {"scenarios.Interactive"}) | ELSEWHERE | system | optional | interactive
    assert config_keys() == known


@pytest.mark.parametrize("key", CASES)
def test_config_key_reruns_exactly(key: str, checkout: Path) -> None:
    value, expected = CASES[key]
    write_config(checkout, edited(key, value))
    assert execute(checkout, dry=True) == expected


@pytest.mark.parametrize(
    "key", sorted(k for k in config_keys() if k.startswith("system.") and k != "system.name")
)
def test_system_description_reruns_no_run(key: str, checkout: Path) -> None:
    texts = {"system.status": "available", "system.system_type": "edge"}
    numbers = ("number_of_nodes", "per_node", "core_count")
    value = texts.get(key, 7 if key.endswith(numbers) else "text")
    value = True if key.endswith("_ecc") else value
    write_config(checkout, edited(key, value))
    assert execute(checkout, dry=True) == {"describe_system"} | PACKAGE


def test_second_run_has_nothing_to_do(checkout: Path) -> None:
    assert execute(checkout, dry=True) == set()


@pytest.mark.parametrize(
    ("section", "expected"), [("dataset", DATASET), ("calibration", CALIBRATION)]
)
def test_synthetic_lengths_rerun_their_section(
    section: str, expected: set[str], checkout: Path
) -> None:
    data = demo_config().model_dump(mode="json")
    base = {"mean_tokens": 120, "min_tokens": 60, "max_tokens": 300}
    data[section] |= {"source": "synthetic", "samples": 24, "synthetic": base}
    write_config(checkout, data)
    assert execute(checkout, dry=True) == expected
    execute(checkout, dry=False)
    lengths = {"mean_tokens": 100, "min_tokens": 50, "max_tokens": 200, "sigma": 0.4, "seed": 7}
    for key, value in lengths.items():
        data[section]["synthetic"] = base | {key: value}
        write_config(checkout, data)
        assert execute(checkout, dry=True) == expected, key


def test_another_lock_reruns_what_its_versions_differ_in(checkout: Path) -> None:
    lock = checkout / "envs" / "requirements.lock"
    (checkout / "envs" / "copy.lock").write_text(lock.read_text())
    write_config(checkout, edited("run.lock", "envs/copy.lock"))
    assert execute(checkout, dry=True) == set()
    text = lock.read_text().replace("nvidia-modelopt==0.47.0", "nvidia-modelopt==0.47.1")
    (checkout / "envs" / "copy.lock").write_text(text)
    assert execute(checkout, dry=True) == QUANTIZE


def test_swapped_values_are_seen(checkout: Path) -> None:
    data = demo_config().model_dump(mode="json")
    serve = data["engine"]["serve"]
    serve["max_batch_tokens"], serve["kv_cache_tokens"] = (
        serve["kv_cache_tokens"],
        serve["max_batch_tokens"],
    )
    write_config(checkout, data)
    assert execute(checkout, dry=True) == SERVING


def test_key_order_and_comments_rerun_nothing(checkout: Path) -> None:
    data = demo_config().model_dump(mode="json")
    reordered = {key: data[key] for key in reversed(data)}
    text = "# a comment\n" + yaml.safe_dump(reordered, sort_keys=False)
    (checkout / "config" / "config.yaml").write_text(text)
    assert execute(checkout, dry=True) == set()


def test_new_variant_builds_only_itself_and_the_report(checkout: Path) -> None:
    variants = {"fp8": {}, "bf16": {"quantization": {"method": "none", "kv_cache": "auto"}}}
    write_config(checkout, edited("variants", variants))
    own = {job.replace("fp8", "bf16") for job in {"quantize fp8", "probe_server fp8"} | RUNS}
    assert execute(checkout, dry=True) == own | {"render_report"}


def test_edits_of_how_to_run_rerun_nothing(checkout: Path) -> None:
    profile = checkout / "profiles" / "default" / "config.yaml"
    profile.write_text(profile.read_text() + "keep-going: true\n")
    for path in (checkout / "workflow").rglob("*.py"):
        os.utime(path)
    for path in (checkout / "workflow" / "rules").glob("*.smk"):
        path.write_text(path.read_text() + "\n# a comment\n")
    assert execute(checkout, dry=True) == set()


def test_report_template_reruns_only_the_report(checkout: Path) -> None:
    template = sorted((checkout / "resources" / "report").glob("*"))[0]
    template.write_text(template.read_text() + "\n")
    assert execute(checkout, dry=True) == {"render_report"}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("demo/validation.jsonl", DATASET),
        ("demo/calibration.jsonl", CALIBRATION),
        ("mlperf/v6.1.yaml", PACKAGE),
        ("report/style.css", {"render_report"}),
        ("templates/calibration.md.j2", PACKAGE),
    ],
)
def test_changed_content_is_seen_behind_an_old_time(
    name: str, expected: set[str], checkout: Path
) -> None:
    """Copying tools keep times: content decides, not the clock."""
    path = checkout / "resources" / name
    path.write_text(path.read_text() + "\n")
    os.utime(path, (1_000_000_000, 1_000_000_000))
    assert execute(checkout, dry=True) == expected


def with_sources(checkout: Path) -> dict[str, Any]:
    """Return the demo's configuration with copies of its files as own sources."""
    data = demo_config().model_dump(mode="json")
    for section, name in (("dataset", "validation"), ("calibration", "calibration")):
        own = checkout / f"{name}.jsonl"
        own.write_text((checkout / "resources" / "demo" / own.name).read_text())
        data[section] |= {"source": "file", "path": own.name}
    return data


def test_own_files_rerun_their_section_and_below(checkout: Path) -> None:
    (checkout / "ids.txt").write_text("1\n")
    data = with_sources(checkout)
    with working_directory(checkout):
        write_config(checkout, data)
        assert execute(checkout, dry=True) == DATASET | CALIBRATION
        data["calibration"]["id_list"] = "ids.txt"
        write_config(checkout, data)
        execute(checkout, dry=False)
        (checkout / "ids.txt").write_text("2\n")
        assert execute(checkout, dry=True) == CALIBRATION


def test_local_model_reruns_everything(checkout: Path) -> None:
    folder = checkout / "own"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    data = demo_config().model_dump(mode="json")
    data["model"] |= {"source": "local", "path": "own"}
    with working_directory(checkout):
        write_config(checkout, data)
        assert execute(checkout, dry=True) == EVERYTHING


def test_another_results_folder_builds_everything(checkout: Path) -> None:
    write_config(checkout, edited("run.results", "elsewhere"))
    assert execute(checkout, dry=True) == EVERYTHING | {"describe_system"}


def _modules() -> list[str]:
    scripts = Path(__file__).resolve().parents[2] / "workflow" / "scripts"
    return sorted(p.relative_to(scripts).as_posix() for p in scripts.rglob("*.py"))


def _expected_jobs(checkout: Path, edited_file: str) -> set[str]:
    """Derive the direct jobs of an edit from the import closure, then what lies below them."""
    scripts = checkout / "workflow" / "scripts"
    direct = set()
    for rule, program in PROGRAMS.items():
        if rule == "build_engine":
            continue  # the demo builds none
        served = rule in ("probe_server", "run_performance", "run_accuracy")
        extra = BACKENDS["transformers"].scripts if served else ()
        if scripts / edited_file in closure(scripts, program.scripts + extra):
            direct.add(rule)
    return direct


@pytest.mark.parametrize("module", _modules())
def test_editing_a_module_reruns_what_uses_it(module: str, checkout: Path) -> None:
    direct = _expected_jobs(checkout, module)
    path = checkout / "workflow" / "scripts" / module
    path.write_text(path.read_text() + "\n\nADDED_BY_A_TEST = 1\n")
    planned = execute(checkout, dry=True)
    rules = {job.split()[0] for job in planned}
    assert direct <= rules
    assert planned == below(checkout, direct)


def below(checkout: Path, rules: set[str]) -> set[str]:
    """Return the jobs of some rules and all jobs that depend on them."""
    from fp8flow.config_file import load_config

    products = Pipeline(load_config([checkout / "config" / "config.yaml"]), checkout).products
    changed: set[str] = set()
    for record, product in products.items():
        if product.rule in rules or changed & set(product.needs.values()):
            changed.add(record)
    jobs = (products[record] for record in changed)
    return {" ".join(p for p in (j.rule, j.variant, j.scenario) if p) for j in jobs}


@pytest.mark.parametrize("module", sorted(INFRASTRUCTURE))
def test_infrastructure_edits_rerun_nothing(module: str, checkout: Path) -> None:
    path = checkout.joinpath("workflow", "scripts", *module.split(".")).with_suffix(".py")
    path.write_text(path.read_text() + "\n\nADDED_BY_A_TEST = 1\n")
    assert execute(checkout, dry=True) == set()


def test_comments_docstrings_and_layout_rerun_nothing(checkout: Path) -> None:
    for path in (checkout / "workflow" / "scripts").rglob("*.py"):
        text = path.read_text()
        assert text.startswith('"""'), path
        path.write_text('"""Another docstring."""\n\n# a comment\n\n\n' + text.split('"""', 2)[2])
    assert execute(checkout, dry=True) == set()


def test_pinned_tool_version_reruns_what_uses_it(checkout: Path) -> None:
    lock = checkout / "envs" / "requirements.lock"
    text = lock.read_text()
    assert "nvidia-modelopt==0.47.0" in text
    lock.write_text(text.replace("nvidia-modelopt==0.47.0", "nvidia-modelopt==0.47.1"))
    assert execute(checkout, dry=True) == QUANTIZE


def test_lost_snakemake_metadata_does_not_hide_a_change(checkout: Path) -> None:
    for folder in (checkout / ".snakemake").glob("metadata*"):
        for path in folder.rglob("*"):
            if path.is_file():
                path.unlink()
    assert execute(checkout, dry=True) == set()
    write_config(checkout, edited("scenarios.Server.target_qps", 1.0))
    assert execute(checkout, dry=True) == SERVER | PACKAGE


def test_a_verdict_does_not_outlive_its_run(checkout: Path) -> None:
    (checkout / "results/fp8/Server/performance/run.json").unlink()
    assert execute(checkout, dry=True) == {"run_performance fp8 Server"} | PACKAGE


@pytest.mark.parametrize("spelling", ["results/", "./results"])
def test_spelling_of_the_results_folder_hides_nothing(spelling: str, checkout: Path) -> None:
    data = edited("scenarios.Server.target_qps", 1.0)
    data["run"]["results"] = spelling
    write_config(checkout, data)
    assert execute(checkout, dry=True) == SERVER | PACKAGE


def forget(checkout: Path) -> None:
    """Remove what Snakemake remembers, as a kill at the wrong moment does."""
    shutil.rmtree(checkout / ".snakemake")


def test_deleted_checkpoint_does_not_hide_a_change(checkout: Path) -> None:
    shutil.rmtree(checkout / "results" / "fp8" / "checkpoint")
    forget(checkout)
    assert execute(checkout, dry=True) == set()
    write_config(checkout, edited("calibration.samples", 16))
    planned = execute(checkout, dry=True, targets=("performance",))
    assert {"run_performance fp8 Offline", "quantize fp8", "prepare_calibration"} <= planned


def test_edited_record_is_made_again(checkout: Path) -> None:
    path = checkout / "results" / "submission" / "verdict.json"
    times = path.stat().st_atime, path.stat().st_mtime
    path.write_text(path.read_text().replace('"spec"', '"spec" ', 1).replace("fp8", "fp9", 1))
    os.utime(path, times)
    assert execute(checkout, dry=True) == {"validate_submission", "render_report"}


@pytest.mark.parametrize("text", ["", "[]", '{"schema": "fp8flow/1", "spec": "x"}'])
def test_damaged_record_is_made_again(text: str, checkout: Path) -> None:
    (checkout / "results" / "system" / "system.json").write_text(text)
    assert execute(checkout, dry=True) == {"describe_system"} | PACKAGE


def test_large_products_may_be_deleted(checkout: Path) -> None:
    for name in ("model", "data/validation", "fp8/checkpoint"):
        (checkout / "results" / name / "manifest.json").unlink()
    assert execute(checkout, dry=True) == set()


def test_a_stale_product_outside_the_target_is_left_alone(checkout: Path) -> None:
    write_config(checkout, edited("scenarios.Server.target_qps", 1.0))
    assert execute(checkout, dry=True, targets=("checkpoint",)) == set()


def test_products_and_rules_agree(finished: Path) -> None:
    """The table of products names exactly the inputs that the rules have."""
    import json

    from fp8flow.config_file import load_config

    pipeline = Pipeline(load_config([finished / "config" / "config.yaml"]), finished)
    for record, product in pipeline.products.items():
        made = json.loads((finished / record).read_text())
        assert set(made["inputs"]) == set(product.needs.values()), product.title
        assert made["spec"] == product.spec.as_dict()
