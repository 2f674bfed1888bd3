"""Plant one fault at a time in a copy of the package and see that the checks notice it.

Each mutant breaks one rule of ownership (or of planning) in the source text. It counts as killed when the pure tests or the
small explorations fail with it; a mutant that survives, or whose text is no longer in the source, fails the run.

Run: ``python tools/mutants.py [--only NAME] [--list]``. Exit code 0 if every mutant was killed.
"""

# ruff: noqa: T201, E501 - a command prints; planted text stands as the source has it

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
SOURCE = PACKAGE / "src" / "kv_bounce_planner"
OWNERSHIP = ("receiver", "sender", "arena", "proof", "messages", "state_tables", "control", "explore", "faults")
LIMIT_S = 240


@dataclass(frozen=True)
class Mutant:
    """``old`` stands exactly once in ``file`` and becomes ``new``; ``tests`` are tried in this order."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...] = ("receiver", "sender", "explore", "faults")


MUTANTS = (
    # the rules' own list
    Mutant(
        "error taken as proof",
        "_states.py",
        "        _RT.DOUBT: _RS.IN_DOUBT,\n        _RT.CONFLICT: _RS.CONFLICTED,\n        _RT.DEADLINE: _RS.QUARANTINED,\n    },\n    _RS.GRANTED: {",
        "        _RT.DOUBT: _RS.PROVEN,\n        _RT.CONFLICT: _RS.CONFLICTED,\n        _RT.DEADLINE: _RS.QUARANTINED,\n    },\n    _RS.GRANTED: {",
    ),
    Mutant(
        "peer's exit as proof on tcp",
        "_proof.py",
        "WriteExecutor.RECEIVER: frozenset({Evidence.AGENT_DESTROYED}),",
        "WriteExecutor.RECEIVER: frozenset({Evidence.PEER_REAPED}),",
        ("receiver", "proof"),
    ),
    Mutant(
        "agent destruction as proof on CMA",
        "_proof.py",
        "WriteExecutor.SENDER: frozenset({Evidence.PEER_REAPED}),",
        "WriteExecutor.SENDER: frozenset({Evidence.AGENT_DESTROYED}),",
        ("receiver", "proof"),
    ),
    Mutant(
        "one class's proof is enough for several classes",
        "_proof.py",
        "        needed |= CLASS_PROOFS[executor]",
        "        needed = CLASS_PROOFS[executor]",
        ("proof",),
    ),
    Mutant(
        "an unknown transport is taken for one whose sender executes",
        "_proof.py",
        "UCX_CLASSES.get(name, frozenset({WriteExecutor.UNKNOWN}))",
        "UCX_CLASSES.get(name, frozenset({WriteExecutor.SENDER}))",
        ("proof",),
    ),
    Mutant(
        "release in progress: sealing releases the source",
        "_send_core.py",
        "        if self.settled or not self.sealed or self.outstanding:\n            return",
        "        if self.settled or not self.sealed:\n            return",
    ),
    Mutant(
        "source released before the seal",
        "_send_core.py",
        "        if self.settled or not self.sealed or self.outstanding:\n            return",
        "        if self.settled or self.outstanding or not self._records:\n            return",
    ),
    Mutant(
        "an error proves the source",
        "_send_core.py",
        "                if Evidence.AGENT_DESTROYED in record.evidence:",
        "                if True:",
    ),
    Mutant(
        "quarantine lost in the snapshot",
        "_send_core.py",
        'quarantined = any(disposition == "quarantined" for _, disposition in operations)',
        "quarantined = False",
    ),
    Mutant(
        "snapshot before the seal",
        "_send_core.py",
        "if self._snapshot is None and self.sealed and not self.outstanding:",
        "if self._snapshot is None and not self.outstanding:",
    ),
    Mutant(
        "a drain deadline releases instead of quarantining",
        "_states.py",
        "        _RT.CLASS_PROOF: _RS.PROVEN,\n        _RT.DEADLINE: _RS.QUARANTINED,\n    },\n    _RS.CONFLICTED: {",
        "        _RT.CLASS_PROOF: _RS.PROVEN,\n        _RT.DEADLINE: _RS.PROVEN,\n    },\n    _RS.CONFLICTED: {",
        ("state_tables", "receiver", "explore"),
    ),
    Mutant(
        "the drain clock is reset by every event",
        "_receive_core.py",
        "        if self.drain_until_s is not None and now_s >= self.drain_until_s:",
        "        if self.drain_until_s is not None and now_s < self.drain_until_s:\n"
        "            self.drain_until_s = now_s + self._drain_deadline_s\n"
        "        if self.drain_until_s is not None and now_s >= self.drain_until_s:",
    ),
    Mutant(
        "one failed writer counts for all: results, not proofs, release",
        "_receive_core.py",
        "        if not all(record.machine.terminal for record in self._records.values()):\n            return",
        "        if not any(record.machine.terminal for record in self._records.values()):\n            return",
    ),
    Mutant(
        "exposed only after the send",
        "_receive_core.py",
        "            record.machine.fire(_T.PUBLISH)\n            self._effects.append(SendRequest(record.spec.peer, record.spec.request))",
        "            self._effects.append(SendRequest(record.spec.peer, record.spec.request))",
    ),
    Mutant(
        "cancel outruns the request: sent to the front of the queue",
        "_session.py",
        "            case rc.SendCancel(peer, message):\n                self._queue(peer, message)",
        "            case rc.SendCancel(peer, message):\n                self._outbox.setdefault(peer, deque()).appendleft(message)",
    ),
    Mutant(
        "no tombstone for a cancel that came first",
        "_session.py",
        '            self._high_water[peer] = operation.operation\n            self._reply(peer, Sealed(operation, "cancelled before it was requested"))',
        '            self._reply(peer, Sealed(operation, "cancelled before it was requested"))',
    ),
    Mutant(
        "replayed requests are served again",
        "_session.py",
        "        if operation.operation <= self._high_water.get(peer, -1):",
        "        if operation.operation < -1:",
    ),
    Mutant(
        "requests for an earlier generation are served",
        "_session.py",
        "        elif request.sender_generation != self.self_id.generation:",
        '        elif request.sender_generation == "":',
    ),
    Mutant(
        "requests of an earlier incarnation are served",
        "_session.py",
        "        elif transfer.incarnation < self._newest.get(transfer.request_id, 0):",
        "        elif transfer.incarnation < 0:",
    ),
    Mutant(
        "a peer may report for another",
        "_session.py",
        "            if record.expected[message.operation].peer != peer:",
        "            if record.expected[message.operation].peer == peer and False:",
    ),
    Mutant(
        "notifications of any agent are believed",
        "_session.py",
        "            elif agent != arrived.agent_name:",
        '            elif agent == "":',
    ),
    Mutant(
        "parts of another count are believed",
        "_receive_core.py",
        "if not 0 <= event.index < end <= event.count <= MARKS_MAX or record.mark_count not in (0, event.count):",
        "if not 0 <= event.index < end <= event.count <= MARKS_MAX:",
    ),
    Mutant(
        "the first part is taken for all",
        "_receive_core.py",
        "        if record.landed != (1 << event.count) - 1:\n            return",
        "        if not record.landed:\n            return",
    ),
    Mutant(
        "overlapping parts are believed",
        "_receive_core.py",
        "        if record.landed & grains not in (0, grains):",
        "        if False:",
        ("receiver",),
    ),
    Mutant(
        "a part counts for as many grains as it says, beyond the last",
        "_receive_core.py",
        "        if not 0 <= event.index < end <= event.count <= MARKS_MAX or",
        "        if not 0 <= event.index < event.count <= MARKS_MAX or",
        ("receiver",),
    ),
    Mutant(
        "a bounce write is proven without its report",
        "_states.py",
        "        _RT.DONE: _RS.LANDED,",
        "        _RT.DONE: _RS.PROVEN,",
    ),
    Mutant(
        "a refused report is accepted",
        "_receive_core.py",
        '        if not event.valid:\n            self._conflict(record, f"report refused: {event.reason}", now_s)\n            return\n',
        "",
    ),
    Mutant(
        "the report's base is not compared",
        "_session.py",
        "if plan is None or region is None or check.message.base_address != region.address:",
        "if plan is None or region is None:",
    ),
    Mutant(
        "reports are not validated",
        "_session.py",
        "                    self._reports.check(plan, check.message.report, check.operation, region.address)",
        "                    pass",
    ),
    Mutant(
        "a conflicted sender's seal is believed",
        "_states.py",
        "    _RS.CONFLICTED: {\n        _RT.CLASS_PROOF: _RS.PROVEN,",
        "    _RS.CONFLICTED: {\n        _RT.SEALED: _RS.PROVEN,\n        _RT.CLASS_PROOF: _RS.PROVEN,",
        ("receiver", "state_tables"),
    ),
    Mutant(
        "seal after a landed part is believed",
        "_receive_core.py",
        "                if record.landed or not record.machine.allows(_T.SEALED):",
        "                if not record.machine.allows(_T.SEALED):",
    ),
    Mutant(
        "drained with outstanding parts is believed",
        "_receive_core.py",
        "                if posted != completed or not record.machine.allows(_T.DRAINED):",
        "                if not record.machine.allows(_T.DRAINED):",
    ),
    Mutant(
        "scatter before every writer succeeded",
        "_receive_core.py",
        "if self.outcome is Outcome.PENDING and all(record.succeeded for record in self._records.values()):",
        "if self.outcome is Outcome.PENDING and any(record.succeeded for record in self._records.values()):",
    ),
    Mutant(
        "memory is released while a scatter runs",
        "_receive_core.py",
        '        if self.outcome is Outcome.PENDING or self._scatter == "running":\n            return',
        "        if self.outcome is Outcome.PENDING:\n            return",
    ),
    Mutant(
        "a failed device scatter releases",
        "_receive_core.py",
        '        self._scatter = "done" if event.idle_proven else "broken"',
        '        self._scatter = "done"',
    ),
    Mutant(
        "a late success revives a cancelled transfer",
        "_receive_core.py",
        "        if self.outcome is not Outcome.PENDING:\n            return\n        self.outcome = outcome",
        "        if self.outcome is outcome:\n            return\n        self.outcome = outcome",
    ),
    Mutant(
        "bounce regions are granted at publication",
        "_receive_core.py",
        "            self._effects.append(SendRequest(record.spec.peer, record.spec.request))",
        "            self._effects.append(SendRequest(record.spec.peer, record.spec.request))\n"
        '        if self._region == "none" and any(r.spec.bounce_offered for r in self._records.values()):\n'
        '            self._region = "asked"\n'
        "            self._effects.append(ReserveRegion(tuple((r.spec.operation.operation, r.spec.request.byte_count) for r in self._records.values())))",
    ),
    Mutant(
        "a slot is taken before the grant",
        "_send_core.py",
        "            record.machine.fire(_T.WANT)\n",
        "            record.machine.fire(_T.WANT)\n            record.slot = True\n            self._effects.append(ReserveSlot(event.operation))\n",
    ),
    Mutant(
        "posting goes on after a cancel",
        "_send_core.py",
        "            self._effects.append(StopPosting(record.request.operation))",
        "            pass",
    ),
    Mutant(
        "a cancel during the gather seals at once",
        "_states.py",
        "_ST.SEAL: _SS.SEALING, _ST.GATHER_BROKEN: _SS.SOURCE_IN_DOUBT},",
        "_ST.SEAL: _SS.SEALED, _ST.GATHER_BROKEN: _SS.SOURCE_IN_DOUBT},",
        ("sender", "state_tables", "explore"),
    ),
    Mutant(
        "another plan at the writer is posted all the same",
        "_session.py",
        "    if request.plan_digest and transfer.writer.digest != request.plan_digest:",
        '    if request.plan_digest and transfer.writer.digest == b"":',
    ),
    Mutant(
        "a dead receiver alone proves the source",
        "_send_core.py",
        "            if record.state is _S.IN_DOUBT:\n",
        "            if record.state is _S.IN_FLIGHT and Evidence.PEER_REAPED in record.evidence:\n"
        "                record.machine.fire(_T.ERROR)\n"
        "            if record.state is _S.IN_DOUBT:\n",
    ),
    Mutant(
        "exposed blocks may be advertised again",
        "_session.py",
        "            if held is not None:\n                raise AddressStillExposed",
        "            if held is identity:\n                raise AddressStillExposed",
    ),
    Mutant(
        "quarantined blocks leave the exposure ledger",
        "_session.py",
        "                record.owned.quarantine(reason)\n",
        "                record.owned.quarantine(reason)\n                self._ledger.leave(identity, record.exposed)\n",
    ),
    Mutant(
        "after a fatal diagnosis releases go on",
        "_session.py",
        "            if self._fatal and isinstance(event, MemoryReleased | SourceReleased):",
        "            if False:",
    ),
    Mutant(
        "quarantine is not charged",
        "_quarantine.py",
        "        self.byte_count += byte_count",
        "        self.byte_count += 0",
    ),
    Mutant(
        "a failed callback loses its memory",
        "_session.py",
        "                    self._undelivered.append(event)\n                    continue",
        "                    continue",
    ),
    Mutant(
        "abandon after the advertisement",
        "_arena.py",
        '        if self._span.state != "reserved":',
        '        if self._span.state == "free":',
        ("arena",),
    ),
    Mutant(
        "a region is released without proofs",
        "_arena.py",
        "        owned.prove(proofs)\n",
        "",
        ("arena",),
    ),
    Mutant(
        "newcomers pass those who wait",
        "_arena.py",
        "        if refusal is None and self._waiting:",
        "        if refusal is None and False:",
        ("arena",),
    ),
    Mutant(
        "small flows starve a large head",
        "_arena.py",
        "                if self._overtaken >= limit:",
        "                if self._overtaken < 0:",
        ("arena",),
    ),
    Mutant(
        "quarantined space is counted as free",
        "_arena.py",
        "        self._quarantined += span.size\n",
        "",
        ("arena",),
    ),
    Mutant(
        "proofs can be made by hand",
        "_proof.py",
        '            raise LocalProtocolError("a proof is made by the session that observed it, not by hand")',
        "            pass",
        ("proof",),
    ),
    Mutant(
        "memory is freed twice",
        "_proof.py",
        "    memory._freed = True",
        "    memory._freed = False",
        ("proof",),
    ),
    Mutant(
        "marks do not carry the generation",
        "_identity.py",
        "    return head + generation\n",
        '    return head + b"g" * len(generation)\n',
        ("messages",),
    ),
    Mutant(
        "a gap in the control channel is passed over",
        "_zmq.py",
        "        if sequence > link.received:",
        "        if False:",
        ("control",),
    ),
    Mutant(
        "content is not authenticated",
        "_zmq.py",
        "        mac.update(frame)\n",
        "",
        ("control",),
    ),
    Mutant(
        "sequence numbers may repeat",
        "_zmq.py",
        "        if sequence < link.received:",
        "        if False:",
        ("control",),
    ),
    # gathering ahead
    Mutant(
        "who gathered ahead keeps the slot from who was granted",
        "_session.py",
        "            if self._ahead and self._arena.waiting_count:",
        "            if False:",
        ("sender",),
    ),
    Mutant(
        "a slot is given back while a gather writes it",
        "_send_core.py",
        "                if record.state is _S.STAGED:\n                    self._yield(record)",
        "                if record.state in (_S.AHEAD, _S.STAGED):\n                    self._yield(record)",
        ("explore",),
    ),
    Mutant(
        "a refusal posts while the gather runs",
        "_send_core.py",
        "            record.refused = True  # the gather ends first: it still writes the slot",
        "            self._yield(record)\n            self._post(record, bounce=False)",
        ("sender", "explore"),
    ),
    Mutant(
        "a seal while gathering ahead ends at once",
        "_states.py",
        "        _ST.YIELD: _SS.WANTED,\n        _ST.SEAL: _SS.SEALING,",
        "        _ST.YIELD: _SS.WANTED,\n        _ST.SEAL: _SS.SEALED,",
    ),
    Mutant(
        "a gather ahead is taken for a grant",
        "_send_core.py",
        "            if event.succeeded:\n                record.machine.fire(_T.GATHERED)\n",
        "            if event.succeeded:\n                record.machine.fire(_T.GATHERED)\n                self._post(record, bounce=True)\n                return\n",
        ("sender", "explore"),
    ),
    # what a poll may take
    Mutant(
        "a post takes as much as it may, whatever is left of the budget",
        "_nixl.py",
        '                    count = min(count, int(np.searchsorted(units, fitting, side="right")))\n',
        "",
        ("pacing",),
    ),
    Mutant(
        "the budget begins with the first post",
        "_nixl.py",
        "                left = self.config.post_budget_s - (now - started)",
        "                left = self.config.post_budget_s",
        ("pacing",),
    ),
    Mutant(
        "what is in flight is not bounded by the budget",
        "_nixl.py",
        "                    left = min(left, self.config.post_budget_s - agent.in_flight_s)",
        "                    pass",
        ("pacing",),
    ),
    Mutant(
        "one agent is always first",
        "_nixl.py",
        "        self._post_turn = (self._post_turn + 1) % len(agents)",
        "        self._post_turn = 0",
        ("pacing",),
    ),
    Mutant(
        "posts grow without having been tried",
        "_pacing.py",
        "        return min(2.0, left_s / cost if cost > 0 else 2.0) * last",
        "        return 1e9",
        ("pacing",),
    ),
    Mutant(
        "a cheap post is the rule",
        "_pacing.py",
        "FALL = 0.4",
        "FALL = 1.4",
        ("pacing",),
    ),
    Mutant(
        "a surprise is averaged away",
        "_pacing.py",
        "        if predicted is not None and took_s > 2 * predicted:",
        "        if False:",
        ("pacing",),
    ),
    Mutant(
        "a whole list is looked at in one step",
        "_nixl.py",
        "        end = min(len(job.sizes), begin + (EXAMINED_PER_STEP if begin else STRIDED_COUNT_MIN))",
        "        end = len(job.sizes)",
        ("pacing",),
    ),
)


def run(mutant: Mutant, folder: Path) -> tuple[bool, str]:
    """Plant one mutant and run its checks. Returns (killed, by what)."""
    target = folder / "src" / "kv_bounce_planner"
    shutil.copytree(SOURCE, target)
    path = target / mutant.file
    text = path.read_text()
    if text.count(mutant.old) != 1:
        return False, f"its text stands {text.count(mutant.old)} times in {mutant.file}: bring the mutant up to date"
    path.write_text(text.replace(mutant.old, mutant.new))
    environment = {**os.environ, "PYTHONPATH": str(target.parent), "PYTHONDONTWRITEBYTECODE": "1"}
    for name in mutant.tests:
        command = [
            sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:randomly", "-p", "no:xdist",
            "-m", "not slow", str(PACKAGE / "tests" / "ownership" / f"test_{name}.py"),
        ]  # fmt: skip
        try:
            answer = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False, cwd=PACKAGE
            )
        except subprocess.TimeoutExpired:
            return True, f"{name}: hangs"
        if answer.returncode == 1:
            failed = [line for line in answer.stdout.splitlines() if line.startswith("FAILED")]
            return True, failed[0].rsplit("::", 1)[-1][:90] if failed else name
        if answer.returncode != 0:
            lines = (answer.stdout + answer.stderr).strip().splitlines()
            return False, f"the checks did not run (exit {answer.returncode}): {lines[-1] if lines else ''}"
    return False, "SURVIVED"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", help="run only mutants whose name holds this text (repeatable)")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--nightly", action="store_true", help="every mutant, which is the default too")
    options = parser.parse_args(arguments)
    chosen = [m for m in MUTANTS if not options.only or any(text in m.name for text in options.only)]
    if not chosen:
        parser.error("no mutant has such a name")
    if options.list:
        print("\n".join(mutant.name for mutant in chosen))
        return 0
    survived = 0
    for mutant in chosen:
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            killed, by = run(mutant, Path(folder))
        survived += not killed
        print(
            f"{'killed  ' if killed else 'SURVIVED'} {mutant.name} [{time.monotonic() - began:.1f} s] {by}", flush=True
        )
    print(f"{len(chosen) - survived} of {len(chosen)} mutants killed")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
