"""The check of a sender of one's own: a right one passes, each wrong one is named."""

import asyncio

import pytest

from rpc_batch_submit import take_in
from rpc_batch_submit.testing import check_sender


class Worker:
    """Takes numbers, and refuses what is negative."""

    def __init__(self):
        self.taken = []
        self.lost = False

    def take(self, request):
        if request < 0:
            raise ValueError("negative")
        self.taken.append(request)

    async def send(self, batch):
        await asyncio.sleep(0)
        if self.lost:
            raise ConnectionError("the worker is gone")
        return take_in(batch, self.take)

    def lose(self):
        self.lost = True


class SwallowsRefusals(Worker):
    async def send(self, batch):
        await super().send(batch)


class FailsWhole(Worker):
    async def send(self, batch):
        if any(request < 0 for request in batch):
            raise ValueError("one is negative")
        return await super().send(batch)


class StopsAtTheBad(Worker):
    async def send(self, batch):
        outcomes = await super().send(batch)
        del self.taken[1:]
        return outcomes


class Reorders(Worker):
    async def send(self, batch):
        outcomes = await super().send(batch)
        self.taken.sort(reverse=True)
        return outcomes


class TakesTwice(Worker):
    def take(self, request):
        super().take(request)
        super().take(request)


class NoticesNothing(Worker):
    def lose(self):
        pass


class AnswersShort(Worker):
    async def send(self, batch):
        return (await super().send(batch))[:-1]


class NeverEnds(Worker):
    async def send(self, batch):
        await asyncio.Event().wait()


class NothingAlone(Worker):
    async def send(self, batch):
        return await super().send(batch if len(batch) > 1 else []) or [None]


class ForgetsToTake(Worker):
    async def send(self, batch):
        return [None if request >= 0 else "negative" for request in batch]


def check(worker, limit_s=30.0):
    asyncio.run(
        check_sender(worker.send, [1, 2, 3, 4, 5], -1, arrived=lambda: worker.taken, lose=worker.lose, limit_s=limit_s)
    )


def test_a_right_sender_passes():
    """Twice: what arrived before is not counted."""
    worker = Worker()
    check(worker)
    assert worker.taken == [1, 2, 3, 4]
    worker.lost = False
    check(worker)


def test_a_loss_is_optional():
    """Where the worker cannot be ended the rest is checked."""
    worker = Worker()
    asyncio.run(check_sender(worker.send, [1, 2, 3, 4], -1, arrived=lambda: worker.taken))
    assert worker.taken == [1, 2, 3]


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (SwallowsRefusals, "the bad request was not refused"),
        (FailsWhole, "a good request failed with the bad one"),
        (StopsAtTheBad, "not every good request arrived"),
        (Reorders, "not every good request arrived"),
        (TakesTwice, "not every good request arrived"),
        (ForgetsToTake, "not every good request arrived"),
        (AnswersShort, "a good request failed"),
        (NothingAlone, "a request alone did not arrive"),
        (NoticesNothing, "a worker that is lost does not fail"),
    ],
)
def test_a_wrong_sender_is_named(kind, said):
    """Each mistake that a sender makes."""
    with pytest.raises(AssertionError, match=said):
        check(kind())


def test_a_sender_without_an_end_is_named():
    """Within the limit."""
    with pytest.raises(AssertionError, match="have no outcome"):
        check(NeverEnds(), limit_s=0.05)
