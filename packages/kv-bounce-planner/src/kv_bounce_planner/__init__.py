"""Receiver-owned plans and sessions for KV cache transfer, behind two public faces:

    kv_bounce_planner.planning    layouts, exact plans, tiers, copies, plans in words and pictures; pure, on numpy
    kv_bounce_planner.sessions    Receiver and Sender, their transports and channels, memory that returns by proof only

A planner needs no session and a session no planner. Below the faces, by what it is for:

    layout/       model (pools, instances, block tables), engines (constructors for the field's engines)
    planning/     plan, slices, tier, calibration, report, codec
    copies/       gather (host), threads, _torch, _triton, tiles, choice
    words/        explain, draw
    sessions/     config, events, identity, processes, messages, states, proof, arena, ledgers, reports: the vocabulary
                  receive_core, send_core: step(event, now_s) -> effects; shell, receiver, sender: they perform effects; keeper
    transports/   interface, pacing, _nixl (the one file that imports nixl), _zmq (the one file that imports zmq)
    testing.py    fakes and conformance checks
    _errors.py    one error tree: fail open before the reservation, fail closed after the advertisement
    _reasons.py   stable reason codes

Importing this imports nothing else; every name of both faces can also be asked for here.
"""

import importlib
from typing import TYPE_CHECKING, Any

from kv_bounce_planner.__about__ import __version__ as __version__

if TYPE_CHECKING:
    from kv_bounce_planner.planning import *  # noqa: F403
    from kv_bounce_planner.sessions import *  # noqa: F403


_FACES = ("planning", "sessions")


def __getattr__(name: str) -> Any:
    if name in _FACES:
        return importlib.import_module(f"{__name__}.{name}")
    for each in _FACES:
        face = importlib.import_module(f"{__name__}.{each}")
        if name in dir(face):
            return getattr(face, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    faces = [importlib.import_module(f"{__name__}.{each}") for each in _FACES]
    return sorted({"__version__", *_FACES, *(name for face in faces for name in dir(face))})
