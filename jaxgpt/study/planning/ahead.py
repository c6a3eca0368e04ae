# SPDX-License-Identifier: Apache-2.0
"""The real training step, compiled for devices that need not be there; no array is made.

What XLA sets aside for it is beside the formulas of `memory.py` what a measurement is beside a
prediction. The devices are those of this process: the command gives it as many fake ones as the
mesh has.
"""

import dataclasses
import time

import jax
import numpy as np

from jaxgpt.data.batches import Batch
from jaxgpt.data.tokenizer import ByteTokenizer
from jaxgpt.errors import ResourceError
from jaxgpt.model import ModelConfig
from jaxgpt.train.config import LoraConfig, MeshConfig, OptimConfig, TrainConfig
from jaxgpt.train.sharding import make_mesh
from jaxgpt.train.texts import Text, Texts
from jaxgpt.train.trainer import Trainer


@dataclasses.dataclass(frozen=True)
class Compiled:
    """Bytes on each device, as XLA's memory analysis has them.

    Attributes:
      arguments: The state and the batch.
      temporary: All else that exists at the worst moment.
      outputs: The new state and the metrics.
      shared: Of the outputs, what is written over the arguments.
      lower_s: Seconds that tracing took.
      compile_s: Seconds that XLA took.
      device: What it was compiled for.
    """

    arguments: int
    temporary: int
    outputs: int
    shared: int
    lower_s: float
    compile_s: float
    device: str

    @property
    def bytes(self) -> int:
        """All together."""
        return self.arguments + self.temporary + self.outputs - self.shared


def compile_step(
    model: ModelConfig,
    optim: OptimConfig,
    train: TrainConfig,
    mesh: MeshConfig,
    lora: LoraConfig | None = None,
) -> Compiled:
    """Compile a step of the run, as `jaxgpt.train.loop.fit` makes it, one a dispatch.

    Args:
      model: Its `vocab_size` is a number.
      optim: The optimizer.
      train: All that a step depends on.
      mesh: Of as many devices as this process has.
      lora: Adapters, where they alone are trained.

    Raises:
      ConfigError: The mesh is for another number of devices, or something does not split over it.
      ResourceError: The back end does not say what a program takes.
    """
    train = dataclasses.replace(train, dispatch=1, batch_sizes=None)
    ids = np.zeros(2 * model.context_length + 2, np.int32)
    texts = Texts((Text("zeros", ids, ids[:0]),), model.dims().vocab_size)
    trainer = Trainer(
        *(model, optim, train, lora or LoraConfig(), make_mesh(mesh), texts),
        ByteTokenizer(),
        train.steps,
    )
    shape = train.batch_size, model.context_length
    ids_BT, weights_BT = (jax.ShapeDtypeStruct(shape, dtype) for dtype in ("int32", "float32"))
    began = time.perf_counter()
    lowered = trainer.steps.lower(trainer.abstract, Batch(ids_BT, ids_BT, weights_BT))
    traced = time.perf_counter()
    found = lowered.compile().memory_analysis()
    if found is None:
        raise ResourceError("this back end does not say what a program takes")
    return Compiled(
        arguments=found.argument_size_in_bytes,
        temporary=found.temp_size_in_bytes,
        outputs=found.output_size_in_bytes,
        shared=found.alias_size_in_bytes,
        lower_s=traced - began,
        compile_s=time.perf_counter() - traced,
        device=jax.devices()[0].device_kind,
    )
