"""The llama engine on a CUDA device: the CPU's tokens, KV memory in VRAM, steps that do not block the caller."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from meta_executor.engine import ModelInfo, SamplingParams, SequenceStep, StageSpec, StepInput
from meta_executor.engine.llama import LlamaEngine
from meta_executor.engine.weights import LlamaGeometry

pytestmark = pytest.mark.gpu

INFO = ModelInfo("tiny", 4, 128, 4, 2, 32, 300, 2048, "float32", 1, (2,))
GEOMETRY = LlamaGeometry(256, 1e-5, tuple(float(10000.0 ** (-2 * i / 32)) for i in range(16)), tied_head=True)


def tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(4)

    def matrix(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) * 0.15).astype(np.float32)

    result = {"embed": matrix(300, 128), "final_norm": 1 + matrix(128)}
    for layer in range(4):
        for name, shape in {"qkv": (256, 128), "output": (128, 128), "gate_up": (512, 128), "down": (128, 256)}.items():
            result[f"layers.{layer}.{name}"] = matrix(*shape)
        for name in ("attn_norm", "ffn_norm"):
            result[f"layers.{layer}.{name}"] = 1 + matrix(128)
    return result


def engine(device: str, stage: StageSpec | None = None, **options: object) -> LlamaEngine:
    return LlamaEngine(INFO, GEOMETRY, tensors(), stage or StageSpec(0, 1, 0, 4), device=device, **options)  # type: ignore[arg-type]


PROMPTS = [[5, 9, 40], list(range(10, 110)), [7], list(range(200, 233))]


def run(engines: list[LlamaEngine], tokens: int = 6) -> tuple[list[list[int]], list[np.ndarray]]:
    """Prefill all prompts in one step, then decode together; tokens and the logits of each step."""
    for one in engines:
        one.allocate_kv(64, 16)
    blocks = [np.arange(8) * 4 + place for place in range(4)]
    sampling = SamplingParams(tokens, ignore_eos=True)
    answers: list[list[int]] = [[] for _ in PROMPTS]
    logits = []
    for count in range(tokens):
        steps = tuple(
            SequenceStep(
                place,
                np.asarray(answers[place][-1:] or prompt, np.int32),
                0 if not answers[place] else len(prompt) + count - 1,
                blocks[place],
                sampling,
            )
            for place, prompt in enumerate(PROMPTS)
        )
        hidden = None
        for one in engines:
            output = one.launch(StepInput.of(count, steps, hidden, want_logits=True)).result()
            hidden = output.hidden
        logits.append(output.logits)
        for place in range(4):
            answers[place].append(int(output.token_ids[place]))
    for one in engines:
        one.close()
    return answers, logits


def test_device_gives_the_cpus_tokens() -> None:
    """float32 on both: logits agree closely, greedy tokens exactly, whole and in stages."""
    want, want_logits = run([engine("cpu")])
    got, got_logits = run([engine("cuda")])
    for left, right in zip(got_logits, want_logits):
        np.testing.assert_allclose(left, right, atol=2e-3, rtol=2e-3)
    assert got == want
    assert run([engine("cuda", stage) for stage in StageSpec.split(4, 2)])[0] == want


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_runs(dtype: str) -> None:
    """Logits stay near those of float32."""
    _, want = run([engine("cpu")], 1)
    _, got = run([engine("cuda", dtype=dtype)], 1)
    assert np.abs(got[0] - want[0]).max() < 0.15 * np.abs(want[0]).max()


def test_kv_memory_is_in_vram() -> None:
    """The description says VRAM and its addresses are the tensor's."""
    one = engine("cuda")
    memory = one.allocate_kv(4, 16)
    assert memory.memory_kind == "VRAM"
    assert memory.owner.is_cuda
    assert memory.regions == ((memory.owner.data_ptr(), memory.owner.numel() * 4),)
    one.close()


def test_deterministic_rows_on_the_device() -> None:
    """Bits of a sequence's logits do not depend on the batch."""
    _, together = run([engine("cuda", deterministic_rows=True)], 3)
    one = engine("cuda", deterministic_rows=True)
    one.allocate_kv(8, 16)
    prompt = np.asarray(PROMPTS[3], np.int32)
    output = one.launch(
        StepInput.of(0, (SequenceStep(0, prompt, 0, np.arange(8), SamplingParams(1)),), want_logits=True)
    )
    assert output.result().logits[0].tobytes() == together[0][3].tobytes()
    one.close()


def test_launch_does_not_wait_for_the_device() -> None:
    """A step behind a long one is not done when launch returns, and done() only asks."""
    one = engine("cuda")
    one.allocate_kv(128, 16)
    prompt = np.asarray([i % 300 for i in range(2000)], np.int32)
    steps = [
        one.launch(StepInput.of(i, (SequenceStep(0, prompt, 0, np.arange(128), SamplingParams(1)),))) for i in range(8)
    ]
    assert not steps[-1].done()
    assert steps[-1].result().step_id == 7
    assert all(step.done() for step in steps)
    one.close()
    assert torch.cuda.is_available()
