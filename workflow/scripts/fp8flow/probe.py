"""The probe of a server: real tokens, settings read back, token counts, signs of prefix reuse."""

from __future__ import annotations

import http.client
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fp8flow.client import Completion, EventParser, request_body
from fp8flow.errors import FlowError
from fp8flow.load_job import MakeResult, Task, run_command, serve_and_record
from fp8flow.log import get_logger
from fp8flow.records import Record
from fp8flow.server import Endpoint
from fp8flow.serving import Serving, asked_reuse, read_settings
from fp8flow.workload import Prompts, warm_up_prompts

PARITY_PROMPTS = 20
# Repetitions, for a server that counts its hits and for one that does not.
COUNTED_PROMPTS = 3
TIMED_PROMPTS = 9
# A repeated prompt that is answered in less than half the time was not computed again.
REUSE_RATIO = 0.5
# A repeated prompt that takes at least this share of the time was computed again, if ...
SAME_RATIO = 0.8
# ... its computation is at least this share of the time; reuse would save most of it.
DOMINANT_SHARE = 0.6
COUNTED = "off, counted"
BY_TIME = "off, by time"
NOT_SHOWN = "not shown"
REUSED = "reused"
_PROVEN = {COUNTED: False, BY_TIME: False, NOT_SHOWN: None, REUSED: True}
_SHORT_TOKENS = 4
_MAX_TOKENS = 8
_CONNECTIONS = 4
_TIMEOUT_S = 600.0

logger = get_logger(__name__)


def probe_parity(serving: Serving) -> dict[str, Any]:
    """Compare the server's token counts with the ids that were sent and streamed.

    Without streamed ids the texts are tokenized again. That is recorded, and no error where it
    gives another number: the text of any tokens need not give the same tokens back. What is known
    of such an answer is its length if it was cut at the longest one.

    Raises:
        FlowError: naming the first prompt where the counts differ.
    """
    prompts = serving.workload.prompts[:PARITY_PROMPTS]
    answers = serving.ask(
        prompts, max_tokens=_MAX_TOKENS, connections=_CONNECTIONS, timeout_s=_TIMEOUT_S
    )
    serving.require_answers(answers, "the comparison of token counts", allow_empty=True)
    problems = []
    for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        problems += [f"sample {index}: {text}" for text in _count_problems(prompt, answer)]
    if problems:
        raise FlowError(
            f"token counts differ between client and server ({len(problems)} differences; first: "
            f"{problems[0]}); tokens per second would be wrong. Check that the server takes token "
            "ids without adding to them, and reports usage"
        )
    without_ids = [answer for answer in answers if answer.token_ids is None]
    found = {"prompts": len(prompts), "mismatches": 0, "without_token_ids": len(without_ids)}
    return found | _recount(without_ids, serving.workload.served.tokenizer)


def _count_problems(prompt: Sequence[int], answer: Completion) -> list[str]:
    problems = []
    if answer.prompt_tokens != len(prompt):
        problems.append(f"{len(prompt)} input tokens, usage says {answer.prompt_tokens}")
    output = _MAX_TOKENS if answer.finish_reason == "length" else None
    if answer.token_ids is not None:
        output = len(answer.token_ids)
    if answer.completion_tokens is None or output not in (None, answer.completion_tokens):
        shown = "some" if output is None else output
        problems.append(f"{shown} output tokens, usage says {answer.completion_tokens}")
    return problems


def _recount(answers: Sequence[Completion], tokenizer: Path) -> dict[str, Any]:
    """Return how often the tokenized texts have as many tokens as usage says."""
    file = tokenizer / "tokenizer.json"
    if not answers or not file.is_file():
        return {}
    from tokenizers import Tokenizer

    encode = Tokenizer.from_file(str(file)).encode
    counts = [len(encode(answer.text, add_special_tokens=False).ids) for answer in answers]
    agreeing = sum(
        count == answer.completion_tokens for count, answer in zip(counts, answers, strict=True)
    )
    return {"recounted": len(answers), "recount_agrees": agreeing}


def _ttft_ns(answer: Completion) -> int:
    return (answer.first_token_ns or answer.done_ns) - answer.sent_ns


def reuse_proof(
    cached: int | None, fresh: Sequence[int], repeated: Sequence[int], short: Sequence[int]
) -> str:
    """Tell what is known about the reuse of prefixes.

    Args:
        cached: prompt tokens from a cache by the engine's own count; None if it counts none.
        fresh: times to the first token of long prompts, ns.
        repeated: of the same prompts sent again, ns.
        short: of prompts of a few tokens, ns; what is not the prompt's computation.

    Returns:
        :data:`COUNTED`, :data:`BY_TIME`, :data:`NOT_SHOWN` or :data:`REUSED`.
    """
    typical = statistics.median(fresh)
    ratio = statistics.median(repeated) / typical
    if cached or (ratio < REUSE_RATIO and max(repeated) < min(fresh)):
        return REUSED
    if cached is not None:
        return COUNTED
    dominant = statistics.median(short) <= typical * (1 - DOMINANT_SHARE)
    return BY_TIME if dominant and ratio >= SAME_RATIO else NOT_SHOWN


def probe_reuse(serving: Serving, server: Endpoint) -> dict[str, Any]:
    """Send long prompts twice, one request at a time, and look for signs that they were reused.

    The signs are the engine's own count and the times to the first token. Without a count, times
    show something only if the computation of the prompt is most of them, which is told from the
    time of prompts of a few tokens. Others of the same lengths go before them, as the first prompt
    of its length may compile kernels. Also tells whether the answers to equal prompts were equal
    (greedy decoding).

    Raises:
        FlowError: if reuse is to be off and every repetition was faster than every first time and
            the median ratio is below 0.5, or the server counts cached tokens.
    """
    counted = _hits(serving, server) is not None
    pairs = COUNTED_PROMPTS if counted else TIMED_PROMPTS
    prompts, stubs = _reuse_prompts(serving.workload.prompts, pairs + 1)
    asked = list(_ask_twice(serving, server, prompts, stubs))
    short, first, again = zip(*asked[1:], strict=True)
    short_ns, fresh_ns, repeated_ns = (
        list(map(_ttft_ns, answers)) for answers in (short, first, again)
    )
    cached = cached_tokens(serving, server, prompts[1])
    ratio = statistics.median(repeated_ns) / statistics.median(fresh_ns)
    proof = reuse_proof(cached, fresh_ns, repeated_ns, short_ns)
    if proof == REUSED and asked_reuse(serving.backend, serving.engine) is False:
        raise FlowError(
            f"{server.name} reuses prefixes although its settings say otherwise: a repeated prompt "
            f"takes {ratio:.2f} of the time to the first token, cached tokens by its own count: "
            f"{cached}. MLPerf Inference forbids caching across queries; switch it off"
        )
    return {
        "prefix_reuse": _PROVEN[proof],
        "prefix_reuse_proof": proof,
        "prompts": pairs,
        "prompt_tokens": [len(prompt) for prompt in prompts[1:]],
        "short_prompt_tokens": [len(prompt) for prompt in stubs[1:]],
        "ttft_first_ns": fresh_ns,
        "ttft_repeated_ns": repeated_ns,
        "ttft_short_ns": short_ns,
        "ttft_ratio": round(ratio, 4),
        "cached_tokens": cached,
        "cached_tokens_reason": None if cached is not None else "the server counts none",
        "deterministic": all(map(_same_answer, first, again)),
    }


def _reuse_prompts(prompts: Prompts, count: int) -> tuple[Prompts, Prompts]:
    """Return prompts that the server has not seen: as long as the set's longest, and short ones."""
    longest = [max(prompts, key=len)]
    made = warm_up_prompts(longest, 2 * count)
    return made[:count], [prompt[:_SHORT_TOKENS] for prompt in made[count:]]


def _ask_twice(
    serving: Serving, server: Endpoint, prompts: Prompts, stubs: Prompts
) -> Iterator[tuple[Completion, ...]]:
    """Yield the answers to a short prompt, to a long one, and to that again; one at a time."""
    for prompt, stub in zip(prompts, stubs, strict=True):
        answers: list[Completion] = []
        for sent in (stub, prompt, prompt):
            answers += serving.ask(
                [sent],
                max_tokens=_MAX_TOKENS,
                connections=1,
                timeout_s=_TIMEOUT_S,
                server=server,
            )
        serving.require_answers(answers, "the search for reused prefixes", allow_empty=True)
        yield tuple(answers)


def _same_answer(one: Completion, other: Completion) -> bool:
    return (one.token_ids, one.text) == (other.token_ids, other.text)


def _hits(serving: Serving, server: Endpoint) -> int | None:
    """Return the engine's own count of prompt tokens from its cache, None if it has none."""
    counters = read_settings(server, serving.backend).get("counters") or {}
    counted = counters.get("prefix_hit_tokens")
    return None if counted is None else int(counted)


def cached_tokens(serving: Serving, server: Endpoint, prompt: Any) -> int | None:
    """Return how many tokens the engine says it took from a cache, None if it does not count them.

    Looks for the counter ``prefix_hit_tokens`` in the settings read back, else repeats ``prompt``
    and looks for ``usage.prompt_tokens_details.cached_tokens``.
    """
    counted = _hits(serving, server)
    found = _cached_by_usage(serving, server, prompt) if counted is None else counted
    return None if found is None else int(found)


def _cached_by_usage(serving: Serving, server: Endpoint, prompt: Any) -> Any:
    fields = serving.backend.request_fields(1, 1)
    body = request_body(serving.workload.model_name, prompt.tolist(), 1, fields)
    usages = [event["usage"] for event in _events(server, body) if event.get("usage")]
    details = (usages[-1].get("prompt_tokens_details") or {}) if usages else {}
    return details.get("cached_tokens")


def _events(server: Endpoint, body: bytes) -> list[dict[str, Any]]:
    """Return all events of one answer, as they are."""
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


def _weakest(found: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return what was shown least of several servers; reuse counts most."""
    order = (REUSED, NOT_SHOWN, BY_TIME, COUNTED)
    return min(found, key=lambda reuse: order.index(reuse["prefix_reuse_proof"]))


def run_probe(task: Task) -> Record:
    """Probe the servers of one variant and write the task's output, probe.json.

    Raises:
        FlowError: if a server does not work, counts tokens otherwise, or reuses prefixes although
            it was told not to.
    """

    def probe(serving: Serving, _attempt: Path) -> MakeResult:
        parity = probe_parity(serving)
        each = [probe_reuse(serving, server) for server in serving.servers]
        reuse = _weakest(each)
        if reuse["prefix_reuse_proof"] == REUSED:
            serving.facts["prefix_reuse"] = True
        return lambda: {
            "server": serving.facts,
            "parity": parity,
            "reuse": {**reuse, "servers": [one["prefix_reuse_proof"] for one in each]},
            "prefix_reuse_proof": reuse["prefix_reuse_proof"],
            "deterministic": all(one["deterministic"] for one in each),
        }

    record = serve_and_record(task, probe, connections=_CONNECTIONS, timeout_s=_TIMEOUT_S)
    _tell(record.result)
    return record


def _tell(result: Mapping[str, Any]) -> None:
    reuse, startup_s = result["reuse"], result["server"]["startup_s"]
    logger.info(
        "probe: %s, token counts agree for %d prompts, prefix reuse: %s (a "
        "repeated prompt takes %.2f of the time to the first token)",
        f"ready after {startup_s:.1f} s" if startup_s is not None else "it ran already",
        *(result["parity"]["prompts"], reuse["prefix_reuse_proof"], reuse["ttft_ratio"]),
    )
    if not result["deterministic"]:
        logger.warning("equal prompts got different answers: decoding is not deterministic")
    if reuse["prefix_reuse"]:
        logger.warning("the server reuses prefixes, which MLPerf Inference forbids")
    elif reuse["prefix_reuse"] is None:
        logger.warning(
            "that the server reuses no prefixes could not be shown: it counts no cached tokens, "
            "and the times to the first token do not tell"
        )


def main(description: str | None) -> int:
    """Be the command probe_server; return the exit status."""
    return run_command(description, run_probe)
