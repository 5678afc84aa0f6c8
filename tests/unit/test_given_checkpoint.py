"""Checkpoints that somebody else quantized: taken as they are, if they are of this model."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import save_file
from tiny_llama import build_model, model_record, token_rows, write_samples

from fp8flow.errors import FlowError
from fp8flow.given_checkpoint import take_given
from fp8flow.quantize import Recipe, make_checkpoint
from fp8flow.records import verify_record

SCRIPT = Path(__file__).parents[2] / "workflow" / "scripts" / "quantize.py"
COMMIT = "a" * 40


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    model = build_model(folder / "model")
    samples = write_samples(folder / "samples.parquet", token_rows())
    for name, kv_cache in (("fp8", "fp8"), ("auto", "auto")):
        (folder / name).mkdir()
        recipe = Recipe("fp8_static", kv_cache, "calibrated" if kv_cache == "fp8" else "cast")
        make_checkpoint(model, folder / name, recipe, samples=samples)
    return folder


@pytest.fixture
def ready(made, tmp_path):
    """A checkpoint of the model, FP8 KV cache with measured scales, that a test may change."""
    return shutil.copytree(made / "fp8", tmp_path / "ready")


def take(checkpoint, made, tmp_path, **given):
    folder = tmp_path / "product"
    folder.mkdir()
    section = {"source": "local", "id": None, "revision": None, "path": str(checkpoint), **given}
    settings = {"method": "given", "kv_cache": "fp8", "given": section}
    return folder, take_given(settings, made / "model", folder, "unified_hf")


def edit_json(path, change):
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def edit_tensors(folder, change):
    path = folder / "model.safetensors"
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    change(tensors)
    path.unlink()
    save_file(tensors, path, metadata={"format": "pt"})


def drop_kv_scales(tensors):
    for name in [name for name in tensors if name.endswith(("k_scale", "v_scale"))]:
        del tensors[name]


def make_old(folder, kv_cache_quant_algo):
    """Make it what ModelOpt 0.15 wrote: claims in hf_quant_config.json only, no exclusions."""
    edit_json(folder / "config.json", lambda c: c.pop("quantization_config"))
    quantization = {"quant_algo": "FP8", "kv_cache_quant_algo": kv_cache_quant_algo}
    data = {"producer": {"name": "modelopt", "version": "0.15.1"}, "quantization": quantization}
    (folder / "hf_quant_config.json").write_text(json.dumps(data))


def test_it_is_reported_as_it_is(ready, made, tmp_path):
    folder, result = take(ready, made, tmp_path)
    assert result["method"] == "given"
    assert (result["quant_algo"], result["kv_cache"], result["kv_scales"]) == (
        "FP8",
        "fp8",
        "given",
    )
    assert 0 < result["scales"]["total"]["k_scale"]["max"] < 0.1
    assert result["modules"]["quantized_count"] == 14
    assert result["calibration"] is None
    assert result["given"]["path"] == str(ready)
    weights = "model.safetensors"
    assert (folder / weights).samefile(ready / weights)
    for name in ("tokenizer.json", "generation_config.json"):
        assert (folder / name).read_bytes() == (made / "model" / name).read_bytes()


def test_the_source_is_never_changed(ready, made, tmp_path):
    edit_json(ready / "config.json", lambda c: c["quantization_config"].pop("quant_method"))
    before = {path.name: path.read_bytes() for path in ready.iterdir()}
    _, result = take(ready, made, tmp_path)
    assert {path.name: path.read_bytes() for path in ready.iterdir()} == before
    assert any("quant_method" in note for note in result["notes"])


def test_missing_quant_method_is_written(ready, made, tmp_path):
    edit_json(ready / "config.json", lambda c: c["quantization_config"].pop("quant_method"))
    folder, _ = take(ready, made, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "modelopt"


def test_old_export_with_claims_in_one_file_only(made, tmp_path):
    old = shutil.copytree(made / "auto", tmp_path / "old")
    make_old(old, None)
    edit_json(old / "config.json", lambda c: c.pop("rope_parameters"))
    folder, result = take(old, made, tmp_path)
    assert (result["quant_algo"], result["kv_cache"], result["kv_scales"]) == ("FP8", "auto", None)
    assert result["claims"]["producer"]["version"] == "0.15.1"
    assert result["exclude"] == ["lm_head"]
    config = json.loads((folder / "config.json").read_text())
    section = config["quantization_config"]
    assert section["quant_method"] == "modelopt" and section["quant_algo"] == "FP8"
    assert section["ignore"] == ["lm_head"] and "kv_cache_scheme" not in section
    assert config["rope_parameters"]["rope_type"] == "llama3"
    assert any("names no excluded modules" in note for note in result["notes"])


def test_claimed_fp8_cache_without_scales_means_one(ready, made, tmp_path):
    edit_tensors(ready, drop_kv_scales)
    make_old(ready, "FP8")
    folder, result = take(ready, made, tmp_path)
    assert (result["kv_cache"], result["kv_scales"]) == ("fp8", "absent")
    assert any("means 1.0" in note for note in result["notes"])
    section = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert section["kv_cache_scheme"]["num_bits"] == 8


def test_half_of_the_kv_scales_are_refused(ready, made, tmp_path):
    edit_tensors(ready, lambda t: t.pop("model.layers.0.self_attn.k_proj.k_scale"))
    with pytest.raises(FlowError, match="1 of 2 layers have a k_scale"):
        take(ready, made, tmp_path)


def test_tensors_are_held_against_the_claims(ready, made, tmp_path):
    edit_tensors(ready, lambda t: t.pop("model.layers.0.mlp.up_proj.input_scale"))
    with pytest.raises(FlowError, match=r"up_proj\.input_scale is missing"):
        take(ready, made, tmp_path)


def other_base(config):
    config["rope_theta"] = config["rope_parameters"]["rope_theta"] = 10000.0


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda c: c.update(vocab_size=300), "vocab_size is 300, the model's 272"),
        (lambda c: c.update(num_key_value_heads=4), "num_key_value_heads is 4"),
        (lambda c: c.update(architectures=["MistralForCausalLM"]), "architectures"),
        (lambda c: c.update(tie_word_embeddings=True), "tie_word_embeddings"),
        (lambda c: c.update(head_dim=32), "head_dim is 32, the model's 16"),
        (other_base, "RoPE is .*10000"),
    ],
)
def test_another_model_is_refused(ready, made, tmp_path, change, named):
    edit_json(ready / "config.json", change)
    with pytest.raises(FlowError, match=named):
        take(ready, made, tmp_path)


def test_another_vocabulary_is_refused(ready, made, tmp_path):
    def swap(data):
        words = data["model"]["vocab"]
        words["a"], words["b"] = words["b"], words["a"]

    edit_json(ready / "tokenizer.json", swap)
    with pytest.raises(FlowError, match=r"tokenizer\.json differs from the model's for 2 tokens"):
        take(ready, made, tmp_path)


def test_the_same_vocabulary_in_other_words_is_taken(ready, made, tmp_path):
    edit_json(ready / "tokenizer.json", lambda data: None)
    take(ready, made, tmp_path)


def test_unquantized_model_is_refused(made, tmp_path):
    with pytest.raises(FlowError, match="method: none"):
        take(made / "model", made, tmp_path)


def test_the_engine_path_is_refused(ready, made, tmp_path):
    given = {"source": "local", "id": None, "revision": None, "path": str(ready)}
    with pytest.raises(FlowError, match="path: pytorch"):
        take_given({"given": given}, made / "model", tmp_path, "tensorrt_llm")


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"path": "/nowhere"}, "quantization.given.path"),
        ({"path": None}, "quantization.given.path"),
        ({"source": "hub"}, "quantization.given.id is not set"),
        ({"source": "hub", "id": "owner/tiny", "revision": "main"}, "40 hex digits"),
        ({"source": "cloud"}, "allowed: hub, local"),
    ],
)
def test_sources_that_cannot_be_are_refused(made, tmp_path, given, named):
    with pytest.raises(FlowError, match=named):
        take(made / "fp8", made, tmp_path, **given)


def test_snapshot_in_the_hub_cache_is_taken(made, tmp_path):
    """As a job would, offline, in a process of its own: the hub reads its settings once."""
    cache = tmp_path / "hf"
    snapshot = cache / "hub" / "models--owner--tiny" / "snapshots" / COMMIT
    shutil.copytree(made / "fp8", snapshot)
    shutil.copytree(made / "model", tmp_path / "model")
    model = model_record(tmp_path / "model")
    given = {"source": "hub", "id": "owner/tiny", "revision": COMMIT, "path": None}
    quantization = {
        "method": "given", "kv_cache": "fp8", "kv_scales": "cast", "exclude": ["lm_head"],
        "given": given,
    }  # fmt: skip
    spec = {"rule": "quantize", "settings": {"quantization": quantization, "format": "unified_hf"}}
    output = tmp_path / "checkpoint" / "manifest.json"
    command = [sys.executable, str(SCRIPT), "--spec", json.dumps(spec), "--model", str(model.path)]
    command += ["--calibration", "", "--output", str(output)]
    environment = {"HF_HOME": str(cache), "HF_HUB_OFFLINE": "1", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    record = verify_record(output)
    assert record.result["method"] == "given"
    assert record.result["given"]["revision"] == COMMIT
    assert record.data["inputs"] == {"model": model.digest}
