"""`zinf env` and `zinf bench h2d` on a card: as its driver, /sys and torch tell; and on a machine without one."""

from __future__ import annotations

import json

import pytest
import torch
from fake_cuda import install

from zinf.cli import card, main
from zinf.errors import ConfigError
from zinf.planner import link

SMI = """#!/bin/sh
echo "NVIDIA GeForce RTX 4090, 24564 MiB, 560.35, 00000000:65:00.0, 1, 4, 8, 16, 8.9"
echo "NVIDIA T400, 2048 MiB, 560.35, 00000000:66:00.0, [N/A], [N/A], [N/A], [N/A], 7.5"
"""


@pytest.fixture
def smi(tmp_path, monkeypatch):
    (tmp_path / "nvidia-smi").write_text(SMI)
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")


def test_what_is_said_of_cards(tmp_path, smi, monkeypatch):
    monkeypatch.setattr(card, "_of_torch", lambda: [{"name": "x", "capability": "8.9", "bf16": True}])
    first = tmp_path / "bus/pci/devices/0000:65:00.0"
    first.mkdir(parents=True)
    (first / "numa_node").write_text("1\n")
    bars = ((0xFB000000, 0xFBFFFFFF), (0x5800000000, 0x5FFFFFFFFF), (0, 0))
    (first / "resource").write_text("".join(f"{a:#018x} {b:#018x} {0:#018x}\n" for a, b in bars))
    one, other = card.cards(tmp_path)
    assert one["rebar"] and one["bar"] == 32 << 30 and one["node"] == 1
    assert card.describe(one) == [
        "NVIDIA GeForce RTX 4090, 24564 MiB, driver 560.35",
        "PCIe 1 x8 now, 4 x16 at most (it idles, or the slot is slower); ReBAR on (BAR of 32 GiB); NUMA node 1",
        "compute capability 8.9, bf16 yes",
    ]
    assert card.describe(other)[1:] == ["PCIe not known; ReBAR not known; NUMA node not known", "compute capability 7.5"]


def test_a_card_that_torch_cannot_use(smi):
    if torch.cuda.is_available():
        pytest.skip("torch can use the one that is here")
    assert any("this torch cannot use it" in line for line in card.lines())


def test_no_card(tmp_path, monkeypatch, capsys):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert card.cards(tmp_path) == card.lines() == []
    with pytest.raises(ConfigError, match="device is 'cuda', and"):
        link.measure(None)


def test_the_link_of_a_fake_card(monkeypatch, tmp_path):
    installed = install(monkeypatch, delay=0)
    ticks = []
    found = link.measure(str(tmp_path), 0.2, copy=1 << 16, done=lambda: ticks.append(1))
    kinds = {r.kind: r for r in found.rates}
    assert list(kinds) == list(link.KINDS)
    assert all(rate > 0 for kind in ("registered", "unpinned") for rate in (kinds[kind].up, kinds[kind].down, kinds[kind].both))
    assert found.with_drive > 0 and found.drive > 0
    assert found.planned == min(kinds["registered"].up, kinds["registered"].down, kinds["registered"].both, found.with_drive)
    assert not installed.registered and list(tmp_path.iterdir()) == []
    assert {s for s, what, _ in installed.calls if what == "copy"} == {"upload", "offload"}


def test_bench_h2d_says_what_it_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("ZINF_MEASURED", str(tmp_path / "machine.json"))
    assert main(["bench", "h2d", "--device", "sim", "--size", "64KiB", "--seconds", "0.2", "--path", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["planned"] > 0
    assert main(["bench", "h2d", "--device", "sim", "--size", "64KiB", "--seconds", "0.2", "--path", str(tmp_path)]) == 0
    assert "beside a drive that moves" in capsys.readouterr().out
