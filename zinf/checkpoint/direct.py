"""Checkpoint files past the page cache: O_DIRECT for whole pages, through a page-aligned buffer of the thread; the rest as usual.

A tensor starts and ends anywhere in its file, so a transfer has edges of less than a page. Reads take the pages around, writes leave the edges to the page
cache. Where a filesystem has no O_DIRECT, or refuses a transfer, all goes through the page cache: slower (a copy by the CPU, and dirty pages that pile
up until an fsync), and the same bytes.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import threading

import torch

from zinf.checkpoint.staging import TRANSFER, pages
from zinf.layout import PAGE

_SMALL = 16 * PAGE  # bytes: less is not worth the pages around it
_SIZE = TRANSFER + 2 * PAGE
_local = threading.local()


def open_direct(path: str, flags: int) -> int | None:
    """A descriptor with O_DIRECT, or None where there is none to be had."""
    try:
        return os.open(path, flags | os.O_DIRECT | os.O_CLOEXEC)
    except OSError:
        return None


def read(direct: int | None, offset: int, out: torch.Tensor) -> int:
    """Fill `out` (1-D uint8, contiguous) from byte `offset` on, as far as that goes without the page cache; how many bytes are there."""
    if direct is None or out.numel() < _SMALL:
        return 0
    done, bounce = 0, _bounce()
    while done < out.numel():
        at = (offset + done) // PAGE * PAGE
        skip = offset + done - at
        try:
            got = os.preadv(direct, [bounce.numpy().data], at) - skip
        except OSError as e:
            if e.errno == errno.EINVAL:
                return done
            raise
        n = min(got, out.numel() - done)
        if n <= 0:
            return done
        ctypes.memmove(out.data_ptr() + done, bounce.data_ptr() + skip, n)
        done += n
    return done


def write(direct: int | None, offset: int, raw: torch.Tensor) -> tuple[int, int]:
    """Write the whole pages of `raw` (1-D uint8, contiguous), whose first byte goes to `offset`; the range of it that was written."""
    if direct is None or raw.numel() < _SMALL:
        return raw.numel(), raw.numel()
    first = -offset % PAGE
    end = first + (raw.numel() - first) // PAGE * PAGE
    done, bounce = first, _bounce()
    while done < end:
        n = min(end - done, TRANSFER)
        ctypes.memmove(bounce.data_ptr(), raw.data_ptr() + done, n)
        try:
            wrote = os.pwrite(direct, bounce[:n].numpy().data, offset + done)
        except OSError as e:
            if e.errno == errno.EINVAL:
                return first, done
            raise
        done += wrote
        if wrote < n:
            return first, done
    return first, done


def _bounce() -> torch.Tensor:
    if not hasattr(_local, "bounce"):
        _local.bounce = pages(_SIZE)
    return _local.bounce


def close(direct: int | None) -> None:
    if direct is not None:
        with contextlib.suppress(OSError):
            os.close(direct)
