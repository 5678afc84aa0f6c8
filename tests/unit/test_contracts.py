import json
import shlex
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from fp8flow.contract_data import FOLDER, TOOLS, command_of, document
from fp8flow.contracts import check_command, check_sizes, check_yaml, versions

QUANTIZE = shlex.split(
    "python3 /app/tensorrt_llm/examples/quantization/quantize.py --model_dir HF --dtype bfloat16 "
    "--qformat fp8 --kv_cache_dtype fp8 --calib_dataset CALIBRATION --calib_size 512 "
    "--batch_size 8 --calib_max_seq_length 2048 --tokenizer_max_seq_length 4096 --tp_size 1 "
    "--output_dir CKPT"
)
BUILD = shlex.split(
    "trtllm-build --checkpoint_dir CKPT --output_dir ENGINE --max_batch_size 2048 "
    "--max_num_tokens 8192 --max_input_len 2540 --max_seq_len 2668 --max_beam_width 1 "
    "--kv_cache_type paged --gpt_attention_plugin auto --remove_input_padding enable "
    "--context_fmha enable --use_paged_context_fmha enable --use_fp8_context_fmha enable "
    "--use_fused_mlp enable --multiple_profiles enable --tokens_per_block 32 --workers 1 "
    "--output_timing_cache ENGINE.cache --log_level info"
)
SIZES = "--max_batch_size 2048 --max_num_tokens 8192 --max_seq_len 2668 --max_beam_width 1"
SERVE = shlex.split(
    "trtllm-serve serve ENGINE --backend trt --tokenizer HF --host 0.0.0.0 --port 8000 "
    f"{SIZES} --extra_llm_api_options trt.yaml"
)
TORCH = shlex.split(
    f"trtllm-serve serve HF_FP8 --backend pytorch --host 0.0.0.0 --port 8000 {SIZES} "
    "--num_postprocess_workers 2 --extra_llm_api_options torch.yaml"
)
VLLM = shlex.split(
    "vllm serve HF_FP8 --quantization modelopt --kv-cache-dtype fp8 --no-enable-prefix-caching "
    "--max-num-seqs 1024 --max-num-batched-tokens 8192 --max-model-len 2668 "
    "--gpu-memory-utilization 0.95 --generation-config vllm --disable-uvicorn-access-log "
    "--port 8000"
)
SGLANG = shlex.split(
    "python -m sglang.launch_server --model-path D --quantization modelopt_fp8 --kv-cache-dtype "
    "fp8_e4m3 --disable-radix-cache --mem-fraction-static 0.9 --max-running-requests 512 "
    "--chunked-prefill-size 8192 --schedule-policy fcfs --cuda-graph-max-bs 512 "
    "--stream-interval 4 --host 127.0.0.1 --port 30000"
)
KV_CACHE = {
    "enable_block_reuse": False,
    "enable_partial_reuse": False,
    "copy_on_partial_reuse": False,
    "free_gpu_memory_fraction": 0.95,
}
TRT_YAML = {
    "kv_cache_config": KV_CACHE,
    "scheduler_config": {
        "capacity_scheduler_policy": "MAX_UTILIZATION",
        "context_chunking_policy": "FIRST_COME_FIRST_SERVED",
    },
    "enable_chunked_prefill": True,
}
TORCH_YAML = {
    **TRT_YAML,
    "kv_cache_config": {**KV_CACHE, "dtype": "fp8"},
    "cuda_graph_config": {"enable_padding": True, "max_batch_size": 1024},
    "stream_interval": 10,
}
TRTLLM = ("1.0.0", "1.2.0", "1.2.1")
NEW = ("1.2.0", "1.2.1")
VLLMS = ("0.25.1", "0.33.0")
GOOD = [
    *(("quantize.py", version, QUANTIZE) for version in TRTLLM),
    *(("trtllm-build", version, BUILD) for version in TRTLLM),
    *(("trtllm-serve", version, argv) for version in TRTLLM for argv in (SERVE, TORCH)),
    *(("vllm serve", version, VLLM) for version in VLLMS),
    ("sglang", "0.5.10.post1", SGLANG),
]


def swap(argv, flag, *value):
    """Replace a flag's value, or the flag and its value by nothing."""
    at = argv.index(flag)
    return [*argv[:at], *([flag, *value] if value else []), *argv[at + 2 :]]


def only(findings, text, severity="error"):
    assert [(finding.severity, text in finding.what) for finding in findings] == [
        (severity, True)
    ], findings
    assert findings[0].fix
    return findings[0]


# --- what is valid passes


@pytest.mark.parametrize(("tool", "version", "argv"), GOOD)
def test_documented_commands_are_clean(tool, version, argv):
    assert check_command(tool, version, argv) == []


@pytest.mark.parametrize("version", NEW)
def test_spellings_of_1_2_are_clean(version):
    argv = [{"--extra_llm_api_options": "--config", "trt": "tensorrt"}.get(a, a) for a in SERVE]
    assert check_command("trtllm-serve", version, argv) == []
    data = {**TORCH_YAML, "sampler_type": "TRTLLMSampler"}
    assert check_yaml(version, "pytorch", data) == []


@pytest.mark.parametrize("version", TRTLLM)
def test_documented_yaml_is_clean(version):
    assert check_yaml(version, "engine", TRT_YAML, build_argv=BUILD, serve_argv=SERVE) == []
    assert check_yaml(version, "pytorch", TORCH_YAML, serve_argv=TORCH) == []
    assert check_yaml(version, "pytorch", {**TORCH_YAML, "cuda_graph_config": None}) == []
    assert check_sizes(BUILD, SERVE) == []


@pytest.mark.parametrize(
    "more",
    [
        "--stream-interval 4 --api-server-count 2 --tensor-parallel-size 2 --async-scheduling",
        "--no-async-scheduling --served-model-name a b --max-cudagraph-capture-size 1024",
        "--disable-log-stats --performance-mode throughput -O2 --enforce-eager",
        "-O 3 -tp 1 -asc 2 --attention-backend flashinfer --no-enable-log-requests",
        "-O=1 --long-prefill-token-threshold 1024",
        '--compilation-config {"pass_config":{"fuse_norm_quant":true},"cudagraph_mode":"full"}',
        "--compilation-config.pass_config.fuse_attn_quant true --compilation-config.mode 3",
        '--attention-config {"backend":"FLASHINFER"} --load-format=safetensors',
        '--override-generation-config {"temperature":0} --middleware a --middleware b',
    ],
)
@pytest.mark.parametrize("version", VLLMS)
def test_more_of_vllm_is_clean(version, more):
    assert (
        check_command("vllm serve", version, [*VLLM, *shlex.split(more.replace('"', '\\"'))]) == []
    )


def test_other_ways_to_start_are_clean():
    assert check_command("vllm serve", "0.25.1", ["env", "A=1", "/opt/bin/vllm", *VLLM[1:]]) == []
    module = ["python", "-m", "vllm.entrypoints.cli.main", *VLLM[1:]]
    assert check_command("vllm serve", "0.25.1", module) == []
    assert check_command("vllm serve", "0.25.1", [a.replace("-num-", "_num_") for a in VLLM]) == []
    serve = ["sglang", "serve", *SGLANG[3:], "--context-length", "8Ki"]
    assert check_command("sglang", "0.5.10.post1", serve) == []


# --- what is wrong is found, once


@pytest.mark.parametrize(
    ("tool", "argv", "text", "fix"),
    [
        ("vllm serve", [*VLLM, "--max-num-seq", "4"], "did you mean --max-num-seqs?", "correct"),
        ("vllm serve", [*VLLM, "--disable-log-requests"], "no flag --disable-log", "drop it"),
        ("vllm serve", [*VLLM, "--max-num-active-seqs", "4"], "no flag", "0.33.0"),
        ("vllm serve", swap(VLLM, "--kv-cache-dtype", "fp16"), "not a choice", "auto, bfloat16"),
        ("vllm serve", swap(VLLM, "--quantization", "fp9"), "did you mean fp8?", "choose from"),
        ("vllm serve", swap(VLLM, "--max-num-seqs", "many"), "not a whole number", "give"),
        ("vllm serve", swap(VLLM, "--max-num-batched-tokens", "8q"), "not a whole number", "give"),
        ("vllm serve", swap(VLLM, "--gpu-memory-utilization", "1.2"), "out of range", "at most 1"),
        ("vllm serve", swap(VLLM, "--gpu-memory-utilization", "0"), "out of range", "above 0"),
        ("vllm serve", [*VLLM, "--async-scheduling=true"], "takes no value", "--no-async"),
        ("vllm serve", [*VLLM, "--enforce-eager", "true"], "takes no value", "alone"),
        ("vllm serve", [*VLLM, "--stream-interval"], "has no value", "VALUE"),
        ("vllm serve", [*VLLM, "--stream-interval", "--enforce-eager"], "no value", "VALUE"),
        ("vllm serve", [*VLLM, "--stream-interval", "0"], "out of range", "at least 1"),
        ("vllm serve", [*VLLM, "--stream-interval", "-2"], "out of range", "at least 1"),
        ("vllm serve", [*VLLM, "--enable-prefix-caching"], "given twice (also as", "once"),
        ("vllm serve", [*VLLM, "-q", "fp8"], "given twice (also as --quantization)", "once"),
        (
            "vllm serve",
            [*VLLM, "-cc.mode", "3", "--compilation-config.mode", "0"],
            "given twice (also as -cc)",
            "once",
        ),
        ("vllm serve", [*VLLM, "-O4"], "--optimization-level: 4 is not a choice", "0, 1, 2, 3"),
        ("vllm serve", [*VLLM, "more"], "'more' belongs to no flag", "remove it"),
        ("vllm serve", ["vllm", "serve", *VLLM[3:]], "the model is missing", "before the flags"),
        ("vllm serve", ["vllm", *VLLM[2:]], "the word `serve` is missing", "vllm serve"),
        ("vllm serve", ["python", "x.py"], "does not run vllm serve", "`vllm serve`"),
        ("vllm serve", [*VLLM, "-cc", "{"], "not a JSON object", "JSON object"),
        ("vllm serve", [*VLLM, "-cc", "[1]"], "not a JSON object", "JSON object"),
        ("vllm serve", [*VLLM, "-cc", '{"modes":3}'], "did you mean mode?", "correct"),
        ("vllm serve", [*VLLM, "-cc.pass_config.fuse_norm_quants", "true"], "fuse_norm_quant?", ""),
        ("vllm serve", [*VLLM, "-cc.cudagraph_mode", "FAST"], '"FAST" is not one of', "give"),
        ("vllm serve", [*VLLM, "-cc", '{"pass_config":true}'], "true is not a mapping", "give"),
        ("vllm serve", swap(VLLM, "--max-num-seqs", "9000"), "refuses to start", "raise"),
        (
            "vllm serve",
            [*VLLM, "--attention-backend", "FLASHINFER", "-ac.backend", "FLASH_ATTN"],
            "exclude each other",
            "only one",
        ),
        ("vllm serve", [*VLLM, "--enable-log-outputs"], "needs --enable-log-requests", "drop"),
        ("sglang", swap(SGLANG, "--kv-cache-dtype", "fp8"), "fp8 is not a choice", "fp8_e4m3"),
        ("sglang", [*SGLANG, "--context-length", "8K"], "not a whole number", "8k or 8Ki"),
        ("sglang", swap(SGLANG, "--model-path"), "--model-path is missing", "add"),
        ("sglang", [*SGLANG, "--gpu-memory-utilization", "0.9"], "no flag", "--mem-fraction"),
        ("sglang", swap(SGLANG, "--mem-fraction-static", "1.0"), "out of range", "below 1"),
        ("trtllm-build", [*BUILD, "--opt_num_tokens", "64"], "RuntimeError", "--opt_num_tokens"),
        ("trtllm-build", [*BUILD, "--user_buffer", "enable"], "needs --reduce_fusion", "add"),
        (
            "trtllm-build",
            [*BUILD, "--gemm_swiglu_plugin", "fp8", "--low_latency_gemm_swiglu_plugin", "fp8"],
            "exclude each other",
            "disable",
        ),
        ("trtllm-build", swap(BUILD, "--context_fmha", "disable"), "needs context FMHA", "drop"),
        (
            "trtllm-build",
            [*BUILD, "--gather_context_logits", "--max_draft_len", "3"],
            "--max_draft_len above 0",
            "drop",
        ),
        ("trtllm-build", swap(BUILD, "--multiple_profiles", "true"), "not a choice", "enable"),
        ("trtllm-build", swap(BUILD, "--max_batch_size", "0"), "out of range", "at least 1"),
        ("trtllm-build", swap(BUILD, "--max_seq_len", "2000"), "above --max_seq_len", "lower"),
        ("trtllm-build", swap(BUILD, "--output_dir"), "--output_dir is missing", "add"),
        ("trtllm-build", [*BUILD, "--max-batch-size", "8"], "did you mean --max_batch_size?", ""),
        ("trtllm-serve", ["trtllm-serve", *SERVE[2:]], "`serve` is missing", "trtllm-serve serve"),
        ("trtllm-serve", swap(SERVE, "--tokenizer"), "no tokenizer", "--tokenizer"),
        ("trtllm-serve", swap(SERVE, "--max_batch_size"), "--max_batch_size is not given", "pass"),
        ("trtllm-serve", swap(SERVE, "--max_num_tokens"), "--max_num_tokens is not given", "pass"),
        ("trtllm-serve", swap(SERVE, "--backend", "tensorrtt"), "not a choice", "trt"),
        (
            "trtllm-serve",
            [*SERVE, "--kv_cache_free_gpu_memory_fraction", "0.9"],
            "beside a YAML",
            "kv_cache_memory_fraction",
        ),
        ("quantize.py", swap(QUANTIZE, "--kv_cache_dtype", "fp16"), "not a choice", "int8, fp8"),
        ("quantize.py", swap(QUANTIZE, "--calib_dataset", "/d/cnn_dailymail"), "hub data", "path"),
        ("quantize.py", swap(QUANTIZE, "--model_dir"), "--model_dir is missing", "add"),
    ],
)
def test_violation_is_found_once(tool, argv, text, fix):
    assert fix in only(check_command(tool, versions(tool)[0], argv), text).fix


@pytest.mark.parametrize(
    ("tool", "version", "argv", "text"),
    [
        ("vllm serve", "0.25.1", [*VLLM, "--calculate-kv-scales"], "deprecated"),
        ("vllm serve", "0.25.1",
         [*VLLM, "--enforce-eager", "-cc.pass_config.fuse_act_quant", "true"], "never runs"),
        ("trtllm-build", "1.0.0", [*BUILD, "--gemm_plugin", "fp8"], "leave it off"),
        ("trtllm-build", "1.2.1", [*BUILD, "--paged_kv_cache", "enable"], "deprecated"),
        ("trtllm-build", "1.2.1", swap(BUILD, "--max_num_tokens", "1024"), "does not fit"),
        ("trtllm-build", "1.2.1", swap(BUILD, "--max_seq_len"), "taken from the model"),
        ("trtllm-serve", "1.2.1", swap(TORCH, "--backend"), "--backend is not given"),
        ("trtllm-serve", "1.2.1", swap(TORCH, "--extra_llm_api_options"), "no YAML"),
        ("trtllm-serve", "1.2.1", swap(TORCH, "--max_num_tokens", "1024"), "does not fit"),
        ("quantize.py", "1.0.0", [*QUANTIZE, "--export_format", "hf"], "not certain"),
        ("quantize.py", "1.0.0", swap(QUANTIZE, "--qformat", "fp8_x"), "not a choice"),
        ("sglang", "0.5.10.post1", [*SGLANG, "--enable-piecewise-cuda-graph"], "deprecated"),
    ],
)  # fmt: skip
def test_doubtful_is_a_warning(tool, version, argv, text):
    only(check_command(tool, version, argv), text, "warning")


def test_versions_differ_as_their_sources_do():
    serve = "trtllm-serve"
    newer = swap(SERVE, "--backend", "tensorrt")
    assert check_command(serve, "1.2.1", newer) == []
    assert "trt" in only(check_command(serve, "1.0.0", newer), "tensorrt is not a choice").fix
    config = ["--config" if a == "--extra_llm_api_options" else a for a in TORCH]
    found = check_command(serve, "1.0.0", config)
    assert "--extra_llm_api_options is valid" in found[0].fix
    old = [*BUILD, "--auto_parallel", "2"]
    assert check_command("trtllm-build", "1.0.0", old) == []
    assert "1.0.0" in only(check_command("trtllm-build", "1.2.0", old), "no flag").fix
    quiet = [*VLLM, "--disable-log-requests"]
    assert check_command("vllm serve", "0.33.0", quiet) == []
    fused = [*VLLM, "-cc.pass_config.enable_sp", "true"]
    assert check_command("vllm serve", "0.25.1", fused) == []
    assert "0.25.1" in only(check_command("vllm serve", "0.33.0", fused), "enable_sp").fix


@pytest.mark.parametrize(
    ("facts", "more", "text", "severity"),
    [
        ({"quant_algo": "", "kv_cache": "fp8"}, [], "only works with FP8 GEMMs", "error"),
        ({"quant_algo": "FP8", "kv_cache": "auto"}, [], "meant for an FP8 KV cache", "warning"),
        ({"quant_algo": "FP8", "kv_cache": "fp8"}, ["--fp8_rowwise_gemm_plugin", "auto"],
         "one scale per channel", "error"),
        ({"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN", "kv_cache": "x"}, [], "needs --fp8", "error"),
    ],
)  # fmt: skip
def test_build_is_held_against_the_checkpoint(facts, more, text, severity):
    facts = {f"checkpoint.{key}": value for key, value in facts.items()}
    only(check_command("trtllm-build", "1.0.0", [*BUILD, *more], facts), text, severity)
    fits = {"checkpoint.quant_algo": "FP8", "checkpoint.kv_cache": "fp8"}
    assert check_command("trtllm-build", "1.0.0", BUILD, fits) == []


def test_unknown_version_names_the_known_ones():
    assert "1.0.0, 1.2.0, 1.2.1" in only(check_command("trtllm-build", "1.1", BUILD), "1.1").fix
    assert "1.0.0" in only(check_yaml("2.0", "pytorch", TORCH_YAML), "2.0").fix
    assert "0.33.0" in only(check_command("vllm serve", "0.9", VLLM), "0.9").fix
    with pytest.raises(KeyError):
        check_command("triton", "1", [])


# --- the YAML


def kv(**changes):
    merged = {**KV_CACHE, **changes}
    return {"kv_cache_config": {k: v for k, v in merged.items() if v is not ...}}


@pytest.mark.parametrize(
    ("path", "changes", "text", "fix"),
    [
        ("engine", {"cuda_graph_config": {"max_batch_size": 8}}, "PyTorch backend", "path: pyt"),
        ("engine", {"stream_interval": 4}, "PyTorch backend", "path: pytorch"),
        ("pytorch", {"batching_type": "INFLIGHT"}, "engine backend", "path: engine"),
        ("engine", kv(dtype="fp8"), "refused by the engine backend", "auto"),
        ("pytorch", kv(dtype="fp16"), "fp16 is not a choice", "auto, fp8"),
        ("pytorch", kv(free_gpu_memory_fraction=...), "fraction is missing", "kv_cache_memory"),
        ("pytorch", kv(free_gpu_memory_fraction=1.5), "out of range", "at most 1"),
        ("pytorch", kv(enable_partial_reuse=...), "reused", "enable_partial_reuse: false"),
        ("pytorch", kv(enable_block_reuse=True), "reused", "prefix_caching: true"),
        ("pytorch", kv(use_uvm="no"), '"no" is not true or false', "true or false"),
        ("pytorch", {"cuda_graph_config": {"batch_sizes": [1, 2], "max_batch_size": 8}},
         "exclude each other", "one"),
        ("pytorch", {"cuda_graph_config": {"batch_sizes": [1, "2"]}}, "not a list", "list"),
        ("pytorch", {"stream_interval": "4"}, "not a whole number", "whole"),
        ("pytorch", {"stream_interval": True}, "not a whole number", "whole"),
        ("pytorch", {"stream_interval": 0}, "out of range", "at least 1"),
        ("pytorch", {"print_iter_log": None}, "null is not true or false", "true or false"),
        ("pytorch", {"use_cuda_graph": True}, "no key use_cuda_graph", "cuda_graph_config"),
        ("pytorch", {"kv_cache_dtype": "fp8"}, "no key", "kv_cache_config.dtype"),
        ("pytorch", {"pytorch_backend_config": {}}, "no key", "top level"),
        ("pytorch", {"max_num_tokens": 100}, "stands in the YAML", "engine.serve.max_batch_tokens"),
        ("pytorch", {"scheduler_config": {**TRT_YAML["scheduler_config"],
         "dynamic_batch_config": {"enable_batch_size_tuning": True,
                                  "dynamic_batch_moving_average_window": 128}}},
         "enable_max_num_tokens_tuning is missing", "add"),
        ("pytorch", {"scheduler_config": {"capacity_scheduler_policy": "MAX"}}, "choice", "STATIC"),
        ("pytorch", {"scheduler_config": "MAX_UTILIZATION"}, "is not a mapping", "mapping"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("version", TRTLLM)
def test_yaml_violation_is_found_once(version, path, changes, text, fix):
    base = TORCH_YAML if path == "pytorch" else TRT_YAML
    assert fix in only(check_yaml(version, path, {**base, **changes}), text).fix


@pytest.mark.parametrize(("version", "severity"), [("1.0.0", "error"), ("1.2.1", "warning")])
def test_unknown_yaml_key_counts_as_the_list_is_complete(version, severity):
    for data, meant in (
        ({**TORCH_YAML, "enable_chunked_prefil": True}, "did you mean enable_chunked_prefill?"),
        ({**TORCH_YAML, **kv(free_gpu_mem_fraction=0.9)}, "mean free_gpu_memory_fraction?"),
    ):
        only(check_yaml(version, "pytorch", data), meant, severity)


def test_yaml_keys_of_another_version():
    sampler = {**TORCH_YAML, "sampler_type": "TRTLLMSampler"}
    assert "enable_trtllm_sampler" in only(check_yaml("1.0.0", "pytorch", sampler), "sampler").fix
    old = {**TORCH_YAML, "enable_trtllm_sampler": True}
    assert check_yaml("1.0.0", "pytorch", old) == []
    assert "sampler_type" in only(check_yaml("1.2.1", "pytorch", old), "sampler").fix
    blocks = {**TORCH_YAML, **kv(tokens_per_block=32)}
    assert check_yaml("1.2.0", "pytorch", blocks) == []
    assert "1.2.0" in only(check_yaml("1.0.0", "pytorch", blocks), "tokens_per_block").fix


def test_prefix_caching_is_allowed_where_it_is_asked_for():
    on = {**TORCH_YAML, **kv(enable_block_reuse=True, enable_partial_reuse=True)}
    assert check_yaml("1.2.1", "pytorch", on, prefix_caching=True) == []
    only(check_yaml("1.2.1", "pytorch", TORCH_YAML, prefix_caching=True), "is asked for")


def test_missing_kv_cache_section_is_incomplete_twice():
    data = {key: value for key, value in TRT_YAML.items() if key != "kv_cache_config"}
    share, reuse = check_yaml("1.0.0", "engine", data)
    assert "free_gpu_memory_fraction is missing" in share.what
    assert all(f"{key}: false" in reuse.fix for key in KV_CACHE if key.endswith("reuse"))
    only(check_yaml("1.0.0", "engine", ["a"]), "not a mapping")
    only(check_yaml("1.0.0", "engine", None), "not a mapping")


def test_scheduler_without_its_policy_is_doubtful():
    chunks = {"context_chunking_policy": "EQUAL_PROGRESS"}
    data = {**TRT_YAML, "scheduler_config": chunks}
    only(check_yaml("1.0.0", "engine", data), "names no capacity_scheduler_policy", "warning")


def test_yaml_is_held_against_the_commands():
    plain = swap(BUILD, "--use_paged_context_fmha", "disable")
    only(check_yaml("1.0.0", "engine", TRT_YAML, build_argv=plain), "needs paged context FMHA")
    whole = {**TRT_YAML, "enable_chunked_prefill": False}
    short = swap(SERVE, "--max_num_tokens", "2560")
    found = check_yaml("1.0.0", "engine", whole, serve_argv=short)
    only(found, "without chunked prefill", "warning")
    few = swap(TORCH, "--max_batch_size", "512")
    found = check_yaml("1.0.0", "pytorch", TORCH_YAML, serve_argv=few)
    only(found, "is above --max_batch_size 512", "warning")


# --- sizes


def test_server_must_not_ask_for_more_than_the_engine_has():
    only(check_sizes(swap(BUILD, "--max_batch_size", "1024"), SERVE), "above the engine's 1024")
    small = swap(BUILD, "--max_num_tokens", "4096")
    by_default = check_sizes(small, swap(SERVE, "--max_num_tokens"))
    only(by_default, "--max_num_tokens 8192 (its default) is above the engine's 4096")
    only(check_sizes(swap(BUILD, "--max_seq_len", "2600"), SERVE), "--max_seq_len", "warning")
    only(check_sizes(swap(BUILD, "--max_beam_width", "2"), SERVE), "differs", "warning")
    assert check_sizes(swap(BUILD, "--max_batch_size", "4096"), SERVE) == []
    assert check_sizes(small, TORCH) == []


@given(st.integers(1, 10**6), st.integers(1, 10**6))
def test_sizes_are_compared_as_numbers(built, served):
    found = check_sizes(
        swap(BUILD, "--max_batch_size", str(built)), swap(SERVE, "--max_batch_size", str(served))
    )
    assert bool(found) == (served > built)


# --- every command line gets an answer, every fact has its form


@given(st.lists(st.text(max_size=12) | st.sampled_from([*VLLM, *SERVE, "-O", "-cc.", "--x.y+"])))
def test_any_arguments_are_judged(arguments):
    for tool in TOOLS:
        for start in command_of(tool, versions(tool)[0]).spec["entry"]:
            for finding in check_command(tool, versions(tool)[0], [*start, *arguments]):
                assert finding.what and finding.fix


KEYS = st.sampled_from([*TORCH_YAML, *KV_CACHE, "batch_sizes", "dtype", "x"]) | st.integers()
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(KEYS, JSON_VALUES, max_size=5))
def test_any_yaml_is_judged(data):
    for path in ("engine", "pytorch"):
        for finding in check_yaml("1.2.1", path, data, build_argv=BUILD, serve_argv=SERVE):
            assert finding.what and finding.fix


TYPES = {"int", "float", "size", "si_size", "size_or_auto", "str", "json", "config", "bool", "flag"}
ENTRY = {
    "names", "off", "type", "config", "nargs", "repeat", "choices", "open", "fold", "default",
    "deprecated", "unverified", "note", "versions", "ge", "gt", "le", "lt",
}  # fmt: skip
KEY_TYPES = {"bool", "int", "float", "str", "list", "dict", "null", "enum", "any"}
RULE = {"wrong", "severity", "what", "fix", "source"}


@pytest.mark.parametrize("engine", sorted(set(TOOLS.values())))
def test_facts_have_their_form(engine):
    facts = document(engine)
    assert set(facts) <= {"versions", "evidence", "commands", "yaml", "configs"}
    assert facts["evidence"] and all(facts["evidence"].values())
    assert set(facts["commands"]) == {tool for tool, name in TOOLS.items() if name == engine}
    for command in facts["commands"].values():
        for entry in command["flags"]:
            assert set(entry) <= ENTRY and entry["type"] in TYPES, entry
            assert ("config" in entry) == (entry["type"] == "config")
            assert entry.get("config") in {None, *facts.get("configs", {})}
            assert set(entry.get("versions", [])) <= set(facts["versions"])
            assert bool(entry.get("off")) == (entry["type"] == "bool")
        for rule in command["rules"]:
            assert set(rule) - {"versions"} == RULE, rule
            assert rule["severity"] in ("error", "warning")
    for keys in facts.get("configs", {}).values():
        for entry in keys:
            assert set(entry["types"]) <= KEY_TYPES, entry
            assert ("members" in entry) == ("enum" in entry["types"])
            assert entry.get("config") in {None, *facts["configs"]}


@pytest.mark.parametrize(("tool", "version"), [(t, v) for t in TOOLS for v in versions(t)])
def test_a_flag_is_known_once_and_rules_know_their_flags(tool, version):
    command = command_of(tool, version)
    entries = [
        entry
        for entry in document(TOOLS[tool])["commands"][tool]["flags"]
        if version in entry.get("versions", [version])
    ]
    names = [name for entry in entries for name in (*entry["names"], *entry.get("off", []))]
    assert len(names) == len(set(names)) == len(command.flags)
    for rule in command.rules:
        for name, test in rule["wrong"].items():
            flags = test if name == "less" else [name.split(".")[0]]
            assert all(flag in command.flags for flag in flags if flag.startswith("--")), rule
    for group in command.spec.get("required", []):
        assert set(group) <= set(command.flags)


def test_resources_name_no_machine():
    for file in Path(FOLDER).iterdir():
        text = file.read_text(encoding="utf-8")
        assert json.loads(text) and "/work/" not in text and "/tmp/" not in text


def test_yaml_text_is_what_is_checked():
    text = yaml.safe_dump(TORCH_YAML)
    assert check_yaml("1.0.0", "pytorch", yaml.safe_load(text)) == []
