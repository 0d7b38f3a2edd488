"""The configuration: what is accepted, what it becomes, and what every mistake is told."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from samestep.config.document import markdown
from samestep.config.fields import FIELDS, describe, field_homes, section_class
from samestep.config.foreign import FOREIGN, UNAVAILABLE, foreign_reason
from samestep.config.load import Loaded, Source, dump, from_dict, load
from samestep.config.schema import Config
from samestep.errors import ConfigError, ConfigErrors

ROOT = Path(__file__).resolve().parent.parent
MODEL = "model: {seq_length: 8, hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 2}\n"
DATA = "train_dataset: {path: a.txt}\n"
SNIPPET = """\
training:
  steps: 1000
  local_batch_size: 2 # samples of one micro-batch
  global_batch_size: 8
  max_norm: 1.0
  seed: 42
parallelism:
  data_parallel_shard: -1
  tensor_parallel: 1
  context_parallel: 1
  pipeline_parallel: 1
optimizer:
  type: AdamW
  betas: [0.9, 0.95]
  eps: 1.e-8
  weight_decay: 0.01
"""


def read(folder: Path, text: str, *overrides: str, base: str = DATA + MODEL) -> Loaded:
    """Load `text`, with the required sections after it so that its line numbers are its own."""
    (folder / "run.yaml").write_text(text + base)
    return load(folder / "run.yaml", overrides)


def refuse(folder: Path, text: str, *overrides: str, base: str = DATA + MODEL) -> ConfigError:
    """The error of `text`, its place without the folder."""
    with pytest.raises(ConfigError) as caught:
        read(folder, text, *overrides, base=base)
    for error in getattr(caught.value, "errors", [caught.value]):
        error.where = error.where and error.where.replace(f"{folder}/", "")
    return caught.value


def plain(**sections: Any) -> dict[str, Any]:
    """Valid data with fields replaced."""
    data: dict[str, Any] = {
        "train_dataset": {"path": "a.txt"},
        "model": {"seq_length": 8, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
    }
    for name, value in sections.items():
        data[name] = {**data.get(name, {}), **value} if isinstance(value, dict) else value
    return data


def reason(**sections: Any) -> str:
    """What one mistake in plain data is told."""
    with pytest.raises(ConfigError) as caught:
        from_dict(plain(**sections))
    assert not isinstance(caught.value, ConfigErrors)
    return str(caught.value)


# ---------------------------------------------------------------------------------------------------------------------
# Values
# ---------------------------------------------------------------------------------------------------------------------


def test_snippet_of_a_mindformers_file(tmp_path: Path) -> None:
    loaded = read(tmp_path, SNIPPET)
    training, parallelism, optimizer = loaded.config.training, loaded.config.parallelism, loaded.config.optimizer
    assert (training.steps, training.local_batch_size, training.global_batch_size) == (1000, 2, 8)
    assert (training.max_norm, training.seed) == (1.0, 42)
    assert parallelism.data_parallel_shard == -1
    assert (parallelism.tensor_parallel, parallelism.context_parallel, parallelism.pipeline_parallel) == (1, 1, 1)
    assert (optimizer.type, optimizer.betas, optimizer.eps, optimizer.weight_decay) == (
        "AdamW",
        [0.9, 0.95],
        1e-8,
        0.01,
    )
    assert loaded.warnings == []


def test_defaults() -> None:
    config = from_dict(plain()).config
    assert (config.training.steps, config.training.global_batch_size, config.training.max_norm) == (1000, 1, 1.0)
    assert (config.training.loss_normalization, config.training.remainder) == ("global_targets", "use")
    assert (config.lr_scheduler.type, config.lr_scheduler.learning_rate) == ("constant", 1e-5)
    assert (config.model.model_type, config.model.normalization, config.model.layer_norm_epsilon) == (
        "llama",
        None,
        None,
    )
    assert (config.model.params_dtype, config.model.compute_dtype) == ("float32", "bfloat16")
    narrow = {"layernorm", "softmax"}
    assert all(getattr(config.model, f"{name}_compute_dtype") == "float32" for name in narrow)
    assert (config.checkpoint.save_max, config.checkpoint.save_interleaved_steps) == (5, 1000)
    assert (config.monitor.log_interval, config.monitor.tensorboard.enable) == (10, True)
    assert (config.output_dir, config.tokenizer.type, config.eval_dataset.path) == ("runs/default", "auto", None)


def test_every_default_is_a_valid_value() -> None:
    """Defaults are not validated when read, so this does it."""
    config = from_dict(plain()).config
    assert Config.model_validate(config.model_dump()) == config


@pytest.mark.parametrize("text", ["1e-8", "1.e-8", "1.0e-8", "1E-8", "0.00000001"])
def test_yaml_1_2_numbers(tmp_path: Path, text: str) -> None:
    assert read(tmp_path, f"optimizer: {{eps: {text}}}\n").config.optimizer.eps == 1e-8


@pytest.mark.parametrize(
    "empty", ["training:\n", "training: null\n", "training: {}\n", "monitor: {tensorboard: null}\n"]
)
def test_empty_section_has_its_defaults(tmp_path: Path, empty: str) -> None:
    assert read(tmp_path, empty).config == read(tmp_path, "").config


def test_numbers_of_the_other_kind() -> None:
    config = from_dict(plain(training={"steps": 1e3, "max_norm": 2}, model={"hidden_dropout": 0})).config
    assert (config.training.steps, type(config.training.steps)) == (1000, int)
    assert (config.training.max_norm, type(config.training.max_norm)) == (2.0, float)
    assert config.model.hidden_dropout == 0.0


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ConstantWarmUpLR", "constant"),
        ("constant_with_warmup", "constant"),
        ("LinearWithWarmUpLR", "linear"),
        ("CosineWithWarmUpLR", "cosine"),
        ("cosine", "cosine"),
    ],
)
def test_schedule_names(name: str, expected: str) -> None:
    assert from_dict(plain(lr_scheduler={"type": name})).config.lr_scheduler.type == expected


@pytest.mark.parametrize(
    ("name", "expected"), [("fp32", "float32"), ("bf16", "bfloat16"), ("fp16", "float16"), ("fp64", "float64")]
)
def test_dtype_names(name: str, expected: str) -> None:
    config = from_dict(plain(model={"params_dtype": name, "compute_dtype": expected})).config
    assert (config.model.params_dtype, config.model.compute_dtype) == (expected, expected)


@pytest.mark.parametrize("name", ["layer_norm_epsilon", "rms_norm_eps", "layernorm_epsilon"])
def test_epsilon_names(name: str) -> None:
    assert from_dict(plain(model={name: 1e-6})).config.model.layer_norm_epsilon == 1e-6


def test_null_max_norm_measures_only() -> None:
    assert from_dict(plain(training={"max_norm": None})).config.training.max_norm is None


def test_config_is_frozen() -> None:
    with pytest.raises(ValidationError):
        from_dict(plain()).config.training.steps = 3  # type: ignore[misc]


def test_data_given_is_not_changed() -> None:
    data = plain(context={"mode": 1})
    before = json.dumps(data)
    from_dict(data, ["training.steps=3"])
    assert json.dumps(data) == before


# ---------------------------------------------------------------------------------------------------------------------
# Mistakes in values
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "name", "value", "expected"),
    [
        ("training", "steps", True, "must be a whole number > 0 or null, got true (a boolean)"),
        ("training", "local_batch_size", "8", '> 0 or `auto` or null, got "8" (text)\n  fix: write it without quotes'),
        ("training", "global_batch_size", 1.5, "must be a whole number > 0, got 1.5 (a number)"),
        ("training", "global_batch_size", 0, "must be a whole number > 0, got 0 (a whole number)"),
        ("training", "global_batch_size", None, "must be a whole number > 0, got null\n"),
        ("training", "global_batch_size", [1], "must be a whole number > 0, got [1] (a list)"),
        ("training", "seed", -1, "must be a whole number >= 0, got -1"),
        ("training", "deterministic", 1, "must be true or false, got 1 (a whole number)"),
        ("training", "deterministic", "yes", "write true or false (`yes`, `no`, `on` and `off` are text in YAML 1.2)"),
        ("training", "remainder", "usee", "`use`, `drop`, `error`, got \"usee\" (text)\n  fix: did you mean `use`?"),
        ("training", "max_norm", True, "must be a number > 0 or null, got true"),
        ("training", "max_norm", "1.0", "write it without quotes: `max_norm: 1.0`"),
        ("training", "max_norm", 0, "0 would scale every gradient to zero"),
        ("training", "max_norm", 0.0, "write null to measure without clipping"),
        ("training", "max_norm", -1.0, "a negative value would reverse every gradient"),
        ("training", "max_norm", float("nan"), "nan is not a finite number"),
        ("training", "max_norm", float("inf"), "inf is not a finite number"),
        ("training", "z_loss_weight", -0.1, "must be a number >= 0, got -0.1"),
        ("parallelism", "data_parallel_shard", 0, "0 ranks cannot hold a shard"),
        ("parallelism", "tensor_parallel", 0, "must be a whole number > 0, got 0"),
        ("optimizer", "type", "Adam", "one of `AdamW`, `SGD`, `Adafactor`, `Lion`, `Muon`, got \"Adam\" (text)"),
        ("optimizer", "betas", [0.9], "must be a list of 2 values, each number >= 0 and < 1 or null, got [0.9]"),
        ("optimizer", "betas", [0.9, 1.0], "a list of 2 values, each number >= 0 and < 1 or null, got [0.9, 1.0]"),
        ("optimizer", "betas", 0.9, "must be a list of 2 values"),
        ("optimizer", "eps", float("inf"), "must be a number >= 0, got inf (not a finite number)"),
        ("optimizer", "weight_decay", -0.1, "must be a number >= 0, got -0.1"),
        ("lr_scheduler", "type", "exponential", "must be one of `constant`, `constant_with_cooldown`, `linear`"),
        ("lr_scheduler", "type", "Cosine", "did you mean `cosine`?"),
        ("lr_scheduler", "learning_rate", 0.0, "must be a number > 0, got 0.0"),
        ("lr_scheduler", "warmup_ratio", 1.5, "must be a number >= 0 and <= 1 or null, got 1.5"),
        ("train_dataset", "path", [], "must be text or list of text, not empty, got []"),
        ("train_dataset", "path", "", "must be text or list of text, not empty"),
        ("train_dataset", "path", 3, "must be text or list of text, got 3"),
        ("train_dataset", "eval_fraction", 1.0, "must be a number > 0 and < 1, got 1.0"),
        ("model", "hidden_dropout", 1.0, "must be a number >= 0 and < 1, got 1.0"),
        ("model", "rope_theta", 0.0, "must be a number > 0, got 0.0"),
        ("model", "rms_norm_eps", "x", 'must be a number >= 0 or null, got "x"'),
        ("model", "params_dtype", "int8", "must be one of `float32`, `bfloat16`, `float16`, `float64`, got \"int8\""),
        ("model", "gradient_dtype", "bf16", "bfloat16 is too narrow for sums over micro-batches: each addition loses"),
        ("model", "reduce_dtype", "float16", "error grows with the number of accumulation steps"),
        ("model", "loss_dtype", "bfloat16", "write float32 or float64"),
        ("tokenizer", "type", "file", "type is `file`, but no file is named"),
    ],
)  # fmt: skip
def test_wrong_value(section: str, name: str, value: Any, expected: str) -> None:
    message = reason(**{section: {name: value}})
    assert expected in message
    assert "Input should" not in message and "http" not in message
    assert "\n  fix: " in message


def test_tokenizer_made_here_reads_no_file() -> None:
    message = reason(tokenizer={"type": "char", "path": "tokenizer.json"})
    assert message.startswith("tokenizer.path: a `char` tokenizer is made from the training text")


def test_section_that_is_not_a_mapping() -> None:
    assert "training: must be a section, got 5 (a whole number)" in reason(training=5)
    assert "training: must be a section, got [1] (a list)" in reason(training=[1])


def test_two_names_of_one_field() -> None:
    message = reason(model={"rms_norm_eps": 1e-6, "layer_norm_epsilon": 1e-5})
    assert message == (
        "model.layer_norm_epsilon: the field is given twice, under two names\n"
        "  fix: keep one of `layer_norm_epsilon`, `rms_norm_eps`, `layernorm_epsilon`"
    )


# ---------------------------------------------------------------------------------------------------------------------
# Unknown and missing fields
# ---------------------------------------------------------------------------------------------------------------------


def test_misspelt_field_names_the_nearest(tmp_path: Path) -> None:
    error = refuse(tmp_path, "training:\n  stesp: 5\n")
    assert str(error) == (
        "run.yaml:2: training.stesp: there is no field `stesp` in section `training`\n  fix: did you mean `steps`?"
    )


def test_field_of_another_section_says_where_it_belongs(tmp_path: Path) -> None:
    error = refuse(tmp_path, "training:\n  learning_rate: 1e-3\n")
    assert (error.where, error.fix) == ("run.yaml:2", "`learning_rate` belongs in `lr_scheduler`")


def test_near_name_of_another_section() -> None:
    assert "did you mean `learning_rate`? `learning_rate` belongs in `lr_scheduler`" in reason(
        training={"learning_rat": 1e-3}
    )


def test_field_in_several_sections_names_them_all() -> None:
    assert "`local_batch_size` belongs in `training`; `local_batch_size` belongs in `evaluation`" in reason(
        optimizer={"local_batch_size": 3}
    )


def test_misspelt_section(tmp_path: Path) -> None:
    error = refuse(tmp_path, "# first\ntrainng: {steps: 3}\n")
    assert str(error) == (
        "run.yaml:2: trainng: there is no field `trainng` at the top level\n  fix: did you mean `training`?"
    )


def test_field_at_the_top_level() -> None:
    assert "fix: `steps` belongs in `training`" in reason(steps=3)


def test_dotted_name_in_a_file(tmp_path: Path) -> None:
    error = refuse(tmp_path, "training.steps: 3\n")
    assert (error.where, error.reason) == ("run.yaml:1", "names with dots are for the command line")
    assert error.fix == "write `steps:` under `training:`, indented"


def test_nested_section(tmp_path: Path) -> None:
    error = refuse(tmp_path, "monitor:\n  tensorboard:\n    enabl: true\n")
    assert (error.where, error.field) == ("run.yaml:3", "monitor.tensorboard.enabl")
    assert error.fix == "did you mean `enable`?"


def test_nothing_near_lists_the_fields() -> None:
    assert "fix: the fields in section `evaluation` are interval_steps, local_batch_size" in reason(
        evaluation={"zzz": 1}
    )


def test_missing_fields_are_all_named(tmp_path: Path) -> None:
    error = refuse(tmp_path, "", base="model: {hidden_size: 16}\n")
    assert isinstance(error, ConfigErrors)
    assert [(one.where, one.field) for one in error.errors] == [
        ("run.yaml", "train_dataset.path"),
        ("run.yaml:1", "model.seq_length"),
        ("run.yaml:1", "model.num_hidden_layers"),
        ("run.yaml:1", "model.num_attention_heads"),
    ]
    assert error.errors[0].reason == "the field is required"
    assert "write `path: ...` under `train_dataset:`" in str(error.errors[0].fix)


def test_missing_path_beside_a_foreign_dataloader(tmp_path: Path) -> None:
    error = refuse(tmp_path, "train_dataset:\n  dataloader: {type: HFDataLoader}\n", base=MODEL)
    assert (error.where, error.field) == ("run.yaml:1", "train_dataset.path")
    assert "`train_dataset.dataloader` is not used: its loaders do not exist here; write `path: FILE`" in error.reason


def test_all_mistakes_at_once_in_the_order_of_the_file(tmp_path: Path) -> None:
    text = "trainng: 1\ntraining:\n  max_norm: 0\n  steps: x\nrun_mode: predict\noptimizer:\n  eps: -1\n"
    error = refuse(tmp_path, text)
    assert isinstance(error, ConfigErrors)
    assert [(one.where, one.field) for one in error.errors] == [
        ("run.yaml:1", "trainng"),
        ("run.yaml:3", "training.max_norm"),
        ("run.yaml:4", "training.steps"),
        ("run.yaml:5", "run_mode"),
        ("run.yaml:7", "optimizer.eps"),
    ]


# ---------------------------------------------------------------------------------------------------------------------
# Files
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "where", "expected"),
    [
        (b"", "run.yaml:1", "the file is empty"),
        (b"# nothing\n", "run.yaml:1", "the file is empty"),
        (b"- 1\n- 2\n", "run.yaml:1", "the file must be a mapping of sections, not a list"),
        (b"hello\n", "run.yaml:1", "the file must be a mapping of sections, not text"),
        (b"a: 1\nb: 2\na: 3\n", "run.yaml:3", 'written twice: "a"'),
        (b"training:\n  steps: 1\n  seed: 2\n  steps: 3\n", "run.yaml:4", 'written twice: "steps"'),
        (b"training:\n\tsteps: 1\n", "run.yaml:2", "indent with spaces"),
        (b"a: 1\nb: [1, 2\nc: 3\n", "run.yaml:3", "not valid YAML"),
        (b"a: 1\nb: x: y\n", "run.yaml:2", "mapping values are not allowed here"),
        (b"a: 1\n---\nb: 1\n", "run.yaml:2", "not valid YAML"),
        (b"a: 1\nb: caf\xe9\n", "run.yaml:2", "the file is not UTF-8 text"),
        (b"a: 1\n2: 3\n", "run.yaml:2", "a field name must be text, not 2"),
        (b"a: 1\nb: !x 3\n", "run.yaml:2", "tags have no meaning here"),
        (b"a: " + b"[" * 30_000, "run.yaml", "not valid YAML: nested too deeply"),
    ],
)
def test_broken_file(tmp_path: Path, text: bytes, where: str, expected: str) -> None:
    (tmp_path / "run.yaml").write_bytes(text)
    with pytest.raises(ConfigError) as caught:
        load(tmp_path / "run.yaml")
    assert not isinstance(caught.value, ConfigErrors)
    assert caught.value.where == f"{tmp_path}/{where}"
    assert expected in str(caught.value)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the file: No such file") as caught:
        load(tmp_path / "none.yaml")
    assert caught.value.where == str(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="cannot read the file: Is a directory"):
        load(tmp_path)


def test_lines_and_nearest_section(tmp_path: Path) -> None:
    source = read(tmp_path, "# a\ntraining:\n\n  seed: 1\n").source
    file = tmp_path / "run.yaml"
    assert source.locate("training") == f"{file}:2"
    assert source.locate("training.seed") == f"{file}:4"
    assert source.locate("training.steps") == f"{file}:2"
    assert source.locate("train_dataset.path") == f"{file}:5"
    assert source.locate("optimizer.eps") == str(file)
    assert Source().locate("optimizer.eps") is None


def test_line_of_an_alias(tmp_path: Path) -> None:
    model = MODEL.replace("model: {", "model: {\n  rms_norm_eps: 1e-6,\n ")
    assert read(tmp_path, "", base=DATA + model).source.locate("model.layer_norm_epsilon") == f"{tmp_path}/run.yaml:3"


def test_anchors_and_merge(tmp_path: Path) -> None:
    base = f"train_dataset: &d {{path: a.txt, rows: documents}}\neval_dataset:\n  <<: *d\n  path: b.txt\n{MODEL}"
    config = read(tmp_path, "", base=base).config
    assert (config.eval_dataset.rows, config.eval_dataset.path) == ("documents", str(tmp_path / "b.txt"))


# ---------------------------------------------------------------------------------------------------------------------
# Overrides and paths
# ---------------------------------------------------------------------------------------------------------------------


def test_overrides(tmp_path: Path) -> None:
    loaded = read(
        tmp_path,
        SNIPPET,
        "training.steps=5",
        "training.steps=7",
        "optimizer.betas=[0.9, 0.99]",
        "training.max_norm=null",
        "optimizer.eps=1e-6",
        "checkpoint.save_max=2",
        "output_dir=a=b",
        "monitor.tensorboard.enable=false",
    )
    config = loaded.config
    assert (config.training.steps, config.training.max_norm, config.training.seed) == (7, None, 42)
    assert (config.optimizer.betas, config.optimizer.eps) == ([0.9, 0.99], 1e-6)
    assert (config.checkpoint.save_max, config.output_dir, config.monitor.tensorboard.enable) == (2, "a=b", False)
    assert loaded.source.locate("training.steps") == "command line"
    assert loaded.source.locate("training.seed") == f"{tmp_path}/run.yaml:6"


def test_override_of_a_whole_section(tmp_path: Path) -> None:
    loaded = read(tmp_path, "training:\n  steps: 3\n  seed: 4\n", "training={steps: 5}")
    assert (loaded.config.training.steps, loaded.config.training.seed) == (5, 42)
    assert loaded.source.locate("training.seed") == "command line"


def test_override_replaces_an_alias(tmp_path: Path) -> None:
    loaded = read(tmp_path, "", "model.layernorm_epsilon=1e-4", "model.rms_norm_eps=1e-3")
    assert loaded.config.model.layer_norm_epsilon == 1e-3
    assert loaded.source.locate("model.layer_norm_epsilon") == "command line"


def test_override_repairs_the_file(tmp_path: Path) -> None:
    assert read(tmp_path, "training: {steps: wrong}\n", "training.steps=5").config.training.steps == 5


@pytest.mark.parametrize(
    "text", ["training.steps", "=5", "--training.steps=5", "training..steps=5", "training steps=5"]
)
def test_malformed_override(tmp_path: Path, text: str) -> None:
    error = refuse(tmp_path, "", text)
    assert (error.where, error.reason) == ("command line", f"`{text}` is not an override")


@pytest.mark.parametrize("value", ["[1", "*.txt", "a: b: c"])
def test_override_that_is_not_yaml(tmp_path: Path, value: str) -> None:
    error = refuse(tmp_path, "", f"train_dataset.path={value}")
    assert str(error) == (
        f"command line: train_dataset.path: the value is not valid YAML: {value}\n"
        "  fix: quote it: 'train_dataset.path=\"...\"'"
    )


def test_override_below_a_value(tmp_path: Path) -> None:
    error = refuse(tmp_path, "training: 3\n", "training.steps=5")
    assert error.reason == "`training` is not a section, so it holds no `steps`"


def test_mistakes_in_overrides_are_placed(tmp_path: Path) -> None:
    assert refuse(tmp_path, "training:\n  steps: 3\n", "training.steps=x").where == "command line"
    error = refuse(tmp_path, "", "trainng.steps=4")
    assert (error.where, error.field, error.fix) == ("command line", "trainng", "did you mean `training`?")


def test_paths_are_relative_to_who_names_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir(), there.mkdir()
    monkeypatch.chdir(here)
    base = "train_dataset: {path: [a.txt, data/*.jsonl, /abs/b.txt]}\neval_dataset: {path: c.txt}\n" + MODEL
    config = read(there, "tokenizer: {path: tok}\noutput_dir: out\n", base=base).config
    assert config.train_dataset.path == [f"{there}/a.txt", f"{there}/data/*.jsonl", "/abs/b.txt"]
    assert (config.eval_dataset.path, config.tokenizer.path) == (f"{there}/c.txt", f"{there}/tok")
    assert config.output_dir == "out"
    config = read(there, "", "train_dataset.path=[x.txt]", "tokenizer={path: y}", base=base).config
    assert (config.train_dataset.path, config.tokenizer.path) == ([f"{here}/x.txt"], f"{here}/y")
    assert config.eval_dataset.path == f"{there}/c.txt"
    (there / "run.yaml").rename(here / "run.yaml")
    assert load("run.yaml").config.eval_dataset.path == f"{here}/c.txt"
    assert from_dict(plain()).config.train_dataset.path == f"{here}/a.txt"


def test_links_keep_their_names(tmp_path: Path) -> None:
    (tmp_path / "a.txt").symlink_to(tmp_path / "blob")
    assert read(tmp_path, "").config.train_dataset.path == f"{tmp_path}/a.txt"


# ---------------------------------------------------------------------------------------------------------------------
# Fields without effect
# ---------------------------------------------------------------------------------------------------------------------


def test_foreign_fields_give_one_warning(tmp_path: Path) -> None:
    text = (
        "run_mode: train\ncontext:\n  mode: 1\ntraining:\n  use_skip_step_on_nan: false\n"
        "swap: {enable: false, default_prefetch: 2}\nlr_scheduler:\n  total_steps: 7\n"
    )
    loaded = read(tmp_path, text, base=DATA + MODEL.replace("}", ", use_flash_attention: true, moe_x: 1}"))
    assert len(loaded.warnings) == 1
    heading, *lines = loaded.warnings[0].replace(f"{tmp_path}/", "").splitlines()
    assert heading == "ignored, because these fields have no meaning here:"
    assert "  run.yaml:2: context: set up its own launcher and hardware" in lines
    assert "  run.yaml:5: training.use_skip_step_on_nan: non-finite steps are always skipped" in lines
    assert "  run.yaml:8: lr_scheduler.total_steps: always training.steps" in lines
    assert len(lines) == 6
    assert loaded.config == read(tmp_path, "").config


def test_foreign_without_a_file() -> None:
    assert from_dict(plain(training={"use_skip_step_on_nan": True})).warnings == [
        "ignored, because these fields have no meaning here:\n"
        "  training.use_skip_step_on_nan: non-finite steps are always skipped"
    ]


def test_foreign_never_hides_a_field() -> None:
    assert [field for field in FIELDS if foreign_reason(field)] == []
    assert all(reason and reason[0].islower() for reason in FOREIGN.values())


@pytest.mark.parametrize(
    ("field", "value", "accepted"),
    [
        ("callbacks", [{"type": "X"}], "[]"),
        ("run_mode", "predict", '"train"'),
        ("lora_config", {"target_modules": "x"}, "null"),
        ("training.rampup_batch_size", [1, 1, 8], "null"),
        ("recompute.exclude_op", {"mlp": ["0"]}, "null"),
        ("checkpoint.load_path", "x", '""'),
        ("parallelism.pipeline_parallel_schedule", "gpipe", '"1f1b"'),
        ("model.multi_latent_attention", True, "false or null"),
        ("optimizer.amsgrad", True, "false"),
    ],
)
def test_unavailable_fields_are_refused(tmp_path: Path, field: str, value: Any, accepted: str) -> None:
    error = refuse(tmp_path, "", f"{field}={json.dumps(value)}")
    assert not isinstance(error, ConfigErrors)
    assert (error.field, error.where) == (field, "command line")
    assert error.reason.endswith("is not available in this version")
    assert error.fix == f"remove it, or write {accepted}"


def test_defaults_are_available() -> None:
    for field, accepted in UNAVAILABLE.items():
        if field in FIELDS:
            assert FIELDS[field].get_default() in accepted, field


def test_accepted_values_change_nothing(tmp_path: Path) -> None:
    overrides = [f"{field}={json.dumps(values[0])}" for field, values in UNAVAILABLE.items()]
    loaded = read(tmp_path, "", *overrides)
    assert loaded.config == read(tmp_path, "").config


def test_one_is_not_true() -> None:
    assert "optimizer.amsgrad: 1 is not available" in reason(optimizer={"amsgrad": 1})


# ---------------------------------------------------------------------------------------------------------------------
# Writing
# ---------------------------------------------------------------------------------------------------------------------


def test_dump_loads_back(tmp_path: Path) -> None:
    config = read(
        tmp_path,
        SNIPPET,
        "model.rms_norm_eps=1e-6",
        "optimizer.weight_decay_exclude=['null', '1e-8', 'a: b', '*x']",
        "train_dataset.document_separator='\\n\\n'",
        'tokenizer.path="it\'s # odd é"',
        "lr_scheduler.learning_rate=3.0e-4",
        f"output_dir={'long ' * 60}x",
        "training.max_norm=null",
    ).config
    text = dump(config)
    (tmp_path / "config.resolved.yaml").write_text(text, encoding="utf-8")
    again = load(tmp_path / "config.resolved.yaml")
    assert again.config == config
    assert again.warnings == []
    assert dump(again.config) == text
    assert "max_norm: null" in text and "data_parallel_shard: -1" in text and "layer_norm_epsilon: 1e-06" in text


def test_dump_is_complete(tmp_path: Path) -> None:
    loaded = read(tmp_path, "")
    (tmp_path / "all.yaml").write_text(dump(loaded.config))
    again = load(tmp_path / "all.yaml")
    assert [field for field in FIELDS if field not in again.source.lines] == []


def test_every_field_is_explained() -> None:
    for field, info in FIELDS.items():
        assert info.description and info.description.strip()[-1] in ".)", field
        assert section_class(info) or describe(info), field
        if inner := section_class(info):
            assert inner.__doc__, field


def test_field_homes() -> None:
    assert field_homes("learning_rate") == ["lr_scheduler"]
    assert field_homes("steps") == ["training"]
    assert field_homes("compile") == [""]
    assert field_homes("rms_norm_eps") == ["model"]
    assert field_homes("nothing") == []


def test_json_schema_carries_the_help() -> None:
    schema = Config.model_json_schema()
    training = schema["$defs"]["TrainingConfig"]
    assert training["properties"]["steps"]["description"].startswith("Optimizer steps of the run")
    assert training["additionalProperties"] is False
    assert schema["required"] == ["train_dataset", "model"]
    json.dumps(schema)


def test_document_is_current() -> None:
    text = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
    assert text == markdown(Config), "run: python -m samestep.config.document > docs/config.md"


def test_document_has_every_field() -> None:
    text = markdown(Config)
    for field, info in FIELDS.items():
        name = field.rpartition(".")[2]
        assert (f"## `{field}`" if section_class(info) else f"| `{name}` |") in text, field
    assert all(f"| `{field}`" in text for field in (*FOREIGN, *UNAVAILABLE))


def test_configuration_needs_no_torch() -> None:
    code = (
        "import sys, samestep.config.load, samestep.config.document as d; print({'torch', 'numpy'} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"
