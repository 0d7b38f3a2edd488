"""The command line: train, plan, verify, evaluate, generate, convert, report, schema, init."""

from __future__ import annotations

import json
import os
import shlex
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console

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
        _end(f"{kind}: {error}", error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        if debug:
            raise
        if isinstance(error, OSError) and error.filename is not None:
            _end(f"error: {error.filename}: {error.strerror}", 2)
        if isinstance(error, OSError) and error.errno is not None:
            _end(f"failed: {error.strerror}", 1)
        if not _is_launched():
            raise
        from samestep.parallel.mesh import is_lost_connection

        if is_lost_connection(error):
            detail = (str(error).splitlines() or [repr(error)])[0]
            _end(f"failed: another rank is gone (killed, out of memory?) or does not answer: {detail}", 1)
        _end(f"failed: {''.join(traceback.format_exception(error)).rstrip()}", 1)


def _is_launched() -> bool:
    """Whether this is one of several processes of a run."""
    return os.environ.get("WORLD_SIZE", "1") != "1"


def _end(message: str, exit_code: int) -> NoReturn:
    """Exit with a message. Of several ranks only the first that fails tells why: the others fail because of it."""
    if not _is_launched():
        print(message, file=sys.stderr)  # noqa: T201
    else:
        from samestep.parallel.mesh import is_first_to_fail

        if is_first_to_fail(message):
            print(f"rank {os.environ.get('RANK', '?')}: {message}", file=sys.stderr, flush=True)  # noqa: T201
    sys.exit(exit_code)


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
    """Train the model of CONFIG. Ctrl-C finishes the step and saves. Under torchrun this is one rank of the run."""
    if _is_launched() or "TORCHELASTIC_RESTART_COUNT" in os.environ:
        from samestep.parallel.mesh import join, restarts

        join()  # before anything that may fail, so that one rank can speak for all
        if restarts():
            resume = "auto"
    loaded = load(config, overrides or [])
    with _located(loaded):
        from samestep.run.trainer import Trainer

        trainer = Trainer(loaded.config, resume=resume, warnings=loaded.warnings)
        trainer.train()
    if _is_launched():
        from samestep.parallel.mesh import leave

        leave()
        if not trainer.mesh.is_first:
            return
    if trainer.is_stopped:
        words = ["samestep", "train", str(config), *(overrides or []), "--resume", "auto"]
        command = "the same torchrun command and --resume auto" if _is_launched() else shlex.join(words)
        output.print(f"stopped at step {trainer.state.step}; go on with: {command}", markup=False)
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
    layouts: Annotated[
        str | None, typer.Option(help='Such as "config ga=4 packed+oom=1 dp=2 fsdp=2+ga=3"; ranks are started here.')
    ] = None,
    grid: Annotated[bool, typer.Option("--grid", help="All of: ranks x micro-batches x packing x clipping.")] = False,
    cases: Annotated[str | None, typer.Option(help="Some of: even skewed one_rank_empty all_empty.")] = None,
    dtype: Annotated[
        str,
        typer.Option(
            metavar="config|float32|float64|bfloat16|float16", help="Replace every dtype; a narrow one, compute_dtype."
        ),
    ] = "config",
    steps: Annotated[int, typer.Option(min=1, help="Global batches to compare.")] = 1,
    as_json: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write the result here.")] = None,
    debug: Debug = False,
) -> None:
    """Prove that the split of the batch does not change the step. Exit code 1 where it does."""
    from samestep.verify import parity
    from samestep.verify.layouts import parse_cases, parse_layouts

    loaded = load(config, overrides or [])
    if dtype not in parity.DTYPES:
        raise ConfigError(f"{dtype!r} is no choice", field="--dtype", fix=f"write one of: {', '.join(parity.DTYPES)}")
    if grid and layouts is not None:
        raise ConfigError("the grid has its own layouts", field="--layouts", fix="write --grid or --layouts")
    chosen = parse_cases(cases) if cases is not None else parity.CASES
    with _located(loaded):
        if grid:
            report = parity.run_grid(loaded.config, cases=chosen, dtype=dtype, steps=steps)
        else:
            named = parse_layouts(layouts) if layouts is not None else None
            report = parity.run(loaded.config, layouts=named, cases=chosen, dtype=dtype, steps=steps)
    _show_parity(report)
    if as_json is not None:
        as_json.write_text(json.dumps({"passed": report.passed, **asdict(report)}, indent=1), encoding="utf-8")
    if not report.passed:
        raise typer.Exit(1)


def _show_parity(report: ParityReport) -> None:
    rows: list[tuple[str, ...]] = [("case", "layout", "clip", "gradient", "loss", "norm", "weights", "moments", "")]

    def cell(value: float | None) -> str:
        return "-" if value is None else f"{value:.1e}"

    for c in report.comparisons:
        numbers = [cell(value) for value in (c.gradient, c.loss, c.norm, c.weights, c.moments)]
        clip = "yes" if c.clipped else "no"
        rows.append((c.case, c.layout, clip, *numbers, "DIFFERS" if c.failures else "same"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:  # no table of rich, which cuts long names where nobody watches
        line = "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True))
        output.print(line.rstrip(), markup=False)
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
    from samestep.parallel.mesh import Mesh
    from samestep.plan import evaluation_rows
    from samestep.run.evaluate import evaluate as evaluate_rows
    from samestep.run.setup import open_run
    from samestep.step.objective import DecoderObjective

    opened = open_run(run, overrides or [])
    data = load_data(opened.config, opened.tokenizer)
    if data.evaluation is None:
        raise ConfigError(
            "the run has no validation data", field="eval_dataset.path", fix="write eval_dataset.path=FILE after RUN"
        )
    size = evaluation_rows(opened.config)
    objective = DecoderObjective(opened.config.training.z_loss_weight)
    exact = opened.config.training.exact
    loss, targets = evaluate_rows(opened.model, objective, data.evaluation, size, Mesh.alone(), exact=exact)
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
def convert(
    source: Annotated[
        Path,
        typer.Argument(metavar="RUN", help="Folder of a run or checkpoint; or a GGUF file, or a Hugging Face folder."),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write; it must be empty or not exist.")],
    to: Annotated[str, typer.Option("--to", metavar="hf", help="Form of the folder.")] = "hf",
    dtype: Annotated[
        str | None,
        typer.Option(metavar="float32|bfloat16|float16", help="Of the weights.", show_default="as they are stored"),
    ] = None,
    debug: Debug = False,
) -> None:
    """Write the weights of a run as a Hugging Face folder, which `transformers` and most others open."""
    from samestep.run.convert import convert as convert_weights

    if to != "hf":
        raise ConfigError(f"{to!r} is no choice", field="--to", fix="write hf")
    written = convert_weights(source, out, dtype)
    files = f"{written.files} file{'s' if written.files > 1 else ''}"
    output.print(
        f"wrote {written.folder}: {written.parameters:,} parameters in {written.dtype}, {files}, "
        f"{written.size / 2**20:.1f} MiB",
        markup=False,
    )
    for note in written.notes:
        output.print(f"note: {note}", markup=False)


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
