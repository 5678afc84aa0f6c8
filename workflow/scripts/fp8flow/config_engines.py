"""The section ``engine``: one model per inference engine, told apart by ``backend``.

Defaults are those of the engine itself where it has a documented one; what is tuned for a machine
stands in the configuration of that machine.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, Field, StringConstraints

from fp8flow.config_base import Fraction, PositiveInt, Section

DEFAULT_BACKEND: Final = "transformers"

_REPLICAS = "Servers side by side, one per GPU (or group of GPUs); the client takes them in turn."
_TENSOR_PARALLEL = "GPUs that one server spreads the model over."
_VERSION = "Version that the settings are checked against, and that the server must report."
_ENVIRONMENT = "Environment variables of the server: name -> text."
_BATCH_SIZE = "Largest number of running requests."
_BATCH_TOKENS = "Largest number of tokens in one forward pass."
_SEQ_LEN = "Longest sequence (prompt and answer), tokens"
_PREFIX = "Reuse of prefixes between requests. MLPerf Inference forbids it: for comparison only."
_STREAM = "Output tokens per streamed event after the first one"

VariableName = Annotated[str, StringConstraints(pattern=r"^[A-Z_][A-Z0-9_]*$")]
Environment = dict[VariableName, str]
# Options are checked against the contract of the engine's version.
Options = dict[str, Any]


def _plain_url(text: str) -> str:
    from urllib.parse import urlsplit

    parts = urlsplit(text)
    if parts.scheme != "http" or not parts.hostname or parts.path.strip("/") or parts.query:
        raise ValueError("give http://host:port, without a path")
    if parts.username or parts.password:
        raise ValueError("must not hold a user name or password")
    return text.rstrip("/")


class TransformersServe(Section):
    """Settings of the embedded server."""

    max_batch_size: PositiveInt = Field(16, description=_BATCH_SIZE)
    max_batch_tokens: PositiveInt = Field(1024, description=_BATCH_TOKENS)
    kv_cache_tokens: PositiveInt = Field(16384, description="Size of the KV cache, tokens.")


class TransformersEngine(Section):
    """The embedded default: transformers with continuous batching, needs no GPU."""

    backend: Literal["transformers"] = Field(
        "transformers",
        description=(
            "`transformers`: continuous batching of transformers, reading the ModelOpt FP8 "
            "checkpoint; needs no GPU."
        ),
    )
    replicas: PositiveInt = Field(1, description="Servers side by side; the client takes turns.")
    serve: TransformersServe = Field(
        default_factory=TransformersServe, description="Serving settings."
    )


class GpuEngine(Section):
    """What all engines on GPUs have."""

    backend: str
    version: str
    replicas: PositiveInt = Field(1, description=_REPLICAS)
    tensor_parallel: PositiveInt = Field(1, description=_TENSOR_PARALLEL)
    environment: Environment = Field(default_factory=dict, description=_ENVIRONMENT)


class TrtllmBuild(Section):
    """Settings of `trtllm-build` (`path: engine`); sizes come from `serve`."""

    max_input_len: PositiveInt = Field(2540, description="Longest prompt, tokens.")
    multiple_profiles: bool = Field(
        True, description="Several optimization profiles: longer build, better kernels."
    )
    options: Options = Field(
        default_factory=dict,
        description="More options of trtllm-build: name without dashes -> value.",
    )


class TrtllmServe(Section):
    """Settings of `trtllm-serve`."""

    max_batch_size: PositiveInt = Field(2048, description=_BATCH_SIZE)
    max_batch_tokens: PositiveInt = Field(
        8192, description=f"{_BATCH_TOKENS.removesuffix('.')} (max_num_tokens)."
    )
    max_seq_len: PositiveInt = Field(2668, description=f"{_SEQ_LEN}.")
    kv_cache_memory_fraction: Fraction = Field(
        0.95, description="Share of the free GPU memory that the KV cache takes."
    )
    scheduler_policy: Literal["MAX_UTILIZATION", "GUARANTEED_NO_EVICT"] = Field(
        "MAX_UTILIZATION",
        description=(
            "`MAX_UTILIZATION` fills the batch and may evict requests; `GUARANTEED_NO_EVICT` "
            "never does."
        ),
    )
    chunked_prefill: bool = Field(True, description="Split long prompts over several passes.")
    prefix_caching: bool = Field(False, description=_PREFIX)
    postprocess_workers: Annotated[int, Field(ge=0)] = Field(
        0, description="Processes that turn token ids into text; 0: none of their own."
    )
    stream_interval: PositiveInt | None = Field(
        None, description=f"{_STREAM} (`path: pytorch`); null: the engine's."
    )
    cuda_graph_max_batch_size: PositiveInt | None = Field(
        None,
        description=(
            "Largest batch with a CUDA graph, with padding (`path: pytorch`); null: the engine's."
        ),
    )
    sampler: Literal["auto", "TRTLLMSampler", "TorchSampler"] | None = Field(
        None, description="Sampler of 1.2 (`path: pytorch`); null: the engine's."
    )
    options: Options = Field(
        default_factory=dict, description="More keys of the YAML of trtllm-serve: key -> value."
    )


class TrtllmEngine(GpuEngine):
    """NVIDIA TensorRT-LLM."""

    backend: Literal["trtllm"] = Field(
        description="`trtllm`: NVIDIA TensorRT-LLM, `trtllm-serve` on NVIDIA GPUs."
    )
    version: Literal["1.0.0", "1.2.0", "1.2.1"] = Field("1.2.1", description=_VERSION)
    path: Literal["engine", "pytorch"] = Field(
        "pytorch",
        description=(
            "`engine`: TensorRT-LLM checkpoint, `trtllm-build`, `trtllm-serve --backend trt`; "
            "`pytorch`: the unified FP8 checkpoint with `trtllm-serve --backend pytorch`."
        ),
    )
    build: TrtllmBuild = Field(default_factory=TrtllmBuild, description="Engine build.")
    serve: TrtllmServe = Field(default_factory=TrtllmServe, description="Serving settings.")


class VllmServe(Section):
    """Settings of `vllm serve`; defaults are vLLM's on a GPU with 80 GB or more."""

    max_batch_size: PositiveInt = Field(
        1024, description=f"{_BATCH_SIZE.removesuffix('.')} (max-num-seqs)."
    )
    max_batch_tokens: PositiveInt = Field(
        8192, description=f"{_BATCH_TOKENS.removesuffix('.')} (max-num-batched-tokens)."
    )
    max_seq_len: PositiveInt | None = Field(
        None, description=f"{_SEQ_LEN} (max-model-len); null: the model's."
    )
    gpu_memory_fraction: Fraction = Field(
        0.92, description="Share of the GPU memory that the server takes."
    )
    prefix_caching: bool = Field(False, description=_PREFIX)
    stream_interval: PositiveInt = Field(1, description=f"{_STREAM}.")
    api_servers: PositiveInt = Field(1, description="Processes that answer HTTP.")
    scheduler: Literal["engine", "phased"] = Field(
        "engine",
        description=(
            "`engine`: vLLM's own, which puts prompts and answers into one forward pass; "
            "`phased`: fp8flow's, which gives them passes of their own (vLLM 0.25.1)."
        ),
    )
    compilation: Options = Field(
        default_factory=dict,
        description="Keys of vLLM's compilation-config, for example pass_config.",
    )
    options: Options = Field(
        default_factory=dict,
        description="More options of `vllm serve`: name without dashes -> value, or true.",
    )


class VllmEngine(GpuEngine):
    """vLLM."""

    backend: Literal["vllm"] = Field(description="`vllm`: `vllm serve` on GPUs.")
    version: Literal["0.25.1", "0.33.0"] = Field("0.25.1", description=_VERSION)
    serve: VllmServe = Field(default_factory=VllmServe, description="Serving settings.")


class SglangServe(Section):
    """Settings of SGLang's server."""

    max_batch_size: PositiveInt = Field(
        1024, description=f"{_BATCH_SIZE.removesuffix('.')} (max-running-requests)."
    )
    max_batch_tokens: PositiveInt = Field(
        8192, description="Largest number of prompt tokens in one pass (chunked-prefill-size)."
    )
    max_seq_len: PositiveInt | None = Field(
        None, description=f"{_SEQ_LEN} (context-length); null: the model's."
    )
    memory_fraction: Fraction = Field(
        0.9, description="Share of the GPU memory for weights and KV cache."
    )
    prefix_caching: bool = Field(False, description=_PREFIX)
    stream_interval: PositiveInt = Field(1, description=f"{_STREAM}.")
    cuda_graph_max_batch_size: PositiveInt | None = Field(
        None, description="Largest batch with a CUDA graph; null: the engine's."
    )
    schedule_policy: Literal["fcfs", "lpm", "random", "dfs-weight"] = Field(
        "fcfs", description="Order in which waiting requests are taken."
    )
    options: Options = Field(
        default_factory=dict,
        description="More options of the server: name without dashes -> value, or true.",
    )


class SglangEngine(GpuEngine):
    """SGLang."""

    backend: Literal["sglang"] = Field(description="`sglang`: SGLang's server on GPUs.")
    version: Literal["0.5.10.post1"] = Field("0.5.10.post1", description=_VERSION)
    serve: SglangServe = Field(default_factory=SglangServe, description="Serving settings.")


class ExternalEngine(Section):
    """A server that somebody else runs."""

    backend: Literal["external"] = Field(
        description=(
            "`external`: a server with OpenAI's completions API that runs already. Its settings "
            "and its prefix reuse cannot be proven."
        )
    )
    url: Annotated[str, AfterValidator(_plain_url)] = Field(
        description="Address of the server, http://host:port."
    )


Engine = Annotated[
    TransformersEngine | TrtllmEngine | VllmEngine | SglangEngine | ExternalEngine,
    Field(discriminator="backend"),
]
ENGINES: Final[dict[str, type[Section]]] = {
    "transformers": TransformersEngine,
    "trtllm": TrtllmEngine,
    "vllm": VllmEngine,
    "sglang": SglangEngine,
    "external": ExternalEngine,
}
