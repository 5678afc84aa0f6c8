"""TensorRT-LLM: command line and YAML of both paths, merged options, what is read back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from fp8flow.backends import Place, Served
from fp8flow.backends.trtllm import BACKEND, FILE
from fp8flow.config_engines import TrtllmEngine
from fp8flow.errors import FlowError

PLACE = Place(host="0.0.0.0", port=8000, model_name="llama", threads=4, files=Path("/run/files"))
SERVED = Served(Path("/ck"), Path("/tok"), quant_algo="FP8", kv_cache="fp8", engine=Path("/eng"))
VERSIONS = ("1.0.0", "1.2.0", "1.2.1")
COMMON = {
    "kv_cache_config": {
        "enable_block_reuse": False,
        "enable_partial_reuse": False,
        "copy_on_partial_reuse": False,
        "free_gpu_memory_fraction": 0.95,
    },
    "scheduler_config": {
        "capacity_scheduler_policy": "MAX_UTILIZATION",
        "context_chunking_policy": "FIRST_COME_FIRST_SERVED",
    },
    "enable_chunked_prefill": True,
}


def section(path: str = "pytorch", version: str = "1.2.1", **serve: Any) -> dict[str, Any]:
    """Return a section engine."""
    settings = {"backend": "trtllm", "path": path, "version": version, "serve": serve}
    return TrtllmEngine.model_validate(settings).model_dump(mode="json")


def written(engine: dict[str, Any], served: Served = SERVED) -> dict[str, Any]:
    """Return the YAML as trtllm-serve reads it."""
    files = BACKEND.serve_files(engine, served)
    assert set(files) == {FILE}
    data: dict[str, Any] = yaml.safe_load(files[FILE])
    return data


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("path", "model", "backend"), [("engine", "/eng", "trt"), ("pytorch", "/ck", "pytorch")]
)
def test_command(version: str, path: str, model: str, backend: str) -> None:
    engine = section(path, version, postprocess_workers=2)
    assert BACKEND.serve_command(engine, SERVED, PLACE) == (
        f"trtllm-serve serve {model} --backend {backend} --tokenizer /tok --host 0.0.0.0 "
        "--port 8000 --max_batch_size 2048 --max_num_tokens 8192 --max_seq_len 2668 "
        "--num_postprocess_workers 2 --max_beam_width 1 --tp_size 1 "
        "--extra_llm_api_options /run/files/trtllm.yaml"
    ).split(" ")


def test_yaml_of_an_engine_is_complete_without_precision() -> None:
    assert written(section("engine")) == COMMON


def test_yaml_of_pytorch() -> None:
    engine = section(cuda_graph_max_batch_size=1024, stream_interval=10, sampler="TRTLLMSampler")
    kv_cache = COMMON["kv_cache_config"] | {"dtype": "fp8"}  # type: ignore[operator]
    assert written(engine) == {
        **COMMON,
        "kv_cache_config": kv_cache,
        "cuda_graph_config": {"enable_padding": True, "max_batch_size": 1024},
        "stream_interval": 10,
        "sampler_type": "TRTLLMSampler",
    }


def test_no_file_says_anything_twice_that_the_command_says() -> None:
    assert not {"max_batch_size", "max_num_tokens", "max_seq_len", "backend"} & set(
        written(section())
    )
    command = " ".join(BACKEND.serve_command(section(), SERVED, PLACE))
    assert "kv_cache" not in command


def test_precision_of_the_cache_is_that_of_the_checkpoint() -> None:
    served = Served(Path("/ck"), Path("/tok"), quant_algo=None, kv_cache="auto")
    assert written(section(), served)["kv_cache_config"]["dtype"] == "auto"


@pytest.mark.parametrize(
    ("key", "value"),
    [("stream_interval", 5), ("cuda_graph_max_batch_size", 5), ("sampler", "auto")],
)
def test_engine_path_refuses_settings_of_pytorch(key: str, value: Any) -> None:
    with pytest.raises(FlowError, match=rf"engine\.serve\.{key}: only engine\.path: pytorch"):
        BACKEND.serve_files(section("engine", **{key: value}), SERVED)


def test_engine_path_needs_an_engine() -> None:
    served = Served(Path("/ck"), Path("/tok"), quant_algo="FP8", kv_cache="fp8")
    with pytest.raises(FlowError, match="needs a TensorRT engine"):
        BACKEND.serve_command(section("engine"), served, PLACE)


def test_options_are_merged_group_by_group() -> None:
    options = {
        "kv_cache_config": {"max_tokens": 100},
        "scheduler_config": {"context_chunking_policy": "EQUAL_PROGRESS"},
        "cuda_graph_config": {"batch_sizes": [1, 2]},
        "print_iter_log": True,
    }
    data = written(section(options=options))
    assert data["kv_cache_config"]["max_tokens"] == 100
    assert data["kv_cache_config"]["enable_block_reuse"] is False
    assert data["scheduler_config"] == {
        "capacity_scheduler_policy": "MAX_UTILIZATION",
        "context_chunking_policy": "EQUAL_PROGRESS",
    }
    assert data["cuda_graph_config"] == {"batch_sizes": [1, 2]}
    assert data["print_iter_log"] is True


def test_graphs_can_be_turned_off() -> None:
    assert written(section(options={"cuda_graph_config": None}))["cuda_graph_config"] is None


@pytest.mark.parametrize(
    ("options", "setting"),
    [
        ({"kv_cache_config": {"enable_block_reuse": True}}, "engine.serve.prefix_caching"),
        ({"kv_cache_config": {"copy_on_partial_reuse": True}}, "engine.serve.prefix_caching"),
        ({"kv_cache_config": {"dtype": "auto"}}, "quantization.kv_cache"),
        ({"kv_cache_config": None}, "engine.serve.prefix_caching"),
        ({"kv_cache_config": 1}, "engine.serve.prefix_caching"),
        ({"scheduler_config": None}, "engine.serve.scheduler_policy"),
        ({"enable_chunked_prefill": False}, "engine.serve.chunked_prefill"),
        (
            {"cuda_graph_config": {"max_batch_size": 5}},
            "engine.serve.cuda_graph_max_batch_size",
        ),
        ({"max_num_tokens": 5}, "engine.serve.max_batch_tokens"),
        ({"tensor_parallel_size": 2}, "engine.tensor_parallel"),
        ({"backend": "trt"}, "engine.path"),
        ({"tokenizer": "/x"}, "leave it out"),
    ],
)
def test_options_with_a_setting_are_refused(options: dict[str, Any], setting: str) -> None:
    with pytest.raises(FlowError, match=setting):
        BACKEND.serve_files(section(options=options), SERVED)


def test_a_group_that_a_setting_made_cannot_be_dropped() -> None:
    engine = section(cuda_graph_max_batch_size=8, options={"cuda_graph_config": None})
    with pytest.raises(FlowError, match="cuda_graph_max_batch_size"):
        BACKEND.serve_files(engine, SERVED)


def test_requests_ask_for_usage_once() -> None:
    assert BACKEND.request_fields(1, 128) == {
        "top_k": 1,
        "min_tokens": 1,
        "stream_options": {"include_usage": True, "continuous_usage_stats": False},
    }


# Forms of model_engine's and kvCacheManager.cpp's lines as found in published logs: first the small
# cache of the estimation, then the one in use.
LOG = """\
[TensorRT-LLM][INFO] [MemUsageChange] Allocated 0.56 GiB for max tokens in paged KV cache (8224).
[TensorRT-LLM][INFO] [MemUsageChange] Allocated 112.11 GiB for max tokens in paged KV cache (1836992).
[12/20/2025-04:21:10] [TRT-LLM] [I] max_seq_len=2668, max_num_requests=2048, max_num_tokens=8192, \
max_batch_size=2048
INFO:     Application startup complete.
"""  # noqa: E501


def test_settings_read_back() -> None:
    found = BACKEND.parse_settings({"/version": {"version": "1.2.1"}}, LOG)
    assert found == {
        "engine": "trtllm 1.2.1",
        "prefix_reuse": None,
        "counters": {},
        "max_model_len": 2668,
        "max_batch_tokens": 8192,
        "max_batch_size": 2048,
        "kv_cache_tokens": 1836992,
    }
    asked = BACKEND.asked(section(), SERVED)
    assert asked == {key: found[key] for key in asked}


def test_a_silent_log_leaves_sizes_out() -> None:
    found = BACKEND.parse_settings({"/version": {"version": "1.0.0"}}, "")
    assert found == {"engine": "trtllm 1.0.0", "prefix_reuse": None, "counters": {}}


def test_a_server_without_version_is_an_error() -> None:
    with pytest.raises(FlowError, match="/version"):
        BACKEND.parse_settings({"/version": {"detail": "Not Found"}}, LOG)
