"""Looking at the schema: its fields by dotted name, and what values they take, in words."""

from __future__ import annotations

from collections.abc import Iterator
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MaxLen
from pydantic.fields import FieldInfo

from samestep.config.kinds import ALIASES, Section
from samestep.config.schema import Config


def section_class(info: FieldInfo) -> type[Section] | None:
    """The section that a field holds, or None for a plain value."""
    annotation = info.annotation
    return annotation if isinstance(annotation, type) and issubclass(annotation, Section) else None


def walk(section: type[Section], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every dotted field below a section, sections themselves included."""
    for name, info in section.model_fields.items():
        yield prefix + name, info
        if inner := section_class(info):
            yield from walk(inner, f"{prefix}{name}.")


FIELDS: dict[str, FieldInfo] = dict(walk(Config))
"""Dotted field or section -> its description."""


def field_homes(name: str) -> list[str]:
    """Sections that have a field of this name (`""` is the top level)."""
    return [field.rpartition(".")[0] for field in (*FIELDS, *ALIASES) if field.rpartition(".")[2] == name]


def describe(info: FieldInfo) -> str:
    """The values a field takes, in words, such as `whole number > 0 or null`."""
    return _describe(info.annotation, info.metadata)


def _describe(annotation: Any, metadata: list[Any]) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _describe(arguments[0], [*arguments[1:], *metadata])
    if origin in (Union, UnionType):
        return " or ".join(_describe(argument, []) for argument in arguments)
    if origin is Literal:
        return ("one of " if len(arguments) > 1 else "") + ", ".join(f"`{value}`" for value in arguments)
    if origin is list:
        size = next((f"{rule.max_length} " for rule in metadata if isinstance(rule, MaxLen)), "")
        item = _describe(arguments[0], [])
        return (
            "list of text"
            if item == "text"
            else f"list of {size}values" + (f", each {item}" if item != "value" else "")
        )
    if origin is dict:
        return "mapping"
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return "section"
    words = {int: "whole number", float: "number", bool: "true or false", str: "text", type(None): "null"}
    return words.get(annotation, "value") + _bounds(metadata)


def _bounds(metadata: list[Any]) -> str:
    signs = {Gt: "> {0.gt}", Ge: ">= {0.ge}", Lt: "< {0.lt}", Le: "<= {0.le}"}
    parts = [signs[type(rule)].format(rule) for rule in metadata if type(rule) in signs]
    return " " + " and ".join(parts) if parts else ""
