"""The probe's reading of answers: token counts without ids, and times on a fast server."""

import numpy as np
import pytest

import fakebackend
from fakebackend import FakeBackend, make_inputs, make_spec
from fp8flow import probe
from fp8flow.client import Completion
from fp8flow.errors import FlowError
from fp8flow.load_job import Task
from fp8flow.probe import probe_reuse, run_probe
from fp8flow.serve import Resources
from fp8flow.server import Endpoint

RESOURCES = Resources(threads=1, ready_timeout_s=20.0, stop_grace_s=2.0)


@pytest.fixture(autouse=True)
def locks(tmp_path, monkeypatch):
    monkeypatch.setenv("FP8FLOW_LOCK_DIR", str(tmp_path / "locks"))


def run(folder, backend):
    checkpoint, dataset = make_inputs(folder)
    output = folder / "server" / "probe.json"
    return run_probe(Task(make_spec("probe"), checkpoint, dataset, output, backend, RESOURCES))


class TextOnly(FakeBackend):
    streams_token_ids = False

    def __init__(self, **options):
        super().__init__(no_token_ids=True, **options)

    def request_fields(self, min_tokens, max_tokens):
        return {}


def test_without_ids_the_texts_are_counted_again(tmp_path):
    parity = run(tmp_path, TextOnly()).result["parity"]
    assert parity == {
        **{"prompts": 20, "mismatches": 0, "without_token_ids": 20},
        **{"recounted": 20, "recount_agrees": 20},
    }


def test_texts_that_give_other_tokens_are_no_error(tmp_path, monkeypatch):
    """The vocabulary of the checkpoint's tokenizer knows none of the server's words."""

    def write(path):
        from tokenizers import Tokenizer, models

        Tokenizer(models.BPE({"w": 0, " ": 1, "1": 2}, [])).save(str(path))

    monkeypatch.setattr(fakebackend, "write_tokenizer", write)
    parity = run(tmp_path, TextOnly()).result["parity"]
    assert (parity["recounted"], parity["recount_agrees"]) == (20, 0)


def test_an_answer_without_ids_that_was_cut_has_the_longest_length(tmp_path):
    with pytest.raises(FlowError, match="sample 0: 8 output tokens, usage says 9"):
        run(tmp_path, TextOnly(wrong_usage=True))


@pytest.mark.parametrize(
    ("answer", "problems"),
    [
        (Completion(prompt_tokens=3, completion_tokens=2, finish_reason="stop"), []),
        (Completion(prompt_tokens=3, completion_tokens=8, finish_reason="length"), []),
        (
            Completion(prompt_tokens=3, completion_tokens=7, finish_reason="length"),
            ["8 output tokens, usage says 7"],
        ),
        (
            Completion(prompt_tokens=3, finish_reason="stop"),
            ["some output tokens, usage says None"],
        ),
        (
            Completion(prompt_tokens=4, completion_tokens=2, token_ids=[1], finish_reason="stop"),
            ["3 input tokens, usage says 4", "1 output tokens, usage says 2"],
        ),
    ],
)
def test_count_problems(answer, problems):
    assert probe._count_problems([1, 2, 3], answer) == problems


class Timed:
    """A server whose answers take made-up times: short prompts 10 ms, long ones 40 ms."""

    def __init__(self, compile_ms=0, repeated_ms=40.0, serve=None):
        self.backend = FakeBackend()
        self.engine = {"serve": serve or {}}
        self.workload = self
        generator = np.random.default_rng(0)
        self.prompts = [generator.integers(0, 99, n).astype(np.int32) for n in (50, 2000)]
        self.compile_ms, self.repeated_ms = compile_ms, repeated_ms
        self.seen = []

    def ask(self, prompts, **_):
        (prompt,) = prompts
        taken_ms = 10.0
        if len(prompt) > 4:
            again = any(np.array_equal(prompt, other) for other in self.seen)
            taken_ms = self.repeated_ms if again else 40.0
            # What is compiled for the first prompt of its length.
            taken_ms += self.compile_ms if len(prompt) not in map(len, self.seen) else 0
        self.seen.append(prompt)
        return [Completion(first_token_ns=int(taken_ms * 1e6), token_ids=[1])]

    def require_answers(self, *_, **__):
        pass


@pytest.fixture
def no_counts(monkeypatch):
    monkeypatch.setattr(probe, "_hits", lambda *_: None)
    monkeypatch.setattr(probe, "cached_tokens", lambda *_: None)


SERVER = Endpoint("127.0.0.1", 1)


@pytest.mark.parametrize("compile_ms", [0, 9000])
def test_what_is_compiled_for_the_first_prompt_does_not_look_like_reuse(no_counts, compile_ms):
    found = probe_reuse(Timed(compile_ms), SERVER)
    assert found["prefix_reuse_proof"] == "off, by time"
    assert (found["ttft_ratio"], found["prompts"]) == (1.0, 9)
    assert set(found["prompt_tokens"]) == {2000}


def test_reuse_shows_in_the_times(no_counts):
    with pytest.raises(FlowError, match=r"the server reuses prefixes.*takes 0\.30 of the time"):
        probe_reuse(Timed(repeated_ms=12.0), SERVER)
    found = probe_reuse(Timed(repeated_ms=12.0, serve={"prefix_caching": True}), SERVER)
    assert found["prefix_reuse"] is True


def test_a_server_that_counts_needs_fewer_repetitions(monkeypatch):
    monkeypatch.setattr(probe, "_hits", lambda *_: 0)
    found = probe_reuse(Timed(), SERVER)
    assert (found["prefix_reuse_proof"], found["prompts"]) == ("off, counted", 3)
