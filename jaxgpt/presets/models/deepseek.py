# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V2 and V3: latent attention, and many small experts behind the first dense layers.

Source: DeepSeek-AI 2024, https://arxiv.org/abs/2405.04434 (V2: section 3.1.2; Lite: appendix B) and
  https://arxiv.org/abs/2412.19437 (V3: section 4.2)
Differs from the papers: no balance of devices and their communication (V2), no prediction of more
  than one token (V3).
"""

from collections.abc import Callable

from jaxgpt.boxes.ffn import GatedMLP
from jaxgpt.boxes.head import Untied
from jaxgpt.boxes.init import Normal
from jaxgpt.boxes.mla import MLA
from jaxgpt.boxes.moe import MoE
from jaxgpt.boxes.norm import RMSNorm
from jaxgpt.boxes.rope import RoPE
from jaxgpt.boxes.scaling import YaRN
from jaxgpt.model import LayerEdit, ModelConfig


def deepseek_v2_lite() -> ModelConfig:
    """DeepSeek-V2-Lite: 15,706,484,224 parameters, as deepseek-ai/DeepSeek-V2-Lite."""
    moe = MoE(
        n_experts=64,
        top_k=6,
        expert=GatedMLP(1408),
        shared=GatedMLP(2 * 1408),
        normalize=False,
        balance_coef=0.001,
    )
    return _deepseek(27, 2048, MLA(16), moe, dense=LayerEdit(stop=1, ffn=GatedMLP(10_944)))


def deepseek_v2() -> ModelConfig:
    """DeepSeek-V2: 235,741,434,880 parameters, as deepseek-ai/DeepSeek-V2."""
    moe = MoE(
        n_experts=160,
        top_k=6,
        expert=GatedMLP(1536),
        shared=GatedMLP(2 * 1536),
        normalize=False,
        routed_scaling=16.0,
        n_groups=8,
        top_groups=3,
        balance_coef=0.003,
    )
    dense = LayerEdit(stop=1, ffn=GatedMLP(12_288))
    return _deepseek(60, 5120, MLA(128, q_rank=1536), moe, dense=dense)


def deepseek_v3() -> ModelConfig:
    """DeepSeek-V3: 671,026,419,200 parameters, as deepseek-ai/DeepSeek-V3.

    14,848 of them are the balance biases, 256 in each of 58 layers.
    """
    moe = MoE(
        n_experts=256,
        top_k=8,
        expert=GatedMLP(2048),
        shared=GatedMLP(2048),
        score="sigmoid",
        routed_scaling=2.5,
        n_groups=8,
        top_groups=4,
        group_score="top2",
        balance_coef=0.0001,
        balance_rate=0.001,
    )
    dense = LayerEdit(stop=3, ffn=GatedMLP(18_432))
    return _deepseek(
        61, 7168, MLA(128, q_rank=1536), moe, dense=dense, vocab_size=129_280, mscale=1.0
    )


def _deepseek(
    n_layers: int,
    d_model: int,
    attention: MLA,
    ffn: MoE,
    *,
    dense: LayerEdit,
    vocab_size: int = 102_400,
    mscale: float = 0.707,
) -> ModelConfig:
    """`dense` is the edit of the first layers; `mscale` that of the rope, on both sides."""
    yarn = YaRN(40.0, 4096, mscale=mscale, mscale_all_dim=mscale)
    return ModelConfig(
        vocab_size=vocab_size,
        context_length=163_840,
        d_model=d_model,
        n_layers=n_layers,
        position=RoPE(layout="neighbours", scaling=yarn),
        norm=RMSNorm(1e-6),
        attention=attention,
        ffn=ffn,
        final_norm=RMSNorm(1e-6),
        head=Untied(),
        init=Normal(std=0.006, embedding_std=0.006, residual="same"),
        edits=(dense,),
    )


MODELS: dict[str, Callable[[], ModelConfig]] = {
    "deepseek-v2-lite": deepseek_v2_lite,
    "deepseek-v2": deepseek_v2,
    "deepseek-v3": deepseek_v3,
}
"""These architectures by name."""
