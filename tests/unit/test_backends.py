"""All backends: settings reach the server, command lines are sound and pass the contracts."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from fp8flow.backends import KNOWN, Place, Served, get_backend
from fp8flow.backends.common import OPTIONS, option_flags, parse_prometheus
from fp8flow.config_engines import ENGINES
from fp8flow.contracts import check_command, check_yaml
from fp8flow.errors import FlowError
from serve_transformers import parser

SETTINGS: dict[str, Any] = {
    "prefix_reuse": False,
    "allow_block_sharing": False,
    "counters": {"prefix_hit_tokens": 0},
    "max_batch_size": 16,
    "max_batch_tokens": 1024,
    "max_model_len": 8192,
    "kv_cache": {"tokens": 16384, "dtype": "bfloat16"},
    "quantization": {"kv_cache": {"emulated": True}},
    "dtype": "bfloat16",
    "versions": {"transformers": "5.24.0"},
}
PAGE = "/fp8flow/settings"
SERVED = Served(Path("/ck"), Path("/tok"), quant_algo="FP8", kv_cache="fp8", engine=Path("/eng"))
PLACE = Place(host="127.0.0.1", port=4321, model_name="m", threads=2, files=Path("/files"))
STARTED = tuple(name for name in KNOWN if name != "external")
TOOLS = {"trtllm": "trtllm-serve", "vllm": "vllm serve", "sglang": "sglang"}
KV = "kv_cache_config"
REUSE = {f"{KV}.enable_block_reuse", f"{KV}.enable_partial_reuse", f"{KV}.copy_on_partial_reuse"}
# Backend -> setting -> (another value, flags and keys of the YAML that change with it). The first
# level is the section engine; "serve.x" is engine.serve.x.
CHANGES: dict[str, dict[str, tuple[Any, set[str]]]] = {
    "transformers": {
        "serve.max_batch_size": (3, {"--max-batch-size"}),
        "serve.max_batch_tokens": (5, {"--max-batch-tokens"}),
        "serve.kv_cache_tokens": (7, {"--kv-cache-tokens"}),
    },
    "trtllm": {
        "path": ("engine", {"serve", "--backend", f"{KV}.dtype"}),
        "tensor_parallel": (2, {"--tp_size"}),
        "serve.max_batch_size": (3, {"--max_batch_size"}),
        "serve.max_batch_tokens": (5, {"--max_num_tokens"}),
        "serve.max_seq_len": (7, {"--max_seq_len"}),
        "serve.kv_cache_memory_fraction": (0.5, {f"{KV}.free_gpu_memory_fraction"}),
        "serve.scheduler_policy": (
            "GUARANTEED_NO_EVICT",
            {"scheduler_config.capacity_scheduler_policy"},
        ),
        "serve.chunked_prefill": (False, {"enable_chunked_prefill"}),
        "serve.prefix_caching": (True, REUSE),
        "serve.postprocess_workers": (2, {"--num_postprocess_workers"}),
        "serve.stream_interval": (10, {"stream_interval"}),
        "serve.cuda_graph_max_batch_size": (
            64,
            {"cuda_graph_config.enable_padding", "cuda_graph_config.max_batch_size"},
        ),
        "serve.sampler": ("TRTLLMSampler", {"sampler_type"}),
        "serve.options": ({"print_iter_log": True}, {"print_iter_log"}),
    },
    "vllm": {
        "tensor_parallel": (2, {"--tensor-parallel-size"}),
        "serve.max_batch_size": (3, {"--max-num-seqs"}),
        "serve.max_batch_tokens": (5, {"--max-num-batched-tokens"}),
        "serve.max_seq_len": (7, {"--max-model-len"}),
        "serve.gpu_memory_fraction": (0.5, {"--gpu-memory-utilization"}),
        "serve.prefix_caching": (
            True,
            {"--enable-prefix-caching", "--no-enable-prefix-caching"},
        ),
        "serve.stream_interval": (10, {"--stream-interval"}),
        "serve.api_servers": (2, {"--api-server-count"}),
        "serve.scheduler": ("phased", {"--scheduler-cls"}),
        "serve.compilation": ({"mode": 3}, {"--compilation-config"}),
        "serve.options": ({"async-scheduling": False}, {"--no-async-scheduling"}),
    },
    "sglang": {
        "tensor_parallel": (2, {"--tensor-parallel-size"}),
        "serve.max_batch_size": (3, {"--max-running-requests"}),
        "serve.max_batch_tokens": (5, {"--chunked-prefill-size"}),
        "serve.max_seq_len": (7, {"--context-length"}),
        "serve.memory_fraction": (0.5, {"--mem-fraction-static"}),
        "serve.prefix_caching": (True, {"--disable-radix-cache"}),
        "serve.stream_interval": (10, {"--stream-interval"}),
        "serve.cuda_graph_max_batch_size": (64, {"--cuda-graph-max-bs"}),
        "serve.schedule_policy": ("lpm", {"--schedule-policy"}),
        "serve.options": ({"enable-metrics": True}, {"--enable-metrics"}),
    },
}
# Of the section engine, what is not for the command line: other parts of the workflow use it.
ELSEWHERE = {"backend", "version", "replicas", "environment", "build", "serve"}


def engine_section(name: str, **changes: Any) -> dict[str, Any]:
    """Return a section engine with its defaults; "serve.x" sets engine.serve.x."""
    section: dict[str, Any] = {"backend": name}
    for key, value in changes.items():
        place, _, last = key.rpartition(".")
        (section.setdefault(place, {}) if place else section)[last] = value
    return ENGINES[name].model_validate(section).model_dump(mode="json")


def groups(argv: list[str]) -> set[tuple[str, ...]]:
    """Return (flag, values...) of a command line; what precedes the flags is one group."""
    found: list[list[str]] = [[]]
    for word in argv:
        if word.startswith("--"):
            found.append([word])
        else:
            found[-1].append(word)
    return {tuple(group) if group[0].startswith("-") else ("serve", *group) for group in found}


def leaves(data: Mapping[str, Any], at: str = "") -> Iterator[tuple[str, str]]:
    """Yield (dotted key, value) of a YAML."""
    for key, value in data.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{at}{key}.")
        else:
            yield f"{at}{key}", repr(value)


def told(engine: Mapping[str, Any]) -> set[tuple[str, ...]]:
    """Return all that a server is told."""
    backend = get_backend(engine["backend"])
    files = backend.serve_files(engine, SERVED).values()
    return groups(backend.serve_command(engine, SERVED, PLACE)) | {
        leaf for text in files for leaf in leaves(yaml.safe_load(text))
    }


def test_known_backends_are_those_of_the_configuration() -> None:
    assert set(KNOWN) == set(ENGINES)
    assert [get_backend(name).name for name in KNOWN] == list(KNOWN)


def test_unknown_backend_names_the_known_ones() -> None:
    with pytest.raises(FlowError, match="'tensorrt' is not known; allowed: transformers"):
        get_backend("tensorrt")


@pytest.mark.parametrize("name", STARTED)
def test_every_setting_of_the_configuration_has_a_known_effect(name: str) -> None:
    model = ENGINES[name]
    serve: Any = model.model_fields["serve"].annotation
    keys = set(model.model_fields) - ELSEWHERE | {f"serve.{k}" for k in serve.model_fields}
    assert keys == set(CHANGES[name])


@pytest.mark.parametrize(("name", "key"), [(n, key) for n, keys in CHANGES.items() for key in keys])
def test_a_setting_changes_its_flag_and_nothing_else(name: str, key: str) -> None:
    value, expected = CHANGES[name][key]
    before, after = told(engine_section(name)), told(engine_section(name, **{key: value}))
    assert {change[0] for change in before ^ after} == expected
    if not isinstance(value, dict | bool) and key not in ("path", "serve.scheduler"):
        assert str(value) in {word.strip("'") for change in after - before for word in change}


@pytest.mark.parametrize("name", [name for name in STARTED if name != "transformers"])
def test_environment_is_offline_and_the_configured_one_wins(name: str) -> None:
    made = get_backend(name).serve_environment(
        engine_section(name, environment={"A": "1", "DO_NOT_TRACK": "0"}), threads=4
    )
    assert (made["HF_HUB_OFFLINE"], made["A"], made["DO_NOT_TRACK"]) == ("1", "1", "0")
    assert not [key for key in made if "TOKEN" in key]


@pytest.mark.parametrize("name", ["trtllm", "vllm", "sglang"])
def test_answers_of_exact_length_ignore_the_end_token_instead_of_masking_it(name: str) -> None:
    fields = get_backend(name).request_fields
    assert (fields(1, 128)["min_tokens"], fields(1, 128)["top_k"]) == (1, 1)
    assert "ignore_eos" not in fields(1, 128)
    assert fields(128, 128)["ignore_eos"] is True
    assert "min_tokens" not in fields(128, 128)


@pytest.mark.parametrize("name", STARTED)
def test_requests_for_other_backends_are_json(name: str) -> None:
    assert get_backend(name).request_fields(2, 5)["min_tokens"] == 2


# --- any configuration ---

SIZE = st.integers(1, 1 << 20)
SHARE = st.floats(0.01, 1.0, exclude_max=True)
MAYBE = st.none() | SIZE
COMMON = {"max_batch_size": SIZE, "max_batch_tokens": SIZE, "prefix_caching": st.booleans()}
SERVE: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "transformers": {"max_batch_size": SIZE, "max_batch_tokens": SIZE, "kv_cache_tokens": SIZE},
    "trtllm": {
        **COMMON,
        "max_seq_len": SIZE,
        "kv_cache_memory_fraction": SHARE,
        "scheduler_policy": st.sampled_from(("MAX_UTILIZATION", "GUARANTEED_NO_EVICT")),
        "chunked_prefill": st.booleans(),
        "postprocess_workers": st.integers(0, 8),
        "stream_interval": MAYBE,
        "cuda_graph_max_batch_size": MAYBE,
        "sampler": st.sampled_from((None, "auto", "TRTLLMSampler", "TorchSampler")),
        "options": st.sampled_from(({}, {"print_iter_log": True}, {KV: {"max_tokens": 9}})),
    },
    "vllm": {
        **COMMON,
        "max_seq_len": MAYBE,
        "gpu_memory_fraction": SHARE,
        "stream_interval": SIZE,
        "api_servers": st.integers(1, 8),
        "scheduler": st.sampled_from(("engine", "phased")),
        "compilation": st.sampled_from(({}, {"pass_config": {"fuse_norm_quant": True}})),
        "options": st.sampled_from(
            ({}, {"async-scheduling": True}, {"cudagraph-capture-sizes": [1, 2]})
        ),
    },
    "sglang": {
        **COMMON,
        "max_seq_len": MAYBE,
        "memory_fraction": SHARE,
        "stream_interval": SIZE,
        "cuda_graph_max_batch_size": MAYBE,
        "schedule_policy": st.sampled_from(("fcfs", "lpm", "random", "dfs-weight")),
        "options": st.sampled_from(({}, {"enable-metrics": True})),
    },
}
VERSIONS = {
    "trtllm": ("1.0.0", "1.2.0", "1.2.1"),
    "vllm": ("0.25.1", "0.33.0"),
    "sglang": ("0.5.10.post1",),
}


@st.composite
def sections(draw: st.DrawFn, names: tuple[str, ...] = STARTED) -> dict[str, Any]:
    """Draw a section engine that the configuration takes."""
    name = draw(st.sampled_from(names))
    serve = draw(st.fixed_dictionaries(SERVE[name]))
    model: Any = ENGINES[name].model_fields["serve"].annotation
    assert set(serve) == set(model.model_fields)
    # Every running request needs a token in each pass.
    serve["max_batch_tokens"] = max(serve["max_batch_tokens"], serve["max_batch_size"])
    section: dict[str, Any] = {"backend": name, "serve": serve}
    if name != "transformers":
        section["version"] = draw(st.sampled_from(VERSIONS[name]))
        section["tensor_parallel"] = draw(st.integers(1, 8))
    if section.get("version") == "0.33.0":
        serve["scheduler"] = "engine"
    if name == "trtllm":
        section["path"] = draw(st.sampled_from(("engine", "pytorch")))
        absent = ["sampler"] if section["version"] == "1.0.0" else []
        if section["path"] == "engine":
            absent = ["stream_interval", "cuda_graph_max_batch_size", "sampler"]
            serve["options"] = {}
        serve |= dict.fromkeys(absent)
    return ENGINES[name].model_validate(section).model_dump(mode="json")


@given(sections())
def test_command_lines_are_words_and_always_the_same(engine: dict[str, Any]) -> None:
    backend, before = get_backend(engine["backend"]), copy.deepcopy(engine)
    argv = backend.serve_command(engine, SERVED, PLACE)
    assert all(isinstance(word, str) and word and word != "None" for word in argv)
    flags = [word for word in argv if word.startswith("--")]
    assert len(flags) == len(set(flags))
    assert backend.serve_command(engine, SERVED, PLACE) == argv
    assert backend.serve_files(engine, SERVED) == backend.serve_files(engine, SERVED)
    assert engine == before


@given(sections(names=tuple(TOOLS)), st.sampled_from(("fp8", "auto")))
def test_command_lines_and_files_pass_the_contracts(engine: dict[str, Any], kv: str) -> None:
    backend = get_backend(engine["backend"])
    served = Served(Path("/ck"), Path("/tok"), "FP8", kv, Path("/eng"))
    argv = backend.serve_command(engine, served, PLACE)
    findings = list(check_command(TOOLS[engine["backend"]], engine["version"], argv))
    for text in backend.serve_files(engine, served).values():
        findings += check_yaml(
            engine["version"],
            engine["path"],
            yaml.safe_load(text),
            prefix_caching=engine["serve"]["prefix_caching"],
            serve_argv=argv,
        )
    assert [f for f in findings if f.severity == "error"] == []


# --- options ---


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"b": 1, "a": True}, ["--a", "--b", "1"]),
        ({"sizes": [1, 2]}, ["--sizes", "1", "2"]),
        ({"config": {"y": 1, "x": False}}, ["--config", '{"x":false,"y":1}']),
        ({"share": 0.5}, ["--share", "0.5"]),
        ({"lazy": False}, ["--no-lazy"]),
    ],
)
def test_options_become_arguments(options: dict[str, Any], expected: list[str]) -> None:
    assert option_flags(options, {}, negated=True) == expected


@pytest.mark.parametrize(
    "options",
    [{"--a": 1}, {"a_b": 1}, {"a=b": 1}, {"A": 1}, {"a": None}, {"a": ""}, {"a": []}, {"a": [""]}],
)
def test_options_that_are_no_arguments_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(FlowError, match=OPTIONS):
        option_flags(options, {}, negated=True)


def test_false_is_refused_where_the_engine_has_no_negation() -> None:
    with pytest.raises(FlowError, match="lazy: False is no value"):
        option_flags({"lazy": False}, {})


@pytest.mark.parametrize("name", ["reuse", "no-reuse"])
def test_an_option_with_a_setting_of_its_own_names_it(name: str) -> None:
    with pytest.raises(FlowError, match=rf"{name}: set engine\.serve\.x instead"):
        option_flags({name: True}, {"reuse": "engine.serve.x"})


# --- Prometheus ---


def test_prometheus_values_and_escapes() -> None:
    text = '# HELP a b\n\na 1\nb{x="q\\"\\\\\\n,}",y=""} 2.5e3 1700\nc{} +Inf\n'
    found = parse_prometheus(text)
    assert [(s.name, s.value) for s in found] == [("a", 1.0), ("b", 2500.0), ("c", float("inf"))]
    assert found[1].labels == {"x": 'q"\\\n,}', "y": ""}


@pytest.mark.parametrize("line", ["<html>", "a{x=1} 2", "a{x='1'} 2", "a", "a one", 'a{x="1} 2'])
def test_what_is_not_prometheus_is_refused(line: str) -> None:
    with pytest.raises(FlowError, match="Prometheus"):
        parse_prometheus(f"ok 1\n{line}\n")


# --- the embedded server ---


def test_server_takes_its_command_line_and_every_serve_key_reaches_it() -> None:
    serve = {"max_batch_size": 3, "max_batch_tokens": 5, "kv_cache_tokens": 7}
    engine = engine_section("transformers", serve=serve)
    served = Served(Path("a folder/ck"), Path("t"), "FP8", "fp8")
    argv = get_backend("transformers").serve_command(engine, served, PLACE)
    parsed = vars(parser().parse_args(argv[2:]))
    assert {key: parsed[key] for key in serve} == serve
    assert (parsed["model"], parsed["port"], parsed["threads"]) == (Path("a folder/ck"), 4321, 2)
    assert (parsed["host"], parsed["served_model_name"]) == ("127.0.0.1", "m")


def test_embedded_requests_are_greedy_and_carry_the_minimum() -> None:
    assert get_backend("transformers").request_fields(3, 9) == {"min_tokens": 3, "top_k": 1}


def test_embedded_settings_read_back() -> None:
    backend = get_backend("transformers")
    found = backend.parse_settings({PAGE: SETTINGS}, "")
    assert found["prefix_reuse"] is False
    assert (found["kv_cache_dtype"], found["kv_cache_tokens"]) == ("fp8", 16384)
    asked = backend.asked(engine_section("transformers"), SERVED)
    assert asked == {key: found[key] for key in asked}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("prefix_reuse",), True),
        (("allow_block_sharing",), True),
        (("counters", "prefix_hit_tokens"), 3),
    ],
)
def test_any_sign_of_sharing_counts_as_reuse(path: tuple[str, ...], value: object) -> None:
    answer = copy.deepcopy(SETTINGS)
    node = answer
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    assert get_backend("transformers").parse_settings({PAGE: answer}, "")["prefix_reuse"] is True


@pytest.mark.parametrize("missing", SETTINGS)
def test_a_missing_setting_is_an_error_not_a_guess(missing: str) -> None:
    answer = {key: value for key, value in SETTINGS.items() if key != missing}
    with pytest.raises(FlowError, match=missing):
        get_backend("transformers").parse_settings({PAGE: answer}, "")
