"""Output tokens/s of vLLM without HTTP, LoadGen or our client, on the same work and settings.

The ratio of a run over HTTP (tests/bench/bench_engines.py) to this is what serving costs. Takes
checkpoint and prompts that the workflow has made, and the engine's settings of one variant.

Run: bench_vllm_in_process.py --configfile config/h200-synthetic.yaml --variant fp8
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "workflow" / "scripts"))

from fp8flow.backends import Place, get_backend  # noqa: E402
from fp8flow.config_file import load_config  # noqa: E402
from fp8flow.workload import read_workload  # noqa: E402

SERVER_ONLY = {"--host": 1, "--port": 1, "--api-server-count": 1, "--disable-uvicorn-access-log": 0}


def engine_arguments(command: list[str]) -> list[str]:
    """Return what of ``vllm serve MODEL ...`` is the engine's and not the HTTP server's."""
    kept = ["--model", command[2]]
    rest = iter(command[3:])
    for argument in rest:
        if argument in SERVER_ONLY:
            for _ in range(SERVER_ONLY[argument]):
                next(rest)
        else:
            kept.append(argument)
    return kept


def make_engine(command: list[str]) -> Any:
    """Return vLLM's offline engine with the settings of a server's command line."""
    import dataclasses

    from vllm import LLM
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    given = EngineArgs.from_cli_args(parser.parse_args(engine_arguments(command)))
    default = EngineArgs()
    names = [field.name for field in dataclasses.fields(EngineArgs)]
    changed = {n: getattr(given, n) for n in names if getattr(given, n) != getattr(default, n)}
    return LLM(**changed)


def main() -> None:
    """Measure once and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--configfile", type=Path, nargs="+", required=True)
    parser.add_argument("--variant", required=True)
    arguments = parser.parse_args()
    loaded = load_config(arguments.configfile)
    variant, results = loaded.variants[arguments.variant], Path(loaded.config.run.results)
    name = loaded.config.model.name
    workload = read_workload(
        results / arguments.variant / "checkpoint" / "manifest.json",
        results / "data" / "validation" / "manifest.json",
        name,
    )
    engine = variant.engine.model_dump(mode="json")
    place = Place("127.0.0.1", 0, name, 1, results)
    backend = get_backend(engine["backend"])
    os.environ |= backend.serve_environment(engine, 1)
    prompts = [{"prompt_token_ids": ids.tolist()} for ids in workload.prompts]
    started = time.perf_counter()
    llm = make_engine(backend.serve_command(engine, workload.served, place))
    start_s = time.perf_counter() - started
    from vllm import SamplingParams

    tokens = loaded.config.harness.max_output_tokens
    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    llm.generate(prompts[:64], sampling, use_tqdm=False)
    started = time.perf_counter()
    answers = llm.generate(prompts, sampling, use_tqdm=False)
    elapsed_s = time.perf_counter() - started
    made = sum(len(answer.outputs[0].token_ids) for answer in answers)
    figures = {
        "variant": arguments.variant,
        "samples": len(prompts),
        "output_tokens_per_s": round(made / elapsed_s, 1),
        "samples_per_s": round(len(prompts) / elapsed_s, 2),
        "duration_s": round(elapsed_s, 1),
        "start_s": round(start_s, 1),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
