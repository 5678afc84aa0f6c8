"""The probe of a server: real tokens, settings read back, token counts, no reuse of prefixes."""

from __future__ import annotations

import http.client
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fp8flow.backends import Backend
from fp8flow.client import Completion, EventParser, request_body
from fp8flow.errors import FlowError
from fp8flow.load_job import (
    Prompts,
    Resources,
    Serving,
    new_kept_attempt,
    read_settings,
    read_workload,
    serve,
    warm_up_prompts,
)
from fp8flow.log import get_logger
from fp8flow.ports import check_client_limits
from fp8flow.records import Record, write_record
from fp8flow.spec import Spec

PARITY_PROMPTS = 20
REUSE_PROMPTS = 3
# A repeated prompt that is answered in less than half the time was not computed again.
REUSE_RATIO = 0.5
_MAX_TOKENS = 8
_CONNECTIONS = 4
_TIMEOUT_S = 600.0

logger = get_logger(__name__)


def probe_parity(serving: Serving) -> dict[str, Any]:
    """Compare the server's token counts with the ids that were sent and streamed.

    Raises:
        FlowError: naming the first prompt where they differ.
    """
    prompts = serving.workload.prompts[:PARITY_PROMPTS]
    answers = serving.ask(
        prompts, max_tokens=_MAX_TOKENS, connections=_CONNECTIONS, timeout_s=_TIMEOUT_S
    )
    serving.require_answers(answers, "the comparison of token counts")
    problems = []
    for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        problems += [f"sample {index}: {text}" for text in _count_problems(prompt, answer)]
    if problems:
        raise FlowError(
            f"token counts differ between client and server ({len(problems)} differences; first: "
            f"{problems[0]}); tokens per second would be wrong. Check that the server takes token "
            "ids without adding to them, and reports usage"
        )
    without_ids = sum(1 for answer in answers if answer.token_ids is None)
    return {"prompts": len(prompts), "mismatches": 0, "without_token_ids": without_ids}


def _count_problems(prompt: Sequence[int], answer: Completion) -> list[str]:
    problems = []
    if answer.prompt_tokens != len(prompt):
        problems.append(f"{len(prompt)} input tokens, usage says {answer.prompt_tokens}")
    if answer.token_ids is not None and answer.completion_tokens != len(answer.token_ids):
        problems.append(
            f"{len(answer.token_ids)} output tokens, usage says {answer.completion_tokens}"
        )
    return problems


def _ttft_ns(answer: Completion) -> int:
    return (answer.first_token_ns or answer.done_ns) - answer.sent_ns


def probe_reuse(serving: Serving) -> dict[str, Any]:
    """Send prompts twice, one request at a time, and compare the times to the first token.

    Also tells whether the answers to equal prompts were equal (greedy decoding).

    Raises:
        FlowError: if every repetition was faster than every first time and the median ratio is
            below 0.5, or if the server counts cached tokens.
    """
    prompts = _long_new_prompts(serving.workload.prompts)
    first: list[Completion] = []
    again: list[Completion] = []
    for prompt in prompts:
        for answers in (first, again):
            answers += serving.ask(
                [prompt], max_tokens=_MAX_TOKENS, connections=1, timeout_s=_TIMEOUT_S
            )
    serving.require_answers([*first, *again], "the proof that prefixes are not reused")
    fresh, repeated = list(map(_ttft_ns, first)), list(map(_ttft_ns, again))
    ratio = statistics.median(repeated) / statistics.median(fresh)
    cached = cached_tokens(serving, prompts[0])
    if cached or (ratio < REUSE_RATIO and max(repeated) < min(fresh)):
        raise FlowError(
            f"the server reuses prefixes although its settings say otherwise: a repeated prompt "
            f"takes {ratio:.2f} of the time to the first token, cached tokens by its own count: "
            f"{cached}. MLPerf Inference forbids caching across queries; switch it off"
        )
    return {
        "prefix_reuse": False,
        "prompts": len(prompts),
        "prompt_tokens": [len(prompt) for prompt in prompts],
        "ttft_first_ns": fresh,
        "ttft_repeated_ns": repeated,
        "ttft_ratio": round(ratio, 4),
        "cached_tokens": cached,
        "cached_tokens_reason": None if cached is not None else "the server counts none",
        "deterministic": all(map(_same_answer, first, again)),
    }


def _long_new_prompts(prompts: Prompts) -> Prompts:
    """Return prompts that the server has not seen, as long as the longest of the set."""
    longest = sorted(prompts, key=len)[-REUSE_PROMPTS:]
    return warm_up_prompts(longest, REUSE_PROMPTS)


def _same_answer(one: Completion, other: Completion) -> bool:
    return (one.token_ids, one.text) == (other.token_ids, other.text)


def cached_tokens(serving: Serving, prompt: Any) -> int | None:
    """Return how many tokens the engine says it took from a cache, None if it does not count them.

    Looks for the counter ``prefix_hit_tokens`` in the settings read back, else repeats ``prompt``
    and looks for ``usage.prompt_tokens_details.cached_tokens``.
    """
    counters = read_settings(serving.server, serving.backend).get("counters") or {}
    counted = counters.get("prefix_hit_tokens")
    found = _cached_by_usage(serving, prompt) if counted is None else counted
    return None if found is None else int(found)


def _cached_by_usage(serving: Serving, prompt: Any) -> Any:
    fields = serving.backend.request_fields(1)
    body = request_body(serving.workload.model_name, prompt.tolist(), 1, fields)
    usages = [event["usage"] for event in _events(serving, body) if event.get("usage")]
    details = (usages[-1].get("prompt_tokens_details") or {}) if usages else {}
    return details.get("cached_tokens")


def _events(serving: Serving, body: bytes) -> list[dict[str, Any]]:
    """Return all events of one answer, as they are."""
    server = serving.server
    connection = http.client.HTTPConnection(server.host, server.port, timeout=_TIMEOUT_S)
    try:
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        text = connection.getresponse().read()
        return [json.loads(e) for e in EventParser().feed(text + b"\n") if e != b"[DONE]"]
    except (OSError, http.client.HTTPException, ValueError) as error:
        server.require_alive("in the probe")
        raise FlowError(f"no usable answer to a repeated prompt: {error!r}") from error
    finally:
        connection.close()


def _probe(serving: Serving) -> dict[str, Any]:
    parity = probe_parity(serving)
    reuse = probe_reuse(serving)
    if not reuse["deterministic"]:
        logger.warning("equal prompts got different answers: decoding is not deterministic")
    return {
        "server": serving.facts | {"memory": serving.server.memory()},
        "parity": parity,
        "reuse": reuse,
        "deterministic": reuse["deterministic"],
    }


def run_probe(
    spec: Spec,
    *,
    checkpoint: Path,
    dataset: Path,
    output: Path,
    resources: Resources,
    backend: Backend,
) -> Record:
    """Probe the server of one variant and write probe.json.

    Args:
        spec: what determines the probe.
        checkpoint: manifest.json of the checkpoint.
        dataset: manifest.json of the evaluation set.
        output: probe.json; the server's log goes to ``attempts/<n>`` beside it.
        resources: how to run it.
        backend: the engine.

    Raises:
        FlowError: if the server does not work, counts tokens otherwise, or reuses prefixes.
    """
    started = time.time()
    check_client_limits(_CONNECTIONS)
    workload = read_workload(checkpoint, dataset, spec.settings["model"]["name"])
    settings = spec.settings["engine"]["serve"]
    with new_kept_attempt(output.parent, backend) as (attempt, locks):
        log_path = attempt / "server.log"
        with serve(backend, workload, settings, resources, log_path, _TIMEOUT_S, locks) as serving:
            result = _probe(serving)
    logger.info(
        "probe: ready after %.1f s, token counts agree for %d prompts, a repeated prompt takes "
        "%.2f of the time to the first token",
        *(
            result["server"]["startup_s"],
            result["parity"]["prompts"],
            result["reuse"]["ttft_ratio"],
        ),
    )
    files = [log_path.relative_to(output.parent).as_posix()]
    return write_record(output, spec, result, inputs=workload.inputs, files=files, started=started)
