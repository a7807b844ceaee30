"""A local web server for tests: a package index and a model hub, with the faults of networks.

`serve()` yields a `FakeHub`. Its `files` map a path to bytes, other fields inject faults, and
counters record the traffic. The hub implements the part of the Hugging Face API that its library
needs.
"""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class FakeHub:
    url: str
    files: dict[str, bytes] = field(default_factory=dict)
    repos: dict[str, dict[str, bytes]] = field(default_factory=dict)  # "org/name" -> its files
    statuses: dict[str, int] = field(default_factory=dict)  # path or repo -> status of its refusal
    honours_ranges: bool = True
    account: str | None = None  # an Authorization header that every request must carry
    breaks_after: int | None = None  # bytes of a body after which the connection is lost
    num_breaks: int = 0  # how many further bodies are cut off like this
    pauses_after: int | None = None  # bytes of bodies after which the server waits for `goes_on`
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
        path = unquote(urlsplit(self.path).path)
        hub.requests.append((self.command, path, self.headers["Range"]))
        if hub.account is not None and self.headers["Authorization"] != hub.account:
            return self._refuse(401)
        for place, status in hub.statuses.items():
            if path.startswith(place):
                return self._refuse(status)
        if path in hub.files:
            kind = "text/html" if path.endswith("/") else "application/octet-stream"
            return self._send(hub.files[path], {"Content-Type": kind})
        return self._answer_as_model_hub(hub, path)

    def _answer_as_model_hub(self, hub: FakeHub, path: str) -> None:
        is_api = path.startswith("/api/models/")
        org, name, *rest = [*path.removeprefix("/api/models/").strip("/").split("/"), "", ""]
        files = hub.repos.get(f"{org}/{name}")
        if files is None:
            return self._refuse(404, {"X-Error-Code": "RepoNotFound"})
        if is_api and rest[0] == "tree":
            entries = [
                {"type": "file", "path": p, "size": len(b), "oid": hashlib.sha1(b).hexdigest()}
                for p, b in files.items()
            ]
            return self._send(json.dumps(entries).encode(), {"Content-Type": "application/json"})
        if is_api:
            info = {"id": f"{org}/{name}", "sha": COMMIT, "modelId": f"{org}/{name}"}
            info["siblings"] = [{"rfilename": p} for p in files]
            return self._send(json.dumps(info).encode(), {"Content-Type": "application/json"})
        content = files.get("/".join(rest[2:]).strip("/"))
        if content is None:
            return self._refuse(404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
        etag = f'"{hashlib.sha1(content).hexdigest()}"'
        return self._send(content, {"X-Repo-Commit": COMMIT, "ETag": etag})

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
        start = 0
        if hub.honours_ranges and (wanted := self.headers["Range"]):
            start = int(wanted.removeprefix("bytes=").split("-")[0])
            if start >= len(content):
                return self._refuse(416, {"Content-Range": f"bytes */{len(content)}"})
            headers |= {"Content-Range": f"bytes {start}-{len(content) - 1}/{len(content)}"}
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
            if hub.pauses_after is not None and hub.num_body_bytes >= hub.pauses_after:
                hub.goes_on.wait()
            chunk = body[first : first + 64 * 1024]
            hub.count(body_bytes=len(chunk))  # before sending: a client finds its bytes counted
            try:
                self.wfile.write(chunk)
            except OSError:  # the client has been killed
                return

    def log_message(self, *_: object) -> None:
        """Print nothing to stderr."""
