"""fp8flow: from a model and two data sets to a checked MLPerf Inference submission."""

from snakemake.utils import min_version

min_version("9.20")


include: "workflow/rules/common.smk"


rule all:
    """The report and the validated submission (default)."""
    default_target: True
    input:
        expand("<results>/{variant}/server/probe.json", variant=VARIANTS),
        "<results>/submission/verdict.json",
        "<results>/report/manifest.json",


rule checkpoint:
    """The quantized checkpoint of every variant."""
    input:
        expand("<results>/{variant}/checkpoint/manifest.json", variant=VARIANTS),


rule engine:
    """The TensorRT engine of every variant that is served from one."""
    input:
        expand("<results>/{variant}/engine/manifest.json", variant=BUILT),


rule probe:
    """A server that starts, answers, and proves that prefix reuse is off, for every variant."""
    input:
        expand("<results>/{variant}/server/probe.json", variant=VARIANTS),


rule performance:
    """The performance run of every variant and scenario."""
    input:
        measured("performance/run.json"),


rule accuracy:
    """The scored accuracy run of every variant and scenario."""
    input:
        measured("accuracy/accuracy.json"),


rule submission:
    """The submission tree and its verdict."""
    input:
        "<results>/submission/verdict.json",


rule report:
    """The HTML report."""
    input:
        "<results>/report/manifest.json",


include: "workflow/rules/data.smk"
include: "workflow/rules/quantize.smk"
include: "workflow/rules/measure.smk"
include: "workflow/rules/submission.smk"
include: "workflow/rules/report.smk"
