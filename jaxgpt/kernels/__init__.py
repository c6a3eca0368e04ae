# SPDX-License-Identifier: Apache-2.0
"""Attention kernels behind one call, `attend`; `reference` says what each of them computes."""

from jaxgpt.kernels.reference import ScoreBias, attend, dropout

__all__ = ["ScoreBias", "attend", "dropout"]
