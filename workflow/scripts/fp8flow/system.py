"""Description of the system under test: what the configuration says, else what can be detected.

The fields are those of systems/<system>.json (MLPerf Inference v6.1 submission checker), without
division and submitter. Nothing is guessed: a field that is neither given nor detected stays empty
and is listed.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from fp8flow.log import get_logger

GIVEN, DETECTED, MISSING = "config", "detected", "not detected"
NONE = "N/A"
# Config keys that are no field of the systems JSON.
_NOT_FIELDS = ("name", "network_data_path", "host_ecc", "accelerator_ecc")
_VIRTUAL_DISKS = ("loop", "ram", "zram", "dm-", "md", "sr", "nbd", "fd")
_SECTOR_BYTES = 512
_STACK = ("torch", "transformers", "nvidia-modelopt", "mlcommons-loadgen")

logger = get_logger(__name__)


@dataclass(frozen=True)
class Accelerator:
    """One GPU as NVML describes it; None is what it does not tell."""

    name: str
    memory_bytes: int
    uuid: str
    sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    pcie_generation: int | None = None
    pcie_width: int | None = None
    nvlinks: int = 0
    ecc: bool | None = None


@dataclass(frozen=True)
class Accelerators:
    """The GPUs of the node, or why none could be asked."""

    devices: tuple[Accelerator, ...] = ()
    driver: str | None = None
    cuda: str | None = None
    note: str = ""


@dataclass(frozen=True)
class Nic:
    """One network card: kernel name, kind, speed (Mb/s; None: not told), driver."""

    name: str
    kind: str
    speed_mbit: int | None
    driver: str | None


@dataclass
class Description:
    """The system so far.

    Attributes:
        fields: value by field of the systems JSON; empty text where nothing is known.
        origins: ``config``, ``detected`` or ``not detected`` by field.
    """

    fields: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)

    def set(self, key: str, given: Any, detect: Callable[[], Any]) -> None:
        """Take the given value, or else the detected one."""
        value, origin = given, GIVEN
        if value is None:
            value, origin = detect(), DETECTED
        if value is None or value == "":
            value, origin = "", MISSING
        # Counts are text: the checker takes the number 0 for an empty answer.
        self.fields[key] = str(value)
        self.origins[key] = origin


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip() or None
    except OSError:
        return None


def _integer(text: str | None) -> int | None:
    with contextlib.suppress(TypeError, ValueError):
        return int(text or "")
    return None


def _binary(count: float) -> str:
    """Return bytes as GiB or TiB, as memory is counted."""
    gibibytes = count / (1 << 30)
    return f"{gibibytes:.0f} GiB" if gibibytes < 10_240 else f"{gibibytes / 1024:.1f} TiB"


def _decimal(count: float) -> str:
    """Return bytes as GB or TB, as disks are sold."""
    return f"{count / 1e9:.0f} GB" if count < 1e12 else f"{count / 1e12:.2f} TB"


class Host:
    """What /proc and /sys say of a node.

    Args:
        root: root of the file system; another one in tests.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self.root = root
        self._cpus = self._cpu_blocks()

    def _cpu_blocks(self) -> list[dict[str, str]]:
        text = _read(self.root / "proc/cpuinfo") or ""
        blocks = []
        for block in text.split("\n\n"):
            pairs = (line.split(":", 1) for line in block.splitlines() if ":" in line)
            if values := {key.strip(): value.strip() for key, value in pairs}:
                blocks.append(values)
        return blocks

    def cpu_model(self) -> str | None:
        """Return the CPU's name."""
        names = Counter(cpu["model name"] for cpu in self._cpus if "model name" in cpu)
        return names.most_common(1)[0][0] if names else None

    def sockets(self) -> int | None:
        """Return the number of CPU packages."""
        return len({cpu["physical id"] for cpu in self._cpus if "physical id" in cpu}) or None

    def cores_per_socket(self) -> int | None:
        """Return the number of physical cores of one package."""
        cores = {
            (cpu["physical id"], cpu["core id"])
            for cpu in self._cpus
            if "physical id" in cpu and "core id" in cpu
        }
        sockets = self.sockets()
        return len(cores) // sockets if cores and sockets else None

    def cpu_frequency(self) -> str | None:
        """Return the largest frequency, or the present one where that is not told."""
        largest = _integer(
            _read(self.root / "sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq")
        )
        if largest:
            return f"{largest / 1e6:.2f} GHz (maximum)"
        now = next((cpu["cpu MHz"] for cpu in self._cpus if "cpu MHz" in cpu), None)
        return f"{float(now) / 1e3:.2f} GHz" if now else None

    def cpu_caches(self) -> str | None:
        """Return the caches that the first core sees."""
        folder = self.root / "sys/devices/system/cpu/cpu0/cache"
        found = []
        for index in sorted(folder.glob("index*")):
            level, size = _read(index / "level"), _read(index / "size")
            kind = (_read(index / "type") or "")[:1].lower()
            if level and size:
                found.append(f"L{level}{kind if kind in 'di' else ''}: {size}")
        return ", ".join(found) or None

    def cpu_interconnect(self) -> str | None:
        """Return that a single socket needs none."""
        return f"{NONE} (one socket)" if self.sockets() == 1 else None

    def memory(self) -> str | None:
        """Return the usable memory."""
        match = re.search(r"^MemTotal:\s+(\d+) kB", _read(self.root / "proc/meminfo") or "", re.M)
        return _binary(int(match[1]) * 1024) if match else None

    def disks(self) -> list[tuple[str, int]]:
        """Return kind and size (bytes) of every disk."""
        found = []
        for disk in sorted((self.root / "sys/block").glob("*")):
            sectors = _integer(_read(disk / "size"))
            if disk.name.startswith(_VIRTUAL_DISKS) or not sectors:
                continue
            found.append((self._disk_kind(disk), sectors * _SECTOR_BYTES))
        return found

    def _disk_kind(self, disk: Path) -> str:
        if disk.name.startswith(("vd", "xvd")):
            return "virtual disk"
        if disk.name.startswith("nvme"):
            return "NVMe SSD"
        return "HDD" if _read(disk / "queue/rotational") == "1" else "SSD"

    def storage_type(self) -> str | None:
        """Return the kinds of disks."""
        return ", ".join(dict.fromkeys(kind for kind, _ in self.disks())) or None

    def storage_capacity(self) -> str | None:
        """Return the size of all disks."""
        total = sum(size for _, size in self.disks())
        return _decimal(total) if total else None

    def nics(self) -> list[Nic]:
        """Return the network cards (interfaces with a device behind them)."""
        found = []
        for interface in sorted((self.root / "sys/class/net").glob("*")):
            device = interface / "device"
            if not device.exists():
                continue
            driver = device / "driver"
            speed = _integer(_read(interface / "speed"))
            found.append(
                Nic(
                    interface.name,
                    "InfiniBand" if _read(interface / "type") == "32" else "Ethernet",
                    speed if speed and speed > 0 else None,
                    driver.resolve().name if driver.exists() else None,
                )
            )
        return found

    def networking(self) -> str | None:
        """Return kind and speed of the network cards; nothing if the speed is not told."""
        kinds = Counter((nic.kind, nic.speed_mbit) for nic in self.nics())
        if any(speed is None for _, speed in kinds):
            return None
        listed = (
            f"{n}x {speed / 1e3:g} Gb/s {kind}" for (kind, speed), n in kinds.items() if speed
        )
        return ", ".join(listed) or None

    def nic_count(self) -> int | None:
        """Return the number of network cards."""
        return len(self.nics()) or None

    def operating_system(self) -> str:
        """Return distribution and kernel."""
        match = re.search(r'^PRETTY_NAME="?([^"\n]+)', _read(self.root / "etc/os-release") or "",
                          re.M)  # fmt: skip
        name = match[1] if match else platform.system()
        return f"{name}, Linux {platform.release()}"

    def ecc(self) -> bool | None:
        """Return whether the memory controllers check ECC; None where nothing tells."""
        controllers = list((self.root / "sys/devices/system/edac/mc").glob("mc[0-9]*"))
        if controllers:
            return True
        kind = self._dmi("16", "Error Correction Type")
        if not kind or {"Unknown", "Other"} & set(kind):
            return None
        return all("ECC" in value for value in kind)

    def memory_modules(self) -> str | None:
        """Return number, size, type and speed of the memory modules, where SMBIOS tells."""
        sizes = [size for size in self._dmi("17", "Size") if size[0].isdigit()]
        kinds = [kind for kind in self._dmi("17", "Type") if kind.startswith(("DDR", "LPDDR"))]
        speeds = [s for s in self._dmi("17", "Configured Memory Speed") if s[0].isdigit()]
        if not sizes or not kinds:
            return None
        speed = f" {speeds[0]}" if speeds else ""
        return ", ".join(f"{n}x {size} {kinds[0]}{speed}" for size, n in Counter(sizes).items())

    def _dmi(self, table: str, key: str) -> list[str]:
        """Return the values of one key of an SMBIOS table; needs root and dmidecode."""
        program = shutil.which("dmidecode")
        if self.root != Path("/") or program is None or os.geteuid() != 0:
            return []
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            text = subprocess.run(
                [program, "-t", table], capture_output=True, text=True, timeout=20, check=True
            ).stdout
            values = re.findall(rf"^\s+{re.escape(key)}:\s*(.+)$", text, re.M)
            return [value.strip() for value in values]
        return []


def read_accelerators() -> Accelerators:
    """Ask NVML for the GPUs; the note says why there are none."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception as error:  # NVML's error classes exist only once it is loaded
        return Accelerators(note=f"NVML: {error}")
    try:
        count = pynvml.nvmlDeviceGetCount()
        devices = tuple(_accelerator(pynvml, number) for number in range(count))
        version = pynvml.nvmlSystemGetCudaDriverVersion_v2()
        return Accelerators(
            devices,
            _text(pynvml.nvmlSystemGetDriverVersion()),
            f"{version // 1000}.{version % 1000 // 10}",
            "" if devices else "NVML: no device",
        )
    finally:
        pynvml.nvmlShutdown()


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _accelerator(nvml: Any, number: int) -> Accelerator:
    handle = nvml.nvmlDeviceGetHandleByIndex(number)

    def ask(function: str, *arguments: Any) -> Any:
        with contextlib.suppress(nvml.NVMLError, AttributeError):
            return getattr(nvml, function)(handle, *arguments)
        return None

    links = (ask("nvmlDeviceGetNvLinkState", link) for link in range(nvml.NVML_NVLINK_MAX_LINKS))
    ecc = ask("nvmlDeviceGetEccMode")
    return Accelerator(
        name=_text(nvml.nvmlDeviceGetName(handle)),
        memory_bytes=int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
        sm_clock_mhz=ask("nvmlDeviceGetMaxClockInfo", nvml.NVML_CLOCK_SM),
        memory_clock_mhz=ask("nvmlDeviceGetMaxClockInfo", nvml.NVML_CLOCK_MEM),
        pcie_generation=ask("nvmlDeviceGetMaxPcieLinkGeneration"),
        pcie_width=ask("nvmlDeviceGetMaxPcieLinkWidth"),
        nvlinks=sum(state == 1 for state in links),
        # The mode in force; the second one comes with the next boot.
        ecc=None if ecc is None else bool(ecc[0]),
    )


class AcceleratorFields:
    """The accelerator fields of the systems JSON from what NVML says.

    Args:
        found: what NVML says.
        used: number of accelerators by the configuration; None takes all.
    """

    def __init__(self, found: Accelerators, used: int | None) -> None:
        self._devices = found.devices
        self._none = used == 0 or (used is None and not found.devices)
        self.count = 0 if self._none else used or len(found.devices)

    def _each(self, describe: Callable[[Accelerator], str | None]) -> str | None:
        if self._none:
            return NONE
        told = [text for device in self._devices if (text := describe(device))]
        return ", ".join(dict.fromkeys(told)) or None

    def model(self) -> str | None:
        """Return the model's name."""
        return self._each(lambda device: device.name)

    def memory(self) -> str | None:
        """Return the memory of one."""
        return self._each(lambda device: _binary(device.memory_bytes))

    def memory_kind(self) -> str | None:
        """Return what is known of the memory: nothing but that there is none."""
        return NONE if self._none else None

    def frequency(self) -> str | None:
        """Return the largest SM clock."""
        return self._each(lambda d: f"{d.sm_clock_mhz} MHz (maximum)" if d.sm_clock_mhz else None)

    def host_link(self) -> str | None:
        """Return PCIe generation and width."""
        return self._each(
            lambda d: f"PCIe Gen{d.pcie_generation} x{d.pcie_width}" if d.pcie_generation else None
        )

    def interconnect(self) -> str | None:
        """Return how accelerators are connected; one alone needs nothing."""
        if self._none or self.count == 1:
            return NONE
        return self._each(lambda d: f"NVLink, {d.nvlinks} links" if d.nvlinks else "PCIe")


def stack_versions() -> dict[str, str]:
    """Return the versions of the packages that matter, those that are installed."""
    versions = {}
    for name in _STACK:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def other_software(found: Accelerators) -> str:
    """Return Python, driver, CUDA and the packages that matter, with versions."""
    parts = [f"Python {platform.python_version()}"]
    if found.driver:
        parts.append(f"NVIDIA driver {found.driver} (CUDA {found.cuda})")
    parts += [f"{name} {version}" for name, version in stack_versions().items()]
    libc = " ".join(platform.libc_ver()).strip()
    return ", ".join([*parts, libc] if libc else parts)


def ecc_state(detected: bool | None, stated: bool | None) -> dict[str, Any]:
    """Return whether ECC is on, and how that is known; where two sources differ it is off.

    Args:
        detected: what the hardware says; None if nothing.
        stated: what the configuration says; None if nothing.
    """
    known = {DETECTED: detected, GIVEN: stated}
    said = {origin: on for origin, on in known.items() if on is not None}
    if not said:
        return {"on": None, "origin": MISSING}
    on = all(said.values())
    return {"on": on, "origin": next(origin for origin, value in said.items() if value == on)}


def _all_ecc(found: Accelerators) -> bool | None:
    states = {device.ecc for device in found.devices}
    return None if None in states or not states else all(states)


def describe_system(
    settings: Mapping[str, Any], host: Host | None = None, found: Accelerators | None = None
) -> dict[str, Any]:
    """Return the fields of the systems JSON, where each comes from, and what is still missing.

    Args:
        settings: the config section ``system``; null is detected.
        host: the node; this one when left out.
        found: its GPUs; asked for when left out.

    Returns:
        name, fields, origins, not_detected (fields without a value), ecc (host, accelerators),
        nics, accelerators, accelerator_note, network_data_path, stack (versions by package).
    """
    host = host or Host()
    found = found if found is not None else read_accelerators()
    gpus = AcceleratorFields(found, settings.get("accelerators_per_node"))
    description = Description()
    for key, detect in _detectors(host, gpus, found, str(settings["name"])).items():
        description.set(key, settings.get(key), detect)
    for key in settings:
        if key not in description.fields and key not in _NOT_FIELDS:
            description.set(key, settings[key], lambda: None)
    empty = [key for key, origin in description.origins.items() if origin == MISSING]
    logger.info("system %s: %d fields without a value: %s", settings["name"], len(empty), empty)
    on_gpu = ecc_state(_all_ecc(found), settings.get("accelerator_ecc"))
    return {
        "name": settings["name"],
        "fields": description.fields,
        "origins": description.origins,
        "not_detected": empty,
        "ecc": {
            "host": ecc_state(host.ecc(), settings.get("host_ecc")),
            "accelerators": on_gpu if gpus.count else {"on": None, "origin": NONE},
        },
        "nics": [vars(nic) for nic in host.nics()],
        "accelerators": [vars(device) for device in found.devices],
        "accelerator_note": found.note,
        "network_data_path": settings.get("network_data_path"),
        "stack": stack_versions(),
    }


def _detectors(
    host: Host, gpus: AcceleratorFields, found: Accelerators, name: str
) -> dict[str, Callable[[], Any]]:
    return {
        "system_name": lambda: name,
        "host_processor_model_name": host.cpu_model,
        "host_processors_per_node": host.sockets,
        "host_processor_core_count": host.cores_per_socket,
        "host_processor_frequency": host.cpu_frequency,
        "host_processor_caches": host.cpu_caches,
        "host_processor_interconnect": host.cpu_interconnect,
        "host_memory_capacity": host.memory,
        "host_memory_configuration": host.memory_modules,
        "host_storage_type": host.storage_type,
        "host_storage_capacity": host.storage_capacity,
        "host_networking": host.networking,
        "host_network_card_count": host.nic_count,
        "accelerators_per_node": lambda: gpus.count,
        "accelerator_model_name": gpus.model,
        "accelerator_frequency": gpus.frequency,
        "accelerator_host_interconnect": gpus.host_link,
        "accelerator_interconnect": gpus.interconnect,
        "accelerator_memory_capacity": gpus.memory,
        "accelerator_memory_configuration": gpus.memory_kind,
        "operating_system": host.operating_system,
        "other_software_stack": lambda: other_software(found),
    }


def link_speeds_gbit(text: str) -> Iterator[float]:
    """Yield the speeds, Gb/s, that a text such as ``2x 100 Gb/s Ethernet`` names, each card once.

    Understood are Mb/s and Gb/s, also spelled Gbit/s, Gbps, GbE and G (before a blank).
    """
    pattern = r"(?:(\d+)\s*x\s*)?(\d+(?:\.\d+)?)\s*([MG])(?:b(?:it)?(?:/s|ps|E)|(?=\s|$|,))"
    for count, speed, unit in re.findall(pattern, text, re.IGNORECASE):
        for _ in range(int(count or 1)):
            yield float(speed) * (1.0 if unit.upper() == "G" else 1e-3)
