"""Bounce reservations: boundary, alignment, fairness, conservation."""

from __future__ import annotations

import random
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_bounce_planner._errors import LocalProtocolError
from kv_bounce_planner.planning import Reason
from kv_bounce_planner.sessions import BounceArena, OperationIdentity, TransferIdentity
from kv_bounce_planner.sessions.proof import ProofKind, _prove

BASE = 0x100000


def operation(number: int) -> OperationIdentity:
    return OperationIdentity(TransferIdentity(1, 0, "g1", 0), 0, number)


def done(number: int):
    return _prove(ProofKind.DONE, operation(number))


def bind(reservation, *writers):
    advertised = reservation.advertise()
    return advertised, [advertised.bind_writer(operation(writer), writer) for writer in writers]


def test_each_writer_is_bound_to_its_own_aligned_part():
    """Two writers of 100 B at alignment 4: 0x100000 and 0x100064; unequal bytes are as good."""
    arena = BounceArena(BASE, 4096, alignment=4)
    _, regions = bind(arena.reserve("k", {0: 100, 1: 100}), 0, 1)
    assert [(region.address, region.byte_count) for region in regions] == [(0x100000, 100), (0x100064, 100)]
    _, regions = bind(arena.reserve("l", {7: 33, 2: 500}), 7, 2)
    assert regions[1].address == regions[0].address + 36


def test_alignment_holds_from_an_unaligned_base():
    """The address is aligned, not the offset."""
    arena = BounceArena(BASE + 3, 1 << 14, alignment=512)
    _, regions = bind(arena.reserve("k", {0: 1, 1: 513, 2: 1}), 0, 1, 2)
    assert all(region.address % 512 == 0 for region in regions)
    arena.validate()


def test_an_arena_over_an_array_keeps_it_alive_and_wants_it_whole():
    """``of`` takes address and size from the array, holds it, and refuses what it could not write into or through."""
    memory = np.zeros(8192, np.uint8)
    held = sys.getrefcount(memory)
    arena = BounceArena.of(memory, alignment=4)
    assert (arena.base_address, arena.capacity_bytes) == (memory.ctypes.data, 8192)
    assert sys.getrefcount(memory) == held + 1
    frozen = np.zeros(8192, np.uint8)
    frozen.flags.writeable = False
    for refused in (memory[::2], frozen):
        with pytest.raises(ValueError, match="contiguous and writable"):
            BounceArena.of(refused)


def test_before_the_advertisement_everything_falls_back_and_after_it_nothing_does():
    """The boundary is a type: a Reservation can be abandoned, an AdvertisedReservation only proven or quarantined."""
    arena = BounceArena(BASE, 4096, alignment=1)
    reservation = arena.reserve("k", {0: 100})
    reservation.abandon()
    assert arena.statistics().free_bytes == 4096
    reservation = arena.reserve("k", {0: 100})
    advertised, _ = bind(reservation, 0)
    for spent in (reservation.abandon, reservation.advertise):
        with pytest.raises(LocalProtocolError, match="advertised"):
            spent()
    assert not hasattr(advertised, "abandon")
    with pytest.raises(LocalProtocolError, match="no proof"):
        advertised.release([])
    with pytest.raises(LocalProtocolError, match="no proof"):
        advertised.release([done(5)])
    assert arena.statistics().held_bytes == 100
    advertised.release([done(0)])
    assert arena.statistics().free_bytes == 4096
    with pytest.raises(LocalProtocolError, match="free"):
        advertised.release([done(0)])


def test_a_writer_is_bound_once_and_to_its_own_part_only():
    """Binding is for ever; a stranger has no part."""
    arena = BounceArena(BASE, 4096)
    advertised, [region] = bind(arena.reserve("k", {3: 8}), 3)
    assert advertised.bind_writer(operation(3), 3) is region
    with pytest.raises(LocalProtocolError, match="bound to"):
        advertised.bind_writer(operation(4), 3)
    with pytest.raises(LocalProtocolError, match="no part"):
        advertised.bind_writer(operation(4), 4)


def test_a_part_that_was_never_bound_needs_no_proof():
    """Its address never left: releasing needs the proofs of the bound ones only."""
    arena = BounceArena(BASE, 4096)
    advertised, _ = bind(arena.reserve("k", {0: 8, 1: 8}), 0)
    advertised.release([done(0)])
    assert arena.statistics().reservations == 0


def test_freed_holes_are_reused_out_of_order():
    """First fit finds the hole in the middle, exactly."""
    arena = BounceArena(BASE, 400, alignment=4)
    held = [bind(arena.reserve(key, {0: 100}), 0) for key in range(4)]
    assert arena.reserve("full", {0: 100}).reason is Reason.NO_SPACE
    held[2][0].release([done(0)])
    _, [region] = bind(arena.reserve("again", {0: 100}), 0)
    assert region.address == held[2][1][0].address
    arena.validate()


def test_fragmentation_refuses_what_no_hole_holds():
    """Every other region freed: two units are free and no two of them are adjacent."""
    arena = BounceArena(BASE, 512, alignment=128)
    held = [bind(arena.reserve(key, {0: 128}), 0)[0] for key in range(4)]
    held[0].release([done(0)])
    held[2].release([done(0)])
    assert arena.reserve("two", {0: 256}).reason is Reason.NO_SPACE
    assert arena.reserve("one", {0: 128})


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ({0: 1025}, Reason.OVERSIZE),
        ({0: 2**64 - 1}, Reason.OVERSIZE),
        ({0: 512, 1: 513}, Reason.OVERSIZE),
        ({}, Reason.PLAN_BYTES),
        ({0: 0}, Reason.PLAN_BYTES),
        ({0: -4}, Reason.PLAN_BYTES),
        ({0: 5, 1: 0}, Reason.PLAN_BYTES),
        ({0: True}, Reason.PLAN_BYTES),
    ],
)
def test_impossible_wishes_are_refused_whole_and_leave_no_state(parts, reason):
    """Refused at once, by both entrances; nothing is held or queued."""
    arena = BounceArena(BASE, 1024)
    before = arena.statistics()
    assert arena.reserve("k", parts).reason is reason
    assert arena.enqueue("k", parts).reason is reason
    after = arena.statistics()
    assert (after.free_bytes, after.waiting) == (before.free_bytes, 0)


def test_peek_names_where_the_next_region_would_lie():
    """A guess for preparing copies: it holds as long as nothing else is reserved, and reserves nothing itself."""
    arena = BounceArena(BASE, 1024, alignment=64)
    _held, _ = bind(arena.reserve("a", {0: 100}), 0)
    guess = arena.peek(200)
    assert arena.statistics().held_bytes == 100
    _, [region] = bind(arena.reserve("b", {0: 200}), 0)
    assert region.address == guess
    assert arena.peek(2000) is None


def test_exact_fit_fits_and_a_live_key_is_refused():
    """The last part needs no padding behind it."""
    arena = BounceArena(BASE, 1024 + 7, alignment=512)
    reservation = arena.reserve("k", {0: 512, 1: 512 + 7})
    assert reservation
    assert arena.reserve("k", {0: 1}).reason is Reason.KEY_LIVE


def test_quarantined_space_is_never_given_again_and_blocks_closing():
    """QUARANTINED has no way back; close() refuses, keeps admission closed and stays retryable."""
    arena = BounceArena(BASE, 1024, alignment=512)
    lost, _ = bind(arena.reserve("k", {0: 512}), 0)
    held, _ = bind(arena.reserve("l", {0: 512}), 0)
    assert lost.quarantine() == 512
    with pytest.raises(LocalProtocolError, match="quarantined"):
        lost.release([done(0)])
    held.release([done(0)])
    assert arena.reserve("m", {0: 1024}).reason is Reason.NO_SPACE
    assert arena.statistics().quarantined_bytes == 512
    for _ in range(2):
        with pytest.raises(LocalProtocolError, match="512 quarantined"):
            arena.close()
    assert arena.reserve("m", {0: 1}).reason is Reason.CLOSING
    arena.validate()


def test_waiting_is_first_come_first_served_and_nobody_barges_in():
    """A newcomer does not pass those who wait, even where it would fit."""
    arena = BounceArena(BASE, 1000, alignment=1)
    held, _ = bind(arena.reserve("held", {0: 800}), 0)
    assert arena.enqueue("first", {0: 500}) is None
    assert arena.enqueue("second", {0: 600}) is None
    assert arena.reserve("newcomer", {0: 10}).reason is Reason.NO_SPACE
    assert arena.pump() == ()
    held.release([done(0)])
    assert [reservation.key for reservation in arena.pump()] == ["first"]
    assert arena.statistics().waiting == 1


def test_small_flows_cannot_starve_a_large_head():
    """A head of nearly the whole arena is passed at most max(8, 2 * waiting) times, then space collects for it."""
    arena = BounceArena(BASE, 1024, alignment=1)
    live = [bind(arena.reserve(("small", n), {0: 64}), 0)[0] for n in range(16)]
    assert arena.enqueue("large", {0: 1000}) is None
    number, served_large, passes = 100, False, 0
    for _ in range(200):
        live.pop(0).release([done(0)])
        arena.enqueue(("small", number), {0: 64})
        number += 1
        for reservation in arena.pump():
            if reservation.key == "large":
                served_large = True
            else:
                passes += 1
                live.append(bind(reservation, 0)[0])
        if served_large or not live:
            break
    assert served_large
    assert passes <= 8 + 2 * 16


def test_withdrawn_waiters_leave_nothing_behind():
    """A thousand flows come and go: no tombstone, and the next one is served."""
    arena = BounceArena(BASE, 100, alignment=1)
    held, _ = bind(arena.reserve("held", {0: 100}), 0)
    for number in range(1000):
        assert arena.enqueue(number, {0: 10}) is None
    for number in range(999):
        assert arena.withdraw(number)
        assert not arena.withdraw(number)
    held.release([done(0)])
    assert [reservation.key for reservation in arena.pump()] == [999]
    assert arena.statistics().waiting == 0


def test_an_emptied_arena_serves_a_region_larger_than_what_was_held():
    """A ring of 100 B, 60 held and freed, 70 wanted: in a peer it waited for ever; here the space is whole again."""
    arena = BounceArena(BASE, 100, alignment=1)
    held, _ = bind(arena.reserve("held", {0: 60}), 0)
    assert arena.enqueue("next", {0: 70}) is None
    assert arena.pump() == ()
    held.release([done(0)])
    assert [reservation.key for reservation in arena.pump()] == ["next"]


def test_a_key_that_was_aborted_leaves_nothing_that_wedges_the_next():
    """Abort in every order around the grant, a thousand times: all space comes back."""
    arena = BounceArena(BASE, 1000, alignment=1)
    for number in range(1000):
        arena.enqueue(number, {0: 400, 1: 300})
        if number % 3 == 0:
            arena.withdraw(number)
        for reservation in arena.pump():
            if number % 3 == 1:
                reservation.abandon()
            else:
                advertised, _ = bind(reservation, 1)
                advertised.release([done(1)])
    assert arena.statistics().free_bytes == 1000


@pytest.mark.parametrize("arguments", [{"alignment": 3}, {"alignment": 0}, {"base_address": 0}, {"capacity_bytes": 0}])
def test_constructor_refuses_what_is_no_range(arguments):
    with pytest.raises(ValueError, match=r"wants|holds no"):
        BounceArena(**{"base_address": BASE, "capacity_bytes": 1024, **arguments})


@settings(max_examples=120, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), alignment=st.sampled_from([1, 16, 512]))
def test_bytes_are_conserved_and_regions_disjoint_under_any_order(seed, alignment):
    """Random reserve, bind, abandon, release, quarantine against a byte map: every byte has one owner at most."""
    generator = random.Random(seed)
    arena = BounceArena(BASE, 8192, alignment=alignment)
    owner = {}
    plain, advertised, lost, number = [], [], set(), 0
    for _ in range(80):
        choice = generator.random()
        if choice < 0.45:
            parts = {writer: generator.randint(1, 900) for writer in range(generator.randint(1, 3))}
            reservation = arena.reserve(number, parts)
            number += 1
            if reservation:
                plain.append((reservation, parts))
        elif choice < 0.6 and plain:
            reservation, _ = plain.pop(generator.randrange(len(plain)))
            reservation.abandon()
        elif choice < 0.8 and plain:
            reservation, parts = plain.pop(generator.randrange(len(plain)))
            held, regions = bind(reservation, *parts)
            for region in regions:
                for at in range(region.address, region.address + region.byte_count):
                    assert at not in owner, "two regions share a byte"
                    assert BASE <= at < BASE + 8192
                    owner[at] = held
            advertised.append((held, regions))
        elif choice < 0.97 and advertised:
            held, regions = advertised.pop(generator.randrange(len(advertised)))
            held.release([done(region.writer) for region in regions])
            owner = {at: who for at, who in owner.items() if who is not held}
        elif advertised:
            held, _ = advertised.pop()
            lost.add(held.key)
            held.quarantine()
        statistics = arena.statistics()
        assert statistics.free_bytes + statistics.held_bytes + statistics.quarantined_bytes == 8192
        arena.validate()
