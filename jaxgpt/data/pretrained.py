# SPDX-License-Identifier: Apache-2.0
"""The tokenizer of a pretrained model: a Hugging Face folder's files, and the rules in them.

* **Ids** are those of `tokenizer.json`; without it there is no tokenizer.
* **BOS.** Texts begin with what the post-processor of `tokenizer.json` puts before them: Llama and
  Gemma have it there, GPT-2 and SmolLM2 do not. Only where there is no post-processor, `bos_token`
  is put in front if `add_bos_token` of `tokenizer_config.json` says so. That is what transformers 5
  does; `encode` itself puts nothing in front.
* **Ends.** A text ends with any `eos_token_id` of `generation_config.json` (without it, of
  `config.json`), with `eos_token`, and with the token between documents: the first of
  `bpe.END_NAMES` that the vocabulary has, else `eos_token`.
* **Chat.** `chat_template.jinja`, else `chat_template` of `tokenizer_config.json`.

The files are kept as they are, in the one file that `save` writes: a run needs no folder beside it,
and the fingerprint is of all of them. Of `config.json` the ids of BOS and EOS are kept.

Left out: `tokenizer.model`, `vocab.json` with `merges.txt`, code that a folder brings, and cleaning
of what is decoded (`clean_up_tokenization_spaces`).
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int32

from jaxgpt.data import chat
from jaxgpt.data.base import no_template
from jaxgpt.data.bpe import BPETokenizer
from jaxgpt.errors import ConfigError, ResourceError

TOKENIZER, CONFIG, GENERATION = "tokenizer.json", "tokenizer_config.json", "generation_config.json"
SPECIAL, TEMPLATE, MODEL = "special_tokens_map.json", "chat_template.jinja", "config.json"
# Of files: more than any model known has (Gemma's tokenizer.json has 33 MB).
MAX_BYTES = {TOKENIZER: 1 << 27} | dict.fromkeys(
    (CONFIG, GENERATION, SPECIAL, TEMPLATE, MODEL), 1 << 24
)
KEPT = ("bos_token_id", "eos_token_id")


class PretrainedTokenizer(BPETokenizer):
    """A tokenizer with the rules of its model.

    Args:
      files: Text of each file by its name in a Hugging Face folder; `tokenizer.json` at least.

    Attributes:
      files: They.
      begin_ids: What texts begin with.
      bos_id: The token that a text without a prompt begins with, or None.
      end_ids: What ends a text that the model writes.
      template: The chat template, or None.
      variables: What the template may use: `bos_token` and its like.

    Raises:
      ConfigError: No tokenizer, or files that contradict each other.
    """

    def __init__(self, files: Mapping[str, str]):
        self.files = dict(files)
        made = {"jaxgpt_tokenizer": "pretrained", "files": self.files}
        content = json.dumps(made, ensure_ascii=False)
        super().__init__(files[TOKENIZER], content=content + "\n")
        config = _json(files, SPECIAL) | _json(files, CONFIG)
        self._check_added(config)
        self.variables = {
            key: name
            for key, value in config.items()
            if key.endswith("_token") and (name := _name(value)) is not None
        }
        eos = self._id(self.variables.get("eos_token"))
        self.eot_id = eos if self.eot_id is None else self.eot_id
        self.bos_id = self._id(self.variables.get("bos_token"))
        if not self.has_post_processor and config.get("add_bos_token") is True:
            self.begin_ids = () if self.bos_id is None else (self.bos_id,)
        ends = {self.eot_id, eos} - {None}
        for name in (MODEL, GENERATION):  # the second is the model's word on writing
            said = _json(files, name)
            bos, stated = (_ids(said.get(key), name, key, self.vocab_size) for key in KEPT)
            self.bos_id = bos[0] if bos else self.bos_id
            if stated and (name == GENERATION or not _json(files, GENERATION).get(KEPT[1])):
                ends |= set(stated)
        self.end_ids: tuple[int, ...] = tuple(sorted(id for id in ends if id is not None))
        self.template = files.get(TEMPLATE, _default(config.get("chat_template")))

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Any] | None = None,
        **variables: Any,
    ) -> Int32[np.ndarray, " T"]:
        """Ids of a conversation, by the chat template; only the template writes control tokens.

        Args:
          messages: Dicts with `role` and `content`, the oldest first.
          add_generation_prompt: Ends where the assistant's next message begins.
          tools: Descriptions of functions, as the template wants them.
          **variables: Options of the template, such as `enable_thinking=False`.

        Raises:
          ConfigError: There is no template, or it cannot render this (`jaxgpt.data.chat.render`).
          ResourceError: The process that renders cannot be started.
        """
        if self.template is None:
            raise no_template(self.kind)
        (rendered,) = chat.render(
            self.template,
            [chat.Conversation(messages, tools)],
            self.controls,
            variables=self.variables | variables,
            add_generation_prompt=add_generation_prompt,
        )
        return self.encode_pieces(self.controls.pieces(rendered.text))[0]

    def _id(self, name: str | None) -> int | None:
        return None if name is None else self._hf.token_to_id(name)

    def _check_added(self, config: dict[str, Any]) -> None:
        """Tokens that the configuration adds must be in tokenizer.json: templates write them."""
        added = config.get("added_tokens_decoder")
        for id, token in added.items() if isinstance(added, dict) else ():
            name = _name(token)
            if name is None or str(self._id(name)) != id:
                raise ConfigError(
                    f"{CONFIG} gives {name!r} the id {id}, {TOKENIZER} gives it {self._id(name)}",
                    fix="save the tokenizer again with transformers",
                )


def load_folder_tokenizer(path: str | Path) -> PretrainedTokenizer:
    """Reads the tokenizer of a Hugging Face folder.

    Raises:
      ConfigError: No such folder, no tokenizer.json in it, or files that are damaged, too large or
        contradict each other.
      ResourceError: The system refused to read.
    """
    folder = Path(path)
    files = {}
    for name, limit in MAX_BYTES.items():
        file = folder / name
        try:
            with open(file, "rb") as stream:
                content = stream.read(limit + 1)
            if len(content) > limit:
                raise ConfigError(f"more than {limit >> 20} MiB", where=str(file))
            files[name] = content.decode()
        except (FileNotFoundError, NotADirectoryError):
            continue
        except UnicodeDecodeError as error:
            raise ConfigError(f"not UTF-8: {error.reason}", where=str(file)) from None
        except OSError as error:
            raise ResourceError(f"cannot read {file}: {error.strerror}") from error
    if TOKENIZER not in files:
        found = sorted(file.name for file in folder.iterdir()) if folder.is_dir() else None
        raise ConfigError(
            f"no {TOKENIZER} in {folder}"
            + (
                ": no such folder"
                if found is None
                else f", but {', '.join(found[:8]) or 'nothing'}"
            ),
            fix="transformers makes one: AutoTokenizer.from_pretrained(A).save_pretrained(B)",
        )
    try:
        kept = {key: value for key, value in _json(files, MODEL).items() if key in KEPT}
        if files.pop(MODEL, None) is not None and kept:
            files[MODEL] = json.dumps(kept)
        return PretrainedTokenizer(files)
    except ConfigError as error:
        raise ConfigError(error.what, where=str(folder), fix=error.fix) from None


def _json(files: Mapping[str, str], name: str) -> dict[str, Any]:
    try:
        found = json.loads(files.get(name, "{}"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{name} holds no JSON object")
    return found


def _name(value: Any) -> str | None:
    """A token's name, written as a text or with its flags."""
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else None


def _ids(value: Any, file: str, key: str, vocab_size: int) -> list[int]:
    """One id, or a list of them."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for id in ids:
        if type(id) is not int or not 0 <= id < vocab_size:
            raise ConfigError(
                f"{key} of {file} holds {id!r}, which is no id of the {vocab_size} in {TOKENIZER}"
            )
    return ids


def _default(templates: Any) -> str | None:
    """The template of that name, where there are several."""
    if isinstance(templates, list):
        named = {one.get("name"): one.get("template") for one in templates if isinstance(one, dict)}
        templates = named.get("default")
    return templates if isinstance(templates, str) else None
