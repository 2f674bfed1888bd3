"""Plant each known defect in the real sources and see the checks fail for it.

    python tools/mutants.py                # every mutant, every checker
    python tools/mutants.py NAME --first   # one mutant, stop at its first killer

Each mutant is a small substitution in one source file, applied by an import hook in a process of its own. A mutant that no
checker kills is a hole in the checks: exit 1. The unmutated sources must survive every checker.
"""

# ruff: noqa: T201, BLE001, PT
from __future__ import annotations

import argparse
import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import io
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SCENARIOS = ROOT / "tests" / "scenarios"
VARIABLE = "PP_AGREEMENT_MUTANT"


@dataclass(frozen=True)
class Mutant:
    """One defect: substitutions (file, old, new), each of which must apply exactly once."""

    name: str
    why: str
    changes: tuple[tuple[str, str, str], ...]
    mpi: bool = False
    tests: str = ""  # of a shell or an adapter: the test files (and pytest's options) that have to notice


def one(
    name: str,
    why: str,
    module: str,
    old: str,
    new: str,
    *more: tuple[str, str, str],
    mpi: bool = False,
    tests: str = "",
) -> Mutant:
    return Mutant(name, why, ((module, old, new), *more), mpi, tests)


M, S, A = "_machine", "_state", "_agreement"
MUTANTS = (
    # the reference's list
    one("withdraw promised after the lease", "S10, S11", M,
        "answer = WithdrawResult.LEASED", "answer = WithdrawResult.WILL_ABORT"),
    one("withdraw honoured after the lease", "S10", M,
        "if kind == _WITHDRAW and round_.acks & bit:", "if kind == _WITHDRAW and round_.acks & 0:"),
    one("release without the last lease", "S6", M,
        "if round_.acks == self.all_mask:", "if round_.acks.bit_count() >= self.size - 1:"),
    one("prepare not suppressed after the withdrawal", "S9", S,
        "_S.WITHDRAWN: {_I.PREPARE: _S.WITHDRAWN,", "_S.WITHDRAWN: {_I.PREPARE: _S.PREPARED,"),
    one("complete without the last activation", "S8", M,
        "if round_.activated == self.all_mask:", "if round_.activated.bit_count() >= self.size - 1:"),
    one("finalize without the last acknowledgement", "S9", M,
        "if round_.abort_acks == self.all_mask:", "if round_.abort_acks.bit_count() >= self.size - 1:"),
    one("commit without the last vote", "S3", M,
        "if round_.terminal_mask != self.all_mask or round_.phase not in",
        "if round_.terminal_mask.bit_count() < self.size - 1 or round_.phase not in"),
    one("failed beats cancelled", "S2", M, "if one_outcome > outcome:", "if one_outcome == 1 or one_outcome > outcome:"),
    one("reuse before finalize", "S13", M,
        "                if round_.next_intent != NEXT_WITHDRAW:\n                    round_.next_intent = NEXT_PUBLISH\n",
        "                round_.attempt += 1\n                self._vote_ready(round_)\n"),
    one("a failed send is forgotten", "S14, R3", A,
        "            self._step(ev.SendFailed(effect.peer, str(error) or repr(error)), self._clock())\n", ""),
    one("stale check off by one", "S19", M,
        "            if attempt < round_.phase_attempt:", "            if attempt < round_.phase_attempt - 1:"),
    one("abort after release", "S6", M,
        "if kind == _WITHDRAW and round_.acks & bit:", "if kind == _WITHDRAW and round_.acks & 0:",
        (S, "_K.WITHDRAW: Rule.IGNORE, _K.ACK: Rule.IGNORE, _K.ACTIVATE_ACK: Rule.COUNT",
         "_K.WITHDRAW: Rule.ABORT, _K.ACK: Rule.IGNORE, _K.ACTIVATE_ACK: Rule.COUNT")),
    one("intents dropped under backpressure", "L4", A,
        "self._refused_slots += 1", "self._refused_slots += 1\n                core.intents.clear()"),
    # the rules' list
    one("schedule visible before activate", "R4", "testing/_explorer",
        "        if isinstance(event, ev.Aborted) and not self.world.slow_abort_ack:",
        "        if isinstance(event, ev.Released):\n"
        "            state = (*state[:3], (*state[3], event.key), *state[4:])\n"
        "        if isinstance(event, ev.Aborted) and not self.world.slow_abort_ack:"),
    one("activation of a lease before its release", "S7", M,
        "wanted = ReadyState.RELEASED if self.is_scheduler else ReadyState.LEASED", "wanted = ReadyState.LEASED",),
    one("release not swallowed after revoke", "R4", S,
        "_S.REVOKED: {_I.RELEASE: _S.REVOKED,", "_S.REVOKED: {_I.RELEASE: _S.RELEASED,"),
    one("revoke after activation", "R4", M,
        "if ready in (ReadyState.LEASED, ReadyState.RELEASED) and key.attempt == round_.attempt:",
        "if ready in (ReadyState.LEASED, ReadyState.RELEASED, ReadyState.ACTIVATED):"),
    one("coordinator takes a revoke after an activation", "R4", M,
        "if kind == _REVOKE and round_.activated:", "if kind == _REVOKE and round_.activated == -1:"),
    one("anybody revokes", "R4", M,
        'if row.author == "scheduler" and source != self.scheduler:', 'if row.author == "nobody" and source != -1:',
        (M, "        if not self.is_scheduler:\n"
         "            self._refuse(\"only the scheduling rank revokes\", key if type(key) is Key else None)\n", "")),
    one("terminal vote while leased", "S21", S,
        "TERMINAL_ALLOWED_IN = frozenset({_S.NOT_USED,", "TERMINAL_ALLOWED_IN = frozenset({_S.LEASED, _S.NOT_USED,"),
    one("readiness after the terminal vote", "S21", M,
        '            self._refuse("readiness after this rank\'s terminal vote", key, round_)', "            pass"),
    one("commit while readiness is open", "S21", M,
        "round_.phase not in (Phase.GATHERING, Phase.COMPLETE, Phase.FINAL):", "round_.phase is None:",
        (S, "TERMINAL_ALLOWED_IN = frozenset({_S.NOT_USED,", "TERMINAL_ALLOWED_IN = frozenset({_S.LEASED, _S.NOT_USED,")),
    one("credits spent per vote, not at admission", "R2", M,
        "if self.open_count >= self.config.credits:\n                raise WouldBlock",
        "if self.open_count >= 10**9:\n                raise WouldBlock"),
    one("held-back admissions open at once", "R1, R2", M,
        "round_.blocked = bool(others) or self.open_count >= self.config.credits", "round_.blocked = False"),
    one("held records never leave", "R1", M,
        "            for slot, record in held:\n                self._queue_up(slot, record)\n", "            _ = held\n"),
    one("acknowledgements consume the window", "R8", "_inprocess",
        "return link not in network.refusing and len(network.links[link]) < network.window",
        "return link not in network.refusing and "
        "len(network.links[link]) + len(network.links[peer, self._me]) < network.window"),
    one("receiving is gated on send space", "R8", "_inprocess",
        "        now_s = network.clock()\n        frames: list",
        "        now_s = network.clock()\n        if not all(self.can_send(p) for p in self._peers):\n"
        "            return Sweep([], 0)\n        frames: list"),
    one("Isend for Ssend", "R8", "_mpi", "comm.Ssend_init(", "comm.Send_init(", mpi=True),
    one("receiving is gated on send space over MPI", "R8", "_mpi",
        "        count = len(self._order)\n",
        "        count = len(self._order)\n        if not all(self.can_send(p) for p in self._order):\n"
        "            return Sweep(frames, empty)\n", mpi=True),
    one("heartbeats while a frame is outstanding", "R8", M,
        "if event.outstanding or not self._heartbeat_due(peer, self._now):", "if not self._heartbeat_due(peer, self._now):"),
    one("timer before the receive sweep", "R7", M,
        "since_s = 0.0 if self.last_sweep_s is None else min(max(0.0, now_s - self.last_sweep_s), config.heartbeat_s)",
        "since_s = 0.0 if self.last_sweep_s is None else max(0.0, now_s - self.last_sweep_s)",
        (M, "if received & bit or not event.empty & bit or self.close_mask & bit:", "if self.close_mask & bit:")),
    one("silence judged although the ring is not empty", "R7", M,
        "if received & bit or not event.empty & bit or self.close_mask & bit:", "if received & bit or self.close_mask & bit:"),
    one("busy is ignored", "R7", M,
        "self.busy_s[peer] = min(frame.busy_ms / 1000, self.config.busy_max_s)", "self.busy_s[peer] = 0.0"),
    one("drain without the last incarnation", "R10", M,
        "while not self.reported and self.heard == self.drain_last and not self.rounds:",
        "while not self.reported and not self.rounds:"),
    one("drained without the last report", "R10", M,
        "if self.report_mask != self.all_mask:", "if self.report_mask.bit_count() < self.size - 1:"),
    one("drain leaves unscheduled leases", "R10", M, "                self._end_unscheduled(round_)\n        self._fx",
        "                pass\n        self._fx"),
    one("tombstone of an unheard abort is evicted", "R1", M,
        "            round_ = self._unheard(self.coordinator, request_id, incarnation)\n            if round_ is None:\n",
        "            round_ = None\n            if round_ is None:\n"),
    one("the next attempt is refused instead of deferred", "R1", M,
        "                if round_.next_intent != NEXT_WITHDRAW:\n                    round_.next_intent = NEXT_PUBLISH\n",
        '                self._refuse("the attempt before this one is not over", key, round_)\n'),
    one("a deferred publication is forgotten", "R1", M,
        "            elif intent == NEXT_PUBLISH:\n                self._vote_ready(round_)\n", ""),
    one("another queue order per destination", "R3, S15", M,
        "        for queue in self.queues.values():\n            queue.append(record)\n",
        "        for peer, queue in self.queues.items():\n            queue.insert(0 if peer else len(queue), record)\n"),
    one("release delivered after a fault", "R6", "_events",
        "SURVIVES_FAULT = (\n", "SURVIVES_FAULT = (\n    Prepared,\n    Released,\n    Aborted,\n"),
    one("decisions before a fault are dropped", "R6, W13", "_events",
        "SURVIVES_FAULT = (\n    Committed,\n", "SURVIVES_FAULT = (\n"),
    one("activity after a fault", "S17", M,
        "            if kind not in _AFTER_FAULT:\n                return ()\n", ""),
    one("quarantine lost in the reduction", "R9", M, "if one_disposition > disposition:", "if one_disposition > 1:"),
    one("completed with quarantine", "R9", M,
        "if disposition and not outcome:\n            self._refuse", "if False:\n            self._refuse"),
    one("doubt moves its deadline", "R9", M,
        "        if first:\n            round_.terminal = TerminalState.DOUBTED\n            round_.doubt_at_s = self._now\n",
        "        round_.doubt_at_s = self._now\n        if first:\n            round_.terminal = TerminalState.DOUBTED\n",
        (M, "self._doubt_timers[round_.incarnation] = self._now + self.config.doubt_deadline_s",
         "self._doubt_timers[round_.incarnation] = self._now + 2 * self.config.doubt_deadline_s")),
    one("the quarantine budget is endless", "R9", M,
        "if self.quarantined > self.config.quarantine_rounds_max:", "if self.quarantined > 10**9:"),
    one("a bad checksum is let through", "R6", "_codec",
        'self._reject(source, "checksum does not match")', "pass"),
    one("another domain's frame is let through", "W8", "_codec",
        "if domain_id != self._domain_id or epoch != self._epoch:", "if domain_id == -1:"),
    one("a replayed frame is processed again", "S19", M,
        "                self.duplicates += 1\n                return\n"
        "            raise _Violation(\n                FaultCode.SEQUENCE,",
        "                self.expected[peer] = sequence\n            raise _Violation(\n                FaultCode.SEQUENCE,"),
    one("a changed vote is taken", "S4", M,
        "if round_.terminal_votes is not None and round_.terminal_votes[source] == vote:", "if True:"),
    one("the reason of an acknowledgement is lost", "W6", M,
        "self._say(round_, _READY_SLOT, _ABORT_ACK, reason=round_.own_reason)", "self._say(round_, _READY_SLOT, _ABORT_ACK)"),
    one("a lease outlives its timeout", "W5", M,
        "            if round_.ready in (ReadyState.LEASED, ReadyState.RELEASED):\n                self._revoke_unasked(",
        "            if round_.ready is None:\n                self._revoke_unasked("),
    one("a released lease is not exempt from the round timeout", "27", M,
        "                return round_.activated != 0\n", "                return True\n"),
    # peers that repeat, lie and leave
    one("a member reports another one's fault", "R6", M, "if outcome != source and not self.replicated:", "if outcome < 0:"),
    one("speaking after the drain opens a round", "R10", M,
        "        if self.drain_last is not None and incarnation > self.drain_last:\n            raise",
        "        if self.drain_last is None and incarnation < 0:\n            raise"),
    one("a drain below what peers speak of", "R10", M,
        "known = max(self.heard, max(self.rounds, default=0))", "known = self.heard"),
    one("repeated doubt is passed on again", "S16", M, "if round_.doubted >> source & 1:", "if round_.doubted < 0:"),
    one("repeated recall is passed on again", "S16", M, "if round_.recalled & bit:", "if round_.recalled < 0:"),
    one("a repeated close is answered again", "S19", M,
        "            if self.close_mask & bit:\n                self.duplicates",
        "            if bit < 0:\n                self.duplicates"),
    one("verdicts pile up for a rank that takes nothing", "S16", M,
        "            if unsent is not None:", "            if unsent is not None and len(queue) < 0:"),
    one("leaving after the handshake is a death", "R7", M,
        "if self.closing and not self.replicated and event.peer not in self.peers:", "if self.closing and event.peer < 0:"),
    one("a clock that went back mutes the heartbeats", "R7", M,
        "return since_s >= self.config.heartbeat_s or since_s < 0", "return since_s >= self.config.heartbeat_s"),
    one("advice about another request", "R1", M,
        "if round_.request_id != request_id or attempt > round_.attempt:\n                    self._impossible",
        "if attempt < 0:\n                    self._impossible"),
    one("a forged tombstone refuses an admission", "R1, R2", M,
        "        if self.is_scheduler:\n            whose =", "        if incarnation < 0:\n            whose ="),
    one("drained after a fault", "S17", M,
        "and not self.reported and self.fault is None:", "and not self.reported:", tests="test_machine.py"),
    one("a forged drain closes the authority", "R10", M,
        "if self.is_scheduler and self.drain_last is None:", "if self.is_scheduler and incarnation < 0:"),
    one("a repeated drain is told again", "S12", M, "            if self.drain_told:\n", "            if incarnation < 0:\n"),
    # hosts that misuse, interrupts, threads
    one("any number is a reason", "W3", M, "if type(value) is not kind:", "if value is None:", tests="test_misuse.py"),
    one("anything is a key", "W3", M, "        if type(key) is not Key:\n", "        if key is self:\n",
        tests="test_misuse.py"),
    one("a broken-off step goes on", "R3", M,
        '            self._stop(_Violation(FaultCode.INTERNAL, f"broken off: {error!r}"))\n', "",
        tests="test_misuse.py"),
    one("a decision of a broken-off step is lost", "R6", M,
        "            self._broken_off = tuple(fx)\n", "            self._broken_off = ()\n", tests="test_misuse.py"),
    one("events are lost between the effects of a step", "S12", A,
        "            if core.fault is None:\n                self._keep(",
        "            if core is None:\n                self._keep(",
        tests="test_misuse.py"),
    one("a second thread is let into a step", "R3", M,
        "        if self._stepping:\n            raise", "        if self._stepping is None:\n            raise",
        tests="test_misuse.py"),
    one("a poll inside a poll", "R3", A,
        "        if self._polling:\n            raise", "        if self._polling is None:\n            raise",
        tests="test_misuse.py"),
    one("an interrupted send is forgotten", "R3", A,
        "        except BaseException as error:\n            # The records",
        "        except (WouldBlock, TransportError) as error:\n            # The records", tests="test_misuse.py"),
    one("a signal handler's failure is forgotten", "R6", A,
        "            self._failing = self._failing or failed\n", "            pass\n", tests="test_misuse.py"),
    one("what a drain kept outlives the fault", "R6", A,
        "        if self._core.fault is not None:  # also", "        if self._core is None:  # also",
        tests="test_misuse.py"),
    one("events of a closing are lost", "W4", A,
        "        if self._ended and self._events:\n            return self._take()\n        began_s = self._begin_poll()\n"
        "        try:\n            self._exchange(",
        "        began_s = self._begin_poll()\n        try:\n            self._exchange(", tests="test_misuse.py"),
    one("leaving by an exception is silent", "L6", A,
        "                self._last_words()\n", "                pass\n", tests="test_misuse.py"),
    one("a drain until NaN", "L5", A, "or math.isnan(deadline_s):", "or deadline_s is None:", tests="test_misuse.py"),
    one("a watch tells one domain only", "R7", "_lifeline", "        self._all.extend(found)\n", "",
        tests="test_transports.py -k one_watch"),
    one("a stranger's leaving is a death", "R7", "_zmq",
        "if not connected and peer in self._greeted:", "if peer >= 0:", tests="test_transports.py -k stranger"),
    one("memory under MPI's hands is given back", "R7", "_mpi",
        "                    _left_behind.append(stream)\n", "                    pass\n",
        tests="test_mpi_requests.py"),
    one("a flood hides a silent rank", "R7", "_mpi",
        "                            return Sweep(frames, empty)\n", "                            return Sweep(frames, 0)\n",
        tests="test_mpi_requests.py"),
    one("posted receives outlive the transport", "R8", "_mpi",
        "            request.Cancel()\n", "            _ = request\n", tests="test_mpi_requests.py"),
    one("replicas decide by what they have heard", "R11, S1", M,
        "        if not self.replicated:\n            self._abort(", "        if round_.heard:\n            self._abort(",
        tests="test_lockstep.py"),
    one("a rank leaves a collective drain alone", "R11", "_allgather",
        "if core.drained or self._somebody_leaves or", "if core.drained or self._leaving or",
        tests="test_agreement.py"),
    one("a fault in a collective drain is not shared", "R11", "_allgather",
        "(core.fault is not None and self._poisoned)", "core.fault is not None", tests="test_agreement.py"),
    one("a flag that cannot be encoded", "W17", "_negotiate",
        '.encode("ascii", "backslashreplace").decode("ascii")', "", tests="test_negotiate.py"),
    one("malformed facts are qualified", "59", "_negotiate",
        "if not isinstance(facts, tuple) or not all(isinstance(f, tuple) and len(f) == 2 for f in facts):",
        "if not isinstance(facts, tuple):\n        return AgreementMode(terminal=True, ready=True)\n    if facts is None:",
        tests="test_negotiate.py"),
    one("no bounds are bounds", "56", "_negotiate", "    if not reference[4]:\n", "    if not reference:\n",
        tests="test_negotiate.py"),
    one("fields that all ranks lack are equal", "R10", "_verify",
        "        if not isinstance(record.get(name), shape)\n", "        if not shape\n", tests="test_evidence.py"),
    one("a record may contradict itself", "R10", "_verify",
        "        found.extend(_contradictions(rank, record))\n", "        pass\n", tests="test_evidence.py"),
    one("a file may say a thing twice", "R10", "_verify",
        "    if len(found) != len(pairs):\n", "    if not found and pairs:\n", tests="test_evidence.py"),
)  # fmt: skip


# -- planting ---------------------------------------------------------------------------------------------------------------


class _Loader(importlib.machinery.SourceFileLoader):
    """Compiles a changed source; never touches cached bytecode."""

    def __init__(self, fullname: str, path: str, changes: list[tuple[str, str]]) -> None:
        super().__init__(fullname, path)
        self.changes = changes

    def get_code(self, fullname: str):  # type: ignore[no-untyped-def]
        source = Path(self.path).read_text(encoding="utf-8")
        for old, new in self.changes:
            if source.count(old) != 1:
                raise SystemExit(f"{self.path}: {source.count(old)} places for {old!r}")
            source = source.replace(old, new)
        return compile(source, self.path, "exec")


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, mutant: Mutant) -> None:
        self.changes: dict[str, list[tuple[str, str]]] = {}
        for module, old, new in mutant.changes:
            self.changes.setdefault("pp_agreement." + module.replace("/", "."), []).append((old, new))

    def find_spec(self, fullname, path, target=None):  # type: ignore[no-untyped-def]
        if fullname not in self.changes:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        spec.loader = _Loader(fullname, spec.origin, self.changes[fullname])
        return spec


def plant(name: str) -> None:
    """Make this process import the mutated sources; a mutant whose place is gone ends it with 2: it was never there."""
    if not name:
        return
    mutant = next(m for m in MUTANTS if m.name == name)
    problem = misplaced(mutant)
    if problem:
        print(problem, file=sys.stderr)
        raise SystemExit(2)
    sys.meta_path.insert(0, _Finder(mutant))


def misplaced(mutant: Mutant) -> str | None:
    """Why the mutant cannot be planted: each of its places must exist exactly once, and the result must compile."""
    spec = importlib.util.find_spec("pp_agreement")
    package = Path((spec.origin if spec else None) or ROOT).parent
    sources: dict[Path, str] = {}
    for module, old, new in mutant.changes:
        path = package / f"{module}.py"
        source = sources.setdefault(path, path.read_text(encoding="utf-8"))
        if source.count(old) != 1:
            return f"{path.name}: {source.count(old)} places for {old!r}"
        sources[path] = source.replace(old, new)
    for path, source in sources.items():
        compile(source, str(path), "exec")
    return None


# -- checkers: each returns what it found, or None ----------------------------------------------------------------------------


def check_scenarios() -> str | None:
    from pp_agreement.testing import run_scenario

    for path in sorted(SCENARIOS.glob("*.txt")):
        try:
            run_scenario(path)
        except Exception as error:
            return f"{path.stem}: {type(error).__name__}"
    return None


EXPLORED = (
    "2 ranks, everything", "2 ranks, reopening", "2 ranks, drain", "2 ranks, scheduler coordinates", "3 ranks, unheard",
    "3 ranks, all withdraw", "2 ranks x 2, one credit", "2 ranks, reused id", "4 ranks, terminal",
)  # fmt: skip


def check_explorer() -> str | None:
    from pp_agreement.testing import CI_WORLDS, Explorer

    for name in EXPLORED:
        try:
            found = Explorer(CI_WORLDS[name]).run()
        except Exception as error:
            return f"{name}: {type(error).__name__}: {error}"
        if found.violation:
            return f"{name}: {found.violation.splitlines()[0]}"
    return None


def check_simulator() -> str | None:
    from pp_agreement.testing import simulate

    for seed in range(250):
        try:
            simulate(seed)
        except Exception as error:
            return str(error).splitlines()[0]
    return None


def check_sweeps() -> str | None:
    """A fair transport never shows it: a ring that stays full for minutes is no silence."""
    from pp_agreement import AgreementConfig, AgreementCore, Domain
    from pp_agreement import _events as ev

    core = AgreementCore(Domain(1, (0, 1)), 1, AgreementConfig(startup_s=10.0))
    for second in range(600):
        if core.step(ev.SweepCompleted(0), float(second)):
            return "a verdict about a peer whose ring was never found empty"
    return None


def check_transport() -> str | None:
    from pp_agreement import Domain, InProcessNetwork
    from pp_agreement.testing import check_transport as conform

    domain = Domain(1, (0, 1))
    network = InProcessNetwork(domain, 3)
    barrier = threading.Barrier(2, timeout=30)
    found: list[str] = []

    def member(rank: int) -> None:
        try:
            conform(network.transport(rank), domain, rank, sync=barrier.wait, frames_outstanding_max=3, count=40)
        except threading.BrokenBarrierError:
            pass
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
            barrier.abort()

    threads = [threading.Thread(target=member, args=(r,), daemon=True) for r in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found[0] if found else None


def check_tests(names: str) -> str | None:
    """Test files, in this process, over the planted sources."""
    import pytest

    class Reporter:
        found: str | None = None

        def pytest_runtest_logreport(self, report):  # type: ignore[no-untyped-def]
            if report.failed and self.found is None:
                self.found = report.nodeid.rpartition("::")[2]

        def pytest_collectreport(self, report):  # type: ignore[no-untyped-def]
            if report.failed and self.found is None:
                self.found = f"{report.nodeid}: cannot be collected"

    reporter = Reporter()
    sys.path.insert(0, str(ROOT.parent.parent))  # tests that spawn processes are found there by name
    chosen = [str(ROOT / "tests" / word) if word.endswith(".py") else word for word in names.split()]
    with contextlib.redirect_stdout(io.StringIO()):
        code = pytest.main([*chosen, "-x", "-q", "-p", "no:cacheprovider", "-m", "not mpi and not slow"], [reporter])
    return reporter.found if code == 1 else None if code == 0 else f"pytest ended with {code}"


def check_mpi() -> str | None:
    mpiexec = Path(sys.executable).with_name("mpiexec")
    done = subprocess.run(
        [str(mpiexec), "-n", "2", sys.executable, str(Path(__file__).resolve()), "--mpi-rank"],
        env=os.environ, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    return None if done.returncode == 0 else (done.stdout + done.stderr).strip().splitlines()[-1][:120]


def mpi_rank() -> None:
    """One rank of the MPI check; leaves without finalizing when a promise is broken."""
    from mpi4py import MPI

    from pp_agreement import Domain, MpiTransport
    from pp_agreement.testing import check_transport as conform

    comm = MPI.COMM_WORLD
    domain = Domain(1, (0, 1))
    try:
        # The window's frames lie in the peer's posted receives, as many again wait unmatched.
        conform(
            MpiTransport(comm, domain, window=3),
            domain,
            comm.rank,
            sync=comm.Barrier,
            frames_outstanding_max=6,
            count=40,
        )
    except Exception as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        comm.Abort(1)


CHECKERS = {
    "scenarios": check_scenarios,
    "explorer": check_explorer,
    "simulator": check_simulator,
    "transport": check_transport,
    "sweeps": check_sweeps,
}


def child(name: str, first: bool) -> int:
    """Run the checkers on one mutant; exit code 1 when killed, 0 when it survived, 2 when it could not be planted."""
    plant(name)
    mutant = next((m for m in MUTANTS if m.name == name), None)
    checkers: dict[str, Callable[[], str | None]] = dict(CHECKERS)
    if not name:
        checkers["mpi"] = check_mpi
        checkers["tests"] = lambda: check_tests(" ".join(sorted({m.tests.split()[0] for m in MUTANTS if m.tests})))
    elif mutant is not None and mutant.mpi:
        checkers = {"mpi": check_mpi}
    elif mutant is not None and mutant.tests:
        checkers = {"tests": lambda: check_tests(mutant.tests)}
    killed = False
    for checker, run in checkers.items():
        found = run()
        if found:
            killed = True
            print(f"{checker}\t{found[:110]}", flush=True)
            if first:
                break
    return 1 if killed else 0


def judge(name: str, first: bool) -> tuple[str, int, str, float]:
    began_s = time.monotonic()
    command = [sys.executable, str(Path(__file__).resolve()), "--child", name] + (["--first"] if first else [])
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=400,
            env={**os.environ, VARIABLE: name, "PYTHONHASHSEED": "0"},
        )
    except subprocess.TimeoutExpired:
        return name, 1, "time\tno checker ended within 400 s", time.monotonic() - began_s
    return (
        name,
        done.returncode,
        done.stdout if done.returncode < 2 else done.stdout + done.stderr,
        time.monotonic() - began_s,
    )


def main() -> int:
    """Exit code 0: all killed and the unmutated sources survive."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="mutants; all without a name")
    parser.add_argument("--first", action="store_true", help="stop each mutant at its first killer")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--nightly", action="store_true", help="the same as without")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--mpi-rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.mpi_rank:
        plant(os.environ.get(VARIABLE, ""))
        mpi_rank()
        return 0
    if options.child is not None:
        return child(options.child, options.first)
    if options.list:
        print("\n".join(f"{m.name} ({m.why})" for m in MUTANTS))
        return 0
    known = {m.name for m in MUTANTS}
    unknown = set(options.names) - known
    if unknown:
        parser.error(f"no such mutant: {', '.join(sorted(unknown))}")
    names = options.names or ["", *(m.name for m in MUTANTS)]
    failed = 0
    with ThreadPoolExecutor(options.jobs) as pool:
        for name, code, output, spent_s in pool.map(lambda n: judge(n, options.first), names):
            if not name:
                good = code == 0
                print(
                    f"{'ok    ' if good else 'BROKEN'} unmutated sources, {spent_s:.0f} s {output.strip()}", flush=True
                )
            else:
                good = code == 1
                killers = ", ".join(line.split("\t")[0] for line in output.splitlines() if "\t" in line)
                word = {1: "killed", 0: "ALIVE "}.get(code, "ERROR ")
                print(f"{word} {name}: {killers if good else output.strip()[-300:]} ({spent_s:.0f} s)", flush=True)
            failed += not good
    print(f"{len(names) - failed} of {len(names)} as they should be")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
