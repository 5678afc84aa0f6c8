"""The embedded server over HTTP: dialect, batching, cancellation, death and stop."""

import asyncio
import copy
import json
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from test_embedded_quantizer import export, quantize, tiny_llama, tiny_prompts
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers.generation.continuous_batching.requests import RequestStatus

from fakebackend import make_spec
from fp8flow.backends import Place, Served, get_backend
from fp8flow.client import request_body, run_requests
from fp8flow.config_engines import TransformersEngine
from fp8flow.embedded import protocol
from fp8flow.embedded.engine import Engine, EngineOptions, MinTokens
from fp8flow.embedded.server import Answer, build_app
from fp8flow.load_job import Task, run_load_job
from fp8flow.probe import run_probe
from fp8flow.records import build_product
from fp8flow.serve import Resources
from fp8flow.spec import Spec

EOS = 1
VOCABULARY = 300
SERVE = {"max_batch_size": 4, "max_batch_tokens": 64, "kv_cache_tokens": 64}


def served(checkpoint):
    return Served(checkpoint, checkpoint, "FP8", "fp8")


def parse(answer):
    """Return the settings of an answer as a load job sees them."""
    return get_backend("transformers").parse_settings({"/fp8flow/settings": answer}, "")


def write_tokenizer(folder):
    """One token per byte: ids 2 to 257; 0 and 1 are special."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<bos>": 0, "<eos>": EOS} | {c: i + 2 for i, c in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<bos>", "<eos>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served") / "tiny-fp8"
    model = tiny_llama().to(torch.float32)
    with torch.no_grad():
        model.lm_head.weight[258:] = 0.0  # ids without a text are not chosen
    reference = quantize(model, "static", tiny_prompts())
    return write_tokenizer(export(copy.deepcopy(reference), folder))


class Server:
    """The launcher in a process of its own."""

    def __init__(self, checkpoint, log):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        backend = get_backend("transformers")
        engine = {"serve": SERVE | {"kv_cache_tokens": 1024}}
        place = Place("127.0.0.1", self.port, "tiny", 1, checkpoint)
        argv = backend.serve_command(engine, served(checkpoint), place)
        environment = os.environ | backend.serve_environment(engine, 1)
        self.log = log
        with log.open("w") as stream:
            self.process = subprocess.Popen(argv, stdout=stream, stderr=stream, env=environment)
        self.base_url = f"http://127.0.0.1:{self.port}"

    def wait(self):
        for _ in range(600):
            assert self.process.poll() is None, self.log.read_text()
            try:
                if self.get("/health")[0] == 200:
                    return self
            except OSError:
                time.sleep(0.1)
        raise AssertionError(self.log.read_text())

    def call(self, path, data=None):
        request = urllib.request.Request(self.base_url + path, data=data)
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                return reply.status, reply.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def get(self, path):
        status, body = self.call(path)
        return status, json.loads(body)

    def post(self, **body):
        status, reply = self.call("/v1/completions", json.dumps(body).encode())
        return status, json.loads(reply)

    def settings(self):
        return self.get("/fp8flow/settings")[1]


@pytest.fixture(scope="module")
def server(checkpoint, tmp_path_factory):
    server = Server(checkpoint, tmp_path_factory.mktemp("log") / "server.log")
    try:
        yield server.wait()
    finally:
        server.process.kill()
        server.process.wait()


GREEDY = {"model": "tiny", "temperature": 0}


def test_settings_are_read_from_the_live_engine(server):
    found = server.settings()
    assert found["prefix_reuse"] is False
    assert found["allow_block_sharing"] is False
    assert found["max_batch_size"] == 4
    assert found["max_batch_tokens"] == 64
    assert found["kv_cache"]["tokens"] == 1024
    assert found["threads"] == 1
    assert found["quantization"]["method"] == "FP8"
    assert found["quantization"]["kv_cache"]["emulated"] is True
    assert parse(found)["prefix_reuse"] is False
    asked = get_backend("transformers").asked({"serve": SERVE}, None)
    assert asked == {key: parse(found)[key] for key in asked} != {}


def test_traffic_changes_nothing_but_the_counters(server):
    """A load job compares the settings from before and after a run."""
    before = parse(server.settings())
    assert server.post(**GREEDY, prompt=[5, 6], max_tokens=2)[0] == 200
    after = parse(server.settings())
    assert [key for key in after if after[key] != before[key]] == ["counters"]


def test_models_and_served_name(server):
    assert [m["id"] for m in server.get("/v1/models")[1]["data"]] == ["tiny"]


def test_text_prompt_equals_its_token_ids(server):
    ids = [2, 30, 31, 32]
    tokenizer = Tokenizer.from_file(str(server_tokenizer(server)))
    text = tokenizer.decode(ids)
    assert tokenizer.encode(text).ids == ids
    by_ids = server.post(**GREEDY, prompt=ids, max_tokens=6, ignore_eos=True)[1]
    by_text = server.post(**GREEDY, prompt=text, max_tokens=6, ignore_eos=True)[1]
    assert by_ids["choices"] == by_text["choices"]
    assert by_ids["usage"] == {"prompt_tokens": 4, "completion_tokens": 6, "total_tokens": 10}
    assert by_ids["choices"][0]["finish_reason"] == "length"


def server_tokenizer(server):
    from pathlib import Path

    return Path(server.settings()["model_path"]) / "tokenizer.json"


def test_stream_has_the_ids_of_each_chunk_then_usage_then_done(server):
    body = {**GREEDY, "prompt": tiny_prompts()[0], "max_tokens": 7, "ignore_eos": True}
    whole = server.post(**body)[1]
    streamed = body | {"stream": True, "stream_options": {"include_usage": True}}
    _, raw = server.call("/v1/completions", json.dumps(streamed).encode())
    events = [line[6:] for line in raw.decode().split("\n\n") if line]
    assert events.pop() == "[DONE]"
    chunks = [json.loads(event) for event in events]
    assert chunks.pop()["usage"] == whole["usage"]
    choices = [chunk["choices"][0] for chunk in chunks]
    ids = [i for choice in choices for i in choice["token_ids"]]
    assert ids == whole["choices"][0]["token_ids"]
    assert "".join(choice["text"] for choice in choices) == whole["choices"][0]["text"]
    assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
    assert choices[-1]["finish_reason"] == "length"


def test_a_batch_gives_each_request_the_answer_it_gets_alone(server, checkpoint):
    """More requests than slots, prompts longer than a step, all at once."""
    torch.manual_seed(3)
    prompts = [torch.randint(2, 258, (n,)).tolist() for n in (5, 90, 17, 70, 33, 8, 64, 41, 12)]
    alone = [
        server.post(**GREEDY, prompt=p, max_tokens=20, ignore_eos=True)[1]["choices"][0]
        for p in prompts
    ]
    fields = {"top_k": 1, "ignore_eos": True}
    bodies = [request_body("tiny", p, 20, fields) for p in prompts]
    together = run_requests([server.base_url], bodies, max_connections=9, timeout_s=60)
    assert [c.error for c in together] == [None] * 9
    same = [
        sum(a == b for a, b in zip(c.token_ids, o["token_ids"], strict=True))
        for c, o in zip(together, alone, strict=True)
    ]
    assert sum(same) >= 0.9 * 9 * 20  # rounding differs with the shape of a batch
    assert server.settings()["counters"]["prefix_hit_tokens"] == 0


def test_repeated_prompts_are_computed_again(server):
    prompt = list(range(2, 130))
    before = server.settings()["counters"]
    for _ in range(3):
        assert server.post(**GREEDY, prompt=prompt, max_tokens=2)[0] == 200
    after = server.settings()["counters"]
    grown = {key: after[key] - before[key] for key in after}
    assert grown["completed"] == 3
    assert grown["prompt_tokens"] == grown["computed_prompt_tokens"] == 3 * 128
    assert after["prefix_hit_tokens"] == 0


@pytest.mark.parametrize("share", [True, False])
def test_reuse_is_noticed_where_it_happens(checkpoint, share):
    """The control: the same engine, once with prefix sharing on."""
    from fastapi.testclient import TestClient

    options = EngineOptions(checkpoint, "tiny", 4, 64, 1024, 1, "float32", share_prefixes=share)
    engine = Engine(options)
    body = {**GREEDY, "prompt": list(range(2, 130)), "max_tokens": 3, "ignore_eos": True}
    engine.start()
    with TestClient(build_app(engine)) as client:
        first, second = (client.post("/v1/completions", json=body).json() for _ in range(2))
        answer = client.get("/fp8flow/settings").json()
    assert first["choices"] == second["choices"]
    hits = 96 if share else 0  # whole pages of 32 tokens, but not the page of the last token
    assert answer["counters"]["prefix_hit_tokens"] == hits
    assert answer["counters"]["computed_prompt_tokens"] == 2 * 128 - hits
    assert answer["prefix_reuse"] is answer["allow_block_sharing"] is share
    assert parse(answer)["prefix_reuse"] is share


def test_reuse_is_noticed_whoever_does_it(engine):
    """A scheduler that skips tokens on its own, although sharing is off."""
    schedule = engine.scheduler._infer_request_tokens

    def skipping(state, removed):
        if state.status == RequestStatus.PENDING:
            state.remaining_prefill_tokens = state.remaining_prefill_tokens[5:]
            state.position_offset += 5
        return schedule(state, removed)

    engine.scheduler._infer_request_tokens = skipping
    asyncio.run(generate(engine, list(range(2, 42)), 3))
    counters = engine.settings()["counters"]
    assert (counters["prefix_hit_tokens"], counters["computed_prompt_tokens"]) == (5, 35)


def test_requests_that_were_evicted_count_no_hits(checkpoint):
    """A cache too small for all: some are evicted and computed again."""
    engine = Engine(EngineOptions(checkpoint, "tiny", 4, 64, 256, 1, "float32"))
    engine.start()

    async def ask():
        prompts = [[start + i for i in range(60)] for start in (2, 70, 130, 190)]
        return await asyncio.gather(*(generate(engine, p, 40, f"r{p[0]}") for p in prompts))

    answers = asyncio.run(ask())
    engine.stop()
    counters = engine.settings()["counters"]
    assert [len(answer) for answer in answers] == [40] * 4
    assert counters["prefix_hit_tokens"] == 0
    assert counters["computed_prompt_tokens"] > counters["prompt_tokens"] == 240


async def generate(engine, prompt, max_tokens, name="r", min_tokens=0, ignore_eos=True):
    queue = asyncio.Queue()
    engine.submit(name, prompt, max_tokens, min_tokens, ignore_eos, queue.put_nowait)
    while True:
        output = await asyncio.wait_for(queue.get(), 60)
        assert output.error is None
        if output.is_finished():
            return output.generated_tokens


@pytest.mark.parametrize(
    ("change", "status", "says"),
    [
        ({"model": "other"}, 404, "available: tiny"),
        ({"temperature": 0.7}, 400, "greedy"),
        ({"prompt": []}, 400, "empty"),
        ({"prompt": [1, 2, "x"]}, 400, "token ids"),
        ({"prompt": [5, VOCABULARY]}, 400, "vocabulary of 300"),
        ({"prompt": [5] * 600}, 400, "512 tokens"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"min_tokens": 9}, 400, "exceeds max_tokens"),
        ({"n": 2}, 400, "n 2"),
        ({"max_token": 4}, 400, "unknown field 'max_token'"),
    ],
)
def test_bad_requests_are_refused_with_the_reason(server, change, status, says):
    body = {**GREEDY, "prompt": [5, 6], "max_tokens": 4} | change
    found, reply = server.post(**body)
    assert found == status
    assert says in reply["error"]["message"]


def test_a_body_that_is_not_json_is_refused(server):
    status, reply = server.call("/v1/completions", b"{not json")
    assert status == 400
    assert "not JSON" in json.loads(reply)["error"]["message"]


def test_a_client_that_leaves_cancels_its_request(server):
    body = {**GREEDY, "prompt": [5, 6], "max_tokens": 500, "ignore_eos": True, "stream": True}
    data = json.dumps(body).encode()
    before = server.settings()["counters"]
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
        connection.sendall(head.encode() + data)
        assert b"data: " in connection.recv(4096) + connection.recv(4096)
    for _ in range(100):
        after = server.settings()["counters"]
        if after["cancelled"] > before["cancelled"]:
            break
        time.sleep(0.1)
    assert after["cancelled"] == before["cancelled"] + 1
    assert after["completed"] == before["completed"]
    assert server.post(**GREEDY, prompt=[7], max_tokens=1)[0] == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/reset"])
def test_nothing_but_completions_can_load_the_server(server, path):
    assert server.call(path, b"{}")[0] == 404


def test_the_application_is_that_of_transformers_serve(server):
    request = urllib.request.Request(server.base_url + "/health", headers={"x-request-id": "me"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        assert reply.headers["x-request-id"] == "me"


def test_sigterm_stops_an_open_request_and_the_process(checkpoint, tmp_path):
    server = Server(checkpoint, tmp_path / "server.log").wait()
    body = {**GREEDY, "prompt": [5], "max_tokens": 500, "ignore_eos": True}
    replies = []
    thread = threading.Thread(target=lambda: replies.append(attempt(server, body)))
    thread.start()
    while server.settings()["counters"]["received"] < 1:
        time.sleep(0.05)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(timeout=20) is not None
    thread.join(timeout=20)
    assert replies, "the client hangs"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", server.port), timeout=1)


def attempt(server, body):
    try:
        return server.post(**body)
    except OSError as error:
        return error


@pytest.fixture
def engine(checkpoint):
    engine = Engine(EngineOptions(checkpoint, "tiny", 4, 64, 1024, 1, "float32"))
    engine.start()
    yield engine
    engine.stop()


def test_a_dead_generation_thread_is_500_and_unhealthy(engine):
    """The failure is a real one, raised in the thread by the model."""
    from fastapi.testclient import TestClient

    def explode(*_args, **_kwargs):
        raise RuntimeError("out of tiles")

    body = {**GREEDY, "prompt": [5], "max_tokens": 4}
    with TestClient(build_app(engine)) as client:
        assert client.get("/health").status_code == 200
        assert client.post("/v1/completions", json=body).status_code == 200
        engine.model.model.layers[0].forward = explode
        first = client.post("/v1/completions", json=body)
        assert (first.status_code, "out of tiles" in first.text) == (500, True)
        deadline = time.monotonic() + 20
        # The thread answers before it ends.
        while (health := client.get("/health")).status_code == 200 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert (health.status_code, "out of tiles" in health.text) == (503, True)
        again = client.post("/v1/completions", json=body | {"stream": True})
        assert again.status_code == 500
    assert engine.settings()["counters"]["failed"] == 2


def test_end_of_sequence_ends_an_answer_but_not_before_min_tokens(engine):
    """A model that prefers end-of-sequence to all else, then token 7."""
    head = torch.nn.Linear(64, VOCABULARY)
    with torch.no_grad():
        head.weight.zero_()
        head.bias.zero_()
        head.bias[EOS], head.bias[7] = 2.0, 1.0
    engine.model.lm_head = head

    def ask(min_tokens, ignore_eos=False):
        return generate(engine, [5, 6], 6, "r", min_tokens, ignore_eos)

    assert asyncio.run(ask(0)) == [EOS]
    assert asyncio.run(ask(3)) == [7, 7, 7, EOS]
    assert asyncio.run(ask(6)) == [7] * 6
    assert asyncio.run(ask(0, ignore_eos=True)) == [EOS] * 6


def test_min_tokens_masks_only_requests_below_their_minimum():
    scores = torch.ones(3, 5)
    MinTokens([1, 4])(scores, torch.tensor([1, 0, 1, 0], dtype=torch.int32))
    assert torch.isinf(scores).tolist() == [
        [False, True, False, False, True],
        [False] * 5,
        [False, True, False, False, True],
    ]


def test_an_answer_cut_inside_a_character_keeps_its_text(engine):
    """The euro sign is three tokens here; a stream must not lose or repeat any text."""
    ids = engine.tokenizer("a€b", add_special_tokens=False)["input_ids"]
    assert len(ids) == 5
    for end in range(1, 6):
        request = protocol.CompletionRequest("tiny", [5], 9, 0, False, True, True)
        answer = Answer(engine, request)
        pieces = [answer.add(Output(ids[: n + 1], n + 1 == end))["text"] for n in range(end)]
        assert "".join(pieces) == engine.tokenizer.decode(ids[:end])


class Output:
    """What the generation thread delivers after a step."""

    def __init__(self, tokens, finished):
        self.generated_tokens, self.finished = tokens, finished

    def is_finished(self):
        return self.finished


def launcher_argv(checkpoint, **serve):
    place = Place("127.0.0.1", 1, "m", 1, checkpoint)
    engine = {"serve": SERVE | serve}
    return get_backend("transformers").serve_command(engine, served(checkpoint), place)


def refusal(argv):
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    return done.stderr


def test_too_many_slots_for_a_step_is_refused_before_loading(checkpoint):
    argv = launcher_argv(checkpoint, max_batch_tokens=2)
    assert "--max-batch-tokens 2 is below --max-batch-size 4" in refusal(argv)


def test_a_directory_without_a_model_is_refused(tmp_path):
    assert f"{tmp_path} has no config.json" in refusal(launcher_argv(tmp_path))


@pytest.fixture
def two(checkpoint, tmp_path, monkeypatch):
    """A job on two servers with a small data set: what it works on."""
    monkeypatch.setenv("FP8FLOW_LOCK_DIR", str(tmp_path / "locks"))
    manifest = tmp_path / "checkpoint" / "manifest.json"
    with build_product(manifest, Spec("quantize")) as product:
        shutil.copytree(checkpoint, product.folder, dirs_exist_ok=True)
        product.result.update(quant_algo="FP8", kv_cache="fp8", method="fp8_static")
    dataset = tmp_path / "data" / "manifest.json"
    torch.manual_seed(5)
    prompts = [torch.randint(2, 258, (n,)).tolist() for n in range(20, 44)]
    with build_product(dataset, Spec("prepare_dataset")) as product:
        columns = {
            "index": pa.array(range(24), pa.int64()),
            "token_ids": pa.array(prompts, pa.list_(pa.int32())),
            "input_tokens": pa.array(map(len, prompts), pa.int32()),
        }
        pq.write_table(pa.table(columns), product.folder / "samples.parquet")

    def task(mode):
        serving = {"max_batch_size": 4, "max_batch_tokens": 64, "kv_cache_tokens": 1024}
        engine = TransformersEngine(backend="transformers", replicas=2, serve=serving)
        changes = {"max_output_tokens": 6, "target_qps": 1.0, "min_duration_ms": 0}
        spec = make_spec(mode, engine=engine.model_dump(), **changes)
        output = tmp_path / mode / "run.json"
        resources = Resources(threads=2, ready_timeout_s=120.0, stop_grace_s=10.0)
        return Task(spec, manifest, dataset, output, get_backend("transformers"), resources)

    return task


def test_two_servers_measure_together(two):
    result = run_load_job(two("accuracy"), "accuracy").result
    server = result["server"]
    assert result["state"] == "complete", result["reason"]
    assert result["counts"]["completed"] == 24
    assert (server["replicas"], server["threads"]) == (2, 1)
    assert server["settings"]["kv_cache_tokens"] == 1024
    assert server["asked"] == {"max_batch_size": 4, "max_batch_tokens": 64}
    assert len({one["port"] for one in server["servers"]}) == 2
    # 24 samples, the first token of each, and three for the warm-up.
    counters = server["settings_after"]["counters"]
    assert (counters["completed"], counters["prefix_hit_tokens"]) == (24 + 2 + 3, 0)
    assert server["prefix_reuse"] is False


def test_two_servers_are_probed(two):
    result = run_probe(two("probe")).result
    assert result["reuse"]["servers"] == ["off, counted", "off, counted"]
    assert (result["reuse"]["prefix_reuse"], result["deterministic"]) == (False, True)
    assert result["parity"]["mismatches"] == 0
