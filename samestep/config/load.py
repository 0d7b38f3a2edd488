"""YAML and `a.b=c` overrides -> `Config`. Every mistake is a `ConfigError` that names file, line and field."""

from __future__ import annotations

import copy
import datetime
import difflib
import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap
from ruamel.yaml.constructor import DuplicateKeyError
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.representer import RoundTripRepresenter

from samestep.config.fields import FIELDS, describe, field_homes, section_class
from samestep.config.foreign import UNAVAILABLE, foreign_reason
from samestep.config.kinds import ALIASES, HUB_PREFIX
from samestep.config.pretrained import FIELD as PRETRAINED
from samestep.config.pretrained import absolute_place, fill_from_pretrained
from samestep.config.schema import Config
from samestep.errors import ConfigError, ConfigErrors

COMMAND_LINE = "command line"
PATH_FIELDS = ("train_dataset.path", "eval_dataset.path", "tokenizer.path", PRETRAINED)
"""Inputs; made absolute so that the resolved file can be run from anywhere."""


@dataclass
class Source:
    """Where each field was written."""

    path: Path | None = None
    lines: dict[str, int] = field(default_factory=dict)
    """Dotted field -> line in the file, from 1."""
    overridden: set[str] = field(default_factory=set)
    """Dotted fields given on the command line."""

    def locate(self, name: str) -> str | None:
        """`file.yaml:12`, or `command line`; for a field that is not written, its nearest section that is."""
        for place in (name, *ancestors(name)):
            if place in self.overridden:
                return COMMAND_LINE
            if place in self.lines:
                return f"{self.path}:{self.lines[place]}"
        if any(key.startswith(f"{name}.") for key in self.overridden):  # a section made by an override
            return COMMAND_LINE
        return str(self.path) if self.path else None

    def line(self, name: str) -> int:
        """Line of a field or its nearest section, 0 if neither is in the file."""
        return next((self.lines[place] for place in (name, *ancestors(name)) if place in self.lines), 0)

    def override(self, name: str) -> None:
        """A field, and all below it, now comes from the command line."""
        self.lines = {key: line for key, line in self.lines.items() if not f"{key}.".startswith(f"{name}.")}
        self.overridden.add(name)


@dataclass(frozen=True)
class Loaded:
    """A valid configuration, where its fields were written, and what the user should be told."""

    config: Config
    source: Source
    warnings: list[str]


def load(path: str | Path, overrides: Sequence[str] = ()) -> Loaded:
    """Read a YAML file.

    Args:
        path: the file.
        overrides: `section.field=value` each, the value in YAML; later ones win.

    Raises:
        ConfigError: a mistake in the file or the overrides; `ConfigErrors` if there are several.
    """
    path = Path(path)
    data, lines = _read(path)
    return from_dict(data, overrides, Source(path, lines))


def from_dict(data: dict[str, Any], overrides: Sequence[str] = (), source: Source | None = None) -> Loaded:
    """Validate plain data, as `load` does with the content of a file.

    Raises:
        ConfigError: a mistake in the data or the overrides; `ConfigErrors` if there are several.
    """
    data, source = copy.deepcopy(data), copy.deepcopy(source) or Source()
    for text in overrides:
        _override(data, source, text)
    errors = _take_unavailable(data)
    foreign = dict(_take_foreign(data))
    _fill_sections(data)
    _resolve_paths(data, source)
    warnings = [_foreign_warning(foreign, source)] if foreign else []
    try:
        errors += fill_from_pretrained(data)
    except ConfigError as error:  # without the architecture nothing else can be said
        raise _together([*errors, error], source) from error
    try:
        config = Config.model_validate(data)
    except ValidationError as error:
        errors += _translate(error, data, foreign)
    if errors:
        raise _together(errors, source)
    return Loaded(config, source, warnings)


class _Representer(RoundTripRepresenter):
    """Writes null as `null`, not as nothing."""


_Representer.add_representer(type(None), lambda out, _: out.represent_scalar("tag:yaml.org,2002:null", "null"))


def dump(config: Config) -> str:
    """The whole configuration as YAML; loads back to an equal `Config`."""
    yaml = YAML(typ="rt", pure=True)
    yaml.width = 4096  # a long path must stay on one line
    yaml.Representer = _Representer
    stream = io.StringIO()
    yaml.dump(config.model_dump(), stream)
    return stream.getvalue()


def ancestors(name: str) -> Iterator[str]:
    """`a.b.c` -> `a.b`, `a`."""
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


# ---------------------------------------------------------------------------------------------------------------------
# Reading
# ---------------------------------------------------------------------------------------------------------------------


def _read(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """The file as plain data, and the line of each field.

    Raises:
        ConfigError: no such file, not UTF-8, not YAML, or not a mapping.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(
            f"cannot read the file: {error.strerror}", where=str(path), fix="check the path of the configuration file"
        ) from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ConfigError("the file is not UTF-8 text", where=f"{path}:{line}", fix="save it as UTF-8") from None
    tree = _parse(text, str(path))
    if tree is None:
        raise ConfigError("the file is empty", where=f"{path}:1", fix="write at least `train_dataset` and `model`")
    if not isinstance(tree, dict):
        raise ConfigError(
            f"the file must be a mapping of sections, not {_kind(tree)}",
            where=f"{path}:1",
            fix="write `section:` lines",
        )
    lines: dict[str, int] = {}
    return _plain(tree, "", 1, lines, str(path)), lines


def _parse(text: str, where: str) -> Any:
    """YAML 1.2 with line numbers.

    Raises:
        ConfigError: not YAML; `where` gets the line.
    """
    try:
        return YAML(typ="rt", pure=True).load(text)
    except DuplicateKeyError as error:
        raise ConfigError(
            str(error.problem).partition(" with value")[0].replace("found duplicate key", "written twice:"),
            where=_marked(error, where),
            fix="keep one of the two",
        ) from None
    except MarkedYAMLError as error:
        problem = " ".join(str(part) for part in (error.context, error.problem) if part)
        fix = "indent with spaces" if "'\\t'" in problem else "check indentation, colons and quotes"
        raise ConfigError(f"not valid YAML: {problem}", where=_marked(error, where), fix=fix) from None
    except RecursionError:
        raise ConfigError("not valid YAML: nested too deeply", where=where) from None
    except (YAMLError, ValueError) as error:
        raise ConfigError(f"not valid YAML: {' '.join(str(error).split())}", where=where) from None


def _marked(error: MarkedYAMLError, where: str) -> str:
    mark = error.problem_mark or error.context_mark
    return where if mark is None or where == COMMAND_LINE else f"{where}:{mark.line + 1}"


def _plain(node: Any, name: str, line: int, lines: dict[str, int], where: str) -> Any:
    """Round-trip nodes -> plain Python; notes the line of every key."""
    if isinstance(node, CommentedMap):
        result = {}
        for key, value in node.items():
            here = node.lc.key(key)[0] + 1 if key in (node.lc.data or {}) else line  # merged keys have no line
            if not isinstance(key, str):
                raise ConfigError(
                    f"a field name must be text, not {key!r}", where=f"{where}:{here}", field=name or None
                )
            full = f"{name}.{key}" if name else str(key)
            lines[full] = lines[ALIASES.get(full, full)] = here
            result[str(key)] = _plain(value, full, here, lines, where)
        return result
    if isinstance(node, list):
        return [_plain(value, name, line, lines, where) for value in node]
    if node is None or isinstance(node, bool):
        return node
    for kind in (int, float, str):
        if isinstance(node, kind):
            return kind(node)
    if isinstance(node, datetime.date):
        return node.isoformat()
    raise ConfigError("tags have no meaning here", field=name, where=f"{where}:{line}", fix="remove the part with `!`")


def _override(data: dict[str, Any], source: Source, text: str) -> None:
    """Write one `a.b=c` into the data.

    Raises:
        ConfigError: not of that form, or the value is not YAML.
    """
    name, equals, value = text.partition("=")
    name = name.strip()
    if not equals or not all(part.isidentifier() for part in name.split(".")):
        raise ConfigError(
            f"`{text}` is not an override",
            where=COMMAND_LINE,
            fix="write section.field=value, such as training.steps=100",
        )
    try:
        parsed = _plain(_parse(value, COMMAND_LINE), name, 0, {}, COMMAND_LINE)
    except ConfigError as error:
        raise ConfigError(
            f"the value is not valid YAML: {value}", field=name, where=COMMAND_LINE, fix=f"""quote it: '{name}="..."'"""
        ) from error
    *sections, leaf = name.split(".")
    target = data
    for depth, section in enumerate(sections, 1):
        if target.get(section) is None:
            target[section] = {}
        target = target[section]
        if not isinstance(target, dict):
            raise ConfigError(
                f"`{'.'.join(sections[:depth])}` is not a section, so it holds no `{leaf}`",
                field=name,
                where=COMMAND_LINE,
            )
    prefix = ".".join(sections)
    for other in _spellings(name):  # the last one wins, whatever it is called
        target.pop(other.removeprefix(f"{prefix}."), None)
        source.override(other)
    target[leaf] = parsed


def _spellings(name: str) -> list[str]:
    canonical = ALIASES.get(name, name)
    return [canonical, *(alias for alias, of in ALIASES.items() if of == canonical)]


# ---------------------------------------------------------------------------------------------------------------------
# Before validation
# ---------------------------------------------------------------------------------------------------------------------


def _leaves(data: dict[str, Any], prefix: str = "") -> Iterator[tuple[dict[str, Any], str, str]]:
    """(holder, key, dotted name) of every entry, outer ones first; safe against removal."""
    for key in list(data):
        yield data, key, prefix + key
        if isinstance(data.get(key), dict):
            yield from _leaves(data[key], f"{prefix}{key}.")


def _take_unavailable(data: dict[str, Any]) -> list[ConfigError]:
    """Remove the fields of `UNAVAILABLE`; one error for each whose value is not accepted."""
    errors = []
    for holder, key, name in _leaves(data):
        if name not in UNAVAILABLE:
            continue
        value, accepted = holder[key], UNAVAILABLE[name]
        if any(type(value) is type(other) and value == other for other in accepted):
            if name not in FIELDS:  # such as run_mode: train; it asks for what happens anyway
                del holder[key]
            continue
        del holder[key]
        words = " or ".join(show(other) for other in accepted)
        reason = f"{show(value)} is not available in this version"
        errors.append(ConfigError(reason, field=name, fix=f"remove it, or write {words}"))
    return errors


def _take_foreign(data: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Remove the fields of `FOREIGN`; gives each with its reason."""
    for holder, key, name in _leaves(data):
        if ALIASES.get(name, name) not in FIELDS and (reason := foreign_reason(name)):
            del holder[key]
            yield name, reason


def _foreign_warning(foreign: dict[str, str], source: Source) -> str:
    listed = "\n".join(
        f"  {source.locate(name) or ''}: {name}: {why}".replace("  : ", "  ") for name, why in foreign.items()
    )
    return f"ignored, because these fields have no meaning here:\n{listed}"


def _fill_sections(data: dict[str, Any]) -> None:
    """A section that is missing, empty or null has its defaults; its required fields are then reported one by one."""
    for name, info in FIELDS.items():
        if section_class(info) is None:
            continue
        *outer, last = name.split(".")
        holder: Any = data
        for part in outer:
            holder = holder.get(part) if isinstance(holder, dict) else None
        if isinstance(holder, dict) and holder.get(last) is None:
            holder[last] = {}


def _resolve_paths(data: dict[str, Any], source: Source) -> None:
    for name in PATH_FIELDS:
        section, _, leaf = name.partition(".")
        holder = data.get(section)
        if not isinstance(holder, dict) or leaf not in holder:
            continue
        typed = source.locate(name) == COMMAND_LINE or source.path is None
        folder = Path.cwd() if typed or source.path is None else source.path.parent
        make_absolute = absolute_place if name == PRETRAINED else _absolute
        holder[leaf] = make_absolute(holder[leaf], folder)


def _absolute(value: Any, folder: Path) -> Any:
    """Links are kept: the name of a file, not of its target, tells its kind."""
    if isinstance(value, list):
        return [_absolute(item, folder) for item in value]
    if isinstance(value, str) and value.startswith(HUB_PREFIX):
        return value
    return str((folder / Path(value).expanduser()).absolute()) if isinstance(value, str) and value else value


# ---------------------------------------------------------------------------------------------------------------------
# pydantic's findings in our words
# ---------------------------------------------------------------------------------------------------------------------


def _together(errors: list[ConfigError], source: Source) -> ConfigError:
    for error in errors:
        error.where = source.locate(error.field or "")
    errors = sorted(errors, key=lambda error: source.line(error.field or ""))
    return errors[0] if len(errors) == 1 else ConfigErrors(errors)


def _translate(error: ValidationError, data: dict[str, Any], foreign: dict[str, str]) -> list[ConfigError]:
    """One error for each field at fault (pydantic gives one for each member of a union)."""
    found: dict[str, ConfigError] = {}
    for detail in error.errors(include_url=False):
        name = _field_name(detail["loc"], detail["type"])
        if name in found:
            continue
        own = detail.get("ctx", {}).get("error")
        if isinstance(own, ConfigError):
            found[name] = ConfigError(own.reason, field=own.field or name, fix=own.fix)
        elif detail["type"] == "extra_forbidden":
            found[name] = _dotted(name) if name in data and "." in name else _unknown(name)
        elif detail["type"] == "missing":
            found[name] = _missing(name, foreign)
        else:
            found[name] = _wrong_value(name, _value(data, name))
    return list(found.values())


def _field_name(loc: tuple[int | str, ...], kind: str) -> str:
    """Dotted field of an error; positions in lists and members of unions are left out."""
    name = ""
    for part in loc:
        longer = f"{name}.{part}" if name else str(part)
        longer = ALIASES.get(longer, longer)
        if longer not in FIELDS and kind != "extra_forbidden":
            break
        name = longer
    return name


def _value(data: Any, name: str) -> Any:
    for section in name.split(".")[:-1]:
        data = data[section]
    return next(data[key] for key in (other.rpartition(".")[2] for other in _spellings(name)) if key in data)


def _missing(name: str, foreign: dict[str, str]) -> ConfigError:
    section, _, leaf = name.rpartition(".")
    replaced = [f"`{other}` is not used: {why}" for other, why in foreign.items() if other == f"{section}.dataloader"]
    meaning = " ".join((FIELDS[name].description or "").split())
    fix = f"write `{leaf}: ...` under `{section}:`, {describe(FIELDS[name])} ({meaning.rstrip('.')})"
    return ConfigError("; ".join(["the field is required", *replaced]), field=name, fix=fix)


def _dotted(name: str) -> ConfigError:
    section, _, leaf = name.rpartition(".")
    reason = "names with dots are for the command line"
    return ConfigError(reason, field=name, fix=f"write `{leaf}:` under `{section}:`, indented")


def _unknown(name: str) -> ConfigError:
    if name in FIELDS:
        names = ", ".join(f"`{other.rpartition('.')[2]}`" for other in _spellings(name))
        return ConfigError("the field is given twice, under two names", field=name, fix=f"keep one of {names}")
    section, _, leaf = name.rpartition(".")
    siblings = [key.rpartition(".")[2] for key in (*FIELDS, *ALIASES) if key.rpartition(".")[0] == section]
    hints = [f"did you mean `{near}`?" for near in difflib.get_close_matches(leaf, siblings, 1, 0.75)]
    hints += [_belongs(leaf, home) for home in field_homes(leaf)]
    if not hints:
        everywhere = [key.rpartition(".")[2] for key in FIELDS]
        for near in difflib.get_close_matches(leaf, everywhere, 1, 0.8):
            hints += [f"did you mean `{near}`? {_belongs(near, home)}" for home in field_homes(near)]
    holder = f"in section `{section}`" if section else "at the top level"
    known = f"the fields {holder} are {', '.join(siblings)}"
    return ConfigError(f"there is no field `{leaf}` {holder}", field=name, fix="; ".join(hints) or known)


def _belongs(name: str, home: str) -> str:
    return f"`{name}` belongs in `{home}`" if home else f"`{name}` belongs at the top level"


def _wrong_value(name: str, value: Any) -> ConfigError:
    leaf = name.rpartition(".")[2]
    if section_class(FIELDS[name]):
        fix = f"write the fields of `{leaf}` below it, indented"
        return ConfigError(f"must be a section, got {_given(value)}", field=name, fix=fix)
    wanted = _article(describe(FIELDS[name]))
    reason = f"must be {wanted}{', not empty' if value in ('', []) else ''}, got {_given(value)}"
    return ConfigError(reason, field=name, fix=_advice(name, value, wanted))


def _article(wanted: str) -> str:
    return f"a {wanted}" if wanted.startswith(("whole", "number", "list", "mapping")) else wanted


def _advice(name: str, value: Any, wanted: str) -> str:
    """What to write instead of a value of the wrong kind."""
    info, leaf = FIELDS[name], name.rpartition(".")[2]
    if isinstance(value, str):
        if "number" in wanted and _is_number(value):
            return f"write it without quotes: `{leaf}: {value}`"
        if "true or false" in wanted:
            return "write true or false (`yes`, `no`, `on` and `off` are text in YAML 1.2)"
        choices = [word.strip("`,") for word in wanted.split() if word.startswith("`")]
        if near := difflib.get_close_matches(value.lower(), choices, 1):
            return f"did you mean `{near[0]}`?"
    if info.is_required():
        return f"write `{leaf}: ...` with {wanted}"
    return f"write {wanted}; the default is {show(info.get_default())}"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def show(value: Any) -> str:
    """A value as its writer would recognise it, shortened."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    text = f'"{value}"' if isinstance(value, str) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _given(value: Any) -> str:
    return "null" if value is None else f"{show(value)} ({_kind(value)})"


def _kind(value: Any) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return "not a finite number"
    names = {
        bool: "a boolean",
        int: "a whole number",
        float: "a number",
        str: "text",
        list: "a list",
        dict: "a mapping",
    }
    return next((name for kind, name in names.items() if isinstance(value, kind)), f"a {type(value).__name__}")
