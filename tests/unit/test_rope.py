"""RoPE in config.json: every spelling is read, written and compared."""

import copy
import json

import pytest
from tiny_llama import LLAMA3_SCALING, THETA, build_model

from fp8flow.errors import FlowError
from fp8flow.rope import (
    Rope,
    check_export,
    patch_config,
    read_dtype,
    read_rope,
    rope_spellings,
    with_all_spellings,
)

LLAMA31 = Rope(THETA, LLAMA3_SCALING)
OLD = {"rope_theta": THETA, "rope_scaling": LLAMA3_SCALING, "torch_dtype": "bfloat16"}
NEW = {"rope_parameters": {"rope_theta": THETA, **LLAMA3_SCALING}, "dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (OLD, LLAMA31),
        (NEW, LLAMA31),
        ({**OLD, **NEW}, LLAMA31),
        ({"rope_theta": 1e5}, Rope(1e5)),
        ({"rope_theta": 1e5, "rope_scaling": None}, Rope(1e5)),
        ({"rope_parameters": {"rope_theta": 1e5, "rope_type": "default"}}, Rope(1e5)),
        ({}, Rope(10000.0)),
        (
            {"rope_scaling": {"type": "linear", "factor": 2}},
            Rope(10000.0, {"rope_type": "linear", "factor": 2}),
        ),
        ({"rope_theta": 7, "rope_parameters": {"rope_type": "default"}}, Rope(7.0)),
    ],
)
def test_reads_every_spelling(config, expected):
    assert read_rope(config).same_as(expected)


@pytest.mark.parametrize("config", [OLD, NEW])
def test_patched_config_says_the_same_to_every_reader(config):
    patched = with_all_spellings(copy.deepcopy(config), read_rope(config))
    assert patched["rope_theta"] == 500000.0
    assert patched["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert patched["rope_parameters"] == {"rope_theta": 500000.0, **patched["rope_scaling"]}
    assert patched["torch_dtype"] == patched["dtype"] == "bfloat16"


def test_patch_keeps_other_keys_and_other_rope_parameters():
    config = {"hidden_size": 64, "rope_parameters": {"rope_theta": 1e5, "rope_type": "default",
              "partial_rotary_factor": 0.5}}  # fmt: skip
    patched = with_all_spellings(config, read_rope(config))
    assert patched["hidden_size"] == 64
    assert patched["rope_parameters"]["partial_rotary_factor"] == 0.5
    assert patched["rope_scaling"] is None


def test_contradicting_spellings_are_refused():
    config = {**NEW, "rope_theta": 10000.0}
    with pytest.raises(FlowError, match=r"contradicts itself.*10000.*500000"):
        read_rope(config)


def test_rope_by_layer_type_is_refused():
    config = {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}
    with pytest.raises(FlowError, match="full_attention"):
        rope_spellings(config)


def test_dtype_in_both_spellings():
    assert read_dtype({"torch_dtype": "torch.float16"}) == "float16"
    assert read_dtype({"dtype": "bfloat16"}) == "bfloat16"
    assert read_dtype({}) is None


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda c: (c.pop("rope_theta"), c.pop("rope_scaling")), "rope_theta/rope_scaling is miss"),
        (lambda c: c.pop("rope_parameters"), "rope_parameters is missing"),
        (lambda c: c.update(rope_theta=10000.0), "rope_theta/rope_scaling says"),
        (lambda c: c.update(rope_scaling=None), "rope_theta/rope_scaling says"),
        (lambda c: c["rope_parameters"].update(factor=4.0), "rope_parameters says"),
        (lambda c: c["rope_parameters"].update(rope_type="default"), "rope_parameters says"),
    ],
)
def test_export_check_names_the_lost_spelling(tmp_path, damage, named):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(NEW))
    patch_config(path, LLAMA31)
    config = json.loads(path.read_text())
    damage(config)
    path.write_text(json.dumps(config))
    with pytest.raises(FlowError, match=named):
        check_export(path, LLAMA31)


def test_transformers_computes_the_same_frequencies_from_a_patched_config(tmp_path):
    from transformers import AutoConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    folder = build_model(tmp_path / "m")
    before = LlamaRotaryEmbedding(AutoConfig.from_pretrained(folder)).inv_freq
    patch_config(folder / "config.json", LLAMA31)
    after = LlamaRotaryEmbedding(AutoConfig.from_pretrained(folder)).inv_freq
    assert before.tolist() == after.tolist()
    plain = AutoConfig.from_pretrained(build_model(tmp_path / "plain", scaling=None))
    assert LlamaRotaryEmbedding(plain).inv_freq.tolist() != after.tolist()
