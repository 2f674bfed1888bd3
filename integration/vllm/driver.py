"""Engines as processes, and a prompt's way through them: what the checks and the benchmark share."""

from __future__ import annotations

import json
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

HERE = Path(__file__).resolve().parent
PACKAGE = HERE.parents[1] / "packages" / "kv-bounce-planner" / "src"
#: How long an engine may take to start, and to answer anything.
START_S, ANSWER_S = 600.0, 300.0


@dataclass(frozen=True)
class Answer:
    """One request's end: ``why`` is "length", "stop", "abort" or "error"."""

    tokens: tuple[int, ...]
    why: str
    params: dict[str, Any] | None
    first_s: float | None
    end_s: float


class Engine:
    """A vLLM engine in a process of its own.

    Args:
        model: Folder of the model.
        log: File for what it says.
        block_tokens, threads: Of the engine.
        transfer: vLLM's ``kv_transfer_config``; None: an engine alone.
        more: Further arguments of vLLM's.
    """

    def __init__(
        self,
        model: Path,
        log: Path,
        *,
        block_tokens: int = 128,
        threads: int = 1,
        transfer: dict[str, Any] | None = None,
        environment: dict[str, str] | None = None,
        **more: Any,
    ) -> None:
        configuration = {
            "model": str(model),
            "skip_tokenizer_init": True,
            "dtype": "float32",
            "block_size": block_tokens,
            "max_model_len": 4352,
            "max_num_batched_tokens": 4352,
            "enforce_eager": True,
            "enable_prefix_caching": False,
            "kv_transfer_config": transfer,
            **more,
        }
        self._wire, theirs = socket.socketpair()
        self._rest = b""
        self.answers: dict[str, Answer] = {}
        self._log = log.open("wb")
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "engine_process.py"), str(theirs.fileno()), json.dumps(configuration)],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(HERE), str(PACKAGE)]),
                "OMP_NUM_THREADS": str(threads),
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "VLLM_LOGGING_LEVEL": "WARNING",
                "VLLM_NO_USAGE_STATS": "1",
                "HF_HUB_OFFLINE": "1",
                **(environment or {}),
            },
        )
        theirs.close()

    def ready(self) -> Engine:
        """Wait until it has started: several may start beside each other."""
        self._expect("ready", START_S)
        return self

    def _expect(self, key: str, within_s: float) -> Any:
        until_s = time.monotonic() + within_s
        while True:
            for line in self._lines(until_s - time.monotonic()):
                if key in line:
                    return line[key]

    def _lines(self, wait_s: float) -> list[dict[str, Any]]:
        """What the engine said; answers are kept by their request. Raises when it is silent or gone."""
        if wait_s <= 0 or not select.select([self._wire], [], [], wait_s)[0]:
            raise TimeoutError(f"the engine is silent; it wrote {self._log.name}")
        part = self._wire.recv(1 << 20)
        if not part:
            raise ConnectionError(f"the engine has ended with code {self.process.wait()}; it wrote {self._log.name}")
        *lines, self._rest = (self._rest + part).split(b"\n")
        told = [json.loads(line) for line in lines]
        for line in told:
            if "id" in line:
                tokens, why = tuple(line["tokens"]), line["why"]
                self.answers[line["id"]] = Answer(tokens, why, line["params"], line["first_s"], line["end_s"])
        return told

    def _say(self, line: dict[str, Any]) -> None:
        self._wire.sendall(json.dumps(line).encode() + b"\n")

    def ask(self, name: str, prompt: Sequence[int], answer_tokens: int, params: dict[str, Any] | None = None) -> None:
        """Send a request."""
        self._say({"id": name, "prompt": list(prompt), "answer_tokens": answer_tokens, "params": params})

    def abort(self, name: str) -> None:
        """Take a request back."""
        self._say({"abort": name})

    def wait(self, name: str, within_s: float = ANSWER_S) -> Answer:
        """A request's end."""
        until_s = time.monotonic() + within_s
        while name not in self.answers:
            self._lines(until_s - time.monotonic())
        return self.answers.pop(name)

    def state(self) -> dict[str, Any]:
        """Free blocks, and what the connector counts."""
        self._say({"ask": True})
        return dict(self._expect("state", ANSWER_S))

    def kill(self) -> None:
        """As a machine's fault would: at once."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def close(self) -> None:
        """End it in good order, or else at once."""
        try:
            self._say({"end": True})
            self.process.wait(20)
        except (OSError, subprocess.TimeoutExpired):
            pass
        finally:
            if self.process.poll() is None:
                self.kill()
            self._wire.close()
            self._log.close()

    def forget(self) -> None:
        """Empty the prefix cache."""
        self._say({"forget": True})

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def bounce(role: str, folder: Path, **settings: Any) -> dict[str, Any]:
    """``kv_transfer_config`` of this project's connector; both sides of a folder share its key."""
    key = folder / "key"
    if not key.exists():
        key.touch(0o600)
        key.write_bytes(secrets.token_bytes(32))
    return {
        "kv_connector": "BounceConnector",
        "kv_connector_module_path": "bounce_connector",
        "kv_role": role,
        "engine_id": f"{role}-{secrets.token_hex(4)}",
        "kv_connector_extra_config": {"key_file": str(key), **settings},
        "kv_load_failure_policy": "recompute",
    }


def transfer_id() -> int:
    """A number for one prompt's way, used once."""
    return secrets.randbits(62)


@dataclass(frozen=True)
class Timed:
    """Seconds until the first and the last token, from the moment that the prompt was sent to the prefilling side."""

    answer: Answer
    first_s: float
    decode_first_s: float


def one_after_the_other(
    prefill: Engine, decode: Engine, name: str, prompt: Sequence[int], answer_tokens: int, mine: bool = True
) -> Timed:
    """As vLLM's own proxies send a prompt: prefill to its end, then decode with what it answered."""
    began_s = time.monotonic()
    asked = {"transfer_id": transfer_id()} if mine else {"do_remote_decode": True, "do_remote_prefill": False}
    prefill.ask(name, prompt, 1, asked)
    prefilled = prefill.wait(name)
    if not prefilled.params:
        raise RuntimeError(f"the prefill of {name} ended with {prefilled.why!r} and named no source")
    between_s = time.monotonic() - began_s
    decode.ask(name, prompt, answer_tokens, prefilled.params)
    answer = decode.wait(name)
    first_s = answer.first_s if answer.first_s is not None else float("nan")
    return Timed(answer, between_s + first_s, first_s)


def both_at_once(
    prefill: Engine, decode: Engine, name: str, prompt: Sequence[int], answer_tokens: int, sources: str
) -> Timed:
    """The decoding side asks before the prefill is over."""
    params = {"transfer_id": transfer_id(), "sources": sources}
    decode.ask(name, prompt, answer_tokens, params)
    prefill.ask(name, prompt, 1, params)
    prefill.wait(name)
    answer = decode.wait(name)
    first_s = answer.first_s if answer.first_s is not None else float("nan")
    return Timed(answer, first_s, first_s)


def settled(engine: Engine, free_blocks: int, within_s: float = 30.0) -> None:
    """Wait until every block is back that was free before."""
    until_s = time.monotonic() + within_s
    while (free := engine.state()["free_blocks"]) != free_blocks:
        if time.monotonic() > until_s:
            raise TimeoutError(f"{free} blocks are free after {within_s} s, {free_blocks} were before")
        time.sleep(0.02)


def prompts(count: int, tokens: int, vocabulary: int, seed: int = 1) -> list[list[int]]:
    """Seeded token ids, away from the special ones."""
    import numpy as np

    random = np.random.default_rng(seed)
    return [random.integers(100, vocabulary - 100, tokens).tolist() for _ in range(count)]


def alone(engine: Engine, asked: Iterable[tuple[str, Sequence[int]]], answer_tokens: int) -> dict[str, Answer]:
    """What one engine answers by itself."""
    names = []
    for name, prompt in asked:
        engine.ask(name, prompt, answer_tokens)
        names.append(name)
    return {name: engine.wait(name) for name in names}
