# SPDX-License-Identifier: Apache-2.0
"""The values of knobs that the pairwise set tries, and the pairs that no model can have.

Bools, literals and boxes bring their own values. A first value is what the others are added to.
"""

from typing import Any

from jaxgpt.boxes.attention import GQA
from jaxgpt.boxes.block import PostNorm
from jaxgpt.boxes.ffn import MLP, GatedMLP
from jaxgpt.boxes.norm import RMSNorm
from jaxgpt.boxes.position import NoPosition
from jaxgpt.boxes.rope import RoPE
from jaxgpt.layers import LayerEdit

WINDOWS = (LayerEdit(every=2, start=1, set={"attention.window": 3}),)
EDITS = (
    (),
    WINDOWS,
    (LayerEdit(start=1, set={"attention.scale": 0.2}),),
    (LayerEdit(start=1, attention=GQA(n_heads=2, n_kv_heads=1)),),
    (LayerEdit(stop=1, ffn=GatedMLP(d_ff=24)),),
    (LayerEdit(start=1, position=NoPosition()),),
    (LayerEdit(start=1, position=RoPE(theta=50.0)),),
    (LayerEdit(start=1, block=PostNorm(), norm=RMSNorm()),),
)

LEVELS: dict[str, tuple[Any, ...]] = {
    "ModelConfig.vocab_size": (31,),
    "ModelConfig.context_length": (16,),
    "ModelConfig.d_model": (16,),
    "ModelConfig.n_layers": (2,),
    "ModelConfig.dropout": (0.0, 0.25),
    "ModelConfig.edits": EDITS,
    "ModelConfig.vocab_multiple": (1, 32),
    "ModelConfig.mup_base": (None, 8),
    "Normal.std": (0.3, None),
    "Normal.embedding_std": (0.5,),
    "Embed.width": (None, 8),
    "LayerNorm.eps": (1e-5,),
    "RMSNorm.eps": (1e-5,),
    "Learned.offset": (0, 2),
    "Sinusoidal.theta": (100.0,),
    "RoPE.theta": (100.0,),
    "RoPE.fraction": (1.0, 0.5),
    "LinearScaling.factor": (2.0,),
    "NTKScaling.factor": (2.0,),
    "DynamicNTK.factor": (2.0,),
    "DynamicNTK.original_length": (8,),
    "Llama3Scaling.factor": (4.0,),
    "Llama3Scaling.low_freq_factor": (1.0,),
    "Llama3Scaling.high_freq_factor": (4.0,),
    "Llama3Scaling.original_length": (8,),
    "YaRN.factor": (4.0,),
    "YaRN.original_length": (8,),
    "YaRN.beta_fast": (4.0,),
    "YaRN.beta_slow": (1.0,),
    "YaRN.attention_factor": (None, 1.2),
    "YaRN.mscale": (None, 0.7),
    "YaRN.mscale_all_dim": (None, 0.5),
    "GQA.n_heads": (4,),
    "GQA.n_kv_heads": (None, 2, 1),
    "GQA.head_dim": (None, 6),
    "GQA.use_out_bias": (None, False, True),
    "GQA.window": (None, 4, 1),
    "GQA.scale": (None, 0.3),
    "GQA.softcap": (None, 3.0),
    "MLA.n_heads": (4,),
    "MLA.kv_rank": (8,),
    "MLA.q_rank": (None, 6),
    "MLA.nope_dim": (4,),
    "MLA.rope_dim": (4,),
    "MLA.v_dim": (6,),
    "MLA.scale": (None, 0.3),
    "MLP.d_ff": (None, 24),
    "GatedMLP.d_ff": (None, 24),
    "GatedMLP.activation": ("silu", "relu_squared"),  # MLP has them all
    "GatedMLP.limit": (None, 1.0),
    "GatedMLP.up_offset": (0.0, 1.0),
    "MoE.n_experts": (4,),
    "MoE.top_k": (2, 1),
    "MoE.expert.activation": ("silu", "relu_squared"),
    # The shared FFN is a module as any other: its knobs need not be tried again, and a mixture
    # inside of a mixture, which takes as long as three other models, need not be either.
    "MoE.shared": (None, MLP, GatedMLP),
    "MoE.shared.activation": ("gelu_tanh",),
    "MoE.shared.use_bias": (True,),
    "MoE.shared.d_ff": (24,),
    "MoE.shared.limit": (None,),
    "MoE.shared.up_offset": (0.0,),
    "MoE.routed_scaling": (1.0, 2.5),
    "MoE.n_groups": (1, 2),
    "MoE.top_groups": (1, 2),
    "MoE.balance_coef": (0.0, 0.1),
    "MoE.z_coef": (0.0, 0.1),
    "MoE.balance_rate": (None, 0.01),
    "MoE.capacity_factor": (None, 1.0),
    "Tied.softcap": (None, 5.0),
    "Untied.softcap": (None, 5.0),
}

# Each pair of settings that a model refuses, and what it says.
EXCLUDED = {
    ("mup_base=8", "embed(Embed).scale=True"): "there is no muP rule for embed.scale",
    ("mup_base=8", "embed(Embed).width=8"): "there is no muP rule for embed.scale",
    ("attention(GQA).head_dim=6", "position(RoPE).fraction=0.5"): "it must be an even number",
    (f"edits={WINDOWS!r}", "attention=MLA"): "layer edit sets 'attention.window'",
    ("ffn=MoE", "ffn(MoE).expert=MoE"): "is neither a GatedMLP nor an MLP",
    ("ffn(MoE).n_groups=1", "ffn(MoE).top_groups=2"): "top_groups=2 exceeds n_groups=1",
    (
        "position(RoPE).scaling(YaRN).mscale=0.7",
        "position(RoPE).scaling(YaRN).mscale_all_dim=None",
    ): "mscale=0.7 has no effect",
    (
        "position(RoPE).scaling(YaRN).mscale=0.7",
        "position(RoPE).scaling(YaRN).attention_factor=1.2",
    ): "mscale=0.7 has no effect",
}
