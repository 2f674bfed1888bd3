"""A rank or a front for launcher tests: reports itself, answers /internal/drain, dies on command. No MPI, no model."""

import argparse
import os
import signal
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

from meta_executor.config import RunSpec
from meta_executor.mpi_launcher import rank_of
from meta_executor.supervise.report import Reporter

parser = argparse.ArgumentParser()
parser.add_argument("--run-dir")
parser.add_argument("--owner", default="front")
parser.add_argument("--instance-id", default="")
parser.add_argument("--server", action="append", default=[])
options = parser.parse_args()
run = RunSpec.load(options.run_dir)
rank = rank_of(os.environ) if options.owner != "front" else 0
reporter = Reporter(options.run_dir, options.owner, rank, options.instance_id)
reporter.send("status", phase="loading")
over = threading.Event()
if os.environ.get("FAKE_EXIT") == f"{options.owner}/{rank}":
    print("dies while it starts", flush=True)
    sys.exit(3)
while os.environ.get("FAKE_HANGS") == options.owner:
    over.wait(1.0)
# The world ends together: rank 0 removes nothing, it only makes the file that the others wait for.
flag = run.path("tmp", f"{options.owner}{options.instance_id}.over")


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        code = 202 if self.headers.get("x-meta-executor-key") == run.key().hex() else 403
        self.send_response(code)
        self.send_header("content-length", "0")
        self.end_headers()
        if code == 202 and self.path == "/internal/drain":
            flag.touch()

    def log_message(self, *_):
        pass


if rank == 0:
    spec = run.instance(options.owner) if options.owner != "front" else None
    server = HTTPServer(("127.0.0.1", spec.port if spec else 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    reporter.send("ready", url=f"http://127.0.0.1:{server.server_port}", instance_id=options.instance_id)
stays = os.environ.get("FAKE_STAYS") if options.owner == "front" else None


def told(*_: object) -> None:
    print("told to cut", flush=True)
    if stays != "deaf":
        sys.exit(0)


signal.signal(signal.SIGTERM, told)
while stays or not flag.exists():
    over.wait(0.02)
print(f"rank {rank} leaves", flush=True)
