"""Silence: a peer whose ring stays empty. A verdict is per observer, frees nothing, and may end."""

from __future__ import annotations

from pp_agreement._context import Context
from pp_agreement._events import SilenceEnded, SilenceVerdict
from pp_agreement._state import Kind
from pp_agreement._streams import Streams

U32_MAX = 2**32 - 1


class Silence:
    """Judged only where a receive sweep looked and found nothing, and by at most a heartbeat interval per sweep: a rank that
    was stopped itself accuses nobody."""

    def __init__(self, context: Context, streams: Streams) -> None:
        self.context = context
        self.streams = streams
        size = context.size
        self.silent_s = [0.0] * size
        self.busy_s = [0.0] * size
        self.spoken = 0
        self.suspects = 0
        self.received_mask = 0
        self.left_mask = 0  # members that have said CLOSE, and owe nothing any more
        self.last_sweep_s: float | None = None
        self.over = False  # this rank closes: nobody is judged any more

    def heard_from(self, peer: int, busy_ms: int) -> None:
        """A frame came."""
        self.silent_s[peer] = 0.0
        busy_s, longest_s = busy_ms / 1000, self.context.config.busy_max_s
        self.busy_s[peer] = busy_s if busy_s < longest_s else longest_s
        bit = 1 << peer
        self.spoken |= bit
        self.received_mask |= bit
        if self.suspects & bit:
            self.suspects &= ~bit
            self.context.emit(SilenceEnded(self.context.rank, self.context.name(peer)))
            if self.context.is_coordinator:
                self._spread(peer, 1)

    def sweep(self, empty: int) -> None:
        """One receive sweep ended; the rings of the members in ``empty`` were found empty."""
        context = self.context
        config, now_s = context.config, context.elapsed_s
        last_s, self.last_sweep_s = self.last_sweep_s, now_s
        since_s = 0.0 if last_s is None else now_s - last_s
        if since_s > config.heartbeat_s:
            since_s = config.heartbeat_s
        received, self.received_mask = self.received_mask, 0
        if self.over:
            return
        judged = empty & ~received & ~self.left_mask
        silent_s, silence_s, spoken = self.silent_s, config.silence_s, self.spoken
        for peer in context.peers:
            bit = 1 << peer
            if judged & bit:
                silent = silent_s[peer] = silent_s[peer] + since_s
                limit_s = silence_s if spoken & bit else config.startup_s
                if silent >= limit_s + self.busy_s[peer] and not self.suspects & bit:
                    self.suspects |= bit
                    context.emit(SilenceVerdict(context.rank, context.name(peer), silent))
                    if context.is_coordinator:
                        self._spread(peer, 0)

    def _spread(self, suspect: int, ended: int) -> None:
        milliseconds = min(int(self.silent_s[suspect] * 1000), U32_MAX)
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
                context.emit(SilenceEnded(observer, context.name(suspect)))
            else:
                context.emit(SilenceVerdict(observer, context.name(suspect), milliseconds / 1000))

    def copy(self, context: Context, streams: Streams) -> Silence:
        """An independent copy, for explorers."""
        twin = Silence.__new__(Silence)
        twin.__dict__.update(self.__dict__)
        twin.context, twin.streams = context, streams
        twin.silent_s, twin.busy_s = list(self.silent_s), list(self.busy_s)
        return twin
