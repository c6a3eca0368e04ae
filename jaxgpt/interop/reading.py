# SPDX-License-Identifier: Apache-2.0
"""A config.json, read so that nothing in it is overlooked.

`Config` notes which keys were asked for. What nobody asked for is an error unless it is known to
leave the computation alone: a wrong guess would give fluent nonsense instead of a message. Left
out: what the keys mean, which the families say.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxgpt.errors import CheckpointError, ConfigError

MAX_BYTES = 1 << 20
"""Of a config.json: real ones have a few kilobytes."""

MOST = {"num_hidden_layers": 1000, "n_layer": 1000}
MOST_OF_ALL = 10**8
"""Numbers of a config.json at most: what they count is made before the files are compared."""

NO_EFFECT = frozenset(
    # Where the file comes from, and how the library that wrote it runs the model.
    """model_type architectures auto_map _name_or_path _model_name_or_path name_or_path _commit_hash
    transformers_version transformers.js_config unsloth_version dtype torch_dtype torchscript
    use_cache cache_implementation is_decoder return_dict output_attentions output_hidden_states
    attn_implementation _attn_implementation gradient_checkpointing is_llama_config
    pretraining_tp ep_size reorder_and_upcast_attn """
    # Training: initial values, dropout, and losses that are added to the next-token loss.
    """initializer_range init_std attention_dropout attn_pdrop embd_pdrop resid_pdrop dropout
    hidden_dropout activation_dropout classifier_dropout layerdrop output_router_logits
    router_aux_loss_coef aux_loss_alpha seq_aux router_jitter_noise """
    # Tokens, and how text is sampled: the tokenizer's and the sampler's business.
    """bos_token_id eos_token_id pad_token_id sep_token_id unk_token_id decoder_start_token_id
    prefix max_length min_length do_sample temperature top_k top_p num_beams repetition_penalty
    task_specific_params """
    # Heads for other tasks than the next token.
    """id2label label2id num_labels problem_type finetuning_task summary_type summary_use_proj
    summary_activation summary_proj_to_labels summary_first_dropout n_special
    predict_special_tokens""".split()
)
"""Keys that do not change the logits of a trained model."""

OFF: Mapping[str, tuple[Any, ...]] = {
    "add_cross_attention": (False, None),
    "is_encoder_decoder": (False, None),
    "chunk_size_feed_forward": (0, None),
    "pruned_heads": ({}, None),
}
"""Keys of all families that are understood with these values only."""

REQUIRED: Any = object()
UNQUANTISED = "a copy of the model in bfloat16, float16 or float32"
DEQUANTISERS = {"mxfp4": "Mxfp4Config", "fp8": "FineGrainedFP8Config"}
"""Of transformers, by quant_method: gpt-oss has the first, DeepSeek-V3 the second."""


class Config:
    """A dict of a config.json, or one inside it, that is read key by key.

    Each reader takes several names of one thing, which must agree where more than one is there. A
    null is as good as absent where None is the default; elsewhere `null` says what it stands for.

    Args:
      data: The parsed JSON.
      where: The file, for messages.
      inside: Keys on the way to this dict.

    Raises:
      ConfigError: By every reader: a key is missing, has the wrong type, or an unknown value.
    """

    def __init__(self, data: Mapping[str, Any], where: str, inside: str = ""):
        self._data, self._where, self._inside = data, where, inside
        self._read: set[str] = set()

    def count(
        self, *keys: str, default: Any = REQUIRED, null: Any = REQUIRED, least: int = 0
    ) -> Any:
        """A whole number, not below `least`, and not beyond what can be meant."""
        value = self._get(keys, int, "a whole number", default, null)
        for key in keys:
            if isinstance(value, int) and value > MOST.get(key, MOST_OF_ALL):
                raise self.error(key, f"is beyond {MOST.get(key, MOST_OF_ALL):,}")
        if value is not None and value < least:
            raise self.error(keys[0], f"is below {least}")
        return value

    def number(self, *keys: str, default: Any = REQUIRED, null: Any = REQUIRED) -> Any:
        """A float."""
        value = self._get(keys, (int, float), "a number", default, null)
        return float(value) if isinstance(value, int) else value

    def flag(self, *keys: str, default: Any = REQUIRED) -> Any:
        """True or false."""
        return self._get(keys, bool, "true or false", default, REQUIRED)

    def items(self, *keys: str, default: Any = REQUIRED) -> Any:
        """A list."""
        return self._get(keys, list, "a list", default, REQUIRED)

    def choice(
        self,
        known: Mapping[str, Any],
        *keys: str,
        default: Any = REQUIRED,
        null: Any = REQUIRED,
    ) -> Any:
        """What `known` has under the word; `default` and `null` are words too."""
        word = self._get(keys, str, "a word", default, null)
        if word not in known:
            raise self.error(keys[0], "is not known", fix=f"one of {sorted(known)}")
        return known[word]

    def section(self, key: str) -> "Config | None":
        """The dict under a key, or None; the caller closes it."""
        data = self._get((key,), dict, "a dict", None, REQUIRED)
        return None if data is None else Config(data, self._where, f"{self._inside}{key}.")

    def only(self, key: str, *values: Any) -> None:
        """Refuse any but these values, in words or numbers; an absent key is fine."""
        self._read.add(key)
        if key in self._data and self._data[key] not in values:
            raise self.error(key, "is not supported", fix=f"one of {list(values)}")

    def ignore(self, *keys: str) -> None:
        """Take keys as read: they say what this file knows otherwise, or what has no effect."""
        self._read |= set(keys)

    def close(self) -> None:
        """Refuse what was not read.

        Raises:
          ConfigError: It names the first such key, with its value.
        """
        if not self._inside:
            for key, values in OFF.items():
                self.only(key, *values)
            self.ignore(*NO_EFFECT)
            quantised = self.section("quantization_config")
            if quantised is not None:
                raise quantised.quantised()
        for key in sorted(self._data.keys() - self._read):
            raise self.error(
                key,
                "is not understood, and may change what the model computes",
                fix="remove it where it does not",
            )

    def error(self, key: str, what: str, fix: str | None = None) -> ConfigError:
        """The error about a key of this dict, with its value."""
        value = repr(self._data.get(key))
        value = value if len(value) <= 60 else value[:60] + "..."
        return ConfigError(f"{self._inside}{key}={value} {what}", where=self._where, fix=fix)

    def quantised(self) -> ConfigError:
        """The error about quantised weights, with what turns them into plain ones."""
        config, fix = DEQUANTISERS.get(str(self._data.get("quant_method"))), UNQUANTISED
        if config is not None:
            fix += (
                ": in transformers from_pretrained(A, quantization_config="
                f"{config}(dequantize=True)).save_pretrained(B)"
            )
        return self.error("quant_method", "weights are not read", fix=fix)

    def _get(self, keys: tuple[str, ...], kind: Any, words: str, default: Any, null: Any) -> Any:
        self._read |= set(keys)
        found = [key for key in keys if key in self._data]
        if null is REQUIRED and default in (None, REQUIRED):
            found = [key for key in found if self._data[key] is not None]
        if not found:
            if default is REQUIRED:
                raise ConfigError(f"{self._inside}{keys[0]} is missing", where=self._where)
            return default
        values = [self._data[key] for key in found]
        for key, value in zip(found, values, strict=True):
            if value is None and null is not REQUIRED:
                continue
            if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
                raise self.error(key, f"is not {words}")
            if value != values[0]:
                raise self.error(key, f"contradicts {self._inside}{found[0]}={values[0]!r}")
        return null if values[0] is None else values[0]


def read_json(path: Path, max_bytes: int = MAX_BYTES) -> dict[str, Any]:
    """A JSON file that holds a dict.

    Raises:
      CheckpointError: There is no such file, or it is not that, or it is absurdly large.
    """
    try:
        if path.stat().st_size > max_bytes:
            raise CheckpointError(f"{path.name} has over {max_bytes:,} bytes", where=str(path))
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise CheckpointError(f"{path.name} is not JSON", where=str(path)) from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{path.name} holds no dict", where=str(path))
    return data
