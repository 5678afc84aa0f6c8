"""The report page: parsed as HTML, without a browser."""

import json
import os
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from report_tree import (
    RULES,
    ReportTree,
    make_tree,
    simulate,
    write_queries,
    write_sample_scores,
)
from result_tree import make_results

from fp8flow import evidence, report, report_data, report_plots
from fp8flow.records import Record, read_record, write_record
from fp8flow.report_data import DASH
from fp8flow.spec import Spec

SCRIPT = Path(__file__).parents[2] / "workflow" / "scripts" / "render_report.py"
SPEC = json.dumps({"rule": "render_report", "settings": {"report": {"title": "A <title> & more"}}})
VOID = {"meta", "link", "input", "br", "hr", "img"}
HOSTILE = '<script>alert("x")</script>'


class Page(HTMLParser):
    """What a page is made of; raises on tags that are closed in the wrong order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if not self._open or self._open[-1] != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def attributes(self, name: str) -> list[str]:
        return [attributes[name] for _, attributes in self.elements if name in attributes]

    def all(self, tag: str) -> list[dict[str, str]]:
        return [attributes for found, attributes in self.elements if found == tag]


def inputs_of(tree: ReportTree, **changes) -> report_data.ReportInputs:
    given = {**tree.shared, "runs": tree.runs, "accuracies": tree.accuracies} | changes
    return report_data.ReportInputs(tree.results, tree.results / "report", **given)


def render_tree(tree: ReportTree, **changes) -> str:
    return report.render(inputs_of(tree, **changes), "Title")


def call(tree: ReportTree, *more: str) -> subprocess.CompletedProcess[str]:
    output = tree.results / "report" / "manifest.json"
    command = [sys.executable, str(SCRIPT), "--spec", SPEC, *tree.arguments()]
    return subprocess.run(
        [*command, "--output", str(output), *more], capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> ReportTree:
    return make_tree(tmp_path_factory.mktemp("demo") / "results")


@pytest.fixture(scope="module")
def bare(tmp_path_factory) -> ReportTree:
    return make_tree(tmp_path_factory.mktemp("bare") / "results", raw=False)


@pytest.fixture(scope="module")
def html(tree) -> str:
    return render_tree(tree)


@pytest.fixture(scope="module")
def page(html) -> Page:
    return Page(html)


def test_the_page_loads_nothing(page, html):
    tags = {tag for tag, _ in page.elements}
    assert not tags & {"script", "iframe", "img", "object", "embed", "audio", "video", "form"}
    assert [link["href"] for link in page.all("link")] == ["data:,"]
    assert "http:" not in html and "https:" not in html and "@import" not in html
    policies = [m["content"] for m in page.all("meta") if "http-equiv" in m]
    assert policies and policies[0].startswith("default-src 'none'")


def test_ids_are_unique_and_every_reference_has_its_target(page, html):
    ids = page.attributes("id")
    assert len(ids) == len(set(ids))
    anchors = {href[1:] for href in page.attributes("href") if href.startswith("#")}
    clips = {part.split(")")[0] for part in html.split("url(#")[1:]}
    labels = set(page.attributes("for")) | set(page.attributes("aria-labelledby"))
    assert clips, "plots have clip paths"
    assert anchors | clips | labels <= set(ids)


def test_links_to_raw_files_are_relative_and_exist(tree, page):
    links = {href for href in page.attributes("href") if not href.startswith(("#", "data:"))}
    assert any(link.endswith("queries.parquet") for link in links)
    for link in links:
        assert link.startswith("../")
        assert Path(os.path.normpath(tree.results / "report" / link)).is_file(), link


def test_equal_records_give_equal_bytes_wherever_the_results_lie(tmp_path):
    first = make_tree(tmp_path / "a" / "results")
    before = render_tree(first)
    shutil.copytree(first.results, tmp_path / "b" / "deeper" / "results")
    moved = tmp_path / "b" / "deeper" / "results"

    def again(record):
        return read_record(moved / record.path.relative_to(first.results))

    second = ReportTree(
        moved,
        {name: again(record) for name, record in first.shared.items()},
        [again(record) for record in first.runs],
        [again(record) for record in first.accuracies],
    )
    assert render_tree(second) == before
    assert str(tmp_path) not in before


def test_accessible_without_sight_of_the_plots(page):
    figures = [a for _, a in page.elements if a.get("class") == "plot"]
    assert len(figures) == len(page.all("figure")) >= 14
    assert all(a["role"] == "img" and len(a["aria-label"]) > 30 for a in figures)
    assert all("scope" in attributes for attributes in page.all("th"))
    assert len(page.all("caption")) == len(page.all("table"))
    assert page.all("html") == [{"lang": "en"}]
    assert len(page.all("h1")) == 1
    assert any(m.get("name") == "viewport" for m in page.all("meta"))
    assert all("aria-label" in a for a in page.all("svg") if a.get("role") == "img")


def test_the_numbers_are_those_of_the_records(tree, page):
    for run in tree.runs:
        if run.result["mode"] == "performance":
            throughput = run.result["throughput"]
            assert f"{throughput['output_tokens_per_s']:,.2f} tokens/s" in page.text
            assert f"{throughput['samples_per_s']:,.2f} samples/s" in page.text
            for kind in ("ttft", "tpot"):
                value = report_data.milliseconds(run.result["latency_ns"][kind]["p99"])
                assert page.text.count(value) >= 3
    for value in ("31.20", "31.2000", "11.05", "21.40", "28.70", "38.3914", "-7.1914", "6,404"):
        assert value in page.text
    for heading in ("Tokens/s", "Samples/s", "TTFT p99 (ms)", "TPOT p99 (ms)", "Duration (s)"):
        assert heading in page.text


def test_the_banner_explains_a_demo(page, html):
    assert "Not submittable 2 of 3 rules that apply are not met" in page.text
    assert "expected here: this is the embedded demo" in page.text
    assert "<title>Title: not submittable</title>" in html


def test_a_rule_that_fails_everywhere_is_named_once_in_the_banner(bare):
    twice = [RULES[2] | {"scenario": scenario} for scenario in ("Offline", "Server")]
    verdict = bare.shared["verdict"]
    result = {"submittable": False, "rules": twice}
    shown = Page(render_tree(bare, verdict=Record(verdict.path, verdict.data | {"result": result})))
    assert "2 of 2 rules that apply" in shown.text
    assert "ROUGE-1 Offline, Server" in shown.text


def test_a_submittable_run_is_called_so(tmp_path):
    shown = Page(render_tree(make_tree(tmp_path / "results", raw=False, submittable=True)))
    assert "Submittable All 4 rules that apply are met" in shown.text
    assert "Not submittable" not in shown.text


def test_every_rule_is_on_the_board_failing_first(page):
    rows = [
        a["class"].rpartition(" ")[0]
        for _, a in page.elements
        if a.get("class", "").startswith("rule ")
    ]
    assert rows == ["rule fail", "rule fail", "rule pass", "rule not_applicable"]
    for rule in RULES:
        assert rule["id"] in page.text and rule["title"] in page.text
        assert rule["source"] in page.text
        assert (rule["fix"] in page.text) is (rule["status"] == "fail")
    shown = {a["id"] for a in page.all("input")}
    by_status = {"show-all", "show-fail", "show-pass", "show-not_applicable"}
    places = ("any", "all", "offline", "server", "interactive")
    assert shown == by_status | {f"scenario-{place}" for place in places}


def test_a_failed_run_is_shown_with_its_reasons(tmp_path):
    tree = make_tree(tmp_path / "results", raw=False, failures=5)
    html = render_tree(tree)
    text = Page(html).text
    assert "5 of 64 queries failed" in text
    assert "5 queries failed: reset" in text
    assert "First failure: connection lost <in mid-answer>" in text
    assert "59 of 64" in text
    assert 'class="tile bad"' in html


def test_an_invalid_run_and_disagreements_are_shown(tmp_path):
    loadgen = {"valid": False, "invalid_reason": "too short", "errors": ["clock went back"]}
    tree = make_tree(
        tmp_path / "results", raw=False, loadgen=loadgen, disagreements=["mean ttft: 1 or 2"]
    )
    text = Page(render_tree(tree)).text
    for words in ("INVALID: too short", "LoadGen: clock went back", "disagree: mean ttft: 1 or 2"):
        assert words in text


def test_what_was_not_measured_is_a_dash_with_a_reason(tmp_path):
    nothing = {"output_tokens_per_s": None, "samples_per_s": None, "definition": "x"}
    missing = {"ttft": None, "tpot": None, "latency": None}
    tree = make_tree(
        tmp_path / "results", raw=False, state="failed", reason="server died", throughput=nothing,
        latency_ns=missing,
    )  # fmt: skip
    page = Page(render_tree(tree))
    titles = page.attributes("title")
    assert titles.count("not measured: server died") >= 8
    assert f"{DASH} tokens/s" in page.text
    assert not {"None", "nan", "NaN"} & set(page.text.split())


def test_a_run_without_queries_says_so(bare):
    assert Page(render_tree(bare)).text.count("No query of this run was recorded") == 2


def test_runs_without_accuracy_and_calibration(bare):
    performance = [run for run in bare.runs if run.result["mode"] == "performance"]
    page = Page(render_tree(bare, runs=performance, accuracies=[], calibration=None))
    assert "There is no accuracy run." in page.text
    assert any("no accuracy record" in title for title in page.attributes("title"))


def test_all_foreign_text_is_escaped(tmp_path):
    tree = make_tree(
        tmp_path / "results", raw=False, model_name=HOSTILE, reason=HOSTILE, state="failed"
    )
    rules = [rule | {"title": HOSTILE, "fix": HOSTILE, "measured": HOSTILE} for rule in RULES]
    verdict = write_record(
        tree.shared["verdict"].path, Spec("v"), {"submittable": False, "rules": rules}
    )
    html = report.render(inputs_of(tree, verdict=verdict), HOSTILE)
    page = Page(html)
    assert page.all("script") == []
    assert page.text.count(HOSTILE) >= 8


def test_scales_of_the_checkpoint_are_plotted_or_said(page):
    labels = page.attributes("aria-label")
    for title in ("Weight scales", "Activation scales", "Saturated weights"):
        assert sum(label.startswith(f"{title}. ") for label in labels) == 1
    assert "K cache scales: all 1 are 1." in page.text
    assert "162.8 MB" in page.text and "134,515,008" in page.text


def test_an_unquantized_checkpoint_has_no_scales(tmp_path):
    empty = {"layers": [], "other": None, "total": {}}
    tree = make_tree(tmp_path / "results", raw=False, checkpoint={"scales": empty, "claims": {}})
    page = Page(render_tree(tree))
    assert "nothing in it is quantized" in page.text
    assert "not quantized" in page.attributes("title")


def test_hostile_names_make_safe_ids():
    assert report_data.slug('fp8/"x" & Server') == "fp8-x-server"


def test_long_runs_show_a_sample_of_queries_and_say_so(tmp_path):
    tree = make_tree(tmp_path / "results", count=1_000)
    html = render_tree(tree)
    assert "200 of 1,000 are shown" in Page(html).text


def test_the_command_writes_page_and_manifest(tree):
    done = call(tree)
    assert done.returncode == 0, done.stderr
    record = read_record(tree.results / "report" / "manifest.json")
    assert set(record.data["files"]) == {"index.html"}
    digests = set(record.data["inputs"].values())
    assert {r.digest for r in (*tree.runs, *tree.accuracies, *tree.shared.values())} == digests
    html = (tree.results / "report" / "index.html").read_text(encoding="utf-8")
    assert "A &lt;title&gt; &amp; more" in html


def test_a_full_size_submission_with_its_real_verdict(tmp_path):
    tree = make_results(tmp_path / "results")
    for command, arguments in (
        ("assemble_submission.py", tree.assemble_arguments()),
        ("validate_submission.py", tree.validate_arguments()),
    ):
        subprocess.run([sys.executable, str(SCRIPT.with_name(command)), *arguments], check=True)
    shared = {name: tree.records[name] for name in ("model", "dataset", "calibration")}
    verdict = read_record(tree.submission.with_name("verdict.json"))
    given = report_data.ReportInputs(
        results=tree.results,
        folder=tree.results / "report",
        **shared,
        checkpoint=tree.records["checkpoint"],
        verdict=verdict,
        runs=[read_record(Path(path)) for path in tree.runs()],
        accuracies=[read_record(Path(path)) for path in tree.of("scores")],
    )
    html = report.render(given, "Full size")
    page = Page(html)
    rules = verdict.result["rules"]
    failing = [rule["title"] for rule in rules if rule["status"] == "fail"]
    applicable = sum(rule["status"] != "not_applicable" for rule in rules)
    assert f"{len(failing)} of {applicable} rules that apply are not met" in page.text
    assert "the embedded demo" not in page.text
    assert "Compliance test TEST06 Offline, Server" in page.text
    assert sum(a.get("class", "").startswith("rule ") for _, a in page.elements) == len(rules)
    for value in ("38.3915", "38.3914", "15.7485", "15.7484", "24.2507", "35.4351", "13,368"):
        assert value in page.text
    assert "Weight scales: none" not in page.text and "K cache scales: none" in page.text
    assert len(html) < 3_000_000


def test_the_command_takes_an_empty_calibration(bare):
    done = call(bare, "--calibration", "")
    assert done.returncode == 0, done.stderr
    record = read_record(bare.results / "report" / "manifest.json")
    assert "data/calibration/manifest.json" not in record.data["inputs"]


def test_the_command_refuses_a_changed_measurement(tmp_path):
    tree = make_tree(tmp_path / "results")
    write_queries(tree.runs[0].root / "attempts" / "1" / "queries.parquet", simulate("Server", 9))
    done = call(tree)
    assert done.returncode == 1
    assert "was changed after it was made" in done.stderr
    assert not (tree.results / "report").exists()


def test_provenance_keeps_only_direct_edges(tree):
    nodes = {n.name: n for n in report_data.provenance(inputs_of(tree).records, tree.results)}
    assert nodes["model/manifest.json"].layer == 0
    assert nodes["fp8/checkpoint/manifest.json"].parents == {"data/calibration/manifest.json"}
    scores = nodes["fp8/Server/accuracy/accuracy.json"]
    assert scores.parents == {"fp8/Server/accuracy/run.json"}
    assert nodes["submission/verdict.json"].layer == max(n.layer for n in nodes.values())


def test_provenance_tells_equal_outcomes_apart(bare):
    given = inputs_of(bare)
    twins = [Record(r.path, r.data | {"digest": "same"}) for r in bare.accuracies]
    verdict = given.verdict
    inputs = {"Offline-scores": "same", "Server-scores": "same"}
    judged = Record(verdict.path, verdict.data | {"inputs": inputs})
    nodes = report_data.provenance([*bare.runs, *twins, judged], bare.results)
    assert nodes[-1].name == "submission/verdict.json"
    assert nodes[-1].parents == {given.name(record) for record in bare.accuracies}


def test_provenance_names_inputs_whose_record_is_not_given(tree):
    known = [record for name, record in tree.shared.items() if name != "calibration"]
    nodes = {n.name: n for n in report_data.provenance(known, tree.results)}
    assert nodes["calibration"].record is None
    assert "calibration" in nodes["fp8/checkpoint/manifest.json"].parents


def test_queries_start_when_scheduled_and_failures_have_no_latency(tmp_path):
    rows = simulate("Offline", 20, failures=3)
    rows[5]["first_token_ns"] = None
    write_queries(tmp_path / "q.parquet", rows)
    queries = report_data.read_queries(tmp_path / "q.parquet")
    assert queries is not None
    assert queries.failed.sum() == 3
    assert len(queries.ttft_ms) == len(queries.latency_s) == 17
    assert np.isclose(queries.latency_s.max(), max(r["done_ns"] for r in rows[3:]) / 1e9)
    assert not np.isnan(queries.ttft_ms).any()


def test_sample_scores_leave_missing_ones_out(tmp_path):
    write_sample_scores(tmp_path / "accuracy_samples.parquet", missing=5)
    files = ["accuracy_samples.parquet"]
    record = write_record(tmp_path / "accuracy.json", Spec("score_accuracy"), {}, files=files)
    samples = report_data.load_sample_scores(record)
    assert samples is not None
    assert list(samples.scores) == ["ROUGE-1", "ROUGE-2", "ROUGE-L", "ROUGE-Lsum"]
    assert all(len(values) == 27 for values in (*samples.scores.values(), samples.tokens))
    assert 20 < samples.scores["ROUGE-1"].mean() < 40
    write_sample_scores(tmp_path / "accuracy_samples.parquet", missing=32)
    assert report_data.load_sample_scores(record) is None


def test_incomplete_scoring_is_shown(bare):
    scored = bare.accuracies[0]
    result = scored.result | {"state": "incomplete", "reason": "3 of 32 responses are missing"}
    short = Record(scored.path, scored.data | {"result": result})
    html = render_tree(bare, accuracies=[short, *bare.accuracies[1:]])
    assert "Scoring: 3 of 32 responses are missing" in Page(html).text
    assert Page(html).text.count("incomplete") == 2


def test_no_queries_is_none(tmp_path):
    write_queries(tmp_path / "q.parquet", [])
    assert report_data.read_queries(tmp_path / "q.parquet") is None


COUNTS = st.integers(1, 60)


def queries_of(tmp: Path, count: int, failures: int = 0) -> report_plots.Queries:
    write_queries(tmp / "q.parquet", simulate("Server", count, failures))
    queries = report_data.read_queries(tmp / "q.parquet")
    assert queries is not None
    return queries


@settings(max_examples=15, deadline=None)
@given(count=COUNTS, failures=st.integers(0, 5))
def test_tokens_and_requests_over_time_add_up(tmp_path_factory, count, failures):
    queries = queries_of(tmp_path_factory.mktemp("q"), count, min(failures, count))
    times = np.linspace(-1, queries.duration_s + 1, 50)
    tokens = report_plots.tokens_until(queries, times)
    assert np.isclose(tokens[-1], queries.tokens[~queries.failed].sum())
    assert tokens[0] == 0 and (np.diff(tokens) >= -1e-9).all()
    waiting, generating = report_plots.in_flight(queries, times)
    assert (waiting >= 0).all() and (generating >= 0).all()
    assert waiting[-1] == generating[-1] == 0
    assert (waiting + generating).max() <= count


def test_chosen_queries_hold_every_failure(tmp_path):
    queries = queries_of(tmp_path, 500, failures=20)
    chosen = report_plots.choose(queries, 100)
    assert len(chosen) <= 100
    assert queries.failed[chosen].sum() == 20
    assert (np.diff(chosen) > 0).all()


@pytest.mark.parametrize("duration", [0.01, 3, 20, 79, 81, 660, 9_000, 100_000])
def test_bins_are_round_and_few(duration):
    width = report_plots.bin_width(duration)
    assert duration / width <= 80.001
    assert width >= 1 or duration < 15


def test_svg_uses_the_page_s_colours_and_is_repeatable():
    values = np.arange(1.0, 65.0)
    first = report_plots.ecdf("name", values, "TTFT (ms)", 64.0, 2000.0)
    assert first == report_plots.ecdf("name", values, "TTFT (ms)", 64.0, 2000.0)
    assert "var(--blue)" in first and "limit 2,000 ms" in first
    assert not any(placeholder in first for placeholder in report_plots.COLOURS)
    other = report_plots.ecdf("other", values, "TTFT (ms)", 64.0, 2000.0)
    assert 'id="name-' in first and 'id="name-' not in other


@pytest.mark.parametrize("values", [[5.0], [5.0, 5.0], [0.0, 0.0], [1.0, 1e6], [0.25, 0.5]])
def test_plots_survive_odd_values(values):
    array = np.array(values)
    assert report_plots.ecdf("a", array, "TTFT (ms)", None).startswith("<svg")
    assert report_plots.histogram("b", array, "tokens").startswith("<svg")


@pytest.mark.parametrize(
    ("limit", "number"),
    [
        (">= 38.391408", 38.391408),
        ("at least 1,234.5 of rouge1", 1234.5),
        (13_368, 13368.0),
        ({"key": "rouge1", "reference": 38.7792, "least": 0.99}, 38.391408),
        ({"key": "rouge1"}, None),
        (None, None),
    ],
)
def test_smallest_passing(limit, number):
    assert report_data.smallest_passing(limit) == pytest.approx(number)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, DASH),
        ([], DASH),
        (evidence.NOT_MEASURED, DASH),
        (True, "yes"),
        (0, "0"),
        (13368, "13,368"),
        (38.391408, "38.3914"),
        ({"a": 1, "b": ["x", "y"]}, "a: 1\nb: x, y"),
    ],
)
def test_value_text(value, text):
    assert report_data.value_text(value) == text
