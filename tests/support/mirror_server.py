"""A server of byte ranges on this PC, which may do wrong in a chosen way."""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class Server(ThreadingHTTPServer):
    """Serves one folder by ranges; `fault` says what it does wrong."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.folder, self.fault, self.asked = folder, "", []

    def handle_error(self, *_: object) -> None:
        """Say nothing of who hangs up: that is what is tried."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/weights"


class Answer(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        fault = self.server.fault
        start, stop = map(int, re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers["Range"]).groups())
        self.server.asked.append((start, stop))
        content = (self.server.folder / self.path.rpartition("/")[2]).read_bytes()
        piece = content[start : stop + 1]
        if fault == "gone":
            self.send_error(404)
            return
        if fault in ("file", "loop"):
            self.send_response(302)
            self.send_header("Location", "file:///etc/passwd" if fault == "file" else self.path)
            self.end_headers()
            return
        self.send_response(200 if fault == "whole" else 206)
        begin = start + 1 if fault == "elsewhere" else start
        if fault != "whole":
            self.send_header("Content-Range", f"bytes {begin}-{stop}/{len(content)}")
        self.send_header("Content-Length", str(len(piece)))
        self.end_headers()
        if fault == "cut":
            piece = piece[: max(1, len(piece) // 2)]
        if fault == "silent":
            piece = b""
        if fault == "long":
            piece += b"more"
        if fault == "lies":
            piece = bytes(len(piece))
        self.wfile.write(piece)
        self.close_connection = True


@contextmanager
def serving(folder: Path) -> Iterator[Server]:
    """Serve a folder for a while."""
    with Server(folder) as found:
        thread = threading.Thread(target=found.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield found
        finally:
            found.shutdown()
            thread.join()
