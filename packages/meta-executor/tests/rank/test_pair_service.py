"""Two real instances (six MPI ranks, NIXL, authenticated sockets) from start to proof, driven over their own HTTP."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from meta_executor import wire
from meta_executor.config import ServiceConfig, service_config
from meta_executor.engine.base import StageSpec
from meta_executor.engine.synthetic import SyntheticEngine
from meta_executor.evidence.records import read_folder
from meta_executor.evidence.verify import VerifyResult, verify_records
from meta_executor.executor.testing import reference_tokens
from meta_executor.rank.free_memory import host_free_bytes
from meta_executor.rank.testing import RunningPair

#: Both names of the share, one for each side.
FRACTIONS = {"context_servers": "free_memory_fraction", "generation_servers": "free_gpu_memory_fraction"}
PROMPTS = [[3 + (13 * i + j * j) % 900 for j in range(n)] for i, n in enumerate((1, 600, 20, 45, 100, 7, 300, 64))]


def config(
    *,
    style: str = "generation_first",
    asynchronous: bool = True,
    bounce: bool = True,
    reuse: bool = True,
    fast_path: bool = True,
    batch: int = 8,
    proxy: str = "thread",
    window: int | None = 64,
    context_batch: int = 8,
    generation_tokens: int = 8192,
) -> ServiceConfig:
    def side(**fields: Any) -> dict[str, Any]:
        return {
            "max_num_tokens": 64,
            "proxy": proxy,
            "rpc": {"local_fastpath": fast_path, "submit_batch_max": batch},
            **fields,
        }

    cache = {"tokens_per_block": 16, "max_tokens": 8192, "enable_block_reuse": reuse}
    agreement = {
        "enable_async_terminal_agreement": asynchronous,
        "enable_async_readiness_agreement": asynchronous,
        "enable_bounce": bounce,
        "max_num_generation_first_pre_active_requests": window,
    }
    return service_config(
        {
            "schedule_style": style,
            "engine": {"kind": "synthetic", "synthetic": {"vocab_size": 997}},
            "context_servers": side(
                pipeline_parallel_size=4,
                max_batch_size=context_batch,
                kv_cache_config=cache,
                cache_transceiver_config=agreement,
            ),
            "generation_servers": side(
                tensor_parallel_size=2,
                enable_attention_dp=True,
                max_batch_size=8,
                kv_cache_config={**cache, "tokens_per_block": 8, "max_tokens": generation_tokens},
                cache_transceiver_config={"enable_bounce": bounce},
            ),
        }
    )


def verified(pair: RunningPair) -> VerifyResult:
    """What the ranks' files say. No launcher started them, so nobody keeps a record of the run."""
    records, broken = read_folder(pair.folder / "evidence")
    assert broken == []
    return verify_records(records)


def reference(pair: RunningPair, prompt: list[int], max_tokens: int) -> list[int]:
    shape = pair.config.engine.synthetic
    engine = SyntheticEngine(shape, StageSpec(0, 1, 0, shape.layer_count))
    try:
        return reference_tokens(engine, prompt, max_tokens, 16)
    finally:
        engine.close()


def check_equality(pair: RunningPair, style: str, max_tokens: int = 10) -> None:
    """Eight prompts at once, one of a single token and two over 256: the reference's tokens."""
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda p: pair.serve(p, max_tokens, style=style), PROMPTS))
    for prompt, tokens in zip(PROMPTS, answers):
        assert tokens == reference(pair, prompt, max_tokens)


def check_refusals(pair: RunningPair) -> None:
    """Every refusal has its status, code and field, and comes before anything is touched."""

    def refused(owner: str, path: str, body: Any, status: int, code: str, field: str | None) -> wire.ErrorBody:
        response = pair.post(owner, path, body)
        error = msgspec.json.decode(response.content, type=wire.ErrorBody)
        assert (response.status_code, error.error, error.field) == (status, code, field), response.text
        return error

    good = msgspec.to_builtins(pair.context_body(pair.request_id(), [5, 6], 4))
    stale = refused(
        "ctx-0", "/internal/context", {**good, "endpoint_generation": "old"}, 409, "STALE_GENERATION",
        "endpoint_generation",
    )  # fmt: skip
    assert stale.endpoint_generation == pair.infos["ctx-0"].generation
    for change, field in (
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [5, 997]}, "token_ids"),
        ({"token_ids": [5, -1]}, "token_ids[1]"),
        ({"request_id": 0}, "request_id"),
        ({"sampling": {"max_tokens": 0}}, "sampling.max_tokens"),
        ({"sampling": {"max_tokens": 8192}}, "sampling.max_tokens"),
        ({"sampling": {"max_tokens": 2, "min_tokens": 3}}, "sampling.min_tokens"),
        ({"sampling": {"max_tokens": 2, "logit_bias": [[997, 1.0]]}}, "sampling.logit_bias"),
        ({"schedule_style": "sideways"}, "schedule_style"),
    ):
        refused("ctx-0", "/internal/context", {**good, **change}, 400, "INVALID_REQUEST", field)
    missing = {k: v for k, v in good.items() if k != "token_ids"}
    refused("ctx-0", "/internal/context", missing, 400, "INVALID_REQUEST", "token_ids")
    generation = msgspec.to_builtins(pair.generation_body(pair.request_id(), [5, 6], 4, None))
    refused("gen-0", "/internal/generation", generation, 400, "INVALID_REQUEST", "first_token")
    old = {**generation, "first_token": 7, "context": {**generation["context"], "endpoint_generation": "old"}}
    refused("gen-0", "/internal/generation", old, 409, "STALE_GENERATION", "context.endpoint_generation")
    unauthorised = httpx.post(f"{pair.urls['ctx-0']}/internal/context", json=good, trust_env=False)
    assert unauthorised.status_code == 401
    # Counters of the other ranks arrive within a second; what was refused holds nothing for good.
    wait_until(lambda: all(r.kv_blocks_used_now == 0 for r in pair.statistics("gen-0").ranks))


def check_leaving_clients(pair: RunningPair) -> None:
    """A reader that goes away mid-stream, and an abort by id: both legs end, every block comes back."""
    prompt = PROMPTS[3]
    for how in ("close", "abort"):
        request_id = pair.request_id()
        first = pair.context_leg(pair.context_body(request_id, prompt, 2000))
        lines = pair.generation_leg(pair.generation_body(request_id, prompt, 2000, first.first_token))
        next(lines)
        if how == "close":
            lines.close()  # type: ignore[attr-defined]
        else:
            pair.post("gen-0", "/internal/abort", wire.AbortRequest(request_id=request_id))
            assert [chunk.finish_reason for chunk in lines][-1] == "cancelled"
        wait_until(lambda: all(r.active_now == 0 for o in pair.urls for r in pair.statistics(o).ranks))
    wait_until(lambda: all(r.kv_blocks_used_now == 0 for o in pair.urls for r in pair.statistics(o).ranks))


def wait_until(condition: Any, limit_s: float = 20.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def counters_have_come(statistics: wire.InstanceStatistics) -> bool:
    """The desk counts at once; each rank's counters travel every tenth of a second."""
    return sum(statistics.routed_per_rank) == sum(r.requests_taken for r in statistics.ranks)


def check_what_is_shown(pair: RunningPair) -> None:
    """Counters, health, metrics, routing."""
    wait_until(lambda: all(r.agreement_opened == r.agreement_decided > 0 for r in pair.statistics("ctx-0").ranks))
    wait_until(lambda: counters_have_come(pair.statistics("gen-0")))
    generation = pair.statistics("gen-0")
    assert all(count > 0 for count in generation.routed_per_rank)
    assert sum(r.transfers_coalesced for r in generation.ranks) > 0
    assert sum(r.transfers_direct for r in generation.ranks) > 0
    assert sum(r.prefix_hit_tokens for r in generation.ranks) > 0
    for owner in pair.urls:
        health = pair.client.get(f"{pair.urls[owner]}/health")
        assert health.status_code == 200 and health.json()["status"] == "ok"
        metrics = pair.client.get(f"{pair.urls[owner]}/metrics").text
        assert 'meta_executor_rank_kv_blocks_total{rank="0"}' in metrics
    check_routing(pair)
    check_strangers(pair)


def check_strangers(pair: RunningPair) -> None:
    """Without the run's key an instance shows no address and no process; its listener refuses as the front's does."""
    for url in pair.urls.values():
        shown, whole = (
            httpx.get(f"{url}/server_info", headers=headers, trust_env=False).json()
            for headers in ({}, pair.client.headers)
        )
        for field in ("control_addresses", "service_address", "processes", "layout"):
            assert whole[field] and not shown[field], field
        assert shown["generation"] == whole["generation"] and shown["vocab_size"] == whole["vocab_size"]
        for path in ("/internal/statistics", "/internal/nothing", "/debug/nothing"):
            refused = httpx.get(url + path, trust_env=False)
            assert (refused.status_code, refused.json()["error"]) == (401, wire.UNAUTHORIZED)
        with socket.create_connection((httpx.URL(url).host, httpx.URL(url).port), 20) as peer:
            peer.sendall(b"POST /internal/abort HTTP/1.1\r\nhost: a\r\ncontent-length: 99999999\r\n\r\n")
            answer = b"".join(iter(lambda: peer.recv(65536), b""))
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 413 ") and msgspec.json.decode(body)["error"] == wire.INVALID_REQUEST


def check_routing(pair: RunningPair) -> None:
    """Every admitted request's last decision is shown by both instances, wherever their API servers live."""
    shown = {}
    for owner, url in pair.urls.items():
        answer = pair.client.get(f"{url}/debug/routing", params={"limit": 256})
        assert answer.status_code == 200, answer.text
        shown[owner] = msgspec.json.decode(answer.content, type=wire.InstanceRouting)
        assert shown[owner].owner_id == owner
        assert len(shown[owner].decisions) == min(shown[owner].decided, 256)
        newest = pair.client.get(f"{url}/debug/routing", params={"limit": 2}).json()
        assert [d["request_id"] for d in newest["decisions"]] == [d.request_id for d in shown[owner].decisions[-2:]]
        for wrong in ("0", "257", "many"):
            refused = pair.client.get(f"{url}/debug/routing", params={"limit": wrong})
            assert (refused.status_code, refused.json()["field"]) == (400, "limit")
        assert httpx.get(f"{url}/debug/routing", trust_env=False).status_code == 401
    context, generation = shown["ctx-0"], shown["gen-0"]
    wait_until(lambda: context.decided == pair.statistics("ctx-0").ranks[0].requests_taken)
    assert {d.rank for d in context.decisions} == {-1}
    routed = pair.statistics("gen-0").routed_per_rank
    assert generation.decided == sum(routed)
    assert [sum(d.rank == rank for d in generation.decisions) for rank in range(2)] == routed
    assert all(d.why and d.tokens > 0 and d.age_s >= 0 for d in [*context.decisions, *generation.decisions])


def check_proof(pair: RunningPair) -> None:
    """Drain: exit 0 everywhere, N of N in the files, a clean log, no socket left."""
    codes = pair.drain()
    assert set(codes.values()) == {0}, pair.logs()
    result = verified(pair)
    assert result.ok, result.text()
    logs = pair.logs()
    assert not any(word in logs for word in ("Traceback", "KeyError", "Exception", "Error:")), logs
    assert list((pair.folder / "ipc").iterdir()) == []


@pytest.mark.service
@pytest.mark.timeout(110)
def test_one_pair_from_start_to_proof() -> None:
    """Both schedules on one pair, all opt-ins on; refusals, leaving clients, counters; then the drain."""
    with RunningPair(config()) as pair:
        check_equality(pair, "generation_first")
        check_equality(pair, "context_first")
        check_refusals(pair)
        check_leaving_clients(pair)
        check_what_is_shown(pair)
        statistics = pair.statistics("gen-0")
        assert statistics.local_submits > 0 and statistics.rpc_submits == 0
        pids = [int(process.split("/")[1]) for info in pair.infos.values() for process in info.processes]
        maps = "".join(Path(f"/proc/{pid}/maps").read_text() for pid in pids)
        names = {line.split()[-1] for line in maps.splitlines() if "mpich_shm" in line and "(deleted)" not in line}
        assert names == set(), f"segments that still have a name: {names}"
        check_proof(pair)


@pytest.mark.service
@pytest.mark.slow
@pytest.mark.timeout(110)
def test_routing_is_shown_by_api_servers_in_processes_of_their_own() -> None:
    """Both proxies spawned: the decisions are made in rank 0's process and shown by another one."""
    with RunningPair(config(proxy="spawn")) as pair:
        for owner in pair.urls:
            shown = pair.client.get(f"{pair.urls[owner]}/debug/routing").json()
            assert (shown["decided"], shown["decisions"]) == (0, [])
        check_equality(pair, "context_first", max_tokens=3)
        check_equality(pair, "generation_first", max_tokens=3)
        assert pair.statistics("gen-0").local_submits == 0
        check_routing(pair)
        routing = pair.client.get(f"{pair.urls['ctx-0']}/debug/routing").json()
        assert routing["policy"] == "pipeline"
        check_proof(pair)


@pytest.mark.service
@pytest.mark.timeout(110)
def test_a_measured_budget_is_one_for_all_ranks_and_serves() -> None:
    """``max_tokens: null`` on both sides: every rank has the same number of blocks, within its share of what is free, the
    record says so, and answers are the reference's."""
    base = config()
    sides = {}
    for name, fraction in FRACTIONS.items():
        side = getattr(base, name)
        cache = msgspec.structs.replace(side.kv_cache_config, max_tokens=None, **{fraction: 0.01})
        sides[name] = msgspec.structs.replace(side, kv_cache_config=cache)
    sides["context_servers"] = msgspec.structs.replace(sides["context_servers"], pipeline_parallel_size=3)
    made = msgspec.structs.replace(base, **sides)
    free = host_free_bytes()
    with RunningPair(made) as pair:
        assert pair.spec.measuring_ranks == 5
        for owner, layers, tokens in (("ctx-0", 3, 16), ("gen-0", 8, 8)):
            info = pair.infos[owner]
            assert info.limits is not None
            blocks = info.limits.kv_tokens // tokens
            assert {r.kv_blocks_total for r in pair.statistics(owner).ranks} == {blocks}
            # The stage with most layers has the largest blocks, so it decides; other processes take and give meanwhile.
            block_bytes = 2 * layers * tokens * 2 * 8 * 4
            assert 0.5 * free < blocks * block_bytes * 5 / 0.01 < 1.5 * free, pair.logs()
        assert "KV: " in pair.logs() and "as many as rank" in pair.logs()
        check_equality(pair, "generation_first", max_tokens=3)
        check_proof(pair)


@pytest.mark.service
@pytest.mark.timeout(110)
@pytest.mark.parametrize("asynchronous", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_leases_that_expire_are_told_and_the_drain_proves_the_rest(asynchronous: bool) -> None:
    """Three slow stages (a step takes 0.3 s, one request each), leases of half a second, sixteen requests at once: those that
    the pipeline does not reach in time get 503 LEASE_EXPIRED on their context leg and an error on the other; what was
    scheduled is the reference's; every rank admitted and decided all of them, and every block comes back."""
    base = config(asynchronous=asynchronous, context_batch=1, reuse=False)
    context = base.context_servers
    made = msgspec.structs.replace(
        base,
        engine=msgspec.structs.replace(
            base.engine, synthetic=msgspec.structs.replace(base.engine.synthetic, step_ms=300.0)
        ),
        context_servers=msgspec.structs.replace(
            context,
            pipeline_parallel_size=3,
            cache_transceiver_config=msgspec.structs.replace(context.cache_transceiver_config, lease_timeout_s=0.5),
        ),
    )
    prompt, count = PROMPTS[2], 16
    with RunningPair(made) as pair:
        want = reference(pair, prompt, 2)
        ids = [pair.request_id() for _ in range(count)]

        def context_leg(request_id: int) -> httpx.Response:
            return pair.post(
                "ctx-0",
                "/internal/context",
                pair.context_body(request_id, prompt, 2, style="generation_first"),
            )

        def generation_leg(request_id: int) -> list[wire.GenerationChunk]:
            return list(
                pair.generation_leg(pair.generation_body(request_id, prompt, 2, None, style="generation_first"))
            )

        with ThreadPoolExecutor(2 * count) as pool:
            generations = [pool.submit(generation_leg, r) for r in ids]
            contexts = [pool.submit(context_leg, r) for r in ids]
            answers = [c.result() for c in contexts]
            chunks = [g.result() for g in generations]
        expired = 0
        for answer, lines in zip(answers, chunks, strict=True):
            if answer.status_code == 200:
                assert [t for line in lines for t in line.tokens] == want
                continue
            expired += 1
            error = msgspec.json.decode(answer.content, type=wire.ErrorBody)
            assert (answer.status_code, error.error) == (503, "LEASE_EXPIRED"), answer.text
            assert "not scheduled within 0.5 s" in error.message
            assert lines[-1].finish_reason == "error" and lines[-1].error is not None
            assert "not scheduled within 0.5 s" in lines[-1].error.message
        assert 0 < expired < count
        wait_until(lambda: {r.leases_expired for r in pair.statistics("ctx-0").ranks} == {expired})
        wait_until(lambda: all(r.kv_blocks_used_now == 0 for o in pair.urls for r in pair.statistics(o).ranks))
        check_proof(pair)
        for record in pair.evidence():
            if record["role"] == "context":
                agreement = record["agreement"]
                assert (agreement["admitted"], agreement["committed"], agreement["closed"]) == (
                    count,
                    count - expired,
                    expired,
                )


@pytest.mark.service
@pytest.mark.slow
@pytest.mark.timeout(110)
@pytest.mark.parametrize(
    "change",
    [
        {"asynchronous": False},
        {"bounce": False},
        {"reuse": False},
        {"fast_path": False},
        {"batch": 1},
        {"proxy": "spawn"},
        {"asynchronous": False, "bounce": False, "reuse": False, "fast_path": False, "batch": 1},
        {"style": "context_first"},
    ],
    ids=lambda change: ",".join(f"{k}={v}" for k, v in change.items()),
)
def test_each_opt_in_off_gives_the_same_tokens(change: dict[str, Any]) -> None:
    """Fast path, batching, asynchronous agreement, bounce, prefix cache, topology: results do not depend on them."""
    made = config(**change)
    with RunningPair(made) as pair:
        check_equality(pair, made.schedule_style)
        check_equality(pair, "context_first")
        if change.get("proxy") == "spawn":
            assert pair.statistics("gen-0").local_submits == 0 and pair.statistics("gen-0").rpc_submits > 0
        check_proof(pair)


@pytest.mark.service
@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("count", "window", "generation_tokens", "order"),
    [(256, 256, 65536, "same"), (256, 256, 65536, "opposite"), (64, 4, 192, "opposite")],
)
def test_generation_first_at_compute_cap_one(count: int, window: int, generation_tokens: int, order: str) -> None:
    """All answered; READY, PREPARE, ACTIVATE, COMPLETE and terminal commits N of N on every rank before teardown."""
    prompt, max_tokens = PROMPTS[2], 6
    made = config(window=window, context_batch=1, reuse=False, generation_tokens=generation_tokens)
    with RunningPair(made) as pair:
        want = reference(pair, prompt, max_tokens)
        ids = [pair.request_id() for _ in range(count)]
        client = httpx.Client(
            headers=dict(pair.client.headers), timeout=150, limits=httpx.Limits(max_connections=None), trust_env=False
        )

        def leg(owner: str, path: str, body: Any) -> httpx.Response:
            return client.post(f"{pair.urls[owner]}{path}", content=wire.encode_json(body))

        def generation(request_id: int) -> list[int]:
            body = pair.generation_body(request_id, prompt, max_tokens, None, style="generation_first")
            response = leg("gen-0", "/internal/generation", body)
            assert response.status_code == 200
            return [t for line in response.content.splitlines() for t in wire.decode_chunk(line).tokens]

        def context(request_id: int) -> int:
            body = pair.context_body(request_id, prompt, max_tokens, style="generation_first")
            return leg("ctx-0", "/internal/context", body).status_code

        with client, ThreadPoolExecutor(2 * count) as pool:
            tokens = [pool.submit(generation, r) for r in ids]
            statuses = [pool.submit(context, r) for r in (ids if order == "same" else reversed(ids))]
            assert all(t.result() == want for t in tokens)
            assert {s.result() for s in statuses} == {200}
        check_proof(pair)
        for record in pair.evidence():
            if record["role"] == "context":
                assert set(record["ready"].values()) == {count}
                assert record["agreement"]["committed"] == count


@pytest.mark.service
@pytest.mark.slow
@pytest.mark.timeout(110)
def test_a_kill_is_not_taken_for_a_drain() -> None:
    """SIGKILL of one rank: whatever files there are, they are not verified, and the lost rank is named."""
    import os
    import signal

    with RunningPair(config()) as pair:
        pair.serve(PROMPTS[2], 4, style="generation_first")
        pid = int(pair.infos["ctx-0"].processes[2].split("/")[1])
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: pair._worlds["ctx-0"].poll() is not None)
        result = verified(pair)
        assert not result.ok
