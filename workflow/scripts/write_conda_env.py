"""Write envs/fp8flow.yaml, the conda form of the lock files (for `snakemake --sdm conda`)."""

from pathlib import Path

import yaml

ENVS = Path(__file__).resolve().parents[2] / "envs"


def conda_env() -> str:
    """Return the environment file: Python from conda, everything else pinned through pip."""
    lock = (ENVS / "requirements.lock").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lock if line and not line.startswith("#")]
    data = {
        "channels": ["conda-forge"],
        "dependencies": ["python=3.12", "pip", {"pip": pins}],
    }
    note = "# Generated from requirements.lock by `make lock`; do not edit.\n"
    return note + yaml.safe_dump(data, sort_keys=False, width=10**6)


if __name__ == "__main__":
    (ENVS / "fp8flow.yaml").write_text(conda_env(), encoding="utf-8")
