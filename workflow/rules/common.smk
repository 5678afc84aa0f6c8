"""Wires the configuration to the package; all logic is in workflow/scripts/fp8flow."""

import os
import re
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
from fp8flow.pipeline import Pipeline
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


def accelerators(wildcards):
    """Return how many accelerators the variant's server uses."""
    return (
        0
        if PIPELINE.variants[wildcards.variant].engine.backend == "transformers"
        else 1
    )


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
    workflow.global_resources["gpu"] = Resource("gpu", 1)

if workflow.is_main_process:
    force_stale_products()
