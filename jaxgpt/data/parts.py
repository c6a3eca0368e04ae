# SPDX-License-Identifier: Apache-2.0
"""What the parts of a tokenizer.json say: how it decodes, and what it puts before a text.

A part is the JSON of it, in the spelling of today's `tokenizers` library.

Left out: the vocabulary and its merges, which are the library's.
"""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from jaxgpt.errors import ConfigError

Part = dict[str, Any] | None


class Decoding(NamedTuple):
    """How pieces of a vocabulary become text.

    Attributes:
      piece_bytes: The bytes of one piece.
      bytewise: Pieces are spelled in stand-ins for bytes, and added tokens as they are.
      drops_first_space: Of a text: the one that encoding put before it.
      drops_last_space: Of a text: the one that stands behind every word.
    """

    piece_bytes: Callable[[str], bytes]
    bytewise: bool
    drops_first_space: bool
    drops_last_space: bool


def piece_decoder(config: Part) -> Decoding:
    """Reads how a tokenizer.json decodes.

    Args:
      config: Its `decoder`.

    Raises:
      ConfigError: A decoder that cannot be undone exactly.
    """
    steps = (config or {}).get("decoders", [config or {"type": "nothing"}])
    kinds = {step["type"] for step in steps}
    spaces: list[str] = []
    drops_first_space = False
    for step in steps:
        match step:
            case {"type": "ByteLevel" | "ByteFallback" | "Fuse"}:
                pass
            case {"type": "Replace", "pattern": {"String": mark}, "content": " "}:
                spaces.append(mark)
            case {"type": "BPEDecoder", "suffix": mark} if len(steps) == 1:
                spaces.append(mark)
            case {"type": "Metaspace", "replacement": mark, "prepend_scheme": scheme}:
                spaces.append(mark)
                drops_first_space = scheme != "never"
            case {"type": "Strip", "content": " ", "start": 1, "stop": 0}:
                drops_first_space = True
            case _:
                raise ConfigError(f"a tokenizer.json whose decoder is {step} has no exact inverse")

    def piece_bytes(piece: str) -> bytes:
        if "ByteLevel" in kinds:
            return bytes(BYTE_OF[char] for char in piece)
        if "ByteFallback" in kinds and BYTE_PIECE.fullmatch(piece):
            return bytes.fromhex(piece[3:5])
        for mark in spaces:
            piece = piece.replace(mark, " ")
        return piece.encode()

    bytewise = "ByteLevel" in kinds
    return Decoding(piece_bytes, bytewise, drops_first_space, "BPEDecoder" in kinds)


def begin_ids(post_processor: Part) -> tuple[int, ...]:
    """The ids that a post-processor puts before every text."""
    match post_processor:
        case {"type": "Sequence", "processors": list(steps)}:
            return tuple(id for step in steps for id in begin_ids(step))
        case {"type": "BertProcessing" | "RobertaProcessing", "cls": [_, int(id)]}:
            return (id,)
        case {"type": "TemplateProcessing", "single": list(parts), "special_tokens": known}:
            ids: list[int] = []
            for part in parts:
                if "SpecialToken" not in part:
                    break
                ids += known[part["SpecialToken"]["id"]]["ids"]
            return tuple(ids)
    return ()


def without_space(part: Part, everywhere: bool) -> Part:
    """A normaliser or pre-tokeniser that puts no space before a text.

    Args:
      part: It.
      everywhere: Before no text at all; else one that puts it before the first of a text's parts
        only puts none, for text that is not the first.
    """
    match part:
        case {"type": "Sequence", **rest}:
            (name,) = rest
            inner = [without_space(step, everywhere) for step in rest[name]]
            return {"type": "Sequence", name: [step for step in inner if step is not None]}
        case {"type": "Prepend"} if everywhere:
            return None
        case {"type": "ByteLevel", "add_prefix_space": True} if everywhere:
            return part | {"add_prefix_space": False}
        case {"type": "Metaspace", "prepend_scheme": scheme} if everywhere or scheme == "first":
            return part | {"prepend_scheme": "never"}
    return part


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes (`bytes_to_unicode` in openai/gpt-2 src/encoder.py)."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + i): b for i, b in enumerate(hidden)}


BYTE_OF = _byte_alphabet()
BYTE_PIECE = re.compile("<0x[0-9A-F]{2}>")
