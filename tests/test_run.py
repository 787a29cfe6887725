"""`zinf run -- COMMAND`: scripts that know nothing of zinf train on it, unchanged; and the Axolotl plugin, against its recorded interface."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from models import llama
from tiny_tokenizer import tiny_tokenizer

from zinf.errors import ConfigError

ROOT = Path(__file__).parents[1]
PLAIN = """
import sys, torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
torch.set_num_threads(1)
torch.manual_seed(0)
model = AutoModelForCausalLM.from_pretrained("hub", dtype=torch.bfloat16)
rows = [{"input_ids": [(i * 7 + j) % 300 for j in range(16)], "labels": [(i * 7 + j) % 300 for j in range(16)]} for i in range(8)]
how = dict(max_steps=3, per_device_train_batch_size=2, learning_rate=1e-2, report_to=[], use_cpu=True, save_strategy="no")
args = TrainingArguments("out", logging_steps=1, disable_tqdm=True, **how)

class Mine(Trainer):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.mine = True

trainer = Mine(model=model, args=args, train_dataset=rows)
trainer.train()
trainer.save_model("out")
print("MRO", [c.__name__ for c in type(trainer).__mro__][:3], trainer.mine, isinstance(trainer, Mine))
"""
SFT = """
import datasets, torch
from transformers import AutoTokenizer, AutoModelForCausalLM
from trl import SFTConfig, SFTTrainer
torch.set_num_threads(1)
tokenizer = AutoTokenizer.from_pretrained("hub")
tokenizer.pad_token = "</s>"
model = AutoModelForCausalLM.from_pretrained("hub", dtype=torch.bfloat16)
args = SFTConfig("out", max_steps=2, report_to=[], use_cpu=True, bf16=False, save_strategy="no", logging_steps=1, disable_tqdm=True, max_length=32)
data = datasets.Dataset.from_dict({"text": ["the cat sat on the mat"] * 8})
trainer = SFTTrainer(model=model, args=args, train_dataset=data, processing_class=tokenizer)
trainer.train()
print("MRO", [c.__name__ for c in type(trainer).__mro__][:3], type(trainer.engine).__name__)
"""


@pytest.fixture
def place(tmp_path):
    llama(vocab_size=300).save_pretrained(tmp_path / "hub")
    tiny_tokenizer().save_pretrained(tmp_path / "hub")
    (tmp_path / "nvme").mkdir()
    (tmp_path / "zinf.yaml").write_text(f"nvme_path: {tmp_path}/nvme\nhost_memory: 1GiB\n")
    return tmp_path


def command(place: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(argv, cwd=place, env=environ, capture_output=True, text=True, timeout=150, stdin=subprocess.DEVNULL)


def test_a_plain_trainer_unchanged(place) -> None:
    """The same script alone and under `zinf run`: the mixin comes first, the store is on the drive, the losses are those in memory."""
    (place / "train.py").write_text(PLAIN)
    alone = command(place, sys.executable, "train.py")
    done = command(place, sys.executable, "-m", "zinf", "run", "--zinf", "zinf.yaml", "--", sys.executable, "train.py")
    assert done.returncode == 0, done.stderr
    assert "MRO ['Mine', 'ZinfTrainerMixin', 'Mine'] True True" in done.stdout
    assert "ZinfTrainerMixin" not in alone.stdout and alone.returncode == 0
    assert (place / "nvme/run/manifest.json").exists() and (place / "out/model.safetensors").exists()
    first = [[line.split("'loss': ")[1].split(",")[0] for line in p.stdout.splitlines() if "'loss'" in line] for p in (alone, done)]
    assert first[0][0] == first[1][0] and len(first[0]) == len(first[1]) == 3  # later ones differ: bf16 weights have no fp32 master in memory


def test_trl_unchanged(place) -> None:
    pytest.importorskip("trl")
    (place / "sft.py").write_text(SFT)
    done = command(place, sys.executable, "-m", "zinf", "run", "--zinf", "zinf.yaml", "--", "sft.py")
    assert done.returncode == 0, done.stderr
    assert "MRO ['SFTTrainer', 'ZinfTrainerMixin', 'SFTTrainer'] Engine" in done.stdout
    assert (place / "nvme/run/manifest.json").exists()


def test_the_command_is_itself(place) -> None:
    """Its exit code, what is not there, options that are wrong; a sitecustomize that was there is still run."""
    run = [sys.executable, "-m", "zinf", "run"]
    assert command(place, *run, "--", sys.executable, "-c", "import sys; sys.exit(7)").returncode == 7
    done = command(place, *run, "--", "no-such-command")
    assert (done.returncode, done.stderr) == (1, "zinf: error: no-such-command: no such command; is its environment active?\n")
    (place / "bad.yaml").write_text("host_memroy: 1GiB\n")
    done = command(place, *run, "--zinf", "bad.yaml", "--", "true")
    assert done.returncode == 1 and done.stderr == "zinf: error: zinf: unknown key 'host_memroy'; did you mean 'host_memory'?\n"
    assert command(place, *run).returncode == 2
    (place / "site").mkdir()
    (place / "site/sitecustomize.py").write_text("import builtins\nbuiltins.theirs = 1\n")
    script = "import sys; print(theirs, 'zinf' in sys.modules, 'torch' in sys.modules)"
    done = command(place, "env", f"PYTHONPATH={place}/site:{ROOT}", *run, "--", sys.executable, "-c", script)
    assert done.stdout == "1 False False\n", done.stderr


class Cfg(dict):
    """Axolotl's DictDefault: attributes, None for what is not there."""

    __getattr__ = dict.get


def test_axolotl(tmp_path) -> None:
    """The recorded interface: load_plugin by dotted path, get_input_args, pre_model_load(cfg), trainers that axolotl builds, post_train(cfg, model)."""
    from transformers import Trainer, TrainingArguments

    from zinf.hf.trainer import ZinfTrainerMixin
    from zinf.integrations import trainers

    module, name = "zinf.integrations.axolotl.ZinfPlugin".rsplit(".", 1)
    plugin = getattr(importlib.import_module(module), name)()
    module, name = plugin.get_input_args().rsplit(".", 1)
    assert getattr(importlib.import_module(module), name)(zinf={"nvme_path": "x"}).zinf == {"nvme_path": "x"}

    class AxolotlTrainer(Trainer):
        pass

    for wrong, words in ((Cfg(load_in_4bit=True), "load_in_4bit"), (Cfg(zinf={"host_memroy": 1}), "host_memory"), (Cfg(zinf={"lr": 1}), "TrainingArguments")):
        with pytest.raises(ConfigError, match=words):
            plugin.pre_model_load(wrong)
    plugin.pre_model_load(Cfg(zinf={"nvme_path": str(tmp_path)}))
    try:
        args = TrainingArguments(str(tmp_path / "out"), max_steps=1, report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True)
        rows = [{"input_ids": list(range(8)), "labels": list(range(8))}] * 2
        trainer = AxolotlTrainer(model=llama(), args=args, train_dataset=rows)
        assert isinstance(trainer, ZinfTrainerMixin)
        trainer.train()
        plugin.post_train(Cfg(), trainer.model)
        assert trainer.engine.global_step == 1 and (tmp_path / "run/manifest.json").exists()
        trainer.close()
    finally:
        trainers.uninstall()
    assert not isinstance(AxolotlTrainer(model=llama(), args=args), ZinfTrainerMixin)
