"""Wires the configuration to the package; all logic is in workflow/scripts/fp8flow."""

import os
import re
import shlex
import sys
from pathlib import Path

from snakemake.exceptions import WorkflowError
from snakemake.logging import logger
from snakemake.resources import Resource

# Relative where possible: commands are short, and a moved checkout is no reason to rerun.
CHECKOUT = Path(os.path.relpath(workflow.basedir))
SCRIPTS = CHECKOUT / "workflow" / "scripts"
if str(SCRIPTS.resolve()) not in sys.path:
    sys.path.insert(0, str(SCRIPTS.resolve()))

from fp8flow.config_file import load_config
from fp8flow.errors import FlowError
from fp8flow.launch import environment_file, launcher
from fp8flow.pipeline import Pipeline, given_files
from fp8flow.tools import prefer_own_interpreter

prefer_own_interpreter()

CORES = workflow.cores or 1


def load_pipeline():
    """Check the configuration; a given --configfile replaces config/config.yaml."""
    given = [Path(path) for path in workflow.configfiles]
    try:
        if given:
            return Pipeline(
                load_config(given, workflow.config_settings.config), CHECKOUT
            )
        default = CHECKOUT / "config" / "config.yaml"
        return Pipeline(load_config([default], config), CHECKOUT)
    except FlowError as error:
        raise WorkflowError(str(error)) from None


PIPELINE = load_pipeline()
VARIANTS = list(PIPELINE.variants)
BUILT = [name for name, it in PIPELINE.variants.items() if it.builds_engine]
SCENARIOS = list(PIPELINE.scenarios)
SUBMITTED = PIPELINE.config.submission.variant


pathvars:
    results=str(PIPELINE.results),


wildcard_constraints:
    variant="|".join(map(re.escape, VARIANTS)),
    scenario="|".join(SCENARIOS),


def spec_of(rule):
    """Return the params function that gives the identity of a rule's product."""

    def spec(wildcards):
        variant = getattr(wildcards, "variant", None)
        scenario = getattr(wildcards, "scenario", None)
        return PIPELINE.find(rule, variant, scenario).spec.canonical()

    return spec


def program(name):
    """Return the path of a rule's program. As a resource it is no reason to rerun."""
    return str(SCRIPTS / f"{name}.py")


def measured(record, variants=None):
    """Return one record per variant and scenario."""
    return expand(
        "<results>/{variant}/{scenario}/{record}",
        variant=variants or VARIANTS,
        scenario=SCENARIOS,
        record=record,
    )


def calibration_of(wildcards):
    """Return the calibration set if the variant is quantized."""
    product = PIPELINE.find("quantize", wildcards.variant)
    return product.needs.get("calibration", [])


def calibration_of_submission(wildcards):
    """Return the calibration set if the submitted variant is quantized."""
    return PIPELINE.find("quantize", SUBMITTED).needs.get("calibration", [])


def templates(folder):
    """Return the template files below resources/."""
    return sorted(map(str, (CHECKOUT / "resources" / folder).glob("*")))


def limits_file():
    """Return the rules of the round, as data."""
    return str(
        CHECKOUT / "resources" / "mlperf" / f"{PIPELINE.config.submission.round}.yaml"
    )


def engine_of(wildcards):
    """Return the TensorRT engine if the variant is served from one."""
    return PIPELINE.find("probe_server", wildcards.variant).needs.get("engine", [])


def given_checkpoint(wildcards):
    """Return the files of a ready checkpoint that the variant takes."""
    return given_files(PIPELINE.variants[wildcards.variant])


def accelerators(wildcards):
    """Return how many GPUs the wildcards' variant uses."""
    return PIPELINE.variants[wildcards.variant].gpus


def engine_launcher(wildcards):
    """Return what comes before the engine's commands: nothing, or a container."""
    engine = PIPELINE.variants[wildcards.variant].engine
    methods = {
        method.name.lower() for method in workflow.deployment_settings.deployment_method
    }
    try:
        return shlex.join(
            launcher(engine.backend, getattr(engine, "version", ""), methods, CHECKOUT)
        )
    except FlowError as error:
        raise WorkflowError(str(error)) from None


def quantize_launcher(wildcards):
    """Return the container of the engine if its ModelOpt quantizes."""
    stack = PIPELINE.variants[wildcards.variant].quantization.stack
    return engine_launcher(wildcards) if stack == "engine" else ""


def environment():
    """Return the conda environment of the jobs; none if run.lock is the user's own."""
    path = environment_file(PIPELINE.config.run.lock, CHECKOUT)
    return None if path is None else str(path.resolve())


def force_stale_products():
    """Rerun products whose record differs from the configuration, whatever Snakemake remembers.

    Snakemake compares a job with its own notes, which are lost when it is killed; the record
    beside the product is not. The plan is hooked before it is made, for there is no public way.
    """
    stale = {item.product.record: item for item in PIPELINE.stale(Path.cwd())}
    build_dag = workflow._build_dag

    def build():
        workflow.dag.forcefiles.update(stale)
        build_dag()
        outputs = {
            str(file) for job in workflow.dag.needrun_jobs() for file in job.output
        }
        for record in sorted(outputs & stale.keys()):
            item = stale[record]
            logger.info(f"rerun {item.product.title}: {'; '.join(item.reasons)}")

    workflow._build_dag = build


# Undeclared resources are unlimited: without this two measurements could share one accelerator.
if "gpu" not in workflow.global_resources:
    most = max(1, *(variant.gpus for variant in PIPELINE.variants.values()))
    workflow.global_resources["gpu"] = Resource("gpu", most)

if workflow.is_main_process:
    for warning in PIPELINE.warnings:
        logger.warning(warning)
    force_stale_products()
