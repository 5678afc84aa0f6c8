"""Write the conda form of each lock file in envs/ (for `snakemake --sdm conda`)."""

import re
from pathlib import Path

import yaml

from fp8flow.launch import CONDA_ENVIRONMENTS

ENVS = Path(__file__).resolve().parents[2] / "envs"
# Exact, with or without a marker; anything else in a lock would not be reproducible.
_PIN = re.compile(r"[A-Za-z0-9._-]+(\[[a-z0-9,._-]+\])?==[^\s*;]+( ; .+)?")


def conda_env(lock: str = "requirements.lock") -> str:
    """Return the environment file of a lock: Python from conda, the rest pinned through pip.

    Raises:
        ValueError: if a line of the lock is no exact pin.
    """
    lines = (ENVS / lock).read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    if loose := [pin for pin in pins if not _PIN.fullmatch(pin)]:
        raise ValueError(f"{lock}: no exact pins: {', '.join(loose)}; run `make lock`")
    data = {
        "channels": ["conda-forge"],
        "dependencies": ["python=3.12", "pip", {"pip": pins}],
    }
    note = f"# Generated from {lock} by `make lock`; do not edit.\n"
    return note + yaml.safe_dump(data, sort_keys=False, width=10**6)


if __name__ == "__main__":
    for lock, environment in CONDA_ENVIRONMENTS.items():
        (ENVS / environment).write_text(conda_env(lock), encoding="utf-8")
