"""What a checkpoint claims is compared with its tensors."""

import json
import shutil

import pytest
from safetensors import safe_open
from safetensors.torch import save_file
from tiny_llama import build_model, token_rows, write_samples

from fp8flow.checkpoint import Claims, inspect_checkpoint, read_claims
from fp8flow.errors import FlowError
from fp8flow.quantize import Recipe, make_checkpoint

HEAD = "lm_head"
MODULE = "model.layers.1.mlp.up_proj"
KEY = "model.layers.0.self_attn.k_proj.k_scale"


def export(folder, method, kv_cache="fp8", kv_scales="calibrated"):
    model = build_model(folder / "model")
    samples = write_samples(folder / "samples.parquet", token_rows())
    checkpoint = folder / "checkpoint"
    checkpoint.mkdir()
    recipe = Recipe(method, kv_cache, kv_scales if kv_cache == "fp8" else "cast")
    make_checkpoint(model, checkpoint, recipe, samples=samples, batch_size=2)
    return checkpoint


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    work = tmp_path_factory.mktemp("exported")
    return {
        "static": export(work / "static", "fp8_static"),
        "dynamic": export(work / "dynamic", "fp8_dynamic"),
        "auto": export(work / "auto", "fp8_static", kv_cache="auto"),
        "none": export(work / "none", "none", kv_cache="auto"),
    }


@pytest.fixture
def static(exported, tmp_path):
    """A copy that a test may damage."""
    return shutil.copytree(exported["static"], tmp_path / "damaged")


def edit_tensors(folder, change):
    path = folder / "model.safetensors"
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def edit_json(path, change):
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def test_static_checkpoint_is_described(exported):
    report = inspect_checkpoint(exported["static"])
    assert report["claims"]["quant_algo"] == "FP8"
    assert report["claims"]["kv_cache_quant_algo"] == "FP8"
    assert report["claims"]["read_from"] == ["config.json", "hf_quant_config.json"]
    assert report["modules"]["quantized_count"] == 2 * 7
    assert report["modules"]["unquantized"] == [HEAD]
    assert [layer["layer"] for layer in report["scales"]["layers"]] == [0, 1]
    first = report["scales"]["layers"][0]
    assert first["weight_scale"]["count"] == first["input_scale"]["count"] == 7
    assert first["k_scale"]["count"] == first["v_scale"]["count"] == 1
    assert 0 < first["saturation"] < 0.01


def test_statistics_are_those_of_the_tensors(exported):
    report = inspect_checkpoint(exported["static"])
    with safe_open(exported["static"] / "model.safetensors", framework="pt") as file:
        names = [n for n in file.keys() if ".layers.1." in n]  # noqa: SIM118
        scales = sorted(file.get_tensor(n).item() for n in names if n.endswith(".weight_scale"))
        weights = [file.get_tensor(n).float() for n in names if n.endswith("proj.weight")]
    found = report["scales"]["layers"][1]
    spread = found["weight_scale"]
    assert (spread["min"], spread["median"], spread["max"]) == (scales[0], scales[3], scales[-1])
    at_limit = sum(int((weight.abs() == 448).sum()) for weight in weights)
    assert found["saturation"] == at_limit / sum(weight.numel() for weight in weights)


def test_dynamic_auto_and_unquantized_checkpoints_are_described(exported):
    dynamic = inspect_checkpoint(exported["dynamic"])
    assert dynamic["claims"]["quant_algo"] == "FP8_PER_CHANNEL_PER_TOKEN"
    assert dynamic["scales"]["total"]["input_scale"] is None
    assert dynamic["scales"]["total"]["weight_scale"]["count"] > 2 * 7
    auto = inspect_checkpoint(exported["auto"])
    assert auto["claims"]["kv_cache_quant_algo"] is None
    assert auto["scales"]["total"]["k_scale"] is None
    none = inspect_checkpoint(exported["none"])
    assert none["claims"]["quant_algo"] is None
    assert none["modules"]["quantized"] == []
    assert none["scales"]["total"]["saturation"] is None


def to_bf16(name):
    import torch

    return lambda t: t.update({name: t[name].float().to(torch.bfloat16)})


def quantize_head(tensors):
    import torch

    tensors[f"{HEAD}.weight"] = tensors[f"{HEAD}.weight"].to(torch.float8_e4m3fn)


def put(name, value):
    import torch

    return lambda t: t.update({name: torch.tensor(value)})


def put_nan(tensors):
    import torch

    bits = tensors[f"{MODULE}.weight"].view(torch.uint8)
    bits[0, 0] = 0xFF


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: t.pop(f"{MODULE}.weight_scale"), f"{MODULE}.weight_scale is missing"),
        (lambda t: t.pop(f"{MODULE}.input_scale"), f"{MODULE}.input_scale is missing"),
        (to_bf16(f"{MODULE}.weight"), f"{MODULE}.weight is BF16"),
        (to_bf16(f"{MODULE}.weight_scale"), f"{MODULE}.weight_scale is BF16"),
        (quantize_head, "lm_head.weight is F8_E4M3, but the module is excluded"),
        (lambda t: t.pop(KEY), "1 of 2 layers have a k_scale"),
        (put(KEY, [1.0, 2.0]), f"{KEY} is F32"),
        (put(KEY, 0.0), f"{KEY} holds 0.0"),
        (put(f"{MODULE}.input_scale", float("nan")), f"{MODULE}.input_scale holds nan"),
        (put(f"{HEAD}.weight_scale", 1.0), f"{HEAD} is not quantized"),
        (put("model.layers.0.gone.weight_scale", 1.0), "model.layers.0.gone.weight is not"),
        (put_nan, f"{MODULE}.weight holds 1 NaN"),
    ],
)
def test_tensors_that_break_a_claim_are_named(static, change, named):
    edit_tensors(static, change)
    with pytest.raises(FlowError) as caught:
        inspect_checkpoint(static)
    assert named in str(caught.value)


def test_every_broken_claim_is_listed_up_to_ten(static):
    edit_tensors(static, lambda t: [t.pop(n) for n in list(t) if n.endswith("input_scale")])
    with pytest.raises(FlowError) as caught:
        inspect_checkpoint(static)
    assert str(caught.value).count("input_scale is missing") == 10
    assert "and 4 more" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "change", "named"),
    [
        ("config.json", lambda d: d["quantization_config"].update(quant_algo="NVFP4"), "disagree"),
        ("hf_quant_config.json", lambda d: d["quantization"].update(kv_cache_quant_algo=None),
         "kv_cache_quant_algo: FP8 and None"),
        ("hf_quant_config.json", lambda d: d["quantization"].update(exclude_modules=[]),
         "excluded modules"),
    ],
)  # fmt: skip
def test_disagreeing_configurations_are_refused(static, name, change, named):
    edit_json(static / name, change)
    with pytest.raises(FlowError, match=named):
        read_claims(static)


def test_per_token_claim_over_static_tensors_is_refused(static):
    algo = "FP8_PER_CHANNEL_PER_TOKEN"
    edit_json(static / "config.json", lambda d: d["quantization_config"].update(quant_algo=algo))
    path = static / "hf_quant_config.json"
    edit_json(path, lambda d: d["quantization"].update(quant_algo=algo))
    with pytest.raises(FlowError, match=r"weight_scale is F32 \[\], expected F32 \[64\]"):
        inspect_checkpoint(static)


def test_kv_claim_without_scales_and_scales_without_claim_are_refused(exported, tmp_path):
    auto = shutil.copytree(exported["auto"], tmp_path / "auto")
    (auto / "hf_quant_config.json").unlink()
    scheme = {"num_bits": 8, "type": "float", "dynamic": False}
    path = auto / "config.json"
    edit_json(path, lambda d: d["quantization_config"].update(kv_cache_scheme=scheme))
    with pytest.raises(FlowError, match="0 of 2 layers have a v_scale"):
        inspect_checkpoint(auto)
    static = shutil.copytree(exported["static"], tmp_path / "static")
    (static / "hf_quant_config.json").unlink()
    edit_json(static / "config.json", lambda d: d["quantization_config"].pop("kv_cache_scheme"))
    with pytest.raises(FlowError, match="no KV scheme is claimed"):
        inspect_checkpoint(static)


def test_unquantized_claim_over_fp8_tensors_is_refused(static):
    (static / "hf_quant_config.json").unlink()
    edit_json(static / "config.json", lambda d: d.pop("quantization_config"))
    with pytest.raises(FlowError, match="unquantized model"):
        inspect_checkpoint(static)


def test_claims_of_older_modelopt_are_understood(static):
    def as_before_0_35(data):
        section = data["quantization_config"]
        section.pop("quant_method")
        section["kv_cache_scheme"] = "FP8"
        section["exclude_modules"] = section.pop("ignore")

    edit_json(static / "config.json", as_before_0_35)
    claims = read_claims(static)
    assert (claims.quant_algo, claims.kv_cache_quant_algo) == ("FP8", "FP8")
    (static / "config.json").write_text(
        json.dumps({"num_hidden_layers": 2, "torch_dtype": "bfloat16"})
    )
    assert read_claims(static).excludes(HEAD)


@pytest.mark.parametrize(
    ("pattern", "module", "expected"),
    [
        ("lm_head", "lm_head", True),
        ("model.layers.0.self_attn", "model.layers.0.self_attn.q_proj", True),
        ("model.layers.0*", "model.layers.0.mlp.up_proj", True),
        ("model.layers.1", "model.layers.10.mlp.up_proj", False),
    ],
)
def test_exclusion_patterns(pattern, module, expected):
    assert Claims(exclude=(pattern,)).excludes(module) is expected
