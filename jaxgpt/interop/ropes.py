# SPDX-License-Identifier: Apache-2.0
"""Rotary positions as a config.json describes them, in both dialects.

Newer files have one dict `rope_parameters`; older ones `rope_theta` beside a dict `rope_scaling`,
which is null for the plain rope. Families differ in the default base and in names beside these.
What is written holds both, and where both are read they must agree.
"""

from collections.abc import Callable, Mapping
from typing import Any

from jaxgpt.boxes.base import RopeScaling
from jaxgpt.boxes.rope import RoPE
from jaxgpt.boxes.scaling import DynamicNTK, LinearScaling, Llama3Scaling, YaRN
from jaxgpt.interop.reading import Config

Scaling = Callable[[Config, int], RopeScaling | None]
"""A function of the dict, and of the model's context length in tokens."""


def read_rope(
    c: Config,
    *,
    theta: float = 10_000.0,
    theta_names: tuple[str, ...] = (),
    fraction: float | None = None,
    fraction_names: tuple[str, ...] = (),
    **knobs: Any,
) -> RoPE:
    """The rope of a config.

    Args:
      c: The whole config.
      theta: Base where the config has none.
      theta_names: Names of the base beside `rope_theta`.
      fraction: Rotated share of a head where the config has none; None: always the whole head.
      fraction_names: Names of the share beside `partial_rotary_factor`.
      **knobs: As for `rope_of`.

    Raises:
      ConfigError: An unknown type, an unknown key, or places that contradict each other.
    """
    new, old = c.section("rope_parameters"), c.section("rope_scaling")
    outer_theta = c.number("rope_theta", *theta_names, default=None)
    outer_fraction = _share(c, fraction, *fraction_names)
    rope, *others = (
        rope_of(
            entry,
            c.count("max_position_embeddings"),
            theta=theta if outer_theta is None else outer_theta,
            fraction=fraction if outer_fraction is None else outer_fraction,
            **knobs,
        )
        for entry in [each for each in (new, old) if each is not None] or [Config({}, "")]
    )
    if others not in ([], [rope]):
        raise c.error("rope_scaling", "contradicts rope_parameters", fix="one of the two")
    if outer_theta not in (None, rope.theta):
        raise c.error("rope_theta", f"contradicts {rope.theta} inside rope_parameters")
    if outer_fraction not in (None, rope.fraction):
        raise c.error("partial_rotary_factor", f"contradicts {rope.fraction} in rope_parameters")
    return rope


def rope_of(
    entry: Config,
    length: int,
    *,
    theta: float,
    fraction: float | None = None,
    scalings: Mapping[str, Scaling] | None = None,
    **knobs: Any,
) -> RoPE:
    """The rope of one dict, which is closed.

    Args:
      entry: The dict.
      length: The model's context length, in tokens.
      theta: Base where the dict has none.
      fraction: Rotated share of a head where the dict has none; None: always the whole head.
      scalings: By rope type; None: `SCALINGS`.
      **knobs: Further ones of the box.

    Raises:
      ConfigError: An unknown type or an unknown key.
    """
    scaling = entry.choice(scalings or SCALINGS, "rope_type", "type", default="default")
    inner_theta, inner_fraction = entry.number("rope_theta", default=None), _share(entry, fraction)
    fraction = fraction if inner_fraction is None else inner_fraction
    rope = RoPE(
        theta=theta if inner_theta is None else inner_theta,
        fraction=1.0 if fraction is None else fraction,
        scaling=scaling(entry, length),
        **knobs,
    )
    entry.close()
    return rope


def _share(c: Config, fraction: float | None, *names: str) -> float | None:
    """The rotated share that a dict states; for families without one, only all of the head."""
    if fraction is None:
        c.only("partial_rotary_factor", 1, None)
        return None
    return c.number("partial_rotary_factor", *names, default=None)


def _default(entry: Config, length: int) -> None:
    return None


def _linear(entry: Config, length: int) -> LinearScaling:
    return LinearScaling(factor=entry.number("factor"))


def _dynamic(entry: Config, length: int) -> DynamicNTK:
    entry.only("original_max_position_embeddings", length, None)
    return DynamicNTK(factor=entry.number("factor"), original_length=length)


def _llama3(entry: Config, length: int) -> Llama3Scaling:
    return Llama3Scaling(
        factor=entry.number("factor"),
        low_freq_factor=entry.number("low_freq_factor"),
        high_freq_factor=entry.number("high_freq_factor"),
        original_length=entry.count(
            "original_max_position_embeddings", default=length, null=length
        ),
    )


def _yarn(entry: Config, length: int, **mscale: float | None) -> YaRN:
    original = entry.count("original_max_position_embeddings", default=length, null=length, least=1)
    return YaRN(
        factor=entry.number("factor", default=None) or length / original,
        original_length=original,
        beta_fast=entry.number("beta_fast", default=None) or 32.0,
        beta_slow=entry.number("beta_slow", default=None) or 1.0,
        truncate=entry.flag("truncate", default=True),
        attention_factor=entry.number("attention_factor", default=None),
        **mscale,
    )


def _deepseek_yarn(entry: Config, length: int) -> YaRN:
    """With the two keys of DeepSeek; a zero is as good as none."""
    mscale = entry.number("mscale", default=None) or None
    all_dim = entry.number("mscale_all_dim", default=None) or None
    if all_dim is None or entry.number("attention_factor", default=None) is not None:
        mscale = None  # it has no effect then
    return _yarn(entry, length, mscale=mscale, mscale_all_dim=all_dim)


SCALINGS: Mapping[str, Scaling] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
}
"""By rope type."""

DEEPSEEK: Mapping[str, Scaling] = {**SCALINGS, "yarn": _deepseek_yarn}
"""The same for DeepSeek's models, whose attention scales the scores too."""


def write_rope(rope: RoPE, *, partial: bool = False) -> dict[str, Any]:
    """A rope in both dialects.

    Args:
      rope: Its layout is not written; the scaling of a box that is not ours is left out.
      partial: Whether the family has a share of each head that is rotated.
    """
    scaling = write_scaling(rope.scaling)
    share = {"partial_rotary_factor": float(rope.fraction)} if partial else {}
    return {
        "rope_parameters": {**scaling, "rope_theta": float(rope.theta), **share},
        "rope_theta": float(rope.theta),
        "rope_scaling": None if scaling == PLAIN else scaling,
        **share,
    }


def write_scaling(scaling: RopeScaling | None) -> dict[str, Any]:
    """The dict of a scaling, without the base."""
    match scaling:
        case LinearScaling():
            return {"rope_type": "linear", "factor": float(scaling.factor)}
        case DynamicNTK():
            return {"rope_type": "dynamic", "factor": float(scaling.factor)}
        case Llama3Scaling():
            floats = ("factor", "low_freq_factor", "high_freq_factor")
            kind = "llama3"
        case YaRN():
            floats = ("factor", "beta_fast", "beta_slow")
            floats += ("attention_factor", "mscale", "mscale_all_dim")
            kind = "yarn"
        case _:
            return dict(PLAIN)
    values = {name: getattr(scaling, name) for name in floats}
    length = {"original_max_position_embeddings": scaling.original_length}
    whole = {} if getattr(scaling, "truncate", True) else {"truncate": False}
    said = {name: float(value) for name, value in values.items() if value is not None}
    return {"rope_type": kind, **said, **length, **whole}


PLAIN = {"rope_type": "default"}
