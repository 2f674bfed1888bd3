"""A small HTTP instance as a process of its own, for the service test: estimation, publication, streamed answers.

Run as a script: ``worker_process.py PORT ROLE OWNER_ID``. Prints one JSON line when it has published.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from endpoint_lifecycle import (
    EndpointError,
    EndpointOwner,
    EndpointProfile,
    error_body,
    http_status,
    server_info_body,
)

TOKEN_S = 0.01


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    owner: EndpointOwner
    taken: list[tuple[str | None, int]]
    refused: list[tuple[str | None, int]]

    def log_message(self, *_: Any) -> None:
        pass

    def answer(self, status: int, body: Any) -> None:
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(text)

    def do_GET(self) -> None:
        if self.path == "/server_info":
            self.answer(200, server_info_body(self.owner))
        elif self.path == "/health":
            self.answer(200 if self.owner.ready else 503, {})
        elif self.path == "/received":
            body = {"taken": self.taken, "refused": self.refused, "in_flight": self.owner.in_flight}
            self.answer(200, body)
        else:
            self.answer(404, {})

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/drain":
            self.owner.start_draining()
            self.answer(200, {})
            return
        generation, request_id = request["endpoint_generation"], request["request_id"]
        try:
            admission = self.owner.admit(generation)
        except EndpointError as error:
            self.refused.append((generation, request_id))
            self.answer(http_status(error), error_body(error))
            return
        with admission:
            self.taken.append((generation, request_id))
            self.send_response(200)
            self.send_header("Connection", "close")
            self.end_headers()
            try:
                for token in range(request["tokens"]):
                    self.wfile.write(f"{token}\n".encode())
                    self.wfile.flush()
                    time.sleep(TOKEN_S)
                self.wfile.write(b"end\n")
            except OSError:
                pass  # the client left; the admission ends with this block
            self.close_connection = True


class Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 256


def main(port: int, role: str, owner_id: str) -> None:
    owner = EndpointOwner(owner_id, f"{owner_id}.{os.getpid()}", role)
    Handler.owner, Handler.taken, Handler.refused = owner, [], []
    server = Server(("127.0.0.1", port), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with owner.begin_estimation() as runtime:
        runtime.opened("tcp://127.0.0.1:9", size_bytes=1 << 20)
        time.sleep(0.2)  # an estimation takes its time; /server_info is asked all the while
        runtime.closed("tcp://127.0.0.1:9")
    record = owner.finalize().publish((f"tcp://127.0.0.1:{port}",), EndpointProfile())
    print(json.dumps({"generation": record.generation, "pid": os.getpid()}), flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
