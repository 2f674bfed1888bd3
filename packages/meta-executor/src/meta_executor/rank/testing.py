"""Real instances for tests: two ``mpiexec`` worlds in a run folder, without launcher and front, and a client of their wire.

For whole services use ``meta-executor up``; this is for tests that look at one instance's API, evidence or end.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec

from meta_executor import wire
from meta_executor.config import InstanceSpec, RunSpec, ServiceConfig, apply_environment
from meta_executor.supervise.launch import world_command
from meta_executor.supervise.report import Listener


class RunningPair:
    """A context and a generation instance of one configuration.

    Use as a context manager; leaving it drains what still runs and removes the folder.

    Args:
        config: What to start; both roles once.
        start_timeout_s: Until both are ready.
    """

    def __init__(self, config: ServiceConfig, *, start_timeout_s: float = 90.0) -> None:
        self.config = apply_environment(config, {})
        self._start_timeout_s = start_timeout_s
        self._worlds: dict[str, subprocess.Popen[bytes]] = {}
        self.urls: dict[str, str] = {}
        self.infos: dict[str, wire.ServerInfo] = {}
        self._next_id = 1

    def __enter__(self) -> RunningPair:
        self.folder = Path(tempfile.mkdtemp(prefix="mx-"))
        for name in ("ipc", "logs", "evidence", "tmp"):
            (self.folder / name).mkdir(mode=0o700)
        (self.folder / "key").write_text(secrets.token_hex(32))
        (self.folder / "key").chmod(0o600)
        instances = (
            InstanceSpec(owner_id="ctx-0", role="context", index=0, config=self.config.context_servers, port=0),
            InstanceSpec(owner_id="gen-0", role="generation", index=0, config=self.config.generation_servers, port=0),
        )
        self.spec = RunSpec(
            run_id="test", run_dir=str(self.folder), launcher_pid=0, service=self.config, instances=instances
        )
        self.spec.save()
        self.client = httpx.Client(headers={wire.KEY_HEADER: self.spec.key().hex()}, timeout=60.0, trust_env=False)
        listener = Listener(self.folder)
        try:
            for instance in instances:
                self._start(instance)
            self._wait_ready(listener)
        except BaseException:
            self._end()
            raise
        finally:
            listener.close()
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is not None:
            # The folder goes with this call: what the ranks said belongs beside the failure.
            sys.stderr.write(self.logs())
        self._end()

    def _start(self, instance: InstanceSpec) -> None:
        command = world_command(instance.config.world_size, [
            sys.executable, "-m", "meta_executor.rank.worker",
            "--run-dir", str(self.folder), "--owner", instance.owner_id, "--instance-id", secrets.token_hex(8),
        ])  # fmt: skip
        with (self.folder / "logs" / f"{instance.owner_id}.log").open("ab") as log:
            self._worlds[instance.owner_id] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def _wait_ready(self, listener: Listener) -> None:
        deadline = time.monotonic() + self._start_timeout_s
        while len(self.urls) < len(self._worlds):
            for message in listener.receive():
                if message.event == "ready":
                    self.urls[message.owner_id] = str(message.fields["url"])
            dead = [name for name, world in self._worlds.items() if world.poll() is not None]
            if dead or time.monotonic() > deadline:
                raise RuntimeError(f"{dead or list(self._worlds)} did not become ready:\n{self.logs()}")
            time.sleep(0.02)
        for name, url in self.urls.items():
            self.infos[name] = msgspec.json.decode(self.client.get(f"{url}/server_info").content, type=wire.ServerInfo)

    def logs(self) -> str:
        """What the ranks wrote."""
        return "\n".join(
            f"--- {path.name}\n{path.read_text(errors='replace')}" for path in sorted((self.folder / "logs").iterdir())
        )

    # -- the wire -----------------------------------------------------------------------------------------------------

    def request_id(self) -> int:
        """A fresh one."""
        self._next_id += 1
        return self._next_id

    def context_body(
        self, request_id: int, prompt: list[int], max_tokens: int, *, style: str = "context_first", **sampling: Any
    ) -> wire.ContextRequest:
        """The context leg's body."""
        return wire.ContextRequest(
            request_id=request_id,
            token_ids=prompt,
            sampling=wire.Sampling(max_tokens=max_tokens, ignore_eos=True, **sampling),
            schedule_style=style,  # type: ignore[arg-type]
            endpoint_generation=self.infos["ctx-0"].generation or "",
        )

    def generation_body(
        self,
        request_id: int,
        prompt: list[int],
        max_tokens: int,
        first_token: int | None,
        *,
        style: str = "context_first",
        **sampling: Any,
    ) -> wire.GenerationRequest:
        """The generation leg's body."""
        context = self.infos["ctx-0"]
        return wire.GenerationRequest(
            request_id=request_id,
            token_ids=prompt,
            sampling=wire.Sampling(max_tokens=max_tokens, ignore_eos=True, **sampling),
            first_token=first_token,
            context=wire.PeerContext(
                instance_id=context.instance_id,
                endpoint_generation=context.generation or "",
                control_addresses=context.control_addresses,
                url=self.urls["ctx-0"],
            ),
            schedule_style=style,  # type: ignore[arg-type]
            endpoint_generation=self.infos["gen-0"].generation or "",
        )

    def post(self, owner: str, path: str, body: Any) -> httpx.Response:
        """One request to an instance."""
        return self.client.post(f"{self.urls[owner]}{path}", content=wire.encode_json(body))

    def context_leg(self, body: wire.ContextRequest) -> wire.ContextResponse:
        """Run it to its answer.

        Raises:
            RuntimeError: It was refused or failed.
        """
        response = self.post("ctx-0", "/internal/context", body)
        if response.status_code != 200:
            raise RuntimeError(f"{response.status_code}: {response.text}")
        return msgspec.json.decode(response.content, type=wire.ContextResponse)

    def generation_leg(self, body: wire.GenerationRequest) -> Iterator[wire.GenerationChunk]:
        """Its lines as they come.

        Raises:
            RuntimeError: It was refused.
        """
        with self.client.stream(
            "POST", f"{self.urls['gen-0']}/internal/generation", content=wire.encode_json(body)
        ) as response:
            if response.status_code != 200:
                raise RuntimeError(f"{response.status_code}: {response.read().decode()}")
            for line in response.iter_lines():
                if line:
                    yield wire.decode_chunk(line.encode())

    def serve(self, prompt: list[int], max_tokens: int, *, style: str = "context_first", **sampling: Any) -> list[int]:
        """One request from end to end. Returns all its tokens.

        Raises:
            RuntimeError: A leg failed.
        """
        request_id = self.request_id()
        if style == "context_first":
            first = self.context_leg(self.context_body(request_id, prompt, max_tokens, **sampling))
            if first.finish_reason is not None:
                return [first.first_token]
            body = self.generation_body(request_id, prompt, max_tokens, first.first_token, **sampling)
            return [first.first_token, *_tokens(self.generation_leg(body))]
        from concurrent.futures import ThreadPoolExecutor

        body = self.generation_body(request_id, prompt, max_tokens, None, style=style, **sampling)
        with ThreadPoolExecutor(1) as pool:
            context = pool.submit(
                self.context_leg, self.context_body(request_id, prompt, max_tokens, style=style, **sampling)
            )
            tokens = _tokens(self.generation_leg(body))
            context.result(timeout=60)
        return tokens

    def statistics(self, owner: str) -> wire.InstanceStatistics:
        """Counters of an instance, once every rank has told rank 0 its own (they travel beside the readiness)."""
        deadline_s = time.monotonic() + 20.0
        while True:
            response = self.client.get(f"{self.urls[owner]}/internal/statistics")
            counters = msgspec.json.decode(response.content, type=wire.InstanceStatistics)
            if all(rank.kv_blocks_total for rank in counters.ranks) or time.monotonic() > deadline_s:
                return counters
            time.sleep(0.02)

    # -- the end ------------------------------------------------------------------------------------------------------

    def drain(self, timeout_s: float = 60.0) -> dict[str, int]:
        """Drain both; exit code of each world.

        Raises:
            RuntimeError: One did not leave in time; with the logs.
        """
        for owner in self.urls:
            self.post(owner, "/internal/drain", wire.DrainRequest(deadline_s=timeout_s * 0.8))
        codes = {}
        for owner, world in self._worlds.items():
            try:
                codes[owner] = world.wait(timeout_s)
            except subprocess.TimeoutExpired:
                raise RuntimeError(f"{owner} did not leave within {timeout_s:g} s:\n{self.logs()}") from None
        return codes

    def evidence(self) -> list[dict[str, Any]]:
        """What the ranks left behind."""
        return [msgspec.json.decode(path.read_bytes()) for path in sorted((self.folder / "evidence").glob("*.json"))]

    def _end(self) -> None:
        for world in self._worlds.values():
            if world.poll() is None:
                world.terminate()
        for world in self._worlds.values():
            try:
                world.wait(20.0)
            except subprocess.TimeoutExpired:
                world.kill()
                world.wait(10.0)
        with contextlib.suppress(AttributeError):
            self.client.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def _tokens(chunks: Iterator[wire.GenerationChunk]) -> list[int]:
    tokens: list[int] = []
    finished = False
    for chunk in chunks:
        tokens.extend(chunk.tokens)
        if chunk.error is not None:
            raise RuntimeError(f"{chunk.error.error}: {chunk.error.message}")
        finished = chunk.finish_reason is not None
    if not finished:
        raise RuntimeError("the stream ended without a finish reason")
    return tokens
