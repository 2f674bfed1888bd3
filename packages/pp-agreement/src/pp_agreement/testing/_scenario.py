"""Scenario files: a protocol test as text, with its expected output in the file, reviewed as a diff.

A scenario is blocks of one command line (``> command``) and the output that it must print. ``rewrite`` regenerates the
output of a file that was edited. Every command is followed by ``validate()`` on every rank.

Commands (``@RANKS`` is ``*``, ``0,2`` or ``1``; K is ``incarnation`` or ``incarnation.attempt``)::

    world ranks=4 credits=8 coordinator=3 scheduler=0 window=4 frames=64 lease=- round=- doubt=30 quarantine=64
          startup=5 bytes=16384 groups=2,2 (their sizes; the first rank of each leads it)
    admit REQUEST INCARNATION [terminal] @RANKS       publish K @RANKS            withdraw K [REASON] @RANKS
    ack K @RANKS        abortack K @RANKS             activate K,K @RANKS         revoke K [REASON] @RANKS
    recall K @RANKS     vote K OUTCOME [QUARANTINE] [REASON] @RANKS               doubt K @RANKS
    busy SECONDS @RANKS poll @RANKS [times]           settle                      advance SECONDS
    hold A B            release A B                   refuse A B                  break A B
    kill R              fail [TEXT] @R                restart R
    drain N @RANKS              report @RANKS
    close [alone] @RANKS                              abandon @R
    inject A B KIND [field=value] raw A B what        replay A B
    state K @RANKS      queue                         closing
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from pathlib import Path

from pp_agreement import _events as ev
from pp_agreement._agreement import Agreement
from pp_agreement._codec import Codec
from pp_agreement._config import AgreementConfig, Domain
from pp_agreement._errors import DomainStopped, LocalProtocolError, WouldBlock
from pp_agreement._events import Disposition, Frame, Key, Outcome, Reason
from pp_agreement._group_agreement import GroupAgreement
from pp_agreement._groups import Groups
from pp_agreement._inprocess import InProcessNetwork
from pp_agreement._lanes import Lanes
from pp_agreement._state import Kind

_STEP_S = 0.01


class ScenarioMismatch(AssertionError):
    """A scenario printed something else; the message is a readable comparison."""


class Scenario:
    """Interprets commands over real agreements on an in-process network with a clock of its own."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.requests: dict[int, int] = {}
        self.agreements: dict[int, Agreement] = {}
        self._world({})

    def _world(self, options: dict[str, str]) -> list[str]:
        def number(name: str, default: float | None) -> float | None:
            text = options.get(name)
            return default if text is None else (None if text == "-" else float(text))

        ranks = tuple(range(int(options.get("ranks", "4"))))
        self.domain = Domain(
            1,
            ranks,
            scheduling_rank=int(options["scheduler"]) if "scheduler" in options else None,
            coordinator_rank=int(options["coordinator"]) if "coordinator" in options else None,
        )
        self.config = AgreementConfig(
            credits=int(options.get("credits", "8")),
            frames_per_poll_max=int(options.get("frames", "64")),
            frame_bytes_max=int(options.get("bytes", "16384")),
            heartbeat_s=1.0,
            silence_s=5.0,
            startup_s=number("startup", 5.0) or 5.0,
            round_timeout_s=number("round", None),
            lease_timeout_s=number("lease", None),
            doubt_deadline_s=number("doubt", 30.0) or 0.0,
            quarantine_rounds_max=int(options.get("quarantine", "64")),
        )
        self.network = InProcessNetwork(self.domain, window=int(options.get("window", "4")), clock=lambda: self.now_s)
        sizes = [int(size) for size in options["groups"].split(",")] if "groups" in options else []
        self.groups = self._groups(sizes) if sizes else None
        self.agreements = {rank: self._agreement(rank) for rank in ranks}
        for agreement in self.agreements.values():
            agreement.open()
        self.requests = {}
        self.silent: set[int] = set()
        return []

    def _groups(self, sizes: list[int]) -> Groups:
        ends = list(accumulate(sizes))
        rows = [self.domain.ranks[end - size : end] for size, end in zip(sizes, ends)]
        return Groups(1, tuple(rows), self.domain.scheduling_rank, rows[-1][0])

    def _agreement(self, rank: int) -> Agreement:
        transport = self.network.transport(rank)
        if self.groups is None:
            return Agreement(self.domain, rank, transport, self.config, lambda: self.now_s)
        lanes = Lanes(transport, self.domain, rank, self.groups.domains(rank), window=self.network.window // 2)
        return GroupAgreement(self.groups, rank, lanes.transport, self.config, lambda: self.now_s)

    def run(self, line: str) -> list[str]:
        """Output lines of one command."""
        words = line.split()
        ranks: list[int] = []
        rest: list[str] = []
        for word in words[1:]:
            if word.startswith("@"):
                ranks = list(self.domain.ranks) if word == "@*" else [int(r) for r in word[1:].split(",")]
            else:
                rest.append(word)
        name = words[0]
        if name == "world":
            return self._world(dict(word.split("=", 1) for word in rest))
        handler = getattr(self, f"_do_{name}", None)
        if handler is None:
            raise ValueError(f"no such command: {line}")
        out: list[str] = []
        if ranks and name not in ("poll",):
            for rank in ranks:
                out.extend(self._guard(rank, handler, rest))
        else:
            out.extend(handler(rest, ranks) if name in ("poll", "settle") else handler(rest))
        for agreement in self.agreements.values():
            agreement.validate()
        return out

    def _guard(self, rank: int, handler: object, rest: list[str]) -> list[str]:
        try:
            lines: list[str] = handler(rank, rest)  # type: ignore[operator]
        except (LocalProtocolError, DomainStopped, WouldBlock) as error:
            return [f"{rank}: {type(error).__name__}: {str(error).splitlines()[0]}"]
        return [f"{rank}: {line}" for line in lines]

    def _key(self, text: str) -> Key:
        incarnation, _, attempt = text.partition(".")
        return Key(self.requests.get(int(incarnation), 0), int(incarnation), int(attempt or 0))

    # -- local calls -----------------------------------------------------------------------------------------------------

    def _do_admit(self, rank: int, rest: list[str]) -> list[str]:
        request_id, incarnation = int(rest[0]), int(rest[1])
        self.requests[incarnation] = request_id
        key = self.agreements[rank].admit(request_id, incarnation, ready="terminal" not in rest)
        return [] if key.attempt == 0 else [f"attempt {key.attempt}"]

    def _do_publish(self, rank: int, rest: list[str]) -> list[str]:
        result = self.agreements[rank].publish_ready(self._key(rest[0]))
        return [] if result == 0 else [result.name]

    def _do_withdraw(self, rank: int, rest: list[str]) -> list[str]:
        reason = Reason[rest[1]] if len(rest) > 1 else Reason.CANCELLED
        return [self.agreements[rank].withdraw(self._key(rest[0]), reason).name]

    def _do_ack(self, rank: int, rest: list[str]) -> list[str]:
        return [] if self.agreements[rank].acknowledge_prepare(self._key(rest[0])) else ["too late"]

    def _do_abortack(self, rank: int, rest: list[str]) -> list[str]:
        self.agreements[rank].acknowledge_abort(self._key(rest[0]))
        return []

    def _do_activate(self, rank: int, rest: list[str]) -> list[str]:
        self.agreements[rank].activate([self._key(k) for k in rest[0].split(",")])
        return []

    def _do_revoke(self, rank: int, rest: list[str]) -> list[str]:
        reason = Reason[rest[1]] if len(rest) > 1 else Reason.CANCELLED
        return [self.agreements[rank].revoke(self._key(rest[0]), reason).name]

    def _do_recall(self, rank: int, rest: list[str]) -> list[str]:
        return [str(self.agreements[rank].recall(self._key(rest[0])))]

    def _do_vote(self, rank: int, rest: list[str]) -> list[str]:
        disposition = Disposition.QUARANTINE if "QUARANTINE" in rest else Disposition.RELEASE
        reasons = [Reason[w] for w in rest[2:] if w in Reason.__members__]
        fresh = self.agreements[rank].vote_terminal(
            self._key(rest[0]), Outcome[rest[1]], disposition, reasons[0] if reasons else Reason.NONE
        )
        return [] if fresh else ["again"]

    def _do_doubt(self, rank: int, rest: list[str]) -> list[str]:
        return [] if self.agreements[rank].doubt(self._key(rest[0])) else ["again"]

    def _do_busy(self, rank: int, rest: list[str]) -> list[str]:
        return [] if self.agreements[rank].busy(float(rest[0])) else ["waits"]

    def _do_fail(self, rank: int, rest: list[str]) -> list[str]:
        self.agreements[rank].fail(" ".join(rest) or "the host says so")
        return []

    def _do_restart(self, rest: list[str]) -> list[str]:
        """Another life of a rank, under the same epoch and over the same links."""
        rank = int(rest[0])
        self.agreements[rank] = self._agreement(rank)
        self.agreements[rank].open()
        return []

    def _do_drain(self, rank: int, rest: list[str]) -> list[str]:
        self.agreements[rank].start_drain(int(rest[0]))
        return []

    def _do_report(self, rank: int, _rest: list[str]) -> list[str]:
        report = self.agreements[rank].drain_state()
        undecided = ",".join(f"{k.incarnation}.{k.attempt}" for k in report.undecided)
        return [
            f"drained={report.drained} last={report.last_incarnation} admitted={report.admitted} "
            f"committed={report.committed} closed={report.closed} undecided=[{undecided}] "
            f"missing={list(report.missing_ranks)} fault={report.fault.code.name if report.fault else None}"
        ]

    def _do_state(self, rank: int, rest: list[str]) -> list[str]:
        state = self.agreements[rank].state(self._key(rest[0]))
        if state is None:
            return ["not open"]
        return [f"{state.ready.name} {state.terminal.name} attempt {state.attempt}{'' if state.heard else ' unheard'}"]

    def _do_close(self, rank: int, rest: list[str]) -> list[str]:
        """The others close as well when they can; ``alone``: they only go on."""

        def turn(_duration_s: float) -> None:
            self.now_s += _STEP_S
            for other in self.agreements.values():
                if other is not self.agreements[rank] and not other._ended:
                    if self.groups is not None and "alone" not in rest and other._core.drained:
                        other.close(0.0, lambda _s: None)
                    elif (
                        "alone" not in rest
                        and other._core.drained
                        and other._core.fault is None
                        and not other._core.ending.closing
                    ):
                        other._step(other._core.ending.close, (), other._clock())
                    if not other._ended:
                        other.poll()

        clean = self.agreements[rank].close(2.0, turn)
        if clean:
            return ["closed"]
        return ["left unclean" if self.agreements[rank]._ended else "not everybody has closed"]

    def _do_abandon(self, rank: int, _rest: list[str]) -> list[str]:
        self.agreements[rank].abandon()
        return []

    # -- the world --------------------------------------------------------------------------------------------------------

    def _do_poll(self, rest: list[str], ranks: Iterable[int]) -> list[str]:
        out: list[str] = []
        for _ in range(int(rest[0]) if rest else 1):
            self.now_s += _STEP_S
            for rank in [r for r in ranks if not self.agreements[r]._ended]:
                out.extend(f"{rank}: {tell(event)}" for event in self.agreements[rank].poll())
        return out

    def _do_settle(self, rest: list[str], _ranks: Iterable[int]) -> list[str]:
        out: list[str] = []
        for _ in range(8):
            out.extend(self._do_poll([], [r for r in self.domain.ranks if r not in self.silent]))
        return out

    def _do_advance(self, rest: list[str]) -> list[str]:
        self.now_s += float(rest[0])
        return []

    def _do_stop(self, rest: list[str]) -> list[str]:
        self.silent.add(int(rest[0]))
        return []

    def _do_cont(self, rest: list[str]) -> list[str]:
        self.silent.discard(int(rest[0]))
        return []

    def _do_hold(self, rest: list[str]) -> list[str]:
        self.network.hold(int(rest[0]), int(rest[1]))
        return []

    def _do_release(self, rest: list[str]) -> list[str]:
        self.network.release(int(rest[0]), int(rest[1]))
        return []

    def _do_refuse(self, rest: list[str]) -> list[str]:
        self.network.refuse(int(rest[0]), int(rest[1]))
        return []

    def _do_break(self, rest: list[str]) -> list[str]:
        self.network.break_link(int(rest[0]), int(rest[1]))
        return []

    def _do_kill(self, rest: list[str]) -> list[str]:
        self.network.kill(int(rest[0]), "SIGKILL")
        self.silent.add(int(rest[0]))
        return []

    def _do_replay(self, rest: list[str]) -> list[str]:
        return [] if self.network.replay(int(rest[0]), int(rest[1])) else ["nothing to replay"]

    def _do_inject(self, rest: list[str]) -> list[str]:
        """A record that the sender's core would never send, in a frame that is right in every other way."""
        source, target, kind = int(rest[0]), int(rest[1]), rest[2]
        fields = dict(word.split("=") for word in rest[3:])
        sequence = int(
            fields.get("sequence", self.agreements[source]._core.streams.next_sequence[self.domain.index_of(target)])
        )
        if "sequence" not in fields:
            self.agreements[source]._core.streams.next_sequence[self.domain.index_of(target)] += 1
        incarnation = int(fields.get("incarnation", "1"))
        record = (
            int(Kind[kind]) if kind in Kind.__members__ else int(kind),
            int(fields.get("outcome", "0")),
            int(fields.get("disposition", "0")),
            int(fields.get("reason", "0")),
            int(fields.get("attempt", "0")),
            int(fields.get("request", self.requests.get(incarnation, 0))),
            incarnation,
        )
        codec = Codec(self.domain, source, self.config.frame_bytes_max)
        frame = codec.encode(
            self.domain.index_of(target), Frame(sequence, 0, (record,), self.agreements[source]._core.context.session)
        )
        self.network.inject(source, target, frame)
        return []

    def _do_raw(self, rest: list[str]) -> list[str]:
        """A frame that is none: empty, short, version, checksum, domain, epoch, source, target, count, padding."""
        source, target, what = int(rest[0]), int(rest[1]), rest[2]
        domain = self.domain
        if what == "domain":
            domain = Domain(2, self.domain.ranks)
        elif what == "epoch":
            domain = Domain(1, self.domain.ranks, epoch=1)
        sender = source if what != "source" else next(r for r in self.domain.ranks if r not in (source, target))
        reader = target if what != "target" else next(r for r in self.domain.ranks if r not in (source, target))
        sequence = self.agreements[source]._core.streams.next_sequence[self.domain.index_of(target)]
        record = (int(Kind.TERMINAL), 0, 0, 0, 0, self.requests.get(1, 0), 1)
        codec = Codec(domain, sender, self.config.frame_bytes_max)
        data = bytearray(
            codec.encode(
                self.domain.index_of(reader),
                Frame(sequence, 0, (record,), self.agreements[source]._core.context.session),
            )
        )
        if what == "empty":
            data = bytearray()
        elif what == "short":
            del data[-1:]
        elif what == "version":
            data[4] = 0
        elif what == "checksum":
            data[-1] ^= 1
        elif what == "count":
            data[6] += 1
        elif what == "padding":
            data += b"\0"
        self.network.inject(source, target, bytes(data))
        return []

    def _do_queue(self, _rest: list[str]) -> list[str]:
        """What waits to be sent, and what is on its way."""
        out = []
        for rank, agreement in self.agreements.items():
            core = agreement._core
            waiting = [Kind(r[0]).name for r in core.streams.intents.values()]
            if waiting:
                out.append(f"{rank}: unsent {' '.join(waiting)}")
            for peer, queue in core.streams.queues.items():
                if queue:
                    out.append(
                        f"{rank}: unsent to {self.domain.ranks[peer]}: {' '.join(Kind(r[0]).name for r in queue)}"
                    )
        for (a, b), frames in self.network.links.items():
            if frames:
                out.append(f"{self.domain.ranks[a]} -> {self.domain.ranks[b]}: {len(frames)} frames")
        return out

    def _do_counts(self, rest: list[str]) -> list[str]:
        """Counters of one rank."""
        core = self.agreements[int(rest[0])]._core
        return [
            f"stale {core.rounds.stale}, duplicates {core.streams.duplicates}, ignored {core.ignored}, "
            f"open {core.rounds.open_count}, frames sent {core.streams.frames_sent}"
        ]

    def _do_digests(self, _rest: list[str]) -> list[str]:
        """Whether all ranks hold the same digests."""
        finals = {a._core.member.digest for a in self.agreements.values()}
        activations = {a._core.member.activation_digest for a in self.agreements.values()}
        return [
            f"finals {'equal' if len(finals) == 1 else 'differ'}, activations {'equal' if len(activations) == 1 else 'differ'}"
        ]


def tell(event: ev.AgreementEvent) -> str:
    """One event in one line, without what varies."""
    name = type(event).__name__
    key = getattr(event, "key", None)
    if isinstance(event, ev.Fault):
        return f"Fault {event.code.name}: {event.detail}"
    where = "" if key is None else f" {key.incarnation}.{key.attempt} (request {key.request_id})"
    if isinstance(event, ev.Committed):
        reasons = [r.name for r in event.reasons]
        told = f" reasons {' '.join(reasons)}" if any(event.reasons) else ""
        return f"{name}{where} {event.outcome.name} {event.disposition.name}{told}"
    if isinstance(event, ev.Finalized):
        return f"{name}{where} {event.mode.name} {event.reason.name}"
    if isinstance(event, (ev.Aborted, ev.Revoked)):
        return f"{name}{where} {event.reason.name}"
    if isinstance(event, ev.Advice):
        return f"{name}{where} {event.kind.name} of rank {event.source_rank} {event.reason.name}"
    if isinstance(event, ev.SilenceVerdict):
        return f"{name} rank {event.suspect_rank}, observed by {event.observer_rank}"
    if isinstance(event, ev.SilenceEnded):
        return f"{name} rank {event.suspect_rank}, observed by {event.observer_rank}"
    if isinstance(event, ev.DeathVerdict):
        return f"{name} rank {event.suspect_rank}, observed by {event.observer_rank}: {event.evidence}"
    if isinstance(event, ev.DrainStarted):
        return f"{name} at {event.last_incarnation}"
    if isinstance(event, ev.Drained):
        return f"{name} at {event.last_incarnation}"
    return f"{name}{where}"


def play(text: str) -> str:
    """The text with the output that its commands print now; comments and blank lines stay."""
    scenario = Scenario()
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith("> "):
            lines.append(line)
            lines.extend("  " + out for out in scenario.run(line[2:].split("#")[0].strip()))
        elif line.startswith("#") or not line.strip():
            lines.append(line.rstrip())
    return "\n".join(lines).rstrip() + "\n"


def run_scenario(path: Path, *, rewrite: bool = False) -> None:
    """Play a file and compare, or rewrite it.

    Raises:
        ScenarioMismatch: The output differs from the file's.
    """
    wanted = path.read_text(encoding="utf-8")
    printed = play(wanted)
    if printed == wanted:
        return
    if rewrite:
        path.write_text(printed, encoding="utf-8")
        return
    import difflib

    shown = "".join(difflib.unified_diff(wanted.splitlines(True), printed.splitlines(True), path.name, "now"))
    raise ScenarioMismatch(shown)
