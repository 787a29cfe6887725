"""What a store says of itself on disk, and how that is replaced without ever being half there.

    manifest.json   in the first path: the committed step. It is only ever replaced whole (tmp, fsync, rename, fsync of the
                    directory), so a reader finds the one before or the one after
    reserve         in the first path: empty blocks that a commit may use for its manifest where others have filled the disk, see publish
    member.json     in every path, written once at creation: which store this directory belongs to, and as which of its paths

The manifest holds no addresses. Where a chunk stands follows from the layout and the shares alone (layout.place), so a damaged
or hostile manifest cannot point outside the store's files. Its last key, `digest`, is the checksum of everything before it.
"""

from __future__ import annotations

import array
import contextlib
import dataclasses
import errno
import json
import math
import os
import sys
from typing import Any

import xxhash

from zinf import layout
from zinf.errors import StoreError

FORMAT = 1  # raised when an older zinf could misread a newer store
MANIFEST, MEMBER, RESERVE, TMP = "manifest.json", "member.json", "reserve", ".tmp"
UNWRITTEN = 255  # the version of a chunk that was never written: it reads as zeros
_LIMIT = 1 << 30  # bytes: no manifest is larger (1e6 chunks make 17 MB)
_MAX_DIMENSIONS = 64  # torch's limit; the product of more could keep us busy for hours
_MAX_NUMEL = 1 << 48  # elements: no model is larger, and 64-bit offsets hold it

_ENCODE = bytes.maketrans(bytes([0, 1, UNWRITTEN]), b"01-")
_DECODE = bytes.maketrans(b"01-", bytes([0, 1, UNWRITTEN]))


@dataclasses.dataclass(frozen=True)
class Member:
    """One directory's part in a store: path `index` of `count`."""

    uuid: str
    index: int
    count: int

    def encode(self) -> bytes:
        return (json.dumps({"format": FORMAT, **dataclasses.asdict(self)}) + "\n").encode()


@dataclasses.dataclass(frozen=True)
class Manifest:
    """One committed step.

    `versions` has a byte for each chunk in the order of layout.place (0, 1 or UNWRITTEN), `sums` its xxh3_64. `clean` is False
    only in a store without a second version, from the first write of a step to its commit.
    """

    uuid: str
    step: int
    model: layout.Model
    shares: tuple[float, ...]
    crash_safe: bool
    clean: bool
    versions: bytes
    sums: array.array[int]
    extra: dict[str, Any]

    def encode(self, text: LayoutText | None = None) -> bytes:
        """The bytes of manifest.json. Pass `text` where many manifests of one model are written."""
        text = text or LayoutText.of(self.model)
        head = {
            "format": FORMAT,
            "uuid": self.uuid,
            "step": self.step,
            "fingerprint": text.fingerprint,
            "crash_safe": self.crash_safe,
            "clean": self.clean,
            "shares": self.shares,
            "extra": self.extra,
        }
        body = "".join(
            (
                json.dumps(head)[:-1],
                ',\n"layout": ',
                text.json,
                ',\n"versions": "',
                self.versions.translate(_ENCODE).decode(),
                '",\n"checksums": "',
                _little_endian(self.sums).tobytes().hex(),
                '"',
            )
        ).encode()
        return body + b',\n"digest": "%016x"}\n' % xxhash.xxh3_64_intdigest(body)


@dataclasses.dataclass(frozen=True)
class LayoutText:
    """The parts of a manifest that never change, made once: they cost more than all the rest."""

    json: str
    fingerprint: str

    @classmethod
    def of(cls, model: layout.Model) -> LayoutText:
        return cls(json.dumps(model.to_json(), separators=(",", ":")), model.fingerprint())


def _little_endian(sums: array.array[int]) -> array.array[int]:
    if sys.byteorder == "little":
        return sums
    swapped = array.array("Q", sums)
    swapped.byteswap()
    return swapped


def decode(data: bytes, path: str) -> Manifest:
    """The manifest in `data`, which was read from `path`.

    Raises:
        StoreError: it is of a newer format, or damaged; says which.
    """
    try:
        # The format comes first: everything after it may mean something else in a newer one.
        fields = json.loads(data)
        version = fields["format"]
    except (ValueError, KeyError, TypeError, RecursionError) as e:
        raise StoreError(f"{path} is not a manifest of zinf, or is damaged ({type(e).__name__}: {shown(e)})") from None
    check_format(version, path)
    body, found, tail = data.rpartition(b',\n"digest": ')
    if not found or tail.strip() != b'"%016x"}' % xxhash.xxh3_64_intdigest(body):
        raise StoreError(f"{path} is damaged: its checksum does not match its contents")
    try:
        return _checked(fields)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as e:
        raise StoreError(f"{path} describes no possible store ({type(e).__name__}: {shown(e)})") from None


def check_format(version: object, path: str) -> None:
    """Raise StoreError unless this zinf reads stores of that format. Formats are whole numbers from 1 on; 1 is the first, so there is no older one to read."""
    if type(version) is not int or version < 1:
        raise StoreError(f"{path} has store format {shown(version)}, which no zinf has written: it is damaged, or not zinf's")
    if version > FORMAT:
        raise StoreError(f"{path} has store format {shown(version)}; this zinf reads format {FORMAT}: use the zinf that wrote it, or a newer one")


def shown(value: object) -> str:
    """What a damaged file says, short enough for a line."""
    try:
        return (said := str(value) if isinstance(value, Exception) else repr(value))[:200] + ("..." if len(said) > 200 else "")
    except ValueError:  # an int of more digits than Python writes
        return "a huge number"


def _checked(fields: dict[str, Any]) -> Manifest:
    """A Manifest whose every number has been looked at. Raises ValueError, KeyError, TypeError, AttributeError, OverflowError."""
    model = layout.Model.from_json(fields["layout"])
    check_layout(model)
    if fields["fingerprint"] != model.fingerprint():
        raise ValueError(f"fingerprint {fields['fingerprint']} over a layout of fingerprint {model.fingerprint()}")
    shares = tuple(float(share) for share in fields["shares"])
    if not shares or not all(math.isfinite(share) and share > 0 for share in shares):
        raise ValueError(f"shares {shares}")
    versions = fields["versions"].encode()
    sums = array.array("Q", bytes.fromhex(fields["checksums"]))
    # Counted, not listed: a small hostile file could describe more chunks than memory holds.
    count = sum(-(-run.padded // model.chunk) * (2 if run.has_state else 1) for shard in model.shards for run in shard.runs)
    if len(versions) != count or len(sums) != count or set(versions) - set(b"01-"):
        raise ValueError(f"{len(versions)} versions and {len(sums)} checksums for {count} chunks")
    if not _whole(fields["step"]) or not isinstance(fields["extra"], dict):
        raise ValueError(f"step {fields['step']!r}, extra of type {type(fields['extra']).__name__}")
    if type(fields["uuid"]) is not str or type(fields["crash_safe"]) is not bool or type(fields["clean"]) is not bool:
        raise ValueError(f"uuid {fields['uuid']!r}, crash_safe {fields['crash_safe']!r}, clean {fields['clean']!r}")
    return Manifest(
        fields["uuid"],
        fields["step"],
        model,
        shares,
        fields["crash_safe"],
        fields["clean"],
        versions.translate(_DECODE),
        _little_endian(sums),
        fields["extra"],
    )


def check_layout(model: layout.Model) -> None:
    """Raise ValueError unless every parameter stands where a layout could put it: no overlap, no negative or absurd number."""
    if not model.shards:
        raise ValueError("a model without shards")
    if not (_whole(model.chunk) and _whole(model.rank) and _whole(model.world_size) and model.rank < model.world_size):
        raise ValueError(f"chunk {model.chunk!r}, rank {model.rank!r} of {model.world_size!r}")
    if len(set(model.moments)) < len(model.moments) or not all(type(name) is str and name.isidentifier() for name in model.moments):
        raise ValueError(f"moments {model.moments!r}")
    total = 0
    for shard in model.shards:
        for run in shard.runs:
            if run.dtype not in layout.MASTERS or not run.params or type(run.trainable) is not bool or type(shard.name) is not str:
                raise ValueError(f"shard {shard.name!r} has a run of dtype {run.dtype!r} with {len(run.params)} parameters, trainable {run.trainable!r}")
            end = 0
            for p in run.params:
                _check_param(p, end, sliced=model.world_size > 1)
                end = p.offset + p.numel
            total += end
    if total > _MAX_NUMEL or total > model.chunk * 10**8:
        raise ValueError(f"{total} elements in chunks of {model.chunk}")


def _check_param(p: layout.Param, end: int, *, sliced: bool) -> None:
    """Raise ValueError unless `p` may follow a parameter that ends at element `end`. A rank's slice is smaller than its shape."""
    if type(p.name) is not str or not _whole(p.offset) or not _whole(p.numel) or not all(map(_whole, p.shape)) or len(p.shape) > _MAX_DIMENSIONS:
        raise ValueError(f"parameter {shown(p.name)} of shape {shown(p.shape)} at element {shown(p.offset)}, {shown(p.numel)} long")
    whole = math.prod(p.shape)
    if p.offset < end or p.offset % layout.PARAM_ALIGN or not 0 < p.numel <= whole or (p.numel < whole and not sliced):
        raise ValueError(f"parameter {p.name} of shape {shown(p.shape)} at element {shown(p.offset)}, {shown(p.numel)} long, after one that ends at {end}")


def _whole(n: object) -> bool:
    """A non-negative int, and not a bool."""
    return type(n) is int and n >= 0


def load(directory: str) -> Manifest:
    """The committed manifest of the store whose first path is `directory`. Raises FileNotFoundError, OSError, StoreError."""
    path = os.path.join(directory, MANIFEST)
    return decode(read_file(path), path)


def load_member(directory: str) -> Member:
    """Which store `directory` belongs to. Raises FileNotFoundError, OSError, StoreError."""
    path = os.path.join(directory, MEMBER)
    try:
        fields = json.loads(read_file(path))
        check_format(fields["format"], path)
        member = Member(fields["uuid"], fields["index"], fields["count"])
        if not (isinstance(member.uuid, str) and type(member.index) is int and type(member.count) is int and 0 <= member.index < member.count):
            raise ValueError(f"path {member.index!r} of {member.count!r}")
    except (ValueError, KeyError, TypeError, RecursionError) as e:
        raise StoreError(f"{path} is damaged ({type(e).__name__}: {shown(e)})") from None
    return member


def publish(directory: str, name: str, data: bytes) -> None:
    """Replace `name` in `directory` with `data`: whole, durable when this returns, and untouched when it raises OSError.

    The one exception is an error of the last step, the fsync of the directory; the caller is told by LostRename. A full disk is
    not an error as long as there is a reserve. That is best effort: another process may be faster to take what it frees.
    """
    target = os.path.join(directory, name)
    try:
        try:
            write_file(target + TMP, data)  # fsynced: a rename may reach the disk before the bytes of the file it names
        except OSError as e:
            if e.errno not in (errno.ENOSPC, errno.EDQUOT) or not release_reserve(directory):
                raise
            write_file(target + TMP, data)
        rename(target + TMP, target)
    except BaseException:
        try:
            os.unlink(target + TMP)
        except OSError:
            pass  # the error that brought us here is the one to tell
        raise
    try:
        sync_directory(directory)
    except OSError as e:
        raise LostRename(e.errno, f"{e.strerror}: it is not known whether {name} is the old or the new one after a crash", target) from e


def keep_reserve(directory: str, nbytes: int) -> None:
    """Have a reserve of `nbytes` in `directory`, or of what there is, at least half of it. It need not be durable: it is made again."""
    path = os.path.join(directory, RESERVE)
    with contextlib.suppress(OSError):
        if os.lstat(path).st_blocks * 512 >= nbytes // 2:
            return
    for size in (nbytes, nbytes // 2):
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(fd, 0, size)
                return
            finally:
                os.close(fd)
        release_reserve(directory)


def release_reserve(directory: str) -> bool:
    """Give the blocks of the reserve back to the filesystem. False if there are none."""
    path = os.path.join(directory, RESERVE)
    try:
        with contextlib.suppress(OSError):
            os.truncate(path, 0)  # xfs frees the blocks of an unlinked file some time later, and those of a shorter one now
        os.unlink(path)
    except OSError:
        return False
    return True


class LostRename(OSError):
    """The manifest was replaced, but after a crash the one before it may be back: neither step may be overwritten now."""


# The steps of publish, each a function of its own so that a test can record them and replay a crash between any two.


def read_file(path: str) -> bytes:
    """All bytes of a regular file that is no symlink."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with open(fd, "rb") as f:
        data = f.read(_LIMIT + 1)
    if len(data) > _LIMIT:
        raise StoreError(f"{path} is larger than {_LIMIT} bytes: it is not zinf's")
    return data


def write_file(path: str, data: bytes) -> None:
    """A new file of mode 0600 with `data`, fsynced."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(fd, "wb", buffering=0) as f:
        view = memoryview(data)
        while view:
            view = view[f.write(view) :]
        os.fsync(fd)


def rename(source: str, target: str) -> None:
    os.rename(source, target)


def sync_directory(directory: str) -> None:
    """Make the names in `directory` durable."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
