"""Ceiling of LoadGen with our HTTP client on one core, against a server that costs next to nothing.

The server is a busy process on another core. Like a GPU engine it works in steps: in each, every
running request gets a token, and a request's events hold one or several tokens (``--intervals``).
Its events are made beforehand, in vLLM's form, and leave one after the other, as from a server
whose front end needs some time for each (``--event-us``). It notes when each request came and when
its first token left; what the client measured (from the issue by LoadGen) differs by its error.

At 128 tokens an event the client has next to nothing to do: that row is the floor, what
LoadGen, the connections and pauses of the machine add.

Prints output tokens/s, QPS and the p99 error of TTFT, as ratios to what is asked for, for LoadGen's
Server scenario at several rates and for Offline, where the server does not wait between steps.
Run: python tests/bench/bench_client.py [--rates 100 200 300] [--repeats 3]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "workflow" / "scripts"
TOKENS = 128
PROMPT_TOKENS = 870
ASKED_TOKENS_PER_S = 24_000
ASKED_QPS = 190
ASKED_ERROR_MS = 5.0
_HEAD = (
    b"HTTP/1.1 200 OK\r\nserver: bench\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_FIRST_ID = re.compile(rb'"prompt":\[(\d+)')


# The server ---------------------------------------------------------------------------------------


def _chunk(payload: object) -> bytes:
    text = payload if isinstance(payload, str) else json.dumps(payload, separators=(",", ":"))
    data = f"data: {text}\n\n".encode()
    return b"%x\r\n%b\r\n" % (len(data), data)


def _events(interval: int) -> list[bytes]:
    """Return what is written at each step of a request; the first token always comes alone."""
    base = {"id": "cmpl-0123456789abcdef", "object": "text_completion", "created": 1_700_000_000}
    base["model"] = "fake"
    found, pending = [], 0
    for step in range(TOKENS):
        pending += 1
        last = step == TOKENS - 1
        if not (step == 0 or last or pending >= interval):
            found.append(b"")
            continue
        ids = [1000 + (step - pending + 1 + i) for i in range(pending)]
        choice: dict[str, Any] = {"index": 0, "text": "".join(f" w{i}" for i in ids)}
        choice |= {"logprobs": None, "finish_reason": "length" if last else None}
        choice |= {"stop_reason": None, "token_ids": ids}
        choice["prompt_token_ids"] = None if step else list(range(PROMPT_TOKENS))
        found.append(_chunk(base | {"choices": [choice]}))
        pending = 0
    usage = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": TOKENS}
    found[0] = _HEAD + found[0]
    found[-1] += _chunk(base | {"choices": [], "usage": usage}) + _chunk("[DONE]") + b"0\r\n\r\n"
    return found


class _Connection:
    """One connection, and where its request is."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self.data = b""
        self.step = 0
        self.key = -1

    def read(self) -> bool | None:
        """Take what came; True if that completes a request, None at the end."""
        try:
            data = self.sock.recv(1 << 18)
        except OSError:
            data = b""
        if not data:
            return None
        self.data += data
        end = self.data.find(b"\r\n\r\n") + 4
        if end < 4 or not (found := _LENGTH.search(self.data, 0, end)):
            return False
        if len(self.data) - end < int(found[1]):
            return False
        match = _FIRST_ID.search(self.data, end)
        assert match is not None
        self.step, self.key, self.data = 0, int(match[1]), b""
        return True


class _Engine:
    """Runs steps and takes requests meanwhile, in one busy thread: sleeping is too coarse."""

    def __init__(self, interval: int, step_ms: float, event_us: float) -> None:
        self.events = _events(interval)
        self.step_s, self.event_s = step_ms / 1e3, event_us / 1e6
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
        self.listener.setblocking(False)
        self.poll = select.epoll()
        self.poll.register(self.listener, select.EPOLLIN)
        self.connections: dict[int, _Connection] = {}
        self.running: dict[_Connection, None] = {}
        self.arrived_ns: dict[int, int] = {}
        self.first_ns: dict[int, int] = {}

    def work(self, stopped: Callable[[], bool]) -> None:
        """Serve until told to stop."""
        begin = time.perf_counter()
        while not stopped():
            due = begin
            for connection in list(self.running):
                self._take_requests()
                while time.perf_counter() < due:
                    self._take_requests()
                due += self._advance(connection)
            self._take_requests()
            while time.perf_counter() < begin + self.step_s:
                self._take_requests()
            begin = max(begin + self.step_s, time.perf_counter() - 1e-3)

    def _take_requests(self) -> None:
        for number, _ in self.poll.poll(0, 4):
            if number == self.listener.fileno():
                connection = _Connection(self.listener.accept()[0])
                self.connections[connection.sock.fileno()] = connection
                self.poll.register(connection.sock, select.EPOLLIN)
                continue
            connection = self.connections[number]
            complete = connection.read()
            if complete:
                self.arrived_ns[connection.key] = time.perf_counter_ns()
                self.running[connection] = None
            elif complete is None:
                self.poll.unregister(number)
                self.running.pop(connection, None)
                self.connections.pop(number).sock.close()

    def _advance(self, connection: _Connection) -> float:
        """Do one step of a request; return the time that its event takes, s."""
        step, connection.step = connection.step, connection.step + 1
        if step == TOKENS - 1:
            self.running.pop(connection, None)
        if not self.events[step]:
            return 0.0
        if step == 0:
            self.first_ns[connection.key] = time.perf_counter_ns()
        try:
            connection.sock.sendall(self.events[step])
        except OSError as error:  # a client that does not read would hold up everybody else
            raise SystemExit(f"the client does not take its data: {error}") from error
        return self.event_s


def _serve(interval: int, step_ms: float, event_us: float, record: Path) -> None:
    ended: list[int] = []
    signal.signal(signal.SIGTERM, lambda signum, _: ended.append(signum))
    engine = _Engine(interval, step_ms, event_us)
    print(engine.listener.getsockname()[1], flush=True)
    engine.work(lambda: bool(ended))
    times = {key: [ns, engine.first_ns.get(key)] for key, ns in engine.arrived_ns.items()}
    record.write_text(json.dumps(times))


@contextmanager
def _server(folder: Path, pace: tuple[int, float, float], core: int) -> Iterator[str]:
    command = [sys.executable, __file__, "--serve", *map(str, pace)]
    command.append(str(folder / "server.json"))
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    os.sched_setaffinity(process.pid, {core})
    assert process.stdout is not None
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.terminate()
        process.wait(30)
        process.stdout.close()


# The measurement ----------------------------------------------------------------------------------


@dataclass
class Figures:
    """What one run reached; times in ms."""

    tokens_per_s: float
    qps: float
    error_p50_ms: float
    error_p99_ms: float
    core_share: float


def _dataset(path: Path, rows: int) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    prompts = [[row, *range(1000, 999 + PROMPT_TOKENS)] for row in range(rows)]
    ids = pa.array(prompts, pa.list_(pa.int32()))
    pq.write_table(pa.table({"index": pa.array(range(rows), pa.int64()), "token_ids": ids}), path)


def measure(
    rate: float | None,
    pace: tuple[int, float, float],
    duration_s: float,
    cores: tuple[int, int],
) -> Figures:
    """Run LoadGen once: Server at ``rate``, or Offline for None.

    Args:
        rate: queries/s.
        pace: tokens an event, time of a step (ms), least time between two events (us).
        duration_s: length of the schedule.
        cores: the client's and the server's.
    """
    queries = round((rate or 4 * ASKED_QPS) * duration_s)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _dataset(folder / "samples.parquet", queries)
        with _server(folder, pace if rate else (pace[0], 0.0, 0.0), cores[1]) as url:
            job = {
                "dataset": str(folder / "samples.parquet"),
                "base_urls": [url],
                "model": "fake",
                "scenario": "Server" if rate else "Offline",
                "mode": "performance",
                "target_qps": rate or 1000.0,
                "min_duration_ms": 1,
                "min_queries": queries,
                "max_output_tokens": TOKENS,
                "max_connections": 1024,
                "output_dir": str(folder / "1"),
                "request_fields": {"return_token_ids": True},
            }
            (folder / "job.json").write_text(json.dumps(job))
            command = [sys.executable, str(SCRIPTS / "loadgen_worker.py")]
            worker = subprocess.Popen(
                [*command, "--job", str(folder / "job.json")],
                env=os.environ | {"PYTHONPATH": str(SCRIPTS)},
                stderr=subprocess.PIPE,
                text=True,
            )
            os.sched_setaffinity(worker.pid, {cores[0]})
            _, log = worker.communicate(timeout=600)
        if worker.returncode:
            raise SystemExit(f"the run failed:\n{log}")
        return _figures(folder)


def _figures(folder: Path) -> Figures:
    import numpy as np
    import pyarrow.parquet as pq

    rows = pq.read_table(folder / "1" / "queries.parquet").to_pylist()
    client = json.loads((folder / "1" / "outcome.json").read_text())["client"]
    record = json.loads((folder / "server.json").read_text())
    since = "issued_ns" if client["most_waiting"] == 0 else "sent_ns"
    errors = []
    for row in rows:
        arrived, first = record[str(row["index"])]
        errors.append((row["first_token_ns"] - row[since] - (first - arrived)) / 1e6)
    done = sorted(row["done_ns"] for row in rows)
    begin = 0 if client["most_waiting"] else done[0]
    elapsed_s = (done[-1] - begin) / 1e9
    tokens = sum(row["output_tokens"] for row in rows)
    p50, p99 = np.percentile(np.abs(errors), [50, 99])
    return Figures(
        tokens / elapsed_s, len(rows) / elapsed_s, p50, p99, client["cpu_share_of_one_core"]
    )


def _show(name: str, interval: int, runs: list[Figures]) -> None:
    best = min(runs, key=lambda run: run.error_p99_ms)
    if name == "Offline":
        best = max(runs, key=lambda run: run.tokens_per_s)
    print(
        f"| {name} | {interval} | {best.tokens_per_s:,.0f} | "
        f"{best.tokens_per_s / ASKED_TOKENS_PER_S:.2f} | {best.qps:.0f} | "
        f"{best.qps / ASKED_QPS:.2f} | {best.error_p50_ms:.2f} | {best.error_p99_ms:.2f} | "
        f"{best.error_p99_ms / ASKED_ERROR_MS:.2f} | {best.core_share:.2f} |",
        flush=True,
    )


def main() -> None:
    """Measure and print a Markdown table; the best of the repeats counts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rates", type=float, nargs="*", default=[100.0, 200.0, 300.0])
    parser.add_argument(
        "--intervals", type=int, nargs="*", default=[1, 10, 128], help="tokens an event"
    )
    parser.add_argument("--step-ms", type=float, default=20.0, help="time of one step")
    parser.add_argument(
        "--event-us", type=float, default=25.0, help="least time between two events of the server"
    )
    parser.add_argument("--duration-s", type=float, default=10.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cores", type=int, nargs=2, default=[1, 0], help="client's, server's")
    parser.add_argument("--no-offline", action="store_true")
    arguments = parser.parse_args()
    print("| run | tokens an event | tokens/s | ratio to 24,000 | QPS | ratio to 190 |", end="")
    print(" TTFT error p50, ms | p99, ms | p99, ratio to 5 ms | share of the core |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    cores = (arguments.cores[0], arguments.cores[1])
    pace = (arguments.step_ms, arguments.event_us)
    for interval in arguments.intervals:
        for rate in [*arguments.rates, *([] if arguments.no_offline else [None])]:
            runs = [
                measure(rate, (interval, *pace), arguments.duration_s, cores)
                for _ in range(arguments.repeats)
            ]
            _show(f"Server, {rate:g}/s" if rate else "Offline", interval, runs)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        _serve(int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4]), Path(sys.argv[5]))
    else:
        main()
