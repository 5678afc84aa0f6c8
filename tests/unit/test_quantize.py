"""ModelOpt quantization of a tiny Llama 3.1-style model."""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import safe_open
from tiny_llama import (
    LLAMA3_SCALING,
    THETA,
    build_model,
    calibration_record,
    model_record,
    token_rows,
    write_samples,
)

from fp8flow.accelerator import accelerator_keys, accelerator_lock
from fp8flow.activation_ranges import equal_length_batches, read_token_rows
from fp8flow.errors import FlowError
from fp8flow.quantize import (
    Recipe,
    build_quant_config,
    make_checkpoint,
)
from fp8flow.records import verify_record
from fp8flow.rope import Rope, rope_spellings

SCRIPT = Path(__file__).parents[2] / "workflow" / "scripts" / "quantize.py"
FP8_ENTRY = {"num_bits": (4, 3), "axis": None}
LIST_BASE = {
    "quant_cfg": [
        {"quantizer_name": "*", "enable": False},
        {"quantizer_name": "*weight_quantizer", "cfg": FP8_ENTRY},
        {"quantizer_name": "*lm_head*", "enable": False},
    ],
    "algorithm": "max",
}
LIST_KV = {"quant_cfg": [{"quantizer_name": "*[kv]_bmm_quantizer", "cfg": FP8_ENTRY}]}
DICT_BASE = {
    "quant_cfg": {
        "*weight_quantizer": FP8_ENTRY,
        "*lm_head*": {"enable": False},
        "default": {"enable": False},
    },
    "algorithm": "max",
}
DICT_KV = {
    "quant_cfg": {"*[kv]_bmm_quantizer": FP8_ENTRY, "default": {"enable": False}},
    "algorithm": "max",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return build_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    return write_samples(tmp_path_factory.mktemp("samples") / "samples.parquet", token_rows())


def make(tmp_path, model, samples, name="checkpoint", batch_size=2, **changes):
    folder = tmp_path / name
    folder.mkdir()
    recipe = Recipe(**{"method": "fp8_static", "kv_cache": "fp8", "kv_scales": "cast", **changes})
    result = make_checkpoint(model, folder, recipe, samples=samples, batch_size=batch_size)
    return folder, result


def tensors_of(folder, ending=""):
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        names = [name for name in file.keys() if name.endswith(ending)]  # noqa: SIM118
        return {name: file.get_tensor(name) for name in names}


# --- configuration shapes


def test_list_shape_gets_exclusions_before_the_kv_cache():
    config = build_quant_config(LIST_BASE, LIST_KV, ["a.b"], quantize_head=False)
    assert [entry["quantizer_name"] for entry in config["quant_cfg"]] == [
        "*",
        "*weight_quantizer",
        "*lm_head*",
        "a.b.*weight_quantizer",
        "a.b.*input_quantizer",
        "*[kv]_bmm_quantizer",
    ]
    assert config["quant_cfg"][3]["enable"] is False
    assert config["algorithm"] == "max"


def test_dict_shape_gets_exclusions_and_the_kv_cache():
    config = build_quant_config(DICT_BASE, DICT_KV, ["a.b"], quantize_head=False)
    inner = config["quant_cfg"]
    assert inner["a.b.*weight_quantizer"] == inner["a.b.*input_quantizer"] == {"enable": False}
    assert inner["*[kv]_bmm_quantizer"] == FP8_ENTRY
    assert inner["default"] == {"enable": False}
    assert config["algorithm"] == "max"


@pytest.mark.parametrize(("base", "kv"), [(LIST_BASE, LIST_KV), (DICT_BASE, DICT_KV)])
def test_config_of_modelopt_is_not_changed_and_head_can_be_quantized(base, kv):
    before = copy.deepcopy((base, kv))
    config = build_quant_config(base, kv, [], quantize_head=True)
    assert "*lm_head*" not in str(config)
    assert "*lm_head*" in str(build_quant_config(base, None, [], quantize_head=False))
    assert (base, kv) == before


def test_unknown_shape_is_refused():
    with pytest.raises(FlowError, match="tuple"):
        build_quant_config({"quant_cfg": ()}, None, [], quantize_head=False)


# --- calibration batches


def test_batches_hold_rows_of_one_length_and_lose_none():
    rows = token_rows((5, 9, 9, 12, 9, 5, 9, 9))
    batches = equal_length_batches(rows, 2)
    assert all(len({len(row) for row in batch}) == 1 for batch in batches)
    assert [len(batch) for batch in batches] == [2, 2, 2, 1, 1]
    assert sorted(row for batch in batches for row in batch) == sorted(rows)


@pytest.mark.parametrize("rows", [[], [[1], []]])
def test_no_rows_or_an_empty_row_are_refused(rows):
    with pytest.raises(FlowError, match="calibration set"):
        equal_length_batches(rows, 2)


def test_samples_without_the_column_are_refused(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path / "samples.parquet"
    pq.write_table(pa.table({"prompt": ["a"]}), path)
    with pytest.raises(FlowError, match="token_ids"):
        read_token_rows(path)
    with pytest.raises(FlowError, match="prepare_calibration"):
        read_token_rows(tmp_path / "absent.parquet")


def largest_inputs(model_folder, rows):
    """Return each linear module's largest input over all real tokens, one row at a time."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype="auto").eval()
    largest = {}

    def watch(name):
        def hook(module, inputs):
            largest[name] = max(largest.get(name, 0.0), inputs[0].abs().max().item())

        return hook

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(watch(name))
    with torch.inference_mode():
        for row in rows:
            model(torch.tensor([row]), use_cache=False)
    return largest


@pytest.mark.parametrize("batch_size", [1, 4])
def test_input_scales_are_the_largest_activation_of_real_tokens(tmp_path, model, batch_size):
    rows = token_rows((3, 7, 7, 7, 40))
    samples = write_samples(tmp_path / "s.parquet", rows)
    folder, _ = make(tmp_path, model, samples, batch_size=batch_size)
    expected = largest_inputs(model, rows)
    scales = tensors_of(folder, ".input_scale")
    assert len(scales) == 2 * 7
    for name, scale in scales.items():
        measured = expected[name.removesuffix(".input_scale")]
        assert scale.item() * 448 == pytest.approx(measured, rel=0.02)


# --- methods


def test_static_result_and_files(tmp_path, model, samples):
    folder, result = make(tmp_path, model, samples)
    assert result["quant_algo"] == "FP8"
    assert result["modules"]["quantized_count"] == 14
    assert result["modules"]["unquantized"] == ["lm_head"]
    calibration = result["calibration"]
    assert (calibration["rows"], calibration["batches"], calibration["tokens"]) == (4, 3, 35)
    assert result["versions"]["nvidia-modelopt"] == result["claims"]["producer"]["version"]
    assert result["bytes"] == (folder / "model.safetensors").stat().st_size
    for name in ("tokenizer.json", "generation_config.json", "chat_template.jinja"):
        assert (folder / name).read_bytes() == (model / name).read_bytes()
    config = json.loads((folder / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "modelopt"


def test_weights_are_the_original_ones_up_to_fp8_rounding(tmp_path, model, samples):
    folder, _ = make(tmp_path, model, samples)
    original, stored = tensors_of(model), tensors_of(folder)
    name = "model.layers.0.mlp.down_proj"
    restored = stored[f"{name}.weight"].float() * stored[f"{name}.weight_scale"]
    error = (restored - original[f"{name}.weight"].float()).abs()
    # E4M3 has 3 mantissa bits: half a step is 1/16, plus the smallest step near zero.
    allowed = original[f"{name}.weight"].float().abs() / 16 + stored[f"{name}.weight_scale"] * 2e-3
    assert (error <= allowed).all()
    assert error.max() > 0


@pytest.mark.parametrize("old_spelling", [True, False])
def test_rope_survives_in_every_spelling(tmp_path, samples, old_spelling):
    source = build_model(tmp_path / "source", old_spelling=old_spelling)
    folder, result = make(tmp_path, source, samples)
    config = json.loads((folder / "config.json").read_text())
    assert config["rope_theta"] == 500000.0
    assert config["rope_scaling"] == LLAMA3_SCALING
    assert config["rope_parameters"] == {"rope_theta": 500000.0, **LLAMA3_SCALING}
    assert config["torch_dtype"] == config["dtype"] == "bfloat16"
    assert result["rope"] == {"theta": THETA, "scaling": LLAMA3_SCALING}
    assert set(rope_spellings(config)) == {"rope_theta/rope_scaling", "rope_parameters"}
    assert all(r.same_as(Rope(THETA, LLAMA3_SCALING)) for r in rope_spellings(config).values())


@pytest.mark.parametrize("method", ["fp8_static", "fp8_dynamic"])
def test_cast_kv_scales_are_exactly_one(tmp_path, model, samples, method):
    folder, _ = make(tmp_path, model, samples, method=method)
    scales = {**tensors_of(folder, ".k_scale"), **tensors_of(folder, ".v_scale")}
    assert len(scales) == 4
    assert {scale.item() for scale in scales.values()} == {1.0}


@pytest.mark.parametrize("method", ["fp8_static", "fp8_dynamic"])
def test_calibrated_kv_scales_are_measured(tmp_path, model, samples, method):
    folder, result = make(tmp_path, model, samples, method=method, kv_scales="calibrated")
    scales = tensors_of(folder, ".k_scale").values()
    assert all(0 < scale.item() < 0.1 for scale in scales)
    assert result["calibration"]["rows"] == 4


def test_dynamic_with_cast_scales_measures_nothing_and_says_so(tmp_path, model, samples):
    _, result = make(tmp_path, model, samples, method="fp8_dynamic")
    assert result["quant_algo"] == "FP8_PER_CHANNEL_PER_TOKEN"
    assert result["calibration"] is None
    assert any("nothing was calibrated" in note for note in result["notes"])


def test_kv_cache_auto_writes_no_kv_scales(tmp_path, model, samples):
    folder, result = make(tmp_path, model, samples, kv_cache="auto")
    assert not tensors_of(folder, "k_scale")
    assert result["claims"]["kv_cache_quant_algo"] is None
    assert result["kv_scales"] is None


def test_none_keeps_the_weights_and_reads_no_samples(tmp_path, model):
    folder, result = make(tmp_path, model, None, method="none", kv_cache="auto")
    weights = "model.safetensors"
    assert (folder / weights).read_bytes() == (model / weights).read_bytes()
    assert result["calibration"] is None
    assert result["quant_algo"] is None
    config = json.loads((folder / "config.json").read_text())
    assert config["rope_parameters"]["factor"] == 8.0
    assert "rope_parameters" not in json.loads((model / "config.json").read_text())


def test_equal_inputs_give_equal_bytes(tmp_path, model, samples):
    first, _ = make(tmp_path, model, samples, "first", kv_scales="calibrated")
    second, _ = make(tmp_path, model, samples, "second", kv_scales="calibrated")
    names = sorted(path.name for path in first.iterdir())
    assert names == sorted(path.name for path in second.iterdir())
    for name in names:
        assert (first / name).read_bytes() == (second / name).read_bytes(), name


def test_tied_model_keeps_its_single_table(tmp_path, samples):
    tied = build_model(tmp_path / "tied", tied=True)
    folder, result = make(tmp_path, tied, samples)
    assert "lm_head.weight" not in tensors_of(folder)
    assert result["modules"]["unquantized"] == []
    assert result["modules"]["quantized_count"] == 14


# --- exclusions


def test_excluded_layer_stays_bf16_and_keeps_its_kv_scales(tmp_path, model, samples):
    folder, result = make(tmp_path, model, samples, exclude=("lm_head", "model.layers.0"))
    assert result["modules"]["quantized_count"] == 7
    assert all(name.startswith("model.layers.1.") for name in result["modules"]["quantized"])
    assert len(tensors_of(folder, ".k_scale")) == 2


def test_excluding_layer_1_does_not_exclude_layer_10(tmp_path, samples):
    deep = build_model(tmp_path / "deep", layers=11)
    _, result = make(tmp_path, deep, samples, exclude=("lm_head", "model.layers.1"))
    layers = {name.split(".")[2] for name in result["modules"]["quantized"]}
    assert layers == {str(number) for number in range(11)} - {"1"}


def test_head_is_quantized_when_it_is_not_excluded(tmp_path, model, samples):
    folder, result = make(tmp_path, model, samples, exclude=())
    assert "lm_head" in result["modules"]["quantized"]
    assert "lm_head.input_scale" in tensors_of(folder)


def test_tied_head_cannot_be_quantized(tmp_path, samples):
    tied = build_model(tmp_path / "tied", tied=True)
    with pytest.raises(FlowError, match="tie_word_embeddings"):
        make(tmp_path, tied, samples, exclude=())


@pytest.mark.parametrize(
    ("exclude", "named"), [(("lm_haed",), "lm_haed"), (("lm_head", "model"), "nothing to quantize")]
)
def test_useless_exclusions_are_refused(tmp_path, model, samples, exclude, named):
    with pytest.raises(FlowError, match=named):
        make(tmp_path, model, samples, exclude=exclude)


# --- refusals


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"method": "int4"}, "fp8_static, fp8_dynamic, none"),
        ({"kv_cache": "int8"}, "fp8, auto"),
        ({"kv_scales": "guess"}, "cast, calibrated"),
        ({"method": "none", "kv_scales": "calibrated"}, "kv_scales: cast"),
    ],
)
def test_recipes_that_make_no_sense_are_refused(changes, named):
    with pytest.raises(FlowError, match=named):
        Recipe(**{"method": "fp8_static", "kv_cache": "fp8", "kv_scales": "cast", **changes})


def test_tokens_of_another_model_are_refused(tmp_path, model):
    samples = write_samples(tmp_path / "s.parquet", [[1, 2, 100000]])
    with pytest.raises(FlowError, match="token id 100000"):
        make(tmp_path, model, samples)


def test_static_method_without_samples_is_refused(tmp_path, model):
    with pytest.raises(FlowError, match="needs a calibration set"):
        make(tmp_path, model, None)


# --- the command


def command_of(tmp_path, model_path, calibration, **changes):
    quantization = {"method": "fp8_static", "kv_cache": "fp8", "kv_scales": "cast",
                    "exclude": ["lm_head"], **changes}  # fmt: skip
    settings = {"quantization": quantization, "calibration": {"batch_size": 2}}
    spec = json.dumps({"rule": "quantize", "settings": settings})
    output = tmp_path / "checkpoint" / "manifest.json"
    command = [sys.executable, str(SCRIPT), "--spec", spec, "--model", str(model_path)]
    return [*command, "--calibration", str(calibration), "--output", str(output)], output


def run_script(tmp_path, model_path, calibration, **changes):
    command, output = command_of(tmp_path, model_path, calibration, **changes)
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    return done, output


def test_command_makes_a_verified_product(tmp_path):
    model = model_record(build_model(tmp_path / "model"))
    calibration = calibration_record(tmp_path / "calibration", token_rows())
    done, output = run_script(tmp_path, model.path, calibration.path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert "Large KV activations" not in done.stderr
    record = verify_record(output)
    assert record.data["inputs"] == {"model": model.digest, "calibration": calibration.digest}
    assert record.result["model"]["parameters"] == model.result["parameters"]
    assert {"model.safetensors", "hf_quant_config.json"} <= record.data["files"].keys()


def test_command_takes_an_empty_calibration_for_none_and_only_then(tmp_path):
    model = model_record(build_model(tmp_path / "model"))
    done, output = run_script(tmp_path, model.path, "", method="none", kv_cache="auto")
    assert done.returncode == 0, done.stderr
    assert verify_record(output).data["inputs"] == {"model": model.digest}
    done, _ = run_script(tmp_path, model.path, "")
    assert done.returncode == 1
    assert "needs --calibration" in done.stderr


def test_command_refuses_a_changed_model(tmp_path):
    model = model_record(build_model(tmp_path / "model"))
    (model.root / "config.json").write_text("{}")
    done, output = run_script(tmp_path, model.path, "", method="none")
    assert done.returncode == 1
    assert "config.json" in done.stderr
    assert not output.exists()


def test_command_waits_for_whoever_measures(tmp_path, monkeypatch):
    """A second workflow on the host must not calibrate on the cores that a run is measured on."""
    import torch

    monkeypatch.setenv("FP8FLOW_LOCK_DIR", str(tmp_path / "locks"))
    model = model_record(build_model(tmp_path / "model"))
    command, output = command_of(tmp_path, model.path, "", method="none", kv_cache="auto")
    with accelerator_lock(accelerator_keys(torch.cuda.is_available())):
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        said = next((line for line in process.stderr if "waiting for the acc" in line), None)
        assert said is not None and f"process {os.getpid()} in" in said
        assert process.poll() is None and not output.exists()
    _, rest = process.communicate(timeout=300)
    assert process.returncode == 0, rest
    verify_record(output)
