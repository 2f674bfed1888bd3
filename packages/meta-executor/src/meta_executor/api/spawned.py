"""An instance's API as a process of its own: the same parts, which then reach the worker by RPC.

Nobody tells them where they run: the fast path looks the worker's address up in its own process, finds none there, and calls
over the socket. This process knows no MPI and dies with the rank that started it.
"""

from __future__ import annotations

import argparse
import asyncio
import select
import signal
import subprocess
import sys

import msgspec

from meta_executor import wire
from meta_executor.api.endpoint import CopiedEndpoint
from meta_executor.api.instance import InstanceApi, client_of
from meta_executor.api.worker_client import WorkerClient
from meta_executor.config import InstanceSpec, RunSpec
from meta_executor.supervise.lasting import set_apart_what_lasts
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

    def close(self, timeout_s: float = 5.0) -> None:
        """End it. Idempotent."""
        self._process.terminate()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(timeout_s)
        if self._process.stdout is not None:
            self._process.stdout.close()


async def _record(worker: WorkerClient) -> wire.ServerInfo:
    try:
        return msgspec.json.decode(await worker.record(), type=wire.ServerInfo)
    finally:
        await asyncio.to_thread(worker.close)


def main(arguments: list[str] | None = None) -> int:
    """Serve until terminated."""
    parser = argparse.ArgumentParser(prog="meta_executor.api.spawned")
    parser.add_argument("--run-dir", required=True)
    parser.add_argument("--owner", required=True)
    parser.add_argument("--worker", required=True, help="RPC address of the worker")
    options = parser.parse_args(arguments)
    spec = RunSpec.load(options.run_dir)
    instance = spec.instance(options.owner)

    info = asyncio.run(_record(client_of(spec, instance, options.worker)))
    api = InstanceApi(spec, instance, options.worker, CopiedEndpoint(info))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    set_apart_what_lasts()
    sys.stdout.write(api.url + "\n")
    sys.stdout.flush()
    # Terminated by the rank that started it, after the worker's last answer.
    signal.sigwait({signal.SIGTERM})
    api.close()
    return 0


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    sys.exit(main())
