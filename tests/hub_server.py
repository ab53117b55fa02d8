"""A hub on this machine: one dataset of parquet files over HTTP, with connections that drop."""

import hashlib
import json
import re
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class HubServer(ThreadingHTTPServer):
    """Serves the files of `folder` as dataset `repo`; drops `num_drops` answers in the middle."""

    daemon_threads = True

    def __init__(self, folder: Path, repo: str, num_drops: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder, self.repo, self.drops_left = folder, repo, num_drops
        self.num_dropped = 0
        self.lost = "nothing"  # files with this in their name are always dropped
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request, client_address) -> None:
        """Clients that go away are no news here."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HubServer

    def log_message(self, *args) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        body = self.rfile.read(length).decode()
        paths = json.loads(body).get("paths", []) if body.startswith("{") else []
        self.json([entry for entry in self.entries() if entry["path"] in paths])

    def answer(self, with_body: bool) -> None:
        path, base = unquote(self.path.partition("?")[0]), f"/api/datasets/{self.server.repo}"
        if found := re.fullmatch(rf"/datasets/{self.server.repo}/resolve/[^/]+/(.+)", path):
            self.file(self.server.folder / found[1], with_body)
        elif path in (base, f"{base}/revision/main", f"{base}/revision/{COMMIT}"):
            names = [{"rfilename": entry["path"]} for entry in self.entries()]
            self.json({"id": self.server.repo, "sha": COMMIT, "siblings": names, "tags": []})
        elif path.startswith(f"{base}/tree/"):
            self.json(self.entries())
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    def entries(self) -> list[dict]:
        return [
            {"type": "file", "path": path.name, "size": path.stat().st_size, "oid": "0" * 40}
            for path in sorted(self.server.folder.iterdir())
        ]

    def json(self, value: object) -> None:
        content = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def file(self, path: Path, with_body: bool) -> None:
        if not path.is_file():
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        content = path.read_bytes()
        whole, start = len(content), 0
        if found := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            start = int(found[1])
            content = content[start : int(found[2]) + 1 if found[2] else None]
        self.send_response(206 if found else 200)
        self.send_header("ETag", f'"{hashlib.sha256(path.read_bytes()).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Accept-Ranges", "bytes")
        if found:
            end = start + len(content) - 1
            self.send_header("Content-Range", f"bytes {start}-{end}/{whole}")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if not with_body:
            return
        is_lost = self.server.lost in path.name
        if len(content) > 1000 and (self.server.drops_left > 0 or is_lost):
            self.server.drops_left -= 1
            self.server.num_dropped += 1
            self.wfile.write(content[: len(content) // 2])
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
            return
        self.wfile.write(content)
