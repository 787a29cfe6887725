"""Checkpoints that DeepSpeed 0.19.8 wrote (ds_data/make_checkpoints.py: ZeRO-3 on 1 and 2 ranks, ZeRO-2, universal) come into engines and stores with
every bit of masters and moments, and training goes on from them."""

from __future__ import annotations

import collections
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from ds_data.make_checkpoints import Tiny
from models import llama
from safetensors.torch import load_file

import zinf
from zinf import cli
from zinf.engine import Engine
from zinf.errors import CheckpointError, StoreError
from zinf.integrations import deepspeed
from zinf.integrations.deepspeed import fragments
from zinf.integrations.deepspeed.checkpoint import (
    ZeroCheckpoint,
    convert_zero_checkpoint_to_fp32_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
    import_deepspeed,
    load_into,
    load_state_dict_from_zero_checkpoint,
)

DATA = Path(__file__).parent / "ds_data" / "checkpoints"
EXPECTED = {"z3r1": "z3r1", "z3r2": "z3r2", "z2r1": "z2r1", "universal": "z3r2"}  # whose values are in which file
CONFIG = {
    "train_batch_size": 2, "bf16": {"enabled": True}, "gradient_clipping": 0.0, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 5}},
}  # fmt: skip


def expected(name: str) -> dict[str, dict[str, torch.Tensor]]:
    """DeepSpeed's own answer: parameter -> master, m, v."""
    out: dict[str, dict[str, torch.Tensor]] = collections.defaultdict(dict)
    for key, value in load_file(DATA / EXPECTED[name] / "expected.safetensors").items():
        param, _, kind = key.rpartition(".")
        out[param][kind] = value
    assert len(out) == 11
    return out


def groups(model: Any) -> list[dict[str, Any]]:
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    return [{"params": [p for _, p in named if p.dim() > 1], "weight_decay": 0.1}, {"params": [p for _, p in named if p.dim() == 1], "weight_decay": 0.0}]


def read(reader: Any) -> torch.Tensor:
    out = torch.empty(reader.shape, dtype=reader.dtype).view(-1)
    for start in range(0, out.numel(), 37):  # in pieces, as chunks are read
        reader.read(start, out[start : start + 37])
    return out


def check(model: Any, name: str) -> None:
    for param, values in expected(name).items():
        p = model.get_parameter(param)
        assert torch.equal(fragments.master(p).view(-1), values["master"]), param
        assert torch.equal(fragments.state(p, "exp_avg").view(-1), values["m"]) and torch.equal(fragments.state(p, "exp_avg_sq").view(-1), values["v"]), param


@pytest.mark.parametrize("name", EXPECTED)
def test_every_bit_is_read(name: str) -> None:
    source = ZeroCheckpoint(str(DATA / name))
    for param, values in expected(name).items():
        assert torch.equal(read(source.open(param)), values["master"]), param
        assert torch.equal(read(source.moment(param, "m")), values["m"]) and torch.equal(read(source.moment(param, "v")), values["v"]), param
    assert source.step == 3 and len(source.groups) == 2 and source.client == {"epoch": 1}
    torch.manual_seed(0)
    assert torch.equal(read(source.open("frozen")), Tiny().frozen.bfloat16()) and torch.equal(
        read(source.open("head.weight")), read(source.open("embed.weight"))
    )


@pytest.mark.parametrize("home", ["memory", "nvme"])
@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize("name", EXPECTED)
def test_an_engine_goes_on_from_it(tmp_path: Path, name: str, device: str, home: str) -> None:
    torch.manual_seed(0)  # frozen weights are those of the base
    model = Tiny()
    options: dict[str, Any] = dict(device=device, chunk_size=2048, leaf_bytes=64, io_threads=1, cpu_threads=1)
    if home == "nvme":
        options |= dict(nvme_path=str(tmp_path), weights="nvme", state="nvme")
    engine, _, _, schedule = deepspeed.initialize(model=model, model_parameters=groups(model), config=CONFIG, **options)
    with engine:
        path, client = engine.load_checkpoint(str(DATA / name))
        assert Path(path).parent == (DATA if name == "universal" else DATA / name) and client == {"epoch": 1}
        check(engine.module, name)
        assert (engine.global_steps, schedule.last_batch_iteration) == (3, 2) and engine.get_lr() == [0.006826061944859854] * 2
        engine.backward(engine(torch.arange(12).view(2, 6) % 17))
        engine.step()
        engine.zinf.synchronize()
        assert engine.global_steps == 4 and engine.zinf.stepper.counts == [[4 * spec_trained(p) for *_, p in s.params] for s in engine.zinf.shards]
        assert engine.get_lr()[0] > 0.0068


def spec_trained(p: Any) -> int:
    """A frozen parameter counts as any other: it was there at each of the 3 steps, and gets no more."""
    return 1 if p.requires_grad else 3 / 4  # type: ignore[return-value]


def test_weights_alone() -> None:
    model = Tiny().bfloat16()
    engine, *_ = deepspeed.initialize(model=model, config=CONFIG, leaf_bytes=64)  # one group: no matter
    with engine:
        engine.load_checkpoint(str(DATA / "z3r2"), load_module_only=True)
        p = engine.module.embed.weight
        assert torch.equal(fragments.master(p).view(-1), expected("z3r2")["embed.weight"]["master"]) and not fragments.state(p, "exp_avg").any()
        assert engine.global_steps == 0
        with pytest.raises(CheckpointError, match="has 2 parameter groups, this engine 1"):
            engine.load_checkpoint(str(DATA / "z3r2"))


def test_merged_weights(tmp_path: Path) -> None:
    found = get_fp32_state_dict_from_zero_checkpoint(DATA / "z3r2")
    assert all(torch.equal(found[name].view(-1), values["master"]) for name, values in expected("z3r2").items())
    assert torch.equal(found["head.weight"], found["embed.weight"]) and torch.equal(found["scale"], torch.full((3,), 0.5))
    model = load_state_dict_from_zero_checkpoint(Tiny(), DATA / "z3r2")
    assert all(torch.equal(value, found[name].float()) for name, value in model.state_dict().items())
    convert_zero_checkpoint_to_fp32_state_dict(DATA / "z3r2", tmp_path / "out")
    assert set(found) - set(load_file(tmp_path / "out" / "model.safetensors")) == {"head.weight"}


# ----------------------------------------------------------------------------------------------------------- into a store


def write_like_deepspeed(folder: Path, named: dict[str, dict[str, torch.Tensor]], ranks: int) -> None:
    """ZeRO-3's layout, of a model that DeepSpeed's environment here cannot build: each rank has an equal part of each parameter, padded."""
    folder.mkdir()
    shapes = collections.OrderedDict((name, values["master"].shape) for name, values in named.items())
    for rank in range(ranks):
        flat = {}
        for kind in ("master", "m", "v"):
            parts = []
            for values in named.values():
                whole = values[kind].reshape(-1)
                part = -(-whole.numel() // ranks)
                parts.append(torch.cat([whole, torch.zeros(part * ranks - whole.numel())])[rank * part : (rank + 1) * part])
            flat[kind] = torch.cat(parts)
        cut = flat["master"].numel() // 3  # flat groups end inside of parameters
        groups = {kind: [t[:cut].clone(), t[cut:].clone()] for kind, t in flat.items()}
        state = {i: {"step": torch.tensor(5.0), "exp_avg": groups["m"][i], "exp_avg_sq": groups["v"][i]} for i in range(2)}
        param_groups = [{"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "params": [0, 1]}]
        optim = {
            "zero_stage": 3,
            "partition_count": ranks,
            "fp32_flat_groups": groups["master"],
            "optimizer_state_dict": {"state": state, "param_groups": param_groups},
        }
        torch.save({"optimizer_state_dict": optim}, folder / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        model = {
            "module": {},
            "buffer_names": [],
            "param_shapes": [shapes],
            "shared_params": {"lm_head.weight": "model.embed_tokens.weight"},
            "skipped_steps": 1,
        }
        torch.save(model, folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")


def test_a_store_is_made_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """zinf.from_pretrained(resume=True) goes on from the store with the masters, moments, step and learning rate of the checkpoint."""
    model = llama(num_hidden_layers=2)
    model.save_pretrained(tmp_path / "hf")
    generator = torch.Generator().manual_seed(3)
    named = {
        name: {kind: torch.randn(p.shape, generator=generator) * scale for kind, scale in (("master", 0.02), ("m", 1e-3), ("v", 1e-6))}
        for name, p in model.named_parameters()
    }
    for values in named.values():
        values["v"].abs_()
    write_like_deepspeed(tmp_path / "ds", named, 3)
    (tmp_path / "nvme").mkdir()
    seen: list[tuple[int, int]] = []
    import_deepspeed(tmp_path / "ds", tmp_path / "hf", tmp_path / "nvme", chunk_size=4096, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1]
    resumed = zinf.from_pretrained(tmp_path / "hf", nvme_path=tmp_path / "nvme", resume=True)
    with Engine(resumed, lr=1.0, nvme_path=str(tmp_path / "nvme")) as engine:
        assert engine.global_step == 5 and engine.skipped_steps == 1 and engine.optimizer.param_groups[0]["lr"] == 3e-4
        for name, p in resumed.named_parameters():
            fragments.belongs_to(p, engine)
            assert torch.equal(fragments.master(p), named[name]["master"]), name
            assert torch.equal(fragments.state(p, "exp_avg"), named[name]["m"]) and torch.equal(fragments.state(p, "exp_avg_sq"), named[name]["v"]), name
        ids = torch.arange(24).view(2, 12)
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        assert engine.step().step == 6
    with pytest.raises(StoreError):
        import_deepspeed(tmp_path / "ds", tmp_path / "hf", tmp_path / "nvme")
    command = ["import", str(tmp_path / "hf"), str(tmp_path / "nvme" / "run"), "--from-deepspeed", str(tmp_path / "ds"), "--weights-only", "--yes"]
    assert cli.main(command) == 0 and "at step 0" in capsys.readouterr().out
    assert cli.main([*command, "--frozen"]) == 1 and "--frozen does not go with --from-deepspeed" in capsys.readouterr().err
    with Engine(zinf.from_pretrained(tmp_path / "hf", nvme_path=tmp_path / "nvme", resume=True)) as engine:
        assert engine.global_step == 0
        p = engine.module.model.norm.weight
        fragments.belongs_to(p, engine)
        assert torch.equal(fragments.master(p), named["model.norm.weight"]["master"]) and not fragments.state(p, "exp_avg").any()


# ---------------------------------------------------------------------------------------------------- what is wrong with it


def broken(tmp_path: Path, name: str = "z3r2") -> Path:
    return Path(shutil.copytree(DATA / name, tmp_path / name))


def test_wrong_turns(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"there is no checkpoint at .* it has neither model states nor a file 'latest'"):
        ZeroCheckpoint(str(tmp_path))
    with pytest.raises(CheckpointError, match=r"there is no checkpoint 'x' in"):
        ZeroCheckpoint(str(DATA / "z3r1"), "x")
    copy = broken(tmp_path)
    (copy / "global_step3" / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(CheckpointError, match=r"has 1 files \*_optim_states.pt and was written by 2 ranks: copy all of them"):
        ZeroCheckpoint(str(copy))
    engine = Engine(torch.nn.Linear(3, 2))
    with engine, pytest.raises(CheckpointError, match=r"weight is missing; bias is missing; embed.weight is in the checkpoint and not in the model"):
        load_into(engine, ZeroCheckpoint(str(DATA / "z3r2")))


def test_another_layout_is_one_line(tmp_path: Path) -> None:
    copy = broken(tmp_path, "z3r1")
    file = copy / "global_step3" / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
    torch.save({"optimizer_state_dict": {"partition_count": 1}}, file)
    with pytest.raises(CheckpointError, match=r"is no checkpoint of ZeRO as DeepSpeed 0.19.8 lays it out") as e:
        ZeroCheckpoint(str(copy))
    assert "\n" not in str(e.value)


class Trap:
    """Pickled, it would run when it is opened."""

    def __reduce__(self) -> Any:
        return subprocess.check_output, (["touch", "trapped"],)


def test_no_code_of_a_file_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    copy = broken(tmp_path)
    file = copy / "global_step3" / "zero_pp_rank_0_mp_rank_00_model_states.pt"
    saved = torch.load(file, weights_only=True)
    torch.save({**saved, "client": Trap()}, file)
    with pytest.raises(CheckpointError, match=r"it has objects of commands.check_output, which zinf does not make from a file"):
        ZeroCheckpoint(str(copy))
    assert not (tmp_path / "trapped").exists()
    file.write_bytes(b"\x80\x02no zip")
    with pytest.raises(CheckpointError, match="no checkpoint file that torch reads without running code"):
        ZeroCheckpoint(str(copy))


def test_what_may_occur_is_what_occurs() -> None:
    """No more than DeepSpeed's checkpoints need is on the list."""
    from zinf.integrations.deepspeed.zero_files import ALLOWED

    found = {g for file in DATA.rglob("*.pt") if zipfile.is_zipfile(file) for g in torch.serialization.get_unsafe_globals_in_checkpoint(file)}
    assert {"deepspeed.runtime.fp16.loss_scaler.LossScaler", "deepspeed.runtime.zero.config.ZeroStageEnum"} <= found <= set(ALLOWED)
    assert all(name.startswith("deepspeed.") for name in ALLOWED) and "deepspeed" not in sys.modules


def test_moments_on_nvme_are_said(tmp_path: Path) -> None:
    """With NVMe DeepSpeed leaves them out of the file."""
    copy = broken(tmp_path, "z3r1")
    file = copy / "global_step3" / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
    from zinf.integrations.deepspeed.zero_files import load

    saved = {"optimizer_state_dict": {**load(str(file))["optimizer_state_dict"], "loss_scaler": None}}
    for state in saved["optimizer_state_dict"]["optimizer_state_dict"]["state"].values():
        state.pop("exp_avg")
    torch.save(saved, tmp_path / "new")
    (tmp_path / "new").replace(file)  # the old one is mapped
    with pytest.raises(CheckpointError, match=r"there is no exp_avg of embed.weight: with NVMe DeepSpeed leaves it in offloaded_tensors"):
        ZeroCheckpoint(str(copy)).moment("embed.weight", "m")
