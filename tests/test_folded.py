# SPDX-License-Identifier: Apache-2.0
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxgpt.boxes.attention import GQA
from jaxgpt.boxes.head import Untied
from jaxgpt.boxes.norm import LayerNorm, NoNorm, RMSNorm
from jaxgpt.boxes.rope import RoPE
from jaxgpt.errors import ConfigError
from jaxgpt.interop.folded import folded
from jaxgpt.interop.load import load
from jaxgpt.interop.peft import save_adapter
from jaxgpt.interop.rows import nested
from jaxgpt.interop.save import save
from jaxgpt.model import ModelConfig, forward, param_shapes
from jaxgpt.train.config import LoraConfig
from jaxgpt.train.digest import by_path

GPT2 = ModelConfig(
    vocab_size=19,
    context_length=8,
    d_model=12,
    n_layers=1,
    attention=GQA(2),
    vocab_multiple=1,
    mup_base=4,
)
ROPE = dataclasses.replace(
    GPT2,
    position=RoPE(),
    norm=RMSNorm(),
    final_norm=RMSNorm(one_plus=True),
    attention=GQA(2, n_kv_heads=1, use_bias=False, qk_norm=RMSNorm(one_plus=True)),
)
TOKENS_BT = jnp.arange(14).reshape(2, 7)


def drawn(cfg):
    """Parameters that are all far from what they begin as."""
    rng, leaves = np.random.default_rng(0), by_path(param_shapes(cfg))
    return nested(
        {p: jnp.asarray(rng.normal(size=leaf.shape), jnp.float32) for p, leaf in leaves.items()}
    )


def logits(cfg, params):
    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def run(params):
        return forward(cfg, params, TOKENS_BT).logits_BTV[..., : cfg.vocab_size]

    return np.asarray(run(params))


@pytest.mark.parametrize(
    "cfg",
    [
        GPT2,
        ROPE,
        dataclasses.replace(
            ROPE,
            attention=GQA(2, qk_norm=LayerNorm(), qk_norm_of="each_head"),
            head=Untied(use_bias=True),
        ),
    ],
    ids=["gpt2", "one_plus", "untied"],
)
def test_the_same_logits_without_the_flag(cfg):
    params = drawn(cfg)
    plain, flat = folded(cfg, by_path(params))
    assert plain == dataclasses.replace(cfg, mup_base=None)
    want = logits(cfg, params)
    np.testing.assert_allclose(logits(plain, nested(flat)), want, atol=2e-5)
    assert np.abs(logits(plain, params) - want).max() > 0.1


def test_at_the_base_nothing_changes():
    cfg = dataclasses.replace(GPT2, mup_base=12)
    flat = by_path(drawn(cfg))
    assert folded(cfg, flat) == (dataclasses.replace(cfg, mup_base=None), flat)


def test_export_and_import(tmp_path):
    params = drawn(GPT2)
    assert save(tmp_path / "out", GPT2, params).family == "gpt2"
    found = load(tmp_path / "out")
    assert found.config.mup_base is None
    np.testing.assert_allclose(logits(found.config, found.params), logits(GPT2, params), atol=2e-5)


def test_what_cannot_take_a_factor(tmp_path):
    cfg = dataclasses.replace(GPT2, final_norm=NoNorm())
    with pytest.raises(ConfigError, match=r"final_norm=NoNorm has no scale to take 0\.333"):
        folded(cfg, by_path(drawn(cfg)))
    with pytest.raises(ConfigError, match="adapters of a model with mup_base fit no other"):
        save_adapter(tmp_path / "out", GPT2, {}, LoraConfig(rank=1))
