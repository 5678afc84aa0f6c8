"""Readers of LoadGen's logs, on lines of its format and on the schedule of a real log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fp8flow.errors import FlowError
from fp8flow.loadgen_log import (
    DetailLog,
    json_exact,
    listed,
    parse_detail,
    parse_summary,
    scheduled_ns,
    server_schedule_ns,
)
from fp8flow.loadgen_settings import SEEDS


def line(key: str, value: Any, error: bool = False, warning: bool = False) -> str:
    metadata = {"is_error": error, "is_warning": warning, "file": "x.cc", "line_no": 1}
    entry = {"key": key, "value": value, "time_ms": 0.1, "metadata": metadata}
    return f":::MLLOG {json.dumps(entry)}\n"


def test_values_errors_and_warnings(tmp_path: Path) -> None:
    path = tmp_path / "detail.txt"
    path.write_text(
        line("effective_schedule_rng_seed", SEEDS["schedule_rng_seed"])
        + line("effective_scenario", "Server")
        + line("generic_message", "one")
        + line("generic_message", "two")
        + line("error_runtime", "bad", error=True)
        + line("error_runtime", "bad", error=True)
        + line("warning_generic_message", "hm", warning=True)
        + line("result_validity", "VALID"),
        encoding="utf-8",
    )
    log = parse_detail(path)
    assert log.part("effective_") == {
        "schedule_rng_seed": 16159082839903944936,
        "scenario": "Server",
    }
    assert log.values["generic_message"] == "two"
    assert listed(log.errors) == ["error_runtime: bad (2 times)"]
    assert listed(log.warnings) == ["warning_generic_message: hm"]
    assert log.is_complete("performance")
    assert not log.is_complete("accuracy")
    assert not log.unreadable


def test_truncated_log_is_read_up_to_the_cut(tmp_path: Path) -> None:
    whole = line("loadgen_version", "6") + line("result_validity", "VALID")
    for cut in range(len(line("loadgen_version", "6")), len(whole) - 2):
        path = tmp_path / "detail.txt"
        path.write_text(whole[:cut], encoding="utf-8")
        log = parse_detail(path)
        assert log.version == "6"
        assert not log.is_complete("performance")


def test_lines_that_are_no_entries_are_kept_as_such(tmp_path: Path) -> None:
    path = tmp_path / "detail.txt"
    broken = ':::MLLOG {"key": "result_x", "value": -nan, "metadata": {}}\n'
    path.write_text("noise\n" + broken + line("a", 1) + line("b", float("nan")), encoding="utf-8")
    log = parse_detail(path)
    assert len(log.unreadable) == 2
    assert log.values == {"a": 1, "b": "NaN"}


@pytest.mark.parametrize("content", [None, "", "noise\n"])
def test_no_log(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "detail.txt"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    with pytest.raises(FlowError, match=r"detail\.txt"):
        parse_detail(path)


def test_large_integers_survive_json() -> None:
    values = {"seed": SEEDS["schedule_rng_seed"], "count": 5, "list": [1 << 60], "flag": True}
    exact = json_exact(values)
    assert exact == {
        "seed": "16159082839903944936",
        "count": 5,
        "list": [str(1 << 60)],
        "flag": True,
    }


def test_summary(tmp_path: Path) -> None:
    path = tmp_path / "summary.txt"
    path.write_text(
        "=====\nMLPerf Results Summary\nScenario : Server\nResult is : INVALID\n"
        "  Min duration satisfied : Yes\nTTFT Early Stopping Result:\n",
        encoding="utf-8",
    )
    assert parse_summary(path) == {
        "Scenario": "Server",
        "Result is": "INVALID",
        "Min duration satisfied": "Yes",
    }
    with pytest.raises(FlowError, match="nowhere"):
        parse_summary(tmp_path / "nowhere")


# What LoadGen 6.0.17 logged for the seed of v6.1 at 10 queries per second.
LOGGED = {
    "effective_schedule_rng_seed": SEEDS["schedule_rng_seed"],
    "effective_target_qps": 10,
    "generated_query_count": 32,
    "generated_query_duration": 2994901732,
}


def test_schedule_is_loadgens() -> None:
    found, how = scheduled_ns(DetailLog(values=dict(LOGGED)), 32)
    assert found is not None
    assert found[0] == 0
    assert found == sorted(found)
    assert len(found) == 32
    assert "agrees" in how


def test_schedule_of_a_run_that_ended_early_is_its_beginning() -> None:
    whole, _ = scheduled_ns(DetailLog(values=dict(LOGGED)), 32)
    part, _ = scheduled_ns(DetailLog(values=dict(LOGGED)), 5)
    assert whole is not None
    assert part == whole[:5]


def test_schedule_that_cannot_be_proven_is_not_used() -> None:
    other = DetailLog(values=LOGGED | {"generated_query_duration": 2994901733})
    found, how = scheduled_ns(other, 32)
    assert found is None
    assert "does not end" in how
    found, how = scheduled_ns(DetailLog(values={"effective_target_qps": 10}), 32)
    assert found is None
    assert "effective_schedule_rng_seed" in how


def test_rate_of_the_schedule() -> None:
    schedule = server_schedule_ns(SEEDS["schedule_rng_seed"], 50.0, 20_000)
    assert schedule[-1] / 1e9 == pytest.approx(20_000 / 50.0, rel=0.03)
