"""``python -m meta_executor.front --run-dir DIR --server ctx-0=http://127.0.0.1:8101 --server gen-0=…``.

With ``discovery.store`` in the run's configuration the instances are found there, and none need be named.
"""

from __future__ import annotations

import argparse
import logging
import sys

from meta_executor.config import RunSpec
from meta_executor.front.envelope import ACCESS_LOGGER
from meta_executor.front.runner import run_front
from meta_executor.front.servers import FrontServer


def main(arguments: list[str] | None = None) -> int:
    """Parse, serve, say how it ended."""
    parser = argparse.ArgumentParser(prog="python -m meta_executor.front", description="The OpenAI service of one run.")
    parser.add_argument("--run-dir", required=True, help="the run's folder, with run.json and key")
    parser.add_argument(
        "--server", action="append", default=[], metavar="OWNER=URL", help="an instance and where it answers; repeat"
    )
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    run = RunSpec.load(options.run_dir)
    if run.service.front.access_log:
        logging.getLogger(ACCESS_LOGGER).setLevel(logging.INFO)
    servers = []
    for text in options.server:
        owner_id, separator, url = text.partition("=")
        if not separator or not url.startswith("http://"):
            parser.error(f"--server {text!r}: want OWNER=http://HOST:PORT")
        spec = run.instance(owner_id)
        servers.append(FrontServer(owner_id, spec.role, url.rstrip("/"), elsewhere=bool(spec.url)))
    return run_front(run, servers)


if __name__ == "__main__":
    sys.exit(main())
