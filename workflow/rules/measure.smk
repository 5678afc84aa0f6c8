"""Servers and what is measured against them. Each job owns its server from start to end."""


rule probe_server:
    """Start a server once: real tokens, settings read back, proof that prefix reuse is off."""
    input:
        checkpoint="<results>/{variant}/checkpoint/manifest.json",
        dataset="<results>/data/validation/manifest.json",
        engine=engine_of,
    output:
        "<results>/{variant}/server/probe.json",
    log:
        "<results>/logs/{variant}/probe_server.log",
    # Before the long runs, yet not an input of them: a repeated probe repeats no measurement.
    # (An ancient() input would hide the runs' own changes whenever the probe reruns.)
    priority: 10
    conda:
        environment()
    threads: CORES
    resources:
        program=program("probe_server"),
        gpu=accelerators,
        launcher=engine_launcher,
        ready_timeout_s=600,
        stop_grace_s=20,
    params:
        spec=spec_of("probe_server"),
    shell:
        "python {resources.program:q} --spec {params.spec:q}"
        " --checkpoint {input.checkpoint:q} --dataset {input.dataset:q}"
        " --engine {input.engine:q} --launcher {resources.launcher:q}"
        " --threads {threads} --ready-timeout-s {resources.ready_timeout_s}"
        " --stop-grace-s {resources.stop_grace_s} --output {output:q} --log {log:q}"


rule run_performance:
    """Measure throughput and latency of one scenario."""
    input:
        checkpoint="<results>/{variant}/checkpoint/manifest.json",
        dataset="<results>/data/validation/manifest.json",
        engine=engine_of,
    output:
        "<results>/{variant}/{scenario}/performance/run.json",
    log:
        "<results>/logs/{variant}/{scenario}/run_performance.log",
    conda:
        environment()
    threads: CORES
    resources:
        program=program("run_performance"),
        gpu=accelerators,
        launcher=engine_launcher,
        ready_timeout_s=600,
        stop_grace_s=20,
    params:
        spec=spec_of("run_performance"),
    shell:
        "python {resources.program:q} --spec {params.spec:q}"
        " --checkpoint {input.checkpoint:q} --dataset {input.dataset:q}"
        " --engine {input.engine:q} --launcher {resources.launcher:q}"
        " --threads {threads} --ready-timeout-s {resources.ready_timeout_s}"
        " --stop-grace-s {resources.stop_grace_s} --output {output:q} --log {log:q}"


rule run_accuracy:
    """Collect the answers to every sample of one scenario."""
    input:
        checkpoint="<results>/{variant}/checkpoint/manifest.json",
        dataset="<results>/data/validation/manifest.json",
        engine=engine_of,
    output:
        "<results>/{variant}/{scenario}/accuracy/run.json",
    log:
        "<results>/logs/{variant}/{scenario}/run_accuracy.log",
    conda:
        environment()
    threads: CORES
    resources:
        program=program("run_accuracy"),
        gpu=accelerators,
        launcher=engine_launcher,
        ready_timeout_s=600,
        stop_grace_s=20,
    params:
        spec=spec_of("run_accuracy"),
    shell:
        "python {resources.program:q} --spec {params.spec:q}"
        " --checkpoint {input.checkpoint:q} --dataset {input.dataset:q}"
        " --engine {input.engine:q} --launcher {resources.launcher:q}"
        " --threads {threads} --ready-timeout-s {resources.ready_timeout_s}"
        " --stop-grace-s {resources.stop_grace_s} --output {output:q} --log {log:q}"


rule score_accuracy:
    """Score the answers of one accuracy run with ROUGE."""
    input:
        run="<results>/{variant}/{scenario}/accuracy/run.json",
        dataset="<results>/data/validation/manifest.json",
        model="<results>/model/manifest.json",
    output:
        "<results>/{variant}/{scenario}/accuracy/accuracy.json",
    log:
        "<results>/logs/{variant}/{scenario}/score_accuracy.log",
    conda:
        environment()
    threads: CORES
    resources:
        program=program("score_accuracy"),
    params:
        spec=spec_of("score_accuracy"),
    shell:
        "python {resources.program:q} --spec {params.spec:q} --run {input.run:q}"
        " --dataset {input.dataset:q} --model {input.model:q}"
        " --output {output:q} --log {log:q}"
