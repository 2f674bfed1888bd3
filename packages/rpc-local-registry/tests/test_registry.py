"""The registry and the choice of path: weak, per process, identity-checked; counted fallbacks; order across a switch."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rpc_local_registry import (
    RpcAddressInUse,
    RpcClient,
    RpcConfig,
    RpcConfigError,
    RpcRemoteError,
    RpcServer,
    _registry,
    get_local_worker,
    register_local_worker,
    rpc_method,
    unregister_local_worker,
)
from rpc_local_registry.testing import ConformanceWorker, eventually, open_pair


class Plain:
    """A worker."""

    def __init__(self) -> None:
        self.log: list[int] = []

    @rpc_method(non_blocking=True)
    def note(self, value: int) -> None:
        """Log."""
        self.log.append(value)


class TestRegistry:
    """Functions of the registry."""

    def test_register_get_unregister(self) -> None:
        """The same object comes back; unregistering twice is False."""
        worker = Plain()
        register_local_worker("inproc://r1", worker)
        register_local_worker("inproc://r1", worker)
        assert get_local_worker("inproc://r1") is worker
        assert unregister_local_worker("inproc://r1", worker)
        assert not unregister_local_worker("inproc://r1", worker)
        assert get_local_worker("inproc://r1") is None

    def test_identity_is_checked(self) -> None:
        """Another worker neither replaces nor removes the one that is there."""
        first, second = Plain(), Plain()
        register_local_worker("inproc://r2", first)
        with pytest.raises(RpcAddressInUse):
            register_local_worker("inproc://r2", second)
        assert not unregister_local_worker("inproc://r2", second)
        assert get_local_worker("inproc://r2") is first
        unregister_local_worker("inproc://r2", first)
        register_local_worker("inproc://r2", second)
        assert get_local_worker("inproc://r2") is second
        unregister_local_worker("inproc://r2", second)

    def test_ownership_is_weak(self) -> None:
        """A forgotten worker leaves by itself, and its address is free."""
        worker = Plain()
        register_local_worker("inproc://r3", worker)
        del worker
        gc.collect()
        assert get_local_worker("inproc://r3") is None
        assert "inproc://r3" not in _registry.entries

    def test_slots_need_a_weak_reference(self) -> None:
        """A worker that cannot be referenced weakly is told how to become so."""

        class Slotted:
            __slots__ = ("x",)

        with pytest.raises(RpcConfigError, match="__weakref__"):
            register_local_worker("inproc://r4", Slotted())

    def test_concurrent_changes(self) -> None:
        """Lookups beside registrations from many threads see a worker or nothing, and the end is clean."""
        workers = [Plain() for _ in range(8)]
        wrong: list[object] = []

        def churn(worker: Plain) -> None:
            for _ in range(300):
                try:
                    register_local_worker("inproc://r5", worker)
                except RpcAddressInUse:
                    continue
                seen = get_local_worker("inproc://r5")
                if seen is not None and not isinstance(seen, Plain):
                    wrong.append(seen)
                unregister_local_worker("inproc://r5", worker)

        threads = [threading.Thread(target=churn, args=(worker,)) for worker in workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        assert get_local_worker("inproc://r5") is None

    @pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
    def test_a_forked_child_misses(self) -> None:
        """The child's registry is empty; the parent's is not touched."""
        worker = Plain()
        register_local_worker("inproc://r6", worker)
        child = os.fork()
        if child == 0:
            os._exit(3 if get_local_worker("inproc://r6") is None and not _registry.entries else 4)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 3
        assert get_local_worker("inproc://r6") is worker
        unregister_local_worker("inproc://r6", worker)

    def test_a_server_registers_and_unregisters(self, key: bytes) -> None:
        """Under its resolved address, from start to shutdown."""
        worker = Plain()
        with RpcServer(worker, "tcp://127.0.0.1:0", key) as server:
            assert get_local_worker(server.address) is worker
            address = server.address
        assert get_local_worker(address) is None


class TestPaths:
    """Where a call goes, and why."""

    def test_off_by_default(
        self, server: RpcServer, connect: Callable[..., RpcClient], service: Any, request_type: Any
    ) -> None:
        """Without the opt-in nothing is looked up; with it the very object arrives."""
        request = request_type(1, np.arange(3, dtype=np.int32))
        off, on = connect(), connect(RpcConfig(local_fast_path=True))
        off.submit(request).remote()
        assert service.submitted[-1] is not request
        on.submit(request).remote()
        assert service.submitted[-1] is request
        assert (off.path_of("submit"), on.path_of("submit"), on.path_of("hold")) == ("remote", "local", "remote")
        assert off.statistics().fallbacks == dict.fromkeys(off.statistics().fallbacks, 0)

    def test_a_local_client_opens_nothing(self, server: RpcServer, connect: Callable[..., RpcClient]) -> None:
        """No socket and no thread while every call is local."""
        before = threading.active_count()
        client = connect(fast_path=True)
        for value in range(100):
            client.echo(value).remote()
        assert threading.active_count() == before
        assert client.statistics().sessions == 0
        assert client.statistics().local_calls == 100
        assert server.statistics().sessions_total == 0

    def test_fallbacks_are_counted_by_reason(self, connect: Callable[..., RpcClient], service: Any, key: bytes) -> None:
        """Each reason has its own counter, and the call still succeeds."""
        client = connect(fast_path=True, interface=None)
        assert client.fast().remote() == "fast"
        future = client.hold().remote_future()
        assert service.inside.acquire(timeout=10)
        assert client.echo(1).remote() == 1
        service.gate.set()
        future.result(10)
        with pytest.raises(Exception, match="not found"):
            client.nothing().remote()
        with pytest.raises(Exception, match="remote_streaming"):
            client.responses().remote()
        statistics = client.statistics()
        assert statistics.fallbacks == {
            "no_local_worker": 0, "blocking_method": 2, "remote_in_flight": 1, "unknown_method": 1, "call_mode": 1,
        }  # fmt: skip
        assert statistics.local_calls == 0
        assert client.echo(2).remote() == 2
        assert client.statistics().local_calls == 1

    def test_order_holds_across_a_switch(self, connect: Callable[..., RpcClient], service: Any) -> None:
        """One-way calls that went remote are executed before a later call may go local."""
        client = connect(fast_path=True)
        blocker = client.hold().remote_future()
        assert service.inside.acquire(timeout=10)
        for value in range(100):
            client.note(value).remote_oneway()
        service.gate.set()
        blocker.result(10)
        for value in range(100, 200):
            client.note(value).remote_oneway()
        eventually(lambda: client.path_of("note") == "local" and len(service.log) == 200)
        client.note(200).remote_oneway()
        assert service.log == list(range(201))
        assert client.statistics().local_calls >= 1

    def test_never_a_second_execution(self) -> None:
        """A local call that raises, even a connection error, is not tried over the socket."""

        class Worker(ConformanceWorker):
            @rpc_method(non_blocking=True)
            def fail(self, message: str) -> None:
                """Raise what a lost connection raises."""
                self.runs += 1
                raise ConnectionResetError(message)

        worker = Worker()
        key = b"k" * 32
        with RpcServer(worker, "ipc://", key) as server, RpcClient(server.address, key, fast_path=True) as client:
            with pytest.raises(RpcRemoteError, match="ConnectionResetError"):
                client.fail("x").remote()
            assert worker.runs == 1
            assert client.statistics().remote_calls == 0

    def test_a_spawned_client_falls_back(self, server: RpcServer, key: bytes, service: Any) -> None:
        """The same client code in another process goes remote, with nobody told."""
        script = (
            "import sys\nfrom rpc_local_registry import RpcClient, RpcConfig\n"
            "with RpcClient(sys.argv[1], bytes.fromhex(sys.argv[2]), config=RpcConfig.from_env()) as c:\n"
            " c.note(7).remote()\n s = c.statistics()\n"
            " print(s.local_calls, s.remote_calls, s.fallbacks['no_local_worker'])"
        )
        done = subprocess.run(
            [sys.executable, "-c", script, server.address, key.hex()],
            capture_output=True, text=True, timeout=60, env={**os.environ, "TLLM_RPC_LOCAL_FASTPATH": "1"},
        )  # fmt: skip
        assert done.stdout.split() == ["0", "1", "1"], done.stderr
        assert service.log == [7]

    @pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
    def test_a_forked_child_goes_remote(self, connect: Callable[..., RpcClient], service: Any) -> None:
        """A client that is used on both sides of a fork works on both: local in the parent, its own session in the child."""
        client = connect(fast_path=True)
        client.note(1).remote()
        client.fast().remote()
        child = os.fork()
        if child == 0:
            try:
                client.note(2).remote(timeout_s=20)
                os._exit(3 if client.statistics().fallbacks["no_local_worker"] == 1 else 4)
            finally:
                os._exit(5)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 3
        client.note(3).remote()
        assert service.log == [1, 2, 3]

    def test_fast_path_from_many_threads(self) -> None:
        """Counters are exact and every call runs once."""
        with open_pair(local=True) as pair:

            def run() -> None:
                for value in range(1000):
                    pair.client.note(value).remote()

            threads = [threading.Thread(target=run) for _ in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert len(pair.worker.log) == 8000
            assert pair.client.statistics().local_calls == 8000

    @pytest.mark.parametrize(("local", "path"), [(True, "local"), (False, "remote")])
    def test_ranges_show_the_path(self, monkeypatch: pytest.MonkeyPatch, local: bool, path: str) -> None:
        """With nvtx installed each call is a range ``RPCExecutor.<method>.<path>``, closed on errors too."""
        from rpc_local_registry import _nvtx

        opened: list[str] = []
        closed: list[str] = []

        class FakeNvtx:
            @staticmethod
            def start_range(name: str) -> str:
                opened.append(name)
                return name

            @staticmethod
            def end_range(name: str) -> None:
                closed.append(name)

        monkeypatch.setattr(_nvtx, "nvtx", FakeNvtx)
        monkeypatch.setattr(_nvtx, "enabled", True)
        with open_pair(local=local) as pair:
            pair.client.add(1, 2).remote()
            with pytest.raises(RpcRemoteError):
                pair.client.fail("x").remote()
        assert opened == closed == [f"RPCExecutor.add.{path}", f"RPCExecutor.fail.{path}"]


class TestConfig:
    """Strict settings."""

    @pytest.mark.parametrize(("text", "wanted"), [(None, False), ("0", False), ("1", True)])
    def test_the_variable(self, text: str | None, wanted: bool) -> None:
        """Exactly 0 or 1; unset is off."""
        environment = {} if text is None else {"TLLM_RPC_LOCAL_FASTPATH": text}
        assert RpcConfig.from_env(environment).local_fast_path is wanted

    @pytest.mark.parametrize("text", ["", " 1", "1 ", "true", "yes", "2", "-1", "on", "٠"])
    def test_bad_values_name_the_variable(self, text: str) -> None:
        """No guessing."""
        with pytest.raises(RpcConfigError, match="TLLM_RPC_LOCAL_FASTPATH"):
            RpcConfig.from_env({"TLLM_RPC_LOCAL_FASTPATH": text})

    @pytest.mark.parametrize(
        "bad",
        [
            {"call_timeout_s": 0}, {"handshake_timeout_s": float("inf")}, {"peer_timeout_s": float("nan")}, {"drain_s": -1},
            {"pending_calls_max": 0}, {"message_bytes_max": 10}, {"stream_credit": True}, {"buffers_max": 70000},
            {"heartbeat_s": 9.0}, {"exceptions": (int,)}, {"lane_threads": 1.5},
        ],
        ids=lambda bad: next(iter(bad)),
    )  # fmt: skip
    def test_bad_fields_are_named(self, bad: dict[str, Any]) -> None:
        """Validated once, at construction."""
        with pytest.raises(RpcConfigError, match=next(iter(bad))):
            RpcConfig(**bad)
