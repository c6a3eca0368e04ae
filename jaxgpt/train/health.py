# SPDX-License-Identifier: Apache-2.0
"""Is the run well? What the numbers of its steps say: skipped steps, jumps of the loss, speed.

Looking changes nothing of the training but its end: what a bad step may do to the state is decided
inside the step (`jaxgpt.train.step`), before the host knows of it.
"""

import collections
import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxgpt.errors import DivergedError
from jaxgpt.flops import train_flops_per_token
from jaxgpt.masks import Visibility
from jaxgpt.model import ModelConfig, forward
from jaxgpt.shapes import Params
from jaxgpt.taps import tapping
from jaxgpt.train.config import LoraConfig
from jaxgpt.train.lora import merged

_NO_LORA = LoraConfig()

LOOKED_BACK = 100
"""Steps whose losses say what is usual."""
WARM_UP = 20
"""Of them, those that are needed to say anything."""
SIGMAS = 6.0
"""A spike's distance from the median, in standard deviations as the median deviation tells them."""
LEAST_JUMP = 0.05
"""Its least distance as a share of the median: losses that barely move have no spikes."""
SCORED_TOKENS = 4096
"""Longest text that the largest attention logit is looked for in; scores take its square."""
SHOWN_WINDOWS = 8
"""Of a batch, in a line."""

PEAK_TFLOPS = {  # of a device: (bfloat16, float32 as JAX multiplies it by default), dense
    "NVIDIA A100": (312.0, 156.0),
    "NVIDIA H100 PCIe": (756.0, 378.0),
    "NVIDIA H100 NVL": (835.0, 417.0),
    "NVIDIA H100": (989.0, 494.0),
    "NVIDIA H200": (989.0, 494.0),
    "TPU v4": (275.0, 275.0),
    "TPU v5 lite": (197.0, 197.0),  # v5e
    "TPU v5e": (197.0, 197.0),
    "TPU v5p": (459.0, 459.0),
    "TPU v5": (459.0, 459.0),  # v5p, as JAX names it
    "TPU v6 lite": (918.0, 918.0),  # v6e
    "TPU v6e": (918.0, 918.0),
}
"""Peak rates by the beginning of `device_kind`, the first that fits.

By default JAX multiplies float32 in TF32 on these GPUs and in one pass of bfloat16 on TPUs.

Source: https://www.nvidia.com/en-us/data-center/a100/, .../h100/, .../h200/, half of the rates that
  are given "with sparsity"; https://cloud.google.com/tpu/docs/v4, .../v5e, .../v5p, .../v6e
"""


def usual(losses: Sequence[float]) -> tuple[float, float]:
    """The median of some losses, and the loss above which the next one would be a spike.

    The spread is the median distance from the median, times 1.4826 as for a normal distribution:
    earlier spikes among the losses move neither much.
    """
    median = statistics.median(losses)
    spread = 1.4826 * statistics.median([abs(loss - median) for loss in losses])
    return median, median + max(SIGMAS * spread, LEAST_JUMP * abs(median))


class Spikes:
    """Looks at losses in order, and finds where they jump."""

    def __init__(self):
        self._losses: collections.deque[float] = collections.deque(maxlen=LOOKED_BACK)
        self._high = False

    def look(self, loss: float) -> float | None:
        """The usual loss where a spike begins at this one; else None."""
        median = limit = loss
        if len(self._losses) >= WARM_UP:
            median, limit = usual(self._losses)
        self._losses.append(loss)
        before, self._high = self._high, loss > limit
        return median if self._high and not before else None


class Health:
    """Looks at the numbers of each step in order.

    What loss is usual is known from the steps of this process alone: a run that goes on first looks
    at `WARM_UP` steps again.

    Args:
      max_bad_steps: So many skipped steps in a row end the run.
      windows: Text, epoch and first id of each row of a step's batch, by the step's number from 0.
    """

    def __init__(self, max_bad_steps: int, windows: Callable[[int], np.ndarray]):
        self.max_bad_steps, self.windows, self._spikes = max_bad_steps, windows, Spikes()

    def look(self, step: int, values: dict[str, Any]) -> str | None:
        """A line to say if something is the matter; else None.

        Args:
          step: Number of the step, from 1.
          values: What `train_step` returned, as numbers; changed to what is recorded, with
            `skipped` or `spike` where it is so.

        Raises:
          DivergedError: It is the last of `max_bad_steps` skipped steps in a row.
        """
        in_a_row, most = int(values.pop("bad_steps")), self.max_bad_steps
        values["skipped_steps"] = int(values["skipped_steps"])
        if not values.pop("finite"):
            values["skipped"] = True
            what = _numbers(values)
            if in_a_row >= most:
                raise DivergedError(
                    f"loss, gradient or update is not finite at step {step}, the last of {in_a_row}"
                    f" in a row: {what}; the newest checkpoint has none of these updates",
                    fix="a lower --optim.lr or longer --optim.warmup_steps, in another --run",
                )
            return f"step {step} skipped: {what} ({in_a_row} of at most {most} in a row)"
        median = self._spikes.look(values["loss_nats"])
        if median is None:
            return None
        values["spike"] = True
        return (
            f"step {step}: the loss jumped from about {median:.4f}: {_numbers(values)}, "
            f"{_named(self.windows(step - 1))}"
        )


def _numbers(values: dict[str, Any]) -> str:
    """Loss and gradient norm; the update as well where it alone is not finite."""
    loss, norm, update = (values[k] for k in ("loss_nats", "grad_norm", "update_ratio"))
    text = f"loss {loss:.4g}, gradient norm {norm:.4g}"
    alone = math.isfinite(loss) and math.isfinite(norm) and not math.isfinite(update)
    return f"{text}, update {update:.4g} of the weights" if alone else text


def _named(windows: np.ndarray) -> str:
    """A batch for people: how many windows of which epoch, and where the first of them begin."""
    said = []
    for text, epoch in np.unique(windows[:, :2], axis=0):
        own = windows[(windows[:, 0] == text) & (windows[:, 1] == epoch), 2]
        more = f" and {len(own) - SHOWN_WINDOWS} more" if len(own) > SHOWN_WINDOWS else ""
        of = f" of text {text}" if windows[:, 0].any() else ""
        said.append(f"epoch {epoch}{of} at ids {' '.join(map(str, own[:SHOWN_WINDOWS]))}{more}")
    return ", ".join(said)


@dataclasses.dataclass(frozen=True)
class Speed:
    """What a rate of tokens means: model FLOPs per second, and their share of what devices can do.

    Attributes:
      full: FLOPs of a token, attention counted over all of the context.
      causal: The same, counted over what a query sees.
      peak_tflops: Of all devices together; None: not known.
    """

    full: float
    causal: float
    peak_tflops: float | None

    @classmethod
    def of(cls, cfg: ModelConfig, dtype: str) -> "Speed":
        """Of training all of a model in a dtype on the devices that there are."""
        full, causal = (train_flops_per_token(cfg, causal=causal) for causal in (False, True))
        peak = peak_tflops(jax.devices()[0].device_kind, dtype)
        return cls(full, causal, None if peak is None else peak * jax.device_count())

    def metrics(self, tokens_per_s: float) -> dict[str, float]:
        """`model_tflops_per_s_*` of all devices together, and `mfu_*` where the peak is known."""
        values = {}
        for name, flops in (("full", self.full), ("causal", self.causal)):
            tflops = flops * tokens_per_s / 1e12
            values[f"model_tflops_per_s_{name}"] = tflops
            if self.peak_tflops is not None:
                values[f"mfu_{name}"] = tflops / self.peak_tflops
        return {name: float(f"{value:.4g}") for name, value in values.items()}


def peak_tflops(device_kind: str, dtype: str) -> float | None:
    """Peak of one device in TFLOP/s for products of this dtype; None: not known."""
    for kind, (bfloat16, float32) in PEAK_TFLOPS.items():
        if device_kind.startswith(kind):
            return bfloat16 if dtype == "bfloat16" else float32
    return None


def attention_logits(
    params: Params,
    tokens_1T: Int[Array, "1 T"],
    *,
    cfg: ModelConfig,
    dtype: DTypeLike = "float32",
    lora: LoraConfig = _NO_LORA,
) -> dict[str, Float[Array, ""]]:
    """The largest score of a visible key in each attention of the model, by site, for one text.

    Scaled and capped, without position bias; attention that has no site `scores` is left out.
    """
    T, found = tokens_1T.shape[1], {}
    with tapping(["*/attention/scores"]) as taps:
        forward(cfg, merged(params, lora), tokens_1T, dtype=dtype, kernel="reference")
    for site, scores in taps.captured.items():
        layer = cfg.layers[int(site.split("/")[0].removeprefix("block_"))]
        window = getattr(layer.attention, "window", None)
        seen_1TT = dataclasses.replace(Visibility.full(1, T), window=window).mask()
        if scores.shape[-2:] == (T, T):
            found[site] = jnp.where(seen_1TT, scores, -jnp.inf).max()
    return found
