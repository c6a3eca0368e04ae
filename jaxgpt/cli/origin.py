# SPDX-License-Identifier: Apache-2.0
"""Where a fine-tuning run comes from: the model that `--init-from` names.

From its first checkpoint on a run needs neither that folder nor the hub: model, tokenizer and
weights are in its own. Left out: how a model is read (`jaxgpt.interop`).
"""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

from jaxgpt.cli.command import note
from jaxgpt.config import PRETRAINED
from jaxgpt.data.config import DataConfig
from jaxgpt.interop.hub import fetch_model
from jaxgpt.interop.pretrained import check_fits, initial_params, read_model
from jaxgpt.model import ModelConfig
from jaxgpt.shapes import Params
from jaxgpt.train.files import write_atomic
from jaxgpt.train.rundata import read_facts
from jaxgpt.train.runfolder import RunFolder

FACTS = "init_from"  # in run.json


@dataclasses.dataclass(frozen=True)
class Origin:
    """A model that a run begins with.

    Attributes:
      name: What the user called it.
      folder: Its files.
      commit: Of the hub, where they are from there.
    """

    name: str
    folder: Path
    commit: str | None

    @classmethod
    def find(cls, name: str, run: RunFolder) -> "Origin":
        """Fetch a model; a run that began with it before gets the same commit again.

        Raises:
          ConfigError, CheckpointError, ResourceError: As `jaxgpt.interop.hub.fetch_model`.
        """
        known = read_facts(run).get(FACTS, {})
        revision = known.get("commit") if known.get("name") == name else None
        return cls(name, *fetch_model(name, revision, say=note))

    def model(self) -> ModelConfig:
        """As its config.json describes it."""
        return read_model(self.folder)

    def check(self, cfg: ModelConfig) -> None:
        """See that its weights fit a model; ConfigError where not."""
        check_fits(cfg, self.folder)

    def data(self, data: DataConfig) -> DataConfig:
        """The data of a run, with the tokenizer where it is now."""
        if data.tokenizer != PRETRAINED:
            return data
        return dataclasses.replace(data, tokenizer=str(self.folder))

    def weights(self, cfg: ModelConfig) -> Callable[[Params], Params]:
        """What a run begins with, for `jaxgpt.train.loop.fit`."""
        return lambda abstract: initial_params(self.folder, cfg, abstract, say=note)

    def write_down(self, run: RunFolder) -> None:
        """Note name and commit in the facts of a run."""
        facts = read_facts(run) | {FACTS: {"name": self.name, "commit": self.commit}}
        write_atomic(run.facts_path, json.dumps(facts, indent=2) + "\n")
