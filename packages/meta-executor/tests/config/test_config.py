"""Configuration: what is refused, and that the message names field and value."""

import msgspec
import pytest

from meta_executor.config import (
    ConfigError,
    InstanceSpec,
    RunSpec,
    ServiceConfig,
    apply_environment,
    load_service_config,
    service_config,
)


def test_nothing_is_the_default_topology():
    """Without a setting: four context ranks in a pipeline, two generation ranks, opt-ins off."""
    config = service_config({})
    assert config.context_servers.world_size == 4
    assert config.generation_servers.world_size == 2
    assert config.generation_servers.enable_attention_dp
    transceiver = config.context_servers.cache_transceiver_config
    assert not transceiver.enable_async_terminal_agreement
    assert not transceiver.enable_async_readiness_agreement
    assert not transceiver.enable_bounce
    assert transceiver.lease_timeout_s is None
    assert transceiver.max_num_generation_first_pre_active_requests is None


@pytest.mark.parametrize(
    ("data", "field", "parts"),
    [
        ({"schedule_stile": "context_first"}, "schedule_stile", ["did you mean schedule_style?"]),
        (
            {"context_servers": {"kv_cache_config": {"token_per_block": 4}}},
            "context_servers.kv_cache_config.token_per_block",
            ["did you mean context_servers.kv_cache_config.tokens_per_block?"],
        ),
        ({"zzz": 1}, "zzz", ["known here:", "schedule_style"]),
        ({"served_model_name": ""}, "served_model_name", ["want a name or several"]),
        ({"served_model_name": []}, "served_model_name", ["want a name or several"]),
        ({"served_model_name": ["a", ""]}, "served_model_name", ["want a name or several"]),
        ({"front": {"answers_max": 0}}, "front.answers_max", ["1"]),
        ({"model": "a", "engine": {"model": "b"}}, "engine.model", ["'b'", "'a'", "give one"]),
        (
            {"max_batch_size": 4, "generation_servers": {"max_batch_size": 8}},
            "generation_servers.max_batch_size",
            ["8", "4", "give one"],
        ),
        ({"max_batch_sise": 4}, "max_batch_sise", ["known here"]),
        ({"context_servers": {"urls": ["http://a:1"]}}, "key_file", ["is wanted with context_servers.urls"]),
        (
            {"key_file": "k", "context_servers": {"urls": ["a"]}},
            "context_servers.urls",
            ["http://HOST:PORT", "'a'"],
        ),
        (
            {"key_file": "k", "context_servers": {"urls": ["http://a:1/x"]}},
            "context_servers.urls",
            ["http://HOST:PORT"],
        ),
        (
            {
                "key_file": "k",
                "context_servers": {"urls": ["http://a:1"]},
                "generation_servers": {"urls": ["http://a:1/"]},
            },
            "generation_servers.urls",
            ["twice"],
        ),
        (
            {"key_file": "k", "context_servers": {"urls": ["a:1"]}, "generation_servers": {"urls": ["http://a:1"]}},
            "generation_servers.urls",
            ["twice"],
        ),
        # As other servers of the field have it.
        (
            {"generation_servers": {"router": {"type": "kv_cache_aware"}}},
            "generation_servers.router.type",
            ["'balanced' or 'round_robin'", "'kv_cache_aware'", "front.generation_router"],
        ),
        (
            {"context_servers": {"router": {"type": "load_balancing", "use_tokens": True}}},
            "context_servers.router.use_tokens",
            ["front.context_router"],
        ),
        (
            {"context_servers": {"cache_transceiver_config": {"backend": "UCX"}}},
            "context_servers.cache_transceiver_config.backend",
            ["want 'NIXL', got 'UCX'"],
        ),
        ({"perf_metrics_max_requests": 5}, "perf_metrics_max_requests", ["it is front.perf_metrics_max_requests here"]),
        ({"disagg_cluster": {}}, "disagg_cluster", ["it is discovery.store here"]),
        ({"context_servers": {"backend": "pytorch"}}, "context_servers.backend", ["leave it out"]),
        (
            {"key_file": "k", "context_servers": {"urls": ["http://a:1", "http://a:2"], "num_instances": 3}},
            "context_servers.num_instances",
            ["got 3", "2 urls"],
        ),
        ({"front": {"context_router": {"type": "balanced"}}}, "front.context_router.type", ["balanced"]),
        ({"front": {"router": {"type": "round_robin"}}}, "front.router", ["did you mean front.context_router?"]),
        ({"schedule_style": "both"}, "schedule_style", ["'both'"]),
        ({"port": 70000}, "port", ["65535", "70000"]),
        ({"context_servers": {"max_batch_size": 0}}, "context_servers.max_batch_size", ["1", "got 0"]),
        ({"context_servers": {"max_batch_size": "8"}}, "context_servers.max_batch_size", ["int", "'8'"]),
        ({"engine": {"dtype": "int4"}}, "engine.dtype", ["int4"]),
        ({"context_servers": {"context_parallel_size": 2}}, "context_servers.context_parallel_size", ["got 2"]),
        (
            {"context_servers": {"tensor_parallel_size": 2}},
            "context_servers.tensor_parallel_size",
            ["enable_attention_dp"],
        ),
        (
            {
                "generation_servers": {
                    "pipeline_parallel_size": 2,
                    "tensor_parallel_size": 1,
                    "enable_attention_dp": False,
                }
            },
            "generation_servers.pipeline_parallel_size",
            ["got 2"],
        ),
        (
            {"context_servers": {"max_batch_size": 64, "max_num_tokens": 32}},
            "context_servers.max_num_tokens",
            ["max_batch_size (64)", "got 32"],
        ),
        (
            {"generation_servers": {"cache_transceiver_config": {"lease_timeout_s": 5}}},
            "generation_servers.cache_transceiver_config.lease_timeout_s",
            ["context_servers only", "got 5"],
        ),
        (
            {"context_servers": {"cache_transceiver_config": {"lease_timeout_s": 0}}},
            "context_servers.cache_transceiver_config.lease_timeout_s",
            ["0.001", "got 0"],
        ),
        (
            {"context_servers": {"kv_cache_config": {"free_memory_fraction": 1.5}}},
            "context_servers.kv_cache_config.free_memory_fraction",
            ["1.0", "got 1.5"],
        ),
        (
            {
                "generation_servers": {
                    "kv_cache_config": {"free_memory_fraction": 0.5, "free_gpu_memory_fraction": 0.25}
                }
            },
            "generation_servers.kv_cache_config.free_gpu_memory_fraction",
            ["another name of free_memory_fraction", "0.25"],
        ),
        (
            {"context_servers": {"kv_cache_config": {"max_tokens": 8, "tokens_per_block": 16}}},
            "context_servers.kv_cache_config.max_tokens",
            ["16", "got 8"],
        ),
        (
            {
                "context_servers": {
                    "pipeline_parallel_size": 1,
                    "cache_transceiver_config": {"enable_async_terminal_agreement": True},
                }
            },
            "context_servers.cache_transceiver_config.enable_async_terminal_agreement",
            ["pipeline_parallel_size=1"],
        ),
        (
            {
                "context_servers": {
                    "pipeline_parallel_size": 1,
                    "tensor_parallel_size": 2,
                    "enable_attention_dp": True,
                    "cache_transceiver_config": {"enable_async_readiness_agreement": True},
                }
            },
            "context_servers.cache_transceiver_config.enable_async_readiness_agreement",
            ["enable_attention_dp=True"],
        ),
    ],
)
def test_a_bad_setting_is_named_with_its_value(data, field, parts):
    """One line: the field's full path, the value, and what would be right."""
    with pytest.raises(ConfigError) as error:
        service_config(data)
    text = str(error.value)
    assert error.value.field == field, text
    assert text.startswith(f"{field}: ")
    assert "\n" not in text
    for part in parts:
        assert part in text


@pytest.mark.parametrize("data", [[], "x", 3])
def test_a_file_that_is_no_mapping_is_refused(data):
    """YAML can be a list or a word; settings cannot."""
    with pytest.raises(ConfigError, match="want a mapping"):
        service_config(data)


def test_missing_and_broken_files_are_one_line(tmp_path):
    """The file is named, and the line in it."""
    with pytest.raises(ConfigError, match="No such file"):
        load_service_config(tmp_path / "absent.yaml")
    broken = tmp_path / "broken.yaml"
    broken.write_text("a: 1\nb: [\n")
    with pytest.raises(ConfigError, match=r"broken\.yaml line 3: not YAML"):
        load_service_config(broken)


def test_an_empty_file_is_all_defaults(tmp_path):
    """Nothing said is nothing changed."""
    empty = tmp_path / "empty.yaml"
    empty.write_text("")
    assert load_service_config(empty) == ServiceConfig()


def test_the_environment_fills_what_the_file_leaves_open():
    """A setting in the file wins over the variable; without both, the default: everything off."""
    config = service_config({"context_servers": {"rpc": {"local_fastpath": False}}})
    environ = {
        "TLLM_RPC_LOCAL_FASTPATH": "1",
        "TLLM_RPC_SUBMIT_BATCH_MAX": "32",
        "TLLM_RPC_SUBMIT_BATCH_DELAY_MS": "1.5",
    }
    filled = apply_environment(config, environ)
    assert filled.context_servers.rpc.local_fastpath is False
    assert filled.generation_servers.rpc.local_fastpath is True
    assert filled.generation_servers.rpc.submit_batch_max == 32
    assert filled.generation_servers.rpc.submit_batch_delay_ms == 1.5
    plain = apply_environment(config, {}).generation_servers.rpc
    assert (plain.local_fastpath, plain.submit_batch_max, plain.submit_batch_delay_ms) == (False, 1, 0.5)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TLLM_RPC_LOCAL_FASTPATH", "yes"),
        ("TLLM_RPC_LOCAL_FASTPATH", ""),
        ("TLLM_RPC_SUBMIT_BATCH_MAX", "0"),
        ("TLLM_RPC_SUBMIT_BATCH_MAX", "many"),
        ("TLLM_RPC_SUBMIT_BATCH_DELAY_MS", "-1"),
        ("TLLM_RPC_SUBMIT_BATCH_DELAY_MS", "nan"),
    ],
)
def test_a_bad_variable_is_named_with_its_value(name, value):
    """Strict: nothing but the documented values."""
    with pytest.raises(ConfigError) as error:
        apply_environment(ServiceConfig(), {name: value})
    assert error.value.field == name
    assert repr(value) in str(error.value)


def test_a_run_survives_its_file(tmp_path):
    """What the launcher writes is what a rank reads; the key stands in its own file."""
    spec = InstanceSpec(owner_id="ctx-0", role="context", index=0, config=ServiceConfig().context_servers, port=0)
    run = RunSpec(run_id="r", run_dir=str(tmp_path), launcher_pid=1, service=ServiceConfig(), instances=(spec,))
    run.save()
    (tmp_path / "key").write_text("00" * 32)
    again = RunSpec.load(tmp_path)
    assert again == run
    assert again.key() == bytes(32)
    assert again.instance("ctx-0") == spec
    with pytest.raises(ConfigError, match="ctx-9"):
        again.instance("ctx-9")


def test_sections_are_frozen():
    """Read once, changed never."""
    with pytest.raises(AttributeError):
        ServiceConfig().port = 1
    assert msgspec.json.decode(msgspec.json.encode(ServiceConfig()), type=ServiceConfig) == ServiceConfig()


@pytest.mark.parametrize(("given", "names"), [(None, ()), ("a", ("a",)), (["a", "b"], ("a", "b"))])
def test_the_model_may_have_several_names(given: object, names: tuple[str, ...]) -> None:
    """One, several in order, or its own alone."""
    assert service_config({"served_model_name": given}).served_model_names == names


def test_what_the_fields_files_name_once_at_the_top_goes_to_its_place() -> None:
    """The model to the engine, what both roles share to both; the same value in both places is no conflict."""
    config = service_config(
        {
            "model": "smollm2",
            "max_batch_size": 4,
            "kv_cache_config": {"tokens_per_block": 32},
            "hostname": "127.0.0.1",
            "context_servers": {"pipeline_parallel_size": 2, "max_batch_size": 4},
            "generation_servers": {"tensor_parallel_size": 1},
            "conditional_disagg_config": {"max_local_prefill_length": 12},
        }
    )
    assert config.engine.model == "smollm2"
    for section in (config.context_servers, config.generation_servers):
        assert (section.max_batch_size, section.kv_cache_config.tokens_per_block) == (4, 32)
    assert config.context_servers.pipeline_parallel_size == 2
    assert config.conditional_disagg_config.max_local_prefill_length == 12


def test_static_servers_count_by_their_addresses() -> None:
    """They are used as they are given, with or without a scheme, and measure no memory here."""
    config = service_config(
        {
            "key_file": "k",
            "context_servers": {"urls": ["http://10.0.0.1:8101", "10.0.0.2:8101"]},
            "generation_servers": {"kv_cache_config": {"max_tokens": None}},
        }
    )
    spec = InstanceSpec(owner_id="gen-0", role="generation", index=0, config=config.generation_servers, port=0)
    there = InstanceSpec(
        owner_id="gen-1", role="generation", index=1, config=config.generation_servers, port=0, url="http://a:1"
    )
    run = RunSpec(run_id="r", run_dir="/x", launcher_pid=1, service=config, instances=(spec, there))
    assert run.measuring_ranks == spec.config.world_size
    assert config.context_servers.urls == ("http://10.0.0.1:8101", "http://10.0.0.2:8101")
