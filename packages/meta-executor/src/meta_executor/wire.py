"""What travels over HTTP between the front and rank 0 of an instance: the only place where both sides' words are defined.

Bodies are msgspec JSON. Unknown fields are ignored when reading, so one side may be newer; a missing or wrong field is a
:class:`msgspec.ValidationError` that names it (HTTP 400). No torch and no MPI are imported here.

======  =======================  ==================================  ===================================================
method  path                     body                                answer
======  =======================  ==================================  ===================================================
POST    /internal/context        :class:`ContextRequest`             :class:`ContextResponse`
POST    /internal/generation     :class:`GenerationRequest`          ``application/x-ndjson`` of :class:`GenerationChunk`
POST    /internal/abort          :class:`AbortRequest`               :class:`AbortResponse`
POST    /internal/drain          :class:`DrainRequest` (may be {})   :class:`DrainResponse`
GET     /internal/statistics                                         :class:`InstanceStatistics`
GET     /server_info                                                 :class:`ServerInfo`
GET     /health                                                      200 :class:`Health` when it can serve, else 503
GET     /debug/routing?limit=n                                       :class:`InstanceRouting` (front: :class:`ServiceRouting`)
======  =======================  ==================================  ===================================================

``/internal/*`` wants the run's key, an instance's ``/debug/routing`` that or an operator's.

Errors are :class:`ErrorBody` with the status of :data:`STATUS_OF`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

#: Version of these messages; ``/server_info`` carries it, a front that speaks another one refuses the instance.
WIRE_VERSION = 3
#: Header with the run's key (hex) on every ``/internal/*`` request.
KEY_HEADER = "x-meta-executor-key"

RequestId = Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
TokenIds = Annotated[list[Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]], msgspec.Meta(min_length=1)]
Generation = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
ScheduleStyle = Literal["context_first", "generation_first"]
FinishReason = Literal["stop", "length", "cancelled", "error"]

# -- error codes ------------------------------------------------------------------------------------------------------

INVALID_REQUEST = "INVALID_REQUEST"
UNAUTHORIZED = "UNAUTHORIZED"
STALE_GENERATION = "STALE_GENERATION"
DUPLICATE_REQUEST = "DUPLICATE_REQUEST"
BACKPRESSURE = "BACKPRESSURE"
CANCELLED = "CANCELLED"
TRANSFER_FAILED = "TRANSFER_FAILED"
ENGINE_FAILED = "ENGINE_FAILED"
DEADLINE = "DEADLINE"
DRAINING = "DRAINING"
#: Every rank was ready for it, and it was not scheduled in time. Nothing was computed; it may be sent again.
LEASE_EXPIRED = "LEASE_EXPIRED"
INTERNAL = "INTERNAL"
#: What STALE_GENERATION names as its field where the context instance that a request needs is another.
CONTEXT_GENERATION = "context.endpoint_generation"

#: HTTP status of each error code. 4xx were refused before any memory was touched.
STATUS_OF: dict[str, int] = {
    INVALID_REQUEST: 400,
    UNAUTHORIZED: 401,
    STALE_GENERATION: 409,
    DUPLICATE_REQUEST: 409,
    BACKPRESSURE: 429,
    CANCELLED: 499,
    DRAINING: 503,
    LEASE_EXPIRED: 503,
    DEADLINE: 504,
    TRANSFER_FAILED: 502,
    ENGINE_FAILED: 500,
    INTERNAL: 500,
}


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """Body of every answer that is not 2xx; also the ``error`` of a generation stream's last line."""

    #: One of the codes above.
    error: str
    message: str
    #: The field at fault, in ``a.b`` notation, for INVALID_REQUEST and STALE_GENERATION.
    field: str | None = None
    #: The live generation, for STALE_GENERATION.
    endpoint_generation: str | None = None
    request_id: int | None = None


#: Likeliest tokens that can be told of one place of an answer (count).
LOGPROBS_MAX = 20


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log probabilities of one place of an answer or a prompt, by the model's own logits (natural logarithm).

    Attributes:
        logprob: Of the token that is there.
        top: The likeliest (token, log probability), largest first.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are chosen. Randomness is a function of (seed, position), so a request moves between instances unchanged."""

    #: Tokens of the answer, the first included (count).
    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
    temperature: Annotated[float, msgspec.Meta(ge=0, le=100)] = 0.0
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] = 0
    ignore_eos: bool = False
    stop_token_ids: list[int] = []
    #: See :class:`meta_executor.engine.base.SamplingParams`.
    top_k: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] = 0
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    min_tokens: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] = 0
    presence_penalty: Annotated[float, msgspec.Meta(ge=-100, le=100)] = 0.0
    frequency_penalty: Annotated[float, msgspec.Meta(ge=-100, le=100)] = 0.0
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0, le=100)] = 1.0
    logit_bias: list[tuple[Annotated[int, msgspec.Meta(ge=0)], Annotated[float, msgspec.Meta(ge=-1000, le=1000)]]] = []
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=LOGPROBS_MAX)] | None = None
    prompt_logprobs: Annotated[int, msgspec.Meta(ge=0, le=LOGPROBS_MAX)] | None = None


class PeerContext(msgspec.Struct, frozen=True, kw_only=True):
    """The context instance that a generation instance pulls from: copied from its ``/server_info`` by the front."""

    instance_id: str
    endpoint_generation: Generation
    #: Authenticated control endpoint of each context rank, in rank order.
    control_addresses: list[str]
    #: The same URL that the front dispatches to; the generation instance fetches layouts from it once per generation.
    url: str


class ContextRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Prefill one prompt and hold its KV for the generation instance that will pull it."""

    request_id: RequestId
    token_ids: TokenIds
    sampling: Sampling
    schedule_style: ScheduleStyle = "context_first"
    #: Seconds from now after which the request is of no use.
    deadline_s: Annotated[float, msgspec.Meta(gt=0)] | None = None
    #: Generation of this context instance that the front chose; another one is refused (409) before memory is touched.
    endpoint_generation: Generation
    conversation_id: str | None = None
    #: Cached prefixes are shared among requests with the same one.
    cache_salt: Annotated[str, msgspec.Meta(max_length=64)] = ""


class ContextResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The prompt is computed and its first token known.

    ``finish_reason`` is set when the first token already ends the answer (stop token, or ``max_tokens`` 1): then there is no
    generation leg in the context-first schedule. The front need not tell the context instance; its KV is freed at once.
    """

    request_id: int
    first_token: int
    finish_reason: FinishReason | None
    prompt_tokens: int
    cached_tokens: int
    endpoint_generation: str
    #: Of the first token, where the request asks for them.
    logprobs: tuple[TokenLogprobs, ...] = ()
    #: Of the prompt's tokens behind the first, where the request asks for them.
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Pull the KV of one prompt from a context instance and generate.

    Without ``context`` the prompt is computed here: ``first_token`` is None and the stream holds all tokens.

    Context-first: ``first_token`` is the one that the context instance answered; the stream holds the tokens after it.
    Generation-first: ``first_token`` is None; the stream holds all tokens, the first one included. It is then sent while the
    context leg runs; read the stream in a task of its own, because its first line comes only after the transfer.
    """

    request_id: RequestId
    token_ids: TokenIds
    sampling: Sampling
    first_token: int | None = None
    context: PeerContext | None
    schedule_style: ScheduleStyle = "context_first"
    deadline_s: Annotated[float, msgspec.Meta(gt=0)] | None = None
    #: Generation of this generation instance that the front chose.
    endpoint_generation: Generation
    conversation_id: str | None = None
    #: Cached prefixes are shared among requests with the same one.
    cache_salt: Annotated[str, msgspec.Meta(max_length=64)] = ""


class GenerationChunk(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of a generation stream: what one hand-over brought. The last line, and only it, has a ``finish_reason``.

    ``finish_reason`` "stop": the last token is a stop token (or EOS), which is included in ``tokens``; the front drops it
    from the text. The usage's completion tokens are the count of all tokens, the first one included.
    """

    tokens: list[int] = []
    finish_reason: FinishReason | None = None
    error: ErrorBody | None = None
    #: Attention-DP rank that generates this request; on the first line.
    rank: int | None = None
    #: Of ``tokens`` in order, where the request asks for them; the context instance alone tells those of the first token.
    logprobs: tuple[TokenLogprobs, ...] = ()
    #: Of the prompt, found in the prefix cache here; with the first token, where the prompt is computed here.
    cached_tokens: int = 0
    #: Of the prompt's tokens behind the first, where the request asks for them; likewise.
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


class AbortRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Stop a request: a client went away, a stop string was met, a sibling leg failed. Unknown ids are not an error."""

    request_id: RequestId
    reason: str = "cancelled"


class AbortResponse(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the request was known here and not yet finished."""

    request_id: int
    known: bool


class DrainRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Stop admitting, finish or cancel what runs, prove that nothing is open, then leave."""

    deadline_s: Annotated[float, msgspec.Meta(gt=0)] | None = None


class DrainResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The drain has begun."""

    draining: bool
    active: int


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """``status`` "ok" with HTTP 200 means: this instance can serve a request now."""

    status: Literal["ok", "starting", "draining", "failed"]
    role: str
    endpoint_generation: str | None = None
    detail: str | None = None


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What one request may ask of this instance."""

    #: Prompt and answer together (tokens).
    max_seq_len: int
    #: Capacity of one rank's KV pool (tokens).
    kv_tokens: int
    max_batch_size: int
    max_num_tokens: int
    max_queue_size: int
    #: Metadata-only window of the generation-first schedule (requests).
    pre_active_requests: int


class ServerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The endpoint record of an instance. ``ready`` false: there is no endpoint yet, or not any more; the rest may be empty."""

    wire_version: int = WIRE_VERSION
    ready: bool
    #: State of the owner's machine: NEW, ESTIMATING, ESTIMATED, FINAL, PUBLISHED, DRAINING, RETIRED, FAILED.
    state: str
    role: str
    owner_id: str
    instance_id: str
    generation: str | None = None
    world_size: int = 1
    pipeline_parallel_size: int = 1
    attention_dp_size: int = 1
    control_addresses: list[str] = []
    #: Where rank 0 takes requests and streams answers (RPC); a front uses it instead of ``/internal/*``.
    service_address: str = ""
    #: Per rank "host/pid/start": which process it is, on which host since when; peers on that host can see its end.
    processes: tuple[str, ...] = ()
    model: str = ""
    vocab_size: int = 0
    eos_token_ids: list[int] = []
    limits: Limits | None = None
    #: ``kv_bounce_planner.InstanceLayout`` as JSON; peers plan with it.
    layout: dict[str, Any] | None = None
    #: Fingerprint of what must agree between peers (hex): layers, heads, head size, element type.
    profile: str = ""
    schedule_styles: tuple[str, ...] = ("context_first", "generation_first")


class RankStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counters of one rank since start; all only grow, except the ones named ``*_now``."""

    rank: int
    #: Steps that the engine took (count).
    steps: int = 0
    #: Tokens in them, of prompts and of answers (count).
    tokens_computed: int = 0
    #: Requests that this rank was told of (count).
    requests_taken: int = 0
    #: Of them, those that have ended, however (count).
    requests_finished: int = 0
    #: Requests that this rank holds and that have not ended (count).
    active_now: int = 0
    #: KV blocks that requests or kept prefixes hold (count).
    kv_blocks_used_now: int = 0
    #: KV blocks of the pool (count).
    kv_blocks_total: int = 0
    #: KV memory that is withheld because a peer may still write to it (bytes).
    quarantined_bytes_now: int = 0
    #: Peer ranks whose control link is away (count).
    links_away_now: int = 0
    #: Requests that the agreement of the ranks was opened for (count).
    agreement_opened: int = 0
    #: Of them, those that are decided on this rank (count).
    agreement_decided: int = 0
    #: Times that this rank said that it is ready for a request (count).
    ready_votes: int = 0
    #: Times that it heard that all ranks are ready, and may grant its lease (count).
    ready_prepares: int = 0
    #: Requests that this rank has activated (count).
    ready_activations: int = 0
    #: Of them, those that all ranks are known to have activated (count).
    ready_completions: int = 0
    #: Requests that every rank was ready for and that were given up because they were not scheduled in time.
    leases_expired: int = 0
    #: Over all activations in their order: equal on ranks that activated the same.
    activation_digest: str = ""
    #: Transfers gathered into one write (bounce, count).
    transfers_coalesced: int = 0
    #: Transfers written in place, fragment by fragment (count).
    transfers_direct: int = 0
    #: Transfers whose fragments lay side by side and were written as few (count).
    transfers_merged: int = 0
    #: KV that this rank has written to peers (bytes).
    bytes_sent: int = 0
    #: KV that peers have written to this rank (bytes).
    bytes_received: int = 0
    #: Why a transfer took its tier: reason code to count.
    tier_reasons: dict[str, int] = {}
    #: Tokens of prompts that were found in the prefix cache (count).
    prefix_hit_tokens: int = 0
    #: Prompts that a generation rank computed itself (count).
    prompts_computed: int = 0
    #: Iterations of the loop (count): while one runs, nothing else of the rank does.
    turns: int = 0
    #: Of them, those that took longer than 1 ms (count).
    turns_over_1ms: int = 0
    #: Of them, those that took longer than 2 ms (count).
    turns_over_2ms: int = 0
    #: Of them, those that took longer than 5 ms (count).
    turns_over_5ms: int = 0
    #: Of them, those that took longer than 10 ms (count).
    turns_over_10ms: int = 0
    #: Of them, those that took longer than 20 ms (count).
    turns_over_20ms: int = 0
    #: Of them, those that took longer than 50 ms (count).
    turns_over_50ms: int = 0
    #: Of them, those that took the processor longer than 1 ms: without waits for a core or another thread (count).
    turns_worked_over_1ms: int = 0
    #: Of them, those that took the processor longer than 2 ms: without waits for a core or another thread (count).
    turns_worked_over_2ms: int = 0
    #: Of them, those that took the processor longer than 5 ms: without waits for a core or another thread (count).
    turns_worked_over_5ms: int = 0
    #: Of them, those that took the processor longer than 10 ms: without waits for a core or another thread (count).
    turns_worked_over_10ms: int = 0
    #: Of them, those that took the processor longer than 20 ms: without waits for a core or another thread (count).
    turns_worked_over_20ms: int = 0
    #: Of them, those that took the processor longer than 50 ms: without waits for a core or another thread (count).
    turns_worked_over_50ms: int = 0


class InstanceStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """What happened where."""

    role: str
    owner_id: str
    instance_id: str
    generation: str | None
    #: Since the instance's start (s).
    uptime_s: float
    ranks: list[RankStatistics]
    #: Requests submitted on the in-process path (count).
    local_submits: int = 0
    #: Requests submitted over the RPC (count).
    rpc_submits: int = 0
    #: Calls that carried them (batches).
    submit_calls: int = 0
    #: Requests routed to each attention-DP rank.
    routed_per_rank: list[int] = []
    #: Requests between submission and last answer (count).
    requests_live_now: int = 0
    #: Of them, those that wait for admission (count).
    requests_waiting_now: int = 0
    #: Requests that ended well (count).
    requests_ok: int = 0
    #: Requests that failed (count).
    requests_failed: int = 0
    #: Requests that were cancelled (count).
    requests_cancelled: int = 0
    #: Tokens of answers that were handed out (count).
    tokens_returned: int = 0
    #: Half of the last steps took at most so long (ms).
    step_p50_ms: float = 0.0
    #: All but one in a hundred of them took at most so long (ms).
    step_p99_ms: float = 0.0


#: Decisions that one answer shows when it is not told how many, and at most (count).
ROUTING_SHOWN_DEFAULT = 64
ROUTING_SHOWN_MAX = 256


class RoutingDecision(msgspec.Struct, frozen=True, kw_only=True):
    """Why one request went where it did inside an instance, with what was known at that moment."""

    request_id: int
    #: Target rank; -1: all ranks of the instance.
    rank: int
    why: str
    #: Tokens of its prompt (count).
    tokens: int
    #: On the target before it (count).
    load_tokens: int = 0
    load_requests: int = 0
    #: From its arrival to this decision, and what it last had to wait for ("": nothing held it back).
    waited_ms: float = 0.0
    waited_for: str = ""
    #: Since the decision, when this answer was made (s).
    age_s: float = 0.0


class InstanceRouting(msgspec.Struct, frozen=True, kw_only=True):
    """The newest decisions of an instance, oldest first."""

    role: str
    owner_id: str
    policy: str
    #: Since start (count); more than are shown when the older ones were dropped.
    decided: int
    decisions: list[RoutingDecision]


class LegDecision(msgspec.Struct, frozen=True, kw_only=True):
    """Which instance the front chose for one leg of a request, and why."""

    request_id: int
    #: Leg: ``context`` or ``generation``.
    role: str
    owner_id: str
    why: str
    #: What the leg adds to the instance's load (tokens), and the load before it.
    weight: int
    load_weight: int
    load_requests: int
    age_s: float = 0.0


class ServiceRouting(msgspec.Struct, frozen=True, kw_only=True):
    """The front's newest decisions, oldest first, and every instance's; ``unknown``: instance to why it could not be asked."""

    policy: str
    decided: int
    decisions: list[LegDecision]
    instances: list[InstanceRouting]
    unknown: dict[str, str] = {}


def encode_json(value: Any) -> bytes:
    """JSON of one of the types above (bytes, UTF-8)."""
    return msgspec.json.encode(value)


def decode_chunk(line: bytes) -> GenerationChunk:
    """One line of a generation stream.

    Raises:
        msgspec.ValidationError: The line is not one.
    """
    return _CHUNK.decode(line)


_CHUNK = msgspec.json.Decoder(GenerationChunk)
