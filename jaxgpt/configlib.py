# SPDX-License-Identifier: Apache-2.0
"""Dataclasses with boxes in them as plain data: merging, dotted names, classes by name.

Plain data is what YAML holds: dicts, lists and scalars. A box is `{class_path: NAME, init_args:
{...}}`; `NAME`, or new fields alone, will do where data is merged. Names are checked here, types of
values are not. Nothing in this file knows which fields a run or a model has.
"""

import dataclasses
import difflib
import functools
import importlib
import os
import pkgutil
import reprlib
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jaxgpt.boxes
from jaxgpt.boxes.base import Box
from jaxgpt.errors import ConfigError, JaxgptError


def to_data(value: Any, name: Callable[[type], str] | None = None) -> Any:
    """A configuration, or a part of it, as dicts, lists and scalars.

    Args:
      value: Dataclasses, boxes and what is in them.
      name: How classes are named; None: by import path.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        data = {f.name: to_data(getattr(value, f.name), name) for f in dataclasses.fields(value)}
        if isinstance(value, Box):
            return {"class_path": (name or import_path)(type(value)), "init_args": data}
        return data
    if isinstance(value, Mapping):
        return {key: to_data(item, name) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [to_data(item, name) for item in value]
    return value


def merge(old: Any, new: Any, hint: Any, key: str = "") -> Any:
    """`new` over `old`, both plain data of the type `hint`; names are checked, types are not.

    Args:
      old: Complete data, or None.
      new: Any part of it. Where it names a class, nothing of the old box stays.
      hint: A dataclass, a kind of box, or the type of a field.
      key: Dotted name of the place, for messages.

    Raises:
      ConfigError: A name that is not there, or a class that is no such box.
    """
    kind, cls, origin = kind_of(hint), hint, typing.get_origin(hint)
    if is_list(hint) and isinstance(new, str) and typing.get_args(hint)[0] is str:
        new = [new]
    if origin in (tuple, dict) and not isinstance(new, list if origin is tuple else dict):
        wanted = "a list" if origin is tuple else "names with values"
        raise ConfigError(f"{key}={reprlib.repr(new)} is not {wanted}")
    if origin is tuple:
        item = typing.get_args(hint)[0]
        return [merge(None, value, item, f"{key}[{i}]") for i, value in enumerate(new)]
    if not (kind or dataclasses.is_dataclass(hint)) or (new is None and _optional(hint)):
        return new
    if kind and isinstance(new, str):
        new = {"class_path": new}
    if not isinstance(new, dict):
        wanted = "the name of a class" if kind else "names with values"
        raise ConfigError(f"{key or 'the config'}: {reprlib.repr(new)} is not {wanted}")
    if kind is None:
        return _merge_fields(_defaults(cls) if old is None else old, new, cls, key)
    if "class_path" in new:
        cls = box_class(new["class_path"], kind, key)
        if odd := set(new) - {"class_path", "init_args"}:
            raise ConfigError(f"{key} has {sorted(odd)} beside class_path", fix="use init_args")
        old, new = _defaults(cls), new.get("init_args") or {}
    elif old is None:
        raise ConfigError(f"{key} names no class", fix=f"--{key}=CLASS")
    else:
        cls, old = box_class(old["class_path"], kind, key), old["init_args"]
    return {"class_path": import_path(cls), "init_args": _merge_fields(old, new, cls, key)}


def _merge_fields(old: dict, new: dict, cls: type, key: str) -> dict:
    hints, merged = hints_of(cls), dict(old)
    for name, value in new.items():
        if name not in hints:
            raise unknown(join(key, name), [join(key, known) for known in hints])
        merged[name] = merge(old.get(name), value, hints[name], join(key, name))
    return merged


def _defaults(cls: type) -> dict:
    data = {}
    for field in dataclasses.fields(cls):
        if field.default is not dataclasses.MISSING:
            data[field.name] = to_data(field.default)
        elif field.default_factory is not dataclasses.MISSING:
            data[field.name] = to_data(field.default_factory())
    return data


def hint_of(root: type, data: dict, key: str, known: Sequence[str] = ()) -> Any:
    """The type of the field that an option with this dotted name sets.

    Args:
      root: The dataclass at the top.
      data: Complete data of it, which says what boxes there are.
      key: The name.
      known: Further names for "did you mean".

    Raises:
      ConfigError: No such name.
    """
    hint: Any = root
    node: Any = data
    path = ""
    for name in key.split("."):
        kind, cls = kind_of(hint), hint
        if kind:
            if node is None:
                raise ConfigError(f"there is no box at {path}", fix=f"--{path}=CLASS")
            cls, node = box_class(node["class_path"], kind, path), node["init_args"]
        if not dataclasses.is_dataclass(cls) or name not in hints_of(cls):
            raise unknown(f"--{key}", [f"--{option}" for option in (*names_in(data), *known)])
        hint, node, path = hints_of(cls)[name], (node or {}).get(name), join(path, name)
    return hint


def names_in(data: dict, key: str = "") -> Iterator[str]:
    """Every dotted name of plain data, boxes and groups included."""
    for name, value in data.get("init_args", data).items():
        yield join(key, name)
        if isinstance(value, dict):
            yield from names_in(value, join(key, name))


def options_in(words: Sequence[str]) -> Iterator[tuple[str, str | None]]:
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


def unknown(name: str, known: Sequence[str]) -> ConfigError:
    """The error for a name that is not there, with the nearest one that is."""
    last = [k for k in known if k.rpartition(".")[2] == name.lstrip("-")]
    near = last or difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    fix = f"did you mean {near[0]}?" if near else "see --help"
    return ConfigError(f"unknown name {name}", fix=fix)


def join(key: str, name: Any) -> str:
    """A dotted name from its parts; the first may be empty."""
    return f"{key}.{name}" if key else str(name)


# --- classes and types ----------------------------------------------------------------------------


@functools.cache
def our_boxes() -> dict[str, type[Box]]:
    """The boxes of jaxgpt by class name."""
    found: dict[str, type[Box]] = {}
    modules = pkgutil.iter_modules(jaxgpt.boxes.__path__, "jaxgpt.boxes.")
    for module in (*(each.name for each in modules), "jaxgpt.train.optimizers"):
        for name, cls in vars(importlib.import_module(module)).items():
            if isinstance(cls, type) and issubclass(cls, Box) and dataclasses.is_dataclass(cls):
                found[name] = cls
    return found


def box_class(name: Any, kind: type[Box], key: str) -> type[Box]:
    """The class that a name stands for: one of ours, or an import path.

    Args:
      name: `RMSNorm`, or `my_module.MyNorm`; the current folder is searched too.
      kind: The base class it must have.
      key: Dotted name of the place, for messages.

    Raises:
      ConfigError: It cannot be imported, or is no dataclass of that kind.
    """
    ours = our_boxes()
    module, _, attribute = str(name).rpartition(".")
    cls = ours.get(str(name))
    if module and cls is None:
        cls = _import(module, attribute, f"{key}={name}")
    if not (isinstance(cls, type) and issubclass(cls, kind) and dataclasses.is_dataclass(cls)):
        known = sorted(n for n, c in ours.items() if issubclass(c, kind))
        near = difflib.get_close_matches(str(name), known, n=1)
        choices = f"one of {', '.join(known)}, or an import path such as my_module.MyClass"
        raise ConfigError(
            f"{key}={name} is no {kind.__name__}",
            fix=f"did you mean {key}={near[0]}?" if near else choices,
        )
    return cls


def _import(module: str, attribute: str, what: str) -> Any:
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        return getattr(importlib.import_module(module), attribute)
    except JaxgptError:
        raise
    except Exception as error:  # whatever the foreign file does when it is run
        raise ConfigError(f"{what} cannot be imported: {error}") from error


def import_path(cls: type) -> str:
    """Where Python finds the class."""
    return f"{cls.__module__}.{cls.__qualname__}"


def short_name(cls: type) -> str:
    """The class's name where it is one of our boxes, else its import path."""
    return cls.__name__ if our_boxes().get(cls.__name__) is cls else import_path(cls)


def kind_of(hint: Any) -> type[Box] | None:
    """The kind of box that a field of this type holds, or None where it holds no box."""
    for option in (hint, *typing.get_args(hint)):
        if isinstance(option, type) and issubclass(option, Box):
            return option
    return None


def hints_of(cls: Any) -> dict[str, Any]:
    """The types of a dataclass's fields."""
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls) if field.init}


def describe(hint: Any) -> str:
    """A type in words: `int or null`, `one of float32, bfloat16`."""
    if typing.get_origin(hint) is typing.Literal:
        return "one of " + ", ".join(map(str, typing.get_args(hint)))
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " or ".join(map(describe, typing.get_args(hint)))
    if is_list(hint):
        return f"list of {describe(typing.get_args(hint)[0])}"
    if hint is type(None):
        return "null"
    return hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint)


def _optional(hint: Any) -> bool:
    return type(None) in typing.get_args(hint)


def is_scalar(hint: Any) -> bool:
    """Whether values of this type are single words on a command line, not boxes or groups."""
    inner = typing.get_args(hint)[:1] if is_list(hint) else (hint,)
    return not (kind_of(hint) or any(map(dataclasses.is_dataclass, inner)))


def is_list(hint: Any) -> bool:
    """Whether values of this type are lists; one text stands for a list of it."""
    return typing.get_origin(hint) is tuple
