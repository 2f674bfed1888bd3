"""A Hugging Face folder served on each device: eight requests through both instances equal one process on that device."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import msgspec
import numpy as np
import pytest

from meta_executor.config import apply_environment, service_config
from meta_executor.engine.base import SamplingParams, StageSpec
from meta_executor.engine.factory import create_engine, model_info
from meta_executor.engine.generate import SequenceRunner, generate
from meta_executor.engine.tokenizer import Tokenizer
from meta_executor.evidence.verify import verify_folder
from meta_executor.supervise.launch import Launcher

pytestmark = [pytest.mark.service, pytest.mark.timeout(400)]

HIDDEN, LAYERS, HEADS, KV_HEADS, FFN, VOCABULARY = 128, 6, 4, 2, 256, 512


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small Llama with random weights and a byte-level tokenizer, as a Hugging Face folder."""
    from safetensors.numpy import save_file
    from tokenizers import Tokenizer as Fast
    from tokenizers import decoders, models, pre_tokenizers

    path = tmp_path_factory.mktemp("llama")
    rng = np.random.default_rng(3)
    head = HIDDEN // HEADS

    def weight(*shape, scale=0.08):
        return rng.normal(0.0, scale, shape).astype(np.float32)

    tensors = {
        "model.embed_tokens.weight": weight(VOCABULARY, HIDDEN, scale=1.0),
        "model.norm.weight": np.ones(HIDDEN, np.float32),
        "lm_head.weight": weight(VOCABULARY, HIDDEN, scale=0.3),
    }
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        tensors |= {
            f"{at}.input_layernorm.weight": np.ones(HIDDEN, np.float32),
            f"{at}.post_attention_layernorm.weight": np.ones(HIDDEN, np.float32),
            f"{at}.self_attn.q_proj.weight": weight(HEADS * head, HIDDEN),
            f"{at}.self_attn.k_proj.weight": weight(KV_HEADS * head, HIDDEN),
            f"{at}.self_attn.v_proj.weight": weight(KV_HEADS * head, HIDDEN),
            f"{at}.self_attn.o_proj.weight": weight(HIDDEN, HEADS * head),
            f"{at}.mlp.gate_proj.weight": weight(FFN, HIDDEN),
            f"{at}.mlp.up_proj.weight": weight(FFN, HIDDEN),
            f"{at}.mlp.down_proj.weight": weight(HIDDEN, FFN),
        }
    save_file(tensors, path / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "intermediate_size": FFN, "vocab_size": VOCABULARY,
        "max_position_embeddings": 1024, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
        "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "float32", "hidden_act": "silu",
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["<unk>", "<s>", "</s>", *alphabet]
    words += [f"<extra{i}>" for i in range(VOCABULARY - len(words))]
    fast = Fast(models.BPE({word: i for i, word in enumerate(words)}, [], unk_token="<unk>"))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens(["<unk>", "<s>", "</s>"])
    fast.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "</s>", "bos_token": "<s>", "unk_token": "<unk>"})
    )
    return path


@pytest.mark.parametrize(
    ("device", "schedule"),
    [
        pytest.param("cpu", "context_first", marks=pytest.mark.slow),
        ("cpu", "generation_first"),
        pytest.param("cuda", "context_first", marks=pytest.mark.gpu),
        pytest.param("cuda", "generation_first", marks=pytest.mark.gpu),
    ],
)
def test_eight_requests_equal_one_process(folder, short_folder, device, schedule):
    """Pipeline ranks, attention-DP ranks and NIXL between them, on the CPU and on a GPU, in both schedules."""
    pool = {"tokens_per_block": 16, "max_tokens": 4096}
    service = apply_environment(
        service_config(
            {
                "port": 0,
                "run_dir": str(short_folder / "f"),
                "evidence_dir": str(short_folder / f"evidence-{device}-{schedule}"),
                "log_dir": str(short_folder / f"logs-{device}-{schedule}"),
                "schedule_style": schedule,
                "engine": {"model": str(folder), "device": device, "weights_cache_dir": str(short_folder / "cache")},
                "context_servers": {
                    "pipeline_parallel_size": 4,
                    "kv_cache_config": pool,
                    "cache_transceiver_config": {
                        "enable_async_terminal_agreement": True,
                        "enable_async_readiness_agreement": True,
                        "enable_bounce": True,
                    },
                },
                "generation_servers": {
                    "tensor_parallel_size": 2,
                    "enable_attention_dp": True,
                    "kv_cache_config": pool,
                    "cache_transceiver_config": {"enable_bounce": True},
                },
            }
        ),
        {},
    )
    prompts = [[3 + (i * 31 + j * 17) % 250 for j in range(20 + 40 * i)] for i in range(8)]
    info = model_info(service.engine)
    engine = create_engine(service.engine, StageSpec.split(info.layer_count, 1)[0])
    runner = SequenceRunner(engine, block_count=64)
    tokenizer = Tokenizer.for_model(str(folder))
    sampling = SamplingParams(max_tokens=12, ignore_eos=True)
    wanted = [list(generate(runner, tokenizer, prompt, sampling).token_ids) for prompt in prompts]
    runner.close()
    launcher = Launcher(service, say=print)
    with launcher.started():
        model = httpx.get(f"{launcher.front_url}/v1/models", trust_env=False).json()["data"][0]["id"]

        def ask(prompt):
            body = {
                "model": model,
                "prompt": prompt,
                "max_tokens": 12,
                "temperature": 0,
                "ignore_eos": True,
                "return_token_ids": True,
            }
            answer = httpx.post(f"{launcher.front_url}/v1/completions", json=body, timeout=120.0, trust_env=False)
            assert answer.status_code == 200, answer.text
            return answer.json()["choices"][0]["token_ids"]

        with ThreadPoolExecutor(8) as workers:
            got = list(workers.map(ask, prompts))
        info_of = {
            owner: httpx.get(f"{url}/server_info", headers=launcher.key_header, trust_env=False).json()
            for owner, url in launcher.urls().items()
        }
    assert got == wanted
    assert verify_folder(short_folder / f"evidence-{device}-{schedule}").ok
    kinds = msgspec.json.encode(info_of)
    assert (b"VRAM" in kinds) == (device == "cuda")
    for log in (short_folder / f"logs-{device}-{schedule}").iterdir():
        text = log.read_text()
        assert "Traceback" not in text
        assert "KeyError" not in text
