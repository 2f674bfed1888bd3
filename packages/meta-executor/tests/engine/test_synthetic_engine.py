"""The engine without a model: deterministic, split-invariant, and honest about its KV bytes."""

from __future__ import annotations

import subprocess
import sys
import threading

import msgspec
import numpy as np
import pytest

from meta_executor.config import EngineConfig, SyntheticConfig
from meta_executor.engine import (
    SamplingParams,
    SequenceStep,
    StageSpec,
    StepError,
    StepInput,
    create_engine,
    finish_reason,
    model_info,
    synthetic,
)
from meta_executor.engine.generate import SequenceRunner, generate
from meta_executor.engine.synthetic import SyntheticEngine
from meta_executor.engine.tokenizer import Tokenizer

CONFIG = SyntheticConfig(layer_count=6, kv_head_count=2, head_dim=4, vocab_size=1000, context_tokens_max=512)
WHOLE = StageSpec(0, 1, 0, 6)


def runner_of(stages: tuple[StageSpec, ...] = (WHOLE,), **options: int) -> SequenceRunner:
    return SequenceRunner(
        [SyntheticEngine(CONFIG, stage) for stage in stages], block_count=32, block_tokens=4, **options
    )


def tokens_of(runner: SequenceRunner, prompt: list[int], count: int = 10, **options: object) -> list[int]:
    result = generate(runner, Tokenizer.synthetic(1000), prompt, SamplingParams(count, **options))  # type: ignore[arg-type]
    runner.pool.validate()
    return list(result.token_ids)


def test_the_same_prompt_gives_the_same_tokens_everywhere() -> None:
    """Known values: they must not depend on the process, the machine or the version."""
    runner = runner_of()
    assert tokens_of(runner, [5, 6, 7], 4) == tokens_of(runner, [5, 6, 7], 4)
    assert tokens_of(runner, [5, 6, 7], 4) != tokens_of(runner, [5, 6, 8], 4)
    assert tokens_of(runner, [5, 6, 7], 4) != tokens_of(runner, [6, 5, 7], 4)
    assert all(3 <= token < 1000 for token in tokens_of(runner, [5], 60))
    assert tokens_of(runner, [5, 6, 7], 4) == KNOWN
    runner.close()


KNOWN = [810, 511, 773, 768]


@pytest.mark.parametrize("stage_count", [2, 3, 4, 6])
def test_any_split_gives_the_same_tokens(stage_count: int) -> None:
    """2 to 6 stages, prompt in chunks of 1 to 64, equal the whole model."""
    whole = runner_of()
    prompt = [int(token) for token in np.random.default_rng(1).integers(3, 1000, 50)]
    want = tokens_of(whole, prompt)
    for chunk_tokens in (1, 7, 64):
        split = runner_of(StageSpec.split(6, stage_count), chunk_tokens=chunk_tokens)
        assert tokens_of(split, prompt) == want
        split.close()
    whole.close()


@pytest.mark.parametrize("stage_count", [1, 3])
def test_what_is_told_of_a_prompt_is_the_same_for_any_split_and_chunk(stage_count: int) -> None:
    """Of each token behind the first, once, in order; in chunks of any size."""
    prompt = [int(token) for token in np.random.default_rng(2).integers(3, 1000, 30)]
    told = set()
    for chunk_tokens in (1, 2, 7, 29, 30, 64):
        split = runner_of(StageSpec.split(6, stage_count), chunk_tokens=chunk_tokens)
        sampling = SamplingParams(2, prompt_logprobs=1)
        result = generate(split, Tokenizer.synthetic(1000), prompt, sampling)
        assert [one.top[0][0] for one in result.prompt_logprobs] == prompt[1:]
        told.add(result.prompt_logprobs)
        assert not generate(split, Tokenizer.synthetic(1000), prompt, SamplingParams(2)).prompt_logprobs
        split.close()
    assert len(told) == 1
    ((_, *values),) = told
    assert len({one.logprob for one in values}) == len(values) and all(-1 < one.logprob <= 0 for one in values)


def test_batch_equals_single() -> None:
    """Sequences of one step do not see each other."""
    prompts = [[7] * 3, [8, 9], [10] * 9]
    sampling = SamplingParams(1)
    runner = runner_of()
    steps = []
    for index, prompt in enumerate(prompts):
        blocks = np.asarray(runner.pool.allocate(index, 3))
        steps.append(SequenceStep(index, np.asarray(prompt, np.int32), 0, blocks, sampling))
    together = runner.step(steps).token_ids.tolist()
    unwanted = runner.step([SequenceStep(0, np.asarray([4], np.int32), 3, np.asarray(runner.pool.table(0)), None)])
    assert unwanted.token_ids.tolist() == [-1]
    single = runner_of()
    assert together == [tokens_of(single, prompt, 1)[0] for prompt in prompts]
    runner.close()
    single.close()


@pytest.mark.parametrize(("heads", "dim"), [(1, 1), (1, 3), (3, 2)])
def test_how_kv_is_read_does_not_matter(monkeypatch: pytest.MonkeyPatch, heads: int, dim: int) -> None:
    """Reading all sequences at once or each alone gives the same tokens, for odd element counts too; splits as well."""
    config = SyntheticConfig(layer_count=3, kv_head_count=heads, head_dim=dim, vocab_size=5000)

    def batch(stages: int) -> list[list[int]]:
        engines = [SyntheticEngine(config, stage) for stage in StageSpec.split(3, stages)]
        runner = SequenceRunner(engines, block_count=40, block_tokens=4)
        steps = []
        for index, length in enumerate((1, 9, 30, 4)):
            blocks = np.asarray(runner.pool.allocate(index, 8))
            steps.append(SequenceStep(index, np.arange(3, 3 + length, dtype=np.int32), 0, blocks, SamplingParams(1)))
        first = runner.step(steps).token_ids
        again = [
            SequenceStep(s.request_id, first[place : place + 1], s.end_position, s.block_ids, s.sampling)
            for place, s in enumerate(steps)
        ]
        second = runner.step(again).token_ids
        runner.close()
        return [first.tolist(), second.tolist()]

    want = batch(1)
    assert batch(3) == want
    monkeypatch.setattr(synthetic, "_READ_BYTES", 1)
    assert batch(1) == batch(2) == want
    assert len(set(want[0] + want[1])) == 8


def test_one_wrong_byte_of_kv_changes_the_next_token() -> None:
    """Every byte of every layer, key and value, of every position counts; bytes beyond the sequence do not."""
    engine = SyntheticEngine(CONFIG, WHOLE)
    memory = engine.allocate_kv(4, 4)
    kv = memory.owner
    blocks = np.asarray([2, 0, 3])
    prompt = SequenceStep(0, np.arange(10, 19, dtype=np.int32), 0, blocks, None)
    engine.launch(StepInput.of(0, (prompt,))).result()
    decode = SequenceStep(0, np.asarray([50], np.int32), 9, blocks, SamplingParams(1))

    def next_token() -> int:
        return int(engine.launch(StepInput.of(1, (decode,))).result().token_ids[0])

    want = next_token()
    raw = kv.view(np.uint8)
    rng = np.random.default_rng(2)
    changed = 0
    for _ in range(200):
        position = int(rng.integers(0, 9))
        index = (
            rng.integers(6),
            blocks[position // 4],
            rng.integers(2),
            position % 4,
            rng.integers(2),
            rng.integers(16),
        )
        raw[index] ^= 1 << int(rng.integers(8))
        changed += next_token() != want
        engine.launch(StepInput.of(2, (prompt,))).result()  # writes the right bytes again
        assert next_token() == want
    # A token is one of 997: about one corruption in a thousand gives the same one by chance.
    assert changed >= 197
    raw[:, 1] = 255  # a block of nobody
    raw[:, 3, :, 2:] = 255  # behind the sequence's end
    assert next_token() == want
    kv[:, [2, 0]] = kv[:, [0, 2]]  # two blocks in the wrong order
    assert next_token() != want
    engine.close()


def test_moved_kv_goes_on_as_if_nothing_had_happened() -> None:
    """KV copied block by block into another engine's memory, at other blocks, gives the tokens of staying."""
    prompt = list(range(20, 31))
    stay = runner_of()
    want = tokens_of(stay, prompt, 6)
    first = runner_of(StageSpec.split(6, 3))
    second = runner_of()
    second.pool.allocate("someone", 5)
    sampling = SamplingParams(6)
    token, *_ = first.prefill(0, prompt, sampling)
    target = second.pool.acquire(0, prompt, 20).block_ids
    for stage, memory in zip(StageSpec.split(6, 3), first.memories):
        for source_block, target_block in zip(first.pool.table(0)[:3], target):
            second.memories[0].owner[stage.first_layer : stage.first_layer + 2, target_block] = memory.owner[
                :, source_block
            ]
    answer = [token]
    while len(answer) < 6:
        token, *_ = second.decode(0, answer[-1], len(prompt) + len(answer) - 1, sampling)
        answer.append(token)
    assert answer == want
    for runner in (stay, first, second):
        runner.close()


def test_seed_matters_only_with_temperature() -> None:
    """Greedy ignores the seed; sampling does not."""
    runner = runner_of()
    assert tokens_of(runner, [5], 5, seed=1) == tokens_of(runner, [5], 5, seed=2)
    assert tokens_of(runner, [5], 5, seed=1, temperature=1.0) != tokens_of(runner, [5], 5, seed=2, temperature=1.0)
    runner.close()


def test_step_time_is_waited_for_in_the_engines_thread() -> None:
    """Configured time plus time per token, through the given clock and sleep; the caller's thread is not held."""
    slept: list[tuple[float, str]] = []
    now_s = [0.0]

    def sleep(duration_s: float) -> None:
        slept.append((duration_s, threading.current_thread().name))
        now_s[0] += duration_s

    config = SyntheticConfig(layer_count=6, step_ms=10.0, step_ms_per_token=0.5, vocab_size=1000)
    engine = SyntheticEngine(config, WHOLE, clock=lambda: now_s[0], sleep=sleep)
    engine.allocate_kv(4, 16)
    step = SequenceStep(0, np.arange(3, 11, dtype=np.int32), 0, np.asarray([0]), SamplingParams(1))
    engine.launch(StepInput.of(0, (step,))).result()
    assert slept == [(pytest.approx(0.014), "synthetic-0")]
    engine.close()


def test_later_stages_take_longer_by_the_stagger() -> None:
    """So that a pipeline's ranks are not level; the first stage is as it was."""
    slept: list[float] = []
    config = SyntheticConfig(layer_count=6, step_ms=10.0, stagger_ms=4.0, vocab_size=1000)
    for stage in StageSpec.split(6, 3):
        engine = SyntheticEngine(config, stage, clock=lambda: 0.0, sleep=slept.append)
        engine.allocate_kv(4, 16)
        step = SequenceStep(0, np.arange(3, 11, dtype=np.int32), 0, np.asarray([0]), SamplingParams(1))
        hidden = None if stage.is_first else np.zeros((8, 8), np.float32)
        engine.launch(StepInput.of(0, (step,), hidden)).result()
        engine.close()
    assert slept == pytest.approx([0.010, 0.014, 0.018])


def test_waiting_does_not_hold_the_gil() -> None:
    """While a long step waits, this thread computes; done() turns true by itself."""
    config = SyntheticConfig(layer_count=1, step_ms=150.0, vocab_size=1000)
    engine = SyntheticEngine(config, StageSpec(0, 1, 0, 1))
    engine.allocate_kv(1, 16)
    handle = engine.launch(
        StepInput.of(0, (SequenceStep(0, np.asarray([5], np.int32), 0, np.asarray([0]), SamplingParams(1)),))
    )
    count = 0
    while not handle.done():
        count += 1
    assert count > 1000
    engine.close()


def test_contract_breaks_are_refused() -> None:
    """As with the real engine: named, and the engine goes on."""
    engine = create_engine(EngineConfig(kind="synthetic", synthetic=CONFIG), WHOLE)
    assert engine.model == model_info(EngineConfig(kind="synthetic", synthetic=CONFIG))
    step = SequenceStep(0, np.asarray([5], np.int32), 0, np.asarray([0]), SamplingParams(1))
    with pytest.raises(StepError, match="before allocate_kv"):
        engine.launch(StepInput.of(0, (step,))).result()
    engine.allocate_kv(2, 4)
    with pytest.raises(StepError, match="allocated already"):
        engine.allocate_kv(2, 4)
    with pytest.raises(StepError, match="no sequence"):
        engine.launch(StepInput.of(0, ())).result()
    assert engine.launch(StepInput.of(0, (step,))).result().token_ids[0] >= 3
    engine.close()
    engine.close()
    with pytest.raises(ValueError, match="exceed layer_count"):
        SyntheticEngine(CONFIG, StageSpec(1, 2, 3, 4))


def test_split_of_layers() -> None:
    """Earlier stages take the remainder; stages are consecutive and cover every layer once."""
    assert [stage.layer_count for stage in StageSpec.split(30, 4)] == [8, 8, 7, 7]
    for layers in range(1, 12):
        for stages in range(1, layers + 1):
            split = StageSpec.split(layers, stages)
            assert [layer for stage in split for layer in stage.layers] == list(range(layers))
            assert (split[0].is_first, split[-1].is_last) == (True, True)
    with pytest.raises(ValueError, match="stage_count"):
        StageSpec.split(3, 4)


def test_runs_without_torch() -> None:
    """The engine room imports, and the synthetic engine answers, with torch, gguf and safetensors absent."""
    code = (
        "import sys\n"
        "for name in ('torch', 'gguf', 'safetensors', 'mpi4py'): sys.modules[name] = None\n"
        "from meta_executor.engine.generate import generate\n"
        "from meta_executor.engine import create_engine, StageSpec, SamplingParams\n"
        "from meta_executor.engine.tokenizer import Tokenizer\n"
        "from meta_executor.config import EngineConfig\n"
        "engine = create_engine(EngineConfig(kind='synthetic'), StageSpec(0, 1, 0, 8))\n"
        "result = generate(engine, Tokenizer.synthetic(32000), 'hello', SamplingParams(4))\n"
        "engine.close()\n"
        "assert len(result.token_ids) == 4\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_finish_reason() -> None:
    """End tokens stop, unless ignored; stop tokens always stop; the limit is a length; stop wins at the limit."""
    assert finish_reason(2, 1, SamplingParams(5), (2,)) == "stop"
    assert finish_reason(2, 1, SamplingParams(5, ignore_eos=True), (2,)) is None
    assert finish_reason(9, 1, SamplingParams(5, ignore_eos=True, stop_token_ids=(9,)), (2,)) == "stop"
    assert finish_reason(7, 5, SamplingParams(5), (2,)) == "length"
    assert finish_reason(2, 5, SamplingParams(5), (2,)) == "stop"
    assert finish_reason(7, 4, SamplingParams(5), (2,)) is None


# -- how much of the KV memory is read ----------------------------------------------------------------------------------


def checked(kv_check: str, stages: tuple[StageSpec, ...] = (WHOLE,), **options: int) -> SequenceRunner:
    config = msgspec.structs.replace(CONFIG, kv_check=kv_check)
    engines = [SyntheticEngine(config, stage) for stage in stages]
    return SequenceRunner(engines, block_count=32, block_tokens=4, **options)


@pytest.mark.parametrize("kv_check", ["sampled", "off"])
def test_cheap_checks_give_the_same_tokens_for_any_split_and_chunk(kv_check: str) -> None:
    """What full reading promises holds for the cheap ways, too; they are answers of their own."""
    whole = checked(kv_check)
    prompt = [int(token) for token in np.random.default_rng(2).integers(3, 1000, 50)]
    want = tokens_of(whole, prompt)
    assert len(set(want)) > 3
    for chunk_tokens in (1, 7, 64):
        split = checked(kv_check, StageSpec.split(6, 3), chunk_tokens=chunk_tokens)
        assert tokens_of(split, prompt) == want
        split.close()
    full = runner_of()
    assert tokens_of(full, prompt) != want
    for runner in (whole, full):
        runner.close()


def test_sampling_sees_lost_kv_within_a_few_steps() -> None:
    """A prompt whose KV is zeroed behind the engine's back changes the answer; with ``off`` it does not."""
    prompt = list(range(3, 43))
    for kv_check, changes in (("sampled", True), ("off", False)):
        runner = checked(kv_check)
        sampling = SamplingParams(20)
        answers = []
        for request_id, spoil in ((1, False), (2, True)):
            token, *_ = runner.prefill(request_id, prompt, sampling)
            if spoil:
                runner.memories[0].owner[:, list(runner.pool.table(request_id))[:10]] = 0.0
            made = [token]
            for position in range(len(prompt), len(prompt) + 10):
                made.append(runner.decode(request_id, made[-1], position, sampling)[0])
            answers.append(made)
            runner.pool.release(request_id)
        assert (answers[0] != answers[1]) is changes, kv_check
        assert answers[0][0] == answers[1][0]
        runner.close()
