"""Where else the numbers of a run go: TensorBoard, Weights & Biases, MLflow. Packages are imported when used."""

from __future__ import annotations

import importlib.util
import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from samestep.config.schema import Config, MlflowConfig, MonitorConfig, TensorboardConfig, WandbConfig
from samestep.errors import ConfigError

IDS_FILE = "loggers.json"
"""Ids that the services gave to a run, so that a resumed run goes on under the same one."""


class Logger(Protocol):
    """A place that takes named numbers.

    Attributes:
        interval: training steps between points; evaluations always arrive.
    """

    interval: int

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Take the finite numbers of a step."""
        ...

    def close(self) -> None: ...


class TensorboardLogger:
    """Event files in `folder`/tensorboard."""

    def __init__(self, settings: TensorboardConfig, folder: Path):
        self.interval = settings.log_interval
        self._settings, self._folder = settings, folder
        self._writer: Any = None

    def log(self, values: Mapping[str, float], step: int) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        if self._writer is None:
            self._writer = self._open(step)
        # One event for all, which `SummaryWriter` does not have: six of them take a millisecond.
        numbers = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._writer.add_summary(Summary(value=numbers), step)

    def _open(self, step: int) -> Any:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from torch.utils.tensorboard import FileWriter

        writer = FileWriter(str(self._folder / "tensorboard"), self._settings.queue_size)
        # A resumed run writes some steps again: TensorBoard then hides what it had from this step on.
        writer.add_event(Event(step=step, file_version="brain.Event:2"))
        writer.add_event(Event(step=step, session_log=SessionLog(status=SessionLog.START)))
        return writer

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class WandbLogger:
    """One run of Weights & Biases; its files lie in `folder`/wandb."""

    def __init__(self, settings: WandbConfig, config: Config, folder: Path):
        import wandb

        self.interval = settings.log_interval
        self._run = wandb.init(
            project=settings.project,
            name=settings.name or folder.name,
            mode=settings.mode,
            dir=str(folder),
            config=config.model_dump(),
            id=_known_id(folder, "wandb"),
            resume="allow",
        )
        _keep_id(folder, "wandb", self._run.id)
        # Its own step only grows, but a resumed run writes some steps again.
        self._run.define_metric("*", step_metric="step")

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log({**values, "step": step})

    def close(self) -> None:
        self._run.finish()


class MlflowLogger:
    """One run of MLflow, with the configuration as its file `config.json`."""

    def __init__(self, settings: MlflowConfig, config: Config, folder: Path):
        from mlflow import MlflowClient
        from mlflow.entities import Metric

        self.interval = settings.log_interval
        self._metric = Metric
        self._client = MlflowClient(tracking_uri=settings.tracking_uri)
        self._run_id = _known_id(folder, "mlflow")
        if self._run_id is None:
            known = self._client.get_experiment_by_name(settings.experiment)
            experiment = known.experiment_id if known else self._client.create_experiment(settings.experiment)
            self._run_id = self._client.create_run(experiment, run_name=folder.name).info.run_id
            self._client.log_dict(self._run_id, config.model_dump(), "config.json")
            _keep_id(folder, "mlflow", self._run_id)

    def log(self, values: Mapping[str, float], step: int) -> None:
        now = int(time.time() * 1000)
        self._client.log_batch(self._run_id, [self._metric(name, value, now, step) for name, value in values.items()])

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


def check_packages(monitor: MonitorConfig) -> None:
    """Find out before a run begins that a package is missing.

    Raises:
        ConfigError: a logger is switched on whose package is not installed.
    """
    for name in ("wandb", "mlflow"):
        if getattr(monitor, name).enable and not installed(name):
            raise ConfigError(
                f"the package {name} is not installed",
                field=f"monitor.{name}.enable",
                fix=f'run `pip install "samestep[{name}]"`, or write false',
            )


def installed(package: str) -> bool:
    """Whether a package can be imported. A folder of that name, such as `./wandb`, is not one."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def make_loggers(config: Config, folder: Path) -> list[Logger]:
    """The loggers that `monitor` switches on; `folder` is the run's and exists."""
    monitor = config.monitor
    loggers: list[Logger] = []
    if monitor.tensorboard.enable:
        loggers.append(TensorboardLogger(monitor.tensorboard, folder))
    if monitor.wandb.enable:
        loggers.append(WandbLogger(monitor.wandb, config, folder))
    if monitor.mlflow.enable:
        loggers.append(MlflowLogger(monitor.mlflow, config, folder))
    return loggers


def finite_only(values: Mapping[str, float | None]) -> dict[str, float]:
    """Without what is missing or not finite: services differ in what they make of it."""
    return {name: value for name, value in values.items() if value is not None and math.isfinite(value)}


def _ids(folder: Path) -> dict[str, str]:
    file = folder / IDS_FILE
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def _known_id(folder: Path, service: str) -> str | None:
    return _ids(folder).get(service)


def _keep_id(folder: Path, service: str, run_id: str) -> None:
    (folder / IDS_FILE).write_text(json.dumps({**_ids(folder), service: run_id}), encoding="utf-8")
