"""The checkpoint that is served."""


rule quantize:
    """Calibrate and export the checkpoint with ModelOpt."""
    input:
        model="<results>/model/manifest.json",
        calibration=calibration_of,
    output:
        "<results>/{variant}/checkpoint/manifest.json",
    log:
        "<results>/logs/{variant}/quantize.log",
    conda:
        "../../envs/fp8flow.yaml"
    threads: CORES
    resources:
        program=program("quantize"),
        gpu=1,
    params:
        spec=spec_of("quantize"),
    shell:
        "python {resources.program:q} --spec {params.spec:q}"
        " --model {input.model:q} --calibration {input.calibration:q} --output {output:q} --log {log:q}"
