# SPDX-License-Identifier: Apache-2.0
"""The whole configuration of a run, as a value, as YAML, and from a command line.

Three layers, later ones win: a base (a preset), config files, options. Each is plain data that is
merged and checked for names here; jsonargparse checks the types and builds the dataclasses. Where a
class is named, the fields of that box start from the class's defaults.

YAML names our boxes by class and others by import path; it is read with a safe loader, and a class
that it names must be a box of the right kind. Presets and the commands' own options are elsewhere.
"""

import argparse
import dataclasses
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jsonargparse
import yaml

from jaxgpt.boxes.base import Box
from jaxgpt.configlib import (
    box_class,
    describe,
    hint_of,
    hints_of,
    is_list,
    is_scalar,
    join,
    kind_of,
    merge,
    options_in,
    short_name,
    to_data,
)
from jaxgpt.data.config import DataConfig
from jaxgpt.errors import ConfigError
from jaxgpt.model import Layer, ModelConfig
from jaxgpt.study.config import ShowConfig
from jaxgpt.train.config import LoraConfig, MeshConfig, OptimConfig, TrainConfig

PRETRAINED = "pretrained"
"""Of `data.tokenizer`: that of `init_from`."""

FREE = frozenset(
    {"train.steps", "train.keep", "train.save_every", "train.eval_every", "train.log_every"}
    | {"data.hub_timeout", "train.max_bad_steps"}
    | {f"show.{field.name}" for field in dataclasses.fields(ShowConfig)}
    | {f"mesh.{field.name}" for field in dataclasses.fields(MeshConfig)}
)
"""Keys that may differ when a run goes on: they change nothing of the training so far."""


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """Everything that decides a run.

    Raises:
      ConfigError: Parts that do not fit together.
    """

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    optim: OptimConfig = OptimConfig()
    train: TrainConfig = TrainConfig()
    lora: LoraConfig = LoraConfig()
    mesh: MeshConfig = MeshConfig()
    show: ShowConfig = ShowConfig()
    init_from: str | None = None  # folder or hub id of the weights to begin with; None: fresh ones

    def __post_init__(self) -> None:
        if self.data.tokenizer == PRETRAINED and self.init_from is None:
            raise ConfigError(
                f"data.tokenizer={PRETRAINED} is that of a model to begin with, and there is none",
                fix="--init-from=FOLDER_OR_ID, or another --data.tokenizer",
            )
        if self.model.mup_base is not None:
            self.optim.method.hidden_rate(self.model.dims().width_ratio)
            if self.init_from is not None:
                what = "model.mup_base would change the logits of the model to begin with"
                raise ConfigError(what, fix="--model.mup_base=null")
        warmup, steps = self.optim.warmup_steps, self.train.steps
        if warmup > steps:
            raise ConfigError(
                f"optim.warmup_steps={warmup} exceeds train.steps={steps}",
                fix=f"--optim.warmup_steps={steps // 10}, or more --train.steps",
            )


def to_yaml(run: RunConfig) -> str:
    """The configuration as YAML, every field, from which `from_yaml` makes an equal one.

    Only a text such as "null", "~" or "---", where None is allowed as well, comes back as None.
    """
    data = to_data(run, short_name)
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


class _Dumper(yaml.SafeDumper):
    """Quotes texts that look like numbers also to YAML 1.2, which `_load` follows: "1e3".

    And Unicode's line breaks, which PyYAML writes as they are and reads as ordinary ones.
    """

    def represent_text(self, text: str) -> yaml.ScalarNode:
        style = "'" if text[:1] in tuple("+-.0123456789") else None
        style = '"' if {*text} & {"\x85", "\u2028", "\u2029"} else style
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _Dumper.represent_text)


def from_yaml(text: str, *, where: str = "config") -> RunConfig:
    """Read what `to_yaml` wrote, or a part of it; what is absent has its class's default.

    Args:
      text: YAML.
      where: The file, for messages.

    Raises:
      ConfigError: Not YAML, unknown names, wrong types, or values that do not fit together.
    """
    with _named(where):
        return _build(merge(None, _whole(text), RunConfig))


def resolve(
    base: RunConfig,
    files: Sequence[Path] = (),
    options: Sequence[str] = (),
    *,
    known: Sequence[str] = (),
) -> RunConfig:
    """A base, then config files, then options: `--model.n_layers=6`, `--model.norm=RMSNorm`.

    Args:
      base: What is not said otherwise, for example a preset.
      files: YAML files, each a part of a configuration.
      options: Command-line words: dotted names with values.
      known: Further names, of the command itself, for "did you mean".

    Raises:
      ConfigError: Unknown names, wrong types, values that do not fit together, no such file.
    """
    data = to_data(base)
    for file in files:
        with _named(str(file)):
            data = merge(data, _read(file), RunConfig)
    # A box before its fields, whatever order they were given in.
    for name, text in sorted(options_in(options), key=lambda option: option[0].count(".")):
        hint = hint_of(RunConfig, data, name, known)
        if text is None:
            raise ConfigError(f"--{name} has no value", fix=f"--{name}=VALUE")
        value: Any = _value(name, hint, text)
        for part in reversed(name.split(".")):
            value = {part: value}
        data = merge(data, value, RunConfig)
    return _build(data)


def said_in(files: Sequence[Path], name: str) -> Any:
    """What the last of some config files that says so gives a name at the top; None: none does.

    Raises:
      ConfigError: As `resolve`.
    """
    found = None
    for file in files:
        with _named(str(file)):
            data = _read(file)
            found = data.get(name, found) if isinstance(data, dict) else found
    return found


def differences(old: RunConfig, new: RunConfig) -> list[str]:
    """`key: old -> new` for every field that differs; a box of another class is one line."""
    return list(_differences("", old, new))


def _differences(key: str, old: Any, new: Any) -> Iterator[str]:
    if type(old) is type(new) and dataclasses.is_dataclass(old):
        for name in (field.name for field in dataclasses.fields(old)):
            yield from _differences(join(key, name), getattr(old, name), getattr(new, name))
    elif old != new:
        yield f"{key}: {old!r} -> {new!r}"


# --- types and building, by jsonargparse ----------------------------------------------------------


def _parser() -> jsonargparse.ArgumentParser:
    jsonargparse.set_parsing_settings(
        subclasses_enabled=[*Box.__subclasses__()], instantiate_subclass_spec_in_any=False
    )
    return jsonargparse.ArgumentParser(allow_abbrev=False, exit_on_error=False, add_help=False)


def _build(data: dict) -> RunConfig:
    """Check the types of complete data, and make the dataclasses."""
    _type_edits(data["model"])
    if isinstance(remat := data["train"]["remat"], bool):  # of a run from before there was a choice
        data["train"]["remat"] = "full" if remat else "none"
    parser = _parser()
    for group, cls in hints_of(RunConfig).items():
        parser.add_argument(f"--{group}", type=cls)
    with _translated(data):
        return RunConfig(**vars(parser.instantiate(parser.parse_object(data))))


def _type_edits(model: dict) -> None:
    """Give the values of `edits[i].set` the types of the fields that they are for, in place."""
    kinds = {name: kind_of(hint) or Box for name, hint in hints_of(Layer).items()}
    seen = {name: [model[name]["class_path"]] for name in kinds}
    for i, edit in enumerate(model["edits"]):
        for name in kinds:
            if edit.get(name):
                seen[name].insert(0, edit[name]["class_path"])
        for path, value in edit["set"].items():
            name, _, field = str(path).partition(".")
            key = f"model.edits[{i}].set.{path}"
            classes = [box_class(c, kinds[name], key) for c in seen.get(name, ())]
            hint = next((h[field] for h in map(hints_of, classes) if field in h), None)
            if hint is not None:  # else the model says which fields there are
                edit["set"][path] = _typed(key, hint, merge(None, value, hint, key))


def _value(key: str, hint: Any, text: str) -> Any:
    """A word of the command line as plain data; a word may stand for a list of one."""
    if is_list(hint) and is_scalar(hint) and not text.startswith("["):
        return text
    return _load(text) if is_list(hint) or not is_scalar(hint) else _typed(key, hint, text)


def _typed(key: str, hint: Any, value: Any) -> Any:
    """One value of the type `hint`, from a word of the command line or from plain data."""
    parser = _parser()
    parser.add_argument("--value", type=hint)
    with _translated({}, key, hint):
        if isinstance(value, str):
            return parser.parse_args([f"--value={value}"]).value
        return parser.instantiate(parser.parse_object({"value": value})).value


@contextmanager
def _translated(data: dict, key: str = "", hint: Any = None) -> Iterator[None]:
    """Say what jsonargparse found in one line, with the dotted name and the type in words."""
    try:
        yield
    except ConfigError:
        raise
    except (argparse.ArgumentError, ValueError, TypeError) as error:
        text = str(error)
        key = key or ".".join(re.findall(r'Parser key "([^"]+)"', text))
        value = re.search(r"(?:Got|Given) value: (.*)", text)
        # A box inside an optional field: what it said itself is in a list of attempts.
        inner = re.search(r"^\s*- (?!Expected|Problem)(.+)$", text, re.MULTILINE)
        what = inner[1] if inner else " ".join(text.split())
        if value and key and not inner:
            what = f"{key}={value[1]} is not {_wanted(data, key, hint, text)}"
        raise ConfigError(what) from error


def _wanted(data: dict, key: str, hint: Any, text: str) -> str:
    try:
        return describe(hint or hint_of(RunConfig, data, key))
    except ConfigError:  # a place inside an edit has no dotted name
        expected = re.search(r"Expected an? (.*?)(?:\. Got value|$)", text, re.MULTILINE)
        return re.sub(r"<class '(\w+)'>", r"\1", expected[1]) if expected else "of the right type"


def _read(file: Path) -> Any:
    try:
        return _whole(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8"
        raise ConfigError(f"cannot read {file}: {reason}", fix="--config=FILE") from None


def _whole(text: str) -> Any:
    new = _load(text)
    return {} if new is None else new  # None: an empty file


def _load(text: str) -> Any:
    try:
        return jsonargparse.get_loader("yaml")(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"not YAML: {' '.join(str(error).split())}") from None


@contextmanager
def _named(where: str) -> Iterator[None]:
    """Say which file a mistake is in."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(error.what, where=where, fix=error.fix) from error
