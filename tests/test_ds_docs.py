"""docs/from-deepspeed.md: every snippet runs; docs/deepspeed-keys.md is the table that the code has."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from ds_data.make_checkpoints import Tiny
from models import batches, llama
from test_ds_checkpoints import CONFIG, groups

from zinf import cli
from zinf.errors import ConfigError
from zinf.integrations import deepspeed

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "from-deepspeed.md").read_text()


def ds_config() -> dict[str, Any]:
    nvme = {"device": "nvme", "nvme_path": "nvme"}
    return {
        "train_batch_size": 2, "bf16": {"enabled": True}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 3, "offload_param": nvme, "offload_optimizer": nvme},
    }  # fmt: skip


AUTO = {
    "bf16": {"enabled": "auto"}, "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "gradient_clipping": "auto",
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}, "reduce_bucket_size": "auto"},
}  # fmt: skip


def test_every_snippet_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("nvme").mkdir()
    Path("ds_config.json").write_text(json.dumps(ds_config()))
    Path("auto.json").write_text(json.dumps(AUTO))
    llama(num_hidden_layers=1).save_pretrained("llama")
    shutil.copytree(ROOT / "tests" / "ds_data" / "checkpoints" / "z3r2", "deepspeed_checkpoint")
    dataset = [{"input_ids": ids, "labels": ids} for ids in batches(1)[0]]
    snippets = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    assert len(snippets) == 7
    for snippet in snippets:
        shutil.rmtree("nvme/run", ignore_errors=True)
        torch.manual_seed(0)
        tiny = Tiny()
        own = {"model": llama(num_hidden_layers=1), "dataset": dataset, "torch": torch, "deepspeed": deepspeed, "tiny": tiny}
        run_as_a_script(snippet, own | {"groups": groups(tiny), "tiny_config": CONFIG})


def run_as_a_script(source: str, names: dict[str, Any]) -> None:
    """A file of this repository's own, run in this process."""
    import runpy

    Path("snippet.py").write_text(source)
    runpy.run_path("snippet.py", init_globals=names)


def test_the_names_of_the_page_are_there() -> None:
    for name in re.findall(r"`deepspeed\.([a-z_]+(?:\.[A-Za-z_0-9]+)*)`", PAGE):
        if not name.startswith(("runtime", "ops")) and not name.endswith("_"):
            found: Any = deepspeed
            for part in name.split("."):
                found = getattr(found, part)


def test_the_table_of_keys_is_the_codes(capsys: pytest.CaptureFixture[str]) -> None:
    """Made by: zinf ds-config --keys --markdown > docs/deepspeed-keys.md"""
    assert cli.main(["ds-config", "--keys", "--markdown"]) == 0
    assert capsys.readouterr().out == (ROOT / "docs" / "deepspeed-keys.md").read_text()


def test_the_flag_of_a_command_line() -> None:
    assert deepspeed.take_argument(["--lr", "1", "--deepspeed=a.json", "--deepspeed", "b.json", "x"]) == ("b.json", ["--lr", "1", "x"])
    assert deepspeed.take_argument(["--lr", "1"]) == (None, ["--lr", "1"])
    with pytest.raises(ConfigError, match="--deepspeed needs a file"):
        deepspeed.take_argument(["--deepspeed"])
