"""Ranges of activations: the same numbers as ModelOpt's own collection, with packed rows too."""

import pytest
import torch
from tiny_llama import build_model, token_rows

from fp8flow.activation_ranges import (
    batch_inputs,
    can_pack,
    equal_length_batches,
    packed_batches,
)
from fp8flow.errors import FlowError
from fp8flow.quantize import Recipe, build_quant_config, load_model, quantize_model

ROWS = token_rows((3, 7, 7, 12, 40, 9, 1))


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    return build_model(tmp_path_factory.mktemp("model"))


def ranges(model):
    return {
        name: module.amax.float()
        for name, module in model.named_modules()
        if name.endswith("_quantizer")
        and module.is_enabled
        and not name.endswith("output_quantizer")
    }


def measured(model_folder, batches, kv_scales="calibrated"):
    recipe = Recipe("fp8_static", "fp8", kv_scales)
    return ranges(quantize_model(load_model(model_folder, False), recipe, batches, False))


def by_modelopt(model_folder, batches):
    """Return what ModelOpt's own calibrators collect."""
    import modelopt.torch.quantization as mtq

    def forward(model):
        with torch.inference_mode():
            for batch in batches:
                model.base_model(torch.tensor(batch), use_cache=False)

    config = build_quant_config(
        mtq.FP8_DEFAULT_CFG, mtq.FP8_KV_CFG, ["lm_head"], quantize_head=False
    )
    return ranges(mtq.quantize(load_model(model_folder, False), config, forward))


def test_ranges_are_exactly_those_that_modelopt_collects(model_folder):
    batches = equal_length_batches(ROWS, 2)
    found, expected = measured(model_folder, batches), by_modelopt(model_folder, batches)
    assert found.keys() == expected.keys()
    assert len(found) == 2 * (7 + 7 + 2)
    for name, value in expected.items():
        assert torch.equal(found[name].flatten(), value.flatten()), name


def test_packed_rows_give_the_ranges_of_single_rows(model_folder):
    alone = measured(model_folder, [[row] for row in ROWS])
    packed = measured(model_folder, packed_batches(ROWS, 4, 50))
    for name, value in alone.items():
        assert packed[name].item() == pytest.approx(value.item(), rel=0.02), name


def test_packed_rows_do_not_see_each_other(model_folder):
    model = load_model(model_folder, False).float()
    with torch.inference_mode():
        packed = model(**batch_inputs(ROWS, model.device, model.dtype)).logits[0]
        alone = [model(torch.tensor([row])).logits[0] for row in ROWS]
    torch.testing.assert_close(packed, torch.cat(alone), rtol=1e-4, atol=1e-5)


def test_packed_batches_keep_order_and_limits():
    batches = packed_batches(ROWS, 3, 20)
    assert [row for batch in batches for row in batch] == ROWS
    assert [[len(row) for row in batch] for batch in batches] == [[3, 7, 7], [12], [40], [9, 1]]
    assert max(map(len, packed_batches(ROWS, 2, 1000))) == 2


@pytest.mark.parametrize("make", [equal_length_batches, packed_batches])
@pytest.mark.parametrize("rows", [[], [[1], []]])
def test_no_rows_or_an_empty_row_are_refused(make, rows):
    with pytest.raises(FlowError, match="calibration set"):
        make(rows, 2)


def test_sliding_windows_are_not_packed(model_folder):
    model = load_model(model_folder, False)
    assert can_pack(model)
    model.config.sliding_window = 4096
    assert not can_pack(model)
    del model.config.sliding_window
    model.config.layer_types = ["full_attention", "sliding_attention"]
    assert not can_pack(model)


def test_activations_that_are_no_numbers_are_refused(model_folder):
    model = load_model(model_folder, False)
    with torch.no_grad():
        model.model.layers[1].input_layernorm.weight.fill_(float("nan"))
    with pytest.raises(FlowError, match=r"layers\.1"):
        quantize_model(model, Recipe("fp8_static", "fp8", "cast"), [[ROWS[0]]], False)
