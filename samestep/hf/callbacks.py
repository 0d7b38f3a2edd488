"""transformers' callbacks as a listener of samestep's loop, their control flags as its flags."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from samestep.run.loop import Events
from samestep.step.step import StepReport


class CallbackEvents(Events):
    """Passes the events of a run on to the callback handler of a Trainer, in the order of transformers.

    `on_pre_optimizer_step` sees gradients that are summed over the ranks, but not clipped: the clip coefficient is
    folded into the update.
    """

    def __init__(self, trainer: Any):
        self._trainer = trainer
        self._micro_batches = 0

    def _call(self, event: str, *details: Any) -> None:
        trainer = self._trainer
        handler = getattr(trainer.callback_handler, event)
        trainer.control = handler(trainer.args, trainer.state, trainer.control, *details)

    @property
    def should_stop(self) -> bool:
        return self._trainer.control.should_training_stop

    @should_stop.setter
    def should_stop(self, value: bool) -> None:
        self._trainer.control.should_training_stop = value

    @property
    def should_evaluate(self) -> bool:
        return self._trainer.control.should_evaluate

    @should_evaluate.setter
    def should_evaluate(self, value: bool) -> None:
        self._trainer.control.should_evaluate = value

    @property
    def should_save(self) -> bool:
        return self._trainer.control.should_save

    @should_save.setter
    def should_save(self, value: bool) -> None:
        self._trainer.control.should_save = value

    def on_train_begin(self, trainer: Any) -> None:
        self._call("on_train_begin")

    def on_epoch_begin(self, trainer: Any) -> None:
        """Before the data of its first step is fetched."""
        self._call("on_epoch_begin")

    def on_step_begin(self, trainer: Any) -> None:
        self._call("on_step_begin")

    def on_fetched(self, trainer: Any, micro_batches: int) -> None:
        """The data of the step is there."""
        self._micro_batches = micro_batches

    def on_micro_batch(self, trainer: Any, index: int, sums: dict[str, torch.Tensor]) -> None:
        if index < self._micro_batches - 1:
            self._call("on_substep_end")

    def on_gradients(self, trainer: Any, gradients: Mapping[str, torch.Tensor]) -> None:
        self._call("on_pre_optimizer_step")

    def on_optimizer_step(self, trainer: Any) -> None:
        """After the update or skip, when nothing is counted yet."""
        self._call("on_optimizer_step")

    def on_step_end(self, trainer: Any, report: StepReport) -> None:
        self._call("on_step_end")

    def on_epoch_end(self, trainer: Any) -> None:
        """After the last step of an epoch, or of the run."""
        self._call("on_epoch_end")

    def on_save(self, trainer: Any, path: Path) -> None:
        self._call("on_save")

    def on_train_end(self, trainer: Any) -> None:
        self._call("on_train_end")
