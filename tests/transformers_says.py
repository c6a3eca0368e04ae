# SPDX-License-Identifier: Apache-2.0
"""What transformers (and PEFT) make of exported folders: a process of its own, no pytest in it.

    python tests/transformers_says.py REQUEST.json OUT.npz

REQUEST: for each name `folder`, `ids` [[...]], and perhaps `text` to encode and `adapter`, a folder
of PEFT. OUT: for each name `NAME/logits`, `NAME/text_ids`, `NAME/decoded`, `NAME/ends`, or what
went wrong as `NAME/error`. It needs torch, transformers and numpy alone, of any interpreter.
"""

import json
import sys
import warnings

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import logging


def says(folder, ids, text=None, adapter=None):
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", output_loading_info=True, dtype=torch.float32
    )
    problems = {what: keys for what, keys in info.items() if keys}
    assert not problems, f"{folder}: {problems}"
    if adapter is not None:
        from peft import PeftModel

        with warnings.catch_warnings(record=True) as caught:
            model = PeftModel.from_pretrained(model, adapter)
        # PEFT only warns of adapters that it does not find.
        missing = [str(each.message) for each in caught if "adapter keys" in str(each.message)]
        assert not missing, missing
    with torch.no_grad():
        yield "logits", model.eval()(torch.tensor(ids)).logits.numpy()
    if text is not None:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        text_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        yield "text_ids", np.array(text_ids)
        yield "decoded", np.array(tokenizer.decode(text_ids))
        ends = GenerationConfig.from_pretrained(folder).eos_token_id
        yield "ends", np.array([] if ends is None else ends).reshape(-1)


if __name__ == "__main__":
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with open(sys.argv[1], encoding="utf-8") as file:
        request = json.load(file)
    said = {}
    for name, each in request.items():
        try:
            said |= {f"{name}/{key}": value for key, value in says(**each)}
        except Exception as error:
            said[f"{name}/error"] = np.array(f"{type(error).__name__}: {error}")
    np.savez(sys.argv[2], **said)
