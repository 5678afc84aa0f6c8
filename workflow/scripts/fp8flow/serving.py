"""Servers in use: asking them, and reading back what they really run with."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fp8flow.backends import Backend, differing_settings
from fp8flow.client import Completion, request_body, run_requests
from fp8flow.errors import FlowError
from fp8flow.log import get_logger
from fp8flow.server import Endpoint
from fp8flow.workload import Prompts, Workload

# How long a dead server's guard may take to say so after the client has seen it.
DEATH_NOTICE_S = 1.0
_NOTHING_MEASURED = "nothing was measured"
_VOID = "what was measured does not count"

logger = get_logger(__name__)


@dataclass
class Serving:
    """Servers that gave their first token, and what was found out about them.

    ``engine`` is the section ``engine`` of the configuration.
    """

    servers: Sequence[Endpoint]
    backend: Backend
    workload: Workload
    engine: Mapping[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def server(self) -> Endpoint:
        """The first server."""
        return self.servers[0]

    @property
    def base_urls(self) -> list[str]:
        """Addresses of the servers."""
        return [server.base_url for server in self.servers]

    def require_alive(self, when: str) -> None:
        """Check that all servers run.

        Raises:
            FlowError: with the exit code and the end of the log of one that does not.
        """
        for server in self.servers:
            server.require_alive(when)

    def ask(
        self,
        prompts: Prompts,
        *,
        max_tokens: int,
        connections: int,
        timeout_s: float,
        server: Endpoint | None = None,
    ) -> list[Completion]:
        """Send prompts outside the measurement; one completion per prompt, in order.

        Args:
            prompts: int32 arrays of token ids.
            max_tokens: longest answer.
            connections: most requests at a time.
            timeout_s: limit for each answer.
            server: the one to ask; all in turn when left out.
        """
        fields = self.backend.request_fields(1, max_tokens)
        name = self.workload.model_name
        bodies = [request_body(name, prompt.tolist(), max_tokens, fields) for prompt in prompts]
        urls = self.base_urls if server is None else [server.base_url]
        return run_requests(urls, bodies, max_connections=connections, timeout_s=timeout_s)

    def require_answers(
        self, completions: Sequence[Completion], what: str, allow_empty: bool = False
    ) -> None:
        """Check that every request was answered.

        Args:
            completions: what became of the requests.
            what: they were sent for, for the message.
            allow_empty: to random tokens an answer that ends at once is a proper one.

        Raises:
            FlowError: with the first failure, or the end of a server's log if it died.
        """
        allowed = {None, "empty"} if allow_empty else {None}
        failed = [c for c in completions if c.error not in allowed]
        if not failed:
            return
        time.sleep(DEATH_NOTICE_S)
        self.require_alive(f"in {what}")
        logs = "\n".join(server.log_end() for server in self.servers)
        raise FlowError(
            f"{what}: {len(failed)} of {len(completions)} requests failed; first: "
            f"{failed[0].error}: {failed[0].detail}. {logs}"
        )


def asked_reuse(backend: Backend, engine: Mapping[str, Any]) -> bool | None:
    """Tell whether the server was told to reuse prefixes; None: it was told nothing."""
    if not backend.starts_server:
        return None
    return bool(engine.get("serve", {}).get("prefix_caching", False))


def read_settings(server: Endpoint, backend: Backend) -> dict[str, Any]:
    """Return the effective settings of a server (see ``Backend.parse_settings``).

    Raises:
        FlowError: if they cannot be read.
    """
    # What somebody else runs need not have them all.
    optional = not backend.starts_server
    pages = {
        path: server.get_page(path, kind, optional=optional) for path, kind in backend.pages.items()
    }
    return backend.parse_settings(pages, server.log_text())


def require_no_reuse(
    settings: Mapping[str, Any], serving: Serving, consequence: str = _NOTHING_MEASURED
) -> None:
    """Check that no prefixes are reused, unless the configuration asks for it.

    Args:
        settings: as read back.
        serving: what they were read from.
        consequence: what it means otherwise, for the message.

    Raises:
        FlowError: if a server that was told not to reuses prefixes of earlier prompts, has counted
            that it did, or keeps silent about it although its kind can tell.
    """
    backend = serving.backend
    if asked_reuse(backend, serving.engine) is not False:
        return
    reuse = settings.get("prefix_reuse")
    hits = (settings.get("counters") or {}).get("prefix_hit_tokens")
    silent = reuse is None and not hits
    if (reuse is False and not hits) or (silent and not backend.reports_prefix_reuse):
        return
    shown = "does not say whether it reuses" if silent else "says that it reuses"
    raise FlowError(
        f"the {backend.name} server {shown} prefixes of earlier prompts (prefix_reuse: "
        f"{json.dumps(reuse)}, prefix_hit_tokens: {json.dumps(hits)} at "
        f"{', '.join(serving.base_urls)}); MLPerf Inference forbids caching across queries, so "
        f"{consequence}. Switch it off in the engine"
    )


def require_asked(settings: Mapping[str, Any], serving: Serving) -> None:
    """Check that a server runs with what it was told.

    Raises:
        FlowError: with every setting that is another one, and its effective value.
    """
    asked = serving.backend.asked(serving.engine, serving.workload.served)
    wrong = [
        f"{key}: asked for {json.dumps(value)}, effective {json.dumps(settings.get(key))}"
        for key, value in sorted(asked.items())
        if key not in settings or settings[key] != value
    ]
    if wrong:
        raise FlowError(
            f"the {serving.backend.name} server does not run with what it was told "
            f"({'; '.join(wrong)}), so {_NOTHING_MEASURED}. Null means that it does not report the "
            "setting. Change the section engine to what it can do, or install the version that "
            "engine.version names"
        )


def common_settings(found: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, Any]:
    """Return the settings of several servers as one: counters added up, the smallest cache.

    Args:
        found: the settings of each.
        names: what messages call them.

    Raises:
        FlowError: if they differ in anything else.
    """
    first = dict(found[0])
    for name, settings in zip(names[1:], found[1:], strict=True):
        differing = [
            f"{key} is {json.dumps(first.get(key))} and {json.dumps(settings.get(key))}"
            for key in differing_settings(first, settings)
        ]
        if differing:
            raise FlowError(
                f"{names[0]} and {name} run with different settings ({'; '.join(differing)}), so "
                f"{_NOTHING_MEASURED}. Their GPUs, or what else runs there, may differ"
            )
    sizes = [s["kv_cache_tokens"] for s in found if s.get("kv_cache_tokens") is not None]
    if sizes:
        first["kv_cache_tokens"] = min(sizes)
    if "counters" in first:
        first["counters"] = sums([settings.get("counters") or {} for settings in found])
    return first


def sums(counters: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return numbers of several servers added up; what is none, or missing somewhere, is null."""
    names = list(dict.fromkeys(name for found in counters for name in found))
    values = {name: [found.get(name) for found in counters] for name in names}
    return {
        name: sum(found) if all(isinstance(value, (int, float)) for value in found) else None
        for name, found in values.items()
    }


def _read_all(serving: Serving) -> list[dict[str, Any]]:
    return [read_settings(server, serving.backend) for server in serving.servers]


def note_settings(serving: Serving) -> None:
    """Read the settings of servers that are ready into the facts, and check them.

    Raises:
        FlowError: if they are not what was asked for, or not the same of all servers.
    """
    found = _read_all(serving)
    for settings in found:
        require_no_reuse(settings, serving)
        require_asked(settings, serving)
    for fact, settings in zip(serving.facts["servers"], found, strict=True):
        fact["settings"] = settings
    names = [server.name for server in serving.servers]
    serving.facts["settings"] = common_settings(found, names)
    serving.facts["asked"] = serving.backend.asked(serving.engine, serving.workload.served)
    serving.facts["prefix_reuse"] = _reuse(serving, serving.facts["settings"])
    if serving.facts["prefix_reuse"] is not False:
        told = json.dumps(serving.facts["prefix_reuse"])
        logger.warning(
            "prefix reuse: %s; MLPerf Inference forbids caching across queries, so this counts "
            "only once it is shown to be off",
            "not told" if told == "null" else told,
        )


def _reuse(serving: Serving, settings: Mapping[str, Any]) -> bool | None:
    """Return what is known about the reuse of prefixes: as told, else as asked for if it is on."""
    if (settings.get("counters") or {}).get("prefix_hit_tokens"):
        return True
    told = settings.get("prefix_reuse")
    if told is None and asked_reuse(serving.backend, serving.engine):
        return True
    return None if told is None else bool(told)


def read_settings_again(serving: Serving) -> dict[str, Any]:
    """Return the settings of the servers after their load; all but the counters must be as before.

    Raises:
        FlowError: if a server reused a prefix meanwhile, or a setting has changed.
    """
    found = _read_all(serving)
    for server, fact, after in zip(serving.servers, serving.facts["servers"], found, strict=True):
        require_no_reuse(after, serving, _VOID)
        before = fact["settings"]
        changed = [
            f"{key} was {json.dumps(before.get(key))} and is {json.dumps(after.get(key))}"
            for key in differing_settings(before, after, same_server=True)
        ]
        if changed:
            raise FlowError(
                f"{server.name} ({serving.backend.name}) changed its settings while it was in use "
                f"({'; '.join(changed)}), so {_VOID}. Find out what else talks to it, and run again"
            )
    after = common_settings(found, [server.name for server in serving.servers])
    if _reuse(serving, after):
        serving.facts["prefix_reuse"] = True
    return after
