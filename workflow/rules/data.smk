"""The model in its original precision, and the two data sets."""


rule fetch_model:
    """Bring the model folder together and check it."""
    input:
        PIPELINE.source_files("model"),
    output:
        "<results>/model/manifest.json",
    log:
        "<results>/logs/fetch_model.log",
    conda:
        environment()
    resources:
        program=program("fetch_model"),
    params:
        spec=spec_of("fetch_model"),
    shell:
        "python {resources.program:q} --spec {params.spec:q}"
        " --output {output:q} --log {log:q}"


rule prepare_dataset:
    """Make the prompts of the evaluation set and their token ids."""
    input:
        PIPELINE.source_files("dataset"),
        model="<results>/model/manifest.json",
    output:
        "<results>/data/validation/manifest.json",
    log:
        "<results>/logs/prepare_dataset.log",
    conda:
        environment()
    resources:
        program=program("prepare_dataset"),
    params:
        spec=spec_of("prepare_dataset"),
    shell:
        "python {resources.program:q} --spec {params.spec:q}"
        " --model {input.model:q} --output {output:q} --log {log:q}"


rule prepare_calibration:
    """Take the calibration rows in list order and tokenize them."""
    input:
        PIPELINE.source_files("calibration"),
        model="<results>/model/manifest.json",
    output:
        "<results>/data/calibration/manifest.json",
    log:
        "<results>/logs/prepare_calibration.log",
    conda:
        environment()
    resources:
        program=program("prepare_calibration"),
    params:
        spec=spec_of("prepare_calibration"),
    shell:
        "python {resources.program:q} --spec {params.spec:q}"
        " --model {input.model:q} --output {output:q} --log {log:q}"
