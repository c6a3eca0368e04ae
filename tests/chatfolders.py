# SPDX-License-Identifier: Apache-2.0
"""Tokenizers like those of chat models, in folders like those of the hub, made for a test."""

import json

from tokenizers import AddedToken

from jaxgpt.data.bpe import train_bpe

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Made of control tokens and of text, as SmolLM2's and Qwen's."""

MARKED = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}\n"
    "{% else %}{{ loop.length }} {{ message['content'] }}\n{% endif %}{% endfor %}"
)
"""Says where answers are, and is of no use without that: it writes the number of messages."""

TALK = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "Once upon a time"},
    {"role": "assistant", "content": " there was 🐕."},
    {"role": "user", "content": "more"},
    {"role": "assistant", "content": "no\n"},
]


def chat_folder(path, *, template=CHATML, config=None, generation=None, tokenizer=None, **files):
    """A byte-level tokenizer of 264 ids: 261 `<|im_start|>`, 262 `<|im_end|>`, 263 `<think>`."""
    if tokenizer is None:
        hf = train_bpe(["ab ab cd cd cd"], 261)
        hf.add_special_tokens(["<|im_start|>"])
        # Bars make a control token of it, whatever it is called.
        hf.add_tokens([AddedToken("<|im_end|>", normalized=False), AddedToken("<think>")])
        tokenizer = json.loads(hf.to_str())
    path.mkdir(exist_ok=True)
    config = {"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}} | (config or {})
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (path / "chat_template.jinja").write_text(template)
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    for name, content in files.items():
        (path / f"{name}.json").write_text(
            content if isinstance(content, str) else json.dumps(content)
        )
    return path


def rows(path, *rows):
    """A file of JSON lines."""
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return path
