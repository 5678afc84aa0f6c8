"""Plans and runs a copy of the workflow through Snakemake's API, as data."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from snakemake.api import SnakemakeApi
from snakemake.logging import logger
from snakemake.settings.enums import Quietness
from snakemake.settings.types import (
    ConfigSettings,
    DAGSettings,
    OutputSettings,
    ResourceSettings,
    WorkflowSettings,
)
from snakemake_interface_logger_plugins.common import LogEvent

REPOSITORY = Path(__file__).resolve().parents[2]
COPIED = ("Snakefile", "workflow", "config", "envs", "resources", "profiles")
INTERPRETER = "\nprefer_own_interpreter()\n"
STUB = Path(__file__).with_name("stub_program.py")

Job = str


class _Collect(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.jobs: set[Job] = set()
        self.errors: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        event = getattr(record, "event", None)
        if event == LogEvent.JOB_INFO:
            wildcards = dict(getattr(record, "wildcards", None) or {})
            self.jobs.add(" ".join([record.rule_name, *wildcards.values()]))
        elif record.levelno >= logging.ERROR:
            self.errors.append(record.getMessage())


@contextmanager
def working_directory(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def copy_checkout(destination: Path, python: str | None = None) -> Path:
    """Copy the workflow; with ``python``, jobs run that program instead of the interpreter."""
    destination.mkdir(parents=True)
    for name in COPIED:
        source = REPOSITORY / name
        if source.is_dir():
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, destination / name, ignore=ignore)
        else:
            shutil.copy2(source, destination / name)
    if python is not None:
        common = destination / "workflow" / "rules" / "common.smk"
        text = common.read_text()
        assert INTERPRETER in text
        path = os.pathsep.join([str(Path(python).parent), os.environ["PATH"]])
        common.write_text(text.replace(INTERPRETER, f"\nos.environ['PATH'] = {path!r}\n"))
    return destination


def execute(
    checkout: Path,
    *,
    dry: bool,
    targets: tuple[str, ...] = (),
    configfiles: tuple[Path, ...] = (),
    config: dict[str, object] | None = None,
) -> set[Job]:
    """Plan (``dry``) or run the workflow in its checkout; return its jobs without `all`."""
    collect = _Collect()
    output = OutputSettings(dryrun=dry, quiet={Quietness.ALL}, enable_file_logging=False)
    with working_directory(checkout), SnakemakeApi(output) as api:
        for handler in list(logger.handlers):
            logger.removeHandler(handler)
        logger.addHandler(collect)
        workflow = api.workflow(
            resource_settings=ResourceSettings(cores=2),
            config_settings=ConfigSettings(configfiles=configfiles, config=config or {}),
            workflow_settings=WorkflowSettings(),
            snakefile=checkout / "Snakefile",
            workdir=checkout,
        )
        dag = workflow.dag(DAGSettings(targets=set(targets), force_incomplete=True))
        dag.execute_workflow(executor="dryrun" if dry else "local")
    assert not collect.errors, collect.errors
    return {job for job in collect.jobs if job.split()[0] not in ("all", *targets)}
