# SPDX-License-Identifier: Apache-2.0
"""The knobs of what a run shows beside its numbers; they change nothing of the training."""

import dataclasses

from jaxgpt.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class ShowConfig:
    """Samples and pictures of a run, and who else is told its numbers."""

    prompt: str = ""  # of the sample at each evaluation; empty: as in sample.py
    sample_tokens: int = 100  # its length; 0: no samples
    pictures: bool = True  # loss.png and attention.png at the end of the run
    report: bool = False  # report.html at the end: all of the run on one page
    compare: str | None = None  # preset whose reference curve the run is held to, or a JSON file
    tensorboard: bool = False  # event files in the run folder; needs tensorboardX
    wandb: str | None = None  # project at Weights & Biases; needs wandb

    def __post_init__(self) -> None:
        if self.sample_tokens < 0:
            raise ConfigError(f"sample_tokens={self.sample_tokens} is below 0", fix="0: no samples")
        if self.wandb == "":
            raise ConfigError("show.wandb is empty", fix="--show.wandb=PROJECT")
