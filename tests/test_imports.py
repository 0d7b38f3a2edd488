"""A file imports only from rooms above it, private PyTorch is in one place, and heavy imports come late."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

from samestep.config.load import dump

PACKAGE = Path(__file__).parent.parent / "samestep"
ROOMS = (
    "errors",
    "launch",
    "torch_private",
    "config",
    "families",
    "recompute",
    "length",
    "dtypes",
    "pass_memory",
    "cost",
    "split",
    "plan",
    "ops",
    "data",
    "model",
    "parallel",
    "step",
    "run",
    "hf",
    "verify",
    "cli",
)
ORDER_INSIDE = {
    "config": (
        "kinds",
        "optimization",
        "training",
        "schema",
        "foreign",
        "fields",
        "huggingface",
        "pretrained",
        "load",
        "document",
        "template",
    ),
    "data": ("compressed", "segments", "sources", "tokenize", "rows", "order", "dataset", "batch"),
    "model": (
        "linear",
        "norm",
        "attention",
        "feed_forward",
        "blocks",
        "decoder",
        "activations",
        "init",
        "weights",
        "pretrained",
    ),
    "parallel": ("mesh", "data", "exact"),
    "step": (
        "objective",
        "recovery",
        "accumulate",
        "clip",
        "schedule",
        "optimizers",
        "trained",
        "update",
        "scaler",
        "step",
    ),
    "run": (
        "allocator",
        "storage",
        "checkpoint",
        "record",
        "loggers",
        "metrics",
        "monitor",
        "audit",
        "watch",
        "preflight",
        "profile",
        "progress",
        "report",
        "evaluate",
        "generate",
        "setup",
        "convert",
        "resume",
        "loop",
        "trainer",
    ),
    "ops": (
        "cpu_library",
        "first_order",
        "dispatch",
        "float8",
        "precision",
        "triton_kernels",
        "cpu_kernels",
        "norm",
        "activation",
        "rope",
        "dropout",
        "embedding",
        "rounding",
        "attention",
        "block",
        "cross_entropy",
        "exact_sum",
        "gradient_sink",
    ),
    "hf": (
        "arguments",
        "batch",
        "heads",
        "routing",
        "linear_head",
        "passes",
        "probes",
        "native",
        "lookup",
        "losses",
        "objectives",
        "autocast",
        "user_step",
        "callbacks",
        "data",
        "update",
        "layout",
        "checkpoint",
        "evaluate",
        "run",
        "trainer",
    ),
    "verify": ("layouts", "judge", "parity"),
}


@cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


@cache
def imported_modules(path: Path) -> set[str]:
    found = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


def files() -> list[Path]:
    return [path for path in sorted(PACKAGE.rglob("*.py")) if path != PACKAGE / "__init__.py"]


def test_every_file_is_in_a_known_room():
    for path in files():
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        assert parts[0] in ROOMS, path
        if len(parts) == 2 and parts[0] in ORDER_INSIDE and parts[1] != "__init__":
            assert parts[1] in ORDER_INSIDE[parts[0]], path


def test_imports_point_upward():
    wrong = []
    for path in files():
        own = path.relative_to(PACKAGE).with_suffix("").parts
        for module in imported_modules(path):
            parts = module.split(".")
            if parts[0] != "samestep" or len(parts) == 1:
                continue
            if ROOMS.index(parts[1]) > ROOMS.index(own[0]):
                wrong.append(f"{path} imports {module}")
            inside = ORDER_INSIDE.get(own[0])
            sibling = parts[1] == own[0] and inside and len(parts) > 2 and own[1] != "__init__"
            if sibling and inside.index(parts[2]) >= inside.index(own[1]):
                wrong.append(f"{path} imports {module}")
    assert not wrong


def test_private_torch_is_imported_in_one_file_only():
    private = [
        (path, module)
        for path in files()
        for module in imported_modules(path)
        if module.split(".")[0] == "torch" and any(part.startswith("_") for part in module.split("."))
    ]
    assert all(path.name == "torch_private.py" for path, _ in private), private


def test_private_torch_is_used_in_one_file_only():
    """`torch._name`, `torch.a._name` and `torch.ops`, wherever they stand."""
    found = []
    for path in files():
        for node in nodes(path):
            if not isinstance(node, ast.Attribute):
                continue
            name = ast.unparse(node)
            private = node.attr.startswith("_") and not node.attr.startswith("__")
            if name.startswith("torch.") and (private or name.startswith("torch.ops.")):
                found.append((path.name, name))
    assert {name for name, _ in found} == {"torch_private.py"}, found


def test_planning_needs_no_torch():
    code = (
        "import sys, samestep, samestep.cli, samestep.plan, samestep.data.dataset, samestep.run.progress;"
        "heavy = {'torch', 'transformers', 'datasets', 'tensorboard'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


_FIRST_STEP = """
import sys
from samestep.config.load import load
from samestep.run.trainer import Events, Trainer

class FirstStep(Events):
    def on_step_end(self, trainer, report):
        heavy = {"torch._dynamo", "torch.distributed.tensor", "torch.distributed.checkpoint", "sympy"}
        heavy &= set(sys.modules)
        assert trainer.audit.is_done and not heavy, heavy

Trainer(load(sys.argv[1]).config, listeners=[FirstStep()]).train()
"""


def test_the_first_step_of_one_process_waits_for_no_compiler_and_no_sharding(tiny, tmp_path):
    """Each takes a second or more to import, and much of PyTorch imports them in passing."""
    file = tmp_path / "run.yaml"
    file.write_text(
        dump(tiny("training.steps=1", "lr_scheduler.warmup_steps=0", "monitor.report=false")), encoding="utf-8"
    )
    subprocess.run([sys.executable, "-c", _FIRST_STEP, str(file)], check=True)
