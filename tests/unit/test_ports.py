import socket
import subprocess
import sys

import pytest

from fp8flow import ports
from fp8flow.errors import FlowError

HOST = "127.0.0.1"


def in_child(code: str) -> str:
    """Run code in a process of its own: limits cannot be given back."""
    program = "import resource; from fp8flow import ports; from fp8flow.errors import FlowError\n"
    path = "import sys; sys.path.insert(0, 'workflow/scripts')\n"
    done = subprocess.run(
        [sys.executable, "-c", path + program + code], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("text", "expected"),
    [("32768\t60999\n", (32768, 60999)), ("1024 65535", (1024, 65535)), ("?", (32768, 60999))],
)
def test_ephemeral_range(tmp_path, text, expected):
    file = tmp_path / "range"
    file.write_text(text)
    assert ports.ephemeral_range(file) == expected
    assert ports.ephemeral_range(tmp_path / "missing") == (32768, 60999)


@pytest.mark.parametrize("ephemeral", [(32768, 60999), (10_100, 40_000), (1024, 65535)])
def test_candidates_avoid_the_ephemeral_range(ephemeral):
    low, high = ephemeral
    found = ports.candidate_ports("a", ephemeral)
    assert len(found) == len(set(found)) > 100
    assert all(1024 <= port < 65536 for port in found)
    if ephemeral != (1024, 65535):  # there is no port outside of that one
        assert not any(low <= port <= high for port in found)


def test_candidates_differ_between_jobs(monkeypatch):
    first = ports.job_identity()
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    second = ports.job_identity()
    at = (32768, 60999)
    assert ports.candidate_ports(first, at)[:20] != ports.candidate_ports(second, at)[:20]
    assert ports.candidate_ports(first, at) == ports.candidate_ports(first, at)


def test_a_taken_port_is_passed_over():
    first = ports.choose_ports(HOST, 1, "job")[0]
    with socket.create_server((HOST, first)):
        assert not ports.port_is_free(HOST, first)
        second = ports.choose_ports(HOST, 1, "job")[0]
        assert second != first
        with pytest.raises(FlowError, match=rf"port {first} of {HOST} is taken.*ss -tlnp"):
            ports.require_free_port(HOST, first)
    assert ports.choose_ports(HOST, 1, "job")[0] == first


def test_several_ports_differ():
    found = ports.choose_ports(HOST, 5, "job")
    assert len(set(found)) == 5
    with socket.create_server((HOST, found[1])):
        assert found[1] not in ports.choose_ports(HOST, 5, "job")


def test_a_listener_on_all_addresses_takes_the_port_too():
    with socket.create_server(("0.0.0.0", 0)) as listener:
        assert not ports.port_is_free(HOST, listener.getsockname()[1])


def test_connections_that_wait_for_their_end_do_not_take_the_port():
    with socket.create_server((HOST, 0)) as listener:
        port = listener.getsockname()[1]
        client = socket.create_connection((HOST, port))
        accepted, _ = listener.accept()
        accepted.close()  # closed first by the server: TIME_WAIT is on its side
        client.close()
    assert ports.port_is_free(HOST, port)


def test_an_address_of_another_host_is_an_error():
    with pytest.raises(FlowError, match=r"no free port on 192\.0\.2\.1"):
        ports.choose_ports("192.0.2.1", 1)


def test_the_soft_limit_of_open_files_is_raised():
    out = in_child(
        "resource.setrlimit(resource.RLIMIT_NOFILE, (300, 4000))\n"
        "ports.ensure_descriptors(2000)\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    assert out == "(2256, 4000)"


def test_a_sufficient_limit_is_left_alone():
    out = in_child(
        "resource.setrlimit(resource.RLIMIT_NOFILE, (3000, 4000))\n"
        "ports.ensure_descriptors(2000)\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    assert out == "(3000, 4000)"


def test_a_hard_limit_that_is_too_low_is_an_error():
    out = in_child(
        "resource.setrlimit(resource.RLIMIT_NOFILE, (300, 1000))\n"
        "try:\n    ports.check_client_limits(2000)\nexcept FlowError as error:\n    print(error)"
    )
    assert "harness.max_connections: 2000 connections need 2256 open files" in out
    assert "limit is 1000" in out and "ulimit" in out


def test_too_few_ephemeral_ports_are_an_error():
    ports.check_ephemeral_ports(500, (40_000, 40_999))
    with pytest.raises(FlowError, match=r"501 connections are more than 500.*ip_local_port_range"):
        ports.check_ephemeral_ports(501, (40_000, 40_999))
