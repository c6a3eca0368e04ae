# SPDX-License-Identifier: Apache-2.0
"""Attention kernels behind one call, `attend`; `reference` says what each of them computes.

`choose` names the kernel of a call without running it, `choices` those that calls led to.
"""

from jaxgpt.kernels.choice import Call, Choice, choices, choose
from jaxgpt.kernels.dispatch import attend
from jaxgpt.kernels.reference import ScoreBias, dropout

__all__ = ["Call", "Choice", "ScoreBias", "attend", "choices", "choose", "dropout"]
