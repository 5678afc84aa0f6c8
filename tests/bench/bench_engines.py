"""Speed of the variants of a configuration on this machine, through the workflow's own rules.

Prepares what the runs need, then measures in the order given, each time on a fresh server, and
prints one Markdown row per run: rates, latencies, GPU power and clocks. Runs of one variant are
repeated by naming it again, so that two settings can alternate (A B A B). What is measured, and
with which settings, is the configuration's; later files win.

Run: python tests/bench/bench_engines.py --configfile config/h200-synthetic.yaml \
       --runs fp8:Offline fp8-engine-defaults:Offline fp8:Offline fp8-engine-defaults:Offline \
       --output bench.json
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "workflow" / "scripts"))

from fp8flow.config_file import load_config  # noqa: E402

COLUMNS = (
    "run", "tokens/s", "samples/s", "samples", "duration s", "TTFT p99 ms", "TPOT p99 ms",
    "start s", "client cores", "power W", "SM MHz", "GPU memory GiB",
)  # fmt: skip


class GpuSampler:
    """Samples power, SM clock and memory of the first GPU once a second; empty without a GPU."""

    def __init__(self) -> None:
        self._samples: list[tuple[float, float, float, float]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> GpuSampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        try:
            import pynvml

            pynvml.nvmlInit()
            handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        except Exception:  # no GPU: the columns stay empty
            return
        while not self._stop.wait(1.0):
            self._samples.append(
                (
                    time.time(),
                    pynvml.nvmlDeviceGetPowerUsage(handle) / 1000,
                    float(pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)),
                    pynvml.nvmlDeviceGetMemoryInfo(handle).used / 2**30,
                )
            )

    def busy(self) -> dict[str, float] | None:
        """Return means over the busy seconds: those above half of the highest power."""
        if not self._samples:
            return None
        highest = max(power for _, power, _, _ in self._samples)
        busy = [sample for sample in self._samples if sample[1] > highest / 2]
        return {
            "power_w": round(statistics.fmean(s[1] for s in busy), 1),
            "sm_mhz": round(statistics.fmean(s[2] for s in busy), 0),
            "memory_gib": round(max(s[3] for s in self._samples), 1),
            "seconds": len(busy),
        }


def snakemake(configfiles: list[Path], targets: list[str]) -> float:
    """Run targets; return the wall time, seconds."""
    started = time.monotonic()
    command = [sys.executable, "-m", "snakemake", *targets, "--cores", "all", "--quiet", "progress"]
    command += ["--configfile", *(str(path.resolve()) for path in configfiles)]
    subprocess.run(command, cwd=ROOT, check=True)
    return time.monotonic() - started


def measure(configfiles: list[Path], results: Path, name: str, copy: Path) -> dict[str, Any]:
    """Measure VARIANT:SCENARIO on a fresh server and keep its record; earlier attempts stay."""
    variant, scenario = name.split(":")
    record = results / variant / scenario / "performance" / "run.json"
    record.unlink(missing_ok=True)
    with GpuSampler() as sampler:
        wall_s = snakemake(configfiles, [str(record)])
    shutil.copy2(record, copy)
    result = json.loads(record.read_text())["result"]
    return {
        "variant": variant, "scenario": scenario, "wall_s": round(wall_s, 1), "gpu": sampler.busy(),
        "result": {key: result[key] for key in result if key != "server"},
        "server": {key: result["server"].get(key) for key in ("startup_s", "settings", "argv")},
    }  # fmt: skip


def _ms(stats: dict[str, Any] | None) -> str:
    return "" if not stats else f"{stats['p99'] / 1e6:.1f}"


def row(run: dict[str, Any]) -> str:
    """Return the Markdown row of one run."""
    result, gpu = run["result"], run["gpu"] or {}
    rates, latency = result["throughput"], result["latency_ns"]
    client = result["client"]
    cells = [
        f"{run['variant']} {run['scenario']}", f"{rates['output_tokens_per_s']:.1f}",
        f"{rates['samples_per_s']:.2f}", result["counts"]["completed"],
        f"{result['duration_s']:.1f}", _ms(latency["ttft"]), _ms(latency["tpot"]),
        run["server"]["startup_s"], f"{client['cpu_s'] / client['wall_s']:.2f}",
        gpu.get("power_w", ""), gpu.get("sm_mhz", ""), gpu.get("memory_gib", ""),
    ]  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    """Measure, print a table as it grows, and write everything as JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--configfile", type=Path, nargs="+", required=True)
    parser.add_argument("--runs", nargs="+", required=True, help="VARIANT:SCENARIO, in order")
    parser.add_argument("--output", type=Path, required=True, help="JSON file with all runs")
    arguments = parser.parse_args()
    config = load_config(arguments.configfile).config
    results = Path(config.run.results)
    runs: list[dict[str, Any]] = []
    for number, name in enumerate(arguments.runs):
        copy = arguments.output.with_name(f"run-{number}.json")
        runs.append(measure(arguments.configfile, results, name, copy))
        arguments.output.write_text(json.dumps(runs, indent=1) + "\n")
        if number == 0:
            print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}", flush=True)
        print(row(runs[-1]), flush=True)


if __name__ == "__main__":
    main()
