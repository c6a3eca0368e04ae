# SPDX-License-Identifier: Apache-2.0
"""The files of a model of the hub, by `huggingface_hub`, in the process of `hubworker.py`.

Only what a model is made of is fetched: its config, safetensors, tokenizer and chat template. Code
and pickles stay where they are.

Left out: adapters, and whatever lies in folders of a repository.
"""

import json
import os
import re
from collections.abc import Callable
from typing import Any

from jaxgpt.data.hubreasons import Refused, resolved

SAFE_NAME = re.compile(r"[\w-][\w.-]*", re.ASCII)
SMALL_FILES = re.compile(
    r"(generation_config|special_tokens_map|tokenizer[\w-]*|chat_template)\.json"
    r"|chat_template[\w-]*\.jinja",
    re.ASCII,
)
CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
INDEX_BYTES = 1 << 26


def fetch_files(request: dict[str, Any], say: Callable[..., None]) -> dict[str, Any]:
    """Fetch a model's files where the cache lacks them.

    Args:
      request: `repo`, `revision` (None: main), `timeout_s`; `weights` is false where the tokenizer
        is all that is wanted.
      say: Called with `fetching` and `n_bytes` for each file that is not there.

    Returns:
      `folder`, `revision`, and as `pickles` one of them where there are no safetensors.

    Raises:
      Refused: No config, a damaged index; or offline, and not all of it is cached.
    """
    from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache

    if constants.HF_HUB_OFFLINE:
        return _cached(request)
    info, repo = resolved(request), request["repo"]
    sizes = {file.rfilename: file.size for file in info.siblings}
    names = [name for name in sizes if SAFE_NAME.fullmatch(name)]
    if CONFIG not in names:
        raise Refused(f"{repo} has no {CONFIG}: it is no model that we know", bad_input=True)

    def fetch(name: str, revision: str = info.sha) -> str:
        if not isinstance(try_to_load_from_cache(repo, name, revision=info.sha), str):
            say(fetching=name, n_bytes=sizes.get(name))
        return hf_hub_download(repo, name, revision=revision, etag_timeout=request["timeout_s"])

    for name in filter(SMALL_FILES.fullmatch, names):
        fetch(name)
    wanted = (WEIGHTS, INDEX) if request.get("weights", True) else ()
    weights = [name for name in wanted if name in names][:1]
    for name in weights:
        for shard in _weights(os.path.dirname(fetch(name))):
            fetch(shard)
    # Last, by the name that was asked for: without the hub it then stands for the whole.
    folder = os.path.dirname(fetch(CONFIG, request["revision"] or "main"))
    pickles = [name for name in names if name.endswith(PICKLES)]
    return {"folder": folder, "revision": info.sha, "pickles": [] if weights else pickles[:1]}


def _cached(request: dict[str, Any]) -> dict[str, Any]:
    from huggingface_hub import try_to_load_from_cache

    repo, revision = request["repo"], request["revision"] or "main"
    config = try_to_load_from_cache(repo, CONFIG, revision=revision)
    if not isinstance(config, str):
        raise Refused(f"{repo} at {revision} is not cached, and HF_HUB_OFFLINE is set")
    folder = os.path.dirname(config)
    for name in _weights(folder) if request.get("weights", True) else ():
        if not os.path.exists(os.path.join(folder, name)):
            raise Refused(f"{name} of {repo} is not cached, and HF_HUB_OFFLINE is set")
    return {"folder": folder, "revision": os.path.basename(folder), "pickles": []}


def _weights(folder: str) -> list[str]:
    """Names of the files with the parameters: the one, or those that the index names."""
    index = os.path.join(folder, INDEX)
    if os.path.exists(os.path.join(folder, WEIGHTS)) or not os.path.exists(index):
        return [WEIGHTS]
    try:
        if os.path.getsize(index) > INDEX_BYTES:
            raise ValueError
        with open(index, encoding="utf-8") as file:
            names = sorted(set(json.load(file)["weight_map"].values()), key=str)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise Refused(f"{INDEX} is damaged", bad_input=True) from None
    if odd := [n for n in names if not (isinstance(n, str) and SAFE_NAME.fullmatch(n))]:
        raise Refused(f"{INDEX} names {odd[0]!r}, which is no file name", bad_input=True)
    return names
