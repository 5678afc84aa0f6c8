"""Texts of a submission, rendered from records: no figure is typed in.

The calibration document follows the MLPerf Inference rules, "Weight Definition and Quantization"
(a public description that is enough to reproduce the method); the system architecture document
follows "LoadGen Operation" and "Ingress Bandwidth".
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fp8flow.records import Record
from fp8flow.system import link_speeds_gbit

TEMPLATES = Path(__file__).resolve().parents[3] / "resources" / "templates"
DASH = "not known"
_SNAKEMAKE = ("snakemake", "--cores", "all", "--snakefile", "fp8flow/Snakefile",
              "--configfile", "config.yaml", "--")  # fmt: skip
# Folders between results/ and the record of a rule; two where it is not said.
_FOLDERS = {"fetch_model": 1, "describe_system": 1, "run_performance": 3, "run_accuracy": 3,
            "score_accuracy": 3}  # fmt: skip
LOOPBACK = (
    "LoadGen and its client run on the node under test. They send queries to the inference server "
    "over the loopback interface; the queries lie in the DRAM of the host, from where the server "
    "copies them to the accelerator, if there is one."
)

_WEIGHTS = {
    "fp8_static": (
        "FP8 E4M3, one scale per tensor: the largest magnitude of the tensor divided by the "
        "largest E4M3 number"
    ),
    "fp8_dynamic": (
        "FP8 E4M3, one scale per output channel: the largest magnitude of the channel divided by "
        "the largest E4M3 number"
    ),
    "none": "not quantized",
}
_ACTIVATIONS = {
    "fp8_static": (
        "FP8 E4M3, one static scale per tensor: the largest magnitude seen on the calibration set "
        "divided by the largest E4M3 number"
    ),
    "fp8_dynamic": "FP8 E4M3, one scale per token, taken at run time; nothing is calibrated",
    "none": "not quantized",
}
_KV_CACHE = {
    "cast": "FP8 E4M3, all scales 1.0 (values are cast)",
    "calibrated": (
        "FP8 E4M3, one static scale per layer for K and for V: the largest magnitude seen on the "
        "calibration set divided by the largest E4M3 number"
    ),
    "given": "FP8 E4M3, scales as in the given checkpoint",
    "absent": "FP8 E4M3, all scales 1.0 (the given checkpoint has none)",
}
_METHODS = {"FP8": "fp8_static", "FP8_PER_CHANNEL_PER_TOKEN": "fp8_dynamic", None: "none"}


def _quantization(checkpoint: Record) -> dict[str, Any]:
    """Return how a checkpoint is quantized: as configured, or as a given one says."""
    section: dict[str, Any] = checkpoint.spec["settings"]["quantization"]
    if section["method"] != "given":
        return section
    result = checkpoint.result
    found = {key: result[key] for key in ("kv_cache", "kv_scales", "exclude")}
    return section | found | {"method": _METHODS[result["quant_algo"]]}


def kv_cache_method(quantization: Mapping[str, Any]) -> str:
    """Return how the KV cache is kept, in words."""
    if quantization["kv_cache"] != "fp8":
        return "the precision of the activations"
    if quantization["method"] == "none":
        return "FP8 E4M3 by the engine, without scales in the checkpoint"
    return _KV_CACHE[quantization["kv_scales"]]


def tensor_kinds(checkpoint: Record) -> list[tuple[str, str]]:
    """Return kind of tensor and how it is quantized."""
    quantization = _quantization(checkpoint)
    method = quantization["method"]
    dtype = str(checkpoint.result.get("dtype") or DASH)
    return [
        ("Weights of linear layers", _WEIGHTS[method]),
        ("Inputs of linear layers", _ACTIVATIONS[method]),
        ("KV cache", kv_cache_method(quantization)),
        ("Excluded modules", ", ".join(quantization["exclude"]) or "none"),
        ("Embeddings, norms, excluded modules", dtype),
    ]


def weight_data_type(checkpoint: Record) -> str:
    """Return the data type of the weights for measurements.json."""
    method = _quantization(checkpoint)["method"]
    return str(checkpoint.result.get("dtype") or DASH) if method == "none" else "fp8"


def weight_transformations(checkpoint: Record) -> str:
    """Return what was done to the weights in one sentence, for measurements.json."""
    method = _quantization(checkpoint)["method"]
    if method == "none":
        return "none"
    if checkpoint.spec["settings"]["quantization"]["method"] == "given":
        return f"quantized before it was given to fp8flow: {_WEIGHTS[method]}; see calibration.md"
    version = checkpoint.result.get("versions", {}).get("nvidia-modelopt", DASH)
    return f"quantized with NVIDIA ModelOpt {version}: {_WEIGHTS[method]}; see calibration.md"


def starting_weights(model: Record) -> str:
    """Return where the weights come from."""
    result, settings = model.result, model.spec["settings"].get("model", {})
    if result.get("id"):
        return f"{result['id']} at {result['revision']}"
    if result["source"] == "local":
        return f"{Path(settings.get('path') or '').name} (local folder)"
    return str(result["source"])


def ingress_rows(
    runs: Mapping[str, Record], tokens_per_sample: int, bytes_per_token: int
) -> list[dict[str, Any]]:
    """Return what each scenario's queries need: samples/s x tokens x bytes, in bytes/s."""
    rows = []
    for scenario, run in runs.items():
        rate = run.result["throughput"]["samples_per_s"]
        needed = None if rate is None else rate * tokens_per_sample * bytes_per_token
        rows.append(
            {
                "scenario": scenario,
                "samples_per_s": rate,
                "bytes_per_s": needed,
                "gbit_per_s": None if needed is None else needed * 8 / 1e9,
            }
        )
    return rows


def nic_capacity_gbit(system: Mapping[str, Any]) -> float | None:
    """Return the speed of all network cards by the system description, Gb/s; None if not told."""
    return sum(link_speeds_gbit(str(system.get("host_networking", "")))) or None


def command_line(record: Record) -> str:
    """Return the command that makes a product again, to be run in the folder of src/."""
    parts = _FOLDERS.get(record.data["rule"], 2) + 1
    target = "/".join(("results", *record.path.absolute().parts[-parts:]))
    return shlex.join([*_SNAKEMAKE, target])


def number(value: Any, digits: int = 2) -> str:
    """Return a number with thousands separators; words for what is not known."""
    if value is None:
        return DASH
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.{digits}f}"


def milliseconds(value_ns: Any) -> str:
    """Return nanoseconds as milliseconds."""
    return DASH if value_ns is None else f"{value_ns / 1e6:,.2f} ms"


def json_text(value: Any) -> str:
    """Return JSON on one line."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


def ecc_words(state: Mapping[str, Any]) -> str:
    """Return an ECC state and how it is known."""
    if state["origin"] == "N/A":
        return "there is none"
    words = {True: "on", False: "OFF", None: DASH}[state["on"]]
    origin = {"config": "stated by the submitter", "detected": "read from the hardware"}
    return f"{words} ({origin.get(state['origin'], state['origin'])})"


def render(template: str, **context: Any) -> str:
    """Return a text of the submission.

    Args:
        template: file name below resources/templates.
        context: what the template needs; a missing name is an error.
    """
    import jinja2

    environment = jinja2.Environment(  # noqa: S701 (Markdown, not HTML)
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    filters = {"number": number, "ms": milliseconds, "json": json_text, "ecc": ecc_words}
    environment.filters.update(filters)
    return environment.get_template(template).render(**context)


def calibration_document(
    submission: Mapping[str, Any], model: Record, checkpoint: Record, calibration: Record | None
) -> str:
    """Return documentation/calibration.md."""
    return render(
        "calibration.md.j2",
        submission=submission,
        model=model.result,
        weights=starting_weights(model),
        checkpoint=checkpoint.result,
        checkpoint_digest=checkpoint.digest,
        quantization=checkpoint.spec["settings"]["quantization"],
        kinds=tensor_kinds(checkpoint),
        calibration=calibration.result if calibration else None,
        calibration_digest=calibration.digest if calibration else None,
        tools={**checkpoint.data.get("tools", {}), **checkpoint.result.get("versions", {})},
        command=command_line(checkpoint),
        calibration_command=command_line(calibration) if calibration else None,
    )


def architecture_document(
    submission: Mapping[str, Any],
    system: Record,
    described: tuple[Mapping[str, Any], Mapping[str, str]],
    runs: Mapping[str, Record],
    ingress: Mapping[str, int],
) -> str:
    """Return documentation/system_architecture.md.

    Args:
        submission: the config section.
        system: record of the system description.
        described: content of the systems JSON, and where each field comes from.
        runs: performance runs by scenario.
        ingress: tokens_per_sample and bytes_per_token of the rules.
    """
    fields, origins = described
    return render(
        "system_architecture.md.j2",
        submission=submission,
        system=system.result,
        fields=fields,
        origins=origins,
        data_path=system.result.get("network_data_path") or LOOPBACK,
        rows=ingress_rows(runs, **ingress),
        ingress=ingress,
        capacity=nic_capacity_gbit(fields),
    )


def scenario_document(
    submission: Mapping[str, Any],
    scenario: str,
    records: Mapping[str, Record],
) -> str:
    """Return README.md of one scenario.

    Args:
        submission: the config section.
        scenario: its name.
        records: performance, accuracy and scores.
    """
    performance, accuracy = records["performance"], records["accuracy"]
    return render(
        "scenario_readme.md.j2",
        submission=submission,
        scenario=scenario,
        run=performance.result,
        accuracy_run=accuracy.result,
        scores=records["scores"].result,
        engine=performance.spec["settings"]["engine"],
        harness=performance.spec["settings"]["harness"],
        commands=[command_line(record) for record in records.values()],
    )


def source_document(
    submission: Mapping[str, Any], products: Mapping[str, Record], revision: Mapping[str, Any]
) -> str:
    """Return README.md of src/: how every product was made, from which revision."""
    rows = [
        {
            "name": name,
            "rule": record.data["rule"],
            "code": record.spec["code"],
            "digest": record.digest,
            "command": command_line(record),
        }
        for name, record in products.items()
    ]
    tools: dict[str, str] = {}
    for record in products.values():
        tools |= record.data.get("tools", {})
    return render(
        "src_readme.md.j2", submission=submission, rows=rows, tools=tools, revision=revision
    )
