"""DeepSpeed's checkpoints, read: the fp32 master and the moments of every parameter, from what each rank has written.

    ZeRO-3      each rank has a part of each parameter, ceil(numel / ranks) elements, end to end in the order of param_shapes, cut into flat groups
    ZeRO-1, 2   the ranks' partitions of a group, end to end, are its parameters end to end
    universal   a folder for each parameter

[Note: pickles that run no code] These files are pickles. They are opened by torch.load(weights_only=True), which makes tensors and plain values
and calls nothing; of DeepSpeed's classes only those in ALLOWED may occur, and stand-ins that do nothing take their place. Whatever else occurs is
refused by name. The tensors are mapped, not read, so memory is that of a chunk.
"""

from __future__ import annotations

import glob
import math
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from zinf.errors import CheckpointError


class Inert:
    """Stands where DeepSpeed's own objects were: a loss scaler, an address."""

    def __init__(self, *args: Any) -> None:
        self.args = args


ALLOWED: dict[str, Any] = {
    "deepspeed.runtime.fp16.loss_scaler.LossScaler": Inert,
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler": Inert,
    "deepspeed.utils.tensor_fragment.fragment_address": Inert,
    "deepspeed.utils.tensor_fragment.tensor_fragment": Inert,
    "deepspeed.runtime.zero.config.ZeroStageEnum": int,
}
MOMENTS = {"m": "exp_avg", "v": "exp_avg_sq", "s": "sum"}  # zinf's planes -> DeepSpeed's names
_MODEL = ("zero_pp_rank_*_mp_rank_00_model_states.pt", "mp_rank_00_model_states.pt")
LATEST, LATEST_UNIVERSAL = "latest", "latest_universal"


def load(path: str) -> Any:
    """What a file holds; see [Note: pickles that run no code].

    Raises:
        CheckpointError: it holds objects of other classes, or is no such file.
    """
    try:
        with torch.serialization.safe_globals([(stand_in, name) for name, stand_in in ALLOWED.items()]):
            return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except OSError:
        raise
    except Exception as e:  # of the unpickler and of the zip reader: many kinds
        raise CheckpointError(f"{path}: {_why(path, e)}") from None


def _why(path: str, error: Exception) -> str:
    try:
        others = sorted(set(torch.serialization.get_unsafe_globals_in_checkpoint(path)) - set(ALLOWED))
    except Exception:
        others = []
    if others:
        return f"it has objects of {', '.join(others[:3])}, which zinf does not make from a file: save it again without them"
    return f"no checkpoint file that torch reads without running code ({type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:120]})"


class Pieces:
    """Elements of one parameter that stand in several flat tensors, end to end. A Reader, see checkpoint/sources.py."""

    def __init__(self, pieces: Sequence[torch.Tensor], shape: Sequence[int]):
        self.shape = tuple(shape)
        self._pieces = pieces
        self.dtype = pieces[0].dtype

    def read(self, start: int, out: torch.Tensor) -> None:
        at, done = 0, 0
        for piece in self._pieces:
            a, b = max(start + done - at, 0), min(start + out.numel() - at, piece.numel())
            if a < b:
                out[done : done + b - a].copy_(piece[a:b])
                done += b - a
            at += piece.numel()
            if done == out.numel():
                return


class ZeroCheckpoint:
    """One checkpoint of DeepSpeed. A Source of fp32 masters (checkpoint/sources.py); frozen parameters and shared ones, too.

    Attributes:
        where: its folder.
        step: steps that the optimizer has made.
        groups: the optimizer's parameter groups, without their parameters.
        trained: names of parameters that have a master and moments.
        module: buffers by name.
        saved: everything else that the file of the model has: lr_scheduler, skipped_steps, client state, ...
    """

    def __init__(self, folder: str, tag: str | None = None):
        self.where = find(folder, tag)
        try:
            self._read()
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as e:
            raise CheckpointError(f"{self.where} is no checkpoint of ZeRO as DeepSpeed 0.19.8 lays it out ({type(e).__name__}: {e})") from None

    def _read(self) -> None:
        files = sorted(set(_files(self.where, _MODEL[0])) or _files(self.where, _MODEL[1]), key=_natural)
        if not files:
            raise CheckpointError(f"{self.where} has no file *_model_states.pt: it is no checkpoint of DeepSpeed")
        models = [load(path) for path in files]
        self.saved = models[0]
        if "param_shapes" not in self.saved:
            raise CheckpointError(f"{files[0]} has no param_shapes: only checkpoints of ZeRO are read; save one with zero_optimization")
        if (size := self.saved.get("mp_world_size", 1)) != 1:
            raise CheckpointError(f"{self.where} is of {size} tensor-parallel ranks: convert it with ds_to_universal.py first")
        self.module = {name: self.saved["module"][name] for name in self.saved.get("buffer_names") or ()}
        self._shapes: dict[str, tuple[int, ...]] = {n: tuple(s) for group in self.saved["param_shapes"] for n, s in group.items()}
        self.trained = frozenset(self._shapes)
        self._shared: Mapping[str, str] = self.saved.get("shared_params") or {}
        self._frozen = self._frozen_parts(models)
        self._streams = (
            _universal(self.where, self._shapes) if os.path.isdir(os.path.join(self.where, "zero")) else _streams(self.where, self.saved, self._shapes)
        )
        self.step, self.groups = self._streams.step, self._streams.groups

    def _frozen_parts(self, models: Sequence[Mapping[str, Any]]) -> dict[str, Pieces]:
        shapes = self.saved.get("frozen_param_shapes") or {}
        parts = [m.get("frozen_param_fragments") or {} for m in models]
        return {name: Pieces([p[name].reshape(-1) for p in parts], shape) for name, shape in shapes.items()}

    def open(self, name: str) -> Pieces:
        """The fp32 master of a trained parameter, the weights of a frozen one."""
        name = self._shared.get(name, name)
        if name in self._frozen:
            return self._frozen[name]
        if name not in self._shapes:
            raise CheckpointError(f"{name} is missing")
        return self._streams.open(name, "master")

    def moment(self, name: str, plane: str) -> Pieces:
        """A moment of a trained parameter, by zinf's name of it."""
        return self._streams.open(self._shared.get(name, name), plane)

    def unexpected(self, params: Collection[str]) -> list[str]:
        used = {self._shared.get(name, name) for name in params}
        return [name for name in (*self._shapes, *self._frozen) if name not in used]

    @property
    def names(self) -> list[str]:
        """Of all parameters, trained and frozen."""
        return [*self._shapes, *self._frozen]

    @property
    def client(self) -> dict[str, Any]:
        """What the script has saved with it."""
        return {key: value for key, value in self.saved.items() if key not in _OWN}


# What DeepSpeed itself writes into the file of the model.
_OWN = frozenset(
    "module buffer_names optimizer param_shapes frozen_param_shapes shared_params frozen_param_fragments lr_scheduler data_sampler random_ltd"
    " sparse_tensor_module_names skipped_steps global_steps global_samples dp_world_size mp_world_size checkpoint_parallel_dimensions ds_config"
    " ds_version universal_checkpoint_info autoep_layers param_slice_mappings".split()
)


class Streams:
    """Where master and moments of each parameter stand."""

    def __init__(self, step: int, groups: list[dict[str, Any]], open_: Callable[[str, str], Pieces]):
        self.step, self.groups, self.open = step, [{k: v for k, v in g.items() if k != "params"} for g in groups], open_


def _files(folder: str, pattern: str) -> list[str]:
    return glob.glob(os.path.join(glob.escape(folder), pattern))


def _natural(path: str) -> list[Any]:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", os.path.basename(path))]


def is_deepspeed(folder: str, tag: str | None = None) -> bool:
    """Is there a checkpoint of DeepSpeed?"""
    try:
        path = find(folder, tag)
    except CheckpointError:
        return False
    return any(_files(path, pattern) for pattern in _MODEL)


def find(folder: str, tag: str | None = None) -> str:
    """The folder of a checkpoint: of `tag`, of the one that `latest` names, or `folder` itself."""
    if tag is not None:
        path = os.path.join(folder, tag)
        if not os.path.isdir(path):
            raise CheckpointError(f"there is no checkpoint {tag!r} in {folder}")
        return path
    if any(_files(folder, pattern) for pattern in _MODEL):
        return folder
    for name in (LATEST, LATEST_UNIVERSAL):
        try:
            with open(os.path.join(folder, name), encoding="utf-8") as f:
                return find(folder, f.read(4096).strip())
        except (OSError, UnicodeDecodeError):
            continue
    raise CheckpointError(f"there is no checkpoint at {folder}: it has neither model states nor a file {LATEST!r}")


# --------------------------------------------------------------------------------------------------- what the ranks wrote


def _streams(folder: str, saved: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> Streams:
    files = sorted(_files(folder, "*_optim_states.pt"), key=_natural)
    ranks = [load(path)["optimizer_state_dict"] for path in files]
    if not ranks:
        raise CheckpointError(f"{folder} has no file *_optim_states.pt: there are no masters and no moments in it")
    count = ranks[0]["partition_count"]
    count = max(count) if isinstance(count, (list, tuple)) else count
    if count != len(ranks):
        raise CheckpointError(f"{folder} has {len(ranks)} files *_optim_states.pt and was written by {count} ranks: copy all of them")
    if "fp32_flat_groups" in ranks[0]:  # stage 3
        return _partitioned(ranks, shapes)
    return _grouped(ranks, saved["param_shapes"])


def _partitioned(ranks: Sequence[Mapping[str, Any]], shapes: Mapping[str, tuple[int, ...]]) -> Streams:
    """ZeRO-3: one stream for each rank, its flat groups end to end."""
    places, at = {}, 0
    for name, shape in shapes.items():
        part = -(-math.prod(shape) // len(ranks))
        places[name] = (at, part, shape)
        at += part
    masters = [rank["fp32_flat_groups"] for rank in ranks]
    have = sum(t.numel() for t in masters[0])
    if have != at:
        raise CheckpointError(f"the flat groups of a rank have {have} elements, and the parameters {at}: some are missing, or it is of another version")
    states = [rank["optimizer_state_dict"] for rank in ranks]

    def open_(name: str, plane: str) -> Pieces:
        start, part, shape = places[name]
        streams = masters if plane == "master" else [[_state(s["state"][i], name, plane) for i in range(len(s["state"]))] for s in states]
        pieces = [piece for stream in streams for piece in _cut(stream, start, part)]
        return Pieces(_trim(pieces, math.prod(shape)), shape)

    return Streams(_step(states[0]), states[0]["param_groups"], open_)


def _grouped(ranks: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]) -> Streams:
    """ZeRO-1 and 2: one stream for each group, its partitions end to end."""
    places, paddings = {}, ranks[0].get("param_alignment_paddings")
    for g, shapes in enumerate(groups):
        at = 0
        for i, (name, shape) in enumerate(shapes.items()):
            places[name] = (g, at, tuple(shape))
            at += math.prod(shape) + (paddings[g][i] if paddings else 0)
        have = sum(rank["single_partition_of_fp32_groups"][g].numel() for rank in ranks)
        if have < at:
            raise CheckpointError(f"the partitions of group {g} have {have} elements, and its parameters {at}: some are missing, or it is of another version")
    states = [rank["base_optimizer_state"] for rank in ranks]
    if not isinstance(states[0], Mapping):
        raise CheckpointError("its optimizer state is of an elastic checkpoint: convert it with ds_to_universal.py first")

    def open_(name: str, plane: str) -> Pieces:
        g, start, shape = places[name]
        if plane == "master":
            stream = [rank["single_partition_of_fp32_groups"][g] for rank in ranks]
        else:
            stream = [_state(s["state"][g], name, plane) for s in states]
        return Pieces(_cut(stream, start, math.prod(shape)), shape)

    return Streams(_step(states[0]), states[0]["param_groups"], open_)


def _step(state: Mapping[str, Any]) -> int:
    return int(max((float(s.get("step", 0)) for s in state["state"].values()), default=0))


def _state(state: Mapping[str, Any], name: str, plane: str) -> torch.Tensor:
    found = state.get(MOMENTS.get(plane, plane))
    if not isinstance(found, torch.Tensor):
        raise CheckpointError(
            f"there is no {MOMENTS[plane]} of {name}: with NVMe DeepSpeed leaves it in offloaded_tensors, or it is of another optimizer; load the weights only"
        )
    return found.reshape(-1)


def _cut(stream: Sequence[torch.Tensor], start: int, count: int) -> list[torch.Tensor]:
    """Elements [start, start + count) of flat tensors that stand end to end."""
    out, at = [], 0
    for flat in stream:
        a, b = max(start - at, 0), min(start + count - at, flat.numel())
        if a < b:
            out.append(flat[a:b])
        at += flat.numel()
    return out


def _trim(pieces: Sequence[torch.Tensor], count: int) -> list[torch.Tensor]:
    """Without the padding at the end."""
    return _cut(pieces, 0, count)


# ------------------------------------------------------------------------------------------------------------- universal


def _universal(folder: str, shapes: Mapping[str, tuple[int, ...]]) -> Streams:
    zero = os.path.join(folder, "zero")
    common = load(os.path.join(zero, "optimizer_state.pt"))
    states = common.get("optimizer_state_dict") or common.get("base_optimizer_state") or {}
    groups = common.get("param_groups") or states.get("param_groups") or []

    def open_(name: str, plane: str) -> Pieces:
        file = os.path.join(zero, name, "fp32.pt" if plane == "master" else f"{MOMENTS[plane]}.pt")
        if not os.path.isfile(file):
            raise CheckpointError(f"{file} is missing")
        found = load(file)
        tensor = found["param"] if isinstance(found, Mapping) else found
        if tensor.numel() != math.prod(shapes[name]):
            raise CheckpointError(f"{file} has {tensor.numel()} elements, and {name} {math.prod(shapes[name])}")
        return Pieces([tensor.reshape(-1)], shapes[name])

    return Streams(_step(states) if states.get("state") else 0, groups, open_)
