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
    is_scalar,
    join,
    kind_of,
    merge,
    short_name,
    to_data,
)
from jaxgpt.data.config import DataConfig
from jaxgpt.errors import ConfigError
from jaxgpt.model import Layer, ModelConfig
from jaxgpt.study.config import ShowConfig
from jaxgpt.train.config import LoraConfig, OptimConfig, TrainConfig

FREE = frozenset(
    {"train.steps", "train.keep", "train.save_every", "train.eval_every", "train.log_every"}
    | {"data.hub_timeout"}
    | {f"show.{field.name}" for field in dataclasses.fields(ShowConfig)}
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
    show: ShowConfig = ShowConfig()

    def __post_init__(self) -> None:
        warmup, steps = self.optim.warmup_steps, self.train.steps
        if warmup > steps:
            raise ConfigError(
                f"optim.warmup_steps={warmup} exceeds train.steps={steps}",
                fix=f"--optim.warmup_steps={steps // 10}, or more --train.steps",
            )


def to_yaml(run: RunConfig) -> str:
    """The configuration as YAML, every field, from which `from_yaml` makes an equal one.

    Only a text such as "null" or "~", where None is allowed as well, comes back as None.
    """
    data = to_data(run, short_name)
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


class _Dumper(yaml.SafeDumper):
    """Quotes texts that look like numbers also to YAML 1.2, which `_load` follows: "1e3"."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        style = "'" if text[:1] in tuple("+-.0123456789") else None
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
        return _build(_merge_text(None, text))


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
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or "not UTF-8"
            raise ConfigError(f"cannot read {file}: {reason}", fix="--config=FILE") from None
        with _named(str(file)):
            data = _merge_text(data, text)
    # A box before its fields, whatever order they were given in.
    for name, text in sorted(_options(options), key=lambda option: option[0].count(".")):
        hint = hint_of(RunConfig, data, name, known)
        if text is None:
            raise ConfigError(f"--{name} has no value", fix=f"--{name}=VALUE")
        value: Any = _typed(name, hint, text) if is_scalar(hint) else _load(text)
        for part in reversed(name.split(".")):
            value = {part: value}
        data = merge(data, value, RunConfig)
    return _build(data)


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


def _options(words: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Name and value of `--name=value` and `--name value`; None where there is no value.

    Raises:
      ConfigError: A word that is neither.
    """
    rest = list(words)
    while rest:
        name, equals, value = rest.pop(0).partition("=")
        text: str | None = value
        if not name.startswith("--") or name == "--":
            raise ConfigError(f"unexpected argument {name!r}", fix="--name=value")
        if not equals:
            text = rest.pop(0) if rest and not rest[0].startswith("--") else None
        yield name[2:], text


def _merge_text(data: dict | None, text: str) -> dict:
    new = _load(text)
    return merge(data, {} if new is None else new, RunConfig)  # None: an empty file


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
