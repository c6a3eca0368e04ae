# SPDX-License-Identifier: Apache-2.0
"""Optimizers as boxes: how a gradient becomes a step.

A box builds the rule alone. Clipping, rate, decay, factors by path and the dtype of the moments are
the same for all of them: `optim.py`. Below, g is the gradient after clipping, w a parameter, and a
step takes `rate * (d + weight_decay * w)` from w; d is what the box makes of g.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax import contrib

from jaxgpt.boxes.base import Box, check_positive
from jaxgpt.errors import ConfigError


class OptimBox(Box):
    """How a gradient becomes a step."""

    def build(self) -> optax.GradientTransformation:
        """From gradients to steps d, which are subtracted; parameters are given to `update`."""
        raise NotImplementedError

    def rate(self, path: str) -> float:
        """Factor on the rate of the parameter at a path, `block_0/attention/q/kernel`."""
        return 1.0

    def hidden_rate(self, width_ratio: float) -> float:
        """Factor on d of hidden matrices that carries a rate over to another width (muP).

        Args:
          width_ratio: Width of the model over the width that the rate was tuned at.

        Raises:
          ConfigError: No such factor is known.
        """
        raise ConfigError(
            f"there is no muP rule for optim.method={type(self).__name__}",
            fix="--optim.method=AdamW, or --model.mup_base=null",
        )

    def memory(self) -> float:
        """The largest share of a moment that one step keeps; 0: there are none."""
        return 0.0


def is_hidden(path: str) -> bool:
    """Whether a parameter is a matrix between hidden layers: a kernel of a block."""
    return path.startswith("block_") and path.endswith("/kernel")


def path_of(key: tuple) -> str:
    """The path of a parameter from its key in the pytree."""
    return jax.tree_util.keystr(key, simple=True, separator="/")


def check_shares(**values: float) -> None:
    """Raise `ConfigError` unless each value is in [0, 1)."""
    for name, value in values.items():
        if not 0 <= value < 1:
            raise ConfigError(f"{name}={value} must be in [0, 1)")


@dataclasses.dataclass(frozen=True)
class AdamW(OptimBox):
    """`d = m / (sqrt(v) + eps)`, m and v the means of g and g^2 over the steps so far.

    `m = beta1 m + (1 - beta1) g`, `v = beta2 v + (1 - beta2) g^2`; in step n they are used as
    `m / (1 - beta1^n)` and `v / (1 - beta2^n)`, which corrects their start at 0.

    Source: Kingma & Ba 2014, algorithm 1, https://arxiv.org/abs/1412.6980; decay beside it:
      Loshchilov & Hutter 2019, algorithm 2, https://arxiv.org/abs/1711.05101
    """

    beta1: float = 0.9  # memory of the gradient's mean
    beta2: float = 0.99  # memory of its square
    eps: float = 1e-8  # added to the root of the square

    def __post_init__(self) -> None:
        check_shares(beta1=self.beta1, beta2=self.beta2)
        check_positive(eps=self.eps)

    def build(self) -> optax.GradientTransformation:
        """Two moments of each parameter."""
        return optax.scale_by_adam(self.beta1, self.beta2, self.eps)

    def hidden_rate(self, width_ratio: float) -> float:
        """1 / ratio. Source: Yang et al. 2022, table 8, https://arxiv.org/abs/2203.03466 ."""
        return 1 / width_ratio

    def memory(self) -> float:
        """That of the longer one."""
        return max(self.beta1, self.beta2)


@dataclasses.dataclass(frozen=True)
class Lion(OptimBox):
    """`d = sign(beta1 m + (1 - beta1) g)`, then `m = beta2 m + (1 - beta2) g`.

    Every entry moves by the whole rate: it should be 3 to 10 times smaller than AdamW's, and
    `weight_decay` as much larger.

    Source: Chen et al. 2023, algorithm 2, https://arxiv.org/abs/2302.06675
    """

    beta1: float = 0.9  # share of the memory in the step
    beta2: float = 0.99  # memory of the gradient's mean

    def __post_init__(self) -> None:
        check_shares(beta1=self.beta1, beta2=self.beta2)

    def build(self) -> optax.GradientTransformation:
        """One moment of each parameter."""
        return optax.scale_by_lion(self.beta1, self.beta2)

    def hidden_rate(self, width_ratio: float) -> float:
        """As AdamW, whose steps have entries of the same size."""
        return 1 / width_ratio

    def memory(self) -> float:
        """Of its moment."""
        return self.beta2


@dataclasses.dataclass(frozen=True)
class SGD(OptimBox):
    """`m = momentum m + g`; `d = m`, or with Nesterov's form `d = g + momentum m`.

    Source: Sutskever et al. 2013, eq. 1-4, https://proceedings.mlr.press/v28/sutskever13.html
    Differs from the paper: the rate is outside of the sum, as in PyTorch.
    """

    momentum: float = 0.9  # memory of the gradient's sum; 0: none
    nesterov: bool = False  # step from where the momentum leads to

    def __post_init__(self) -> None:
        check_shares(momentum=self.momentum)
        if self.nesterov and not self.momentum:
            raise ConfigError("nesterov=True needs a momentum")

    def build(self) -> optax.GradientTransformation:
        """One moment of each parameter, none without momentum."""
        return optax.trace(self.momentum, self.nesterov) if self.momentum else optax.identity()

    def memory(self) -> float:
        """Of its moment."""
        return self.momentum


@dataclasses.dataclass(frozen=True)
class Adafactor(OptimBox):
    """`d = scale u / max(1, rms(u) / clip_rms)` with `u = g / sqrt(v)`, v of a matrix from sums.

    Of a matrix only row sums R and column sums C of the running mean of g^2 are kept:
    `v = R C^T / sum(R)`; the mean's memory in step n is `1 - n^-decay_power`. `scale` is rms(w), at
    least 0.001, so that the rate is a share of the weights' size; 1 without `parameter_scale`.

    Source: Shazeer & Stern 2018, algorithms 4 and 5, https://arxiv.org/abs/1804.04235
    """

    decay_power: float = 0.8  # how fast the memory of the square grows
    clip_rms: float = 1.0  # largest root mean square of u
    parameter_scale: bool = True  # the rate is a share of the size of each parameter
    min_factored: int = 128  # matrices of a smaller side keep all of v

    def __post_init__(self) -> None:
        check_positive(
            decay_power=self.decay_power, clip_rms=self.clip_rms, min_factored=self.min_factored
        )

    def build(self) -> optax.GradientTransformation:
        """Two vectors of each matrix."""
        steps = [
            optax.scale_by_factored_rms(
                decay_rate=self.decay_power, min_dim_size_to_factor=self.min_factored
            ),
            optax.clip_by_block_rms(self.clip_rms),
        ]
        return optax.chain(*steps, *[optax.scale_by_param_block_rms()] * self.parameter_scale)

    def hidden_rate(self, width_ratio: float) -> float:
        """As AdamW; where steps follow the size of the weights no rule is known."""
        if self.parameter_scale:
            raise ConfigError(
                "there is no muP rule for Adafactor with parameter_scale",
                fix="--optim.method.parameter_scale=false",
            )
        return 1 / width_ratio

    def memory(self) -> float:
        """It grows to 1."""
        return 1.0


@dataclasses.dataclass(frozen=True)
class Muon(OptimBox):
    """`d = s NewtonSchulz(beta m + (1 - beta) g)` for kernels of blocks; `rest` for all others.

    `m = beta m + (1 - beta) g`, both terms corrected for the start at 0. The iteration
    `X = a X + b (X X^T) X + c (X X^T)^2 X` with (a, b, c) = (3.4445, -4.7750, 2.0315), begun at the
    matrix over its Frobenius norm, brings all singular values near 1. `s` is
    `consistent_rms sqrt(max(in, out))`, which gives steps of AdamW's size, or without it
    `sqrt(max(1, out / in))`. Each expert's matrix is one of its own.

    Source: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/; consistent_rms: Liu et
      al. 2025, section 2.2, https://arxiv.org/abs/2502.16982
    Differs from the text: the correction, which is optax's.
    """

    beta: float = 0.95  # memory of the gradient's mean
    nesterov: bool = True  # mix g into the mean once more; else d is made of m alone
    iterations: int = 5  # of Newton-Schulz
    eps: float = 1e-8  # added to the Frobenius norm
    consistent_rms: float | None = 0.2  # root mean square of the steps; None: by out / in
    rest: OptimBox = AdamW()  # for embeddings, head, norms and biases
    rest_rate: float = 1.0  # their rate, as a share of optim.lr

    def __post_init__(self) -> None:
        check_shares(beta=self.beta)
        check_positive(iterations=self.iterations, eps=self.eps, rest_rate=self.rest_rate)
        check_positive(consistent_rms=self.consistent_rms)
        if isinstance(self.rest, Muon):
            raise ConfigError("rest=Muon has no parameters of its own", fix="rest=AdamW")

    def build(self) -> optax.GradientTransformation:
        """One moment of each kernel, and those of `rest`."""
        muon = optax.chain(
            contrib.scale_by_muon(  # the corrected mean over its norm; the iteration is ours
                ns_steps=0,
                ns_coeffs=(np.float32(0), np.float32(0), np.float32(0)),  # unused; not float64
                beta=self.beta,
                eps=self.eps,
                nesterov=self.nesterov,
                weight_dimension_numbers=_last_two_axes,
            ),
            optax.stateless_with_tree_map(lambda x, _: _orthogonal(x, self.iterations)),
            optax.stateless_with_tree_map(self._sized),
        )
        return optax.partition({"hidden": muon, "rest": self.rest.build()}, _labels)

    def _sized(self, d: Any, _: Any) -> Any:
        """A step times s."""
        fan_in, fan_out = d.shape[-2:]
        if self.consistent_rms is None:
            return d * math.sqrt(max(1, fan_out / fan_in))
        return d * self.consistent_rms * math.sqrt(max(fan_in, fan_out))

    def rate(self, path: str) -> float:
        """`rest_rate` for what is not hidden."""
        return 1.0 if is_hidden(path) else self.rest_rate

    def hidden_rate(self, width_ratio: float) -> float:
        """A spectral norm of sqrt(out / in) for steps: `s` alone has it already.

        Source: Yang, Simon & Bernstein 2023, condition 1, https://arxiv.org/abs/2310.17813
        """
        return 1.0 if self.consistent_rms is None else 1 / math.sqrt(width_ratio)

    def memory(self) -> float:
        """That of the longest one."""
        return max(self.beta, self.rest.memory())


def _orthogonal(x: Any, iterations: int) -> Any:
    """Muon's iteration on the matrices of the last two axes, of norm 1 at most.

    Each step multiplies X, lying on its long side, by a polynomial of X X^T. Only square and
    product of polynomials are carried along: a third of the work for a matrix of one to six.
    """
    # Rounding can make an eigenvalue negative, and those grow: no TF32.
    dot = functools.partial(jnp.matmul, precision="highest")
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    square = dot(x, x.mT)
    product = identity = jnp.broadcast_to(jnp.eye(x.shape[-2], dtype=x.dtype), square.shape)
    for i in range(iterations):
        step = 3.4445 * identity - 4.7750 * square + 2.0315 * dot(square, square)
        product = dot(step, product) if i else step
        if i < iterations - 1:
            square = dot(step, dot(square, step))
    return dot(x.mT, product) if is_tall else dot(product, x)


def _labels(params: Any) -> Any:
    """Which of the two works on a parameter."""
    return jax.tree_util.tree_map_with_path(
        lambda key, _: "hidden" if is_hidden(path_of(key)) else "rest", params
    )


def _last_two_axes(params: Any) -> Any:
    """Matrices are [..., in, out]; of each leading index there is one."""
    return jax.tree.map(lambda _: contrib.MuonDimensionNumbers(-2, -1), params)
