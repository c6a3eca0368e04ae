# SPDX-License-Identifier: Apache-2.0
"""Measuring a model on this machine: training steps, prefill and decoding, by turns.

What is timed is what the commands run: the steps of a `jaxgpt.train.trainer.Trainer`, and
`jaxgpt.sample.generate.stream`. What the numbers are compared with: `jaxgpt.costs` has the FLOPs
and bytes, `machine.py` the limits.
"""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Mapping

import jax
import numpy as np

from jaxgpt.costs import Cost
from jaxgpt.data.tokenizer import ByteTokenizer
from jaxgpt.flops import has_own_head, leaves
from jaxgpt.model import ModelConfig, init_params
from jaxgpt.sample.filters import Sampling
from jaxgpt.sample.generate import stream
from jaxgpt.shapes import Params
from jaxgpt.study.machine import Limits
from jaxgpt.train.config import LoraConfig, MeshConfig, OptimConfig, TrainConfig
from jaxgpt.train.processes import own_rows
from jaxgpt.train.sharding import make_mesh
from jaxgpt.train.texts import Text, Texts
from jaxgpt.train.trainer import Trainer

GREEDY = Sampling(temperature=0.0)

Turn = Callable[[], float]  # runs something for a while, and returns seconds for each unit of it


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds for each unit of work, such as a step, in the order of the rounds."""

    seconds: tuple[float, ...]

    @property
    def best(self) -> float:
        """Of the fastest round: least disturbed by whatever else ran."""
        return min(self.seconds)

    @property
    def median(self) -> float:
        """Of the rounds."""
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """How much longer the slowest round took than the fastest, as a share."""
        return max(self.seconds) / self.best - 1


def alternate(
    turns: Mapping[str, Turn], *, rounds: int | None = None, seconds: float | None = None
) -> dict[str, Timing]:
    """Let each run in turn, round after round, so that all meet the same disturbances.

    Args:
      turns: By name. Each ran once before: nothing is compiled any more.
      rounds: How many; None: until `seconds` are over.
      seconds: At least one round, and no new one after so many.
    """
    found: dict[str, list[float]] = {name: [] for name in turns}
    began, done = time.perf_counter(), 0
    while done < rounds if rounds else not done or time.perf_counter() - began < (seconds or 0):
        for name, turn in turns.items():
            found[name].append(turn())
        done += 1
    return {name: Timing(tuple(times)) for name, times in found.items()}


class Training:
    """Training steps of a model on random tokens, as `jaxgpt.train.loop.fit` makes them.

    Args:
      model: Its `vocab_size` is a number.
      optim: The optimizer.
      train: `batch_size`, `dtype`, `dispatch` and what else a step depends on.

    Attributes:
      compile_s: Seconds that tracing, compiling, initialising and the first dispatch took.
    """

    def __init__(self, model: ModelConfig, optim: OptimConfig, train: TrainConfig):
        began = time.perf_counter()
        n_ids = 64 * train.batch_size * model.context_length + 1
        ids = _random_ids(model, 1, n_ids, train.seed)[0]
        texts = Texts((Text("random", ids, ids[:0]),), model.dims().vocab_size)
        mesh = make_mesh(MeshConfig())
        horizon = train.steps
        self._trainer = Trainer(
            model, optim, train, LoraConfig(), mesh, texts, ByteTokenizer(), horizon
        )
        self._state, self._step = self._trainer.init(), 0
        self._rows = train.batch_size
        self.dispatch = train.dispatch
        self.run(1)
        self.compile_s = time.perf_counter() - began

    def run(self, steps: int) -> float:
        """Seconds a step, over at least `steps` and whole dispatches; it goes on where it stopped.

        Batches are made, and metrics fetched, while a device other than a tuned CPU computes.
        """
        trainer, began, waiting = self._trainer, time.perf_counter(), None
        dispatches = -(-steps // self.dispatch)
        own = own_rows(trainer.rows, self._rows)
        for _ in range(dispatches):
            numbers = range(self._step, self._step + self.dispatch)
            batches = [trainer.batches.batch(number, own) for number in numbers]
            self._state, metrics = trainer.steps(self._state, batches, self._rows)
            self._step += self.dispatch
            jax.device_get(waiting)
            waiting = metrics
        jax.block_until_ready((self._state, waiting))
        return (time.perf_counter() - began) / (dispatches * self.dispatch)


class Decoding:
    """Greedy decoding of a batch of random prompts of one length.

    Args:
      cfg: The model.
      params: As `for_decoding` returns them, or any others.
      batch: Rows.
      prompt_tokens: Of each prompt.
      dtype: Of compute and caches; None: that of the parameters.
    """

    def __init__(
        self,
        cfg: ModelConfig,
        params: Params,
        *,
        batch: int,
        prompt_tokens: int,
        dtype: str | None = None,
    ):
        ids_BT = _random_ids(cfg, batch, prompt_tokens, seed=0)
        self.batch, self._stream = (
            batch,
            functools.partial(
                *(stream, cfg, params, ids_BT.tolist()), sampling=GREEDY, dtype=dtype
            ),
        )

    def prefill(self) -> float:
        """Seconds until each prompt has its first new token."""
        return self.decode(1)[0]

    def decode(self, new_tokens: int) -> tuple[float, float]:
        """Seconds until the first new token, and from there seconds a step, over `new_tokens`."""
        began = time.perf_counter()
        chunks = self._stream(max_new_tokens=new_tokens)
        next(chunks)
        first = time.perf_counter()
        for _ in chunks:
            pass
        return first - began, (time.perf_counter() - first) / max(1, new_tokens - 1)


def random_params(cfg: ModelConfig, seed: int = 0) -> Params:
    """Fresh parameters, made by one compiled program."""
    return jax.jit(functools.partial(init_params, cfg))(jax.random.key(seed))


def bytes_per_number(cfg: ModelConfig, params: Params) -> float:
    """Bytes of weights that a step reads, for each number of them; scales of int8 are in it.

    The embedding table counts where a tied head multiplies with it; else its rows are looked up.
    """
    own_head = has_own_head(cfg)
    read = {name: tree for name, tree in params.items() if name != "embed" or not own_head}
    numbers = sum(leaf.size for leaf in leaves(cfg) if not (own_head and leaf.is_table))
    return sum(leaf.nbytes for leaf in jax.tree.leaves(read)) / numbers


def compared(timing: Timing, cost: Cost, limits: Limits, tokens: int) -> dict[str, float]:
    """What a timing means: rates, their shares of the limits, and of the least time of all.

    Args:
      timing: Of a step.
      cost: Of the same step.
      limits: Of the machine.
      tokens: Of a step.
    """
    s = timing.median
    least_s = cost.seconds(limits.flops_per_s, limits.read_bytes_per_s)
    return {
        "ms_median": 1e3 * s,
        "ms_best": 1e3 * timing.best,
        "spread": timing.spread,
        "rounds": len(timing.seconds),
        "tokens_per_s": tokens / s,
        "gflops": cost.flops / 1e9,
        "gbytes": cost.bytes / 1e9,
        "gflops_per_s": cost.flops / s / 1e9,
        "share_of_matrix_rate": cost.flops / s / limits.flops_per_s,
        "gbytes_per_s": cost.bytes / s / 1e9,
        "share_of_read_rate": cost.bytes / s / limits.read_bytes_per_s,
        "share_of_limit": least_s / s,
    }


def _random_ids(cfg: ModelConfig, rows: int, tokens: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.integers(0, cfg.dims().vocab_size, (rows, tokens), dtype=np.int32)
