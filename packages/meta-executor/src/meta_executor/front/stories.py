"""What happened to each of the last requests, in order, as the front saw it.

A story is begun when a request's head has come and ends with its reply; the dispatcher adds what its legs do. The last ones
are kept, by the name under which the client knows the request and by the ids of its answers, for ``/debug/requests/ID``; those
that ended are handed out once by ``/perf_metrics``, both legs of an answer in one record.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

#: Of one story (count): a request of very many answers tells the beginning.
_EVENTS_MAX = 128


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened.

    Attributes:
        at_s: When, on the front's clock (s).
        what: In words.
        answer: Id of the answer that it is about; 0: the whole request.
        leg: ``context``, ``generation`` or "".
        server: The leg's instance, or "".
    """

    at_s: float
    what: str
    answer: int = 0
    leg: str = ""
    server: str = ""


@dataclass(slots=True)
class Story:
    """One request's.

    Attributes:
        request_id: Under which the client knows it.
        path: What was asked for.
        caller: Under which its requests are counted.
        began_s: When its head had come, on the front's clock (s).
        began_unix_s: The same, on the wall's.
        answers: Ids of its answers, once they are known.
        events: In order.
        left_out: Events beyond those that are kept (count).
    """

    request_id: str
    path: str
    caller: str
    began_s: float
    began_unix_s: float
    answers: tuple[int, ...] = ()
    events: list[Event] = field(default_factory=list)
    left_out: int = 0

    def tell(self, at_s: float, what: str, answer: int = 0, leg: str = "", server: str = "") -> None:
        """It goes on."""
        if len(self.events) < _EVENTS_MAX:
            self.events.append(Event(at_s, what, answer, leg, server))
        else:
            self.left_out += 1

    def shown(self, name_of: Callable[[str], str]) -> dict[str, Any]:
        """For ``/debug/requests/ID``; times in seconds since it began.

        Args:
            name_of: An instance's name by its address.
        """
        events = []
        for event in self.events:
            one: dict[str, Any] = {"at_s": round(event.at_s - self.began_s, 6), "what": event.what}
            if event.answer:
                one["answer"] = event.answer
            if event.leg:
                one |= {"leg": event.leg, "server": name_of(event.server)}
            events.append(one)
        return {
            "request_id": self.request_id,
            "path": self.path,
            "caller": self.caller,
            "began_unix_s": self.began_unix_s,
            "answers": list(self.answers),
            "events": events,
            "events_left_out": self.left_out,
        }

    def performance(self, answer: int, name_of: Callable[[str], str]) -> dict[str, Any]:
        """Both legs of one answer, for ``/perf_metrics``; times on the front's clock (s), None for what did not happen."""
        legs: dict[str, dict[str, Any]] = {}
        for leg in ("context", "generation"):
            mine = [event for event in self.events if event.answer == answer and event.leg == leg]
            at = {event.what: event.at_s for event in mine}
            legs[leg] = {
                "server": name_of(mine[-1].server) if mine else None,
                "request_id": answer,
                "timing_metrics": {
                    "sent_time": at.get(SENT),
                    "first_token_time": at.get(FIRST_TOKEN),
                    "last_token_time": at.get(ENDED),
                },
            }
        firsts = [one["timing_metrics"]["first_token_time"] for one in legs.values()]
        return {
            "request_id": self.request_id,
            "ctx_server": legs["context"]["server"],
            "gen_server": legs["generation"]["server"],
            "disagg_server_arrival_time": self.began_s,
            "disagg_server_first_token_time": min((at_s for at_s in firsts if at_s is not None), default=None),
            "ctx_perf_metrics": legs["context"],
            "gen_perf_metrics": legs["generation"],
        }


#: What a leg's events are called.
GIVEN, SENT, FIRST_TOKEN, ENDED, STOPPED = "given to an instance", "sent", "first token", "ended", "told to stop"


class Stories:
    """The last requests of a front.

    Args:
        kept_max: Stories kept (count), >= 1.
        performance_max: Ended stories that wait for ``/perf_metrics`` (count); 0: none do.
    """

    def __init__(self, kept_max: int, performance_max: int) -> None:
        self._kept_max = kept_max
        self._kept: OrderedDict[int, Story] = OrderedDict()
        self._by_answer: dict[int, Story] = {}
        self._ended: deque[Story] = deque(maxlen=performance_max)

    def begin(self, story: Story) -> None:
        """Keep it, in place of the oldest."""
        self._kept[id(story)] = story
        while len(self._kept) > self._kept_max:
            _, oldest = self._kept.popitem(last=False)
            for answer in oldest.answers:
                self._by_answer.pop(answer, None)

    def answers(self, story: Story, answers: Sequence[int]) -> None:
        """Its answers have ids."""
        story.answers = tuple(answers)
        if id(story) in self._kept:
            self._by_answer.update(dict.fromkeys(story.answers, story))

    def ended(self, story: Story) -> None:
        """Its reply was sent, well or not."""
        self._ended.append(story)

    def find(self, name: str) -> Story | None:
        """The newest request of that name, or the one with an answer of that id (decimal, or hexadecimal as in its reply)."""
        for story in reversed(self._kept.values()):
            if story.request_id == name:
                return story
        digits = name.removeprefix("chatcmpl-").removeprefix("cmpl-")
        for base in (10, 16):
            try:
                found = self._by_answer.get(int(digits, base))
            except ValueError:
                continue
            if found is not None:
                return found
        return None

    def drain(self, name_of: Callable[[str], str]) -> list[dict[str, Any]]:
        """Performance of what has ended since the last call, oldest first; each is given once."""
        told = []
        while self._ended:
            story = self._ended.popleft()
            told += [story.performance(answer, name_of) for answer in story.answers]
        return told
