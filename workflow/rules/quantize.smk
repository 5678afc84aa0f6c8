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
    params:
        spec=spec_of("quantize"),
    threads: CORES
    resources:
        gpu=1,
    shell:
        "{PYTHON:q} {SCRIPTS:q}/quantize.py --spec {params.spec:q}"
        " --model {input.model:q} --calibration {input.calibration:q} --output {output:q} --log {log:q}"
