"""Assembles the submission tree (LoadGen form, MLPerf Inference v6.1) from verified products.

Layout below the product folder::

    closed/<submitter>/
        systems/<system>.json
        src/<benchmark>/{README.md, config.yaml, commands.json, source.json, specs/*.json}
        src/<benchmark>/fp8flow/{Snakefile, workflow/, envs/, resources/, ...}
        documentation/{calibration.md, system_architecture.md}
        results/<system>/<benchmark>/<scenario>/
            README.md  user.conf  measurements.json
            performance/run_1/{mlperf_log_detail.txt, mlperf_log_summary.txt}
            accuracy/{mlperf_log_*.txt, mlperf_log_accuracy.json (truncated), accuracy.txt}

A run that failed is put in as it is: the verdict tells. Products that do not belong together are
refused.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from fp8flow.documents import (
    architecture_document,
    calibration_document,
    command_line,
    scenario_document,
    source_document,
    starting_weights,
    weight_data_type,
    weight_transformations,
)
from fp8flow.errors import FlowError
from fp8flow.loadgen_log import ACCURACY_LOG, DETAIL_LOG, SUMMARY_LOG
from fp8flow.log import get_logger
from fp8flow.records import Record, sha256_file
from fp8flow.source_copy import CHECKOUT, REVISION, SOURCE, copy_source, git_revision

USER_CONF, SCORES = "user.conf", "accuracy.txt"
ORDER = ("Offline", "Server", "Interactive")
# The official truncate_accuracy_log.py keeps so much of both ends, with this between them.
_GAP = "\n\n...\n\n"
# Facts of the inputs that the verdict needs; the tree does not hold them.
_FACTS = {
    "model": ("source", "id", "revision", "architecture", "parameters", "submittable", "notes"),
    "dataset": (
        "source", "hub_id", "revision", "split", "file", "file_sha256", "rows", "unique_ids",
        "template", "template_sha256", "prompt_sha256", "starts_with_bos", "token_check",
        "is_official_size",
    ),
    "calibration": (
        "source", "hub_id", "revision", "split", "file", "file_sha256", "rows", "unique_ids",
        "template", "list_sha256", "list_rows", "official_list", "allowed_in_closed", "reason",
        "max_length", "token_check",
    ),
    "checkpoint": ("method", "kv_cache", "kv_scales", "quant_algo", "exclude", "calibration"),
    "probe": ("parity", "reuse", "deterministic"),
    "system": ("name", "not_detected", "ecc", "nics", "network_data_path", "accelerators", "stack"),
}  # fmt: skip

logger = get_logger(__name__)


@dataclass
class Scenario:
    """The records of one scenario."""

    name: str
    performance: Record
    accuracy: Record
    scores: Record

    def records(self) -> dict[str, Record]:
        """Return the records by kind."""
        return {
            "performance": self.performance,
            "accuracy": self.accuracy,
            "scores": self.scores,
        }


@dataclass
class Inputs:
    """Everything that a submission is made from; all records are verified."""

    model: Record
    dataset: Record
    checkpoint: Record
    probe: Record
    system: Record
    calibration: Record | None = None
    scenarios: dict[str, Scenario] = field(default_factory=dict)

    def shared(self) -> dict[str, Record]:
        """Return the records that belong to no scenario, by name."""
        names = ("model", "dataset", "calibration", "checkpoint", "probe", "system")
        found = {name: getattr(self, name) for name in names}
        return {name: record for name, record in found.items() if record is not None}

    def products(self) -> dict[str, Record]:
        """Return all records by their name in src/."""
        found = self.shared()
        for scenario in self.scenarios.values():
            for kind, record in scenario.records().items():
                found[f"{scenario.name}-{kind}"] = record
        return found


def group_scenarios(runs: Sequence[Record], accuracies: Sequence[Record]) -> dict[str, Scenario]:
    """Return the scenarios of some runs and scores: Offline, Server, Interactive.

    Raises:
        FlowError: if a scenario lacks one of its three records or has one twice.
    """
    found: dict[tuple[str, str], Record] = {}
    kinds = [(record.result["mode"], record) for record in runs]
    for kind, record in kinds + [("scores", record) for record in accuracies]:
        key = (str(record.result["scenario"]), str(kind))
        if key in found:
            raise FlowError(f"{key[0]} has two {kind} records: {found[key].path}, {record.path}")
        found[key] = record
    unordered = {name for name, _ in found}
    names = sorted(unordered, key=lambda name: (*[name != known for known in ORDER], name))
    scenarios = {}
    for name in names:
        missing = [k for k in ("performance", "accuracy", "scores") if (name, k) not in found]
        if missing:
            raise FlowError(
                f"{name} has no record for: {', '.join(missing)}; give performance and accuracy "
                "run.json with --runs and accuracy.json with --accuracies"
            )
        kinds_of = ("performance", "accuracy", "scores")
        scenarios[name] = Scenario(name, *(found[name, kind] for kind in kinds_of))
    return scenarios


def _made_from(record: Record, name: str, source: Record | None) -> Iterator[str]:
    """Yield a problem if a record was not made from the source that is given now."""
    if source is not None and source.digest not in record.data["inputs"].values():
        yield f"{record.path} was made from another {name} than {source.path}"


def _differing(prefix: str, one: Any, other: Any) -> Iterator[str]:
    """Yield the keys of two settings that differ; keys that only one has do not count."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for key in sorted(one.keys() & other.keys()):
            yield from _differing(f"{prefix}.{key}", one[key], other[key])
    elif one != other:
        yield f"{prefix} ({json.dumps(one)} and {json.dumps(other)})"


def _settings_problems(scenario: Scenario, config: Mapping[str, Any]) -> Iterator[str]:
    """Yield where the settings of the runs differ from each other or from the configuration."""
    performance, accuracy = (
        record.spec["settings"] for record in (scenario.performance, scenario.accuracy)
    )
    shared = ("engine", "model", "harness", "scenario", "scenario_settings")
    for key in shared:
        for text in _differing(key, performance.get(key), accuracy.get(key)):
            yield f"{scenario.name}: performance and accuracy run differ in {text}"
    wanted = {
        "harness": config.get("harness"),
        "scenario_settings": (config.get("scenarios") or {}).get(scenario.name),
    }
    for key, value in wanted.items():
        if value is not None:
            for text in _differing(key, performance.get(key), value):
                yield f"{scenario.performance.path} differs from the configuration in {text}"


def consistency_problems(inputs: Inputs, config: Mapping[str, Any]) -> list[str]:
    """Return what does not belong together: products of other products, or of other settings."""
    checkpoint, dataset = inputs.checkpoint, inputs.dataset
    problems = [*_made_from(checkpoint, "model", inputs.model)]
    problems += _made_from(checkpoint, "calibration set", inputs.calibration)
    problems += _made_from(dataset, "model", inputs.model)
    measured = [inputs.probe]
    for scenario in inputs.scenarios.values():
        measured += [scenario.performance, scenario.accuracy]
        problems += _made_from(scenario.scores, "run", scenario.accuracy)
        problems += _made_from(scenario.scores, "data set", dataset)
        problems += _settings_problems(scenario, config)
    for record in measured:
        problems += _made_from(record, "checkpoint", checkpoint)
        problems += _made_from(record, "data set", dataset)
    return problems


def check_inputs(inputs: Inputs, config: Mapping[str, Any]) -> None:
    """Check that all products belong together.

    Raises:
        FlowError: naming every product that does not.
    """
    if problems := consistency_problems(inputs, config):
        listed = "\n  ".join(problems)
        raise FlowError(
            f"the products do not belong together:\n  {listed}\n"
            "Something is stale; run snakemake, which rebuilds what is."
        )


def attempt_folder(run: Record) -> Path:
    """Return the folder with the raw files of a run.

    Raises:
        FlowError: if the record names no attempt.
    """
    attempt = run.result.get("attempt")
    if attempt is None:
        raise FlowError(f"{run.path} names no attempt; run the scenario again")
    return run.root / "attempts" / str(attempt)


def truncate_accuracy_log(source: Path, target: Path, kept_characters: int) -> str:
    """Copy the first and last characters of an accuracy log; return the SHA-256 of the whole.

    As truncate_accuracy_log.py does; a log that is shorter than one end stays whole.
    """
    with source.open("rb") as stream:
        if source.stat().st_size < kept_characters:
            target.write_bytes(stream.read())
        else:
            head = stream.read(kept_characters)
            stream.seek(-kept_characters, 2)
            target.write_bytes(head + _GAP.encode() + stream.read())
    return sha256_file(source)


def _copy_logs(run: Record, folder: Path) -> None:
    """Copy detail and summary log; a run that was cut short may lack them."""
    folder.mkdir(parents=True)
    for name in (DETAIL_LOG, SUMMARY_LOG):
        source = attempt_folder(run) / name
        if source.is_file():
            shutil.copyfile(source, folder / name)
        else:
            logger.warning("%s is missing, the submission will lack it", source)


def _write_accuracy(scenario: Scenario, folder: Path, kept_characters: int) -> str | None:
    """Write the accuracy folder; return the hash of the whole accuracy log."""
    _copy_logs(scenario.accuracy, folder)
    text = (scenario.scores.root / SCORES).read_text(encoding="utf-8")
    log = attempt_folder(scenario.accuracy) / ACCURACY_LOG
    digest = None
    if log.is_file():
        digest = truncate_accuracy_log(log, folder / ACCURACY_LOG, kept_characters)
        text = f"{text.rstrip()}\nhash={digest}\n"
    (folder / SCORES).write_text(text, encoding="utf-8")
    return digest


def _write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(value, indent=2, ensure_ascii=False)
    path.write_text(f"{text}\n", encoding="utf-8")


def measurements(inputs: Inputs) -> dict[str, str]:
    """Return the content of measurements.json."""
    return {
        "input_data_types": "int32",
        "retraining": "No",
        "starting_weights_filename": starting_weights(inputs.model),
        "weight_data_types": weight_data_type(inputs.checkpoint),
        "weight_transformations": weight_transformations(inputs.checkpoint),
    }


def framework(run: Record) -> str:
    """Return engine and version of a run, for the system description."""
    backend = str(run.spec["settings"]["engine"]["backend"])
    version = run.data.get("tools", {}).get(backend, "")
    return f"{backend} {version}".strip()


def system_fields(
    inputs: Inputs, submission: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the content of systems/<system>.json, and where each field comes from."""
    system = inputs.system.result
    fields = {"submitter": submission["submitter"], "division": submission["division"]}
    fields |= system["fields"]
    origins = {"submitter": "config", "division": "config", **system["origins"]}
    if not fields["framework"]:
        runs = (scenario.performance for scenario in inputs.scenarios.values())
        fields["framework"] = ", ".join(dict.fromkeys(framework(run) for run in runs))
        origins["framework"] = "the runs"
    return fields, origins


@dataclass
class Tree:
    """The submission in the making.

    Attributes:
        root: ``<product>/<division>/<submitter>``.
        inputs: what it is made from.
        submission: the config section.
        config: the effective configuration.
        limits: the rules of the round (resources/mlperf).
        checkout: the workflow's own folder, which goes into src/.
    """

    root: Path
    inputs: Inputs
    submission: Mapping[str, Any]
    config: Mapping[str, Any]
    limits: Mapping[str, Any]
    checkout: Path

    @cached_property
    def revision(self) -> dict[str, Any]:
        """Revision of the checkout."""
        return git_revision(self.checkout)

    def write(self) -> dict[str, Any]:
        """Write everything; return folder and accuracy log hash of every scenario."""
        fields, origins = system_fields(self.inputs, self.submission)
        _write_json(self.root / "systems" / f"{self.system_name}.json", fields)
        self._write_documents(fields, origins)
        self._write_source()
        return {name: self._write_scenario(s) for name, s in self.inputs.scenarios.items()}

    @property
    def system_name(self) -> str:
        """Folder name of the system."""
        return str(self.inputs.system.result["name"])

    def _write_documents(self, fields: Mapping[str, Any], origins: Mapping[str, str]) -> None:
        inputs, folder = self.inputs, self.root / "documentation"
        folder.mkdir(parents=True)
        runs = {name: s.performance for name, s in inputs.scenarios.items()}
        texts = {
            "calibration.md": calibration_document(
                self.submission, inputs.model, inputs.checkpoint, inputs.calibration
            ),
            "system_architecture.md": architecture_document(
                self.submission,
                inputs.system,
                (fields, origins),
                runs,
                self.limits["ingress_bandwidth"],
            ),
        }
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")

    def _write_source(self) -> None:
        import yaml

        folder = self.root / "src" / str(self.submission["benchmark"])
        products = self.inputs.products()
        for name, record in products.items():
            _write_json(folder / "specs" / f"{name}.json", record.spec)
        commands = {name: command_line(record) for name, record in products.items()}
        _write_json(folder / "commands.json", commands)
        # Name and place of a run shape no measurement and are no part of the identity; neither
        # do variants, whose settings are resolved. The file is complete with them.
        added = {
            "run": {"name": self.submission["submitter"]},
            "variants": {self.submission["variant"]: {}},
        }
        config = added | dict(self.config)
        text = yaml.safe_dump(config, sort_keys=False, allow_unicode=True)
        (folder / "config.yaml").write_text(text, encoding="utf-8")
        copy_source(self.checkout, folder / SOURCE, self.config)
        _write_json(folder / REVISION, self.revision)
        readme = source_document(self.submission, products, self.revision)
        (folder / "README.md").write_text(readme, encoding="utf-8")

    def _write_scenario(self, scenario: Scenario) -> dict[str, Any]:
        benchmark = str(self.submission["benchmark"])
        folder = self.root / "results" / self.system_name / benchmark / scenario.name
        _copy_logs(scenario.performance, folder / "performance" / "run_1")
        kept = self.limits["accuracy_log"]["kept_characters"]
        digest = _write_accuracy(scenario, folder / "accuracy", kept)
        _write_json(folder / "measurements.json", measurements(self.inputs))
        shutil.copyfile(attempt_folder(scenario.performance) / USER_CONF, folder / USER_CONF)
        text = scenario_document(self.submission, scenario.name, scenario.records())
        (folder / "README.md").write_text(text, encoding="utf-8")
        return {
            "folder": folder.relative_to(self.root.parent.parent).as_posix(),
            "accuracy_log_sha256": digest,
        }


def facts(inputs: Inputs) -> dict[str, Any]:
    """Return what the verdict needs to know of the inputs."""
    found: dict[str, Any] = {}
    for name, record in inputs.shared().items():
        found[name] = {key: record.result.get(key) for key in _FACTS[name]}
        found[name]["digest"] = record.digest
    found.setdefault("calibration", None)
    found["probe"]["prefix_reuse"] = inputs.probe.result["server"].get("prefix_reuse")
    found["system"]["fields_from"] = inputs.system.result["origins"]
    found["system"]["host"] = inputs.system.data.get("host", {})
    return found


def assemble(
    folder: Path,
    inputs: Inputs,
    *,
    submission: Mapping[str, Any],
    config: Mapping[str, Any],
    limits: Mapping[str, Any],
    checkout: Path = CHECKOUT,
) -> dict[str, Any]:
    """Write the tree below ``folder`` and return what there is to say about it.

    Args:
        folder: an existing empty folder.
        inputs: verified records.
        submission: the config section.
        config: the effective configuration; goes into src/.
        limits: the rules of the round as data (resources/mlperf).
        checkout: the workflow's own folder; goes into src/.

    Raises:
        FlowError: if the products do not belong together.
    """
    check_inputs(inputs, config)
    root = folder / str(submission["division"]) / str(submission["submitter"])
    tree = Tree(root, inputs, submission, config, limits, checkout)
    scenarios = tree.write()
    return {
        **submission,
        "system": tree.system_name,
        "root": root.relative_to(folder).as_posix(),
        "scenarios": scenarios,
        "source": tree.revision,
        "facts": facts(inputs),
    }
