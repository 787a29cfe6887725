"""Wrong turns of a newcomer: each ends in exit code 1 and one line that says what was wrong and what to do, before any work."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from models import llama
from tiny_tokenizer import tiny_tokenizer

from zinf import cli

pytestmark = pytest.mark.usefixtures("one_thread")

TRAIN = ["train", "run.yaml"]
ASK = ["generate", "m", "--prompt", "x"]
CASES = {
    "a section that is mistyped": ([*TRAIN, "engin.lr=1"], r"unknown key 'engin'; did you mean 'engine'\?"),
    "a key that is mistyped": ([*TRAIN, "engine.host_memroy=1GiB"], r"unknown key 'host_memroy'; did you mean 'host_memory'\?"),
    "no equals sign": ([*TRAIN, "steps"], r"write KEY=VALUE, such as steps=100"),
    "a file that is not there": (["train", "rnu.yaml"], r"rnu\.yaml: No such file"),
    "a folder for the file": (["train", "m"], r"m is a folder: give a YAML or JSON file"),
    "a wrong path": ([*TRAIN, "model=no/such/model"], r"model is 'no/such/model', expected a folder with a Hugging Face model"),
    "a model id that is not there": ([*TRAIN, "model=nosuch/model"], r"no folder nosuch/model here.*HF_HUB_OFFLINE is set: give a folder"),
    "a folder without config.json": ([*TRAIN, "model=noconf"], r"noconf has no config\.json: give the folder of a Hugging Face model"),
    "a model without tokenizer": ([*TRAIN, "model=notok"], r"no tokenizer.*from notok.*save_pretrained"),
    "no text matches": ([*TRAIN, "data.train=[nope*.txt]"], r"data: nope\*\.txt: no such file"),
    "an empty text": ([*TRAIN, "data.train=[empty.txt]"], r"give more text, or a smaller max_length"),
    "a text that is too short": ([*TRAIN, "data.train=[short.txt]"], r"3 tokens make no row of 32.*give more text, or a smaller max_length"),
    "another JSONL": ([*TRAIN, "data.train=[bad.jsonl]"], r'bad\.jsonl, line 1: expected "text".*or "messages".*found txt'),
    "too small a budget": ([*TRAIN, "engine.host_memory=64KiB"], r"zinf needs .* but host_memory is 64\.0 KiB: raise host_memory"),
    "a size that is none": ([*TRAIN, "engine.host_memory=64 elephants"], r"'64 elephants' is not a size; write it like 512MiB"),
    "a drive that is not mounted": ([*TRAIN, "engine.nvme_path=/no/drive"], r"/no/drive does not exist: mount the drive or create the directory"),
    "no drive": ([*TRAIN, "engine.nvme_path=[]"], r"engine\.nvme_path must be given"),
    "an output that cannot be": ([*TRAIN, "output=a.txt/out"], r"output: .*a\.txt/out cannot be made.*choose another folder"),
    "a store of another model": ([*TRAIN, "model=other", "engine.nvme_path=taken"], r"taken/run is of another model.*choose another run_name"),
    "a store that is none": (["inspect", "nope"], r"nope: no such folder"),
    "the folder above the store": (["export", "taken", "out2"], r"is no store but holds .*taken/run: give one of these"),
    "a file for a model": (["import", "a.txt", "s"], r"a\.txt is a file: give the folder that it is in"),
    "a dtype that is mistyped": (["import", "m", "s", "--dtype", "bf61"], r"did you mean 'bf16'\?"),
    "a machine that is mistyped": (["plan", "m", "--machine", "rtx4099"], r"did you mean 'rtx4090'\?"),
    "a run that was not": (["report", "nowhere"], r"nowhere: no such file or folder; `zinf train` says where its log is"),
    "to ask without a drive": (ASK, r"m is not a store.*give --nvme-path PATH"),
    "to ask on a drive that is not there": ([*ASK, "--nvme-path", "nope"], r"--nvme-path nope: no such folder: make it first"),
    "to ask nothing": (["generate", "m", "--nvme-path", "nvme", "--prompt", " "], r"a --prompt is empty: give at least one word"),
    "a model id, to ask": (["generate", "nosuch/model", "--nvme-path", "nvme", "--prompt", "x"], r"nosuch/model.*HF_HUB_OFFLINE is set: give a folder"),
    "to ask for a probability above 1": ([*ASK, "--top-p", "9"], r"--top-p is 9\.0: give a fraction above 0"),
    "a command that is not there": (["run", "--", "no-such-command"], r"no-such-command: no such command; is its environment active\?"),
    "run with the trainer's option": (["run", "--zinf", "lr.yaml", "--", "true"], r"lr is said by TrainingArguments .*leave it out here"),
    "no DeepSpeed config": (["ds-config", "nope.json"], r"nope\.json: No such file"),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = tmp_path_factory.mktemp("place")
    for name, layers in (("m", 2), ("other", 3), ("notok", 2)):
        llama(vocab_size=300, num_hidden_layers=layers).save_pretrained(place / name)
        if name != "notok":
            tiny_tokenizer().save_pretrained(place / name)
    for name in ("nvme", "taken", "noconf"):
        (place / name).mkdir()
    (place / "a.txt").write_text("the cat sat on the mat. " * 100)
    (place / "empty.txt").write_text("")
    (place / "short.txt").write_text("hi")
    (place / "bad.jsonl").write_text('{"txt": "x"}\n')
    (place / "lr.yaml").write_text("lr: 1\n")
    (place / "run.yaml").write_text("model: m\noutput: out\nsteps: 1\ndata: {train: [a.txt], max_length: 32}\nengine: {nvme_path: nvme}\n")
    assert cli.main(["import", str(place / "m"), str(place / "taken/run")]) == 0
    return place


@pytest.mark.parametrize("case", CASES)
def test_a_wrong_turn_ends_in_one_line(place, monkeypatch, capsys, case) -> None:
    args, said = CASES[case]
    monkeypatch.chdir(place)
    assert cli.main(args) == 1
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if line.startswith("zinf: error: ")]
    assert len(lines) == 1 and re.search(said, lines[0]), err
    assert "Traceback" not in err and "\033" not in out + err and len(lines[0]) < 500
    assert os.listdir(place / "nvme") in ([], ["run-log"]) and not (place / "out").exists()


def test_a_missing_package_names_its_extra() -> None:
    for package, extra in (("transformers", "hf"), ("peft", "peft"), ("trl.trainer", "trl"), ("datasets", "trl"), ("matplotlib", "report")):
        assert f'pip install "zinf[{extra}]"' in cli.describe(ModuleNotFoundError(f"No module named {package!r}", name=package))


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_knows_the_commands(shell, capsys) -> None:
    assert cli.main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "generate" in script and "max-new-tokens" in script and "bash" in script
    if shell == "bash":
        assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0


def test_python_m_zinf_without_a_terminal() -> None:
    done = subprocess.run([sys.executable, "-m", "zinf", "inspect", "/no/such"], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "zinf: error: /no/such: no such folder\n")
