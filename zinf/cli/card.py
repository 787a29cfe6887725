"""The cards of a machine as its driver, /sys and torch tell of them. What one of them does not say is left out; nothing here can fail as a whole."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

from zinf.config import format_bytes

SYS = Path("/sys")
FIELDS = {
    "name": "name", "memory": "memory.total", "driver": "driver_version", "bus": "pci.bus_id", "generation": "pcie.link.gen.current",
    "generation_max": "pcie.link.gen.max", "width": "pcie.link.width.current", "width_max": "pcie.link.width.max", "capability": "compute_cap",
}  # fmt: skip


def lines() -> list[str]:
    """A few lines for each card; none where there is none."""
    found = cards()
    out = [line for card in found for line in describe(card)]
    if out and not any("torch" in card for card in found):
        out.append('but this torch cannot use it: pip install "torch" with CUDA')
    if out:
        out.append(f"Triton {triton()}")
    return out


def cards(sys: Path | None = None) -> list[dict[str, Any]]:
    """What is known of each card, by nvidia-smi, /sys and torch (which alone knows AMD's)."""
    rows = [dict(zip(FIELDS, row, strict=True)) for row in _nvidia_smi()]
    found: list[dict[str, Any]] = [{key: value for key, value in row.items() if not re.match(r"\[?N/A|\[Not", value)} for row in rows]
    for card in found:
        card |= _of_sys(str(card.get("bus", "")), sys or SYS)
    for i, seen in enumerate(_of_torch()):
        if i >= len(found):
            found.append({"name": seen.pop("name")})
        found[i]["torch"] = seen
    return found


def describe(card: dict[str, Any]) -> list[str]:
    """Lines for people."""
    head = ", ".join(str(part) for part in (card["name"], card.get("memory"), f"driver {card['driver']}" if "driver" in card else None) if part)
    link = "PCIe not known"
    if "generation" in card:
        slower = " (it idles, or the slot is slower)" if (card["generation"], card["width"]) != (card["generation_max"], card["width_max"]) else ""
        link = f"PCIe {card['generation']} x{card['width']} now, {card['generation_max']} x{card['width_max']} at most{slower}"
    bar = "ReBAR not known" if "bar" not in card else f"ReBAR {'on' if card['rebar'] else 'off'} (BAR of {format_bytes(card['bar'])})"
    node = f"NUMA node {card['node']}" if card.get("node") is not None else "NUMA node not known"
    seen = card.get("torch", {})
    capability = seen.get("capability") or card.get("capability")
    bf16 = "" if "bf16" not in seen else f", bf16 {'yes' if seen['bf16'] else 'no: it is emulated, or missing'}"
    return [head, f"{link}; {bar}; {node}", f"compute capability {capability or 'not known'}{bf16}"]


def triton() -> str:
    """Its version, or that it is not there."""
    for name in ("triton", "pytorch-triton-rocm", "triton-windows"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "not installed: kernels on the card are torch's"


def _nvidia_smi() -> list[list[str]]:
    if not shutil.which("nvidia-smi"):
        return []
    query = ["nvidia-smi", f"--query-gpu={','.join(FIELDS.values())}", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return []
    rows = [[part.strip() for part in line.split(",")] for line in done.stdout.strip().splitlines()] if not done.returncode else []
    return [row for row in rows if len(row) == len(FIELDS)]


def _of_sys(bus: str, sys: Path) -> dict[str, Any]:
    """NUMA node and the largest window into the card's memory: with resizable BAR it is larger than the 256 MiB of old."""
    from zinf.tiers.numa import node_of

    bus = bus.lower()
    bus = bus[-12:] if re.fullmatch(r"[0-9a-f]{8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", bus) else bus  # the driver's domain has 8 digits
    found: dict[str, Any] = {"node": node_of(bus or None, sys)}
    try:
        text = (sys / f"bus/pci/devices/{bus}/resource").read_text()
        sizes = [int(end, 16) - int(start, 16) + 1 for start, end, _ in (line.split() for line in text.splitlines()[:6]) if int(end, 16)]
    except (OSError, ValueError):
        return found
    if bus and sizes:
        found |= {"bar": max(sizes), "rebar": max(sizes) > 256 << 20}
    return found


def _of_torch() -> list[dict[str, Any]]:
    try:
        import torch

        if not torch.cuda.is_available():
            return []
        out = []
        for i in range(torch.cuda.device_count()):
            p = torch.cuda.get_device_properties(i)
            with torch.cuda.device(i):
                out.append({"name": p.name, "capability": f"{p.major}.{p.minor}", "bf16": torch.cuda.is_bf16_supported(including_emulation=False)})
        return out
    except (ImportError, RuntimeError, AssertionError):
        return []
