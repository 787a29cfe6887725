"""One HTML file that tells what a run did and what limited it: no network, no other files.

The words and the numbers stand in the page itself; its script (page.html) only draws, from the JSON that `build` puts into it.
"""

from __future__ import annotations

import html
import importlib.resources
import json
import statistics
import time
from collections.abc import Iterable, Sequence
from typing import Any

from zinf.trace.bottleneck import HANDOVER, NVME, Summary, resource, summary
from zinf.trace.reading import Event, Step, Timeline
from zinf.trace.recorder import COMPUTE, LANES, LOOP, ORDER, WAITING
from zinf.trace.runlog import Run

WARMUP = 2  # steps that are left out of means where there are more
MOST_EVENTS, MOST_POINTS, BINS = 20_000, 1500, 240
COLOURS = {
    COMPUTE: "forward",
    LOOP: "loop",
    WAITING: "waiting",
    NVME: "fetch",
    "commit": "commit",
    HANDOVER: "other",
    **{lane: verb for verb, lane in LANES.items()},
}
KINDS = ["fetch", "flush", "step", "upload", "offload", "evict", "import", "forward", "backward", "evaluate", "waiting", "commit", "loop", "other"]
BOUNDS = {LANES["fetch"]: "nvme_read", LANES["flush"]: "nvme_write", LANES["upload"]: "link", LANES["offload"]: "link"}


def build(run: Run, timeline: Timeline | None = None, name: str = "run", step: int | None = None) -> str:
    """The page.

    Args:
        run: of metrics.jsonl; an empty one where there is only a trace.
        step: which step of the trace to show; None: one of median length.

    Raises:
        ValueError: the trace has no such step.
    """
    shown = _choose(timeline, step)
    found = summary(timeline, shown) if timeline is not None and shown is not None else None
    charts: list[dict[str, Any]] = []
    body = [_head(run, name), _verdict(run, found), _figures(run, found)]
    data: dict[str, Any] = {"charts": charts, "timeline": None}
    if timeline is not None and shown is not None and found is not None:
        data["timeline"], left_out = _events(timeline, shown)
        body += [_timeline_section(shown, left_out), _bandwidth(run, found, timeline, shown, charts)]
        body += [f'<div class="three">{_busy(found)}{_path(found)}{_stalls(run, found)}</div>', _residency(timeline, shown, charts)]
    else:
        body += [_pair(_stalls(run, None), _traffic(run, charts)), _resident_steps(run, charts)]
    body += [_training(run, charts), _forecast(run), _plan(run), _config(run)]
    notes = [
        f"{n} damaged line{'s' * (n > 1)} of the {what} left out" for what, n in (("log", run.damaged), ("trace", timeline.damaged if timeline else 0)) if n
    ]
    footer = "; ".join([f"Made by zinf report, {time.strftime('%Y-%m-%d %H:%M')}", *notes]) + "."
    page = importlib.resources.files("zinf.trace").joinpath("page.html").read_text(encoding="utf-8")
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    parts = {"@TITLE@": _(f"{name}: zinf"), "@BODY@": "\n".join(filter(None, body)), "@FOOTER@": _(footer), "@DATA@": text}
    for key, value in parts.items():
        before, _key, after = page.partition(key)
        page = before + value + after
    return page


def _(value: object) -> str:
    return html.escape(str(value))


def _choose(timeline: Timeline | None, step: int | None) -> Step | None:
    if timeline is None or step is None:
        return timeline.typical() if timeline is not None else None
    found = next((s for s in timeline.steps if s.number == step), None)
    if found is None:
        raise ValueError(f"step {step} is not in the trace; it has {', '.join(str(s.number) for s in timeline.steps) or 'no whole step'}")
    return found


# -------------------------------------------------------------------------------------------------------------- units


def _bytes(n: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(n) < 1024:
            return f"{n:.0f} {unit}" if unit == "B" or n >= 100 else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.2f} TiB"


def _rate(n: float) -> str:
    return f"{n / 1e9:.2f} GB/s" if n >= 1e9 else f"{n / 1e6:.0f} MB/s" if n >= 1e7 else f"{n / 1e6:.1f} MB/s"


def _seconds(s: float) -> str:
    return f"{s:.1f} s" if s >= 100 else f"{s:.2f} s" if s >= 1 else f"{s * 1e3:.0f} ms" if s >= 0.1 else f"{s * 1e3:.2f} ms"


def _duration(s: float) -> str:
    return _seconds(s) if s < 120 else f"{s / 60:.0f} min" if s < 7200 else f"{s / 3600:.1f} h"


def _steady(run: Run) -> list[dict[str, Any]]:
    """Steps of the last process without its first ones."""
    begun = int(run.begin.get("step", 0)) if run.begin else 0
    steps = [s for s in run.steps if s["step"] > begun] or run.steps
    return steps[WARMUP:] or steps


def _mean(rows: Sequence[dict[str, Any]], *keys: str) -> float | None:
    found = []
    for row in rows:
        value: Any = row
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        if isinstance(value, (int, float)):
            found.append(float(value))
    return statistics.fmean(found) if found else None


# --------------------------------------------------------------------------------------------------------- the beginning


def _head(run: Run, name: str) -> str:
    about = []
    if model := run.begin.get("model"):
        about.append(str(model))
    if params := run.begin.get("params"):
        about.append(f"{params / 1e6:.1f} M parameters" if params < 1e9 else f"{params / 1e9:.2f} billion parameters")
    if run.steps:
        last, of = run.steps[-1], run.begin.get("steps")
        about.append(f"step {last['step']}" + (f" of {of}" if of else "") + f", {_duration(sum(s['seconds'] for s in run.steps))} of training")
        at = time.strftime("%Y-%m-%d %H:%M", time.localtime(last["time"])) if isinstance(last.get("time"), (int, float)) else ""
        about.append("ended by itself" if run.ended else f"not ended when this page was made (running, or killed); last step {at}".rstrip())
    if len(run.begins) > 1:
        about.append(f"{len(run.begins)} processes, one after the other")
    return f'<h1>{_(name)}</h1><p class="sub">{_(" · ".join(about))}</p>'


def _verdict(run: Run, found: Summary | None) -> str:
    if found is not None:
        return f'<p class="verdict">{_(found.sentence())}</p>'
    steady = _steady(run)
    seconds = _mean(steady, "seconds")
    if not seconds:
        return '<p class="verdict">No step was logged yet.</p>'
    waits = {verb: _mean(steady, "waited", verb) or 0.0 for verb in {v for s in steady for v in s.get("waited") or {}}}
    worst = max(waits, key=lambda v: waits[v], default="")
    stood = sum(waits.values())
    mostly = f", mostly for {worst}" if stood > 0 else ""
    text = f"Compute stood still for {100 * stood / seconds:.0f} % of a step of {_seconds(seconds)}{mostly}."
    return f'<p class="verdict">{_(text)}</p><p class="note">There is no timeline of this run: <code>trace: true</code> in its engine section records one.</p>'


def _figures(run: Run, found: Summary | None) -> str:
    steady = _steady(run)
    seconds = _mean(steady, "seconds") or (found.seconds if found else None)
    pairs: list[tuple[str, str]] = []
    if seconds:
        pairs.append((_seconds(seconds), "a step"))
    tokens = _mean(steady, "tokens")
    if tokens and seconds:
        pairs.append((f"{tokens / seconds:.0f} tokens/s", f"{tokens:.0f} tokens a step"))
    for verb, word in (("fetch", "read"), ("flush", "written")):
        moved = _mean(steady, "bytes", verb)
        moved = found.bytes.get(verb, 0) if moved is None and found is not None else moved
        if moved is not None:
            pairs.append((_bytes(moved), f"{word} on NVMe, a step"))
    losses = [s["loss"] for s in run.steps if isinstance(s.get("loss"), (int, float))]
    if run.evals:
        pairs.append((f"{run.evals[0][1]:.3f} → {run.evals[-1][1]:.3f}", "held-out loss"))
    elif losses:
        pairs.append((f"{losses[0]:.3f} → {losses[-1]:.3f}", "training loss, first and last step"))
    peak = max((s["rss"] for s in run.steps if isinstance(s.get("rss"), (int, float))), default=0)
    if peak:
        pairs.append((_bytes(peak), "peak memory, Python and torch included"))
    return f'<div class="figures">{"".join(f"<div><b>{_(value)}</b><span>{_(what)}</span></div>" for value, what in pairs)}</div>' if pairs else ""


def _section(title: str, note: str, inner: str, tools: str = "") -> str:
    return f'<section>{tools}<h2>{_(title)}</h2><p class="note">{note}</p>{inner}</section>'


def _pair(*sections: str) -> str:
    return f'<div class="two">{"".join(sections)}</div>' if any(sections) else ""


def _bar(name: str, part: float, text: str, colour: str, inner: bool = False) -> str:
    width = max(0.0, min(100.0, 100 * part))
    return (
        f'<div class="bar{" inner" * inner}"><span>{_(name)}</span><div><i data-color="{_(colour)}" style="width:{width:.1f}%"></i></div>'
        f"<span>{_(text)}</span></div>"
    )


def _table(header: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "") -> str:
    lines = [("th", header)] if header else []
    lines += [("td", row) for row in rows]
    cells = ("".join(f"<{tag}>{_(cell)}</{tag}>" for cell in row) for tag, row in lines)
    return f'<table class="{kind}">{"".join(f"<tr>{row}</tr>" for row in cells)}</table>'


# ---------------------------------------------------------------------------------------------------------- one step


def _at(lane: str) -> int:
    return next((i for i, known in enumerate(ORDER) if lane.startswith(known)), len(ORDER))


def _events(timeline: Timeline, step: Step) -> tuple[dict[str, Any], int]:
    """What the script draws of a step, and how many events are left out, the shortest."""
    events = [e for e in timeline.within(step.start, step.end) if e.lane != "import"]
    left_out = max(0, len(events) - MOST_EVENTS)
    if left_out:
        events = sorted(events, key=lambda e: e.start - e.end)[:MOST_EVENTS]
    events.sort(key=lambda e: e.start)
    ends: dict[str, list[float]] = {lane: [] for lane in sorted({e.lane for e in events}, key=lambda lane: (_at(lane), lane))}
    lanes, names, kinds = {lane: i for i, lane in enumerate(ends)}, dict[str, int](), {kind: i for i, kind in enumerate(KINDS)}
    out = []
    for e in events:
        row = next((i for i, end in enumerate(ends[e.lane]) if end <= e.start), len(ends[e.lane]))
        ends[e.lane][row : row + 1] = [e.end]
        start, end = max(e.start, step.start), min(e.end, step.end)
        kind = kinds.get(_kind(e), kinds["other"])
        item: list[Any] = [lanes[e.lane], row, names.setdefault(e.name, len(names)), kind, round((start - step.start) * 1e6, 1), round((end - start) * 1e6, 1)]
        out.append([*item, e.nbytes, e.who] if e.who else [*item, e.nbytes] if e.nbytes else item)
    return {
        "seconds": step.end - step.start,
        "lanes": [[lane, len(rows)] for lane, rows in ends.items()],
        "names": list(names),
        "kinds": KINDS,
        "events": out,
    }, left_out


def _kind(e: Event) -> str:
    return "loop" if e.lane == LOOP else e.lane if e.lane in (WAITING, "commit") else e.verb


def _timeline_section(step: Step, left_out: int) -> str:
    note = "Each lane is a resource; a drive has a row for each transfer under way. Drag to move; double-click, Ctrl and the wheel, or + and - to zoom."
    if left_out:
        note += f" {left_out} events are left out, the shortest."
    buttons = (("in", "zoom in", "+"), ("out", "zoom out", "&minus;"), ("all", "", "whole step"))
    tools = f'<div class="tools">{"".join(f"<button id={ident} title={title!r}>{text}</button>" for ident, title, text in buttons)}</div>'
    used = ["forward", "backward", "waiting", "loop", "step", "fetch", "flush", "upload", "offload", "commit"]
    legend = "".join(f'<span><i data-color="{k}"></i>{k}</span>' for k in used)
    canvas = f'<canvas id="timeline" tabindex="0" aria-label="timeline of step {step.number}"></canvas><div class="legend">{legend}</div>'
    return _section(f"Step {step.number}, {_seconds(step.end - step.start)}", note, canvas, tools)


def _busy(found: Summary) -> str:
    rows = []
    for lane in sorted(
        (lane for lane in found.busy if lane not in (WAITING, "import", "evict")),
        key=lambda lane: (_at(LANES["fetch"]) - 0.5 if lane == NVME else _at(lane), lane),
    ):
        part = found.busy[lane] / found.seconds
        inner = lane != NVME and resource(lane) == NVME
        rows.append(_bar(lane, part, f"{100 * part:.0f} %, {_seconds(found.busy[lane])}", COLOURS.get(lane, _colour(lane)), inner))
    return _section("How busy each resource was", "The part of the step in which it had something to do.", "".join(rows))


def _colour(lane: str) -> str:
    return next((verb for verb, known in LANES.items() if lane.startswith(known)), "other")


def _path(found: Summary) -> str:
    order = sorted(found.path, key=lambda r: -found.path[r])
    stack = "".join(f'<i data-color="{COLOURS.get(r, "other")}" style="width:{100 * found.path[r] / found.seconds:.2f}%" title="{_(r)}"></i>' for r in order)
    rows = [
        _bar(r, found.path[r] / found.seconds, f"{100 * found.path[r] / found.seconds:.0f} %, {_seconds(found.path[r])}", COLOURS.get(r, "other"))
        for r in order
    ]
    note = "What the step could not have been shorter without, followed back from its end: a faster resource helps as much as its part here."
    return _section("Critical path", note, f'<div class="stack">{stack}</div>{"".join(rows)}')


def _stalls(run: Run, found: Summary | None) -> str:
    steady = _steady(run)
    seconds = _mean(steady, "seconds")
    if seconds:
        waits = {verb: _mean(steady, "waited", verb) or 0.0 for verb in {v for s in steady for v in s.get("waited") or {}}}
        note = f"Seconds that compute stood still in a step, by what it waited for; mean of {len(steady)} steps."
    elif found is not None:
        waits, seconds, note = found.waited, found.seconds, "Seconds that compute stood still in this step, by what it waited for."
    else:
        return ""
    rows = [_bar(verb, s / seconds, f"{_seconds(s)}, {100 * s / seconds:.0f} %", verb) for verb, s in sorted(waits.items(), key=lambda kv: -kv[1])]
    return _section("Stalls", note, "".join(rows) or "<p>None.</p>")


def _bandwidth(run: Run, found: Summary, timeline: Timeline, step: Step, charts: list[dict[str, Any]]) -> str:
    bounds = run.begin.get("bounds") or {}
    length = (step.end - step.start) / BINS
    rates = {verb: [0.0] * BINS for verb in ("fetch", "flush")}
    for e in timeline.within(step.start, step.end):
        if e.verb in rates and e.nbytes and e.lane.startswith(NVME):
            _spread(rates[e.verb], e, step.start, length)
    series = [
        {"name": {"fetch": "read", "flush": "written"}[v], "color": v, "kind": "line", "y": [round(r / length) for r in bins]} for v, bins in rates.items()
    ]
    for verb, key, word in (("fetch", "nvme_read", "read bound"), ("flush", "nvme_write", "write bound")):
        if bounds.get(key):
            series.append({"name": word, "color": verb, "kind": "dash", "y": [round(bounds[key])] * BINS})
    x = [round((i + 0.5) * length, 7) for i in range(BINS)]
    charts.append(
        {"height": 170} | _chart("bandwidth", x, "seconds", "time in the step", "rate", "bytes a second, NVMe", series, True, "NVMe rate over the step")
    )
    rows = []
    for lane, key in BOUNDS.items():
        verb = _colour(lane)
        moved, busy = found.bytes.get(verb, 0), sum(s for name, s in found.busy.items() if name.startswith(lane))
        if moved and busy:
            bound = bounds.get(key)
            rows.append(
                [lane, _bytes(moved), _rate(moved / busy), _rate(bound) if bound else "not measured", f"{100 * moved / busy / bound:.0f} %" if bound else ""]
            )
    note = "While reads and writes share the drive, neither reaches its bound alone."
    if not any(key in bounds for key in ("nvme_read", "nvme_write")):
        note = "The drive's bound was not measured on this machine: <code>zinf bench io PATH</code> measures it, and the next run's report shows it."
    table = _table(["", "moved", "while busy", "bound", "of it"], rows)
    return _section("Bandwidth", note, f'<div id="bandwidth"></div>{table}')


def _spread(bins: list[float], e: Event, start: float, length: float) -> None:
    """Add the event's bytes to the bins in which it was under way."""
    first, last = (e.start - start) / length, max((e.end - start) / length, (e.start - start) / length + 1e-9)
    for i in range(max(0, int(first)), min(len(bins) - 1, int(last)) + 1):
        bins[i] += e.nbytes * max(0.0, min(last, i + 1) - max(first, i)) / (last - first)


def _residency(timeline: Timeline, step: Step, charts: list[dict[str, Any]]) -> str:
    sections = []
    for name, points in sorted(timeline.counters.items()):
        inside = [(t - step.start, values) for t, values in points if step.start <= t <= step.end]
        if len(inside) > MOST_POINTS:
            inside = inside[:: len(inside) // MOST_POINTS + 1]
        if inside:
            sections.append(_tier(name, [round(t, 6) for t, _v in inside], [v for _t, v in inside], "seconds", "time in the step", charts))
    return _pair(*sections)


def _resident_steps(run: Run, charts: list[dict[str, Any]]) -> str:
    steps = [s for s in _thin(run.steps) if isinstance(s.get("resident"), dict)]
    tiers = dict.fromkeys(tier for s in steps for tier in s["resident"] if tier != "nvme")
    return _pair(*(_tier(f"{t} memory", [s["step"] for s in steps], [s["resident"].get(t) or {} for s in steps], "step", "step", charts) for t in tiers))


TIER_COLOURS = {"weights": "fetch", "state": "step", "grads": "offload", "in flight": "upload", "activations": "flush"}


def _tier(name: str, x: list[float], rows: list[dict[str, Any]], xformat: str, xlabel: str, charts: list[dict[str, Any]]) -> str:
    kinds = [k for k in dict.fromkeys(k for row in rows for k in row) if any(row.get(k) for row in rows)]
    if not kinds:
        return ""
    series = [{"name": k, "color": TIER_COLOURS.get(k, "other"), "kind": "area", "y": [row.get(k, 0) for row in rows]} for k in kinds]
    ident = f"tier{len(charts)}"
    charts.append(_chart(ident, x, xformat, xlabel, "bytes", "bytes held", series, True, f"{name} over time"))
    peak = max(sum(row.values()) for row in rows)
    return _section(f"{name[0].upper()}{name[1:]}", f"What zinf holds there, at most {_bytes(peak)} at once.", f'<div id="{ident}"></div>')


# ---------------------------------------------------------------------------------------------------------- the run


def _chart(
    ident: str, x: list[Any], xformat: str, xlabel: str, yformat: str, ylabel: str, series: list[dict[str, Any]], zero: bool, label: str
) -> dict[str, Any]:
    return {"id": ident, "x": x, "xformat": xformat, "xlabel": xlabel, "yformat": yformat, "ylabel": ylabel, "series": series, "zero": zero, "label": label}


def _thin(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """At most MOST_POINTS of them, evenly, with the last."""
    every = -(-len(steps) // MOST_POINTS) if steps else 1
    return steps[::every] if not steps or (len(steps) - 1) % every == 0 else [*steps[::every], steps[-1]]


def _column(steps: Sequence[dict[str, Any]], *keys: str) -> list[float | None]:
    out: list[float | None] = []
    for s in steps:
        value = _mean([s], *keys)
        out.append(value)
    return out


def _training(run: Run, charts: list[dict[str, Any]]) -> str:
    steps = _thin(run.steps)
    if not steps:
        return ""
    x: list[Any] = [s["step"] for s in steps]
    sections = []
    series = [{"name": "training loss", "color": "accent", "kind": "line", "y": _column(steps, "loss")}]
    xs = sorted({*x, *(n for n, _l in run.evals)})
    if run.evals:
        at = {n: i for i, n in enumerate(xs)}
        training: list[Any] = [None] * len(xs)
        held: list[Any] = [None] * len(xs)
        for n, y in zip(x, _column(steps, "loss"), strict=True):
            training[at[n]] = y
        for n, loss in run.evals:
            held[at[n]] = loss
        series = [{**series[0], "y": training}, {"name": "held-out loss", "color": "step", "kind": "dots", "y": held}]
    charts.append(_chart("loss", xs if run.evals else x, "step", "step", "plain", "nats a token", series, False, "loss by step"))
    sections.append(_section("Loss", "Mean over the tokens of a step; dots: over the held-out rows.", '<div id="loss"></div>'))
    seconds = [{"name": "seconds a step", "color": "forward", "kind": "line", "y": _column(steps, "seconds")}]
    stood = [sum(v for v in (s.get("waited") or {}).values() if isinstance(v, (int, float))) for s in steps]
    seconds.append({"name": "of them compute stood still", "color": "waiting", "kind": "line", "y": stood})
    charts.append(_chart("seconds", x, "step", "step", "seconds", "time", seconds, True, "seconds by step"))
    sections.append(_section("Time of a step", "Evaluation and saving are no part of it.", '<div id="seconds"></div>'))
    for key, title, note in (("grad_norm", "Norm of the gradients", "Before clipping; a gap is a step that was skipped."), ("lr", "Learning rate", "")):
        values = _column(steps, key)
        if any(v is not None for v in values):
            charts.append(_chart(key, x, "step", "step", "plain", "", [{"name": title.lower(), "color": "accent", "kind": "line", "y": values}], True, title))
            sections.append(_section(title, note, f'<div id="{key}"></div>'))
    return _pair(*sections)


def _traffic(run: Run, charts: list[dict[str, Any]]) -> str:
    steps = _thin(run.steps)
    series = []
    for verb, name in (("fetch", "read"), ("flush", "written")):
        y = [b / s["seconds"] if (b := _mean([s], "bytes", verb)) is not None and s["seconds"] > 0 else None for s in steps]
        if any(y):
            series.append({"name": name, "color": verb, "kind": "line", "y": y})
    if not series:
        return ""
    charts.append(_chart("traffic", [s["step"] for s in steps], "step", "step", "rate", "bytes a second", series, True, "NVMe rate by step"))
    return _section("NVMe traffic", "Bytes of a step over its seconds.", '<div id="traffic"></div>')


def _forecast(run: Run) -> str:
    said, took = run.forecast.get("predicted"), run.forecast.get("achieved")
    if not isinstance(said, (int, float)) or not isinstance(took, (int, float)) or said <= 0 or took <= 0:
        return ""
    rows = [["seconds a step", _seconds(said), _seconds(took), f"{took / said:.2f}"]]
    if tokens := _mean(_steady(run), "tokens"):
        rows.append(["tokens a second", f"{tokens / said:.0f}", f"{tokens / took:.0f}", f"{said / took:.2f}"])
    seconds = run.forecast.get("seconds")
    busy = sorted(((k, v) for k, v in seconds.items() if isinstance(v, (int, float))), key=lambda kv: -kv[1]) if isinstance(seconds, dict) else []
    table = _table(["", "predicted", "achieved", "achieved / predicted"], rows)
    note = f"What the planner says of a step on this machine, limited by {_(run.forecast.get('limiter', 'nothing'))}, and what the first steps took."
    return _section(
        "Predicted and achieved",
        note,
        table + (f'<p class="note">Predicted to be busy: {_(", ".join(f"{k} {_seconds(v)}" for k, v in busy))}.</p>' if busy else ""),
    )


def _plan(run: Run) -> str:
    lines = run.begin.get("plan")
    if not isinstance(lines, list) or not lines:
        return ""
    return _section("Plan", "What rests where, decided before any work.", f"<pre>{_(chr(10).join(map(str, lines)))}</pre>")


def _config(run: Run) -> str:
    config = run.begin.get("config")
    if not isinstance(config, dict):
        return ""
    rows: list[tuple[str, Any]] = []
    for key, value in config.items():
        rows += [(f"{key}.{k}", v) for k, v in value.items()] if isinstance(value, dict) else [(key, value)]
    table = _table([], [[k, json.dumps(v, ensure_ascii=False)] for k, v in rows if v is not None], "keys")
    return f"<section><details><summary>Config</summary>{table}</details></section>"
