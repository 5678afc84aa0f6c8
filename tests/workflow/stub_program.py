"""Stands in for a rule's program where only the plan is tested: writes the record, no work."""

import sys
from pathlib import Path

from fp8flow.records import read_record, write_record
from fp8flow.spec import Spec


def main(arguments: list[str]) -> None:
    def value(option: str) -> str:
        return arguments[arguments.index(option) + 1]

    spec = Spec.parse(value("--spec"))
    output, log = Path(value("--output")), Path(value("--log"))
    log.write_text("stub\n")
    records = [Path(a) for a in arguments if a.endswith(".json") and Path(a) != output]
    inputs = {str(path): read_record(path) for path in records}
    result = {"spec": spec.canonical(), "inputs": {k: r.digest for k, r in inputs.items()}}
    write_record(output, spec, result, inputs=inputs)


if __name__ == "__main__":
    main(sys.argv[2:])
