# SPDX-License-Identifier: Apache-2.0
"""The training run: step, loop, checkpoints and the run folder."""
