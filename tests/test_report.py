"""The page about a run: what it keeps of many points, and what a browser makes of it. And the first configuration."""

import json
import math
import random
import re
import shutil
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from samestep.config.load import dump, load
from samestep.errors import ConfigError
from samestep.families import FAMILIES
from samestep.run import report
from samestep.run.report import extremes, read_run, smooth, thin, write_report
from samestep.run.trainer import Trainer

needs_bokeh = pytest.mark.skipif(not report.can_draw(), reason="samestep[report] is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")
QUIET = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync", "--disable-default-apps", "--hide-scrollbars",
         "--virtual-time-budget=10000")  # fmt: skip


def write_run(folder: Path, steps: int, *, skips=(), spike: int | None = None, events=(), evaluate: int = 1000) -> Path:
    """A run folder of made-up numbers."""
    draw = random.Random(steps)
    folder.mkdir()
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            skipped, norm = step in skips, 99.0 if step == spike else math.exp(draw.gauss(-0.2, 0.2))
            row = {
                "step": step, "loss": None if skipped else 1.5 + 3 / math.sqrt(step) + draw.gauss(0, 0.05),
                "grad_norm": None if skipped else norm, "clip_coefficient": None if skipped else min(1.0, 1 / norm),
                "lr": 1e-3 * (1 - step / steps), "tokens": 768, "tokens_per_second": 15000 + draw.gauss(0, 500),
                "peak_memory_bytes": 10**8, "skipped": skipped,
            }  # fmt: skip
            file.write(json.dumps(row) + "\n")
            if step % evaluate == 0:
                file.write(json.dumps({"step": step, "eval_loss": 1.6 + 3 / math.sqrt(step), "eval_targets": 9}) + "\n")
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return folder


# ---- fewer points


def test_extremes_keep_spikes_ends_and_gaps():
    values = np.random.default_rng(0).normal(size=100_001)
    values[70_000], values[123], values[20_000:40_000], values[50_000] = 50.0, -50.0, np.nan, np.nan
    kept = extremes(values, 2000)
    assert len(kept) <= 2002
    assert (np.diff(kept) > 0).all()
    assert {0, 123, 70_000, 100_000} <= set(kept.tolist())
    assert np.isnan(values[kept[(kept > 21_000) & (kept < 39_000)]]).all()
    assert np.isfinite(values[kept[kept > 40_200]]).all()
    assert extremes(values[:10], 10).tolist() == list(range(10))


def test_smooth_is_the_mean_of_pieces_without_gaps():
    values = np.arange(10.0)
    values[3] = np.nan
    values[8:] = np.nan
    steps, means = smooth(np.arange(10), values, pieces=5)
    assert steps.tolist() == [0.5, 2.5, 4.5, 6.5, 8.5]
    assert means[:4].tolist() == [0.5, 2.0, 4.5, 6.5]
    assert np.isnan(means[4])


def test_thin_keeps_both_ends():
    assert thin(np.arange(5), 9).tolist() == [0, 1, 2, 3, 4]
    kept = thin(np.arange(10_000), 100)
    assert (len(kept), kept[0], kept[-1]) == (100, 0, 9999)


# ---- reading


def test_reading_a_run_that_still_writes(tmp_path):
    folder = write_run(tmp_path / "run", 5, skips={2}, evaluate=5)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')
    run = read_run(folder, "run")
    assert run.steps.tolist() == [1, 2, 3, 4, 5]
    assert np.isnan(run.columns["loss"]).tolist() == [False, True, False, False, False]
    assert run.evaluations[0].tolist() == [5]


def test_the_time_line_has_the_skips_of_the_rows_only(tmp_path):
    events = [
        {"event": "skipped_step", "step": 3, "time": "t", "reason": "non-finite gradient norm"},
        {"event": "skipped_step", "step": 4, "time": "t", "reason": "of a step taken again"},
        {"event": "resume", "step": 2, "time": "t", "checkpoint": "c"},
        {"event": "new_kind", "step": 5, "time": "t", "more": 1},
        {"event": "warning", "step": 1, "time": "t", "message": "<script>alert(1)</script>"},
    ]
    run = read_run(write_run(tmp_path / "run", 5, skips={3}, events=events), "run")
    assert report._time_line(run) == [
        (3, "skip", "non-finite gradient norm"),
        (2, "resume", "event=resume checkpoint=c"),
        (1, "warning", "<script>alert(1)</script>"),
        (5, "other", "event=new_kind more=1"),
    ]


@pytest.mark.parametrize("content", [None, ""])
def test_no_run_and_no_step(content, tmp_path, cli):
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    code, _, err = cli("report", tmp_path)
    if content is None:
        assert (code, "there is no metrics.jsonl" in err) == (2, True)
    elif report.can_draw():
        assert code == 0, err
        assert "No step has been taken yet" in (tmp_path / "report.html").read_text()


BROKEN = {
    "garbage": "hello",
    "a list": "[1]",
    "no step": '{"loss": 1}',
    "a step in words": '{"step": "a", "loss": 1}',
    "a loss in words": '{"step": 2, "loss": "x"}',
    "a validation loss in words": '{"step": 2, "eval_loss": "x"}',
    "no text": "\udcff",
    "too deep": "[" * 100_000,
    "too large": '{"step": 2, "loss": 1' + "0" * 400 + "}",
}


@pytest.mark.parametrize("line", BROKEN.values(), ids=BROKEN.keys())
def test_broken_lines_are_left_out_and_noted(line, tmp_path, cli):
    good = '{"step": 1, "loss": 2.0}\n{"step": 2, "loss": Infinity}\n'
    (tmp_path / "metrics.jsonl").write_bytes(f"{good}{line}\n{good}".encode("utf-8", "surrogateescape"))
    (tmp_path / "events.jsonl").write_text('{"event": "resume"}\n{"step": 1}\nx\n')
    run = read_run(tmp_path, "run")
    assert run.steps.tolist() == [1, 2, 1, 2]
    assert run.columns["loss"][0] == 2.0 and np.isnan(run.columns["loss"][1])
    assert run.events == []
    assert [note.partition(" is")[0] for note in run.notes] == [
        "metrics.jsonl line 3", "events.jsonl line 1", "events.jsonl line 2", "events.jsonl line 3",
    ]  # fmt: skip
    if report.can_draw():
        assert cli("report", tmp_path)[0] == 0
        assert "metrics.jsonl line 3 is left out" in (tmp_path / "report.html").read_text()


def test_broken_files_are_left_out_and_many_lines_are_counted(tmp_path, cli):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n' + "x\n" * 9)
    for name, text in (("plan.json", "["), ("config.resolved.yaml", "a: [")):
        (tmp_path / name).write_text(text)
    run = read_run(tmp_path, "run")
    assert (run.plan, run.config, len(run.notes)) == (None, None, 5 + 1 + 2)
    assert "metrics.jsonl: 4 more lines are left out" in run.notes
    if report.can_draw():
        assert cli("report", tmp_path)[0] == 0
        (tmp_path / "plan.json").write_text('{"steps": 3, "micro_batches": [1]}')
        assert cli("report", tmp_path, tmp_path, "-o", tmp_path / "x.html")[0] == 0


def test_without_bokeh_the_message_names_the_extra(tmp_path, monkeypatch):
    folder = write_run(tmp_path / "run", 3)
    monkeypatch.setattr(report, "can_draw", lambda: False)
    with pytest.raises(ConfigError, match="bokeh") as caught:
        write_report([folder], tmp_path / "x.html")
    assert "samestep[report]" in str(caught.value)


# ---- the page


@needs_bokeh
def test_one_hundred_thousand_steps_are_a_small_page_in_short_time(tmp_path):
    folder = write_run(tmp_path / "run", 100_000, skips={50_000}, spike=77_777)
    start = time.process_time()
    write_report([folder], tmp_path / "page.html")
    assert time.process_time() - start < 20
    assert (tmp_path / "page.html").stat().st_size < 3 * 10**6


@needs_bokeh
def test_a_run_writes_its_page_and_a_broken_page_ends_no_run(tiny, tmp_path, monkeypatch):
    import samestep.run.trainer as module

    Trainer(tiny("monitor.report=true", "evaluation.interval_steps=4")).train()
    page = (tmp_path / "run" / "report.html").read_text()
    assert "seq_length: 16" in page and "accumulation_steps" in page and "8 of 8" in page

    def broken(*_):
        raise RuntimeError("no ink")

    monkeypatch.setattr(module, "write_report", broken)
    config = tiny("monitor.report=true", f"output_dir={tmp_path / 'other'}")
    assert Trainer(config).train().step == 8


@needs_bokeh
def test_several_runs_and_names_are_text_not_markup(tiny, tmp_path, cli):
    folders = [write_run(tmp_path / name, 400, skips={7}, evaluate=50) for name in ("a&b", "<i>")]
    for folder, rate in zip(folders, ("1e-3", "2e-3"), strict=True):
        (folder / "config.resolved.yaml").write_text(dump(tiny(f"lr_scheduler.learning_rate={rate}")))
    code, _, err = cli("report", *folders)
    assert code == 2 and "-o FILE" in err
    code, _, err = cli("report", *folders, "-o", tmp_path / "both.html")
    assert code == 0, err
    page = (tmp_path / "both.html").read_text()
    assert "<i>" not in page.partition("<script")[0] and "a&amp;b" in page
    differing = page.partition("Where the configurations differ")[2].partition("</table>")[0]
    assert "lr_scheduler.learning_rate" in differing and differing.count("<tr>") == 2


def browse(page: Path, *options: str) -> str:
    assert CHROMIUM is not None
    words = [CHROMIUM, *QUIET, f"--user-data-dir={page.parent / 'browser'}", *options, page.as_uri()]
    return subprocess.run(words, capture_output=True, text=True, timeout=120, check=True).stdout


def pixels(picture: Path, color: str) -> int:
    """Pixels of a color."""
    from PIL import Image

    image = np.asarray(Image.open(picture).convert("RGB")).astype(int)
    wanted = [int(color[place : place + 2], 16) for place in (1, 3, 5)]
    return int((np.abs(image - wanted).sum(-1) < 40).sum())


@needs_bokeh
@needs_browser
@pytest.mark.parametrize("width", [1200, 390])
def test_a_browser_shows_the_curves_and_asks_nobody(width, tmp_path):
    folder = write_run(tmp_path / "run", 2000, skips={700}, spike=900, evaluate=100)
    page, log, picture = tmp_path / "page.html", tmp_path / "net.json", tmp_path / "page.png"
    write_report([folder], page)
    browse(page, f"--window-size={width},2200", f"--screenshot={picture}", f"--log-net-log={log}")
    assert pixels(picture, report.COLORS[0]) > 1000  # curves
    assert pixels(picture, report.COLORS[1]) > 50  # validation
    assert pixels(picture, "#c00000") > 20  # the skip
    asked = re.findall(r'"url":"https?://([^/:"]+)', log.read_text())
    makers = ("google.com", "googleapis.com")  # of the browser, whatever the page
    assert not [host for host in asked if not host.endswith(makers)]
    markup = re.sub(r"(?s)<script.*?</script>", "", page.read_text())
    assert "default-src 'none'" in markup and "http" not in markup.replace("http-equiv", "")


# ---- the first configuration


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_init_writes_a_file_that_trains(family, tmp_path, cli, monkeypatch, tiny):
    tiny()  # writes text.txt
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "first.yaml"
    code, out, err = cli("init", family, "-o", file)
    assert code == 0, err
    assert "samestep train" in out
    assert all(line.lstrip().startswith("#") or ":" in line or not line for line in file.read_text().splitlines())
    loaded = load(file, ["model.hidden_size=32", "model.num_hidden_layers=1", "model.seq_length=16",
                         "training.steps=2", "tokenizer.type=char", "monitor.report=false"])  # fmt: skip
    assert not loaded.warnings
    assert Trainer(loaded.config).train().step == 2


def test_init_refuses_to_overwrite_and_unknown_families(tmp_path, cli):
    file = tmp_path / "first.yaml"
    assert cli("init", "-o", file)[0] == 0
    before = file.read_text()
    code, _, err = cli("init", "-o", file)
    assert (code, "exists" in err, file.read_text()) == (2, True, before)
    code, _, err = cli("init", "nonsense", "-o", tmp_path / "x.yaml")
    assert (code, "llama" in err) == (2, True)
