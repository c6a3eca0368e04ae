# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face hub on this machine, with one data set or model, and the ways a hub fails.

Only what `datasets` and `huggingface_hub` ask for: repository info, folder listings, files with
ranges.
"""

import hashlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

REPO = "owner/verse"
SHA = "0123456789abcdef0123456789abcdef01234567"
REFUSALS = {  # status, and what the hub calls it
    "missing": (404, "RepoNotFound"),
    "gated": (401, "GatedRepo"),
    "limited": (429, ""),
    "down": (503, ""),
}


class FakeHub:
    """The state of the hub: its files, how it behaves, and what it was asked.

    Attributes:
      mode: `ok`; `stall` (takes requests and says nothing); `stall_body` and `half` (send half of a
        data file, then nothing, or hang up); `slow` (a data file in 10 pieces); or one of REFUSALS.
      api: Where repositories of its kind are described.
      resolve: Where their files are.
      requests: Method and path of each request so far.
      tokens: The Authorization headers that came.
    """

    def __init__(self, files: dict[str, bytes], repo: str, kind: str):
        self.files, self.repo, self.sha, self.mode = files, repo, SHA, "ok"
        self.api = f"/api/{kind}/{repo}"
        self.resolve = f"/{repo}/resolve/" if kind == "models" else f"/{kind}/{repo}/resolve/"
        self.requests: list[str] = []
        self.tokens: set[str | None] = set()
        self.url = ""
        self.over = threading.Event()


@contextmanager
def serve(files: dict[str, bytes], repo: str = REPO, kind: str = "datasets") -> Iterator[FakeHub]:
    """A hub on a free port, for as long as the block runs."""
    hub = FakeHub(files, repo, kind)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("H", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield hub
    finally:
        hub.over.set()  # wakes those that stall
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub

    def do_GET(self):
        hub, path = self.hub, unquote(urlsplit(self.path).path)
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        hub.requests.append(f"{self.command} {path}")
        hub.tokens.add(self.headers.get("Authorization"))
        if hub.mode == "stall":
            hub.over.wait(60)
            return
        if hub.mode in REFUSALS:
            status, code = REFUSALS[hub.mode]
            if hub.mode == "gated" and path == hub.api:  # as the real one
                self.answer(200, json.dumps(self.info() | {"gated": "auto"}).encode())
            else:
                self.answer(status, b"", {"X-Error-Code": code, "X-Error-Message": "no"})
            return
        api, files = hub.api, hub.resolve
        if path in (api, f"{api}/revision/main", f"{api}/revision/{hub.sha}"):
            self.answer(200, json.dumps(self.info()).encode())
        elif path.startswith(f"{api}/revision/"):
            self.answer(404, b"", {"X-Error-Code": "RevisionNotFound"})
        elif path.startswith(f"{api}/tree/"):
            folder = path.removeprefix(f"{api}/tree/").partition("/")[2].strip("/")
            found = self.listing(
                f"{folder}/" if folder else "", "recursive=true" in self.path.lower()
            )
            self.answer(200, json.dumps(found).encode())
        elif path.startswith(f"{api}/paths-info/"):
            wanted = json.loads(body)["paths"] if body[:1] == b"{" else []
            found = [entry for entry in self.listing("", True) if entry["path"] in wanted]
            self.answer(200, json.dumps(found).encode())
        elif path.startswith(files):
            self.file(path.removeprefix(files).partition("/")[2])
        else:
            self.answer(404, b"", {"X-Error-Code": "RepoNotFound"})

    do_HEAD = do_POST = do_GET

    def info(self):
        files = self.hub.files.items()
        siblings = [{"rfilename": name, "size": len(content)} for name, content in files]
        return {"id": self.hub.repo, "sha": self.hub.sha, "gated": False, "siblings": siblings}

    def listing(self, folder, recursive):
        names = [name for name in self.hub.files if name.startswith(folder)]
        below = {
            name[len(folder) :].partition("/")[0] for name in names if "/" in name[len(folder) :]
        }
        return [
            {"type": "directory", "path": folder + name, "oid": _etag(name.encode())}
            for name in sorted(below)
        ] + [
            {"type": "file", "path": name, "size": len(content), "oid": _etag(content)}
            for name, content in self.hub.files.items()
            if name in names and (recursive or "/" not in name[len(folder) :])
        ]

    def file(self, name):
        headers = {"X-Repo-Commit": self.hub.sha}
        if name not in self.hub.files:
            self.answer(404, b"", headers | {"X-Error-Code": "EntryNotFound"})
            return
        content, status = self.hub.files[name], 200
        headers |= {"ETag": f'"{_etag(content)}"', "Accept-Ranges": "bytes"}
        if asked := self.headers.get("Range"):
            first, _, last = asked.removeprefix("bytes=").partition("-")
            start, end = int(first), min(int(last or len(content)), len(content) - 1)
            headers["Content-Range"] = f"bytes {start}-{end}/{len(content)}"
            content, status = content[start : end + 1], 206
        self.answer(status, content, headers, data=name.endswith((".parquet", ".safetensors")))

    def answer(self, status, body, headers=None, data=False):
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        mode = self.hub.mode if data else "ok"
        if mode in ("half", "stall_body"):
            self.wfile.write(body[: len(body) // 2])
            self.wfile.flush()
            if mode == "stall_body":
                self.hub.over.wait(60)
        elif mode == "slow":
            size = len(body) // 9 or 1
            for start in range(0, len(body), size):
                self.wfile.write(body[start : start + size])
                time.sleep(0.5)
        else:
            self.wfile.write(body)

    def log_message(self, *args):
        pass

    def handle(self):
        try:
            super().handle()
        except OSError:  # the other side was ended
            pass


def _etag(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
