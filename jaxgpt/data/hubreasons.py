# SPDX-License-Identifier: Apache-2.0
"""Why the hub's client failed, in one line: for `hubworker.py`, which imports nothing heavy.

Left out: what is asked of the client (`hubrows.py`, `hubfiles.py`).
"""

import errno
from typing import Any

STORAGE = {errno.EACCES, errno.EDQUOT, errno.EFBIG, errno.ENOSPC, errno.EPERM, errno.EROFS}


class Refused(Exception):  # noqa: N818 - a reason, not a fault of ours
    """What was asked for cannot be had.

    Args:
      what: What is wrong.
      fix: What to do.
      bad_input: Whether another command is needed, rather than another hour.
    """

    def __init__(self, what: str, *, fix: str | None = None, bad_input: bool = False):
        super().__init__(what)
        self.fix, self.bad_input = fix, bad_input


def resolved(request: dict[str, Any]) -> Any:
    """What the hub says of a repository; `sha` is the commit that a branch or tag is at now.

    Args:
      request: `repo`, `type` (dataset or model), `revision` (None: main), `timeout_s`.

    Raises the errors of a gated one too.
    """
    from huggingface_hub import HfApi

    api, repo, type_ = HfApi(), request["repo"], request["type"]
    info: Any = api.repo_info(
        repo,
        repo_type=type_,
        revision=request["revision"],
        timeout=request["timeout_s"],
        files_metadata=type_ == "model",
    )
    if info.gated:
        api.auth_check(repo, repo_type=type_)
    return info


def reason(error: Exception, request: dict[str, Any]) -> Refused:
    """What went wrong, in words, without the client's page of advice.

    Args:
      error: What the client raised.
      request: `repo`, `type`, and the words of `jaxgpt.data.hub.WORDS`.
    """
    from huggingface_hub import constants, errors

    if isinstance(error, Refused):
        return error
    if type(error).__name__ == "DatasetGenerationError" and isinstance(error.__cause__, Exception):
        error = error.__cause__
    status = getattr(getattr(error, "response", None), "status_code", None)
    hub, repo, noun = constants.ENDPOINT, request["repo"], request["noun"]
    page = f"{hub}/datasets/{repo}" if request["type"] == "dataset" else f"{hub}/{repo}"
    line = " ".join(str(error).split())[:300].rstrip(".")
    unknown = type(error).__name__ == "DatasetNotFoundError"
    if isinstance(error, errors.GatedRepoError) or "is a gated dataset" in line:
        fix = f"ask for access at {page}, and set HF_TOKEN"
        return Refused(f"{repo} is gated", fix=fix, bad_input=True)
    if isinstance(error, errors.RevisionNotFoundError):
        fix = request["named"].replace("OWNER/NAME", repo)
        return Refused(f"{repo} has no such revision", fix=fix, bad_input=True)
    if isinstance(error, errors.RepositoryNotFoundError) or unknown:
        fix = f"{request['named']}; HF_TOKEN opens private ones"
        return Refused(f"no {noun} {repo} on {hub}, or it is private", fix=fix, bad_input=True)
    if isinstance(error, errors.RemoteEntryNotFoundError):
        return Refused(f"{repo} lacks a file: {line}", bad_input=True)
    if status == 401:
        fix = "a token of yours, or none"
        return Refused(f"{hub} refuses the token in HF_TOKEN (401)", fix=fix, bad_input=True)
    if status == 429:
        fix = f"wait, set HF_TOKEN, or {request['local']}"
        return Refused(f"{hub} limits the rate of requests (429)", fix=fix)
    if status is not None:
        return Refused(f"{hub} answers {status} for {repo}")
    if "OfflineMode" in line or "offline mode" in line:
        return Refused(f"{repo} is not cached, and HF_HUB_OFFLINE is set")
    if isinstance(error, OSError) and error.errno in STORAGE:
        return Refused(f"cannot store {repo}: {error.strerror}", fix="HF_HOME=FOLDER with space")
    if type(error).__name__ in ("ConnectError", "ConnectTimeout", "ReadTimeout"):
        return Refused(f"cannot reach {hub} for {repo}: {line}")
    bad_input = isinstance(error, ValueError | RuntimeError)
    what = f"cannot load {repo}: {line or type(error).__name__}"
    return Refused(what, fix=_option(request, line), bad_input=bad_input)


def _option(request: dict[str, Any], line: str) -> str | None:
    """Of `datasets`: an unknown subset or split, with those there are; a set that is a script."""
    if request["type"] != "dataset":
        return None
    return (
        "--data.split=NAME"
        if "split" in line
        else "--data.subset=NAME"
        if "onfig" in line
        else None
    )
