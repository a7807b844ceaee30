"""A local web server for tests: a package index and a model hub, with the faults of networks.

`serve()` yields a `FakeHub`. Its `files` map a path to bytes, other fields inject faults, and
counters record the traffic. The hub implements the part of the Hugging Face API that its library
needs: repositories with commits, and branches and tags that point to them.
"""

import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


@dataclass
class FakeHub:
    url: str
    files: dict[str, bytes] = field(default_factory=dict)
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)  # "org/name@sha" -> files
    refs: dict[str, str] = field(default_factory=dict)  # "org/name@revision" -> sha
    after_resolving: Callable[[], object] = field(default=lambda: None)  # a revision to its commit
    statuses: dict[str, int] = field(default_factory=dict)  # path or repo -> status of its refusal
    honours_ranges: bool = True
    account: str | None = None  # an Authorization header that every request must carry
    breaks_after: int | None = None  # bytes of a body after which the connection is lost
    num_breaks: int = 0  # how many further bodies are cut off like this
    pauses_after: int | None = None  # bytes of bodies after which the server waits for `goes_on`
    pauses_for: str = ""  # only the bodies of paths that end like this
    goes_on: threading.Event = field(default_factory=threading.Event)
    num_body_bytes: int = 0  # at least as many as the clients have
    num_sending: int = 0  # incomplete bodies whose client may still be connected
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)  # method, path, range

    _lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, *, body_bytes: int = 0, sending: int = 0) -> None:
        """Add to the counters, from the thread of any connection."""
        with self._lock:
            self.num_body_bytes += body_bytes
            self.num_sending += sending

    def paths(self, end: str) -> list[str]:
        return [path for method, path, _ in self.requests if path.endswith(end) and method == "GET"]

    def commit(self, repo: str, files: dict[str, bytes], *revisions: str) -> str:
        """Add a commit with these files, let branches and tags point to it, and return its sha."""
        sha = hashlib.sha1(repr((repo, sorted(files.items()))).encode()).hexdigest()
        self.commits[f"{repo}@{sha}"] = files
        self.refs |= {f"{repo}@{revision}": sha for revision in (*revisions, sha)}
        return sha

    def add_wheel(self, file_name: str, content: bytes, *, with_hash: bool = True) -> str:
        """List a wheel in the index at `url`/simple, and return its address."""
        project = file_name.split("-")[0].replace("_", "-")
        anchor = f"#sha256={hashlib.sha256(content).hexdigest()}" if with_hash else ""
        self.files[f"/files/{file_name}"] = content
        page = f'<a href="{self.url}/files/{file_name}{anchor}">{file_name}</a>'
        self.files[f"/simple/{project}/"] = (
            f"<!DOCTYPE html><html><body>{page}</body></html>".encode()
        )
        return f"{self.url}/files/{file_name}"


@contextmanager
def serve() -> Iterator[FakeHub]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    server.hub = FakeHub(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server.hub
    finally:
        server.hub.goes_on.set()
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub: FakeHub = self.server.hub
        quoted = urlsplit(self.path).path
        path = unquote(quoted)
        hub.requests.append((self.command, path, self.headers["Range"]))
        if hub.account is not None and self.headers["Authorization"] != hub.account:
            return self._refuse(401)
        for place, status in hub.statuses.items():
            if path.startswith(place):
                return self._refuse(status)
        if path in hub.files:
            kind = "text/html" if path.endswith("/") else "application/octet-stream"
            return self._send(hub.files[path], {"Content-Type": kind})
        return self._answer_as_model_hub(hub, quoted)

    def _answer_as_model_hub(self, hub: FakeHub, quoted: str) -> None:
        """Answer /api/models/REPO[/tree/REV | /revision/REV] and /REPO/resolve/REV/FILE."""
        is_api = quoted.startswith("/api/models/")
        parts = [
            unquote(part) for part in quoted.removeprefix("/api/models/").strip("/").split("/")
        ]
        repo, rest = "/".join(parts[:2]), parts[2:] or ["revision", "main"]
        if not any(each.startswith(f"{repo}@") for each in hub.commits):
            return self._refuse(404, {"X-Error-Code": "RepoNotFound"})
        commit = hub.refs.get(f"{repo}@{rest[1]}")
        if commit is None:
            return self._refuse(404, {"X-Error-Code": "RevisionNotFound"})
        files = hub.commits[f"{repo}@{commit}"]
        if is_api and rest[0] == "tree":
            return self._send_json(
                [
                    {"type": "file", "path": p, "size": len(b), "oid": hashlib.sha1(b).hexdigest()}
                    for p, b in files.items()
                ]
            )
        if is_api:
            siblings = [{"rfilename": p, "size": len(b)} for p, b in files.items()]
            hub.after_resolving()
            return self._send_json(
                {"id": repo, "modelId": repo, "sha": commit, "siblings": siblings}
            )
        content = files.get("/".join(rest[2:]))
        if content is None:
            return self._refuse(404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
        etag = f'"{hashlib.sha1(content).hexdigest()}"'
        return self._send(content, {"X-Repo-Commit": commit, "ETag": etag})

    def _send_json(self, content: object) -> None:
        self._send(json.dumps(content).encode(), {"Content-Type": "application/json"})

    def _refuse(self, status: int, headers: dict[str, str] | None = None) -> None:
        if status == 403:
            headers = {"X-Error-Code": "GatedRepo"}
        if status == 401:
            headers = {"WWW-Authenticate": 'Basic realm="index"'}
        self.send_response(status)
        for key, value in {"Content-Length": "0", **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()

    def _send(self, content: bytes, headers: dict[str, str]) -> None:
        hub: FakeHub = self.server.hub
        start, size = 0, len(content)
        if hub.honours_ranges and (wanted := self.headers["Range"]):
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            start = int(first)
            if start >= size:
                return self._refuse(416, {"Content-Range": f"bytes */{size}"})
            content = content[: int(last) + 1] if last else content
            headers |= {"Content-Range": f"bytes {start}-{len(content) - 1}/{size}"}
        self.send_response(206 if "Content-Range" in headers else 200)
        for key, value in {"Content-Length": str(len(content) - start), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            hub.count(sending=1)
            try:
                self._send_body(hub, content[start:])
            finally:
                hub.count(sending=-1)
        return None

    def _send_body(self, hub: FakeHub, body: bytes) -> None:
        if hub.num_breaks > 0 and hub.breaks_after is not None and len(body) > hub.breaks_after:
            hub.num_breaks -= 1
            body = body[: hub.breaks_after]
        for first in range(0, len(body), 64 * 1024):
            is_paused = hub.pauses_after is not None and self.path.endswith(hub.pauses_for)
            if is_paused and hub.num_body_bytes >= hub.pauses_after:
                hub.goes_on.wait()
            chunk = body[first : first + 64 * 1024]
            hub.count(body_bytes=len(chunk))  # before sending: a client finds its bytes counted
            try:
                self.wfile.write(chunk)
            except OSError:  # the client has been killed
                return

    def log_message(self, *_: object) -> None:
        """Print nothing to stderr."""
