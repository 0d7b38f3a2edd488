"""Whole runs against `transformers.Trainer`: the same model, data, update and threads, interleaved on a CPU.

Each side is a process of its own that takes a step or a few at a time, by turns with the others, so that whatever else
the machine does falls on all of them. First every side takes one step alone, and its gradient is compared with
samestep's: a speed-up with another update does not count. (Before clipping: PyTorch's float32 norm of a large
parameter is off by up to 1e-3, which would hide everything else.) Then come the times: medians, and medians of the
ratios of steps of the same round. Memory is the peak of the process's resident set.

python benchmarks/trainers.py [CASE ...] [--rounds N]

fixed         pretraining, rows of one length, vocabulary of 32,000; also against the matrix products alone
bfloat16      the same in bfloat16, the Hugging Face Trainer with `bf16=True`; they round at other places, so gradients
              need to agree to 2 % only
chat          rows of natural length, only the assistant's turns are targets, vocabulary of 32,000
vocabulary    vocabulary of 128,000, micro-batches of 4,096 tokens, few of them targets
start         time from the start of the process to the end of its first step
tiny          the model of examples/quickstart.yaml
trainers      chat rows again, in one script for three Trainers: that of samestep.hf with and without `native=True`, and
              the plain one
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
DATA = ROOT / "examples" / "data"
STARTS = 5


@dataclass(frozen=True)
class Case:
    """What all sides of a comparison train.

    Attributes:
        config: of samestep; the others have its first weights, rows, order and micro-batches.
        sides: names; see `SIDES`.
        turn: steps that a side takes at a time. One of a few milliseconds would mostly load the caches again.
        changes: of the config, by side.
        tolerance: most that gradients may differ by.
    """

    config: dict[str, Any]
    sides: tuple[str, ...] = ("samestep", "transformers")
    rounds: int = 12
    turn: int = 1
    changes: dict[str, dict[str, Any]] = field(default_factory=dict)
    tolerance: float = 1e-5


def llama(hidden: int, layers: int, heads: int, inner: int, vocabulary: int, length: int) -> dict[str, Any]:
    """A model section."""
    return {
        "model_type": "llama",
        "seq_length": length,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "vocab_size": vocabulary,
        "tie_word_embeddings": True,
        "compute_dtype": "float32",
    }


def base(model: dict[str, Any], samples: int, micro: int, data: dict[str, Any], tokenizer: int) -> dict[str, Any]:
    return {
        "tokenizer": {"type": "bpe", "vocab_size": tokenizer},
        "training": {"steps": 1000, "global_batch_size": samples, "local_batch_size": micro, "max_norm": 1.0},
        "lr_scheduler": {"type": "constant", "learning_rate": 1e-4},
        "train_dataset": data,
        "model": model,
        "checkpoint": {"enable_save": False},
    }


PLAYS = {"path": str(DATA / "shakespeare_quickstart.txt"), "rows": "cut"}
CHATS = {
    "path": str(DATA / "chitchat_120.jsonl"),
    "rows": "documents",
    "targets": "assistant",
    "long_documents": "truncate",
}


def cases() -> dict[str, Case]:
    small = llama(512, 6, 8, 1376, 32_000, 512)
    fixed = base(small, 4, 2, PLAYS, 4096)
    chat = base(small | {"seq_length": 2048}, 16, 4, CHATS, 4096)
    few = base(llama(512, 2, 8, 1376, 128_000, 1024), 4, 4, {}, 4096)
    by_budget = {"local_batch_size": None, "local_batch_tokens": 4096}
    tiny = llama(128, 4, 4, 344, 82, 64)
    return {
        "fixed": Case(
            fixed, ("samestep", "samestep compiled", "transformers", "transformers compiled", *FLOORS), rounds=6
        ),
        "bfloat16": Case(
            base(small | {"compute_dtype": "bfloat16"}, 4, 2, PLAYS, 4096),
            ("samestep", "samestep compiled", "transformers", "transformers compiled"),
            rounds=6,
            tolerance=2e-2,
        ),
        "chat": Case(
            chat,
            ("samestep", "samestep padded", "transformers"),
            rounds=6,
            changes={side: {"training": by_budget} for side in ("samestep", "samestep padded")},
        ),
        "vocabulary": Case(few, rounds=5),
        "start": Case(base(tiny, 12, 12, PLAYS, 512) | {"tokenizer": {"type": "char"}}),
        "tiny": Case(
            base(tiny, 12, 12, PLAYS, 512) | {"tokenizer": {"type": "char"}},
            ("samestep", "samestep compiled", "transformers", *FLOORS),
            rounds=15,
            turn=20,
        ),
        "trainers": Case(chat, ("samestep.hf native", "samestep.hf", "transformers"), rounds=6),
    }


CHANGES: dict[str, dict[str, Any]] = {
    "samestep compiled": {"compile": True},
    "samestep padded": {"training": {"micro_batch": "padded"}},
}


FLOORS = ("products", "products, attention")
"""What no trainer can do without."""


def few_targets(folder: Path) -> dict[str, Any]:
    """Long prompts with short answers, a tenth of the tokens."""
    path = folder / "answers.jsonl"
    text = (DATA / "shakespeare_quickstart.txt").read_text(encoding="utf-8")
    pieces = [text[start : start + 3300] for start in range(0, len(text) - 3300, 3300)]
    rows = [{"prompt": piece[:3000], "completion": piece[3000:]} for piece in pieces]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return {"path": str(path), "rows": "documents", "targets": "assistant", "long_documents": "truncate"}


# ---- a side, in its own process


class Gate:
    """Tells the parent of the first step, then of every turn that ended, and waits to be sent into the next."""

    def __init__(self, replies: int, last: int, turn: int):
        self._replies, self._last, self._turn = os.fdopen(replies, "w"), last, turn
        self._step = self._targets = 0
        self._begin()

    def _begin(self) -> None:
        self._began, self._began_cpu = time.perf_counter(), time.process_time()

    def pass_(self, targets: int) -> bool:
        """A step has ended, which is the interval since the last time; False after the last one."""
        self._step += 1
        self._targets += targets
        if (self._step - 1) % self._turn:
            return True
        steps = self._turn if self._step > 1 else 1
        took = time.perf_counter() - self._began, time.process_time() - self._began_cpu, self._targets
        reply = dict(zip(("seconds", "cpu", "targets"), (total / steps for total in took), strict=True))
        print(json.dumps(reply | {"peak": peak()}), file=self._replies, flush=True)
        if self._step == self._last:
            return False
        sys.stdin.readline()
        self._targets = 0
        self._begin()
        return True


def peak() -> int:
    """Bytes of the largest resident set so far; needs Linux."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def merged(config: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    parts = {key: config.get(key, {}) | value if isinstance(value, dict) else value for key, value in change.items()}
    return config | parts


def run_samestep(config: dict[str, Any], gate: Gate, gradients_to: Path | None) -> None:
    from safetensors.torch import save_file

    from samestep.config.load import from_dict
    from samestep.model.weights import to_hf
    from samestep.run.trainer import Events, Trainer

    class Turns(Events):
        def on_step_end(self, trainer: Trainer, report: Any) -> None:
            self.should_stop = not gate.pass_(report.targets)

    class Gradients(Events):
        def on_gradients(self, trainer: Trainer, gradients: Any) -> None:
            save_file(to_hf(gradients, trainer.model.spec), gradients_to)

    listeners = [Turns(), *([Gradients()] if gradients_to is not None else [])]
    Trainer(from_dict(config).config, listeners=listeners).train()


def run_transformers(
    config: dict[str, Any], gate: Gate, gradients_to: Path | None, compiled: bool = False, native: bool | None = None
) -> None:
    """The rows, first weights and order of samestep, made beforehand by `prepare`. With `native` it is samestep's
    Trainer that trains."""
    import torch
    import transformers
    from safetensors.torch import save_file

    folder = Path(config["prepared"])
    rows = torch.load(folder / "rows.pt")
    training, optimizer = config["training"], config["lr_scheduler"]
    model = transformers.LlamaForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)

    class Turns(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if gradients_to is not None:
                save_file({name: p.grad for name, p in model.named_parameters()}, gradients_to)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            first = (state.global_step - 1) * training["global_batch_size"]
            step = rows[first : first + training["global_batch_size"]]
            targets = sum(sum(label >= 0 for label in row["labels"][1:]) for row in step)
            if not gate.pass_(targets):
                control.should_training_stop = True

    def collate(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """What `DataCollatorForSeq2Seq` does: pads to the longest."""
        width = max(len(sample["input_ids"]) for sample in samples)

        def padded(name: str, fill: int) -> torch.Tensor:
            return torch.tensor([sample[name] + [fill] * (width - len(sample[name])) for sample in samples])

        mask = [[1] * len(s["input_ids"]) + [0] * (width - len(s["input_ids"])) for s in samples]
        return {
            "input_ids": padded("input_ids", 0),
            "labels": padded("labels", -100),
            "attention_mask": torch.tensor(mask),
        }

    arguments = transformers.TrainingArguments(
        output_dir=str(folder / "out"),
        per_device_train_batch_size=training["local_batch_size"],
        gradient_accumulation_steps=training["global_batch_size"] // training["local_batch_size"],
        max_steps=training["steps"],
        learning_rate=optimizer["learning_rate"],
        lr_scheduler_type="constant",
        max_grad_norm=training["max_norm"],
        weight_decay=0.0,
        train_sampling_strategy="sequential",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        torch_compile=compiled,
        bf16=config["model"]["compute_dtype"] == "bfloat16",
        use_cpu=True,
    )
    parts: dict[str, Any] = {"train_dataset": rows, "data_collator": collate, "callbacks": [Turns()]}
    if native is None:
        transformers.Trainer(model, arguments, **parts).train()
    else:
        from samestep.hf import Trainer

        Trainer(model, arguments, native=native, **parts).train()


def rows_in_order(settings: Any, data: Any, steps: int) -> list[dict[str, list[int]]]:
    """The rows of all steps in samestep's order, as `transformers` takes them: it shifts by itself, so they have one
    token more than samestep's."""
    from samestep.data.dataset import make_order

    order, consumed, rows = make_order(settings, data), 0, []
    for _ in range(steps):
        samples = order.next(consumed)
        consumed = samples.consumed
        for row in samples.rows:
            sample = data.train[int(row)]
            tokens = [*sample.input_ids.tolist(), max(int(sample.labels[-1]), 0)]
            rows.append({"input_ids": tokens, "labels": [-100, *sample.labels.tolist()]})
    return rows


def prepare(config: dict[str, Any], folder: Path, steps: int) -> None:
    """Write what `transformers` needs: the first weights in its format, and the rows in the order of the steps."""
    import torch
    import transformers

    from samestep.config.load import from_dict
    from samestep.data.dataset import load_data
    from samestep.model.weights import to_hf
    from samestep.parallel.mesh import Mesh
    from samestep.run.setup import build_model

    settings = from_dict(config).config
    data = load_data(settings)
    torch.save(rows_in_order(settings, data, steps), folder / "rows.pt")
    model, fields = build_model(settings, data.tokenizer.vocab_size, Mesh.alone()), settings.model
    config_hf = transformers.LlamaConfig(
        vocab_size=model.spec.vocab_size,
        hidden_size=model.spec.hidden_size,
        intermediate_size=model.spec.intermediate_size,
        num_hidden_layers=model.spec.num_layers,
        num_attention_heads=model.spec.num_heads,
        num_key_value_heads=model.spec.num_kv_heads,
        max_position_embeddings=max(fields.seq_length, 2048),
        rms_norm_eps=model.spec.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": model.spec.rope_theta},
        tie_word_embeddings=model.spec.tied,
        use_cache=False,
    )
    twin = transformers.LlamaForCausalLM(config_hf)
    twin.load_state_dict(to_hf(dict(model.named_parameters()), model.spec), strict=False)
    twin.save_pretrained(folder / "model")


def run_products(config: dict[str, Any], gate: Gate, attention: bool) -> None:
    """The matrix products of a step and nothing else: three for each linear map and for the head. Those of attention
    are left out, or done by PyTorch's fused kernel."""
    import torch
    import torch.nn.functional as F

    model, training = config["model"], config["training"]
    hidden, inner = model["hidden_size"], model["intermediate_size"]
    tokens = training["local_batch_size"] * model["seq_length"]
    shapes = [(hidden, hidden)] * 4 + [(hidden, inner)] * 2 + [(inner, hidden)]
    layers = [[torch.randn(a, b) for a, b in shapes] for _ in range(model["num_hidden_layers"])]
    weights = [w for layer in layers for w in layer] + [torch.randn(hidden, model["vocab_size"])]
    inputs = {a: torch.randn(tokens, a) for a in {w.shape[0] for w in weights}}
    outputs = {b: torch.randn(tokens, b) for b in {w.shape[1] for w in weights}}
    sums = {shape: torch.zeros(shape) for shape in {tuple(w.shape) for w in weights}}
    count = training["global_batch_size"] // training["local_batch_size"]
    heads = model["num_attention_heads"]
    shape = (training["local_batch_size"], heads, model["seq_length"], hidden // heads)
    qkv = [torch.randn(shape, requires_grad=True) for _ in range(3)]
    ones = torch.ones(shape)
    while True:
        for _ in range(count):
            for _ in layers if attention else ():
                torch.autograd.grad(F.scaled_dot_product_attention(*qkv, is_causal=True), qkv, ones)
            for weight in weights:
                x, y = inputs[weight.shape[0]], outputs[weight.shape[1]]
                torch.mm(x, weight, out=outputs[weight.shape[1]])
                torch.mm(y, weight.t(), out=inputs[weight.shape[0]])
                torch.mm(x.t(), y, out=sums[tuple(weight.shape)])
                for part in (x, y):
                    part.fill_(1.0)  # the products must not grow out of range
        if not gate.pass_(0):
            return


SIDES: dict[str, Callable[[dict[str, Any], Gate, Path | None], None]] = {
    "samestep": run_samestep,
    "samestep compiled": run_samestep,
    "transformers": lambda config, gate, path: run_transformers(config, gate, path, compiled=False),
    "transformers compiled": lambda config, gate, path: run_transformers(config, gate, path, compiled=True),
    "samestep padded": run_samestep,
    "samestep.hf": lambda config, gate, path: run_transformers(config, gate, path, native=False),
    "samestep.hf native": lambda config, gate, path: run_transformers(config, gate, path, native=True),
    "products": lambda config, gate, path: run_products(config, gate, attention=False),
    "products, attention": lambda config, gate, path: run_products(config, gate, attention=True),
}


# ---- the parent


class Side:
    """A process that waits between its steps."""

    def __init__(self, name: str, config: dict[str, Any], turns: int, turn: int = 1, gradients_to: Path | None = None):
        reader, writer = os.pipe()
        numbers = map(str, (writer, turns * turn + 1, turn))
        command = [sys.executable, __file__, "--side", name, *numbers, str(gradients_to or "")]
        self.started = time.perf_counter()
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, pass_fds=(writer,), text=True
        )
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(config) + "\n")
        self.process.stdin.flush()
        os.close(writer)
        self.replies = os.fdopen(reader)

    def turn(self, first: bool = False) -> dict[str, float]:
        """Seconds, processor time and targets of a step of the next turn, and the peak of memory; the first turn is
        one step, which begins by itself."""
        if not first:
            assert self.process.stdin is not None
            self.process.stdin.write("\n")
            self.process.stdin.flush()
        line = self.replies.readline()
        if not line:
            raise SystemExit(f"a side ended with {self.process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def configs(case: Case, folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for index, side in enumerate(case.sides):
        config = merged(merged(case.config, CHANGES.get(side, {})), case.changes.get(side, {}))
        yield side, config | {"output_dir": str(folder / f"run{index}")}


def compare(name: str, case: Case, rounds: int) -> None:
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        if not case.config["train_dataset"]:
            case.config["train_dataset"] = few_targets(folder)
        prepare(case.config | {"output_dir": str(folder / "none")}, folder, 1 + case.turn * (rounds + 1))
        settings = dict(configs(case, folder))
        for side, config in settings.items():
            if side.startswith(("transformers", "samestep.hf")):
                config["prepared"] = str(folder)
        check_updates(name, settings, folder, case.tolerance)
        for side in settings:
            settings[side]["output_dir"] += "-timed"
        if name == "start":
            time_starts(name, settings)
        else:
            time_turns(name, settings, rounds, case.turn)


def check_updates(name: str, settings: dict[str, dict[str, Any]], folder: Path, tolerance: float) -> None:
    """Each side's gradient of the first step against that of the first side."""
    from safetensors.torch import load_file

    truth = None
    for side, config in settings.items():
        if side in FLOORS:
            continue
        path = folder / "gradients.safetensors"
        unclipped = merged(config, {"training": {"max_norm": 1e9}})
        process = Side(side, unclipped, 0, gradients_to=path)
        process.turn(first=True)
        process.close()
        gradients = load_file(path)
        if truth is None:
            truth = gradients
            continue
        assert set(truth) == set(gradients)
        squares = sum((truth[key] - gradients[key]).double().square().sum() for key in truth)
        error = float((squares / sum(value.double().square().sum() for value in truth.values())).sqrt())
        print(f"{name}: gradient of {side} differs by {error:.1e} (relative)", flush=True)  # noqa: T201
        if error > tolerance:
            raise SystemExit("that is another update: no comparison")


def time_turns(name: str, settings: dict[str, dict[str, Any]], rounds: int, turn: int) -> None:
    sides = {side: Side(side, config, rounds + 1, turn) for side, config in settings.items()}
    for process in sides.values():
        process.turn(first=True)
    for process in sides.values():
        process.turn()  # the second step is still slower: memory is set aside, kernels are compiled for more shapes
    results: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    for _ in range(rounds):
        for side, process in sides.items():
            results[side].append(process.turn())
    for process in sides.values():
        process.close()
    first = next(iter(results.values()))
    for side, steps in results.items():
        wall, processor = (
            statistics.median(own[key] / other[key] for own, other in zip(steps, first, strict=True))
            for key in ("seconds", "cpu")
        )
        seconds = [step["seconds"] for step in steps]
        rate = sum(step["targets"] for step in steps) / sum(seconds)
        peaks = steps[-1]["peak"], steps[-1]["peak"] / first[-1]["peak"]
        print(  # noqa: T201
            f"{name:<13} {side:<22} {1e3 * statistics.median(seconds):9.1f} ms  x{wall:.3f}  (processor time "
            f"x{processor:.3f})  {rate:8.0f} targets/s  peak {peaks[0] / 2**20:7.0f} MiB  x{peaks[1]:.2f}",
            flush=True,
        )


def time_starts(name: str, settings: dict[str, dict[str, Any]]) -> None:
    seconds: dict[str, list[float]] = {side: [] for side in settings}
    for round_ in range(STARTS + 1):
        for side, config in settings.items():
            process = Side(side, config | {"output_dir": f"{config['output_dir']}-{round_}"}, 0)
            process.turn(first=True)
            if round_:  # the first one reads files into the page cache
                seconds[side].append(time.perf_counter() - process.started)
            process.close()
    for side, values in seconds.items():
        ratios = [a / b for a, b in zip(values, seconds["samestep"], strict=True)]
        print(f"{name:<13} {side:<22} {statistics.median(values):6.2f} s  x{statistics.median(ratios):.3f}")  # noqa: T201


def main() -> None:
    if sys.argv[1:2] == ["--side"]:
        name, replies, last, turn, path = sys.argv[2:7]
        config = json.loads(sys.stdin.readline())
        SIDES[name](config, Gate(int(replies), int(last), int(turn)), Path(path) if path else None)
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = cases()
    parser.add_argument("cases", nargs="*", choices=[*known, []], default=[])
    parser.add_argument("--rounds", type=int)
    arguments = parser.parse_args()
    for name in arguments.cases or known:
        compare(name, known[name], arguments.rounds or known[name].rounds)


if __name__ == "__main__":
    main()
