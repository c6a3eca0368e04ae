# SPDX-License-Identifier: Apache-2.0
"""Is one of two models better? Both score the same tokens, or were trained from the same seeds.

Left out: the test itself (`student.py`), and where runs are.
"""

import functools
from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import Float

from jaxgpt.data.batches import eval_batches
from jaxgpt.data.config import DataConfig
from jaxgpt.data.packing import Boundary
from jaxgpt.data.shardedids import ShardedIds
from jaxgpt.data.shards import is_token_folder, open_token_folder
from jaxgpt.data.tokenizer import Tokenizer
from jaxgpt.data.tokens import open_tokens
from jaxgpt.errors import ConfigError
from jaxgpt.model import ModelConfig
from jaxgpt.shapes import Params
from jaxgpt.study.lanes import SEEDS, LaneRun, by_kind
from jaxgpt.study.student import Paired, paired
from jaxgpt.train.config import TrainConfig
from jaxgpt.train.rundata import tokens_file
from jaxgpt.train.runfolder import RunFolder
from jaxgpt.train.step import eval_step

TOKENS = 4096
"""Of a batch, about."""


def validation_ids(
    run: RunFolder, data: DataConfig, tokenizer: Tokenizer
) -> list[tuple[np.ndarray | ShardedIds, np.ndarray | None]]:
    """The validation ids of a started run with their weights; several of a mixture.

    Raises:
      ConfigError: They are not there any more, or there are none.
    """
    names = sorted(map(str, data.mixture)) if data.mixture else [data.path]
    if is_token_folder(names[0]):
        folders = [open_token_folder(str(name), tokenizer) for name in names]
        found = [(folder.val, None) for folder in folders]
    else:
        file = open_tokens(tokens_file(run), tokenizer=tokenizer)
        found = [(file.val, file.val_weights)]
    found = [(ids, weights) for ids, weights in found if len(ids) > 1]
    if not found:
        raise ConfigError("the run has no validation text", where=str(run.path))
    return found


def token_nats(
    model: ModelConfig,
    params: Params,
    ids: np.ndarray | ShardedIds,
    weights: np.ndarray | None = None,
    boundary: Boundary | None = None,
    *,
    dtype: str = "float32",
) -> tuple[Float[np.ndarray, " n"], Float[np.ndarray, " n"]]:
    """Nats of every id but the first, and its weight, in windows of the context without overlap.

    Args:
      model: Its vocabulary is known.
      params: Its parameters.
      ids: n + 1 of them.
      weights: 1 for each id that is scored, 0 for the others; None: all are.
      boundary: What keeps documents apart; then the first id of each has weight 0.
      dtype: Of computation.
    """
    T = model.context_length
    train = TrainConfig(dtype=dtype)  # type: ignore[arg-type]
    score = jax.jit(functools.partial(eval_step, cfg=model, train=train))
    nats, scored = [], []
    for batch in eval_batches(ids, T, max(TOKENS // T, 1), weights, boundary):
        nats.append(np.asarray(score(params, batch), np.float64).reshape(-1))
        scored.append(np.asarray(batch.weights_BT, np.float64).reshape(-1))
    n = len(ids) - 1
    return np.concatenate(nats)[:n], np.concatenate(scored)[:n]


def over_windows(
    first: Float[np.ndarray, " n"],
    second: Float[np.ndarray, " n"],
    weights: Float[np.ndarray, " n"],
    window: int,
) -> Paired:
    """The difference in nats per token, paired over windows of a text.

    Args:
      first: Nats of each token by the first model.
      second: By the second.
      weights: Of each token.
      window: Tokens that are taken together, for neighbours hang together.

    Raises:
      ConfigError: Fewer than two windows have scored tokens.
    """
    starts = np.arange(0, len(first), window)
    sums = [np.add.reduceat(each, starts) for each in (first, second, weights)]
    a, b, w = (each[sums[2] > 0] for each in sums)
    return paired(a, b, w)


def over_seeds(first: Sequence[LaneRun], second: Sequence[LaneRun]) -> Paired:
    """The difference of the last validation losses, paired over lanes of the same seeds.

    Raises:
      ConfigError: Lanes differ in more than seeds, or fewer than two seeds are in both.
    """
    losses = []
    for lanes in (first, second):
        if len(by_kind(lanes)) > 1:
            what = "lanes that differ in more than seeds are not one thing to compare"
            raise ConfigError(what, fix="one lane of each folder, or folders of seeds")
        seeds = [tuple(lane.values.get(name) for name in SEEDS) for lane in lanes]
        found = zip(seeds, [lane.final_loss() for lane in lanes], strict=True)
        losses.append({key: loss for key, loss in found if loss is not None})
    both = [key for key in losses[0] if key in losses[1]]
    return paired(*([each[key] for key in both] for each in losses))
