"""Files of models: containers, configurations, tokenizers, chat templates."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import random
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fuzz_targets.drawing import Refused, Target, json_mutated, mutated, shown


def _gguf(entries: dict[str, Any], tensors: dict[str, tuple[tuple[int, ...], int]]) -> bytes:
    def text(value: str) -> bytes:
        data = value.encode()
        return struct.pack("<Q", len(data)) + data

    def value(item: Any) -> bytes:
        if isinstance(item, bool):
            return struct.pack("<I?", 7, item)
        if isinstance(item, int):
            return struct.pack("<IQ", 10, item)
        if isinstance(item, float):
            return struct.pack("<If", 6, item)
        if isinstance(item, str):
            return struct.pack("<I", 8) + text(item)
        if isinstance(item[0], str):
            return struct.pack("<IIQ", 9, 8, len(item)) + b"".join(text(one) for one in item)
        code, kind = ("f", 6) if isinstance(item[0], float) else ("i", 5)
        return struct.pack("<IIQ", 9, kind, len(item)) + struct.pack(f"<{len(item)}{code}", *item)

    made = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(entries))
    made += b"".join(text(key) + value(item) for key, item in entries.items())
    offset = 0
    for name, (shape, kind) in tensors.items():
        made += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)
        offset += 4 * (shape[0] * (shape[1] if len(shape) > 1 else 1))
    return made + b"\x00" * (-len(made) % 32 + min(offset, 4096))


@contextlib.contextmanager
def gguf() -> Iterator[Target]:
    """GGUF files: container, shape of the model, tokenizer."""
    from meta_executor.engine.errors import EngineError
    from meta_executor.engine.tokenizer import Tokenizer
    from meta_executor.engine.weights import ModelSource

    shape = {
        f"llama.{name}": value
        for name, value in (
            ("block_count", 2),
            ("embedding_length", 8),
            ("attention.head_count", 2),
            ("attention.head_count_kv", 1),
            ("context_length", 64),
            ("feed_forward_length", 16),
            ("attention.layer_norm_rms_epsilon", 1e-5),
            ("rope.freq_base", 10000.0),
            ("rope.dimension_count", 4),
        )
    }
    tokens = ["<unk>", "<s>", "</s>", "a", "b", "ab", "Ġ"]
    common = {
        "general.architecture": "llama",
        "general.name": "n",
        **shape,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, 3, 3, 1, 1, 1, 1],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": "{{ messages[0].content }}",
    }
    tensors = {"token_embd.weight": ((8, 7), 0), "rope_freqs.weight": ((2,), 0), "output.weight": ((8, 7), 8)}
    seeds = [
        _gguf(
            {
                **common,
                "tokenizer.ggml.model": "gpt2",
                "tokenizer.ggml.merges": ["a b"],
                "tokenizer.ggml.pre": "smollm",
            },
            tensors,
        ),
        _gguf(
            {**common, "tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": [0.0] * 7, "general.alignment": 32},
            tensors,
        ),
    ]
    with _scratch() as folder:
        path = folder / "m.gguf"

        def read(data: bytes) -> None:
            path.write_bytes(data)
            refused = 0
            for attempt in (lambda: ModelSource(path, "gguf").describe(), lambda: _use(Tokenizer.from_gguf(path))):
                try:
                    attempt()
                except EngineError as error:
                    shown(error)
                    refused += 1
            if refused == 2:
                raise Refused

        yield seeds, mutated, read


def _use(tokenizer: Any) -> None:
    from meta_executor.engine.errors import EngineError

    tokenizer.decode(tokenizer.encode_user_text("ab a"))
    with contextlib.suppress(EngineError):
        tokenizer.apply_chat_template([{"role": "user", "content": "ab"}])


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    # In memory where that can be: replacing a file on a disk takes ten times as long as reading a small model.
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # noqa: S108 - a new folder of ours in it
    with tempfile.TemporaryDirectory(prefix="mx-fuzz-", dir=memory) as folder:
        yield Path(folder)


_CONFIG = {
    "model_type": "llama",
    "num_attention_heads": 2,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_key_value_heads": 1,
    "vocab_size": 7,
    "max_position_embeddings": 64,
    "intermediate_size": 16,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
    "bos_token_id": 1,
}


@contextlib.contextmanager
def safetensors() -> Iterator[Target]:
    """Safetensors files of a model's folder."""
    import numpy as np
    from safetensors.numpy import save

    from meta_executor.engine.base import StageSpec
    from meta_executor.engine.errors import EngineError
    from meta_executor.engine.weights import ModelSource, load_stage_tensors

    layer = {
        "self_attn.q_proj": (8, 8),
        "self_attn.k_proj": (4, 8),
        "self_attn.v_proj": (4, 8),
        "self_attn.o_proj": (8, 8),
        "mlp.gate_proj": (16, 8),
        "mlp.up_proj": (16, 8),
        "mlp.down_proj": (8, 16),
        "input_layernorm": (8,),
        "post_attention_layernorm": (8,),
    }
    arrays = {f"model.layers.0.{name}.weight": np.zeros(shape, np.float32) for name, shape in layer.items()}
    arrays |= {"model.embed_tokens.weight": np.zeros((7, 8), np.float16), "model.norm.weight": np.zeros(8, np.float32)}
    seeds = [save(arrays)]
    with _scratch() as folder:
        (folder / "config.json").write_text(json.dumps(_CONFIG))
        (folder / "model.safetensors").write_bytes(seeds[0])
        source, stage = ModelSource(folder, "folder"), StageSpec(0, 1, 0, 1)
        load_stage_tensors(source, stage)

        def header(seeds: list[bytes], draw: random.Random) -> bytes:
            whole = seeds[0]
            (size,) = struct.unpack_from("<Q", whole)
            if draw.random() < 0.3:
                return mutated(seeds, draw)
            text = json_mutated([whole[8 : 8 + size]], draw)
            return struct.pack("<Q", len(text)) + text + whole[8 + size :]

        def read(data: bytes) -> None:
            (folder / "model.safetensors").write_bytes(data)
            try:
                load_stage_tensors(source, stage)
            except EngineError as error:
                shown(error)
                raise Refused from None

        yield seeds, header, read


@contextlib.contextmanager
def folder_files() -> Iterator[Target]:
    """``config.json``, ``tokenizer.json`` and ``tokenizer_config.json`` of a model's folder; the first byte says which."""
    from meta_executor.engine.errors import EngineError
    from meta_executor.engine.tokenizer import Tokenizer
    from meta_executor.engine.weights import ModelSource

    config = {
        **_CONFIG,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        "rope_theta": 10000.0,
    }
    backend = Tokenizer.synthetic(300)._backend
    files = {
        b"c": ("config.json", json.dumps(config).encode()),
        b"t": ("tokenizer.json", backend.to_str().encode()),
        b"u": (
            "tokenizer_config.json",
            json.dumps(
                {"chat_template": [{"name": "default", "template": "{{ messages }}"}], "add_bos_token": True}
            ).encode(),
        ),
    }
    with _scratch() as folder:
        for name, text in files.values():
            (folder / name).write_bytes(text)

        def mutate(seeds: list[bytes], draw: random.Random) -> bytes:
            which = draw.choice(list(files))
            return which + json_mutated([files[which][1]], draw)

        def describe() -> None:
            ModelSource(folder, "folder").describe()

        def tokenizer() -> None:
            _use(Tokenizer.from_folder(folder))

        def read(data: bytes) -> None:
            name, good = files[data[:1]]
            (folder / name).write_bytes(data[1:])
            refused = 0
            try:
                for attempt in (describe, tokenizer) if name == "config.json" else (tokenizer,):
                    try:
                        attempt()
                    except EngineError as error:
                        shown(error)
                        refused += 1
            finally:
                (folder / name).write_bytes(good)
            if refused:
                raise Refused

        yield [which + text for which, (_, text) in files.items()], mutate, read


@contextlib.contextmanager
def templates() -> Iterator[Target]:
    """Chat templates of a model."""
    from meta_executor.engine.errors import EngineError
    from meta_executor.engine.tokenizer import Tokenizer

    base = Tokenizer.synthetic(300)
    seeds = [
        b"{% for m in messages %}{{ '<s>' + m['role'] + '\n' + m.content | trim + '</s>' }}{% endfor %}{{ bos_token }}",
        b"{% if messages[0].role == 'x' %}{{ raise_exception('no') }}{% else %}{{ messages | length * 2 ** 3 }}{% endif %}",
        b"{% set x = namespace(a=1) %}{% macro f(y) %}{{ y / 0 }}{% endmacro %}{{ f(1) }}{{ messages[5].x.y }}{{ 'a' % 3 }}",
        b"{% macro f(y) %}{{ f(y) }}{% endmacro %}{{ f(1) }}",
        b"{{ ''.__class__.__mro__ }}{{ messages.append(1) }}{{ range(10) | list }}{{ 1.5 | int | string | upper }}",
        b"{% set n = namespace(x='a') %}{% for i in range(40) %}{% set n.x = n.x ~ n.x + '%9s' % n %}{% endfor %}{{ n.x[1:] }}",
        b"{% for a in range(99999) if a in [1, 2] or a == 3 %}{% for b in range(999) %}{{ a }}{% endfor %}{% endfor %}",
        b"{{ 'a b' | replace(' ', 'c' * 9) | center(99) | indent(9) | e }}{{ ('{:9}{!r}' | safe).format(1, messages) }}",
        b"{{ messages | map(attribute='role') | join(', ') }}{{ [[1]] | tojson(indent=9) }}{{ 'x'.join(messages[0]) }}",
        b"{% set n = namespace(x=[]) %}{% for i in range(40) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x == [0] }}{{ n.x }}",
        b"{% set n = namespace(x=(1,)) %}{% for i in range(40) %}{% set n.x = (n.x, n.x) %}{% endfor %}{{ {n.x: 1}[n.x] }}",
        b"{{ {}.fromkeys([1]).values() | sort | reverse | list }}{{ '%9d' is odd }}{{ '{:9}'.format(1) in range(9) }}",
    ]
    messages = [{"role": "user", "content": "hello </s>"}]

    def read(data: bytes) -> None:
        # Everything but the template stays: what else a tokenizer has takes longer to make than a template.
        made = copy.copy(base)
        made._template_text, made._template = data.decode("utf-8", "replace"), None
        try:
            made.apply_chat_template(messages)
        except EngineError as error:
            shown(error)
            raise Refused from None

    yield seeds, mutated, read
