"""One vLLM engine in a process of its own, driven by lines of JSON over a socket: ``engine_process.py FD CONFIGURATION``.

Lines in: a request (``id``, ``prompt``, ``answer_tokens``, ``params``), ``{"abort": id}``, ``{"ask": true}``,
``{"forget": true}`` (the prefix cache), ``{"end": true}``. Lines out: ``{"ready": true}``; per request its tokens and why it
ended, what the connector answered and the seconds until its first token and its end; to ``ask`` free blocks and counters.
"""

from __future__ import annotations

import json
import os
import select
import socket
import sys
import time
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

from vllm import EngineArgs, LLMEngine, SamplingParams
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.sampling_params import RequestOutputKind


class Served:
    """The engine and who waits for what."""

    def __init__(self, wire: socket.socket, configuration: dict[str, Any]) -> None:
        self._wire, self._rest = wire, b""
        wire.setblocking(False)
        self.engine = LLMEngine.from_engine_args(EngineArgs(**configuration))
        self._began_s: dict[str, float] = {}
        self._first_s: dict[str, float] = {}
        self._ended = False

    def say(self, line: dict[str, Any]) -> None:
        """One line out."""
        self._wire.setblocking(True)
        self._wire.sendall(json.dumps(line).encode() + b"\n")
        self._wire.setblocking(False)

    def hear(self, wait_s: float) -> None:
        """Every line that is there; waits so long for a first one."""
        if not select.select([self._wire], [], [], wait_s)[0]:
            return
        part = self._wire.recv(1 << 20)
        if not part:
            self._ended = True
        *lines, self._rest = (self._rest + part).split(b"\n")
        for line in lines:
            self._take(json.loads(line))

    def _take(self, asked: dict[str, Any]) -> None:
        if "abort" in asked:
            self.engine.abort_request([asked["abort"]])
        elif "forget" in asked:
            self.engine.reset_prefix_cache()
        elif "ask" in asked:
            self.say({"state": self._state()})
        elif "end" in asked:
            self._ended = True
        else:
            sampling = SamplingParams(
                temperature=0.0,
                max_tokens=asked["answer_tokens"],
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.CUMULATIVE,
                extra_args={"kv_transfer_params": asked["params"]} if asked.get("params") else None,
            )
            self._began_s[asked["id"]] = time.monotonic()
            self.engine.add_request(asked["id"], {"prompt_token_ids": asked["prompt"]}, sampling)

    def _state(self) -> dict[str, Any]:
        core = self.engine.engine_core.engine_core
        pool = core.scheduler.kv_cache_manager.block_pool
        worker = getattr(get_kv_transfer_group(), "worker", None) if has_kv_transfer_group() else None
        return {
            "free_blocks": pool.get_num_free_blocks(),
            "blocks": pool.num_gpu_blocks,
            "timings": list(getattr(worker, "timings", ())),
            "statistics": worker.session.statistics() if worker is not None else {},
        }

    def run(self) -> None:
        """Until the other side says that it is over, or is gone."""
        self.say({"ready": True})
        scheduler, busy = self.engine.engine_core.engine_core.scheduler, False
        while not self._ended:
            self.hear(0.0 if busy else 0.001 if scheduler.has_requests() else 0.1)
            outputs = self.engine.step()
            busy = bool(outputs)
            now_s = time.monotonic()
            for each in outputs:
                began_s = self._began_s[each.request_id]
                made = each.outputs[0]
                if made.token_ids and each.request_id not in self._first_s:
                    self._first_s[each.request_id] = now_s - began_s
                if each.finished:
                    del self._began_s[each.request_id]
                    self.say(
                        {
                            "id": each.request_id,
                            "tokens": list(made.token_ids),
                            "why": str(made.finish_reason),
                            "params": each.kv_transfer_params,
                            "first_s": self._first_s.pop(each.request_id, None),
                            "end_s": now_s - began_s,
                        }
                    )
        self.engine.engine_core.shutdown()


if __name__ == "__main__":
    Served(socket.socket(fileno=int(sys.argv[1])), json.loads(sys.argv[2])).run()
