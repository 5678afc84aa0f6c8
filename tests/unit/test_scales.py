"""FP8 weights scanned as bytes."""

import pytest
import torch
from safetensors.torch import save_file

from fp8flow import scales
from fp8flow.scales import count_fp8, read_values, scale_report, value_problems
from fp8flow.weights import read_tensors

KINDS = {"weight_scale": "weight_scale", "per_channel_scale": "weight_scale"}


def write(path, **tensors):
    save_file(tensors, path)
    return read_tensors(path)


def bits(*values):
    return torch.tensor(values, dtype=torch.uint8).view(torch.float8_e4m3fn)


@pytest.mark.parametrize("block_bytes", [1, 3, 1 << 19])
def test_limits_and_nan_of_both_signs_are_counted(tmp_path, monkeypatch, block_bytes):
    monkeypatch.setattr(scales, "_BLOCK_BYTES", block_bytes)
    tensors = write(
        tmp_path / "w.safetensors",
        a=bits(0x7E, 0xFE, 0x7D, 0x00, 0x80),
        b=bits(0x7F, 0xFF, 0xFE, 0x01),
    )
    first, second = count_fp8(tensors["a"]), count_fp8(tensors["b"])
    assert (first.elements, first.at_limit, first.nan) == (5, 2, 0)
    assert (second.elements, second.at_limit, second.nan) == (4, 1, 2)


def test_report_sums_over_layers_and_names_bad_values(tmp_path):
    tensors = write(
        tmp_path / "w.safetensors",
        **{
            "m.layers.0.q.weight": bits(0x7E, 0x01),
            "m.layers.0.q.weight_scale": torch.tensor([0.5]),
            "m.layers.10.q.weight": bits(0x7F, 0x01),
            "m.layers.10.q.per_channel_scale": torch.tensor([1.0, 0.0]),
            "head.weight_scale": torch.tensor(2.0),
        },
    )
    values = read_values(tensors, KINDS)
    report = scale_report(values, KINDS)
    assert [layer["layer"] for layer in report["layers"]] == [0, 10]
    assert report["layers"][0]["saturation"] == 0.5
    assert report["total"]["weight_scale"] == {"min": 0.0, "median": 0.75, "max": 2.0, "count": 4}
    assert report["other"]["weight_scale"]["count"] == 1
    assert report["total"]["input_scale"] is None
    assert list(value_problems(values)) == [
        "m.layers.10.q.per_channel_scale holds 0.0; scales are finite and above zero",
        "m.layers.10.q.weight holds 1 NaN",
    ]


def test_values_are_those_that_were_written(tmp_path):
    numbers = torch.rand(1000)
    tensors = write(tmp_path / "w.safetensors", **{"x.weight_scale": numbers, "z": torch.ones(3)})
    assert read_values(tensors, KINDS).scales == {"x.weight_scale": numbers.tolist()}
