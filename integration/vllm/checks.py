"""The connector in two vLLM processes: answers, cancellation, deaths. ``nox -s vllm`` runs it in vLLM's own environment.

In order: each test goes on with the engines that the ones before it left. ``VLLM_CHECKS_MODEL`` names the model's folder.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from driver import Answer, Engine, alone, both_at_once, bounce, one_after_the_other, prompts, settled, transfer_id

MODEL = Path(os.environ["VLLM_CHECKS_MODEL"])
VOCABULARY = int(os.environ.get("VLLM_CHECKS_VOCABULARY", "49152"))
COUNT, ANSWER, LONG = 64, 16, 3000
#: Within what a request whose peer died, or whose prefill was given up, has ended (seconds): nothing waits for a time-out.
BOUND_S = 30.0


class World:
    """Engines by name, and what one engine answers by itself."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.engines: dict[str, Engine] = {}
        self.free: dict[str, int] = {}
        self.expected: dict[str, Answer] = {}
        self.sources = ""

    def start(self, **asked: tuple[str, int, str]) -> list[Engine]:
        """Engines beside each other, by name: role, tokens of a block, and what becomes of a request that gets no KV."""
        for name, (role, block_tokens, policy) in asked.items():
            transfer = bounce(role, self.folder, lend_timeout_s=3.0) | {"kv_load_failure_policy": policy}
            self.engines[name] = Engine(
                MODEL,
                self.folder / f"{name}.log",
                block_tokens=block_tokens,
                transfer=transfer,
                enable_prefix_caching=True,
            )
        for name in asked:
            self.free[name] = self.engines[name].ready().state()["free_blocks"]
        return [self.engines[name] for name in asked]

    def settled(self, *names: str) -> None:
        """Every block is back, and none is quarantined."""
        for name in names:
            settled(self.engines[name], self.free[name])
            assert self.engines[name].state()["statistics"]["quarantined_count"] == 0

    def close(self) -> None:
        for engine in self.engines.values():
            engine.close()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    made = World(tmp_path_factory.mktemp("vllm"))
    yield made
    made.close()


def many() -> dict[str, list[int]]:
    """64 prompts of 20 to 335 tokens; every fourth begins as another does."""
    long = prompts(COUNT, 400, VOCABULARY)
    made = {f"m{n}": long[n][: 20 + 5 * n] for n in range(COUNT)}
    for n in range(16, COUNT, 4):
        made[f"m{n}"] = long[0][: 5 * n] + made[f"m{n}"][:20]
    return made


def fresh(seed: int, count: int = 1) -> list[list[int]]:
    """Long prompts that nothing has cached."""
    return prompts(count, LONG, VOCABULARY, seed)


def test_64_prompts_answer_as_one_engine_does(world: World) -> None:
    """Unlike block sizes (128 → 32), shared beginnings that the decoding side has cached, both orders, eight at a time."""
    prefill, decode = world.start(prefill=("kv_producer", 128, "recompute"), decode=("kv_consumer", 32, "recompute"))
    for name, prompt in [*many().items(), *((f"l{seed}", fresh(seed)[0]) for seed in range(100, 106))]:
        world.expected |= alone(decode, [(name, prompt)], ANSWER)  # one process and its own prefill
        decode.forget()
    asked = list(many().items())
    first = one_after_the_other(prefill, decode, "m0", asked[0][1], ANSWER)
    prefill.ask("source", asked[0][1], 1, {"transfer_id": transfer_id()})
    world.sources = prefill.wait("source").params["sources"]
    answers = {"m0": first.answer}
    for begin in range(1, COUNT, 8):
        group = asked[begin : begin + 8]
        for name, prompt in group:
            params = {"transfer_id": transfer_id(), "sources": world.sources}
            decode.ask(name, prompt, ANSWER, params)
            prefill.ask(name, prompt, 1, params)
        for name, _ in group:
            prefill.wait(name)
            answers[name] = decode.wait(name)
    wrong = [name for name in answers if answers[name].tokens != world.expected[name].tokens]
    assert len(answers) == COUNT and not wrong
    counted = decode.state()["statistics"]
    assert counted["succeeded"] == COUNT, "every prompt's KV came over the wire, none was computed again"
    world.settled("prefill", "decode")


def test_a_request_that_is_taken_back_while_it_waits_gives_its_blocks_back(world: World) -> None:
    """Taken back at many moments, before, during and after the write; the next prompts are answered as ever."""
    prefill, decode = world.engines["prefill"], world.engines["decode"]
    for number, prompt in enumerate(fresh(50, 6)):
        params = {"transfer_id": transfer_id(), "sources": world.sources}
        decode.ask(f"c{number}", prompt[:1200], ANSWER, params)
        prefill.ask(f"c{number}", prompt[:1200], 1, params)
        if number % 2:
            prefill.wait(f"c{number}")
            time.sleep(0.004 * number)
        decode.abort(f"c{number}")
    world.settled("prefill", "decode")
    made = both_at_once(prefill, decode, "l100", fresh(100)[0], ANSWER, world.sources)
    assert made.answer.tokens == world.expected["l100"].tokens


def test_a_prefill_that_is_taken_back_is_computed_where_it_is_decoded(world: World) -> None:
    """The prefilling side says so at once: the decoding side waits for no time-out."""
    prefill, decode = world.engines["prefill"], world.engines["decode"]
    params = {"transfer_id": transfer_id(), "sources": world.sources}
    prefill.ask("busy", fresh(60)[0], 1)
    prefill.ask("l101", fresh(101)[0], 1, params)
    decode.ask("l101", fresh(101)[0], ANSWER, params)
    prefill.abort("l101")
    prefill.wait("busy")
    answer = decode.wait("l101", BOUND_S)
    assert answer.why == "length" and answer.tokens == world.expected["l101"].tokens
    world.settled("prefill", "decode")


def test_blocks_stay_owned_while_a_stopped_process_could_still_write(world: World) -> None:
    """Its request is over, its writer stands still: no block comes back before the writer can say that it never wrote."""
    prefill, decode = world.engines["prefill"], world.engines["decode"]
    params = {"transfer_id": transfer_id(), "sources": world.sources}
    sent = decode.state()["statistics"]["frames_sent"]
    decode.ask("stopped", fresh(61)[0], ANSWER, params)
    while decode.state()["statistics"]["frames_sent"] == sent:  # its addresses have left
        time.sleep(0.01)
    os.kill(prefill.process.pid, signal.SIGSTOP)
    try:
        decode.abort("stopped")
        held = LONG // 32
        for _ in range(20):
            assert decode.state()["free_blocks"] <= world.free["decode"] - held
            time.sleep(0.05)
    finally:
        os.kill(prefill.process.pid, signal.SIGCONT)
    world.settled("decode")


def test_the_prefilling_side_dies(world: World) -> None:
    """Waiting requests are computed here, within a bound; every block comes back; a new prefilling side is met."""
    prefill, decode = world.engines["prefill"], world.engines["decode"]
    params = {"transfer_id": transfer_id(), "sources": world.sources}
    decode.ask("l102", fresh(102)[0], ANSWER, params)
    prefill.ask("l102", fresh(102)[0], 1, params)
    while decode.state()["free_blocks"] == world.free["decode"]:
        time.sleep(0.01)
    prefill.kill()
    answer = decode.wait("l102", BOUND_S)
    assert answer.why == "length" and answer.tokens == world.expected["l102"].tokens
    decode.ask("l103", fresh(103)[0], ANSWER, {"transfer_id": transfer_id(), "sources": world.sources})
    answer = decode.wait("l103", BOUND_S)
    assert answer.tokens == world.expected["l103"].tokens, "whoever still names the dead one is answered all the same"
    world.settled("decode")
    again, _ = world.start(prefill2=("kv_producer", 64, "recompute"), decode2=("kv_consumer", 128, "fail"))
    made = one_after_the_other(again, decode, "l104", fresh(104)[0], ANSWER)
    assert made.answer.tokens == world.expected["l104"].tokens
    world.settled("prefill2", "decode")


def test_the_decoding_side_dies(world: World) -> None:
    """What was lent comes back, and a new decoding side is served; one that shall fail, not compute, says so."""
    prefill, decode = world.engines["prefill2"], world.engines.pop("decode")
    prefill.ask("source", fresh(62)[0], 1, {"transfer_id": transfer_id()})
    sources = prefill.wait("source").params["sources"]
    for number, prompt in enumerate(fresh(63, 3)):
        params = {"transfer_id": transfer_id(), "sources": sources}
        decode.ask(f"d{number}", prompt, ANSWER, params)
        prefill.ask(f"d{number}", prompt, 1, params)
    prefill.wait("d0")
    decode.kill()
    for number in (1, 2):
        prefill.wait(f"d{number}")
    world.settled("prefill2")
    decode = world.engines["decode2"]
    made = both_at_once(prefill, decode, "l105", fresh(105)[0], ANSWER, sources)
    assert made.answer.tokens == world.expected["l105"].tokens
    params = {"transfer_id": transfer_id(), "sources": sources}
    decode.ask("failed", fresh(64)[0], ANSWER, params)
    prefill.ask("failed", fresh(64)[0], 1, params)
    while decode.state()["free_blocks"] == world.free["decode2"]:
        time.sleep(0.01)
    prefill.kill()
    assert decode.wait("failed", BOUND_S).why == "error"
    world.settled("decode2")
    decode.ask("m1", many()["m1"], ANSWER)
    assert decode.wait("m1").tokens == world.expected["m1"].tokens
