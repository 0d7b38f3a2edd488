"""A row of a data set -> its text, in segments that are training targets or not.

Forms of a row, the first that fits:
    {TEXT_COLUMN: str}                                  plain text
    {"messages": [{"role", "content"}, ...]}            chat; any role
    {"conversations": [{"from", "value"}, ...]}         chat (ShareGPT); roles by `ROLES`, another is an error
    {"prompt", "completion"}                            text, or messages
    {"instruction", "input"?, "output", "system"?}      one exchange (Alpaca)

A turn becomes `ROLE: CONTENT` and a line end. A row whose text is empty in all is passed over by the reader.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from samestep.errors import DataError

Segments = tuple[tuple[str, bool], ...]

ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "function_response": "tool",
    "tool": "tool",
}
"""Speakers met in ShareGPT files -> role."""

_FORMS = (("messages",), ("conversations",), ("prompt", "completion"), ("instruction", "output"))
_OPTIONAL = ("input", "system")


def columns_of(names: Iterable[str], text_column: str, where: str) -> list[str]:
    """The columns of a table that rows are made from.

    Raises:
        DataError: the table has none of the forms; lists its columns.
    """
    present = list(names)
    if not any(all(column in present for column in form) for form in ((text_column,), *_FORMS)):
        raise DataError(_no_form(text_column, present, where))
    wanted = {text_column, *_OPTIONAL, *(column for form in _FORMS for column in form)}
    return [name for name in present if name in wanted]


def segments_of(row: dict[str, Any], where: str, text_column: str, only_assistant: bool) -> Segments:
    """Segments (text, is_target) of a row.

    Args:
        only_assistant: only the assistant's turns (a completion, an output) are targets.

    Raises:
        DataError: no form fits, a turn is malformed, a role is unknown, or the text has a lone surrogate.
    """
    if isinstance(row.get(text_column), str):
        segments: Segments = ((row[text_column], True),)
    else:
        segments = tuple(_exchange(row, where, text_column, only_assistant))
    for text, _ in segments:
        _check_encodable(text, where)
    return segments


def _exchange(row: dict[str, Any], where: str, text_column: str, only_assistant: bool) -> Iterator[tuple[str, bool]]:
    messages, conversations = _turns(row.get("messages")), _turns(row.get("conversations"))
    if messages is not None:
        return _chat(messages, where, only_assistant)
    if conversations is not None:
        return _chat(_sharegpt(conversations, where), where, only_assistant)
    prompt, completion = row.get("prompt"), row.get("completion")
    if isinstance(prompt, str) and isinstance(completion, str):
        return iter(((prompt, not only_assistant), (completion, True)))
    asked, answered = _turns(prompt), _turns(completion)
    if asked is not None and answered is not None:
        return _chat([*asked, *answered], where, only_assistant)
    if isinstance(row.get("instruction"), str) and isinstance(row.get("output"), str):
        return _chat(_alpaca(row, where), where, only_assistant)
    raise DataError(_no_form(text_column, row, where))


def _turns(value: Any) -> list[Any] | None:
    """A list of turns; Arrow tables may hold it as lists of equal length by column."""
    if isinstance(value, dict) and value and all(isinstance(column, list) for column in value.values()):
        return [dict(zip(value, turn, strict=True)) for turn in zip(*value.values(), strict=True)]
    return value if isinstance(value, list) else None


def _chat(messages: list[Any], where: str, only_assistant: bool) -> Iterator[tuple[str, bool]]:
    for number, message in enumerate(messages, 1):
        role, content = _pair(message, "role", "content", f"{where}: message {number}")
        yield f"{role}: ", not only_assistant
        yield f"{content}\n", not only_assistant or role == "assistant"


def _sharegpt(conversations: list[Any], where: str) -> list[dict[str, str]]:
    messages = []
    for number, turn in enumerate(conversations, 1):
        speaker, content = _pair(turn, "from", "value", f"{where}: turn {number}")
        if speaker not in ROLES:
            raise DataError(
                f"{where}: turn {number} is from {speaker!r}, which is no known role\n"
                f"  fix: write one of {', '.join(ROLES)}; or write the row as `messages`, which take any role"
            )
        messages.append({"role": ROLES[speaker], "content": content})
    return messages


def _alpaca(row: dict[str, Any], where: str) -> list[dict[str, str]]:
    for column in _OPTIONAL:
        if not isinstance(row.get(column), str | None):
            raise DataError(f"{where}: {column!r} must be text, but is a {type(row[column]).__name__}")
    question = "\n".join(part for part in (row["instruction"], row.get("input")) if part)
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": row["output"]}]
    return [{"role": "system", "content": row["system"]}, *messages] if row.get("system") else messages


def _pair(turn: Any, first: str, second: str, where: str) -> tuple[str, str]:
    values = (turn.get(first), turn.get(second)) if isinstance(turn, dict) else (None, None)
    if not isinstance(values[0], str) or not isinstance(values[1], str):
        raise DataError(f"{where} needs a text {first!r} and a text {second!r}")
    return values[0], values[1]


def _no_form(text_column: str, names: Iterable[str], where: str) -> str:
    return (
        f"{where}: has neither a text column {text_column!r} nor a list 'messages'; "
        f"it has: {', '.join(map(repr, sorted(names))) or 'nothing'}\n"
        "  fix: set text_column to the column that holds the text; also read are a list 'conversations', texts "
        "'prompt' and 'completion', texts 'instruction' and 'output'"
    )


def _check_encodable(text: str, where: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: character {error.start} is a lone surrogate (U+{ord(text[error.start]):04X}), which is no "
            "character and cannot be encoded\n  fix: remove the row, or write the full escape pair"
        ) from error
