"""Errors that a user can cause or must act on.

Every message says what is wrong, where, why, and what to write instead. The command line prints it without a
traceback and exits with `exit_code`.
"""

from __future__ import annotations


class SamestepError(Exception):
    """Base of all errors that samestep raises on purpose."""

    exit_code = 2


class ConfigError(SamestepError, ValueError):
    """A mistake in the configuration.

    Args:
        reason: what is wrong and why.
        field: dotted name of the field at fault, such as `training.max_norm`.
        fix: what to write instead.
        where: file and line, such as `quickstart.yaml:12`; filled in later by whoever knows the file.
    """

    def __init__(self, reason: str, *, field: str | None = None, fix: str | None = None, where: str | None = None):
        self.reason, self.field, self.fix, self.where = reason, field, fix, where
        super().__init__(reason)

    def __str__(self) -> str:
        place = ": ".join(part for part in (self.where, self.field) if part)
        text = f"{place}: {self.reason}" if place else self.reason
        return f"{text}\n  fix: {self.fix}" if self.fix else text


class ConfigErrors(ConfigError):
    """Several mistakes found at once; `errors` holds each."""

    def __init__(self, errors: list[ConfigError]):
        self.errors = errors
        super().__init__(f"{len(errors)} mistakes in the configuration")

    def __str__(self) -> str:
        return "\n".join(str(error) for error in self.errors)


class DataError(SamestepError, ValueError):
    """A mistake in the training or evaluation data (file, row, token)."""


class CheckpointError(SamestepError, RuntimeError):
    """A checkpoint that cannot be used, or none where one was asked for."""


class TrainingError(SamestepError, RuntimeError):
    """A run that cannot go on, such as too many skipped steps in a row."""

    exit_code = 1
