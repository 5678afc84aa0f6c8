"""Detection over a made-up /proc and /sys, precedence of given values, and this machine."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import yaml

import describe_system as script
from fp8flow.cli import script_main
from fp8flow.config import demo_config
from fp8flow.records import verify_record
from fp8flow.rules import rules_file
from fp8flow.spec import Spec
from fp8flow.system import (
    NONE,
    Accelerator,
    AcceleratorFields,
    Accelerators,
    Host,
    describe_system,
    ecc_state,
    link_speeds_gbit,
    read_accelerators,
)
from fp8flow.tools import installed_versions

GPU = Accelerator(
    "NVIDIA H200", 150_754_820_096, "GPU-1", 1980, 3201, 5, 16, nvlinks=18, ecc=True
)  # fmt: skip
KEYS = {key for rule in yaml.safe_load(rules_file("v6.1").read_text())["rules"]
        if rule["id"] == "system-keys" for key in rule["limit"]["keys"]}  # fmt: skip


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


@pytest.fixture
def node(tmp_path: Path) -> Host:
    """A node with two sockets of two cores (four threads each), an NVMe disk and two NICs."""
    blocks = [
        f"processor : {n}\nmodel name : Fast CPU\nphysical id : {n % 2}\ncore id : {n // 2 % 2}\n"
        "cpu MHz : 2100.5"
        for n in range(8)
    ]
    write(tmp_path, "proc/cpuinfo", "\n\n".join(blocks))
    write(tmp_path, "proc/meminfo", "MemTotal:       1056784384 kB\nMemFree: 1 kB")
    cpu = "sys/devices/system/cpu/cpu0"
    write(tmp_path, f"{cpu}/cpufreq/cpuinfo_max_freq", "3800000")
    for index, (level, kind, size) in enumerate([(1, "Data", "48K"), (3, "Unified", "105M")]):
        for name, value in (("level", level), ("type", kind), ("size", size)):
            write(tmp_path, f"{cpu}/cache/index{index}/{name}", str(value))
    write(tmp_path, "sys/block/nvme0n1/size", str(3_840_755_982_336 // 512))
    write(tmp_path, "sys/block/loop0/size", "4096")
    for name, speed in (("eth0", "100000"), ("eth1", "100000")):
        (tmp_path / f"sys/class/net/{name}/device").mkdir(parents=True)
        write(tmp_path, f"sys/class/net/{name}/speed", speed)
        write(tmp_path, f"sys/class/net/{name}/type", "1")
    (tmp_path / "sys/class/net/lo").mkdir()
    write(tmp_path, "etc/os-release", 'PRETTY_NAME="Some Linux 9"')
    return Host(tmp_path)


def settings(**given: object) -> dict[str, object]:
    section = demo_config().system.model_dump(mode="json")
    assert given.keys() <= section.keys()
    return section | given


def test_every_field_of_the_node_is_detected(node: Host) -> None:
    fields = describe_system(settings(), node, Accelerators((GPU,), "580.1", "13.0"))["fields"]
    expected = {
        "host_processor_model_name": "Fast CPU",
        "host_processors_per_node": "2",
        "host_processor_core_count": "2",
        "host_processor_frequency": "3.80 GHz (maximum)",
        "host_processor_caches": "L1d: 48K, L3: 105M",
        "host_memory_capacity": "1008 GiB",
        "host_storage_type": "NVMe SSD",
        "host_storage_capacity": "3.84 TB",
        "host_networking": "2x 100 Gb/s Ethernet",
        "host_network_card_count": "2",
        "accelerators_per_node": "1",
        "accelerator_model_name": "NVIDIA H200",
        "accelerator_memory_capacity": "140 GiB",
        "accelerator_host_interconnect": "PCIe Gen5 x16",
        "accelerator_interconnect": NONE,
        "accelerator_frequency": "1980 MHz (maximum)",
    }
    assert {key: fields[key] for key in expected} == expected
    assert fields["operating_system"].startswith("Some Linux 9, Linux ")
    assert "NVIDIA driver 580.1 (CUDA 13.0)" in fields["other_software_stack"]


def test_fields_are_those_of_the_checker(node: Host) -> None:
    described = describe_system(settings(), node, Accelerators())
    assert set(described["fields"]) == KEYS - {"submitter", "division"}
    assert all(isinstance(value, str) for value in described["fields"].values())


def test_given_values_win_and_origins_tell(node: Host) -> None:
    described = describe_system(
        settings(host_processor_model_name="As I say", host_processors_per_node=4, cooling="air"),
        node,
        Accelerators(),
    )
    fields, origins = described["fields"], described["origins"]
    assert (fields["host_processor_model_name"], origins["host_processor_model_name"]) == (
        "As I say",
        "config",
    )
    assert fields["host_processors_per_node"] == "4"
    assert origins["host_memory_capacity"] == "detected"
    assert (fields["host_memory_configuration"], origins["host_memory_configuration"]) == (
        "",
        "not detected",
    )
    assert "host_memory_configuration" in described["not_detected"]
    assert "cooling" not in described["not_detected"]


def test_no_accelerator_is_said_not_left_empty(node: Host) -> None:
    fields = describe_system(settings(), node, Accelerators(note="NVML: none"))["fields"]
    # "0" and not 0: the checker takes a false value for an empty answer.
    assert fields["accelerators_per_node"] == "0"
    assert fields["accelerator_model_name"] == fields["accelerator_memory_configuration"] == NONE


def test_configured_number_of_accelerators_wins() -> None:
    several = Accelerators((GPU, GPU))
    assert AcceleratorFields(several, None).count == 2
    assert AcceleratorFields(several, None).interconnect() == "NVLink, 18 links"
    assert AcceleratorFields(several, 1).interconnect() == NONE
    assert AcceleratorFields(several, 0).model() == NONE
    # The node that describes is not the node that measures: nothing is known of its GPUs.
    assert AcceleratorFields(Accelerators(), 8).model() is None


def test_unknown_nic_speed_is_not_made_up(node: Host) -> None:
    write(node.root, "sys/class/net/eth1/speed", "-1")
    assert node.networking() is None
    assert node.nic_count() == 2


@pytest.mark.parametrize(
    ("detected", "stated", "on", "origin"),
    [
        (True, None, True, "detected"),
        (True, True, True, "detected"),
        (None, True, True, "config"),
        (None, False, False, "config"),
        (None, None, None, "not detected"),
        # Neither side talks the other's "off" away.
        (False, True, False, "detected"),
        (True, False, False, "config"),
    ],
)
def test_ecc_state(
    detected: bool | None, stated: bool | None, on: bool | None, origin: str
) -> None:
    assert ecc_state(detected, stated) == {"on": on, "origin": origin}


@pytest.mark.parametrize("words", ["ECC", "ECC: no", "ECC not enabled", "ECC unsupported"])
def test_words_are_no_statement_about_ecc(node: Host, words: str) -> None:
    given = settings(
        hw_notes=words, host_memory_configuration=words, accelerator_memory_configuration=words
    )
    gpu = dataclasses.replace(GPU, ecc=None)
    states = describe_system(given, node, Accelerators((gpu,)))["ecc"]
    nothing = {"on": None, "origin": "not detected"}
    assert states == {"host": nothing, "accelerators": nothing}


def test_ecc_is_stated_for_host_and_accelerators_apart(node: Host) -> None:
    gpu = dataclasses.replace(GPU, ecc=None)
    described = describe_system(
        settings(host_ecc=True, accelerator_ecc=False), node, Accelerators((gpu,))
    )
    assert described["ecc"] == {
        "host": {"on": True, "origin": "config"},
        "accelerators": {"on": False, "origin": "config"},
    }
    assert "host_ecc" not in described["fields"]


def test_stack_says_the_versions_that_runs_record(node: Host) -> None:
    described = describe_system(settings(), node, Accelerators())
    names = ("transformers", "mlcommons-loadgen")
    assert {name: described["stack"][name] for name in names} == installed_versions(names)


def test_ecc_of_host_and_accelerators(node: Host) -> None:
    states = describe_system(settings(), node, Accelerators((GPU,)))["ecc"]
    assert states == {
        "host": {"on": None, "origin": "not detected"},
        "accelerators": {"on": True, "origin": "detected"},
    }
    (node.root / "sys/devices/system/edac/mc/mc0").mkdir(parents=True)
    states = describe_system(settings(), node, Accelerators())["ecc"]
    assert states["host"] == {"on": True, "origin": "detected"}
    assert states["accelerators"] == {"on": None, "origin": NONE}


@pytest.mark.parametrize(
    ("text", "total"),
    [
        ("2x 100 Gb/s Ethernet", 200.0),
        ("8x 400G InfiniBand, 1x 25GbE", 3225.0),
        ("1000 Mbps", 1.0),
        ("100Gbit/s", 100.0),
        ("Ethernet", 0.0),
        ("512 GB", 0.0),
    ],
)
def test_link_speeds(text: str, total: float) -> None:
    assert sum(link_speeds_gbit(text)) == total


def test_missing_sources_leave_fields_empty(tmp_path: Path) -> None:
    described = describe_system(settings(), Host(tmp_path), Accelerators())
    assert described["fields"]["host_processor_model_name"] == ""
    assert {"host_memory_capacity", "host_storage_type"} <= set(described["not_detected"])


def test_accelerators_of_this_machine_are_read_or_the_reason_is_given() -> None:
    found = read_accelerators()
    assert bool(found.devices) != bool(found.note)


def test_script_describes_this_machine(tmp_path: Path) -> None:
    output = tmp_path / "system" / "system.json"
    spec = Spec("describe_system", {"system": settings(cooling="air")}).canonical()
    arguments = ["--spec", spec, "--output", str(output)]
    assert script_main("x", script.add_arguments, script.run, arguments) == 0
    record = verify_record(output)
    fields = record.result["fields"]
    assert set(fields) == KEYS - {"submitter", "division"}
    assert fields["cooling"] == "air"
    assert fields["host_memory_capacity"].endswith("iB")
    assert json.loads(output.read_text())["rule"] == "describe_system"
