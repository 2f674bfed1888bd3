"""Malformed frames: the decoder refuses, or the core stops with a diagnosis; never an exception, never a wrong decision."""

# ruff: noqa: T201, S311, PT
from __future__ import annotations

import argparse
import collections
import random
import sys
import time

from pp_agreement import AgreementConfig, AgreementCore, Disposition, Domain, Key, Outcome, Reason, RemoteProtocolError
from pp_agreement import _events as ev
from pp_agreement._codec import Codec
from pp_agreement._events import Frame
from pp_agreement._state import Kind
from pp_agreement.testing import mutate

KINDS = [int(k) for k in Kind]


def fresh(rank: int) -> AgreementCore:
    """A core with three rounds in different states."""
    core = AgreementCore(Domain(1, (0, 1, 2)), rank, AgreementConfig(credits=4, story_entries_max=4))
    for number in (1, 2, 3):
        core.step(ev.RequestAdmitted(number, number, number != 2), 0.0)
    core.step(ev.ReadyPublished(Key(1, 1)), 0.0)
    core.step(ev.TerminalVoted(Key(2, 2), Outcome.COMPLETED, Disposition.RELEASE, Reason.NONE), 0.0)
    return core


def record(draw: random.Random) -> tuple[int, int, int, int, int, int, int]:
    """A record that is often nearly right."""
    kind = draw.choice(KINDS) if draw.random() < 0.95 else draw.randrange(256)
    return (
        kind, draw.choice((0, 0, 0, 1, 2, 3, 255)), draw.choice((0, 0, 0, 1, 2)), draw.choice((0, 0, 7, 200)),
        draw.choice((0, 0, 0, 1, 2**32 - 1)), draw.choice((1, 2, 3, 4, 0, 2**64 - 1)), draw.choice((1, 2, 3, 4, 7, 8, 0)),
    )  # fmt: skip


def main() -> int:
    """Exit code 0: everything failed closed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    draw = random.Random(options.seed)
    domain = Domain(1, (0, 1, 2))
    codecs = [Codec(domain, r, 4096) for r in range(3)]
    counts: collections.Counter[str] = collections.Counter()
    began_s = time.monotonic()
    whole = [fresh(r) for r in range(3)]
    cores = [core.copy() for core in whole]
    for number in range(options.count):
        rank = draw.randrange(3)
        core = cores[rank]
        source = draw.choice(core.peers)
        good = codecs[source].encode(
            rank, Frame(core.streams.expected[source], 0, tuple(record(draw) for _ in range(draw.randrange(4))))
        )
        data = mutate(draw, good) if draw.random() < 0.6 else good
        try:
            event: ev.Input = ev.FrameReceived(source, codecs[rank].decode(source, data))
            counts["well-formed"] += 1
        except RemoteProtocolError as error:
            event = ev.FrameRejected(source, str(error))
            counts["no frame"] += 1
        core.step(event, 0.0)
        if core.fault is not None:
            if not core.fault.detail:
                print(f"frame {number} of seed {options.seed}: a fault without a diagnosis")
                return 1
            counts[f"stopped: {core.fault.code.name}"] += 1
            core.validate()
            cores[rank] = whole[rank].copy()
        elif number % 64 == 0:
            core.validate()
    print(", ".join(f"{name} {value}" for name, value in sorted(counts.items())))
    print(f"{options.count} frames, seed {options.seed}: all failed closed in {time.monotonic() - began_s:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
