"""The check of communicators: ours conform, and each mistake of another is named."""

import pytest

from comm_broadcast.testing import FakeComm, FakeWorld, check_comm


@pytest.mark.parametrize("size", [1, 2, 5])
def test_the_fake_conforms(size):
    """Whatever the number of ranks."""
    assert FakeWorld(size).run(check_comm) == [None] * size


@pytest.mark.mpi(2)
def test_mpi_conforms_on_two_ranks(world_comm):
    """On a duplicate, which the check frees."""
    from comm_broadcast import MpiComm

    check_comm(MpiComm(world_comm))


@pytest.mark.slow
@pytest.mark.mpi(4)
def test_mpi_conforms_on_four_ranks(world_comm):
    """Trees and rings have ranks between."""
    from comm_broadcast import MpiComm

    check_comm(MpiComm(world_comm))


class ListsNothing(FakeComm):
    def isend(self, buffer, target):
        super().isend(buffer, target)
        del self.posted[-1:]


class ListsTwice(FakeComm):
    def ibcast(self, buffer, root):
        super().ibcast(buffer, root)
        self.posted.append(self.posted[-1])


class ForgetsAll(FakeComm):
    def forget(self, keep):
        super().forget(0)


class ForgetsTooFew(FakeComm):
    def forget(self, keep):
        super().forget(min(keep + 1, len(self.posted)))


class ForgetsOneAtATime(FakeComm):
    def forget(self, keep):
        super().forget(max(keep, len(self.posted) - 1))


class Unready(FakeComm):
    def test(self, index):
        posted = self.posted[index]
        posted.done = not posted.done and super().test(index)
        return posted.done


class NeverDone(FakeComm):
    def test(self, index):
        return self.posted[index].operation != "gather" and super().test(index)


class Hasty(FakeComm):
    def test(self, index):
        return self.posted[index].operation == "receive" or super().test(index)


class HastyAlone(FakeComm):
    def test(self, index):
        alone = len(self.posted) == 1 and self.posted[0].operation == "receive"
        return alone or super().test(index)


class Shuffles(FakeComm):
    def iallgather(self, send, receive):
        super().iallgather(send, receive)
        attempt = self.posted[-1].attempt

        def backwards():
            done = attempt()
            if done:
                receive[:] = bytes(reversed(receive))
            return done

        self.posted[-1].attempt = backwards


class FromAnother(FakeComm):
    def ibcast(self, buffer, root):
        super().ibcast(buffer, 0)


class GathersShort(FakeComm):
    def igather(self, send, receive, root):
        super().igather(send, None if receive is None else bytearray(len(receive)), root)


class Overtakes(FakeComm):
    def irecv(self, buffer, source):
        super().irecv(buffer, source)
        posted = self.posted[-1]
        if len(buffer) > 1 and len(self.posted) == 1:
            box, number = self._world.mail(source, self.rank), posted.number

            def attempt():
                data = box.get(number + 1)
                if data is None:
                    return False
                buffer[:] = data
                return True

            posted.attempt = attempt


class BeginsListed(FakeComm):
    def __init__(self, world, rank):
        super().__init__(world, rank)
        self.isend(b"x", rank)


class OffTheWorld(FakeComm):
    def __init__(self, world, rank):
        super().__init__(world, rank)
        self.rank = rank + world.size


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (ListsNothing, "isend does not list one operation"),
        (ListsTwice, "ibcast does not list one operation"),
        (ForgetsAll, "after forget"),
        (ForgetsTooFew, "after forget"),
        (ForgetsOneAtATime, "after forget"),
        (Unready, "under way again"),
        (NeverDone, "has not completed within"),
        (Hasty, "message 0 of"),
        (HastyAlone, "that nobody has sent"),
        (Shuffles, "iallgather of"),
        (FromAnother, "ibcast of|met"),
        (GathersShort, "igather of"),
        (Overtakes, "message 0 of"),
        (BeginsListed, "before anything was started"),
        (OffTheWorld, "not among the ranks"),
    ],
)
def test_a_communicator_that_does_not_conform_is_named(kind, said):
    """Each mistake that an adapter makes, on some rank."""
    world = FakeWorld(2)
    world.comm = lambda rank: kind(world, rank)
    errors = [error for error in world.run(lambda comm: check_comm(comm, limit_s=1.0)) if error is not None]
    assert any(isinstance(error, AssertionError) for error in errors), errors
    with pytest.raises(Exception, match=said):
        raise ExceptionGroup("; ".join(map(str, errors)), [e for e in errors if isinstance(e, Exception)])
