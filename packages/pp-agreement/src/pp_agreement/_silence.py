"""Silence: a peer whose ring stays empty. A verdict is per observer, frees nothing, and may end."""

from __future__ import annotations

from pp_agreement._context import Context
from pp_agreement._events import SilenceEnded, SilenceVerdict
from pp_agreement._state import Kind
from pp_agreement._streams import Streams
from pp_agreement._timers import NEVER_S

U32_MAX = 2**32 - 1


class Silence:
    """Judged only where a receive sweep looked and found nothing, and by at most a heartbeat interval per sweep: a rank that
    was stopped itself accuses nobody.

    ``looked_s`` adds up the time of all sweeps, so a peer's silence is what has been added since it was last heard, and one
    comparison says whether anybody's can be too long.
    """

    def __init__(self, context: Context, streams: Streams) -> None:
        self.context = context
        self.streams = streams
        size = context.size
        self.looked_s = 0.0
        self.heard_s = [0.0] * size  # by peer: ``looked_s`` when it was heard; moves along while its ring is not judged
        self.busy_s = [0.0] * size
        self.due_s = 0.0  # before ``looked_s`` reaches this, nobody can have been silent for too long
        self.spoken = 0
        self.suspects = 0
        self.heartbeat_s = context.config.heartbeat_s
        self.links_mask = sum(1 << peer for peer in context.peers)
        self.awaited = self.links_mask  # members whose next frame is news: their first, of suspects, of those busy
        self.left_mask = 0  # members that have said CLOSE, and owe nothing any more
        self.last_sweep_s: float | None = None
        self.over = False  # this rank closes: nobody is judged any more

    def pass_time(self, now_s: float) -> float:
        """A sweep begins: the time since the last one counts as looked at. How much that was."""
        last_s = self.last_sweep_s
        self.last_sweep_s = now_s
        if last_s is None:
            return 0.0
        since_s = now_s - last_s
        if since_s > self.heartbeat_s:
            since_s = self.heartbeat_s
        self.looked_s += since_s
        return since_s

    def news_of(self, peer: int, busy_ms: int) -> None:
        """A frame came that says how long its sender may be silent, or the first one after its silence."""
        bit = 1 << peer
        busy_s, longest_s = busy_ms / 1000, self.context.config.busy_max_s
        self.busy_s[peer] = busy_s if busy_s < longest_s else longest_s
        self.spoken |= bit
        self.awaited = self.awaited | bit if busy_ms else self.awaited & ~bit
        self.due_s = 0.0
        if self.suspects & bit:
            self.suspects &= ~bit
            self.context.judge(SilenceEnded(self.context.rank, self.context.name(peer)))
            if self.context.is_coordinator:
                self._spread(peer, 1, 0.0)

    def sweep(self, empty: int, since_s: float) -> None:
        """A sweep in which ``since_s`` passed found the rings of the members in ``empty`` empty."""
        full = self.links_mask & ~empty
        if full:  # what waits to be read is no silence
            for peer in self.context.peers:
                if full >> peer & 1:
                    self.heard_s[peer] = min(self.heard_s[peer] + since_s, self.looked_s)
        if self.looked_s >= self.due_s and not self.over:
            self._look(empty & ~self.left_mask)

    def _look(self, judged: int) -> None:
        """Somebody may have been silent for too long; only members in ``judged`` can be found so."""
        context, config = self.context, self.context.config
        self.due_s = NEVER_S
        for peer in context.peers:
            bit = 1 << peer
            if self.suspects & bit:
                continue
            limit_s = (config.silence_s if self.spoken & bit else config.startup_s) + self.busy_s[peer]
            silent_s = self.looked_s - self.heard_s[peer]
            if judged & bit and silent_s >= limit_s:
                self.suspects |= bit
                self.awaited |= bit
                context.judge(SilenceVerdict(context.rank, context.name(peer), silent_s))
                if context.is_coordinator:
                    self._spread(peer, 0, silent_s)
            else:
                self.due_s = min(self.due_s, self.heard_s[peer] + limit_s)

    def _spread(self, suspect: int, ended: int, silent_s: float) -> None:
        milliseconds = min(int(silent_s * 1000), U32_MAX)
        for peer, queue in self.streams.queues.items():
            if peer == suspect:
                continue
            unsent = next((r for r in queue if r[0] == Kind.VERDICT and r[1] == suspect), None)
            if unsent is not None:  # the opposite, not told yet: neither needs telling, and the queue stays bounded
                queue.remove(unsent)
            else:
                queue.append((int(Kind.VERDICT), suspect, ended, 0, milliseconds, 0, 0))

    def told(self, suspect: int, ended: int, milliseconds: int) -> None:
        """The coordinator's verdict about a member."""
        context = self.context
        if suspect >= context.size:
            context.blame_coordinator("verdict about a rank that is not a member")
        if suspect != context.me:
            observer = context.name(context.coordinator)
            if ended:
                context.judge(SilenceEnded(observer, context.name(suspect)))
            else:
                context.judge(SilenceVerdict(observer, context.name(suspect), milliseconds / 1000))

    def copy(self, context: Context, streams: Streams) -> Silence:
        """An independent copy, for explorers."""
        twin = Silence.__new__(Silence)
        twin.__dict__.update(self.__dict__)
        twin.context, twin.streams = context, streams
        twin.heard_s, twin.busy_s = list(self.heard_s), list(self.busy_s)
        return twin
