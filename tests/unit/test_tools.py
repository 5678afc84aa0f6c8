"""Pinned versions against installed ones."""

from importlib import metadata

import pytest

from fp8flow.errors import FlowError
from fp8flow.tools import check_tools

INSTALLED = metadata.version("packaging")
SERIES = INSTALLED.split(".")[0]


def test_exact_pins_and_series_that_hold_are_accepted():
    check_tools({"packaging": INSTALLED})
    check_tools({"packaging": f"{SERIES}.*"})
    check_tools({"packaging": f"{INSTALLED}.*"})


@pytest.mark.parametrize("pin", ["0.33.*", f"{SERIES[:-1]}.*", f"{SERIES}9.*", SERIES])
def test_other_series_are_refused(pin):
    with pytest.raises(FlowError, match=f"packaging: pinned .*, installed {INSTALLED}"):
        check_tools({"packaging": pin})


def test_what_is_missing_is_named():
    with pytest.raises(FlowError, match="no-such-distribution: pinned 1, installed missing"):
        check_tools({"no-such-distribution": "1"})
