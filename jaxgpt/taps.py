# SPDX-License-Identifier: Apache-2.0
"""Named sites inside the model: values that a call may look at, replace or change.

A box calls `tap` at each of its sites, where it is the identity unless `forward(capture=, patch=)`
asks for the site: nothing is computed or kept that nobody asks for. Which sites there are says
docs/dims.md; what can be done with them, `jaxgpt/study/inside.py`.
"""

import contextvars
import dataclasses
import fnmatch
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array


@dataclasses.dataclass
class Taps:
    """What one call of a model is asked for, and what it found.

    Attributes:
      capture: Patterns of the sites to keep.
      patch: What to put at sites, by pattern: a value, broadcast to the site's shape and cast to
        its dtype, or a function from the value that is there to such a value.
      captured: The values kept, patches included, by site.
      found: The patterns that fit some site.
    """

    capture: Sequence[str]
    patch: Mapping[str, Any]
    captured: dict[str, Array]
    found: set[str]

    def patches(self, site: str) -> list[str]:
        """The patterns of `patch` that fit a site."""
        return [pattern for pattern in self.patch if fnmatch.fnmatchcase(site, pattern)]

    def captures(self, site: str) -> list[str]:
        """The patterns of `capture` that fit a site."""
        return [pattern for pattern in self.capture if fnmatch.fnmatchcase(site, pattern)]

    def visit(self, site: str, x: Array) -> Array:
        """What stands at a site from here on."""
        patches, captures = self.patches(site), self.captures(site)
        if not patches and not captures:
            return x
        for pattern in patches:
            x = _patched(site, x, self.patch[pattern])
        if captures:
            self.captured[site] = x
        self.found.update(patches, captures)
        return x

    def check(self) -> None:
        """Raise `ValueError` if a pattern fits no site of the call."""
        if unknown := {*self.capture, *self.patch} - self.found:
            raise ValueError(f"no such site: {sorted(unknown)}")


@dataclasses.dataclass(frozen=True)
class SiteTap:
    """`tap` for code outside of a module, where somebody asks for one of its sites.

    Attributes:
      module: Whose sites they are.
      patched: Names of those that are patched.
    """

    module: nn.Module
    patched: tuple[str, ...]

    def __call__(self, name: str, x: Array) -> Array:
        """As `tap`."""
        return tap(self.module, name, x)


_active: contextvars.ContextVar[Taps | None] = contextvars.ContextVar("taps", default=None)


def tap(module: nn.Module, name: str, x: Array) -> Array:
    """The value at the site `<module path>/<name>`: x, unless a patch asks for another one.

    Raises:
      ValueError: A patch does not fit the site's shape.
    """
    taps = _active.get()
    return x if taps is None else taps.visit(_site(module, name), x)


def tap_of(module: nn.Module, *names: str) -> SiteTap | None:
    """`tap` as a function of a site's name and value; None where no site of `names` is asked for.

    For values that are only made where they are asked for.
    """
    taps = _active.get()
    if taps is None:
        return None
    sites = {name: _site(module, name) for name in names}
    patched = tuple(name for name, site in sites.items() if taps.patches(site))
    asked = patched or any(taps.captures(site) for site in sites.values())
    return SiteTap(module, patched) if asked else None


@contextmanager
def tapping(capture: Sequence[str] = (), patch: Mapping[str, Any] | None = None) -> Iterator[Taps]:
    """Serve the taps of one call of a model; enter it inside the function that is traced.

    Without arguments it hides the sites of what is called inside, as a `jax.vmap` has to: the
    value of one lane cannot leave it.
    """
    taps = Taps(tuple(capture), dict(patch or {}), {}, set())
    token = _active.set(taps)
    try:
        yield taps
    finally:
        _active.reset(token)


def _site(module: nn.Module, name: str) -> str:
    return "/".join((*module.path, name))


def _patched(site: str, x: Array, patch: Any | Callable[[Array], Any]) -> Array:
    """A patch of x in its shape and dtype."""
    y = jnp.asarray(patch(x) if callable(patch) else patch, x.dtype)
    try:
        return jnp.broadcast_to(y, x.shape)
    except ValueError:
        raise ValueError(f"a patch of shape {y.shape} for {site} of shape {x.shape}") from None
