"""Score an accuracy run: ROUGE and output length as the MLPerf reference computes them.

Writes accuracy.json, and beside it accuracy.txt (the line that the reference prints) and
accuracy_samples.parquet (one row per sample).
"""

import argparse
import sys
import time
from pathlib import Path

from fp8flow.cli import script_main
from fp8flow.dataset import SAMPLES, read_column
from fp8flow.errors import FlowError
from fp8flow.log import get_logger
from fp8flow.records import Record, atomic_write_text, verify_record, write_record
from fp8flow.scoring import (
    ACCURACY_LOG,
    OUTPUTS,
    accuracy_text,
    compare_with_client,
    read_run,
    score_all,
    summarize,
    write_sample_scores,
)
from fp8flow.spec import Spec

TEXT, PER_SAMPLE = "accuracy.txt", "accuracy_samples.parquet"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.add_argument("--run", type=Path, required=True, help="run.json of the accuracy run")
    parser.add_argument(
        "--dataset", type=Path, required=True, help="manifest of the evaluation set"
    )
    parser.add_argument("--model", type=Path, required=True, help="manifest of the model")
    parser.add_argument("--output", type=Path, required=True, help="accuracy.json to write")
    parser.add_argument(
        "--processes", type=int, help="number of processes (default: from cores and samples)"
    )


def attempt_folder(run: Record) -> Path:
    """Return the folder with the raw files of a run.

    Raises:
        FlowError: if the record is not one of an accuracy run.
    """
    mode, attempt = run.result.get("mode"), run.result.get("attempt")
    if mode != "accuracy" or attempt is None:
        raise FlowError(f"{run.path} is not the record of an accuracy run (mode {mode!r})")
    return run.root / "attempts" / str(attempt)


def run(args: argparse.Namespace, spec: Spec) -> None:
    """Score one run."""
    started = time.time()
    records = {
        "run": verify_record(args.run),
        "dataset": verify_record(args.dataset),
        "model": verify_record(args.model),
    }
    folder, model = attempt_folder(records["run"]), records["model"]
    references = list(read_column(records["dataset"].root / SAMPLES, "reference"))
    run_result = records["run"].result
    responses, problems = read_run(folder / ACCURACY_LOG, len(references), run_result)
    scores = score_all(
        responses.token_ids,
        references,
        model.root,
        trust_remote_code=model.spec["settings"].get("model", {}).get("trust_remote_code", False),
        processes=args.processes,
    )
    result = {
        "scenario": run_result.get("scenario"),
        "harness": run_result.get("harness"),
        **summarize(responses, scores, len(references), problems),
        "client_check": compare_with_client(folder / OUTPUTS, responses, scores),
    }
    write_sample_scores(args.output.parent / PER_SAMPLE, responses, scores, len(references))
    text = accuracy_text(result)
    atomic_write_text(args.output.parent / TEXT, text)
    get_logger("fp8flow.score_accuracy").info("%s: %s", result["state"], text.strip())
    write_record(
        args.output, spec, result, inputs=records, files=[TEXT, PER_SAMPLE], started=started
    )


if __name__ == "__main__":
    sys.exit(script_main(__doc__, add_arguments, run))
