"""The submission tree and the independent verdict on it."""


rule describe_system:
    """Describe the system under test from the config and from what is detected."""
    output:
        "<results>/system/system.json",
    log:
        "<results>/logs/describe_system.log",
    conda:
        environment()
    resources:
        program=program("describe_system"),
    params:
        spec=spec_of("describe_system"),
    shell:
        "python {resources.program:q} --spec {params.spec:q}"
        " --output {output:q} --log {log:q}"


rule assemble_submission:
    """Assemble the submission tree with its documents."""
    input:
        model="<results>/model/manifest.json",
        dataset="<results>/data/validation/manifest.json",
        calibration=calibration_of_submission,
        checkpoint=expand(
            "<results>/{variant}/checkpoint/manifest.json", variant=SUBMITTED
        ),
        probe=expand("<results>/{variant}/server/probe.json", variant=SUBMITTED),
        runs=measured("performance/run.json", SUBMITTED),
        accuracy_runs=measured("accuracy/run.json", SUBMITTED),
        accuracies=measured("accuracy/accuracy.json", SUBMITTED),
        system="<results>/system/system.json",
        templates=templates("templates"),
        limits=limits_file(),
    output:
        "<results>/submission/manifest.json",
    log:
        "<results>/logs/assemble_submission.log",
    conda:
        environment()
    resources:
        program=program("assemble_submission"),
    params:
        spec=spec_of("assemble_submission"),
    shell:
        "python {resources.program:q} --spec {params.spec:q}"
        " --model {input.model:q} --dataset {input.dataset:q}"
        " --calibration {input.calibration:q} --checkpoint {input.checkpoint:q}"
        " --probe {input.probe:q} --runs {input.runs:q} {input.accuracy_runs:q}"
        " --accuracies {input.accuracies:q} --system {input.system:q}"
        " --limits {input.limits:q}"
        " --output {output:q} --log {log:q}"


rule validate_submission:
    """Judge the submission by every rule of the round."""
    input:
        submission="<results>/submission/manifest.json",
        runs=measured("performance/run.json", SUBMITTED),
        accuracy_runs=measured("accuracy/run.json", SUBMITTED),
        accuracies=measured("accuracy/accuracy.json", SUBMITTED),
        limits=limits_file(),
    output:
        "<results>/submission/verdict.json",
    log:
        "<results>/logs/validate_submission.log",
    conda:
        environment()
    resources:
        program=program("validate_submission"),
    params:
        spec=spec_of("validate_submission"),
    shell:
        "python {resources.program:q} --spec {params.spec:q}"
        " --submission {input.submission:q} --runs {input.runs:q} {input.accuracy_runs:q}"
        " --accuracies {input.accuracies:q} --limits {input.limits:q}"
        " --output {output:q} --log {log:q}"
