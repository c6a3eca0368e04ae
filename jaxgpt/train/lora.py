# SPDX-License-Identifier: Apache-2.0
"""LoRA: trained low-rank additions to kernels of a frozen model, as functions of parameters.

The adapters stand beside the model's parameters, under "lora" and then at the path of the kernel
that they change: `lora/block_0/attention/q/{a,b}`. No box knows of them: `merged` makes ordinary
parameters, inside the compiled step as well as for sampling and export.
"""

import fnmatch
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import traverse_util

from jaxgpt.errors import ConfigError
from jaxgpt.shapes import Key, Params
from jaxgpt.train.config import LoraConfig

NAME = "lora"


def targets(params: Params, cfg: LoraConfig) -> list[tuple[str, ...]]:
    """Paths of the kernels that get adapters, in order.

    Raises:
      ConfigError: A pattern that no kernel matches.
    """
    paths = [path for path in _flat(params) if path[-1] == "kernel"]
    found = set()
    for pattern in cfg.targets:
        hits = {path for path in paths if _matches(path, pattern)}
        if not hits:
            shown = sorted({"/".join(path[1:]) for path in paths if path[0] == "block_0"})
            raise ConfigError(
                f"lora.targets: no kernel matches {pattern!r}",
                fix=f"--lora.targets with patterns of {', '.join(shown)}",
            )
        found |= hits
    return sorted(found)


def _matches(path: tuple[str, ...], pattern: str) -> bool:
    """Whether a path matches, whole or behind its block, with or without the word kernel."""
    forms = {path, path[:-1]}
    if path[0].startswith("block_"):
        forms |= {path[1:], path[1:-1]}
    return any(fnmatch.fnmatchcase("/".join(form), pattern) for form in forms)


def init_lora(params: Params, cfg: LoraConfig, key: Key) -> Params:
    """The parameters with fresh adapters beside them; unchanged without a rank.

    `a` [..., in, rank] is U(-1/sqrt(in), 1/sqrt(in)), `b` [..., rank, out] is zero, so that a fresh
    adapter changes nothing. Leading axes (experts) have adapters of their own.

    Source: Hu et al. 2021, section 4.1, https://arxiv.org/abs/2106.09685
    Differs from the paper: `a` is uniform, as in PEFT, where the paper draws a Gaussian.
    """
    if cfg.rank is None:
        return params
    flat, adapters = _flat(params), {}
    for number, path in enumerate(targets(params, cfg)):
        *experts, fan_in, fan_out = flat[path].shape
        if cfg.rank > min(fan_in, fan_out):
            raise ConfigError(f"lora.rank={cfg.rank} exceeds {'/'.join(path)} {fan_in}x{fan_out}")
        bound, shape = fan_in**-0.5, (*experts, fan_in, cfg.rank)
        a = jax.random.uniform(jax.random.fold_in(key, number), shape, minval=-bound, maxval=bound)
        adapters[(*path[:-1], "a")] = a
        adapters[(*path[:-1], "b")] = jnp.zeros((*experts, cfg.rank, fan_out))
    return {**params, NAME: traverse_util.unflatten_dict(adapters)}


def merged(params: Params, cfg: LoraConfig) -> Params:
    """The model's parameters with each kernel W replaced by W + alpha/rank * a b, adapters gone."""
    if cfg.rank is None:
        return params
    trained, frozen = split(params, cfg)
    adapters, flat = (_flat(tree) for tree in (trained[NAME], frozen))
    for (*module, letter), a in adapters.items():
        if letter == "a":
            path, b = (*module, "kernel"), adapters[(*module, "b")]
            delta = jnp.matmul(a, b, precision="highest") * (cfg.alpha / cfg.rank)
            flat[path] = flat[path] + delta.astype(flat[path].dtype)
    return traverse_util.unflatten_dict(flat)


def _flat(params: Params) -> dict[tuple[str, ...], Any]:
    return cast(dict, traverse_util.flatten_dict(params))


def split(params: Params, cfg: LoraConfig) -> tuple[Params, Params]:
    """(what is trained, what is frozen): everything and nothing, or the adapters and the model."""
    if cfg.rank is None:
        return params, {}
    frozen = {name: value for name, value in params.items() if name != NAME}
    return {NAME: params[NAME]}, frozen
