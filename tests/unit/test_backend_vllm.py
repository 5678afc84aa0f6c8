"""vLLM: the command line, and what its pages and its log say, in the words of its source."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fp8flow.backends import Place, Served
from fp8flow.backends.vllm import BACKEND
from fp8flow.config_engines import VllmEngine
from fp8flow.errors import FlowError

PLACE = Place(host="127.0.0.1", port=8000, model_name="llama", threads=4, files=Path("/files"))
FP8 = Served(Path("/ck"), Path("/tok"), quant_algo="FP8", kv_cache="fp8")
BF16 = Served(Path("/ck"), Path("/tok"), quant_algo=None, kv_cache="auto")
# Written by prometheus_client 0.23.1 from two processes in multiprocess mode (as with two API
# servers), with the metrics of vllm/v1/metrics/loggers.py: the configuration of the cache as labels
# in text (CacheConfig.metrics_info), counters added up over the processes.
METRICS = r"""# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",cache_dtype="fp8",enable_prefix_caching="False",engine="0",gpu_memory_utilization="0.95",kv_cache_dtype_skip_layers="[]",kv_cache_max_concurrency="658.15",kv_cache_size_tokens="1755936",num_gpu_blocks="109746"} 1.0
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
# HELP vllm:prefix_cache_hits_total Prefix cache hits, in terms of number of cached tokens.
# TYPE vllm:prefix_cache_hits_total counter
vllm:prefix_cache_hits_total{engine="0",model_name="it's \"a\\b\" model,{x}=1"} 0.0
# HELP vllm:external_prefix_cache_hits_total External prefix cache hits from KV connector
# TYPE vllm:external_prefix_cache_hits_total counter
vllm:external_prefix_cache_hits_total{engine="0",model_name="m"} 7.0
# HELP vllm:num_preemptions_total Cumulative number of preemption from the engine.
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{engine="0",model_name="m"} 3.0
"""  # noqa: E501
# vllm/logger.py has the form of a line, vllm/utils/system_utils.py the prefix. Texts: api_utils.py
# (non-default args), config/scheduler.py, config/vllm.py (VllmConfig.__str__, shortened),
# platforms/cuda.py, model_executor/kernels/linear/__init__.py, v1/core/kv_cache_utils.py; the last
# one is uvicorn's.
LOG = """\
(APIServer pid=11) INFO 12-01 05:00:00 [api_utils.py:273] non-default args: {'model_tag': '/ck', \
'port': 8000, 'model': '/ck', 'quantization': 'modelopt', 'enable_prefix_caching': False, \
'max_num_batched_tokens': 8192, 'max_num_seqs': 1024}
(APIServer pid=11) INFO 12-01 05:00:01 [scheduler.py:253] Chunked prefill is enabled with \
max_num_batched_tokens=8192.
(EngineCore pid=22) INFO 12-01 05:00:02 [core.py:115] Initializing a V1 LLM engine (v0.25.1) with \
config: model='/ck', speculative_config=None, tokenizer='/tok', dtype=torch.bfloat16, \
max_seq_len=2668, tensor_parallel_size=1, quantization=modelopt, quantization_config=None, \
enforce_eager=False, kv_cache_dtype=fp8, device_config=cuda, enable_prefix_caching=False, \
enable_chunked_prefill=True, pooler_config=None, compilation_config={'mode': 3, 'pass_config': \
{'fuse_norm_quant': True}}, kernel_config=KernelConfig(x={})
(EngineCore pid=22) INFO 12-01 05:00:03 [cuda.py:477] Using FLASHINFER attention backend out of \
potential backends: ['FLASHINFER', 'TRITON_ATTN'].
(EngineCore pid=22) INFO 12-01 05:00:04 [__init__.py:667] Selected \
FlashInferFP8ScaledMMLinearKernel for ModelOptFp8LinearMethod
(EngineCore pid=22) INFO 12-01 05:00:05 [kv_cache_utils.py:2146] GPU KV cache size: 1,755,920 tokens
(APIServer pid=11) INFO:     Application startup complete.
"""
# vllm/v1/core/kv_cache_utils.py of 0.33.0 says it in one sentence.
SIZE_0_33 = (
    "(EngineCore pid=22) INFO 12-01 05:00:05 [kv_cache_utils.py:1147] GPU KV cache size: 1,234,567 "
    "tokens, Maximum concurrency for 2,668 tokens per request: 462.73x\n"
)
PAGES: dict[str, Any] = {
    "/version": {"version": "0.25.1"},
    "/v1/models": {"object": "list", "data": [{"id": "llama", "max_model_len": 2668}]},
    "/metrics": METRICS,
}


def section(version: str = "0.25.1", **serve: Any) -> dict[str, Any]:
    """Return a section engine."""
    made = VllmEngine.model_validate({"backend": "vllm", "version": version, "serve": serve})
    return made.model_dump(mode="json")


ASKED = section(max_seq_len=2668, gpu_memory_fraction=0.95)


def test_command_of_the_fp8_checkpoint() -> None:
    expected = (
        "vllm serve /ck --served-model-name llama --host 127.0.0.1 --port 8000 --tokenizer /tok "
        "--quantization modelopt --kv-cache-dtype fp8 --no-enable-prefix-caching "
        "--max-num-seqs 1024 --max-num-batched-tokens 8192 --max-model-len 2668 "
        "--gpu-memory-utilization 0.95 --stream-interval 1 --api-server-count 1 "
        "--tensor-parallel-size 1 --generation-config vllm --disable-uvicorn-access-log"
    )
    assert BACKEND.serve_command(ASKED, FP8, PLACE) == expected.split()


def test_unquantized_weights_name_no_quantization() -> None:
    argv = BACKEND.serve_command(section(), BF16, PLACE)
    assert "--quantization" not in argv
    assert argv[argv.index("--kv-cache-dtype") + 1] == "auto"
    assert "--max-model-len" not in argv


def test_compilation_is_json() -> None:
    passes = {"pass_config": {"fuse_norm_quant": True}, "mode": 3}
    argv = BACKEND.serve_command(section(compilation=passes), FP8, PLACE)
    assert json.loads(argv[argv.index("--compilation-config") + 1]) == passes


@pytest.mark.parametrize(
    ("option", "setting"),
    [
        ("max-num-seqs", "engine.serve.max_batch_size"),
        ("no-enable-prefix-caching", "engine.serve.prefix_caching"),
        ("kv-cache-dtype", "quantization.kv_cache"),
        ("compilation-config", "engine.serve.compilation"),
        ("port", "leave it out"),
        ("api-key", "no password"),
    ],
)
def test_options_with_a_setting_are_refused(option: str, setting: str) -> None:
    with pytest.raises(FlowError, match=setting):
        BACKEND.serve_command(section(options={option: 1}), FP8, PLACE)


def test_phased_scheduler_is_found_by_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/already/there")
    engine = section(scheduler="phased")
    argv = BACKEND.serve_command(engine, FP8, PLACE)
    name = argv[argv.index("--scheduler-cls") + 1]
    first, second = BACKEND.serve_environment(engine, 4)["PYTHONPATH"].split(":")
    module, _, scheduler = name.rpartition(".")
    source = Path(first, *module.split(".")).with_suffix(".py").read_text()
    assert f"class {scheduler}(" in source
    assert second == "/already/there"
    assert "PYTHONPATH" not in BACKEND.serve_environment(section(), 4)


def test_phased_scheduler_is_for_one_version() -> None:
    with pytest.raises(FlowError, match=r"made for vLLM 0\.25\.1, not 0\.33\.0"):
        BACKEND.serve_command(section("0.33.0", scheduler="phased"), FP8, PLACE)


def test_environment_keeps_the_server_to_itself() -> None:
    assert BACKEND.serve_environment(section(), threads=16) == {
        "HF_HUB_OFFLINE": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": "1",
    }


def test_requests_return_token_ids() -> None:
    assert BACKEND.request_fields(1, 128) == {
        "top_k": 1,
        "return_token_ids": True,
        "min_tokens": 1,
    }


def test_settings_come_back_as_asked() -> None:
    found = BACKEND.parse_settings(PAGES, LOG)
    asked = BACKEND.asked(ASKED, FP8)
    assert asked == {key: found[key] for key in asked}
    assert set(asked) == {
        *("engine", "prefix_reuse", "kv_cache_dtype", "gpu_memory_fraction", "max_model_len")
    }


def test_settings_of_pages_and_log() -> None:
    assert BACKEND.parse_settings(PAGES, LOG) == {
        "engine": "vllm 0.25.1",
        "prefix_reuse": False,
        "kv_cache_dtype": "fp8",
        "kv_cache_tokens": 1755936,
        "gpu_memory_fraction": 0.95,
        "max_model_len": 2668,
        "max_batch_size": 1024,
        "max_batch_tokens": 8192,
        "dtype": "bfloat16",
        "quantization": "modelopt",
        "attention_backend": "FLASHINFER",
        "linear_kernel": "FlashInferFP8ScaledMMLinearKernel",
        "compilation": "{'mode': 3, 'pass_config': {'fuse_norm_quant': True}}",
        "counters": {"prefix_hit_tokens": 0, "preemptions": 3},
    }


def test_what_is_logged_after_the_start_changes_nothing() -> None:
    later = (
        LOG + "Using TRITON_ATTN attention backend out of potential backends: ['TRITON_ATTN'].\n"
    )
    assert BACKEND.parse_settings(PAGES, later) == BACKEND.parse_settings(PAGES, LOG)


def test_an_attention_backend_that_was_asked_for() -> None:
    log = "INFO 12-01 05:00:03 [cuda.py:416] Using AttentionBackendEnum.FLASH_ATTN backend.\n"
    assert BACKEND.parse_settings(PAGES, log)["attention_backend"] == "FLASH_ATTN"


def test_hits_of_all_processes_are_counted() -> None:
    hits = 'vllm:prefix_cache_hits_total{engine="%d",model_name="m"} %d.0\n'
    pages = PAGES | {"/metrics": METRICS + hits % (1, 16) + hits % (2, 32)}
    assert BACKEND.parse_settings(pages, "")["counters"]["prefix_hit_tokens"] == 48


def test_reuse_is_reported() -> None:
    on = METRICS.replace('enable_prefix_caching="False"', 'enable_prefix_caching="True"')
    assert BACKEND.parse_settings(PAGES | {"/metrics": on}, LOG)["prefix_reuse"] is True


def test_processes_that_differ_are_an_error() -> None:
    other = METRICS.replace('cache_dtype="fp8",', 'cache_dtype="auto",').replace(
        'engine="0"', 'engine="1"'
    )
    with pytest.raises(FlowError, match="different settings of the KV cache"):
        BACKEND.parse_settings(PAGES | {"/metrics": METRICS + other}, LOG)


def test_without_metrics_the_log_tells_and_nothing_is_counted() -> None:
    found = BACKEND.parse_settings(PAGES | {"/metrics": ""}, LOG)
    assert (found["prefix_reuse"], found["counters"]) == (False, {})
    assert found["kv_cache_tokens"] == 1755920
    late = BACKEND.parse_settings(
        PAGES | {"/metrics": ""}, SIZE_0_33 + LOG.replace("GPU KV cache", "")
    )
    assert late["kv_cache_tokens"] == 1234567


def test_silence_about_reuse_is_an_error() -> None:
    with pytest.raises(FlowError, match="disable-log-stats"):
        BACKEND.parse_settings(PAGES | {"/metrics": ""}, "")


def test_a_cache_that_cannot_be_read_is_an_error() -> None:
    broken = METRICS.replace('enable_prefix_caching="False",', "")
    with pytest.raises(FlowError, match="enable_prefix_caching"):
        BACKEND.parse_settings(PAGES | {"/metrics": broken}, LOG)


@pytest.mark.parametrize("answer", [{}, [], None, {"version": ""}])
def test_a_server_without_version_is_an_error(answer: Any) -> None:
    with pytest.raises(FlowError, match="/version"):
        BACKEND.parse_settings(PAGES | {"/version": answer}, LOG)


def test_a_special_build_is_the_same_version() -> None:
    found = BACKEND.parse_settings(PAGES | {"/version": {"version": "0.25.1+cu129"}}, LOG)
    assert (found["engine"], found["engine_build"]) == ("vllm 0.25.1", "cu129")


def test_precision_of_the_cache_has_one_name() -> None:
    other = METRICS.replace('cache_dtype="fp8"', 'cache_dtype="fp8_e4m3"')
    assert BACKEND.parse_settings(PAGES | {"/metrics": other}, LOG)["kv_cache_dtype"] == "fp8"


def test_configured_paths_do_not_hide_the_scheduler() -> None:
    engine = section(scheduler="phased") | {"environment": {"PYTHONPATH": "/plugins"}}
    first, *rest = BACKEND.serve_environment(engine, 4)["PYTHONPATH"].split(":")
    assert (Path(first) / "fp8flow" / "vllm_scheduler.py").is_file()
    assert rest == ["/plugins"]
