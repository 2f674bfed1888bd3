"""The real model, loaded once; its conversion lands in the user's cache folder, as in production."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from meta_executor.config import EngineConfig
from meta_executor.engine import ModelInfo, StageSpec, model_info
from meta_executor.engine.generate import SequenceRunner
from meta_executor.engine.llama import LlamaEngine
from meta_executor.engine.tokenizer import Tokenizer
from meta_executor.engine.weights import load_stage_tensors, resolve_model

#: Twenty prompts: one of a single token, two of over 500 tokens, the rest of all kinds.
_LONG = (
    "The history of the lighthouse begins on open hills, where fires were kept burning to mark the entrance of a port. "
    "Towers came later, and with them keepers, lamps, lenses and clockwork. "
)


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.for_model("smollm2")


@pytest.fixture(scope="session")
def llama_info() -> ModelInfo:
    return model_info(EngineConfig())


@pytest.fixture(scope="session")
def make_llama() -> Callable[..., LlamaEngine]:
    """Engines over one copy of the tensors: loading them once keeps the tests within their budget."""
    source = resolve_model("smollm2")
    info, geometry = source.describe()
    tensors = load_stage_tensors(source, StageSpec(0, 1, 0, info.layer_count))

    def make(stage: StageSpec | None = None, **options: object) -> LlamaEngine:
        return LlamaEngine(info, geometry, tensors, stage or StageSpec(0, 1, 0, info.layer_count), **options)  # type: ignore[arg-type]

    return make


@pytest.fixture(scope="session")
def llama_runner(make_llama: Callable[..., LlamaEngine]) -> Iterator[SequenceRunner]:
    runner = SequenceRunner(make_llama(), block_count=400)
    yield runner
    runner.pool.validate()
    runner.close()


@pytest.fixture(scope="session")
def prompts(tokenizer: Tokenizer) -> list[list[int]]:
    texts = [
        "The capital of France is",
        "Once upon a time",
        "def fibonacci(n):",
        "Water boils at",
        "In 1969, humans first",
        "A haiku about autumn leaves:",
        "SELECT name FROM users WHERE",
        "The three primary colours are",
        "Dear Sir or Madam,",
        "El perro corre por",
        "1, 2, 3, 5, 8, 13,",
        "Photosynthesis is the process by which",
        "To be or not to be,",
    ]
    chats = ["Why is the sky blue?", "Write a short poem.", "What is 12 * 7?", "Name a river in Africa."]
    ids = [tokenizer.encode_user_text(text) for text in texts]
    ids += [tokenizer.apply_chat_template([{"role": "user", "content": chat}]) for chat in chats]
    ids.append(tokenizer.encode_user_text("Hello")[:1])
    ids += [tokenizer.encode_user_text(_LONG * 15)[:517], tokenizer.encode_user_text("Notes. " + _LONG * 15)[:560]]
    assert len(ids) == 20
    return ids
