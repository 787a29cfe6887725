"""What commands print, beside errors: headings, columns, numbers."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence


def colour() -> bool:
    """May we use bold and colours? On a terminal, unless NO_COLOR is set (https://no-color.org)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def heading(text: str) -> None:
    """A line that begins a part of the output."""
    print(f"\n\033[1m{text}\033[0m" if colour() else f"\n{text}", flush=True)


def rows(pairs: Sequence[tuple[str, object]], indent: str = "  ") -> None:
    """Names and values in two columns; a value of several lines stays in its column, and so does one that is too long for the terminal."""
    width = max((len(name) for name, _ in pairs), default=0)
    room = shutil.get_terminal_size().columns - len(indent.lstrip("\n")) - width - 2 if sys.stdout.isatty() else 0
    for name, value in pairs:
        lines = str(value).split("\n")
        if room >= 20:
            lines = [part for line in lines for part in textwrap.wrap(line, room, break_on_hyphens=False) or [""]]
        first, *more = lines
        print(f"{indent}{name:<{width}}  {first}")
        for line in more:
            print(f"{indent}{'':<{width}}  {line}")
    sys.stdout.flush()


def table(header: Sequence[str], body: Sequence[Sequence[str]], indent: str = "  ") -> None:
    """A table, the first column to the left, the others to the right."""
    widths = [max(len(row[i]) for row in [header, *body]) for i in range(len(header))]
    for row in [header, *body]:
        cells = [f"{cell:<{w}}" if i == 0 else f"{cell:>{w}}" for i, (cell, w) in enumerate(zip(row, widths, strict=True))]
        print(f"{indent}{'  '.join(cells)}".rstrip())
    sys.stdout.flush()


def seconds(s: float) -> str:
    """0.42 s, 12.3 s, 4 min 05 s."""
    return f"{s:.2f} s" if s < 10 else f"{s:.1f} s" if s < 100 else f"{int(s) // 60} min {int(s) % 60:02d} s"


def rate(r: float) -> str:
    """Bytes a second, decimal as drives and buses are sold: 2.34 GB/s, 870 MB/s."""
    return f"{r / 1e9:.1f} GB/s" if r >= 1e10 else f"{r / 1e9:.2f} GB/s" if r >= 1e9 else f"{r / 1e6:.0f} MB/s"


@contextlib.contextmanager
def bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar of bytes on stderr, nothing where that is no terminal; yields what is called with (bytes done, bytes in all)."""
    from tqdm import tqdm

    with tqdm(desc=f"  {what}", disable=None, dynamic_ncols=True, unit="B", unit_scale=True, leave=False) as shown:

        def progress(done: int, total: int) -> None:
            shown.total = total
            shown.update(done - shown.n)

        yield progress


def number(x: float) -> str:
    """12,345 or 98.7 or 0.0123: three digits, or whole."""
    return f"{x:,.0f}" if x >= 100 else f"{x:.3g}"
