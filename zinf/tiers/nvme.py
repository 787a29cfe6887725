"""The NVMe tier: a store that is always at a committed step, whatever happens to the process or the power.

    store     one directory on each of one or several paths; chunks are striped over them (layout.place)
    version   a chunk has two places, A and B (frozen chunks have one). One of them is committed; a step writes the other
    newest    the version that reads give: the one of this step if the chunk was written in it, else the committed one

[Note: why a crash at any instant is harmless]
A write goes only to a version that no manifest on disk names. commit() waits for all writes, makes the files durable, and only
then replaces the manifest, in one rename. So the manifest on disk names durable bytes that nobody overwrites, before the
rename and after it. Writes block while a commit runs: which version is free is not known until the rename is durable.

[Note: what in-place stores lose]
With crash_safe=False there is one version. The first write after a commit marks the manifest unclean, the next commit marks it
clean. A crash in between leaves chunks of two steps; opening such a store is refused, it must be imported again. rollback()
is refused for the same reason. It halves the disk space and nothing else.

Order of locks: none is held while waiting for the disk. Reads and writes are submitted under the store's lock, so that each
sees what is in flight before it; whoever has to wait lets go of the lock, waits, and looks again.
"""

from __future__ import annotations

import array
import contextlib
import dataclasses
import hashlib
import json
import logging
import operator
import os
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from zinf import layout
from zinf.errors import StoreError
from zinf.layout import STATE, WEIGHTS, Key
from zinf.tiers import directory, manifest, opening, partial, scrub, snapshot
from zinf.tiers.chunk import Busy, Entry, Ticket, check_tensor, checksum
from zinf.tiers.leftovers import clean, inspect
from zinf.tiers.manifest import UNWRITTEN, LayoutText, Manifest

if TYPE_CHECKING:
    from zinf import aio

__all__ = ["Store", "clean", "inspect"]

log = logging.getLogger("zinf")

Items = Sequence[tuple[Key, torch.Tensor]]

_EITHER = bytes.maketrans(b"\x01", b"\x00")  # whichever of its two places a chunk is in
_RESERVE_UNIT = 1 << 16  # bytes: a manifest may grow by as much before its reserve is made anew
_RESERVE_SPARE = 512 << 10  # bytes of it beyond two manifests: xfs makes no file where less than about 200 KiB are free


class Store:
    """The chunks of one model on NVMe. Made by Store.create or Store.open. Thread safe.

    Attributes:
        model: the layout.
        paths: the directories, in the store's own order.
        step: the committed step; -1 before the first commit.
        extra: what the last commit was given, as JSON gives it back.
        crash_safe: whether chunks have two versions.
    """

    def __init__(
        self,
        paths: Sequence[str],
        files: list[dict[str, aio.File]],
        io: aio.IoEngine,
        lock: directory.Lock,
        committed: Manifest,
        placement: layout.Placement,
        *,
        verify: str,
        writable: bool,
    ) -> None:
        """Not for users: takes over open files and a held lock."""
        self.paths = list(paths)
        self.model = committed.model
        self.crash_safe = committed.crash_safe
        self._committed = committed  # what is on disk, or will be with the first commit
        self._text = LayoutText.of(committed.model)
        self._io = io
        self._lock_files = lock
        self._files = files
        self._always = verify in ("always", "read")
        self._thawed = False  # until the next commit, frozen chunks may be written
        self._writable = writable
        self._entries = {
            key: Entry(i, key, where, files[where[0].path][where[0].file], committed.versions[i], committed.sums[i])
            for i, (key, where) in enumerate(placement.places.items())
        }
        self._dirty: dict[int, Entry] = {}  # written since the commit, by index
        self._kept: dict[int, Entry] = {}  # before the first commit: those that keep() was given, by index
        self._changed = threading.Condition()  # _exclusive or _queued changed; writers and committers wait for their turn
        self._exclusive = False  # a commit, rollback or verify runs: no write may start
        self._queued = 0  # writes that wait for it to end
        self._broken: str | None = None  # why nothing may be written any more
        self._closed = False
        self._counts = {f"{kind}_{verb}": 0 for kind in (WEIGHTS, STATE) for verb in ("read", "written")} | {"commits": 0}

    # ---- making and opening

    @classmethod
    def create(
        cls,
        paths: Sequence[str],
        model: layout.Model,
        io: aio.IoEngine,
        *,
        crash_safe: bool = True,
        shares: Sequence[float] | None = None,
        direct: bool | str = "auto",
        extra: dict[str, Any] | None = None,
        overwrite: bool = False,
        verify: str = "resume",
        shared: opening.Shared | None = None,
    ) -> Store:
        """A new store, all zeros, at step -1. All its bytes are allocated; it can be opened again after the first commit.

        Args:
            paths: one directory for each drive; created (one level) if missing.
            shares: proportion of the bytes on each path; equal by default.
            crash_safe: see [Note: what in-place stores lose].
            extra: first value of .extra; the commit's replaces it.
            overwrite: replace a committed store that stands there (never one that is in use).
            shared: frozen weights that another store has already; they count as written.

        Raises:
            StoreError: a path cannot be used, a store is there, or the free bytes do not suffice (with the numbers).
            OSError: the disk failed, or filled up meanwhile; nothing created stays behind.
        """
        paths = opening.real_paths(paths)
        opening.check_verify(verify)
        manifest.check_layout(model)
        placement = layout.place(model, shares or [1.0] * len(paths), 2 if crash_safe else 1)
        if len(placement.sizes) != len(paths):
            raise ValueError(f"{len(placement.sizes)} shares for {len(paths)} paths; give one for each")
        versions, sums = bytearray([UNWRITTEN]) * len(placement.places), array.array("Q", bytes(8 * len(placement.places)))
        for i, key in enumerate(placement.places):
            if shared is not None and key in shared.digests:
                versions[i], sums[i] = 0, shared.digests[key]
        committed = Manifest(
            uuid=uuid.uuid4().hex,
            step=-1,
            model=model,
            shares=tuple(map(float, shares or [1.0] * len(paths))),
            crash_safe=crash_safe,
            clean=True,
            versions=bytes(versions),
            sums=sums,
            extra=json.loads(json.dumps(extra or {})),
        )
        with contextlib.ExitStack() as undo:
            lock = opening.build(paths, placement, committed.uuid, undo, overwrite=overwrite, shared=shared)
            files = opening.open_files(paths, placement, io, undo, direct=direct, write=True)
            store = cls(paths, files, io, lock, committed, placement, verify=verify, writable=True)
            undo.pop_all()
        if not crash_safe:
            opening.say_what_is_lost(paths)
        log.info("created a store of %d chunks on %s", len(placement.places), ", ".join(paths))
        return store

    @classmethod
    def open(
        cls,
        paths: Sequence[str],
        io: aio.IoEngine,
        *,
        verify: str = "resume",
        direct: bool | str = "auto",
        expect: layout.Model | None = None,
        writable: bool = True,
    ) -> Store:
        """The store at `paths` (in any order), at its last committed step.

        Args:
            verify: "resume" compares every checksum now, "always" also on each read, "read" only then, "off" never.
            expect: refuse any other model, or chunk size.
            writable: False takes a shared lock: several readers, no writer.

        Raises:
            StoreError: none there, not committed, incomplete, in use, of another model or of a newer format.
            IntegrityError: a chunk is not what was written.
        """
        opening.check_verify(verify)
        paths = opening.in_order(opening.real_paths(paths))
        with contextlib.ExitStack() as undo:
            lock = directory.Lock(paths, shared=not writable)
            undo.callback(lock.release)
            if writable:
                # A killed run may have renamed its manifest and not synced that. We write over the version that the manifest
                # before it names, so that one must not come back with a power loss.
                manifest.sync_directory(paths[0])
            committed = opening.load(paths)
            if writable:
                opening.check_live(paths[0], committed)
            opening.check_expected(paths[0], committed, expect)
            placement = layout.place(committed.model, committed.shares, 2 if committed.crash_safe else 1)
            opening.check_versions(paths[0], committed, placement)
            for path in paths:
                directory.warn_if_memory(path)
            files = opening.open_files(paths, placement, io, undo, direct=direct, write=writable)
            store = cls(paths, files, io, lock, committed, placement, verify=verify, writable=writable)
            if verify in ("resume", "always"):
                store.verify()
            undo.pop_all()
        if not committed.crash_safe and writable:
            opening.say_what_is_lost(paths)
        return store

    @classmethod
    def go_on(
        cls,
        paths: Sequence[str],
        model: layout.Model,
        io: aio.IoEngine,
        *,
        mark: Any,
        crash_safe: bool = True,
        direct: bool | str = "auto",
        progress: scrub.Progress | None = None,
    ) -> Store | None:
        """The store of an import that was interrupted, at step -1, with what `keep` has noted of it and every byte of that compared.

        None where there is nothing of this model and `mark` to go on from, or where it is not what was written: create() then begins anew.

        Raises:
            StoreError: in use.
        """
        if (found := partial.taken_up(opening.real_paths(paths), model, crash_safe, mark)) is None:
            return None
        paths, lock, noted = found
        placement = layout.place(model, noted.shares, 2 if crash_safe else 1)
        with contextlib.ExitStack() as undo:
            undo.callback(lock.release)
            try:
                opening.check_versions(paths[0], noted, placement)
                files = opening.open_files(paths, placement, io, undo, direct=direct, write=True)
                store = cls(paths, files, io, lock, noted, placement, verify="resume", writable=True)
                store.verify(progress)
            except (StoreError, OSError) as e:
                log.warning("the import into %s begins anew: %s", paths[0], e)
                return None
            undo.pop_all()
        return store

    @property
    def step(self) -> int:
        return self._committed.step

    @property
    def shares(self) -> tuple[float, ...]:
        """The proportion of the bytes on each path."""
        return self._committed.shares

    @property
    def extra(self) -> dict[str, Any]:
        return self._committed.extra

    def where(self) -> Iterator[tuple[str, int, Key]]:
        """(file, offset, key) of every version of every chunk."""
        for entry in self._entries.values():
            for offset in entry.offsets:
                yield entry.file.path, offset, entry.key

    def contents(self) -> str:
        """A digest of the committed step: its checksums."""
        return hashlib.sha256(self._committed.versions.translate(_EITHER) + self._committed.sums.tobytes()).hexdigest()[:16]

    # ---- moving bytes

    def read(self, items: Items) -> list[Ticket]:
        """Start reading the newest version of each chunk into its tensor; one ticket each, in order.

        A write of the same chunk that is still in flight is waited for. A chunk that was never written is filled with zeros
        at once.

        Args:
            items: (key, tensor); the tensor is (nbytes of the chunk,) uint8, page-aligned, and the reader's until its ticket is done.

        Raises:
            KeyError, TypeError, ValueError: no such chunk, or a tensor that does not fit it. Nothing was started.
            OSError: the chunk's newest version could not be written.
        """
        wanted = [(self._entry(key), tensor) for key, tensor in items]
        addresses = [check_tensor(tensor, entry) for entry, tensor in wanted]
        while True:
            with self._changed:
                self._check_open()
                if not (busy := [entry for entry, _ in wanted if entry.writing is not None]):
                    return self._start_reads(wanted, addresses)
            self._settle_writes(busy)

    def _start_reads(self, wanted: list[tuple[Entry, torch.Tensor]], addresses: list[int]) -> list[Ticket]:
        """Under the lock, with no write of these chunks in flight."""
        ops: list[aio.Op] = []
        owners: list[torch.Tensor] = []
        for (entry, tensor), address in zip(wanted, addresses, strict=True):
            if entry.newest == UNWRITTEN:
                tensor.zero_()
            else:
                ops.append(("r", entry.file, entry.offsets[entry.newest], address, entry.length))
                owners.append(tensor)
        started = iter(self._io.submit(ops, owners) if ops else ())
        tickets = []
        for entry, tensor in wanted:
            if entry.newest == UNWRITTEN:
                tickets.append(Ticket(self.model, entry, UNWRITTEN, None))
                continue
            checked = (tensor, entry.newest_sum) if self._always else (None, None)
            ticket = Ticket(self.model, entry, entry.newest, next(started), *checked)
            entry.reads = [t for t in entry.reads if not t.done()] if entry.reads else []
            entry.reads.append(ticket)
            self._counts[entry.key[0] + "_read"] += entry.length
            tickets.append(ticket)
        return tickets

    def _settle_writes(self, entries: Sequence[Entry]) -> None:
        """Wait for the writes in flight of these chunks. Raises the first OSError, after all are over."""
        errors: list[Exception] = []
        for entry in entries:
            ticket = entry.writing
            if ticket is None:
                continue
            if error := ticket.error():
                errors.append(error)
                continue
            with self._changed:
                if entry.writing is ticket:  # else another thread has written it again
                    entry.writing = None
        if errors:
            raise errors[0].with_traceback(None)

    def write(self, items: Items) -> list[Ticket]:
        """Start writing each chunk's version that is not committed; from now on it is the newest. One ticket each, in order.

        Waits for transfers of the same place that are in flight, and for a commit that runs. The checksum is taken before
        this returns; the tensor must not change until its ticket is done.

        Raises:
            KeyError, TypeError, ValueError: no such chunk, a tensor that does not fit, or a chunk given twice. Nothing was started.
            StoreError: opened read-only, a frozen chunk after the first commit, or a commit whose outcome is not known.
        """
        wanted = [(self._entry(key), tensor) for key, tensor in items]
        addresses = [check_tensor(tensor, entry) for entry, tensor in wanted]
        if len({entry.index for entry, _ in wanted}) < len(wanted):
            raise ValueError("a chunk is given twice in one write: which of the two should win?")
        digests = [checksum(tensor) for _, tensor in wanted]
        while True:
            with self._changed:
                self._wait_turn()
                self._check_writable()
                for entry, _ in wanted:
                    if entry.frozen and self.step >= 0 and not self._thawed:
                        raise StoreError(f"{entry.key} is frozen: it was written before the first commit, and never again")
                busy = [t for entry, _ in wanted for t in self._in_the_way(entry)]
                if not busy:
                    return self._start_writes(wanted, addresses, digests)
            for ticket in busy:
                ticket.error()  # whether it failed is not our business: its bytes are replaced

    def _wait_turn(self) -> None:
        """Under the lock: until no commit, rollback or verify runs. Writes that wait go before the next of those."""
        self._queued += 1
        try:
            self._changed.wait_for(lambda: not self._exclusive)
        finally:
            self._queued -= 1
            self._changed.notify_all()

    def _target(self, entry: Entry) -> int:
        """The version that a write goes to: the one that no manifest names."""
        return 1 if self.crash_safe and not entry.frozen and self._committed.versions[entry.index] == 0 else 0

    def _in_the_way(self, entry: Entry) -> list[Busy]:
        """Transfers in flight of the place that a write of this chunk goes to."""
        busy = entry.busy_reads(self._target(entry)) if entry.reads else []
        if entry.writing is not None and not entry.writing.done():
            busy.append(entry.writing)
        return busy

    def _start_writes(self, wanted: list[tuple[Entry, torch.Tensor]], addresses: list[int], digests: list[int]) -> list[Ticket]:
        """Under the lock, with nothing in flight at the targets."""
        if not self.crash_safe and self._committed.clean and self.step >= 0:
            self._publish(dataclasses.replace(self._committed, clean=False))
        targets = [self._target(entry) for entry, _ in wanted]
        ops = [("w", e.file, e.offsets[v], address, e.length) for (e, _), v, address in zip(wanted, targets, addresses, strict=True)]
        error: Exception | None = None
        inner: Sequence[aio.Ticket | None] = [None] * len(ops)
        try:
            inner = self._io.submit(ops, [tensor for _, tensor in wanted])
        except Exception as e:
            error = e  # it is not known what reached the disk: these chunks have no newest version until they are written again
        tickets = []
        for (entry, _), version, digest, started in zip(wanted, targets, digests, inner, strict=True):
            ticket = Ticket(self.model, entry, version, started) if error is None else Ticket.failed(self.model, entry, version, error)
            entry.newest, entry.newest_sum, entry.writing = version, digest, ticket
            self._dirty[entry.index] = entry
            self._counts[entry.key[0] + "_written"] += entry.length
            tickets.append(ticket)
        if error is not None:
            raise error
        return tickets

    # ---- steps

    def commit(self, step: int, extra: dict[str, Any]) -> None:
        """Make the newest versions the committed ones, durably: after this, a crash at any instant gives back this step.

        May run on another thread beside reads; writes wait until it is over. When it raises, the step before is still the
        committed one, and commit may be called again.

        Args:
            step: number of the step, not negative.
            extra: JSON-serialisable; read back by the next open.

        Raises:
            TypeError, ValueError: step is negative, extra is not JSON.
            OSError: a write failed since the last commit (it must be written again, or rolled back), or the disk fails now.
        """
        if (step := operator.index(step)) < 0:
            raise ValueError(f"step is {step}; it must not be negative")
        payload = json.loads(json.dumps(extra))
        if not isinstance(payload, dict):
            raise TypeError(f"extra is a dict, not {type(extra).__name__}")
        with self._alone(writing=True):
            dirty = list(self._dirty.values())
            self._settle_writes(dirty)
            self._sync(dirty)
            versions, sums = bytearray(self._committed.versions), array.array("Q", self._committed.sums)
            for entry in dirty:
                versions[entry.index], sums[entry.index] = entry.newest, entry.newest_sum
            self._publish(dataclasses.replace(self._committed, step=step, extra=payload, versions=bytes(versions), sums=sums, clean=True))
            self._dirty.clear()
            self._thawed = False
            self._counts["commits"] += 1
            partial.forget(self.paths[0])

    def keep(self, keys: Sequence[Key], mark: Any) -> None:
        """Before the first commit: make chunks durable whose writes are over, and note all that were ever given, for `go_on`.

        May run on another thread, beside writes of other chunks. What is noted must not be written again before the commit.

        Raises:
            OSError: a write or sync failed, or there is no room for the note; what was noted before still is.
        """
        entries = [self._entry(key) for key in keys]
        with self._changed:
            self._check_writable()
            if self.step >= 0:
                raise StoreError(f"the store at {self.paths[0]} is committed: a commit is what keeps its chunks")
            dirty = list(self._dirty.values())
        self._settle_writes(entries)
        self._sync(dirty)
        self._kept.update((entry.index, entry) for entry in entries)
        partial.note(self.paths[0], self._committed, self._kept.values(), mark, self._text)

    def _sync(self, dirty: Sequence[Entry]) -> None:
        """fdatasync every file with a dirty chunk, all at once. Raises the first OSError, after all are over."""
        files = {id(entry.file): entry.file for entry in dirty}
        waiting = [(file, self._io.datasync(file)) for file in files.values()]
        errors = []
        for file, ticket in waiting:
            try:
                ticket.wait()
            except OSError as e:
                errors.append(e)
                # After a failed fsync the kernel may drop what it could not write and say nothing the next time: whatever
                # was written to this file since the last commit is lost until it is written again.
                with self._changed:
                    for entry in dirty:
                        if entry.file is file:
                            entry.writing = Ticket.failed(self.model, entry, entry.newest, e)
        if errors:
            raise errors[0]

    def _publish(self, successor: Manifest) -> None:
        """Make `successor` the manifest, on disk and here."""
        # Set first: an exception out of nowhere (Ctrl-C) right after the rename must not leave us writing over what it committed.
        self._broken = f"{self.paths[0]}: it is not known whether step {successor.step} was committed: close the store and open it again"
        data = successor.encode(self._text)
        try:
            manifest.publish(self.paths[0], manifest.MANIFEST, data)
        except manifest.LostRename:
            raise
        except OSError:
            self._broken = None
            raise
        with self._changed:
            self._committed = successor
            self._broken = None
        manifest.keep_reserve(self.paths[0], layout.round_up(2 * len(data), _RESERVE_UNIT) + _RESERVE_SPARE)

    def lost(self) -> list[Key]:
        """Chunks written since the last commit that are not on disk, since a write or a sync of them failed. Waits for writes in flight."""
        with self._changed:
            dirty = list(self._dirty.values())
        return [entry.key for entry in dirty if (ticket := entry.writing) is not None and ticket.error() is not None]

    def rollback(self) -> None:
        """Forget everything that was written since the last commit, failed writes too.

        Raises:
            StoreError: chunks were overwritten in place (crash_safe=False, or frozen ones after `thaw`).
        """
        with self._alone(writing=True):
            lost = [entry for entry in self._dirty.values() if entry.frozen or not self.crash_safe] if self.step >= 0 else []
            if lost:
                raise StoreError(
                    f"{self.paths[0]} has one version of {len(lost)} chunks that were overwritten (crash_safe: false, or frozen): step {self.step} is gone"
                )
            if self._thawed:
                self._publish(dataclasses.replace(self._committed, clean=True))
                self._thawed = False
            for entry in self._dirty.values():
                if entry.writing is not None:
                    entry.writing.error()
            with self._changed:
                for entry in self._dirty.values():
                    entry.writing = None
                    entry.newest = self._committed.versions[entry.index]
                    entry.newest_sum = self._committed.sums[entry.index]
                self._dirty.clear()

    @contextlib.contextmanager
    def _alone(self, *, writing: bool) -> Iterator[None]:
        """No other commit, rollback or verify, and no write, until the block ends."""
        with self._changed:
            self._changed.wait_for(lambda: not self._exclusive and not self._queued)
            if writing:
                self._check_writable()
            else:
                self._check_open()
            self._exclusive = True
        try:
            yield
        finally:
            with self._changed:
                self._exclusive = False
                self._changed.notify_all()

    def snapshot(self) -> snapshot.Snapshot:
        """The committed step, kept from being overwritten until the snapshot is closed. See snapshot.py."""
        return snapshot.take(self)

    def written(self) -> list[Key]:
        """The chunks that have been written ever."""
        return [key for key, entry in self._entries.items() if entry.newest != UNWRITTEN]

    def digest(self, key: Key) -> int | None:
        """The checksum of the newest version of a chunk; None if it was never written."""
        entry = self._entry(key)
        return entry.newest_sum if entry.newest != UNWRITTEN else None

    def thaw(self) -> None:
        """Let frozen chunks be written until the next commit. They have one version: a crash before that commit loses the store, which then says so.

        Raises:
            StoreError: opened read-only, or the frozen chunks are shared with a checkpoint by a hard link.
        """
        if self._thawed:
            return
        with self._alone(writing=True):
            for entry in self._entries.values():
                if entry.frozen and os.fstat(entry.file.fd).st_nlink > 1:
                    raise StoreError(f"{entry.file.path} is shared with checkpoints, so it cannot get other values: take another run_name")
            if self.step >= 0 and self._committed.clean:
                self._publish(dataclasses.replace(self._committed, clean=False))
            self._thawed = True

    # ---- checking

    def verify(self, progress: scrub.Progress | None = None, report: scrub.Report | None = None) -> None:
        """Read every chunk, the committed version and a newer one, and compare the checksums. Writes wait until it is over.

        Args:
            progress: called with (bytes done, bytes in all).
            report: called with each error, and the rest is read too; without it the first one is raised.

        Raises:
            IntegrityError: names path, file, offset, shard and parameters.
            OSError: a read failed, or the newest version of a chunk could not be written.
        """
        with self._alone(writing=False):
            self._settle_writes(list(self._dirty.values()))
            wanted = []
            for entry in self._entries.values():
                version = self._committed.versions[entry.index]
                if version != UNWRITTEN and ((self.crash_safe and not entry.frozen) or entry.index not in self._dirty):
                    wanted.append((entry, version, self._committed.sums[entry.index]))
                if entry.index in self._dirty:
                    wanted.append((entry, entry.newest, entry.newest_sum))
            total = sum(entry.length for entry, _, _ in wanted)
            start = time.monotonic()
            scrub.compare(self._io, self.model, wanted, progress, report)
            log.info("verified %d bytes of %s in %.1f s", total, ", ".join(self.paths), time.monotonic() - start)

    # ---- the rest

    def _entry(self, key: Key) -> Entry:
        try:
            return self._entries[key]
        except KeyError:
            raise KeyError(f"the store at {self.paths[0]} has no chunk {key!r}; a key is (kind, shard, run, chunk)") from None

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError(f"the store at {self.paths[0]} is closed")

    def _check_writable(self) -> None:
        self._check_open()
        if not self._writable:
            raise StoreError(f"the store at {self.paths[0]} was opened read-only")
        if self._broken:
            raise StoreError(self._broken)

    def stats(self) -> dict[str, int]:
        """weights_read, weights_written, state_read, state_written (bytes asked for, verify() apart), commits."""
        with self._changed:
            return dict(self._counts)

    def close(self) -> None:
        """Wait for what is in flight, release the lock, close the files. What is not committed is lost. Idempotent."""
        with self._changed:
            self._changed.wait_for(lambda: not self._exclusive)
            if self._closed:
                return
            self._closed = True
            flight = [t for entry in self._entries.values() for t in (*entry.reads, entry.writing) if t is not None]
        for ticket in flight:
            ticket.error()
        for files in self._files:
            for file in files.values():
                file.close()
        self._lock_files.release()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
