"""The llama engine: the same tokens however it is batched, chunked or split into stages."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from meta_executor.engine import SamplingParams, SequenceStep, StageSpec, StepError, StepInput
from meta_executor.engine.generate import SequenceRunner, generate
from meta_executor.engine.llama import LlamaEngine
from meta_executor.engine.tokenizer import Tokenizer

pytestmark = pytest.mark.timeout(300)


def run_batch(
    runner: SequenceRunner, prompts: list[list[int]], tokens: int, *, want_logits: bool = False
) -> tuple[list[list[int]], list[list[np.ndarray]]]:
    """Prefill one by one, then decode all together."""
    sampling = SamplingParams(tokens, ignore_eos=True)
    answers, logits = [], [[] for _ in prompts]
    for index, prompt in enumerate(prompts):
        blocks = np.asarray(runner.pool.acquire(index, prompt, len(prompt) + tokens).block_ids)
        out = runner.step(
            [SequenceStep(index, np.asarray(prompt, np.int32), 0, blocks, sampling)], want_logits=want_logits
        )
        answers.append([int(out.token_ids[0])])
        if want_logits:
            logits[index].append(out.logits[0])
    for count in range(1, tokens):
        steps = [
            SequenceStep(
                index,
                np.asarray(answers[index][-1:], np.int32),
                len(prompt) + count - 1,
                np.asarray(runner.pool.table(index)),
                sampling,
            )
            for index, prompt in enumerate(prompts)
        ]
        out = runner.step(steps, want_logits=want_logits)
        for index in range(len(prompts)):
            answers[index].append(int(out.token_ids[index]))
            if want_logits:
                logits[index].append(out.logits[index])
    for index in range(len(prompts)):
        runner.pool.release(index)
    return answers, logits


def test_known_answer(llama_runner: SequenceRunner, tokenizer: Tokenizer) -> None:
    """Paris, as with other runtimes of this file (wrong rotary order or a wrong dequantisation does not say so)."""
    answer = generate(llama_runner, tokenizer, "The capital of France is", SamplingParams(2))
    assert answer.text == " Paris."
    assert answer.finish_reason == "length"
    assert answer.margin_min > 0.05


def test_perplexity_of_plain_text(make_llama: Callable[..., LlamaEngine], tokenizer: Tokenizer) -> None:
    """Perplexity of ordinary prose is that of a right model: every position's logits count, not only the largest."""
    text = (
        "The sun rises in the east and sets in the west. Plants use sunlight, water and carbon dioxide to make their "
        "own food, and they release oxygen into the air. This process is called photosynthesis."
    )
    ids = np.asarray(tokenizer.encode_user_text(text), np.int32)
    runner = SequenceRunner(make_llama(), block_count=16)
    blocks = np.asarray(runner.pool.allocate("text", 8))
    loss = 0.0
    for position in range(len(ids) - 1):
        step = SequenceStep(0, ids[position : position + 1], position, blocks, SamplingParams(1))
        row = runner.step([step], want_logits=True).logits[0].astype(np.float64)
        loss -= row[ids[position + 1]] - row.max() - np.log(np.exp(row - row.max()).sum())
    runner.close()
    assert np.exp(loss / (len(ids) - 1)) < 15.0


def test_batch_equals_single(llama_runner: SequenceRunner, tokenizer: Tokenizer, prompts: list[list[int]]) -> None:
    """Greedy tokens of seven sequences decoded together, long and short mixed, equal those of each alone."""
    chosen = [prompts[index] for index in (0, 2, 13, 17, 10, 3)] + [prompts[18][:150]]
    together, _ = run_batch(llama_runner, chosen, 5)
    for prompt, answer in zip(chosen, together):
        alone = generate(llama_runner, tokenizer, prompt, SamplingParams(5, ignore_eos=True))
        assert list(alone.token_ids) == answer


@pytest.mark.parametrize("chunk_tokens", [1, 7, pytest.param(64, marks=pytest.mark.slow)])
def test_chunked_prefill_equals_one_shot(
    make_llama: Callable[..., LlamaEngine],
    llama_runner: SequenceRunner,
    tokenizer: Tokenizer,
    prompts: list[list[int]],
    chunk_tokens: int,
) -> None:
    """A prompt in chunks, block boundaries crossed anywhere, gives the tokens of the prompt at once."""
    prompt = prompts[18][:100] if chunk_tokens > 1 else prompts[0]
    sampling = SamplingParams(4, ignore_eos=True)
    runner = SequenceRunner(make_llama(), block_count=16, chunk_tokens=chunk_tokens)
    chunked = generate(runner, tokenizer, prompt, sampling)
    runner.close()
    assert chunked.token_ids == generate(llama_runner, tokenizer, prompt, sampling).token_ids


@pytest.mark.parametrize("stage_count", [*(pytest.param(n, marks=pytest.mark.slow) for n in (2, 3)), 4])
def test_pipeline_stages_equal_the_whole(
    make_llama: Callable[..., LlamaEngine],
    llama_runner: SequenceRunner,
    tokenizer: Tokenizer,
    prompts: list[list[int]],
    stage_count: int,
) -> None:
    """Stages in a row, activations handed on as float32 arrays, give the tokens of the whole model, bit for bit in logits."""
    stages = StageSpec.split(30, stage_count)
    runner = SequenceRunner([make_llama(stage) for stage in stages], block_count=8, chunk_tokens=48)
    for prompt in (prompts[17], prompts[18][:47]):
        sampling = SamplingParams(4, ignore_eos=True)
        split = generate(runner, tokenizer, prompt, sampling)
        whole = generate(llama_runner, tokenizer, prompt, sampling)
        assert split.token_ids == whole.token_ids
        assert split.margin_min == whole.margin_min
    runner.close()


def test_mixed_step_of_chunks_and_decodes(
    make_llama: Callable[..., LlamaEngine], llama_runner: SequenceRunner, tokenizer: Tokenizer, prompts: list[list[int]]
) -> None:
    """One step that decodes two sequences and prefills two others gives each its own right token."""
    sampling = SamplingParams(4, ignore_eos=True)
    runner = SequenceRunner(make_llama(), block_count=100)
    first = {}
    for index in (0, 1):
        first[index], *_ = runner.prefill(index, prompts[index], sampling)
    steps = []
    for index in (0, 2, 1, 3):
        prompt = prompts[index]
        if index in first:
            blocks = np.asarray(runner.pool.table(index))
            steps.append(SequenceStep(index, np.asarray([first[index]], np.int32), len(prompt), blocks, sampling))
        else:
            blocks = np.asarray(runner.pool.acquire(index, prompt, len(prompt) + 4).block_ids)
            steps.append(SequenceStep(index, np.asarray(prompt, np.int32), 0, blocks, sampling))
    out = runner.step(steps)
    runner.close()
    for place, index in enumerate((0, 2, 1, 3)):
        alone = generate(llama_runner, tokenizer, prompts[index], sampling).token_ids
        assert out.token_ids[place] == alone[1 if index in first else 0]


def test_deterministic_rows_are_bit_equal(make_llama: Callable[..., LlamaEngine], prompts: list[list[int]]) -> None:
    """With deterministic_rows the logits are equal to the last bit at any batch, any order and any chunk size."""
    chosen = [prompts[0], prompts[17], prompts[5], prompts[18][:70]]
    runner = SequenceRunner(make_llama(deterministic_rows=True), block_count=64)
    together, whole = run_batch(runner, chosen, 2, want_logits=True)
    order = [3, 0, 2, 1]
    shuffled_tokens, shuffled = run_batch(runner, [chosen[index] for index in order], 2, want_logits=True)
    for place, index in enumerate(order):
        assert shuffled_tokens[place] == together[index]
        for left, right in zip(shuffled[place], whole[index]):
            assert left.tobytes() == right.tobytes()
    for index in (0, 3):
        _, alone = run_batch(runner, [chosen[index]], 2, want_logits=True)
        for left, right in zip(alone[0], whole[index]):
            assert left.tobytes() == right.tobytes()
    # The same prompt in chunks of 33 tokens.
    prompt = np.asarray(chosen[3], np.int32)
    blocks = np.asarray(runner.pool.allocate("chunks", 8))
    for start in range(0, len(prompt), 33):
        part = prompt[start : start + 33]
        out = runner.step([SequenceStep(0, part, start, blocks, SamplingParams(1))], want_logits=True)
    runner.close()
    assert out.logits[0].tobytes() == whole[3][0].tobytes()


def test_sampled_tokens_do_not_depend_on_the_batch(llama_runner: SequenceRunner, prompts: list[list[int]]) -> None:
    """Randomness is a function of seed and position: the same answer alone and in a batch, another with another seed."""

    def answers(batch: list[int], seed: int) -> list[list[int]]:
        sampling = SamplingParams(8, temperature=0.9, top_p=0.95, seed=seed, ignore_eos=True)
        for index in batch:
            llama_runner.prefill(index, prompts[index], sampling)
        last = [llama_runner.step(
            [SequenceStep(index, np.asarray(prompts[index][-1:], np.int32), len(prompts[index]) - 1,
                          np.asarray(llama_runner.pool.table(index)), sampling) for index in batch]
        ).token_ids.tolist()]  # fmt: skip
        for count in range(7):
            steps = [
                SequenceStep(index, np.asarray([last[-1][place]], np.int32), len(prompts[index]) + count,
                             np.asarray(llama_runner.pool.table(index)), sampling)
                for place, index in enumerate(batch)
            ]  # fmt: skip
            last.append(llama_runner.step(steps).token_ids.tolist())
        for index in batch:
            llama_runner.pool.release(index)
        return [[row[place] for row in last] for place in range(len(batch))]

    together = answers([1, 4, 9], 7)
    assert answers([4], 7)[0] == together[1]
    assert answers([4], 8)[0] != together[1]


def test_a_broken_step_is_refused_and_the_engine_goes_on(
    make_llama: Callable[..., LlamaEngine], tokenizer: Tokenizer
) -> None:
    """Tokens outside the vocabulary, blocks outside the memory, missing activations: named, nothing written."""
    runner = SequenceRunner(make_llama(), block_count=4)
    good = SequenceStep(1, np.asarray([5, 6], np.int32), 0, np.asarray([0]), SamplingParams(1))
    memory = runner.memories[0].owner
    for bad, words in (
        (SequenceStep(1, np.asarray([49152], np.int32), 0, np.asarray([0])), "token_ids outside"),
        (SequenceStep(1, np.asarray([5], np.int32), 0, np.asarray([4])), "block_ids outside"),
        (SequenceStep(1, np.asarray([5], np.int32), 16, np.asarray([0])), "do not hold 17"),
        (SequenceStep(1, np.asarray([], np.int32), 0, np.asarray([0])), "tokens >= 1"),
        (SequenceStep(1, np.asarray([5], np.int32), 8192, np.arange(4).repeat(200)), "beyond the model's 8192"),
    ):
        with pytest.raises(StepError, match=words):
            runner.step([bad])
    assert not memory.any()
    assert runner.step([good]).token_ids[0] >= 0
    runner.close()
    with pytest.raises(StepError, match="closed"):
        runner.step([good])
    second = make_llama(StageSpec.split(30, 2)[1])
    second.allocate_kv(4, 16)
    with pytest.raises(StepError, match="hidden must be float32"):
        second.launch(StepInput.of(0, (good,))).result()
    second.close()


def test_launch_returns_before_the_step_has_ended(
    make_llama: Callable[..., LlamaEngine], prompts: list[list[int]]
) -> None:
    """Handles end in the order of their launches; done() of a step that has not begun is false."""
    engine = make_llama()
    engine.allocate_kv(40, 16)
    step = SequenceStep(0, np.asarray(prompts[18][:120], np.int32), 0, np.arange(40), SamplingParams(1))
    first = engine.launch(StepInput.of(1, (step,)))
    second = engine.launch(StepInput.of(2, (step,)))
    assert not second.done()
    assert second.result().step_id == 2
    assert first.done()
    assert first.result().step_id == 1
    engine.close()


def test_kv_memory_describes_the_tensor(make_llama: Callable[..., LlamaEngine]) -> None:
    """Addresses and strides lead to the element that the tensor's indices name."""
    import ctypes

    engine = make_llama(StageSpec.split(30, 4)[2])
    memory = engine.allocate_kv(5, 16)
    kv = memory.owner
    layer, block, part, token, head, element = 6, 3, 1, 9, 2, 17
    kv[layer, block, part, token, head, element] = 3.25
    address = (
        memory.layer_base_addresses[layer]
        + block * memory.block_stride_bytes
        + part * memory.kv_stride_bytes
        + token * memory.token_stride_bytes
        + head * memory.head_stride_bytes
        + element * memory.element_bytes
    )
    assert ctypes.c_float.from_address(address).value == 3.25
    assert memory.total_bytes == 7 * 5 * 2 * 16 * 3 * 64 * 4
    assert memory.block_stride_bytes == 2 * memory.kv_stride_bytes
    engine.close()


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
def test_half_precision_answers(make_llama: Callable[..., LlamaEngine], tokenizer: Tokenizer, dtype: str) -> None:
    """Half precision weights and KV still know the capital of France."""
    runner = SequenceRunner(make_llama(dtype=dtype), block_count=2)
    assert generate(runner, tokenizer, "The capital of France is", SamplingParams(2)).text == " Paris."
    assert runner.memories[0].element_bytes == 2
    runner.close()


def test_stop_string_and_end_token(llama_runner: SequenceRunner, tokenizer: Tokenizer) -> None:
    """A stop string cuts the text before it; the model's end token ends an answer and is not text."""
    cut = generate(llama_runner, tokenizer, "The capital of France is", SamplingParams(32), stop=["The answer"])
    assert cut.text == " Paris.\n\n"
    assert cut.finish_reason == "stop"
    ended = generate(llama_runner, tokenizer, "The capital of France is", SamplingParams(64))
    assert ended.finish_reason == "stop"
    assert ended.token_ids[-1] == 2
    assert "<|im_end|>" not in ended.text
    # For so many tokens it is barred like every stop token, not only overheard.
    count = len(ended.token_ids)
    later = generate(llama_runner, tokenizer, "The capital of France is", SamplingParams(64, min_tokens=count))
    assert later.token_ids[: count - 1] == ended.token_ids[:-1]
    assert 2 not in later.token_ids[:count] and len(later.token_ids) > count


def test_what_is_told_of_a_prompt_is_what_was_told_when_it_was_an_answer(
    llama_runner: SequenceRunner, tokenizer: Tokenizer
) -> None:
    """A greedy answer put behind its prompt has the log probabilities that it had, and the same likeliest tokens."""
    prompt = tokenizer.encode_user_text("The capital of France is")
    answer = generate(llama_runner, tokenizer, prompt, SamplingParams(80, ignore_eos=True, logprobs=3))
    both = [*prompt, *answer.token_ids]
    whole = generate(llama_runner, tokenizer, both, SamplingParams(1, prompt_logprobs=3)).prompt_logprobs
    assert len(whole) == len(both) - 1 > 64  # of more rows than are there at once
    for scored, told in zip(whole[len(prompt) - 1 :], answer.logprobs, strict=True):
        assert scored.logprob == pytest.approx(told.logprob, abs=1e-4)
        assert [value for _, value in scored.top] == pytest.approx([value for _, value in told.top], abs=1e-4)
        assert scored.logprob == pytest.approx(scored.top[0][1], abs=1e-4)
    alone = generate(llama_runner, tokenizer, both, SamplingParams(1, prompt_logprobs=0)).prompt_logprobs
    assert [one.logprob for one in alone] == pytest.approx([one.logprob for one in whole], abs=1e-6)
    assert not any(one.top for one in alone)


def test_log_probabilities_and_penalties_of_the_real_model(llama_runner: SequenceRunner, tokenizer: Tokenizer) -> None:
    """Log probabilities are the log-softmax of the logits; bans, biases and penalties change a greedy answer."""
    prompt = "The capital of France is"
    ids = tokenizer.encode_user_text(prompt)
    blocks = np.asarray(llama_runner.pool.acquire(0, ids, len(ids) + 1).block_ids)
    sampling = SamplingParams(1, logprobs=5)
    step = SequenceStep(0, np.asarray(ids, np.int32), 0, blocks, sampling)
    out = llama_runner.step([step], want_logits=True)
    llama_runner.pool.release(0)
    logits = out.logits[0].astype(np.float64)
    want = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
    told = out.logprobs[0]
    assert [token for token, _ in told.top] == np.argsort(-want)[:5].tolist()
    assert [value for _, value in told.top] == pytest.approx(np.sort(want)[::-1][:5].tolist(), abs=1e-6)
    assert told.logprob == pytest.approx(float(want.max()), abs=1e-6)
    paris = int(out.token_ids[0])

    def answer(tokens: int, **fields: object) -> tuple[int, ...]:
        return generate(llama_runner, tokenizer, prompt, SamplingParams(tokens, **fields)).token_ids  # type: ignore[arg-type]

    plain = answer(12)
    assert plain[0] == paris
    assert paris not in answer(4, logit_bias=((paris, -100.0),))
    assert answer(3, logit_bias=((7, 100.0),)) == (7, 7, 7)
    penalised = answer(24, presence_penalty=2.0, frequency_penalty=2.0, logit_bias=((7, 12.0),))
    assert penalised.count(7) < answer(24, logit_bias=((7, 12.0),)).count(7)
    short = answer(8, stop_token_ids=(plain[1],))
    assert short == plain[:2]
    longer = answer(8, stop_token_ids=(plain[1],), min_tokens=4)
    assert plain[1] not in longer[:4] and len(longer) > 2
