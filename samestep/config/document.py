"""The reference page of the configuration: `python -m samestep.config.document > docs/config.md`."""

from __future__ import annotations

import sys
from typing import Any

from pydantic.fields import FieldInfo

from samestep.config.fields import FIELDS, describe, section_class, walk
from samestep.config.foreign import FOREIGN, UNAVAILABLE
from samestep.config.kinds import Section
from samestep.config.schema import Config

INTRODUCTION = """# Configuration

One YAML file (YAML 1.2: `1e-8` is a number) describes a run. Any field can be set on the command line as
`section.field=value`; the last one wins. Unknown fields are refused. Paths of data and tokenizer are relative to the
file, or to the current directory when given on the command line; `output_dir` is relative to the current directory.

This page is made from the schema by `python -m samestep.config.document > docs/config.md`.
"""


def markdown(config: type[Section]) -> str:
    """The whole page: a table for each section, then the fields that have no effect."""
    sections = [(name, inner) for name, info in walk(config) if (inner := section_class(info))]
    parts = [INTRODUCTION, _table("Top level", config, "")]
    parts += [_table(f"`{name}`", inner, f"{name}.") for name, inner in sections]
    return "\n".join([*parts, _unavailable(), _foreign()])


def _table(title: str, section: type[Section], prefix: str) -> str:
    rows = [_row(prefix, name, info) for name, info in section.model_fields.items() if section_class(info) is None]
    head = ["| field | values | default | meaning |", "|---|---|---|---|"]
    return "\n".join([f"## {title}", "", section.__doc__ or "", "", *head, *rows, ""])


def _row(prefix: str, name: str, info: FieldInfo) -> str:
    default = "required" if info.is_required() else f"`{literal(info.get_default())}`"
    meaning = " ".join((info.description or "").split())
    note = " *Only the default in this version.*" if prefix + name in UNAVAILABLE else ""
    return f"| `{name}` | {describe(info)} | {default} | {_cell(meaning)}{note} |"


def _cell(text: str) -> str:
    return text.replace("|", r"\|")


def literal(value: Any) -> str:
    """A value as YAML writes it on one line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(literal(item) for item in value)}]"
    return f'"{value}"' if isinstance(value, str) else str(value)


def _unavailable() -> str:
    text = """## Not in this version

These fields are known, but their effect does not exist yet; any value other than those listed is an error.
Fields marked with * are known from MindFormers files only and can be left out.

| field | accepted |
|---|---|
"""
    rows = [
        f"| `{field}`{'' if field in FIELDS else ' *'} | {', '.join(f'`{literal(value)}`' for value in values)} |"
        for field, values in UNAVAILABLE.items()
    ]
    return text + "\n".join(rows) + "\n"


def _foreign() -> str:
    text = """## Accepted and ignored

Fields of a MindFormers file that have no meaning here. They are named in one warning.

| field | why |
|---|---|
"""
    return text + "\n".join(f"| `{field}` | {_cell(reason)} |" for field, reason in FOREIGN.items()) + "\n"


if __name__ == "__main__":
    sys.stdout.write(markdown(Config))
