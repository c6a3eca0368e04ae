# SPDX-License-Identifier: Apache-2.0
"""What can be seen of a run folder: samples on the way, and pictures of its losses and attention.

Parameters are given, and who calls when is the command line's.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Float

from jaxgpt.data.config import DataConfig
from jaxgpt.data.tokenizer import Tokenizer, load_tokenizer
from jaxgpt.model import ModelConfig
from jaxgpt.sample.filters import Sampling
from jaxgpt.sample.text import stream_text
from jaxgpt.shapes import Params
from jaxgpt.study.plots import attention_maps, plot_attention, plot_losses
from jaxgpt.train.files import MetricsWriter, read_metrics
from jaxgpt.train.rundata import with_vocabulary
from jaxgpt.train.runfolder import RunFolder
from jaxgpt.train.texts import first_ids

_PLAIN = DataConfig()
TEXT_TOKENS = 24  # of the validation text, where no text is given
SHOWN_CHARS = 100  # of a sample


class Sampler:
    """A hook of the training loop: what the model writes after a fixed prompt.

    The texts are kept in `samples.jsonl`, one record a step; the same noise is used at each.

    Args:
      folder: The run.
      model: Its model; `vocab_size` None takes the tokenizer's.
      prompt: Where the texts begin; empty: see `jaxgpt.sample.text.start_ids`.
      tokens: Their length at most.
      temperature: 1 is the model's own distribution.
    """

    def __init__(
        self,
        folder: RunFolder,
        model: ModelConfig,
        *,
        prompt: str = "",
        tokens: int = 100,
        temperature: float = 0.8,
    ):
        self.folder, self.model, self.prompt, self.tokens = folder, model, prompt, tokens
        self.sampling = Sampling(temperature=temperature)

    def __call__(self, step: int, params: Params, metrics: dict[str, float]) -> str:
        """Write a sample; returns its beginning, in one line.

        Raises:
          ConfigError: The tokenizer cannot encode the prompt.
          ResourceError: The file cannot be written.
        """
        tokenizer = load_tokenizer(self.folder.tokenizer_path)
        pieces = stream_text(
            with_vocabulary(self.model, tokenizer),
            _on_one_device(params),
            tokenizer,
            self.prompt,
            max_new_tokens=self.tokens,
            sampling=self.sampling,
        )
        text = "".join(piece.text for piece in pieces)
        # Records of this step and later ones are from before an interruption.
        with MetricsWriter(self.folder.path / "samples.jsonl", resume_step=step - 1) as file:
            file.write({"step": step, "prompt": self.prompt, "text": text})
        whole = self.prompt + text
        cut = "..." if len(whole) > SHOWN_CHARS else ""
        return f"step {step}  sample: {whole[:SHOWN_CHARS]!r}{cut}"


def draw_losses(folder: RunFolder) -> Path:
    """Draw `loss.png` in a run folder from its metrics.

    Raises:
      ConfigError: No losses yet, or matplotlib is missing.
      ResourceError: The file cannot be written.
    """
    path = folder.path / "loss.png"
    plot_losses(read_metrics(folder.metrics_path), path, name=folder.path.name)
    return path


def draw_attention(
    folder: RunFolder,
    model: ModelConfig,
    params: Params,
    *,
    data: DataConfig = _PLAIN,
    text: str = "",
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
) -> Path:
    """Draw `attention.png` in a run folder.

    Args:
      folder: The run.
      model: Its model; `vocab_size` None takes the tokenizer's.
      params: Its parameters.
      data: Where its tokens are, unless they are in the run's folder.
      text: What the model reads; empty: the first tokens of the validation text.
      layers: Which layers; None: the first and the last.
      heads: Which heads; None: the first two.

    Raises:
      ConfigError: No such layer or head, a text that cannot be encoded or is too long, an attention
        box without probabilities, or matplotlib is missing.
      ResourceError: The file cannot be written.
    """
    maps, names = read_attention(folder, model, params, data=data, text=text, layers=layers)
    layers = list(maps) if layers is None else layers
    heads = first_heads(maps) if heads is None else heads
    path = folder.path / "attention.png"
    plot_attention(maps, names, path, layers=layers, heads=heads, name=folder.path.name)
    return path


def read_attention(
    folder: RunFolder,
    model: ModelConfig,
    params: Params,
    *,
    data: DataConfig = _PLAIN,
    text: str = "",
    layers: Sequence[int] | None = None,
) -> tuple[dict[int, Float[np.ndarray, "N T S"]], list[str]]:
    """The maps that `draw_attention` draws, by layer, and the text's tokens; see there."""
    tokenizer = load_tokenizer(folder.tokenizer_path)
    model = with_vocabulary(model, tokenizer)
    if text:
        ids = [int(i) for i in tokenizer.encode(text)]
    else:
        ids = first_ids(folder, data, tokenizer, min(TEXT_TOKENS, model.context_length))
    layers = sorted({0, model.n_layers - 1}) if layers is None else layers
    maps = attention_maps(model, _on_one_device(params), ids, layers)
    return maps, [_token_text(tokenizer, i) for i in ids]


def first_heads(maps: Mapping[int, Float[np.ndarray, "N T S"]]) -> Sequence[int]:
    """The first two heads, or as many as all of the layers have."""
    return range(min(2, *map(len, maps.values())))


def unfailing(what: str, action: Callable[..., str | None]) -> Callable[..., str | None]:
    """The action, with a warning in place of an error: what is shown must not stop a run.

    Args:
      what: What is missing where it fails.
      action: Returns a line to show, or None.
    """

    @functools.wraps(action, assigned=())
    def act(*args: Any) -> str | None:
        try:
            return action(*args)
        except Exception as error:
            return f"warning: no {what}: {' '.join(str(error).split()) or type(error).__name__}"

    return act


def _on_one_device(params: Params) -> Params:
    return jax.device_put(params, jax.sharding.SingleDeviceSharding(jax.local_devices()[0]))


def _token_text(tokenizer: Tokenizer, token: int) -> str:
    """Its bytes as text; a special token, which has none, as it is written."""
    content = tokenizer.token_bytes(token)
    return content.decode(errors="backslashreplace") or tokenizer.decode([token])
