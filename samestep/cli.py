"""The command line: train, plan, verify, evaluate, generate, report, schema, init."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from samestep.config.load import Loaded, load
from samestep.errors import ConfigError, ConfigErrors, SamestepError

if TYPE_CHECKING:
    from samestep.verify.parity import ParityReport

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Train language models: the optimizer step is what you asked for, however the global batch is split.",
)
output = Console(soft_wrap=True, highlight=False)

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file.", show_default=False)]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[a.b=c ...]", help="Fields to set, such as training.steps=10.")
]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run, or of one of its checkpoints.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def main() -> None:
    """Entry point: a user's mistake ends in one message and exit code 2."""
    debug = "--debug" in sys.argv
    try:
        app()
    except SamestepError as error:
        if debug:
            raise
        kind = {1: "failed", 2: "error"}[error.exit_code]
        print(f"{kind}: {error}", file=sys.stderr)  # noqa: T201
        sys.exit(error.exit_code)
    except OSError as error:
        if debug or error.filename is None:
            raise
        print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)  # noqa: T201
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


@contextmanager
def _located(loaded: Loaded) -> Iterator[None]:
    """Give errors that name a field the file and line where the user wrote it."""
    try:
        yield
    except ConfigError as error:
        for one in error.errors if isinstance(error, ConfigErrors) else [error]:
            if one.where is None and one.field is not None and not one.field.startswith("-"):
                one.where = loaded.source.locate(one.field)
        raise


def _world_size() -> int:
    """Ranks started by a launcher. This version trains on one."""
    written = os.environ.get("WORLD_SIZE", "1")
    try:
        size = int(written)
    except ValueError:
        raise ConfigError(
            f"the environment variable WORLD_SIZE is {written!r}, which is no number of processes",
            fix="unset WORLD_SIZE, or write 1",
        ) from None
    if size != 1:
        raise ConfigError(f"WORLD_SIZE is {size}, but this version trains on one process", fix="start one process")
    return size


@app.command()
def train(
    config: ConfigPath,
    overrides: Overrides = None,
    resume: Annotated[
        str,
        typer.Option(
            metavar="auto|none|PATH",
            help="Go on from the newest checkpoint, begin anew, or from PATH: a checkpoint, or a run's newest one.",
        ),
    ] = "none",
    debug: Debug = False,
) -> None:
    """Train the model of CONFIG. Ctrl-C finishes the step and saves."""
    loaded = load(config, overrides or [])
    with _located(loaded):
        _world_size()
        from samestep.run.trainer import Trainer

        trainer = Trainer(loaded.config, resume=resume, warnings=loaded.warnings)
        trainer.train()
    if trainer.stop_signal is not None:
        words = ["samestep", "train", str(config), *(overrides or []), "--resume", "auto"]
        output.print(f"stopped at step {trainer.state.step}; go on with: {shlex.join(words)}", markup=False)
    else:
        output.print(f"done: {trainer.folder} at step {trainer.state.step}", markup=False)


@app.command()
def plan(
    config: ConfigPath,
    overrides: Overrides = None,
    world_size: Annotated[int, typer.Option(min=1, help="Number of ranks to plan for.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    debug: Debug = False,
) -> None:
    """Show what CONFIG means: micro-batches, tokens, parameters, FLOPs, memory."""
    from samestep.data.dataset import data_facts, load_data
    from samestep.plan import make_plan
    from samestep.run.progress import show_plan

    loaded = load(config, overrides or [])
    with _located(loaded):
        result = make_plan(loaded.config, world_size, data_facts(loaded.config, load_data(loaded.config)))
    if as_json:
        print(json.dumps(result.as_dict(), indent=1))  # noqa: T201
        return
    for warning in loaded.warnings:
        output.print(f"warning: {warning}", markup=False)
    show_plan(result, output)


@app.command()
def verify(
    config: ConfigPath,
    overrides: Overrides = None,
    layouts: Annotated[str | None, typer.Option(help='Such as "ga=1 ga=4 packed packed+ga=2".')] = None,
    cases: Annotated[str | None, typer.Option(help="Some of: even skewed one_rank_empty all_empty.")] = None,
    dtype: Annotated[str, typer.Option(metavar="config|float32|float64", help="Replace every dtype.")] = "config",
    steps: Annotated[int, typer.Option(min=1, help="Global batches to compare.")] = 1,
    as_json: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write the result here.")] = None,
    debug: Debug = False,
) -> None:
    """Prove that the split of the batch does not change the step. Exit code 1 where it does."""
    from samestep.verify import parity

    loaded = load(config, overrides or [])
    if dtype not in parity.DTYPES:
        raise ConfigError(f"{dtype!r} is no choice", field="--dtype", fix=f"write one of: {', '.join(parity.DTYPES)}")
    with _located(loaded):
        report = parity.run(
            loaded.config,
            layouts=parity.parse_layouts(layouts) if layouts is not None else None,
            cases=parity.parse_cases(cases) if cases is not None else parity.CASES,
            dtype=dtype,
            steps=steps,
        )
    _show_parity(report)
    if as_json is not None:
        as_json.write_text(json.dumps({"passed": report.passed, **asdict(report)}, indent=1), encoding="utf-8")
    if not report.passed:
        raise typer.Exit(1)


def _show_parity(report: ParityReport) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("case", "layout", "gradient", "loss", "norm", "weights", "moments", ""):
        table.add_column(heading)

    def cell(value: float | None) -> str:
        return "-" if value is None else f"{value:.1e}"

    for c in report.comparisons:
        numbers = [cell(value) for value in (c.gradient, c.loss, c.norm, c.weights, c.moments)]
        table.add_row(c.case, c.layout, *numbers, "DIFFERS" if c.failures else "same")
    output.print(table)
    for c in report.comparisons:
        for failure in c.failures:
            output.print(f"{c.case} {c.layout}: {failure}", markup=False)
    bad = sum(bool(c.failures) for c in report.comparisons)
    clipping = "clipping active" if report.clipped else "clipping inactive"
    verdict = f"FAILED: {bad} of {len(report.comparisons)} differ" if bad else f"PASSED: {len(report.comparisons)} same"
    output.print(f"{verdict} ({report.dtype}, {clipping})", markup=False)


@app.command()
def evaluate(run: RunFolder, overrides: Overrides = None, debug: Debug = False) -> None:
    """Validation loss of a run at its newest checkpoint."""
    from samestep.data.dataset import load_data
    from samestep.run.evaluate import evaluate as evaluate_rows
    from samestep.run.setup import open_run
    from samestep.step.objective import DecoderObjective

    opened = open_run(run, overrides or [])
    data = load_data(opened.config, opened.tokenizer)
    if data.evaluation is None:
        raise ConfigError(
            "the run has no validation data", field="eval_dataset.path", fix="write eval_dataset.path=FILE after RUN"
        )
    size = opened.config.evaluation.local_batch_size or opened.config.training.local_batch_size
    objective = DecoderObjective(opened.config.training.z_loss_weight)
    loss, targets = evaluate_rows(opened.model, objective, data.evaluation, size, opened.model.device)
    output.print(
        f"step {opened.step}  validation loss {loss:.6f}  targets {targets}  ({opened.checkpoint})", markup=False
    )


@app.command()
def generate(
    run: RunFolder,
    prompt: Annotated[str, typer.Option(help="Text to go on from.")],
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to write.")] = 200,
    temperature: Annotated[float, typer.Option(help="0 = greedy.")] = 1.0,
    top_k: Annotated[int | None, typer.Option(help="Sample among the K likeliest.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Sample among the likeliest that reach P together.")] = None,
    seed: Annotated[int, typer.Option(help="Of the sampling.")] = 0,
    debug: Debug = False,
) -> None:
    """Continue a text with the model of a run."""
    from samestep.run.generate import generate as generate_ids
    from samestep.run.setup import open_run

    opened = open_run(run)
    ids = opened.tokenizer.encode(prompt).tolist()
    new = generate_ids(
        opened.model,
        ids,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        end_id=opened.tokenizer.end_id,
        token_count=opened.tokenizer.vocab_size,
    )
    output.print(opened.tokenizer.decode([*ids, *new]), markup=False)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN [RUN ...]", help="Folders of runs.", show_default=False)],
    out: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="The page.", show_default="RUN/report.html")
    ] = None,
    debug: Debug = False,
) -> None:
    """Draw runs on one HTML page that needs no network: curves, skips, plan, configuration."""
    from samestep.run.report import REPORT_FILE, write_report

    if out is None and len(runs) > 1:
        raise ConfigError("several runs have no folder in common for the page", field="--output", fix="write -o FILE")
    path = out or runs[0] / REPORT_FILE
    write_report(runs, path)
    output.print(f"wrote {path} ({path.stat().st_size / 2**20:.1f} MiB)", markup=False)


@app.command()
def init(
    family: Annotated[str, typer.Argument(metavar="[FAMILY]", help="Family of the network.")] = "llama",
    out: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The file.")] = Path("samestep.yaml"),
    debug: Debug = False,
) -> None:
    """Write a commented configuration to begin with."""
    from samestep.config.template import DATA_FILE, template
    from samestep.families import FAMILIES

    if family not in FAMILIES:
        names = ", ".join(sorted(FAMILIES))
        raise ConfigError(f"{family!r} is not a known model type", field="FAMILY", fix=f"write one of: {names}")
    try:
        with out.open("x", encoding="utf-8") as file:
            file.write(template(family))
    except FileExistsError:
        raise ConfigError(f"{out} exists", field="--output", fix="name another file, or remove it") from None
    except OSError as error:
        raise ConfigError(f"cannot write {out}: {error.strerror}", field="--output", fix="name another file") from None
    output.print(f"wrote {out}; put your text into {out.parent / DATA_FILE}, then: samestep train {out}", markup=False)


@app.command()
def schema() -> None:
    """Print the JSON schema of the YAML file, for editors."""
    from samestep.config.schema import Config

    print(json.dumps(Config.model_json_schema(), indent=1))  # noqa: T201


if __name__ == "__main__":
    main()
