"""Calibration over a fake link in one process: the bytes really move, the answers are checked, the model comes out."""

from __future__ import annotations

import numpy as np
import pytest

from kv_bounce_planner._errors import RemoteProtocolError
from kv_bounce_planner.planning import LayoutError, LinkCalibration, Tier, TransferTimeout, calibrate
from kv_bounce_planner.planning.calibration import CalibrationTarget, scratch_bytes, trial_offsets
from kv_bounce_planner.sessions import MemoryRegion, PeerId
from kv_bounce_planner.testing import FakeNetwork, FakeWorld

SENDER, TARGET = PeerId("ctx", "g1", 0), PeerId("gen", "g2", 0)


class Clock:
    """Every look costs a microsecond, so that nothing takes no time."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 1e-6
        return self.now_s


class Link:
    def __init__(self, scratch: int = 1 << 20) -> None:
        self.world, network, self.clock = FakeWorld(), FakeNetwork(), Clock()
        self.memory = [np.random.default_rng(i).integers(0, 256, scratch, dtype=np.uint8) for i in range(2)]
        regions = [MemoryRegion(self.world.add_buffer(array), scratch) for array in self.memory]
        transports = [self.world.transport(peer) for peer in (SENDER, TARGET)]
        for transport, region in zip(transports, regions, strict=True):
            transport.register([region])
        self.channels = [network.channel(peer) for peer in (SENDER, TARGET)]
        self.target = CalibrationTarget(transports[1], self.channels[1], regions[1], clock=self.clock)
        self.link = LinkCalibration(
            transports[0],
            self.channels[0],
            TARGET,
            regions[0],
            clock=self.clock,
            idle=self.target.poll,
            timeout_s=0.05,
        )
        self.target.announce(SENDER)


def test_trials_move_the_bytes_they_say() -> None:
    """Direct and bounce trials put each source fragment where its target offset says."""
    link = Link()
    for tier in (Tier.DIRECT, Tier.BOUNCE):
        phases = link.link.measure(tier, 1 << 16, 64)
        assert phases.wire_s > 0
        assert (phases.gather_s > 0 and phases.scatter_s > 0) == (tier is Tier.BOUNCE)
        assert link.target.last_trial == (link.link._number, 64, 1024)
        number, count, size = link.target.last_trial
        sources, targets = trial_offsets(number, count, size)
        for source, target in zip(sources, targets):
            assert np.array_equal(link.memory[1][target : target + size], link.memory[0][source : source + size])
    assert link.target.trials == 2 + 2 * 3


def test_calibrate_over_the_link() -> None:
    """The whole way: a model from real trials, every coefficient at least 0, cached."""
    link, cache = Link(), {}
    model = calibrate(link.link, "fake", cache, sizes=(1 << 14, 1 << 16), counts=(1, 16, 64))
    assert model.samples == 12 and cache == {"fake": model}
    assert model.predict(Tier.DIRECT, fragment_count=64, range_count=64, total_bytes=1 << 16) > 0


def test_what_does_not_fit_is_refused_on_both_sides() -> None:
    """A trial beyond the scratch is refused before anything is sent, and by the target if it comes all the same."""
    link = Link(scratch=1 << 16)
    with pytest.raises(LayoutError, match="scratch"):
        link.link.measure(Tier.DIRECT, 1 << 16, 4)
    assert scratch_bytes(1 << 12, 4) <= 1 << 16
    import msgspec

    for frame in (b"", b"\xc1", msgspec.msgpack.encode(["trial", 1, True, 1 << 40, 1]), msgspec.msgpack.encode(["x"])):
        link.channels[0].send(TARGET, frame)
        with pytest.raises(RemoteProtocolError):
            link.target.poll()


def test_a_silent_peer_is_a_timeout() -> None:
    """Bounded by the clock that was given."""
    link = Link()
    link.link._idle = lambda: None
    with pytest.raises(TransferTimeout):
        link.link.connect()
    with pytest.raises(TransferTimeout):
        link.link.connect()
    with pytest.raises(LayoutError):
        LinkCalibration(None, None, TARGET, None, clock=link.clock, repeats=0)  # type: ignore[arg-type]
