"""The report."""


rule render_report:
    """Render the self-contained HTML report."""
    input:
        model="<results>/model/manifest.json",
        dataset="<results>/data/validation/manifest.json",
        calibration=calibration_of_submission,
        checkpoint=expand(
            "<results>/{variant}/checkpoint/manifest.json", variant=SUBMITTED
        ),
        runs=measured("performance/run.json"),
        accuracy_runs=measured("accuracy/run.json"),
        accuracies=measured("accuracy/accuracy.json"),
        verdict="<results>/submission/verdict.json",
        templates=templates("report"),
    output:
        "<results>/report/manifest.json",
    log:
        "<results>/logs/render_report.log",
    conda:
        environment()
    resources:
        program=program("render_report"),
    params:
        spec=spec_of("render_report"),
    shell:
        "python {resources.program:q} --spec {params.spec:q}"
        " --model {input.model:q} --dataset {input.dataset:q}"
        " --calibration {input.calibration:q} --checkpoint {input.checkpoint:q}"
        " --runs {input.runs:q} {input.accuracy_runs:q} --accuracies {input.accuracies:q}"
        " --verdict {input.verdict:q} --output {output:q} --log {log:q}"
