"""Ports and descriptors: a port for the server, and whether the client's connections fit."""

from __future__ import annotations

import hashlib
import os
import resource
import socket
from pathlib import Path

from fp8flow.errors import FlowError

_PORT_RANGE_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_DEFAULT_EPHEMERAL = (32768, 60999)
_LOWEST = 10_000
_CANDIDATES = 500
# Descriptors beside the connections: logs, libraries, event loop, data set.
_OTHER_DESCRIPTORS = 256
# Closed connections keep their port for a minute (TIME_WAIT), so some must stay unplanned.
_USABLE_SHARE = 0.5


def ephemeral_range(path: Path = _PORT_RANGE_FILE) -> tuple[int, int]:
    """Return the first and last port that the kernel gives to outgoing connections."""
    try:
        low, high = path.read_text().split()
        return int(low), int(high)
    except (OSError, ValueError):
        return _DEFAULT_EPHEMERAL


def port_is_free(host: str, port: int) -> bool:
    """Tell whether a server could listen on the port now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As servers do it: connections in TIME_WAIT are no obstacle, a listener is.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def job_identity() -> str:
    """Return a text that differs between jobs that could meet on one host."""
    job = os.environ.get("SLURM_JOB_ID", "")
    return f"{os.getuid()}:{job}:{os.getpid()}"


def candidate_ports(identity: str, ephemeral: tuple[int, int]) -> list[int]:
    """Return ports to try, in an order that differs between identities.

    They lie below the ephemeral range, where no outgoing connection can take them between the
    choice and the start of the server; above it if there is no room below.
    """
    low, high = ephemeral
    pool = range(_LOWEST, low) if low - _LOWEST >= _CANDIDATES else range(high + 1, 65536)
    if not pool:
        pool = range(_LOWEST, 65536)
    start = int.from_bytes(hashlib.sha256(identity.encode()).digest()[:8], "big") % len(pool)
    step = 7919 if len(pool) % 7919 else 1
    count = min(_CANDIDATES, len(pool))
    return [pool[(start + number * step) % len(pool)] for number in range(count)]


def choose_ports(host: str, count: int, identity: str | None = None) -> list[int]:
    """Return free ports for ``count`` servers on ``host``.

    Raises:
        FlowError: if not enough of the candidates are free.
    """
    found: list[int] = []
    for port in candidate_ports(identity or job_identity(), ephemeral_range()):
        if len(found) == count:
            break
        if port_is_free(host, port):
            found.append(port)
    if len(found) == count:
        return found
    raise FlowError(
        f"no free port on {host} among {_CANDIDATES} candidates; see `ss -tlnp` for what listens, "
        "and whether the address belongs to this host"
    )


def require_free_port(host: str, port: int) -> None:
    """Check a port before a server is started on it.

    Raises:
        FlowError: if something listens there.
    """
    if not port_is_free(host, port):
        raise FlowError(
            f"port {port} of {host} is taken; `ss -tlnp 'sport = :{port}'` shows by which process. "
            "End that, and run again"
        )


def ensure_descriptors(connections: int) -> None:
    """Make sure that this process and its children may open that many connections.

    Raises:
        FlowError: if the hard limit is too low.
    """
    needed = connections + _OTHER_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise FlowError(
            f"harness.max_connections: {connections} connections need {needed} open files, the "
            f"hard limit is {hard}; raise it (`ulimit -Hn`, /etc/security/limits.conf) or lower "
            "the key"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def check_ephemeral_ports(connections: int, ephemeral: tuple[int, int] | None = None) -> None:
    """Check that the client has ports enough for its connections to one server.

    Raises:
        FlowError: if they would take more than half of the ephemeral range.
    """
    low, high = ephemeral or ephemeral_range()
    usable = int((high - low + 1) * _USABLE_SHARE)
    if connections > usable:
        raise FlowError(
            f"harness.max_connections: {connections} connections are more than {usable}, half of "
            f"the ephemeral ports {low}-{high}; widen net.ipv4.ip_local_port_range or lower the key"
        )


def check_client_limits(connections: int) -> None:
    """Check everything that limits the client's connections, before any work.

    Raises:
        FlowError: saying which limit is too low and how to raise it.
    """
    ensure_descriptors(connections)
    check_ephemeral_ports(connections)
