"""One HTML page about one or more runs. It needs no network: plots by Bokeh, whose script is part of the page."""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from samestep.errors import ConfigError
from samestep.run.loggers import installed
from samestep.run.progress import amount, mebibytes
from samestep.run.record import CONFIG_FILE, METRICS_FILE

REPORT_FILE = "report.html"
PLAN_FILE = "plan.json"

COLUMNS = (
    "loss",
    "grad_norm",
    "clip_coefficient",
    "lr",
    "tokens_per_second",
    "peak_memory_bytes",
    "tokens",
    "loss_scale",
)
COLORS = ("#1f77b4", "#d95f02", "#1b9e77", "#7570b3", "#e7298a", "#8c6d31", "#17becf", "#555555")
EVENTS = {
    "skipped_step": "skip",
    "checkpoint": "checkpoint",
    "resume": "resume",
    "warning": "warning",
    "still_weights": "warning",
    "non_finite": "warning",
    "loss_spike": "warning",
}
"""Kinds of events on the time line -> how they are called there; any other kind is "other"."""
KINDS = [*dict.fromkeys(EVENTS.values()), "other"]

POINTS = 2400
"""Points of a curve, shared by the runs of a page: about as many as a screen has columns."""
MARKS = 600
"""Marks of one kind for each run."""
NOTES = 5
"""Lines of one file that are named as left out; the rest is counted."""


@dataclass(frozen=True)
class Run:
    """What a run folder tells.

    Attributes:
        columns: name -> float64 [steps], NaN where there is no number; `step` and `skipped` are whole.
        evaluations: step and loss, float64 [evaluations].
        plan, config: None where the folder has none.
        notes: what of its files could not be read.
    """

    name: str
    columns: dict[str, np.ndarray]
    evaluations: tuple[np.ndarray, np.ndarray]
    events: list[dict[str, Any]]
    plan: dict[str, Any] | None
    config: str | None
    notes: list[str]

    @property
    def steps(self) -> np.ndarray:
        return self.columns["step"]


def can_draw() -> bool:
    """Whether Bokeh is installed."""
    return installed("bokeh")


def write_report(folders: Sequence[Path], path: Path) -> None:
    """Write the page about run folders to `path`; curves of several runs share their plots.

    Raises:
        ConfigError: Bokeh is not installed, a folder holds no run, or the page cannot be written.
    """
    if not can_draw():
        raise ConfigError(
            "the package bokeh, which draws the curves, is not installed",
            fix='run `pip install "samestep[report]"`; the numbers are in metrics.jsonl and in TensorBoard',
        )
    names = [folder.resolve().name for folder in folders]
    if len(set(names)) < len(names):
        names = [str(folder) for folder in folders]
    page = _page([read_run(folder, name) for folder, name in zip(folders, names, strict=True)])
    temporary = path.with_name(f".{path.name}.writing")
    try:
        temporary.write_text(page, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}", fix="name another file with -o") from None


# ---------------------------------------------------------------------------------------------------------------------
# Reading
# ---------------------------------------------------------------------------------------------------------------------


def read_run(folder: Path, name: str) -> Run:
    """Read a run folder; a run that is still going on, or has no step yet, is fine. What is damaged is left out and
    noted.

    Raises:
        ConfigError: it holds no `metrics.jsonl`.
    """
    notes: list[str] = []
    file = folder / METRICS_FILE
    if not file.is_file():
        raise ConfigError(f"{folder} holds no run: there is no metrics.jsonl", fix="name a folder that `train` wrote")
    rows = _json_lines(file, _metrics_defect, notes)
    steps = [row for row in rows if "loss" in row]
    evaluations = [row for row in rows if "eval_loss" in row]
    columns = {column: _numbers(steps, column) for column in COLUMNS}
    columns["step"] = np.array([row["step"] for row in steps], dtype=np.int64)
    columns["skipped"] = np.array([bool(row.get("skipped")) for row in steps], dtype=bool)
    return Run(
        name,
        columns,
        (_numbers(evaluations, "step"), _numbers(evaluations, "eval_loss")),
        _json_lines(folder / "events.jsonl", _event_defect, notes),
        _plan(folder / PLAN_FILE, notes),
        _config(folder / CONFIG_FILE, notes),
        notes,
    )


def _json_lines(file: Path, defect: Callable[[dict[str, Any]], str | None], notes: list[str]) -> list[dict[str, Any]]:
    """Rows of a file, without those that are defective, which are noted; the last line may be half written."""
    if not file.is_file():
        return []
    rows, problems = [], []
    for number, line in enumerate(file.read_bytes().split(b"\n")[:-1], start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            problem = defect(row) if isinstance(row, dict) else "no JSON object"
        except (ValueError, RecursionError):
            problem = "no JSON"
        if problem is None:
            rows.append(row)
        else:
            problems.append(f"{file.name} line {number} is left out: {problem}")
    notes += problems[:NOTES]
    if len(problems) > NOTES:
        notes.append(f"{file.name}: {len(problems) - NOTES} more lines are left out")
    return rows


def _metrics_defect(row: dict[str, Any]) -> str | None:
    wrong = next((name for name in (*COLUMNS, "eval_loss") if not _is_number(row.get(name))), None)
    return _step_defect(row) or (f"{wrong} is no number" if wrong else None)


def _event_defect(row: dict[str, Any]) -> str | None:
    return _step_defect(row) or (None if isinstance(row.get("event"), str) else "event is no text")


def _step_defect(row: dict[str, Any]) -> str | None:
    step = row.get("step")
    return None if type(step) is int and 0 <= step < 2**53 else "step is no whole number"


def _is_number(value: Any) -> bool:
    return value is None or type(value) is float or (type(value) is int and abs(value) < 2**63)


def _plan(file: Path, notes: list[str]) -> dict[str, Any] | None:
    if not file.is_file():
        return None
    try:
        plan = json.loads(file.read_text(encoding="utf-8"))
        micro_batches = plan["micro_batches"]
        if isinstance(plan["steps"], int) and all(isinstance(row, dict) for row in micro_batches):
            return plan
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass
    notes.append(f"{file.name} is left out: it is no plan")
    return None


def _config(file: Path, notes: list[str]) -> str | None:
    if not file.is_file():
        return None
    try:
        text = file.read_text(encoding="utf-8")
        if isinstance(YAML(typ="safe", pure=True).load(text), dict):
            return text
    except (OSError, ValueError, YAMLError):
        pass
    notes.append(f"{file.name} is left out: it is no configuration")
    return None


def _numbers(rows: Sequence[dict[str, Any]], name: str) -> np.ndarray:
    """float64 [rows], NaN where there is no finite number."""
    values = np.array([np.nan if row.get(name) is None else row[name] for row in rows], dtype=np.float64)
    return np.where(np.isfinite(values), values, np.nan)


# ---------------------------------------------------------------------------------------------------------------------
# Fewer points
# ---------------------------------------------------------------------------------------------------------------------


def extremes(values: np.ndarray, points: int) -> np.ndarray:
    """Places of at most about `points` values that look like all of them: int64, ascending.

    The values are cut into `points` / 2 pieces; of each the least and the greatest stay, so no spike is lost. A piece
    without any number keeps one NaN, which is a gap in the curve.
    """
    count = len(values)
    if count <= points:
        return np.arange(count)
    edges = np.linspace(0, count, max(1, points // 2) + 1).astype(np.int64)
    starts = edges[:-1]
    missing = np.isnan(values)
    piece = np.repeat(np.arange(len(starts)), np.diff(edges))
    kept = [np.array([0, count - 1])]
    for filled, reduce in (
        (np.where(missing, np.inf, values), np.minimum),
        (np.where(missing, -np.inf, values), np.maximum),
    ):
        places = np.flatnonzero(filled == reduce.reduceat(filled, starts)[piece])
        kept.append(places[np.unique(piece[places], return_index=True)[1]])
    return np.unique(np.concatenate(kept))


def smooth(steps: np.ndarray, values: np.ndarray, pieces: int = 150) -> tuple[np.ndarray, np.ndarray]:
    """Mean step and mean value of consecutive pieces, NaN left out."""
    edges = np.unique(np.linspace(0, len(values), pieces + 1).astype(np.int64))
    starts = edges[:-1]
    known = ~np.isnan(values)
    count = np.add.reduceat(known, starts, dtype=np.float64)
    with np.errstate(invalid="ignore"):
        mean = np.add.reduceat(np.where(known, values, 0.0), starts) / count
    return np.add.reduceat(steps, starts) / np.diff(edges), mean


def thin(places: np.ndarray, marks: int = MARKS) -> np.ndarray:
    """At most `marks` of the places, evenly among them."""
    if len(places) <= marks:
        return places
    return places[np.linspace(0, len(places) - 1, marks).astype(np.int64)]


# ---------------------------------------------------------------------------------------------------------------------
# Drawing
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Curve:
    """What one plot shows of every run; `smoothed` draws the mean over the raw numbers, `optional` leaves the plot out
    where no run has any."""

    column: str
    title: str
    smoothed: bool = False
    scale: float = 1.0
    logarithmic: bool = False
    tick_format: str | None = None
    height: int = 260
    optional: bool = False


CURVES = (
    Curve("loss", "loss", smoothed=True, height=340),
    Curve("grad_norm", "gradient norm, before clipping", smoothed=True, logarithmic=True, height=340),
    Curve("lr", "learning rate"),
    Curve("tokens_per_second", "tokens / s", smoothed=True, tick_format="0.[0]a"),
    Curve("peak_memory_bytes", "peak memory, MiB", scale=2**-20, tick_format="0,0.[0]"),
    Curve("loss_scale", "loss scale", logarithmic=True, optional=True),
)


def _figures(runs: Sequence[Run]) -> list[Any]:
    from bokeh.models import DataRange1d

    steps = DataRange1d(range_padding=0.02)
    shown = [c for c in CURVES if not c.optional or not all(np.isnan(run.columns[c.column]).all() for run in runs)]
    drawn = [_draw_curve(curve, runs, steps) for curve in shown]
    return [*drawn, _draw_events(runs, steps)]


def _new_figure(title: str, steps: Any, **options: Any) -> Any:
    """An empty plot. No drag tool is active at first: on a phone, dragging must scroll the page."""
    from bokeh.models import BasicTickFormatter
    from bokeh.plotting import figure

    plot = figure(
        title=title,
        x_range=steps,
        sizing_mode="stretch_width",
        tools="box_zoom,pan,wheel_zoom,reset",
        active_drag=None,
        active_scroll=None,
        toolbar_location="right",
        min_border_right=8,
        **options,
    )
    plot.toolbar.logo = None
    plot.toolbar.autohide = True
    plot.xaxis.axis_label = "step"
    plot.xaxis.formatter = BasicTickFormatter(use_scientific=False)
    plot.outline_line_color = None
    return plot


def _draw_curve(curve: Curve, runs: Sequence[Run], steps: Any) -> Any:
    from bokeh.models import HoverTool, NumeralTickFormatter

    plot = _new_figure(curve.title, steps, height=curve.height, y_axis_type="log" if curve.logarithmic else "linear")
    if curve.tick_format:
        plot.yaxis.formatter = NumeralTickFormatter(format=curve.tick_format)
    hovered = []
    for run, color in zip(runs, _colors(runs), strict=True):
        values = run.columns[curve.column] * curve.scale
        label = run.name if len(runs) > 1 else "training"
        smoothed = curve.smoothed and len(values) > 300
        kept = extremes(values, max(300, POINTS // len(runs)))
        source = {"step": run.steps[kept], "value": values[kept], "run": [run.name] * len(kept)}
        named = {"legend_label": label} if curve.column == "loss" else {}
        line = plot.line("step", "value", source=source, color=color, alpha=0.4 if smoothed else 1, **named)
        hovered.append(line)
        if smoothed:
            plot.line(*smooth(run.steps, values), color=color, line_width=2, **named)
        if curve.column == "loss":
            _add_validation(plot, run, color if len(runs) > 1 else COLORS[1], label)
            _add_marks(plot, run, values, run.columns["skipped"], "skipped", "inverted_triangle", "#c00000", 9)
        if curve.column == "grad_norm":
            clipped = np.zeros(len(values), dtype=bool)
            clipped[kept] = run.columns["clip_coefficient"][kept] < 1
            _add_marks(plot, run, values, clipped, "clipped", "circle", "#e08a3c", 3)
            _add_marks(plot, run, values, run.columns["skipped"], "skipped", "inverted_triangle", "#c00000", 9)
    tooltips = [("step", "@step"), (curve.title.partition(",")[0], "@value{0.[00000]e+0}")]
    if len(runs) > 1:
        tooltips.insert(0, ("run", "@run"))
    plot.add_tools(HoverTool(renderers=hovered, tooltips=tooltips, mode="vline", line_policy="nearest"))
    _place_legend(plot)
    return plot


def _add_validation(plot: Any, run: Run, color: str, label: str) -> None:
    steps, losses = run.evaluations
    if not len(steps):
        return
    name = "validation" if label == "training" else f"{label}, validation"
    kept = extremes(losses, 400)
    plot.line(steps[kept], losses[kept], color=color, line_dash="dashed", line_width=2, legend_label=name)
    plot.scatter(steps[kept], losses[kept], color=color, size=4, legend_label=name)


def _add_marks(
    plot: Any, run: Run, values: np.ndarray, chosen: np.ndarray, label: str, marker: str, color: str, size: int
) -> None:
    """Mark steps on a curve; where the curve has a gap, at the height of its last number."""
    places = thin(np.flatnonzero(chosen))
    known = np.flatnonzero(~np.isnan(values))
    if not len(places) or not len(known):
        return
    before = known[np.maximum(np.searchsorted(known, places, side="right") - 1, 0)]
    plot.scatter(run.steps[places], values[before], marker=marker, color=color, size=size, legend_label=label)


def _place_legend(plot: Any) -> None:
    """Below the plot, where it hides nothing on a narrow screen."""
    if not plot.legend:
        return
    legend = plot.legend[0]
    plot.center.remove(legend)
    legend.update(
        orientation="horizontal", ncols=3, border_line_color=None, click_policy="hide", margin=0, label_height=14
    )
    plot.add_layout(legend, "below")


def _draw_events(runs: Sequence[Run], steps: Any) -> Any:
    from bokeh.models import HoverTool

    plot = _new_figure("events", steps, height=220, y_range=KINDS[::-1])
    for run, color in zip(runs, _colors(runs), strict=True):
        source: dict[str, list[Any]] = {"step": [], "kind": [], "text": [], "run": []}
        for step, kind, text in _time_line(run):
            for name, value in zip(source, (step, kind, text, run.name), strict=True):
                source[name].append(value)
        plot.scatter("step", "kind", source=source, color=color, size=9, alpha=0.7)
    plot.add_tools(HoverTool(tooltips=[("run", "@run"), ("step", "@step"), ("@kind", "@text")]))
    return plot


def _time_line(run: Run) -> list[tuple[int, str, str]]:
    """(step, kind, text), at most `MARKS` of each kind. Skips are those of the rows: `events.jsonl` also has those of
    steps that a resumed run took again."""
    reasons = {row["step"]: row.get("reason", "") for row in run.events if row["event"] == "skipped_step"}
    found: dict[str, list[tuple[int, str, str]]] = {kind: [] for kind in KINDS}
    found["skip"] = [(int(step), "skip", reasons.get(step, "")) for step in run.steps[run.columns["skipped"]]]
    for row in run.events:
        if row["event"] == "skipped_step":
            continue
        kind = EVENTS.get(row["event"], "other")
        details = {key: value for key, value in row.items() if key not in ("step", "time")}
        text = str(details.get("message") or " ".join(f"{key}={value}" for key, value in details.items()))
        found[kind].append((row["step"], kind, text[:200]))
    return [rows[place] for rows in found.values() for place in thin(np.arange(len(rows)))]


def _colors(runs: Sequence[Run]) -> list[str]:
    return [COLORS[place % len(COLORS)] for place in range(len(runs))]


# ---------------------------------------------------------------------------------------------------------------------
# The page
# ---------------------------------------------------------------------------------------------------------------------

_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
"""The browser itself refuses every request."""

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #222; margin: 0 auto; max-width: 1500px; padding: 12px 16px; }
h1 { font-size: 22px; margin: 4px 0 12px; overflow-wrap: anywhere; } h2 { font-size: 17px; margin: 24px 0 8px; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 500px), 1fr)); gap: 16px 20px; }
.plots > div { min-width: 0; }
.scroll { overflow-x: auto; margin-bottom: 16px; } .numbers td, .numbers th { white-space: nowrap; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
td, th { padding: 3px 14px 3px 0; text-align: left; vertical-align: top; border-bottom: 1px solid #e4e4e4; }
th { font-weight: 600; } .swatch { display: inline-block; width: 12px; height: 12px; border-radius: 3px; }
pre { background: #f6f6f6; padding: 10px; overflow-x: auto; font-size: 13px; }
summary { cursor: pointer; margin: 6px 0; } .note { color: #a04000; margin: 4px 0; }
"""


def _page(runs: Sequence[Run]) -> str:
    from bokeh.embed import components
    from bokeh.resources import Resources

    begun = [run for run in runs if len(run.steps)]
    plots, scripts = "<p>No step has been taken yet.</p>", ""
    if begun:
        script, divisions = components(_figures(begun))
        plots = '<div class="plots">' + "".join(f"<div>{division}</div>" for division in divisions) + "</div>"
        scripts = Resources(mode="inline", components=["bokeh"]).render_js() + script
    title = html.escape(", ".join(run.name for run in runs))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<title>{title} - samestep</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{title}</h1>
{_summary(runs)}
{_notes(runs)}
{plots}
{_differences(runs)}
{"".join(_details(run, len(runs) > 1) for run in runs)}
{scripts}
</body>
</html>
"""


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Cells are HTML."""
    top = "".join(f"<th>{cell}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{top}</tr>{body}</table></div>'


def _summary(runs: Sequence[Run]) -> str:
    swatches = iter(_colors([run for run in runs if len(run.steps)]))
    rows = []
    for run in runs:
        swatch = f'<span class="swatch" style="background:{next(swatches)}"></span> ' if len(run.steps) else ""
        rows.append([swatch + html.escape(run.name), *_key_numbers(run)])
    head = ("run", "steps", "loss", "validation", "best", "tokens", "tokens / s", "memory", "clipped", "skipped")
    return f'<div class="numbers">{_table(head, rows)}</div>'


def _notes(runs: Sequence[Run]) -> str:
    """What could not be read."""
    texts = [f"{run.name}: {note}" if len(runs) > 1 else note for run in runs for note in run.notes]
    return "".join(f'<p class="note">{html.escape(text)}</p>' for text in texts)


def _key_numbers(run: Run) -> list[str]:
    def last(values: np.ndarray) -> str:
        known = values[~np.isnan(values)]
        return f"{known[-1]:.4f}" if len(known) else "-"

    steps, losses = run.evaluations
    if not len(run.steps):
        return ["0", *["-"] * 8]
    known = np.flatnonzero(~np.isnan(losses))
    best = known[np.argmin(losses[known])] if len(known) else None
    planned = f" of {run.plan['steps']}" if run.plan else ""
    speeds = run.columns["tokens_per_second"]
    return [
        f"{run.steps[-1]}{planned}",
        last(run.columns["loss"]),
        last(losses),
        "-" if best is None else f"{losses[best]:.4f} at {steps[best]:.0f}",
        amount(float(np.nansum(run.columns["tokens"]))),
        amount(float(np.nanmedian(speeds))) if not np.isnan(speeds).all() else "-",
        mebibytes(int(np.nan_to_num(run.columns["peak_memory_bytes"]).max())),
        f"{np.mean(run.columns['clip_coefficient'] < 1):.0%}",
        str(int(run.columns["skipped"].sum())),
    ]


def _differences(runs: Sequence[Run]) -> str:
    """Fields in which the configurations differ."""
    known = [(run.name, run.config) for run in runs if run.config]
    if len(known) < 2:
        return ""
    flat = [_flatten(YAML(typ="safe", pure=True).load(config)) for _, config in known]
    fields = list(dict.fromkeys(field for values in flat for field in values))
    rows = [
        [html.escape(field), *(html.escape(str(values.get(field, "-"))) for values in flat)]
        for field in fields
        if len({repr(values.get(field)) for values in flat}) > 1
    ]
    head = ["field", *(html.escape(name) for name, _ in known)]
    return "<h2>Where the configurations differ</h2>" + (_table(head, rows) if rows else "<p>Nowhere.</p>")


def _flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat


def _details(run: Run, several: bool) -> str:
    """Plan and configuration, folded."""
    suffix = f" of {html.escape(run.name)}" if several else ""
    parts = []
    if run.plan:
        parts.append(f"<details><summary>Plan{suffix}</summary>{_plan_tables(run.plan)}</details>")
    if run.config:
        parts.append(f"<details><summary>Configuration{suffix}</summary><pre>{html.escape(run.config)}</pre></details>")
    return "".join(parts)


def _plan_tables(plan: dict[str, Any]) -> str:
    micro_batches = plan.get("micro_batches") or []
    flat = _flatten({name: value for name, value in plan.items() if name not in ("micro_batches", "notes")})
    text = _table(("", ""), [[html.escape(name), _plan_cell(name, value)] for name, value in flat.items()])
    notes = "".join(f"<p>{html.escape(note)}</p>" for note in plan.get("notes") or [])
    shown = micro_batches[:20]
    if shown:
        names = [name for name in shown[0] if name != "places"]
        rows = [["?" if row.get(n) is None else html.escape(str(row[n])) for n in names] for row in shown]
        more = f"<p>... {len(micro_batches) - len(shown)} more</p>" if len(micro_batches) > len(shown) else ""
        text += "<h2>Micro-batches of the first step</h2>" + _table(list(map(html.escape, names)), rows) + more
    return text + notes


def _plan_cell(name: str, value: Any) -> str:
    if isinstance(value, int) and name.startswith("memory."):
        return mebibytes(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return html.escape(str(value))
