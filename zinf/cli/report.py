"""`zinf report RUN`: what a run did and what limited it, as one HTML file."""

from __future__ import annotations

import argparse
import os
from typing import Any

from zinf.errors import ZinfError
from zinf.trace import page, reading, runlog
from zinf.trace.recorder import log_folder


def add(commands: Any, parents: list[argparse.ArgumentParser]) -> None:
    p = commands.add_parser(
        "report", parents=parents, help="what a run did and what limited it, as one HTML page",
        description="Make one HTML file of a run, finished or not: the timeline of a step (if it was traced), stalls, bandwidth, memory, loss, plan, config.",
    )  # fmt: skip
    p.add_argument("where", metavar="RUN", help="the run's log folder (zinf train says it), its store, its YAML file, or a trace")
    p.add_argument("--output", metavar="FILE", help="where to write it (default: report.html in the log folder)")
    p.add_argument("--step", type=int, metavar="N", help="which step's timeline to show (default: one of median length)")
    p.add_argument("--open", action="store_true", help="show it in a browser")
    p.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    folder, trace = find(args.where)
    metrics = os.path.join(folder, runlog.METRICS)
    told = runlog.read(metrics) if os.path.exists(metrics) else runlog.Run()
    if trace is None:
        recorded = [b["trace"] for b in reversed(told.begins) if isinstance(b.get("trace"), str)]
        places = [os.path.join(folder, runlog.TRACE), *recorded]
        trace = next((place for place in places if os.path.exists(place)), places[0])
    if args.step is not None and not os.path.exists(trace):
        raise ZinfError(f"--step {args.step}: there is no trace {trace}: trace: true in the engine section records one")
    keep = reading.KEEP if args.step is None else 1 << 30
    timeline = reading.read(trace, keep) if os.path.exists(trace) else None
    name = str((told.begin.get("config") or {}).get("engine", {}).get("run_name") or os.path.basename(folder).removesuffix("-log"))
    output = args.output or os.path.join(folder, runlog.REPORT)
    html = page.build(told, timeline, name, args.step)
    with open(output, "w", encoding="utf-8", errors="replace") as file:
        file.write(html)
    print(f"wrote {output}")
    if args.open:
        import webbrowser

        webbrowser.open(f"file://{os.path.abspath(output)}")
    return 0


def find(where: str) -> tuple[str, str | None]:
    """The log folder that RUN means, and the trace if RUN is one.

    Raises:
        ZinfError: nothing of a run is there.
    """
    if not os.path.exists(where):
        raise ZinfError(f"{where}: no such file or folder; `zinf train` says where its log is")
    where = os.path.abspath(where)
    if os.path.isfile(where):
        if where.endswith((".yaml", ".yml")):
            return _log_of(where), None
        if os.path.basename(where) == runlog.METRICS:
            return os.path.dirname(where), None
        return os.path.dirname(where), where
    for folder in (where, log_folder(where)):
        if any(os.path.exists(os.path.join(folder, name)) for name in (runlog.METRICS, runlog.TRACE)):
            return folder, None
    raise ZinfError(f"{where}: neither {runlog.METRICS} nor {runlog.TRACE} is there, so no run was logged here; `zinf train` says where its log is")


def _log_of(file: str) -> str:
    """Where `zinf train FILE` logs."""
    from zinf.train import TrainConfig

    folder = TrainConfig.load(file).log_folder()
    if not os.path.isdir(folder):
        raise ZinfError(f"{folder}: no such folder, so {file} was not run yet, or from another folder")
    return folder
