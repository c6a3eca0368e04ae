# SPDX-License-Identifier: Apache-2.0
"""A run's numbers for TensorBoard and for Weights & Biases, as listeners of the training loop.

The packages are imported where a logger is made. metrics.jsonl is written with or without them.
"""

import importlib
import secrets
from pathlib import Path
from typing import Any

from jaxgpt.errors import ConfigError
from jaxgpt.train.files import write_atomic


class TensorBoard:
    """Writes each number of a record as a scalar; event files begin with the first record.

    Args:
      folder: Where the event files go; a run that goes on gets a further one.

    Raises:
      ConfigError: tensorboardX is missing.
    """

    def __init__(self, folder: Path):
        self._make = _imported("tensorboardX", "--show.tensorboard").SummaryWriter
        self._folder, self._writer = folder, None

    def __call__(self, record: dict[str, Any]) -> None:
        """One record of metrics."""
        step = record["step"]
        if self._writer is None:  # what an interrupted run wrote of this step and later ones goes
            self._writer = self._make(str(self._folder), purge_step=step, flush_secs=10)
        for name, value in record.items():
            if name != "step":
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is waiting."""
        if self._writer is not None:
            self._writer.close()


class WandB:
    """Logs each record to a run of Weights & Biases, the same one when the training goes on.

    The id of that run is kept in `wandb.id` in the folder.

    Args:
      folder: The run folder; files of W&B go there as well.
      project: Name of the project.
      config: Plain data that is stored with the run.

    Raises:
      ConfigError: wandb is missing, or does not start.
      ResourceError: The id cannot be written.
    """

    def __init__(self, folder: Path, project: str, config: dict[str, Any]):
        wandb = _imported("wandb", "--show.wandb")
        id_path = folder / "wandb.id"
        if not id_path.exists():
            write_atomic(id_path, secrets.token_hex(8))
        try:
            self._run = wandb.init(
                project=project,
                name=folder.name,
                id=id_path.read_text().strip(),
                resume="allow",
                config=config,
                dir=str(folder),
                settings={"console": "off"},  # standard output stays ours
            )
        except Exception as error:
            what = f"Weights & Biases does not start: {' '.join(str(error).split())}"
            raise ConfigError(what, fix="wandb login, or WANDB_MODE=offline") from error

    def __call__(self, record: dict[str, Any]) -> None:
        """One record of metrics."""
        numbers = {name: value for name, value in record.items() if name != "step"}
        self._run.log(numbers, step=record["step"])

    def close(self) -> None:
        """Send what is waiting."""
        self._run.finish()


def _imported(name: str, flag: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        what = f"{flag} needs a package that cannot be imported: {error}"
        raise ConfigError(what, fix=f"pip install {name}") from error
