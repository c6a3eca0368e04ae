# SPDX-License-Identifier: Apache-2.0
"""Models by name: a folder here, or a repository of the Hugging Face hub, fetched into its cache.

The hub's client works in a process that is ended when it makes no progress (`jaxgpt.data.hub.ask`);
a long download is never cut off. The cache is the client's own, below HF_HOME; with
HF_HUB_OFFLINE=1 it is all that is used. Fetched are config, safetensors, tokenizer and chat
template, never code and never a pickle.

Left out: what is in the files.
"""

import re
from collections.abc import Callable
from pathlib import Path

from jaxgpt.data.hub import SCHEME, ask
from jaxgpt.errors import CheckpointError, ConfigError
from jaxgpt.train.files import size

SHORT_NAMES = {
    "gpt2": "openai-community/gpt2",
    "gpt2-medium": "openai-community/gpt2-medium",
    "gpt2-large": "openai-community/gpt2-large",
    "gpt2-xl": "openai-community/gpt2-xl",
    "distilgpt2": "distilbert/distilgpt2",
    "openai-gpt": "openai-community/openai-gpt",
}
WORDS = {
    "type": "model",
    "noun": "model",
    "named": "OWNER/NAME",
    "local": "a folder",
    "patience": None,
}
LARGE_BYTES = 10_000_000  # from which a file is announced


def fetch_model(
    path_or_id: str | Path,
    revision: str | None = None,
    timeout_s: float = 10.0,
    *,
    check: Callable[[], None] = lambda: None,
    say: Callable[[str], None] = lambda line: None,
) -> tuple[Path, str | None]:
    """The folder with a model's files, fetched where it is not here.

    Args:
      path_or_id: A folder; `OWNER/NAME` of the hub, or `OWNER/NAME@REVISION`; or a short name such
        as `gpt2`. What exists as a folder is a folder.
      revision: A commit, branch or tag, which comes before the one in the name.
      timeout_s: Seconds without progress until the hub is given up.
      check: Called several times a second while the hub is waited for; what it raises ends that.
      say: Called with a line for each long download.

    Returns:
      The folder, and the commit that it is of where it is of the hub.

    Raises:
      ConfigError: No such folder or model; a gated one.
      CheckpointError: Nothing but a pickle; or a file of the folder that leads out of it.
      ResourceError: The hub cannot be reached, stalls, breaks off, or refuses for now.
    """
    text = str(path_or_id)
    folder = Path(text).expanduser()
    if isinstance(path_or_id, Path) or (text and folder.is_dir()):
        if not folder.is_dir():
            raise ConfigError(f"{text} is no folder", fix="a folder with config.json")
        _check_inside(folder)
        return folder, None
    repo, named = _parse(text)
    request = WORDS | {"repo": repo, "revision": revision or named}
    message = {}
    for message in ask(request, timeout_s, check):
        if (message.get("n_bytes") or 0) >= LARGE_BYTES:
            say(f"fetching {message['fetching']} of {repo}, {size(message['n_bytes'])}")
    if message["pickles"]:
        raise CheckpointError(
            f"{repo} has no safetensors; {message['pickles'][0]} is a pickle, which is not "
            "fetched: it could run any code",
            fix="a copy of the model as safetensors",
        )
    return Path(message["folder"]), message["revision"]


def _parse(text: str) -> tuple[str, str | None]:
    """Repository and revision of a name."""
    name, _, revision = text.removeprefix(SCHEME).partition("@")
    name = SHORT_NAMES.get(name, name)
    if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name, re.ASCII) or not re.fullmatch(
        r"[\w./-]*", revision, re.ASCII
    ):
        raise ConfigError(
            f"{text!r} is no folder, and names no model of the hub",
            fix=f"a folder with config.json, OWNER/NAME, or one of {', '.join(SHORT_NAMES)}",
        )
    return name, revision or None


def _check_inside(folder: Path) -> None:
    """Refuse links that lead out of a folder, but for the hub's cache, whose files are links."""
    home = folder.resolve()
    if home.parent.name == "snapshots":
        home = home.parents[1]
    for file in folder.iterdir():
        if file.is_symlink() and not file.resolve().is_relative_to(home):
            raise CheckpointError(
                f"{file.name} is a link out of the folder", where=str(folder), fix="copy the file"
            )
