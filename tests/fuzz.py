"""Fuzzes what reads files that others may have written: damaged, cut short, or made to harm.

    python tests/fuzz.py TARGET MINUTES [--seed N]        TARGET: one of TARGETS, or all

An input is a valid one with some mutations: of its bytes, of the values in its JSON (with checksums put right again, as an attacker would), of its length.
A target must take it, or refuse it with the errors that its docstring names, within SECONDS and MEMORY. Anything else ends with 1 and leaves the input
beside the message. A target is a row of TARGETS: valid inputs, how to mend the checksums of a changed one, what to call, which errors are right.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import xxhash  # noqa: E402

from zinf.errors import CheckpointError, ConfigError, StoreError  # noqa: E402

SECONDS = 5  # for one input
MEMORY = 256 << 20  # bytes of address space beyond what the process has when it starts
NASTY: list[Any] = [
    None, True, -1, 0, 1, 2, 255, 1 << 31, (1 << 31) - 1, 1 << 32, 1 << 63, (1 << 63) - 1, 1 << 64, 1 << 70, 10**4400, 0.5, 1e308,
    "", "x", "../../etc/passwd", "/", "\0", "\ud800", "BF16", "bf16", "a" * 5000, "-" * 99, "0" * 99,
    [], {}, [[]], [0] * 1000, [1 << 62] * 300, [[[[[[]]]]]], {"a": {}},
]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Target:
    """What to fuzz. `json_of` and `with_json` take the JSON out of an input and put a changed one in, everything around it made right."""

    inputs: Callable[[], list[bytes]]
    json_of: Callable[[bytes], Any]
    with_json: Callable[[bytes, str], bytes]
    call: Callable[[bytes, str], object]  # (input, path of a file that may be written)
    refusals: tuple[type[BaseException], ...]


# ---- targets


def _manifests() -> list[bytes]:
    import array

    from fake_io import tiny_model

    from zinf import layout
    from zinf.tiers import manifest

    out = []
    for model in (tiny_model(), tiny_model(4096)):
        for crash_safe in (True, False):
            count = len(layout.place(model).places)
            sums = array.array("Q", (random.Random(i).getrandbits(64) for i in range(count)))
            places = layout.place(model, versions=2 if crash_safe else 1).places.values()
            versions = bytes(random.Random(i).choice([*range(len(p)), manifest.UNWRITTEN]) for i, p in enumerate(places))
            m = manifest.Manifest("u" * 32, 7, model, (1.0, 2.5), crash_safe, True, versions, sums, {"lr": [1e-3], "rng": "00ff", "a": {"b": None}})
            out.append(m.encode())
    return out


def _signed(_: bytes, text: str) -> bytes:
    """A manifest with the right fingerprint and checksum, whatever it says."""
    from zinf import layout

    try:
        fields = json.loads(text)
        fields.pop("digest", None)
        try:
            fields["fingerprint"] = layout.Model.from_json(fields["layout"]).fingerprint()
        except Exception:
            pass
        text = json.dumps(fields)
    except (ValueError, AttributeError, TypeError):
        pass
    body = text.encode("utf-8", "surrogatepass")[:-1]
    return body + b',\n"digest": "%016x"}\n' % xxhash.xxh3_64_intdigest(body)


def _read_manifest(data: bytes, path: str) -> None:
    """As Store.open does: decode, place, compare the versions."""
    from zinf import layout
    from zinf.tiers import manifest, opening

    m = manifest.decode(data, path)
    if m.model.numel < 1 << 24 and len(m.shares) < 20:  # what is larger needs larger files; opening.load compares paths and shares first
        placement = layout.place(m.model, m.shares, 2 if m.crash_safe else 1)
        opening.check_versions(path, m, placement)


def _safetensors() -> list[bytes]:
    import torch

    from zinf.checkpoint.format import write_header

    tensors = [("a.weight", "BF16", (8, 4)), ("b", "F32", (3,)), ("c.scalar", "I64", ()), ("empty", "F16", (0, 7)), ("d", "F4", (2, 2))]
    out = []
    for some in (tensors, tensors[:1], []):
        head, _, size = write_header(some, "x", {"format": "pt"} if len(some) != 1 else None)
        out.append(head + bytes(torch.arange(size - len(head)).to(torch.uint8).tolist()))
    return out


def _with_header(data: bytes, text: str) -> bytes:
    raw = text.encode("utf-8", "surrogatepass")
    raw += b" " * (-len(raw) % 8)
    return len(raw).to_bytes(8, "little") + raw + data[8 + int.from_bytes(data[:8], "little") :]


def _read_safetensors(data: bytes, path: str) -> None:
    """As an import does: the header, then each tensor that torch has a dtype for."""
    from zinf.checkpoint.format import TORCH
    from zinf.checkpoint.sources import SafetensorsSource

    Path(path).write_bytes(data)
    with SafetensorsSource(path) as source:
        for name, tensor in source.tensors.items():
            if tensor.dtype in TORCH:
                source.load(name)


def _configs() -> list[bytes]:
    from zinf.config import Config

    plain = Config(nvme_path="/tmp", lr=1e-3, host_memory="1GiB").to_dict()
    return [json.dumps(plain).encode(), b'{"lr": 1e-4, "betas": [0.9, 0.95], "chunk_size": 4096, "nvme_path": ["/a", "/b"], "weights": 0.5}']


def _read_config(data: bytes, path: str) -> None:
    from zinf.config import Config

    Path(path + ".json").write_bytes(data)
    Config.load(path + ".json", env={})


def _deepspeed_configs() -> list[bytes]:
    return [file.read_bytes() for file in sorted((Path(__file__).parent / "ds_configs").glob("*.json"))]


def _read_deepspeed_config(data: bytes, path: str) -> None:
    from zinf.integrations.deepspeed.config import translate
    from zinf.integrations.deepspeed.reading import read

    Path(path).write_bytes(data)
    for line in translate(read(path), auto={"max_grad_norm": 0.5, "hidden_size": 64}).report:
        str(line).encode()


def _same(data: bytes, text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


TARGETS = {
    "manifest": Target(_manifests, json.loads, _signed, _read_manifest, (StoreError,)),
    "safetensors": Target(
        _safetensors, lambda d: json.loads(d[8 : 8 + int.from_bytes(d[:8], "little")]), _with_header, _read_safetensors, (CheckpointError, OSError)
    ),
    "config": Target(_configs, json.loads, _same, _read_config, (ConfigError,)),
    "ds-config": Target(_deepspeed_configs, json.loads, _same, _read_deepspeed_config, (ConfigError,)),
}


# ---- mutations


def mutate_bytes(data: bytes, draw: random.Random) -> bytes:
    out = bytearray(data)
    for _ in range(draw.choice([1, 1, 2, 5])):
        at, n = draw.randrange(len(out) + 1), draw.randrange(1, 40)
        match draw.randrange(6):
            case 0 if at < len(out):
                out[at] ^= 1 << draw.randrange(8)
            case 1:
                out[at : at + n] = draw.randbytes(draw.randrange(n))
            case 2:
                del out[at:]
            case 3:
                out[at:at] = out[at : at + n] * draw.randrange(1, 50)
            case 4:
                out[at:at] = draw.choice([b"[" * 3000, b'{"a":' * 3000, b"9" * 5000, b"\0" * 9, b"NaN", b"1e999", b'"', b"\xff\xfe"])
            case _:
                out[:8] = draw.choice([0, 1, 7, 1 << 20, 1 << 40, (1 << 64) - 1, len(out), max(0, len(out) - 8)]).to_bytes(8, "little")
    return bytes(out)


def mutate_json(value: Any, draw: random.Random) -> Any:
    """A changed copy: a value replaced, removed, doubled or moved, somewhere."""
    value = copy.deepcopy(value)
    for _ in range(draw.choice([1, 1, 1, 2, 4])):
        holder, key = None, None
        node = value
        while isinstance(node, dict | list) and node and (holder is None or draw.random() < 0.85):
            holder, key = node, draw.choice(list(node) if isinstance(node, dict) else range(len(node)))
            node = node[key]
        if holder is None:
            return copy.deepcopy(draw.choice(NASTY))
        match draw.randrange(7):
            case 0 | 1 | 2:
                holder[key] = copy.deepcopy(draw.choice(NASTY))
            case 3 if isinstance(node, int) and not isinstance(node, bool):
                holder[key] = node + draw.choice([-1, 1, 64, 2048, -node, node])
            case 4:
                del holder[key]
            case 5 if isinstance(holder, list):
                holder.insert(draw.randrange(len(holder) + 1), copy.deepcopy(node))
            case _ if isinstance(holder, dict):
                holder[draw.choice(["x", "", key + "_", *holder])] = copy.deepcopy(node)
            case _:
                holder[key] = [copy.deepcopy(node) for _ in range(draw.randrange(40))]
    return value


def dump(value: Any) -> str:
    """JSON, also of integers that Python does not write by itself."""
    limit = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        return json.dumps(value)
    finally:
        sys.set_int_max_str_digits(limit)


# ---- the loop


def _too_long(*_: object) -> None:
    raise AssertionError(f"no answer after {SECONDS} s")


def fuzz(name: str, minutes: float, seed: int, most: int | None = None) -> Counter[str]:
    """Runs for so long, or for `most` inputs; what happened, by kind. Raises what the target should not have raised, after writing the input to a file."""
    target, draw, counts = TARGETS[name], random.Random(seed), Counter[str]()
    inputs = target.inputs()
    signal.signal(signal.SIGALRM, _too_long)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "input")
        for data in inputs:
            target.call(data, path)  # else nothing is tested
        with open("/proc/self/statm") as f:
            space = int(f.read().split()[0]) * resource.getpagesize()
        before = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (space + MEMORY, before[1]))
        try:
            end = time.monotonic() + 60 * minutes
            while time.monotonic() < end and (most is None or sum(counts.values()) < most):
                data = draw.choice(inputs)
                if draw.random() < 0.7:
                    data = target.with_json(data, dump(mutate_json(target.json_of(data), draw)))
                if draw.random() < 0.4:
                    data = mutate_bytes(data, draw)
                counts[_once(target, data, path)] += 1
        except BaseException:
            kept = Path(tempfile.gettempdir()) / f"fuzz-{name}-{os.getpid()}"
            kept.write_bytes(data)
            print(f"fuzz {name}, seed {seed}, input {sum(counts.values())}: kept as {kept}", file=sys.stderr)
            raise
        finally:
            resource.setrlimit(resource.RLIMIT_AS, before)
    return counts


def _once(target: Target, data: bytes, path: str) -> str:
    """ "taken", or the name of the error that refused it."""
    signal.alarm(SECONDS)
    try:
        target.call(data, path)
        return "taken"
    except target.refusals as e:
        if len(str(e)) > 10000:
            raise AssertionError(f"a message of {len(str(e))} characters") from e
        return type(e).__name__
    finally:
        signal.alarm(0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", choices=[*TARGETS, "all"])
    parser.add_argument("minutes", type=float)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--inputs", type=int, help="stop after so many")
    args = parser.parse_args()
    for name in TARGETS if args.target == "all" else [args.target]:
        counts = fuzz(name, args.minutes, args.seed, args.inputs)
        print(f"fuzz: {name}, {args.minutes:g} minutes, seed {args.seed}: {sum(counts.values())} inputs, {dict(counts)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
