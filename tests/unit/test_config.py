"""Configuration: generated files are in step, and every mistake is reported with a way out."""

from __future__ import annotations

import copy
import difflib
from pathlib import Path, PurePath
from typing import Any

import pytest
import yaml

from fp8flow.config import demo_config
from fp8flow.config_checks import RESERVED
from fp8flow.config_docs import GENERATED, smallest_config
from fp8flow.config_file import check_config, load_config
from fp8flow.errors import FlowError
from fp8flow.pipeline import Pipeline

ROOT = Path(__file__).resolve().parents[2]


def demo() -> dict[str, Any]:
    return copy.deepcopy(demo_config().model_dump(mode="json"))


def message_for(data: dict[str, Any]) -> str:
    with pytest.raises(FlowError) as caught:
        check_config(data, "config.yaml")
    return str(caught.value)


@pytest.mark.parametrize("name", GENERATED)
def test_generated_file_is_in_step(name: str) -> None:
    expected, found = GENERATED[name](), (ROOT / name).read_text(encoding="utf-8")
    diff = "\n".join(difflib.unified_diff(found.splitlines(), expected.splitlines(), lineterm=""))
    assert found == expected, f"run `make config`:\n{diff}"


def test_default_file_is_the_demo() -> None:
    assert load_config([ROOT / "config" / "config.yaml"]).config == demo_config()


def test_unknown_key_suggests_the_right_one() -> None:
    data = demo()
    data["scenarios"]["Server"]["target_qsp"] = 1.0
    message = message_for(data)
    assert "scenarios.Server.target_qsp: unknown key; did you mean 'target_qps'?" in message
    assert "allowed: target_qps, min_duration_ms" in message


def test_unknown_section_suggests_the_right_one() -> None:
    data = demo()
    data["quantisation"] = {}
    assert "quantisation: unknown key; did you mean 'quantization'?" in message_for(data)


def test_all_problems_are_reported_at_once() -> None:
    data = demo()
    data["quantization"]["method"] = "fp8"
    data["harness"]["max_connections"] = 0
    data["model"]["source"] = "huggingface"
    message = message_for(data)
    assert "3 problems" in message
    assert "quantization.method: 'fp8' is not allowed" in message
    assert "allowed: 'fp8_static', 'fp8_dynamic', 'none' or 'given'" in message
    assert "harness.max_connections: 0: input should be greater than or equal to 1" in message
    assert "config/README.md" in message


@pytest.mark.parametrize("spelling", ["results/", "./results", "results//x/..", " results "])
def test_results_folder_has_one_spelling(spelling: str) -> None:
    data = demo()
    data["run"]["results"] = spelling
    assert check_config(data, "test").config.run.results == "results"


@pytest.mark.parametrize("folder", ["", " ", ".", "/", "~/r", "../r", "a{b}", "a\nb"])
def test_results_folder_must_be_a_folder_of_its_own(folder: str) -> None:
    data = demo()
    data["run"]["results"] = folder
    assert "run.results" in message_for(data)


@pytest.mark.parametrize("value", ["58", True, None, [58], float("inf"), 1e-300, 1e300])
def test_values_are_not_coerced(value: object) -> None:
    data = demo()
    data["scenarios"]["Server"]["target_qps"] = value
    assert "scenarios.Server.target_qps" in message_for(data)


def test_variant_problems_name_the_variant() -> None:
    data = demo()
    data["variants"]["other"] = {"quantization": {"methd": "none"}}
    message = message_for(data)
    assert "variants.other.quantization.methd: unknown key; did you mean 'method'?" in message


def test_variant_overrides_are_merged_deeply() -> None:
    data = demo()
    data["variants"]["small"] = {"engine": {"serve": {"max_batch_size": 2}}}
    serve = check_config(data, "test").variants["small"].engine.serve
    assert (serve.max_batch_size, serve.max_batch_tokens) == (2, 1024)


def test_submitted_variant_must_exist() -> None:
    data = demo()
    data["submission"]["variant"] = "bf16"
    message = message_for(data)
    assert "submission.variant: 'bf16' is not a variant" in message
    assert "allowed: fp8" in message


def test_variants_cannot_take_the_folder_of_another_product() -> None:
    pipeline = Pipeline(check_config(demo(), "test"), ROOT)
    shared = {PurePath(r).parts[1] for r, p in pipeline.products.items() if p.variant is None}
    assert shared | {"logs"} == RESERVED
    data = demo()
    data["variants"]["report"] = {}
    assert "variants.report: is the name of a results folder" in message_for(data)


def test_source_needs_its_keys() -> None:
    data = demo()
    data["model"] = {"source": "hub", "name": "m"}
    message = message_for(data)
    assert "model.id: is required with model.source: hub" in message
    assert "model.revision: is required with model.source: hub" in message


def test_missing_path_says_where_it_looked(tmp_path: Path) -> None:
    data = demo()
    data["dataset"] |= {"source": "file", "path": str(tmp_path / "none.jsonl")}
    assert f"looked at {tmp_path / 'none.jsonl'}" in message_for(data)


def test_a_source_cannot_lie_where_products_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    data = demo()
    data["run"]["results"] = str(tmp_path)
    data["model"] |= {"source": "local", "path": str(tmp_path / "model")}
    assert "lies in run.results, where products are replaced" in message_for(data)


@pytest.mark.parametrize("revision", ["main", "v1", "abc"])
def test_hub_revision_must_be_a_commit(revision: str) -> None:
    data = demo()
    data["model"] = {"source": "hub", "name": "m", "id": "a/b", "revision": revision}
    assert f"model.revision: '{revision}' is not allowed" in message_for(data)


def test_url_id_list_needs_a_hash() -> None:
    data = demo()
    data["calibration"]["id_list"] = "https://example.org/list.txt"
    assert "calibration.id_list_sha256: is required when id_list is a URL" in message_for(data)


def test_line_numbers_and_duplicate_keys(tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    path.write_text("run: {name: a}\nharness:\n  max_conections: 3\n")
    with pytest.raises(FlowError, match=r"harness\.max_conections \(line 3\): unknown key"):
        load_config([path])
    path.write_text("run: {name: a}\nrun: {name: b}\n")
    with pytest.raises(FlowError, match="key 'run' is given twice"):
        load_config([path])


@pytest.mark.parametrize(
    "text", ["[1, 2]", "a: [", "\x00", "? {a: 1}\n: 2", "- - -", "!!python/x 1"]
)
def test_files_that_are_no_configuration(text: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(FlowError, match=r"bad\.yaml"):
        load_config([path])


def test_command_line_values_get_their_types() -> None:
    path = ROOT / "config" / "config.yaml"
    over = {"scenarios": {"Server": {"target_qps": "58"}}, "run": {"name": "x"}}
    config = load_config([path], over).config
    assert config.scenarios.Server is not None
    assert config.scenarios.Server.target_qps == 58


def test_a_config_file_alone_holds_no_demo_value(tmp_path: Path) -> None:
    """What a file leaves out takes the benchmark's value, never the demo's."""
    minimal = smallest_config()
    for section in ("model", "dataset", "calibration"):
        minimal[section]["path"] = str(tmp_path)
    path = tmp_path / "real.yaml"
    path.write_text(yaml.safe_dump(minimal))
    config = load_config([path]).config
    assert config.dataset.template == "reference"
    assert config.harness.max_output_tokens == 128
    assert config.calibration.samples == 512
    assert config.scenarios.Offline is not None
    assert config.scenarios.Offline.min_duration_ms == 600_000
    assert "demo" not in config.model_dump_json().lower()
    for key in minimal:
        with pytest.raises(FlowError, match=f"{key}: is required"):
            check_config({k: v for k, v in minimal.items() if k != key}, "test")
