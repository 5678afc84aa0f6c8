"""trtllm-build: its command line, and the proof of what it has built."""

import json
from pathlib import Path

import pytest

from fp8flow.config_engines import TrtllmEngine
from fp8flow.contracts import check_command
from fp8flow.errors import FlowError
from fp8flow.trtllm_engine import build_command, inspect_engine

CHECKPOINT = {"claims": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}


def section(**changes):
    return TrtllmEngine(backend="trtllm", path="engine", **changes).model_dump(mode="json")


def flags(argv):
    return dict(zip(argv[1::2], argv[2::2], strict=True))


@pytest.mark.parametrize("version", ["1.0.0", "1.2.0", "1.2.1"])
def test_command_states_every_size_and_is_accepted_by_the_contract(version):
    engine = section(version=version, tensor_parallel=2)
    argv = build_command(engine, Path("/c"), Path("/e"), Path("/s/timing.cache"))
    assert argv[0] == "trtllm-build"
    found = flags(argv)
    expected = {
        "--checkpoint_dir": "/c", "--output_dir": "/e", "--max_batch_size": "2048",
        "--max_num_tokens": "8192", "--max_seq_len": "2668", "--max_input_len": "2540",
        "--max_beam_width": "1", "--workers": "2", "--multiple_profiles": "enable",
        "--output_timing_cache": "/s/timing.cache",
    }  # fmt: skip
    assert expected.items() <= found.items()
    assert not any("-" in name.removeprefix("--") for name in found)
    assert check_command("trtllm-build", version, argv) == []


def test_timing_cache_lies_beside_the_engine_by_default():
    argv = build_command(section(), Path("/c"), Path("/e"))
    assert flags(argv)["--output_timing_cache"] == "/e.timing.cache"


def test_scales_per_channel_and_token_get_their_plugin():
    algorithm = "FP8_PER_CHANNEL_PER_TOKEN"
    argv = build_command(section(), Path("/c"), Path("/e"), quant_algo=algorithm)
    assert flags(argv)["--fp8_rowwise_gemm_plugin"] == "auto"
    facts = {"checkpoint.quant_algo": algorithm, "checkpoint.kv_cache": "auto"}
    assert check_command("trtllm-build", "1.2.1", argv, facts) == []
    argv = build_command(section(), Path("/c"), Path("/e"), quant_algo="FP8")
    assert "--fp8_rowwise_gemm_plugin" not in argv


def test_options_become_flags():
    build = {
        "multiple_profiles": False,
        "options": {"gemm-swiglu-plugin": "fp8", "use_fused_mlp": True},
    }
    found = flags(build_command(section(build=build), Path("/c"), Path("/e")))
    assert found["--gemm_swiglu_plugin"] == "fp8"
    assert found["--use_fused_mlp"] == "enable"
    assert found["--multiple_profiles"] == "disable"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"max_batch_size": 8}, r"engine\.serve\.max_batch_size"),
        ({"workers": 8}, r"engine\.tensor_parallel"),
        ({"output-dir": "/x"}, "leave it out"),
        ({"log_level": None}, "no value"),
    ],
)
def test_options_that_a_setting_owns_are_refused(options, named):
    with pytest.raises(FlowError, match=named):
        build_command(section(build={"options": options}), Path("/c"), Path("/e"))


def write_engine(folder, ranks=1, **changes):
    build = {
        "max_batch_size": 2048, "max_num_tokens": 8192, "max_seq_len": 2668, "max_input_len": 2540,
    }  # fmt: skip
    quantization = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
    config = {
        "version": "1.2.1",
        "pretrained_config": {"quantization": quantization},
        "build_config": build,
    }
    for path, value in changes.items():
        *parents, last = path.split("__")
        target = config
        for parent in parents:
            target = target[parent]
        if value is None and not parents:
            target.pop(last)
        else:
            target[last] = value
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    for rank in range(ranks):
        (folder / f"rank{rank}.engine").write_bytes(b"engine")
    return folder


def test_engine_is_described(tmp_path):
    folder = write_engine(tmp_path / "e", ranks=2)
    result = inspect_engine(folder, section(tensor_parallel=2), CHECKPOINT)
    assert result["version"] == "1.2.1"
    assert result["bytes"] == 12
    assert result["quantization"]["quant_algo"] == "FP8"
    assert result["build_config"]["max_batch_size"] == 2048


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"version": "1.0.0"}, "built by TensorRT-LLM 1.0.0, not 1.2.1"),
        ({"version": None}, "lacks version"),
        ({"build_config": None}, "lacks build_config"),
        ({"build_config__max_batch_size": 1}, "max_batch_size is 1, not 2048"),
        ({"build_config__max_num_tokens": 1}, "max_num_tokens is 1, not 8192"),
        ({"build_config__max_input_len": 1}, "max_input_len is 1, not 2540"),
        ({"build_config__max_seq_len": 1}, "max_seq_len is 1, not 2668"),
        ({"pretrained_config__quantization": {"quant_algo": "FP8"}}, "kv_cache_quant_algo is None"),
        ({"ranks": 2}, "rank1.engine is one too many"),
    ],
)
def test_another_engine_than_asked_for_is_refused(tmp_path, changes, named):
    folder = write_engine(tmp_path / "e", **changes)
    with pytest.raises(FlowError, match=named):
        inspect_engine(folder, section(), CHECKPOINT)


def test_missing_and_empty_ranks_are_refused(tmp_path):
    folder = write_engine(tmp_path / "e")
    with pytest.raises(FlowError, match=r"rank1\.engine is missing or empty"):
        inspect_engine(folder, section(tensor_parallel=2), CHECKPOINT)
    (folder / "rank0.engine").write_bytes(b"")
    with pytest.raises(FlowError, match=r"rank0\.engine is missing or empty"):
        inspect_engine(folder, section(), CHECKPOINT)
