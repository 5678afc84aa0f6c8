"""The checkpoint that is served, and the engine that is built from it."""


rule quantize:
    """Calibrate and export the checkpoint with ModelOpt."""
    input:
        model="<results>/model/manifest.json",
        calibration=calibration_of,
        given=given_checkpoint,
    output:
        "<results>/{variant}/checkpoint/manifest.json",
    log:
        "<results>/logs/{variant}/quantize.log",
    conda:
        environment()
    threads: CORES
    resources:
        program=program("quantize"),
        gpu=1,
        launcher=quantize_launcher,
    params:
        spec=spec_of("quantize"),
    shell:
        "{resources.launcher} python {resources.program:q} --spec {params.spec:q}"
        " --model {input.model:q} --calibration {input.calibration:q} --output {output:q} --log {log:q}"


rule build_engine:
    """Build the TensorRT engine with trtllm-build."""
    input:
        checkpoint="<results>/{variant}/checkpoint/manifest.json",
    output:
        "<results>/{variant}/engine/manifest.json",
    log:
        "<results>/logs/{variant}/build_engine.log",
    conda:
        environment()
    threads: CORES
    resources:
        program=program("build_engine"),
        gpu=accelerators,
        launcher=engine_launcher,
    params:
        spec=spec_of("build_engine"),
    shell:
        "python {resources.program:q} --spec {params.spec:q} --checkpoint {input.checkpoint:q}"
        " --launcher {resources.launcher:q} --output {output:q} --log {log:q}"
