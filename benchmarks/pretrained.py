"""A pretrained model in samestep and in `transformers`: perplexity, fine-tuning, export.

python benchmarks/pretrained.py FOLDER [--steps N]

FOLDER is a Hugging Face folder, such as examples/models/smollm2 of examples/smollm2.sh. Everything is in float32.

perplexity   of the last tenth of the bundled text, rows of 512 tokens
fine-tuning  4 rows of 256 tokens a step; each side is a process of its own, and they take their steps by turns
export       the trained run as a folder again: logits, and greedy text after a prompt
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
TEXT = ROOT / "examples" / "data" / "shakespeare_quickstart.txt"
WINDOW, WINDOWS = 512, 12
ROWS, LENGTH = 4, 256
RATE = 1e-4
PROMPT = "CORIOLANUS:\nWhat is the matter, you dissentious rogues,"
NEW_TOKENS = 60


def say(text: str) -> None:
    print(text, flush=True)  # noqa: T201


def config_of(folder: Path, output: Path, steps: int, length: int) -> dict[str, Any]:
    return {
        "output_dir": str(output),
        "training": {"steps": steps, "global_batch_size": ROWS, "local_batch_size": ROWS, "max_norm": 1.0},
        "optimizer": {"type": "AdamW", "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0},
        "lr_scheduler": {"type": "constant", "learning_rate": RATE},
        "train_dataset": {"path": str(TEXT), "rows": "cut", "split": "tail", "eval_fraction": 0.1},
        "evaluation": {"interval_steps": 10**6},
        "model": {"pretrained": str(folder), "seq_length": length, "compute_dtype": "float32"},
        "monitor": {"report": False, "tensorboard": {"enable": False}},
    }


# ---- perplexity


def perplexities(folder: Path) -> None:
    import torch
    import torch.nn.functional as F
    import transformers

    from samestep.config.load import from_dict
    from samestep.data.batch import collate
    from samestep.data.dataset import load_data
    from samestep.parallel.mesh import Mesh
    from samestep.run.setup import build_model

    config = from_dict(config_of(folder, Path("none"), 1, WINDOW)).config
    data = load_data(config)
    assert data.evaluation is not None
    rows = [data.evaluation[i] for i in range(min(WINDOWS, len(data.evaluation)))]
    own = build_model(config, data.tokenizer.vocab_size, Mesh.alone()).eval()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    sums = {"samestep": 0.0, "transformers": 0.0}
    count, largest = 0, 0.0
    with torch.no_grad():
        for row in rows:
            labels = torch.tensor(row.labels)
            batch = collate([row], [0], "padded")
            logits = own.loss_head.logits(own(batch).hidden)[0]
            truth = theirs(torch.tensor(row.input_ids[None]), use_cache=False).logits[0]
            largest = max(largest, float((logits - truth).abs().max()))
            for name, values in (("samestep", logits), ("transformers", truth)):
                sums[name] += float(F.cross_entropy(values.double(), labels, reduction="sum"))
            count += len(labels)
    first, second = (math.exp(total / count) for total in sums.values())
    say(f"perplexity   {count} targets: samestep {first:.5f}, transformers {second:.5f}, "
        f"relative difference {abs(first / second - 1):.1e}; logits differ by at most {largest:.1e}")  # fmt: skip


# ---- fine-tuning


class Turns:
    """Of a side: tells the parent of each step, with its loss, and waits to be sent into the next."""

    def __init__(self, replies: int):
        self._replies = os.fdopen(replies, "w")
        self._began = time.perf_counter()

    def wait(self) -> None:
        sys.stdin.readline()
        self._began = time.perf_counter()

    def end(self, loss: float) -> None:
        print(json.dumps([loss, time.perf_counter() - self._began]), file=self._replies, flush=True)


def run_samestep(settings: dict[str, Any], turns: Turns) -> None:
    from samestep.config.load import from_dict
    from samestep.run.trainer import Events, Trainer

    class Listener(Events):
        def on_step_begin(self, trainer: Trainer) -> None:
            turns.wait()

        def on_step_end(self, trainer: Trainer, report: Any) -> None:
            turns.end(float(report.loss))

    Trainer(from_dict(settings["config"]).config, listeners=[Listener()]).train()


def run_transformers(settings: dict[str, Any], turns: Turns) -> None:
    import torch
    import transformers

    rows = [{key: torch.tensor(value) for key, value in row.items()} for row in json.loads(settings["rows"])]
    model = transformers.AutoModelForCausalLM.from_pretrained(settings["folder"], dtype=torch.float32)

    class Listener(transformers.TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            turns.wait()

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if "loss" in logs:
                turns.end(float(logs["loss"]))

    arguments = transformers.TrainingArguments(
        output_dir=settings["output"],
        per_device_train_batch_size=ROWS,
        max_steps=settings["config"]["training"]["steps"],
        learning_rate=RATE,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        weight_decay=0.0,
        train_sampling_strategy="sequential",
        save_strategy="no",
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    transformers.Trainer(model, arguments, train_dataset=rows, callbacks=[Listener()]).train()


SIDES = {"samestep": run_samestep, "transformers": run_transformers}


class Side:
    """A process that takes a step when it is told to."""

    def __init__(self, name: str, settings: dict[str, Any]):
        reader, writer = os.pipe()
        command = [sys.executable, __file__, "--side", name, str(writer)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, pass_fds=(writer,), text=True
        )
        os.close(writer)
        self._replies = os.fdopen(reader)
        self._send(json.dumps(settings))

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def step(self) -> tuple[float, float]:
        """Loss and seconds."""
        self._send("")
        line = self._replies.readline()
        if not line:
            raise SystemExit(f"a side ended with {self._process.wait()}")
        loss, seconds = json.loads(line)
        return loss, seconds

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def fine_tune(folder: Path, output: Path, steps: int) -> None:
    from trainers import rows_in_order

    from samestep.config.load import from_dict
    from samestep.data.dataset import load_data

    config = config_of(folder, output, steps, LENGTH)
    parsed = from_dict(config).config
    rows = json.dumps(rows_in_order(parsed, load_data(parsed), steps))
    settings = {"config": config, "folder": str(folder), "rows": rows, "output": str(output) + "-transformers"}
    sides = {name: Side(name, settings) for name in SIDES}
    losses: dict[str, list[float]] = {name: [] for name in sides}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for step in range(1, steps + 1):
        for name, side in sides.items():
            loss, took = side.step()
            losses[name].append(loss)
            seconds[name].append(took)
        say(f"step {step}: " + ", ".join(f"{n} {losses[n][-1]:.6f} in {seconds[n][-1]:.2f} s" for n in sides))
    for side in sides.values():
        side.close()
    differences = [abs(a / b - 1) for a, b in zip(*losses.values(), strict=True)]
    ratios = [b / a for a, b in zip(*(taken[2:] for taken in seconds.values()), strict=True)]
    own, theirs = (statistics.median(taken[2:]) for taken in seconds.values())
    say(f"fine-tuning  {steps} steps of {ROWS} x {LENGTH} tokens: losses {losses['samestep'][0]:.4f} -> "
        f"{losses['samestep'][-1]:.4f}, relative difference at most {max(differences):.1e}; a step takes "
        f"{own:.2f} s, transformers {theirs:.2f} s: x{statistics.median(ratios):.3f}")  # fmt: skip


# ---- export


def export(run: Path, out: Path) -> None:
    import torch
    import transformers

    from samestep.model.attention import KeyValueCache
    from samestep.run.convert import convert
    from samestep.run.generate import generate
    from samestep.run.setup import open_run

    began = time.perf_counter()
    convert(run, out)
    took = time.perf_counter() - began
    opened = open_run(run)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    ids = opened.tokenizer.encode(PROMPT).tolist()
    assert tokenizer(PROMPT)["input_ids"] == ids
    with torch.no_grad():
        got = opened.model.eval().decode(torch.tensor([ids]), KeyValueCache())[0]
        truth = theirs(torch.tensor([ids])).logits[0, -1]
    text = list(generate(opened.model, ids, max_new_tokens=NEW_TOKENS, temperature=0))
    settings = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False}
    written = theirs.generate(torch.tensor([ids]), pad_token_id=0, **settings)[0, len(ids) :].tolist()
    same = next((i for i, (a, b) in enumerate(zip(text, written, strict=False)) if a != b), len(text))
    say(f"export       {took:.1f} s; logits differ by at most {float((got - truth).abs().max()):.1e}; "
        f"{same} of {len(text)} greedy tokens are the same")  # fmt: skip


def main() -> None:
    if sys.argv[1:2] == ["--side"]:
        name, replies = sys.argv[2:4]
        SIDES[name](json.loads(sys.stdin.readline()), Turns(int(replies)))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as text:
        place = Path(text)
        perplexities(arguments.folder)
        fine_tune(arguments.folder.absolute(), place / "run", arguments.steps)
        export(place / "run", place / "out")


if __name__ == "__main__":
    main()
