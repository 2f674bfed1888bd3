"""What can be switched off and on in a trial's service, and how one sees afterwards which it really was (pure).

Evidence decides, not the request: a fast path that found no worker in its process, a batch that never had a second member, an
agreement that was negotiated away show in the modes of a trial's report.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from meta_executor.config import ConfigError, ServiceConfig, service_config

Modes = Mapping[str, Mapping[str, Any]]
Settings = Mapping[str, Any]
ARMS = ("off", "on")


@dataclass(frozen=True)
class Knob:
    """One switch.

    Attributes:
        name: On the command line.
        what: The two arms, in words.
        off, on: Settings of the arms, by the path of their field; ``*`` stands for both roles' sections.
        seen: What a trial's modes show of it.
        expected: What they show when it was really off, and really on.
        drives: Which drives it means something for.
        wants: Settings that both arms need.
    """

    name: str
    what: str
    off: Settings
    on: Settings
    seen: Callable[[Modes], str]
    expected: tuple[str, str]
    drives: tuple[str, ...] = ("front",)
    wants: Settings = field(default_factory=dict)

    def settings(self, arm: str) -> Settings:
        """Of one arm."""
        return {**self.wants, **(self.on if arm == "on" else self.off)}

    def ran_as(self, arm: str, modes: Modes) -> tuple[bool, str]:
        """Whether the arm ran as it was meant to, and what was seen."""
        seen = self.seen(modes)
        return seen == self.expected[arm == "on"], seen


def _fast_path(modes: Modes) -> str:
    local = sum(one["local_submits"] for one in modes.values())
    remote = sum(one["rpc_submits"] for one in modes.values())
    if local and remote:
        return f"{local} submits direct and {remote} by RPC"
    return "direct" if local else "RPC" if remote else "no submits"


def _batch(modes: Modes) -> str:
    return "batches" if any(one["submits_per_call"] > 1.05 for one in modes.values()) else "one by one"


def _agreement(modes: Modes) -> str:
    shown = {
        (bool(one["async_terminal"]), bool(one["async_ready"])) for name, one in modes.items() if name.startswith("ctx")
    }
    if shown == {(True, True)}:
        return "asynchronous"
    return "blocking" if shown == {(False, False)} else f"mixed: {sorted(shown)}"


def _window(modes: Modes) -> str:
    return "/".join(str(one["pre_active_requests"]) for name, one in sorted(modes.items()) if name.startswith("ctx"))


def _bounce(modes: Modes) -> str:
    gathered = sum(one["transfers_coalesced"] for one in modes.values())
    direct = sum(one["transfers_direct"] for one in modes.values())
    return "gathered" if gathered else "direct" if direct else "no transfers"


def _router(modes: Modes) -> str:
    return "/".join(str(one.get("policy")) for name, one in sorted(modes.items()) if name.startswith("gen"))


def _proxy(modes: Modes) -> str:
    inside = {bool(one.get("api_in_rank")) for name, one in modes.items() if name.startswith("gen")}
    return "thread" if inside == {True} else "process" if inside == {False} else "mixed"


_TRANSCEIVER = "context_servers.cache_transceiver_config"
_WINDOWS = (1, 64)
KNOBS = {
    knob.name: knob
    for knob in (
        Knob(
            "fast-path",
            "submits and answers between the API and the worker: RPC, direct",
            {"*.rpc.local_fastpath": False},
            {"*.rpc.local_fastpath": True},
            _fast_path,
            ("RPC", "direct"),
            ("front", "proxy"),
        ),
        Knob(
            "batch",
            "requests per call: 1, up to 64",
            {"*.rpc.submit_batch_max": 1},
            {"*.rpc.submit_batch_max": 64, "*.rpc.submit_batch_delay_ms": 0.5},
            _batch,
            ("one by one", "batches"),
            # A front batches by itself, whatever an instance's own API is configured to do.
            ("proxy",),
        ),
        Knob(
            "agreement",
            "agreement of the context ranks: blocking, asynchronous",
            {
                f"{_TRANSCEIVER}.enable_async_terminal_agreement": False,
                f"{_TRANSCEIVER}.enable_async_readiness_agreement": False,
            },
            {
                f"{_TRANSCEIVER}.enable_async_terminal_agreement": True,
                f"{_TRANSCEIVER}.enable_async_readiness_agreement": True,
            },
            _agreement,
            ("blocking", "asynchronous"),
        ),
        Knob(
            "window",
            f"requests that wait for peer metadata: {_WINDOWS[0]}, {_WINDOWS[1]}",
            {f"{_TRANSCEIVER}.max_num_generation_first_pre_active_requests": _WINDOWS[0]},
            {f"{_TRANSCEIVER}.max_num_generation_first_pre_active_requests": _WINDOWS[1]},
            _window,
            (str(_WINDOWS[0]), str(_WINDOWS[1])),
            wants={"schedule_style": "generation_first"},
        ),
        Knob(
            "bounce",
            "KV transfers: direct, gathered where that pays",
            {"*.cache_transceiver_config.enable_bounce": False},
            {"*.cache_transceiver_config.enable_bounce": True},
            _bounce,
            ("direct", "gathered"),
        ),
        Knob(
            "router",
            "attention-DP rank of a request: in turn, balanced",
            {"generation_servers.router.type": "round_robin"},
            {"generation_servers.router.type": "balanced"},
            _router,
            ("round_robin", "balanced"),
        ),
        Knob(
            "spawn",
            "the generation instance's API: a thread of rank 0, a process",
            {"generation_servers.proxy": "thread"},
            {"generation_servers.proxy": "spawn"},
            _proxy,
            ("thread", "process"),
            ("front", "proxy"),
        ),
    )
}
#: What "all" switches together: a spawned API has no fast path, so it is none of them, and the window is of one schedule only.
_TOGETHER = ("fast-path", "batch", "agreement", "bounce", "router")
#: Of these it is the load that says whether anything happens: gathering is chosen where it pays.
_NOT_JUDGED = ("bounce",)


def knob_of(name: str, drive: str) -> Knob:
    """A knob by its name, or all of a drive together.

    Raises:
        ValueError: There is none of that name, or it means nothing for the drive.
    """
    if name == "all":
        return _all_of([KNOBS[one] for one in _TOGETHER if drive in KNOBS[one].drives])
    if name not in KNOBS:
        raise ValueError(f"{name!r} is no knob; there are {', '.join(KNOBS)} and all")
    knob = KNOBS[name]
    if drive not in knob.drives:
        raise ValueError(f"{name} means nothing with --drive {drive}: it wants {' or '.join(knob.drives)}")
    return knob


def _all_of(knobs: Iterable[Knob]) -> Knob:
    chosen = tuple(knobs)
    judged = tuple(knob for knob in chosen if knob.name not in _NOT_JUDGED)

    def together(place: int) -> str:
        return ", ".join(knob.expected[place] for knob in judged)

    return Knob(
        "all",
        "all off, all on: " + ", ".join(knob.name for knob in chosen),
        {path: value for knob in chosen for path, value in knob.off.items()},
        {path: value for knob in chosen for path, value in knob.on.items()},
        lambda modes: ", ".join(knob.seen(modes) for knob in judged),
        (together(0), together(1)),
        wants={path: value for knob in chosen for path, value in knob.wants.items()},
    )


def with_settings(service: ServiceConfig, settings: Settings) -> ServiceConfig:
    """The service with these fields set.

    Raises:
        ConfigError: There is no such field, or the values do not go together.
    """
    data = msgspec.to_builtins(service)
    for path, value in settings.items():
        first, _, rest = path.partition(".")
        for section in ("context_servers", "generation_servers") if first == "*" else (first,):
            _set(data, [section, *rest.split(".")] if rest else [section], value)
    return service_config(data)


def _set(data: dict[str, Any], path: list[str], value: Any) -> None:
    at = data
    for name in path[:-1]:
        if not isinstance(at.get(name), dict):
            raise ConfigError(".".join(path), f"there is no section {name}")
        at = at[name]
    if path[-1] not in at:
        raise ConfigError(".".join(path), "there is no such field")
    at[path[-1]] = value
