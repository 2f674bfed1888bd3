"""Other engines on the same weights, for ``bench_real.py``: each in a process and, where wanted, an interpreter of its own.

    python peers.py hugging-face|vllm FOLDER < request.json

The request names prompts (groups of token ids that are answered together), answer length, threads and type; the reply is the
rate of all groups but the first, which warms, in tokens/s. :func:`write_folder` makes the folder from this project's reading
of the model.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

NAMES = {"hugging-face": "transformers", "vllm": "vllm"}


def write_folder(model: str, folder: Path, cache_dir: str | None = None) -> None:
    """A Hugging Face folder of a model, its weights in float32; no tokenizer."""
    import numpy as np
    from safetensors.numpy import save_file

    from meta_executor.engine.base import StageSpec
    from meta_executor.engine.weights import load_stage_tensors, resolve_model

    source = resolve_model(model)
    info, geometry = source.describe()
    ours = load_stage_tensors(source, StageSpec(0, 1, 0, info.layer_count), cache_dir)
    queries, keys = (heads * info.head_dim for heads in (info.attention_head_count, info.kv_head_count))

    def halves(rows: Any, heads: int) -> Any:
        """Rotary pairs that lie beside each other, half a head apart."""
        return rows.reshape(heads, -1, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)

    theirs = {"model.embed_tokens.weight": ours["embed"], "model.norm.weight": ours["final_norm"]}
    if not geometry.tied_head:
        theirs["lm_head.weight"] = ours["head"]
    for layer in range(info.layer_count):
        at, of = f"model.layers.{layer}.", f"layers.{layer}."
        query, key, value = np.split(ours[of + "qkv"], [queries, queries + keys])
        gate, up = np.split(ours[of + "gate_up"], 2)
        theirs |= {
            at + "input_layernorm.weight": ours[of + "attn_norm"],
            at + "self_attn.q_proj.weight": halves(query, info.attention_head_count),
            at + "self_attn.k_proj.weight": halves(key, info.kv_head_count),
            at + "self_attn.v_proj.weight": value,
            at + "self_attn.o_proj.weight": ours[of + "output"],
            at + "post_attention_layernorm.weight": ours[of + "ffn_norm"],
            at + "mlp.gate_proj.weight": gate,
            at + "mlp.up_proj.weight": up,
            at + "mlp.down_proj.weight": ours[of + "down"],
        }
    contiguous = {name: np.ascontiguousarray(values) for name, values in theirs.items()}
    save_file(contiguous, str(folder / "model.safetensors"), metadata={"format": "pt"})
    frequencies = geometry.inverse_frequencies
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": info.hidden_size,
        "intermediate_size": geometry.ffn_size,
        "num_hidden_layers": info.layer_count,
        "num_attention_heads": info.attention_head_count,
        "num_key_value_heads": info.kv_head_count,
        "head_dim": info.head_dim,
        "vocab_size": info.vocab_size,
        "max_position_embeddings": info.context_tokens_max,
        "rms_norm_eps": geometry.norm_epsilon,
        "rope_theta": frequencies[1] ** (-info.head_dim / 2),
        "hidden_act": "silu",
        "tie_word_embeddings": geometry.tied_head,
        "bos_token_id": info.bos_token_id,
        "eos_token_id": info.eos_token_ids[0],
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config), "utf-8")


def hugging_face(folder: str, asked: dict[str, Any]) -> tuple[float, list[int]]:
    """``generate`` of transformers. Tokens/s, and the first answer."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(asked["threads"])
    model = AutoModelForCausalLM.from_pretrained(folder).to(getattr(torch, asked["dtype"])).eval()
    count = asked["answer_tokens"]
    first: list[int] = []

    def group(prompts: list[list[int]]) -> None:
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            made = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count, do_sample=False,
                pad_token_id=0,
            )  # fmt: skip
        first[:] = first or made[0, ids.shape[1] :].tolist()

    return timed(group, asked), first


def vllm(folder: str, asked: dict[str, Any]) -> tuple[float, list[int]]:
    """The CPU build. Tokens/s, and the first answer."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ["OMP_NUM_THREADS"] = str(asked["threads"])
    from vllm import LLM, SamplingParams

    engine = LLM(
        folder, skip_tokenizer_init=True, dtype=asked["dtype"], max_model_len=1024, enable_prefix_caching=False
    )
    count = asked["answer_tokens"]
    sampling = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
    first: list[int] = []

    def group(prompts: list[list[int]]) -> None:
        made = engine.generate([{"prompt_token_ids": one} for one in prompts], sampling, use_tqdm=False)
        first[:] = first or list(made[0].outputs[0].token_ids)

    return timed(group, asked), first


def timed(group: Any, asked: dict[str, Any]) -> float:
    """Tokens per second of all groups but the first."""
    warm, *groups = asked["groups"]
    group(warm)
    began_s = time.perf_counter()
    for prompts in groups:
        group(prompts)
    return float(sum(map(len, groups)) * asked["answer_tokens"] / (time.perf_counter() - began_s))


if __name__ == "__main__":
    rate, answer = {"hugging-face": hugging_face, "vllm": vllm}[sys.argv[1]](sys.argv[2], json.load(sys.stdin))
    print(json.dumps({"rate": rate, "first": answer}))
