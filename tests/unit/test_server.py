import contextlib
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

import fakeserver
from fp8flow import guard
from fp8flow.errors import FlowError
from fp8flow.ports import choose_ports, port_is_free
from fp8flow.server import (
    GuardedProcess,
    ServerPlan,
    describe_exit,
    get,
    log_tail,
    running_servers,
)

HOST = "127.0.0.1"
ROOT = Path(__file__).resolve().parents[2]


def wait_until(condition, limit_s=20.0):
    deadline = time.monotonic() + limit_s
    while not (found := condition()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return found


def is_alive(pid):
    return guard.parent_pids().get(pid, (0, "Z"))[1] not in "ZX"


@pytest.fixture
def serve(tmp_path):
    """Return a function that runs a command, by default the fake server, as a server."""

    @contextlib.contextmanager
    def start(argv=None, *, port=None, ready_timeout_s=20.0, stop_grace_s=5.0, env=None, **fake):
        port = port or choose_ports(HOST, 1)[0]
        command = argv(port) if argv else fakeserver.command(port=port, **fake)
        plan = ServerPlan(command, HOST, port, tmp_path / "server.log", env)
        with running_servers(
            [plan], ready_timeout_s=ready_timeout_s, stop_grace_s=stop_grace_s
        ) as servers:
            yield servers[0]

    return start


def program(tmp_path, body):
    """Return a function that makes the command of a server which answers /health and runs body."""
    file = tmp_path / "program.py"
    file.write_text(
        textwrap.dedent(
            """
            import http.server, json, os, signal, subprocess, sys, time
            class Handler(http.server.BaseHTTPRequestHandler):
                def do_GET(self):
                    body = json.dumps(dict(os.environ)).encode()
                    self.send_response(200)
                    self.send_header("Content-Length", str(len(body)))
                    self.end_headers()
                    self.wfile.write(body)
                def log_message(self, *_):
                    pass
            def serve():
                port = int(sys.argv[1])
                http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
            """
        )
        + textwrap.dedent(body)
    )
    return lambda port: [sys.executable, str(file), str(port)]


def test_ready_then_stopped(serve):
    with serve() as server:
        pid, port = server.process.pid, server.port
        assert server.get_page("/v1/models", "json")["data"][0]["id"] == "fake"
        assert os.getpgid(pid) == pid != os.getpgid(0)
        assert os.getsid(server.process._guard.pid) != os.getsid(0)
        memory = server.memory()
        assert 5e6 < memory["rss_bytes"] <= memory["peak_rss_bytes"] < 1e9
    assert not is_alive(pid)
    assert port_is_free(HOST, port)
    assert server.process.killed == []


def test_slow_to_be_ready(serve):
    with serve(ready_after=1.0) as server:
        assert server.startup_s >= 1.0


def test_never_ready(serve):
    port = choose_ports(HOST, 1)[0]
    with pytest.raises(FlowError) as raised, serve(port=port, ready_timeout_s=1.5, ready_after=99):
        pytest.fail("not ready")
    assert "not ready after 1.5 s" in str(raised.value)
    assert f"listening on http://127.0.0.1:{port}" in str(raised.value)
    assert port_is_free(HOST, port)


def test_dies_before_ready(serve):
    with pytest.raises(FlowError) as raised, serve(ready_timeout_s=600, die_at_start=True):
        pytest.fail("not ready")
    assert "died before it was ready: it exited with status 3" in str(raised.value)
    assert "cannot load the model" in str(raised.value)


def test_killed_in_the_run(serve):
    with pytest.raises(FlowError) as raised, serve() as server:
        os.kill(server.process.pid, signal.SIGKILL)
        assert wait_until(lambda: not server.process.alive())
    assert "died in the run: it was killed by SIGKILL" in str(raised.value)


def test_an_error_of_the_block_comes_through_and_the_server_is_stopped(serve):
    with pytest.raises(KeyError), serve() as server:
        raise KeyError
    assert not is_alive(server.process.pid)
    assert port_is_free(HOST, server.port)


def test_a_program_that_does_not_exist(serve):
    with (
        pytest.raises(FlowError, match="cannot start /no/such/program: No such file"),
        serve(lambda port: ["/no/such/program"]),
    ):
        pytest.fail("not started")


def test_a_stubborn_tree_is_killed(serve, tmp_path):
    """All ignore TERM; one has left the server's session, and its parent is gone."""
    argv = program(
        tmp_path,
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        worker = subprocess.Popen(["sleep", "300"])
        if os.fork() == 0:
            daemon = subprocess.Popen(["sleep", "300"], start_new_session=True)
            print("pids", daemon.pid, worker.pid, flush=True)
            os._exit(0)
        serve()
        """,
    )
    with serve(argv, stop_grace_s=0.5) as server:
        text = wait_until(
            lambda: [x for x in log_tail(server.log_path).splitlines() if "pids" in x]
        )[0]
        pids = [int(word) for word in text.split()[1:]]
        assert all(map(is_alive, pids))
        assert set(pids) < set(server.process.tree())
    assert not any(map(is_alive, [*pids, server.process.pid]))
    assert server.process.pid in server.process.killed
    assert set(pids) < set(server.process.killed)  # they inherited the ignored signal
    assert port_is_free(HOST, server.port)


def test_workers_that_outlive_a_dead_server_are_stopped(serve, tmp_path):
    argv = program(
        tmp_path,
        """
        worker = subprocess.Popen(["sleep", "300"], start_new_session=True)
        print("worker", worker.pid, flush=True)
        serve()
        """,
    )
    with pytest.raises(FlowError, match="killed by SIGKILL"), serve(argv) as server:
        text = wait_until(lambda: log_tail(server.log_path, 1))
        worker = int(text.split()[-1])
        os.kill(server.process.pid, signal.SIGKILL)
        assert wait_until(lambda: not is_alive(worker))


def test_the_guard_itself_is_killed(serve, tmp_path):
    argv = program(
        tmp_path,
        """
        worker = subprocess.Popen(["sleep", "300"], start_new_session=True)
        print("worker", worker.pid, flush=True)
        serve()
        """,
    )
    with pytest.raises(FlowError, match="died in the run"), serve(argv) as server:
        worker = int(wait_until(lambda: log_tail(server.log_path, 1)).split()[-1])
        os.kill(server.process._guard.pid, signal.SIGKILL)
        assert wait_until(lambda: not is_alive(server.process.pid))
        assert is_alive(worker) and not server.process.alive()
        scratch = server.process._scratch
        assert scratch.is_dir()
    assert not is_alive(worker)
    assert not scratch.exists()
    assert port_is_free(HOST, server.port)


def test_port_taken(serve):
    with socket.create_server((HOST, 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(FlowError, match=f"port {port} .* is taken"), serve(port=port):
            pytest.fail("started")


def test_a_foreign_server_on_the_port_is_not_taken_for_ours(serve):
    """Another server takes the port between the check and the start of ours."""
    with fakeserver.running() as foreign:
        with (
            pytest.raises(FlowError, match="answered by a process that this job did not start"),
            pytest.MonkeyPatch.context() as patch,
        ):
            patch.setattr("fp8flow.server.require_free_port", lambda host, port: None)
            with serve(lambda port: ["sleep", "60"], port=foreign.port):
                pytest.fail("ready")
        assert foreign.process.poll() is None


def test_where_listeners_are_not_told_the_server_is_taken_for_ours(serve, monkeypatch, caplog):
    """As in a sandbox that hides which process has which socket."""
    monkeypatch.setattr("psutil.Process.net_connections", lambda self, kind: [])
    with serve() as server:
        assert get(HOST, server.port, "/health")[0] == 200
    assert "is taken for granted" in caplog.text


def test_memory_that_the_kernel_does_not_tell_is_no_number():
    from fp8flow.server import _process_memory

    found = _process_memory([os.getpid(), os.getppid()])
    assert 5e6 < found["rss_bytes"] <= found["peak_rss_bytes"]
    # A kernel thread has no memory of its own; one that has ended is left out.
    threads = [pid for pid, (parent, _) in guard.parent_pids().items() if parent == 2]
    if threads:
        assert _process_memory(threads[:1])["rss_bytes"] is None
    assert _process_memory([2**22 + 1]) == {"rss_bytes": 0, "peak_rss_bytes": 0}


def test_the_environment_of_the_server(serve, tmp_path, monkeypatch):
    """It is the one given, and not the job's, with a folder for temporary files of its own."""
    monkeypatch.setenv("ONLY_OF_THE_JOB", "1")
    monkeypatch.setenv("HTTP_PROXY", "http://192.0.2.1:3128")
    monkeypatch.setenv("http_proxy", "http://192.0.2.1:3128")
    given = {"OMP_NUM_THREADS": "2", "PATH": os.environ["PATH"]}
    with serve(program(tmp_path, "serve()"), env=given) as server:
        seen = server.get_page("/environment", "json")
        scratch = Path(seen["TMPDIR"])
        assert scratch.is_dir() and len(str(scratch)) < 60
        (scratch / "left").write_text("behind")
    assert "ONLY_OF_THE_JOB" not in seen
    assert seen["OMP_NUM_THREADS"] == "2"
    assert seen["PATH"] == os.environ["PATH"]
    assert not scratch.exists()


JOB = """
import sys, time
from pathlib import Path
import fakeserver
from fp8flow.cli import Stopped, stop_cleanly_on_signals
from fp8flow.log import configure_logging
from fp8flow.ports import choose_ports
from fp8flow.server import ServerPlan, running_servers
configure_logging(None)
stop_cleanly_on_signals()
port = choose_ports("127.0.0.1", 1)[0]
command = fakeserver.command(port=port, ignore_sigterm=sys.argv[2] == "stubborn")
try:
    plan = ServerPlan(command, "127.0.0.1", port, Path(sys.argv[1]))
    with running_servers([plan], ready_timeout_s=20, stop_grace_s=2) as (server,):
        print("ready", port, server.process.pid, server.process._guard.pid, flush=True)
        time.sleep(300)
except Stopped as stopped:
    print("stopped", stopped, flush=True)
"""


@pytest.fixture
def job(tmp_path):
    """Return a function that starts a job with a server in a process group of its own."""
    started = []

    def start(kind="normal"):
        path = [str(ROOT / "workflow" / "scripts"), str(ROOT / "tests")]
        process = subprocess.Popen(
            [sys.executable, "-c", JOB, str(tmp_path / "job-server.log"), kind],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        )
        started.append(process)
        word, *numbers = process.stdout.readline().split()
        assert word == "ready"
        return process, *map(int, numbers)

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize("kind", ["normal", "stubborn"])
def test_a_killed_job_takes_its_server_along(job, kind):
    process, port, server, its_guard = job(kind)
    # The whole group, as a batch system does it.
    os.killpg(process.pid, signal.SIGKILL)
    assert wait_until(lambda: not is_alive(server) and not is_alive(its_guard))
    assert port_is_free(HOST, port)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_stopped_job_stops_its_server(job, signum):
    process, port, server, _ = job()
    os.killpg(process.pid, signum)
    os.killpg(process.pid, signum)  # an impatient second one changes nothing
    assert process.stdout.readline() == f"stopped {signum.name}\n"
    assert not is_alive(server)
    assert port_is_free(HOST, port)


def test_the_guard_ignores_signals(serve):
    with serve() as server:
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(server.process._guard.pid, signum)
        assert get(HOST, server.port, "/health")[0] == 200
        assert server.process.alive()


def test_descriptors_kept_open_last_as_long_as_the_tree(tmp_path):
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    command = ["sh", "-c", "trap '' TERM; while :; do sleep 1; done"]
    process = GuardedProcess(command, log_path=tmp_path / "log", grace_s=0.3, keep_open=(writer,))
    os.close(writer)
    with pytest.raises(BlockingIOError):
        os.read(reader, 1)
    assert not [fd for fd in Path(f"/proc/{process.pid}/fd").iterdir() if int(fd.name) > 2]
    process.stop()
    assert os.read(reader, 1) == b""
    os.close(reader)
    process.stop()  # once is enough, twice does no harm


def test_log_tail(tmp_path):
    file = tmp_path / "log"
    assert "cannot be read" in log_tail(file)
    file.write_bytes(b"")
    assert log_tail(file) == "  (nothing was logged)"
    file.write_bytes(b"one\n\n 1%\r50%\r100%\nbad \xff\r\nlast")
    assert log_tail(file).splitlines() == ["  one", "  100%", "  bad \ufffd", "  last"]
    file.write_text("\n".join(str(i) for i in range(100_000)))
    assert log_tail(file, 2).splitlines() == ["  99998", "  99999"]


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (0, "exited with status 0"),
        (3, "exited with status 3"),
        (-9, "was killed by SIGKILL (the kernel does that when memory runs out)"),
        (-11, "was killed by SIGSEGV"),
        (None, "ended, nobody knows how"),
    ],
)
def test_describe_exit(code, text):
    assert describe_exit(code) == text
