"""The API server as a process of its own: the same server and proxy, which then reach the worker by RPC.

Nobody tells the proxy where it runs: the fast path looks the worker's address up in its own process, finds none there, and
calls over the socket. This process knows no MPI and dies with the rank that started it.
"""

from __future__ import annotations

import argparse
import asyncio
import select
import signal
import subprocess
import sys
from collections.abc import Callable

import msgspec

from meta_executor import wire
from meta_executor.api.batching import batching_of
from meta_executor.api.endpoint import CopiedEndpoint
from meta_executor.api.proxy import Proxy
from meta_executor.api.server import ApiServer, ServerThread
from meta_executor.config import InstanceSpec, RunSpec
from meta_executor.listener.credentials import api_keys
from meta_executor.supervise.procfs import die_with_parent

#: The server says its address within this time (s).
START_TIMEOUT_S = 30.0


class SpawnedServer:
    """Rank 0's handle on it."""

    def __init__(self, spec: RunSpec, instance: InstanceSpec, worker_address: str) -> None:
        command = [
            sys.executable, "-m", "meta_executor.api.spawned",
            "--run-dir", spec.run_dir, "--owner", instance.owner_id, "--worker", worker_address,
        ]  # fmt: skip
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, preexec_fn=die_with_parent, text=True
        )
        self.url = self._address()

    def _address(self) -> str:
        pipe = self._process.stdout
        if pipe is None or not select.select([pipe], [], [], START_TIMEOUT_S)[0]:
            self._process.kill()
            raise RuntimeError(f"the API server's process did not start within {START_TIMEOUT_S:g} s")
        url = pipe.readline().strip()
        if not url:
            raise RuntimeError(f"the API server's process ended with {self._process.wait(5.0)}")
        return url

    def stop(self, timeout_s: float = 5.0) -> None:
        """End it. Idempotent."""
        self._process.terminate()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(timeout_s)
        if self._process.stdout is not None:
            self._process.stdout.close()


async def _record(make: Callable[[], Proxy]) -> wire.ServerInfo:
    proxy = make()
    try:
        return msgspec.json.decode(await proxy.worker_record(), type=wire.ServerInfo)
    finally:
        await proxy.close()


def main(arguments: list[str] | None = None) -> int:
    """Serve until terminated."""
    parser = argparse.ArgumentParser(prog="meta_executor.api.spawned")
    parser.add_argument("--run-dir", required=True)
    parser.add_argument("--owner", required=True)
    parser.add_argument("--worker", required=True, help="RPC address of the worker")
    options = parser.parse_args(arguments)
    spec = RunSpec.load(options.run_dir)
    instance = spec.instance(options.owner)

    def proxy() -> Proxy:
        return Proxy(
            options.worker,
            spec.key(),
            fast_path=bool(instance.config.rpc.local_fastpath),
            batching=batching_of(instance),
        )

    info = asyncio.run(_record(proxy))
    api = ApiServer(proxy(), CopiedEndpoint(info), spec.key().hex(), config=instance.config,
                    keys=api_keys(spec.service.front), drain_timeout_s=spec.service.drain_timeout_s)  # fmt: skip
    server = ServerThread(api, instance.config.hostname, instance.port)
    server.start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.stdout.write(server.url + "\n")
    sys.stdout.flush()
    # Terminated by the rank that started it, after the worker's last answer.
    signal.sigwait({signal.SIGTERM})
    server.stop()
    return 0


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    sys.exit(main())
