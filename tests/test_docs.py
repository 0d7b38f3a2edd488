"""Every command of the README and the documentation runs, in order, and ends as the document shows."""

import re
import shlex
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SHORT = ["training.steps=4", "lr_scheduler.warmup_steps=1", "monitor.report=false"]
"""Given to every `train`, whose documented run takes minutes; an override in the document wins. The page that each of
them would write has tests of its own, and `samestep report` is among the commands."""


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def commands(page: Path) -> list[tuple[list[str], int]]:
    """(words, expected exit code) of each `$ samestep ...` line; what follows it in its block is its output."""
    found = []
    for block in blocks(page, "console"):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            line, _, shown = part.partition("\n")
            if line.startswith("samestep "):
                code = 2 if re.search(r"^error: ", shown, re.MULTILINE) else 1 if "\nFAILED" in shown else 0
                found.append((shlex.split(line)[1:], code))
    return found


@pytest.fixture
def project(tmp_path, monkeypatch):
    """The examples beside an empty folder for runs, with a tenth of the text."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("models"))
    text = tmp_path / "examples" / "data" / "shakespeare_quickstart.txt"
    text.write_text(text.read_text(encoding="utf-8")[:60_000], encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=lambda page: page.name)
def test_commands_run(page, project, cli):
    for words, wanted in commands(page):
        if words[0] == "train":
            words = [*words[:2], *SHORT, *words[2:]]
        code, out, err = cli(*words)
        assert code == wanted, (words, out, err)


def test_python_of_the_quick_start_runs(project, cli):
    (code,) = blocks(ROOT / "docs" / "quick_start.md", "python")
    assert cli("init", "llama", "-o", "my.yaml")[0] == 0
    shutil.copy(project / "examples" / "data" / "shakespeare_quickstart.txt", project / "text.txt")
    exec(compile(code.replace("training.steps=200", "training.steps=2"), "quick_start.md", "exec"), {})
    assert (project / "runs" / "first" / "checkpoints" / "step-00000002").is_dir()


def test_the_readme_begins_with_two_commands():
    first, second = blocks(ROOT / "README.md", "bash")[:2]
    assert "pip install" in first
    assert "samestep train examples/quickstart.yaml" in first
    assert "pip install" in second
    assert second.strip().endswith("pytest")


def test_links_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), (page, target)
