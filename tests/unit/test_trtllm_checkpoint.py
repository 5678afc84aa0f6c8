"""TensorRT-LLM checkpoints: written by ModelOpt, corrected, and compared with their claims."""

import json
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tiny_llama import LLAMA3_SCALING, THETA, build_model, token_rows, write_samples

from fp8flow.errors import FlowError
from fp8flow.quantize import Recipe, Target, make_checkpoint
from fp8flow.rope import read_rope
from fp8flow.trtllm_checkpoint import inspect_trtllm_checkpoint

LAYER = "transformer.layers.1"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source")
    build_model(folder / "model")
    write_samples(folder / "samples.parquet", token_rows())
    return folder


def export(source, folder, method="fp8_static", parallel=1, **changes):
    folder.mkdir(parents=True)
    recipe = Recipe(**{"method": method, "kv_cache": "fp8", "kv_scales": "cast", **changes})
    target = Target("tensorrt_llm", parallel)
    samples = source / "samples.parquet"
    model = source / "model"
    return make_checkpoint(model, folder, recipe, target=target, samples=samples, batch_size=2)


@pytest.fixture(scope="module")
def exported(source, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported")
    export(source, folder / "one")
    export(source, folder / "two", parallel=2)
    return folder


@pytest.fixture
def one(exported, tmp_path):
    return shutil.copytree(exported / "one", tmp_path / "one")


@pytest.fixture
def two(exported, tmp_path):
    return shutil.copytree(exported / "two", tmp_path / "two")


def edit(path, change):
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    change(tensors)
    save_file(tensors, path)


def edit_config(folder, change):
    path = folder / "config.json"
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def test_static_checkpoint(source, tmp_path):
    result = export(source, tmp_path / "c")
    assert result["format"] == "tensorrt_llm"
    assert result["claims"]["quant_algo"] == result["quant_algo"] == "FP8"
    assert result["claims"]["kv_cache_quant_algo"] == "FP8"
    assert result["claims"]["exclude"] == result["modules"]["unquantized"] == ["lm_head"]
    assert result["modules"]["quantized_count"] == 2 * 5
    total = result["scales"]["total"]
    for kind in ("k_scale", "v_scale", "kv_scale"):
        assert (total[kind]["min"], total[kind]["max"]) == (1.0, 1.0)
    assert total["weight_scale"]["count"] == total["input_scale"]["count"] == 10
    assert 0 < total["saturation"] < 0.01
    assert result["bytes"] == (tmp_path / "c" / "rank0.safetensors").stat().st_size


@pytest.mark.parametrize("old_spelling", [True, False])
def test_rope_of_the_model_is_in_the_configuration(source, tmp_path, old_spelling):
    """transformers 5 hides it from ModelOpt, and TensorRT-LLM then takes base 10000."""
    shutil.copyfile(source / "samples.parquet", tmp_path / "samples.parquet")
    build_model(tmp_path / "model", old_spelling=old_spelling)
    result = export(tmp_path, tmp_path / "c")
    config = json.loads((tmp_path / "c" / "config.json").read_text())
    assert config["rotary_base"] == 500000.0
    assert config["rotary_scaling"] == LLAMA3_SCALING
    assert result["rope"] == {"theta": THETA, "scaling": LLAMA3_SCALING}


def test_tokenizer_folder_holds_what_a_server_reads(source, exported):
    folder = exported / "one" / "tokenizer"
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (folder / name).read_bytes() == (source / "model" / name).read_bytes()
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == "llama"
    assert config["rope_theta"] == 500000.0
    assert config["rope_parameters"]["rope_type"] == config["rope_scaling"]["rope_type"] == "llama3"
    assert read_rope(config).theta == THETA


def test_dynamic_checkpoint_has_channel_scales_and_none_for_inputs(source, tmp_path):
    result = export(source, tmp_path / "c", "fp8_dynamic")
    assert result["quant_algo"] == "FP8_PER_CHANNEL_PER_TOKEN"
    assert result["scales"]["total"]["input_scale"] is None
    assert result["scales"]["total"]["weight_scale"]["count"] == 2 * (128 + 64 + 128 + 128 + 64)


def test_unquantized_checkpoint(source, tmp_path):
    result = export(source, tmp_path / "c", "none", kv_cache="auto")
    assert result["quant_algo"] is None and result["calibration"] is None
    assert result["dtype"] == "bfloat16"
    assert result["rope"]["theta"] == THETA
    assert {path.name for path in (tmp_path / "c").iterdir()} == {
        "config.json",
        "rank0.safetensors",
        "tokenizer",
    }
    with safe_open(tmp_path / "c" / "rank0.safetensors", framework="pt") as file:
        fused = file.get_tensor("transformer.layers.0.attention.qkv.weight")
    with safe_open(source / "model" / "model.safetensors", framework="pt") as file:
        names = [f"model.layers.0.self_attn.{kind}_proj.weight" for kind in "qkv"]
        parts = [file.get_tensor(name) for name in names]
    assert torch.equal(fused, torch.cat(parts))


def test_two_gpus_hold_the_parts_of_the_whole(exported):
    whole = inspect_trtllm_checkpoint(exported / "one", 1)
    parts = inspect_trtllm_checkpoint(exported / "two", 2)
    assert parts["parameters"] == whole["parameters"]
    assert parts["modules"] == whole["modules"]
    for kind in ("weight_scale", "input_scale", "kv_scale"):
        found, expected = (report["scales"]["total"][kind] for report in (parts, whole))
        assert found == {**expected, "count": 2 * expected["count"]}
    column = "transformer.layers.0.mlp.fc.weight"
    halves = []
    for rank in range(2):
        with safe_open(exported / "two" / f"rank{rank}.safetensors", framework="pt") as file:
            halves.append(file.get_tensor(column).view(torch.uint8))
    with safe_open(exported / "one" / "rank0.safetensors", framework="pt") as file:
        assert torch.equal(torch.cat(halves), file.get_tensor(column).view(torch.uint8))


def test_another_number_of_gpus_is_refused(exported):
    with pytest.raises(FlowError, match="world_size is 2, not 1"):
        inspect_trtllm_checkpoint(exported / "two", 1)


def test_missing_and_surplus_ranks_are_refused(two):
    (two / "rank1.safetensors").rename(two / "rank2.safetensors")
    with pytest.raises(FlowError, match=r"missing: rank1.safetensors, too many: rank2"):
        inspect_trtllm_checkpoint(two, 2)


def to_bf16(tensors):
    tensors[f"{LAYER}.mlp.fc.weight"] = tensors[f"{LAYER}.mlp.fc.weight"].to(torch.bfloat16)


def set_nan(tensors):
    weight = tensors[f"{LAYER}.mlp.fc.weight"].view(torch.uint8)
    weight[0, 0] = 0x7F


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (to_bf16, f"{LAYER}.mlp.fc.weight is BF16"),
        (set_nan, f"{LAYER}.mlp.fc.weight holds 1 NaN"),
        (lambda t: t.pop(f"{LAYER}.mlp.gate.weight"), "mlp.gate.weight is missing"),
        (
            lambda t: t.pop(f"{LAYER}.attention.qkv.activation_scaling_factor"),
            "qkv.activation_scaling_factor is missing",
        ),
        (
            lambda t: t.pop(f"{LAYER}.attention.kv_cache_scaling_factor"),
            "kv_cache_scaling_factor is missing",
        ),
        (
            lambda t: t.update({f"{LAYER}.mlp.fc.per_channel_scale": torch.ones(128)}),
            "mlp.fc.per_channel_scale is there",
        ),
        (
            lambda t: t.update({f"{LAYER}.attention.dense.weights_scaling_factor": torch.zeros(1)}),
            "dense.weights_scaling_factor holds 0.0",
        ),
        (
            lambda t: t.update({"transformer.ln_f.weight": torch.ones(32, dtype=torch.bfloat16)}),
            r"ln_f.weight is BF16 \[32\], expected BF16 \[64\]",
        ),
        (
            lambda t: t.update({"lm_head.weight": t["lm_head.weight"].to(torch.float8_e4m3fn)}),
            "lm_head.weight is F8_E4M3",
        ),
    ],
)
def test_tensors_that_break_a_claim_are_named(one, change, named):
    edit(one / "rank0.safetensors", change)
    with pytest.raises(FlowError, match=named):
        inspect_trtllm_checkpoint(one, 1)


def test_a_scale_that_differs_between_gpus_is_refused(two):
    name = f"{LAYER}.mlp.fc.weights_scaling_factor"
    edit(two / "rank1.safetensors", lambda t: t.update({name: t[name] * 2}))
    with pytest.raises(FlowError, match=r"mlp\.fc\.weights_scaling_factor is .* for rank0"):
        inspect_trtllm_checkpoint(two, 2)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda c: c["quantization"].update(quant_algo="W4A16"), "quant_algo is W4A16"),
        (lambda c: c["quantization"].update(quant_algo=None), "F8_E4M3"),
        (
            lambda c: c["quantization"].update(kv_cache_quant_algo=None),
            "cache_scaling_factor is there",
        ),
        (lambda c: c["quantization"].update(exclude_modules=[]), "exclude_modules lacks lm_head"),
        (lambda c: c["mapping"].update(pp_size=2), "pp_size is 2, not 1"),
        (lambda c: c.update(num_hidden_layers=3), r"layers\.2\.mlp\.fc\.weight is missing"),
    ],
)
def test_claims_that_the_tensors_do_not_meet_are_refused(one, change, named):
    edit_config(one, change)
    with pytest.raises(FlowError, match=named):
        inspect_trtllm_checkpoint(one, 1)


def test_measured_kv_scales_are_noted_to_be_clamped(source, tmp_path):
    result = export(source, tmp_path / "c", kv_scales="calibrated")
    assert result["scales"]["total"]["kv_scale"]["min"] == 1.0
    assert any("below 1.0" in note for note in result["notes"])


def test_tied_model_gets_a_head_of_its_own(source, tmp_path):
    shutil.copyfile(source / "samples.parquet", tmp_path / "samples.parquet")
    build_model(tmp_path / "model", tied=True)
    result = export(tmp_path, tmp_path / "c")
    assert result["modules"]["unquantized"] == ["lm_head"]
    with safe_open(tmp_path / "c" / "rank0.safetensors", framework="pt") as file:
        head = file.get_tensor("lm_head.weight")
        assert torch.equal(head, file.get_tensor("transformer.vocab_embedding.weight"))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"exclude": ("lm_head", "model.layers.0")}, "engine.path: pytorch"),
        ({"exclude": ()}, "as a whole except lm_head"),
        ({"parallel": 4}, "num_key_value_heads 2"),
        ({"method": "none"}, "kv_cache: auto"),
    ],
)
def test_what_the_format_cannot_hold_is_refused_at_once(source, tmp_path, changes, named):
    with pytest.raises(FlowError, match=named):
        export(source, tmp_path / "c", **changes)
    assert not any((tmp_path / "c").iterdir())


def test_other_architectures_are_refused(source, tmp_path):
    shutil.copytree(source / "model", tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    path.write_text(path.read_text().replace("LlamaForCausalLM", "GemmaForCausalLM"))
    with pytest.raises(FlowError, match="not GemmaForCausalLM"):
        export(tmp_path, tmp_path / "c")


def test_unknown_format_is_refused():
    with pytest.raises(FlowError, match="unified_hf, tensorrt_llm"):
        Target("onnx")
