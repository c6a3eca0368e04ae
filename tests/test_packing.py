# SPDX-License-Identifier: Apache-2.0
"""Documents in one row, and that the model sees each as if it were alone."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.boxes.position import Learned
from jaxgpt.boxes.rope import RoPE
from jaxgpt.data.batches import Batch, Batches, eval_batches
from jaxgpt.data.packing import Boundary
from jaxgpt.data.tokenizer import ByteTokenizer
from jaxgpt.errors import ConfigError
from jaxgpt.model import forward
from jaxgpt.testing import tiny
from jaxgpt.testing.tools import worn
from jaxgpt.train.config import TrainConfig
from jaxgpt.train.step import eval_step, loss_sum

E, B = 30, 29
ROW = np.array([5, 6, 7, E, 8, 9, E])


def packed(row, boundary) -> Batch:
    """All of a row, as the one window of a text."""
    window = next(iter(eval_batches(np.asarray(row), len(row) - 1, 1, boundary=boundary)))
    return jax.tree.map(jnp.asarray, window)


def test_the_pair_that_crosses_documents_is_not_trained():
    """Case D08: six pairs, five targets; the end of a document is a target of its own document."""
    batch = packed(ROW, Boundary(E, None))
    assert batch.weights_BT.tolist() == [[1, 1, 1, 0, 1, 1]]
    assert batch.targets_BT[batch.weights_BT > 0].tolist() == [6, 7, E, 9, E]
    assert batch.segment_BT.tolist() == [[1, 1, 1, 1, 2, 2]]
    assert batch.pos_BT.tolist() == [[0, 1, 2, 3, 0, 1]]


@pytest.mark.parametrize(
    ("row", "boundary", "segments"),
    [
        ([B, 5, 6, B, 7, B, B, 8], Boundary(None, B), [1, 1, 1, 2, 2, 3, 4, 4]),
        ([B, 5, E, B, 7, E, B, E], Boundary(E, B), [1, 1, 1, 2, 2, 2, 3, 3]),
        ([5, E, E, 6, E, 7, 8, E], Boundary(E, None), [1, 1, 2, 3, 3, 4, 4, 4]),
        # One id for both: it ends a document where it stands, and begins one behind itself.
        ([E, 5, E, E, 6, 7, E, E], Boundary(E, E), [1, 1, 1, 2, 2, 2, 2, 3]),
        ([5, 6, 7, 8, 5, 6, 7, 8], Boundary(E, B), [1] * 8),
    ],
)
def test_where_documents_begin(row, boundary, segments):
    segment_BT, pos_BT = boundary.split(np.array([row]))
    assert segment_BT.tolist() == [segments]
    counted = [segments[: i + 1].count(s) - 1 for i, s in enumerate(segments)]
    assert pos_BT.tolist() == [counted]


def test_the_ids_of_a_tokenizer():
    tokenizer = ByteTokenizer()
    with pytest.raises(
        ConfigError, match="the byte tokenizer has neither an end of text nor a BOS"
    ):
        Boundary.of(tokenizer)
    tokenizer.eot_id = 0
    assert Boundary.of(tokenizer) == Boundary(0, None)
    tokenizer.begin_ids = (7, 8)
    assert Boundary.of(tokenizer) == Boundary(0, 7)


@pytest.mark.parametrize("position", [RoPE(), Learned()], ids=["rope", "learned"])
def test_a_packed_row_gives_what_each_document_alone_gives(position):
    cfg = tiny(position=position)
    params = jax.tree.map(jnp.asarray, worn(cfg))

    @jax.jit
    def logits(tokens_BT, **call):
        return forward(cfg, params, tokens_BT, **call).logits_BTV[..., :31]

    batch = packed(ROW, Boundary(E, None))
    together = logits(batch.tokens_BT, segment_BT=batch.segment_BT, pos_BT=batch.pos_BT)
    for part in (slice(0, 4), slice(4, 6)):
        alone = logits(batch.tokens_BT[:, part])
        np.testing.assert_allclose(together[:, part], alone, atol=2e-5)
    apart = logits(batch.tokens_BT)
    assert abs(apart[:, 4:] - together[:, 4:]).max() > 0.1, "they would see each other"


def test_the_loss_is_that_of_the_documents_and_segments_are_names():
    """Case D08: not weights: ten times their numbers is the same loss."""
    cfg, train = tiny(position=RoPE(), dropout=0.0), TrainConfig(batch_size=1)
    params = jax.tree.map(jnp.asarray, worn(cfg))
    loss = jax.jit(lambda batch: loss_sum(params, cfg, train, batch, None))
    nats_of = jax.jit(lambda batch: eval_step(params, batch, cfg=cfg, train=train).sum())
    batch = packed(ROW, Boundary(E, None))
    total, (nats, n, _) = loss(batch)
    alone = sum(float(nats_of(packed(part, None))) for part in (ROW[:4], ROW[4:]))
    assert n == 5 and total == nats and float(nats) == pytest.approx(alone, rel=1e-5)
    assert float(nats_of(batch)) == pytest.approx(alone, rel=1e-5)
    assert loss(dataclasses.replace(batch, segment_BT=batch.segment_BT * 10))[0] == total


def test_weights_are_zero_or_one_and_zero_at_every_boundary():
    ids = np.random.default_rng(0).integers(25, 31, 500)
    for step in range(20):
        batch = Batches(ids, 12, 3, seed=1, boundary=Boundary(E, None)).batch(step)
        assert set(np.unique(batch.weights_BT)) == {0, 1}
        np.testing.assert_array_equal(batch.weights_BT == 0, batch.tokens_BT == E)
