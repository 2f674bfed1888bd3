"""Writes that land after they were given up: what the library does by itself, and what a session makes of it.

The first half reproduces the facts with raw NIXL calls, one test per row of the measured table; if one of them changed, the
proofs of that transport class would have to be thought through again. The second half is the session's answer on both
measured transports: memory is not reusable before the proof of its class, and what refilled it afterwards survives.

The facts change with the library and not with us: by day one of each transport class, all of them by night.
"""

from __future__ import annotations

import pytest

NBYTES = 4 << 20
OLD, NEW, REFILL = 7, 9, 3


@pytest.fixture
def raw_pair(make_peer):
    """(target, writer) with NIXL alone: the writer knows the target's metadata, its memory is filled with OLD."""

    def make(transport, nbytes=NBYTES):
        target, writer = make_peer("gen", "g1"), make_peer("ctx", "c1", 1)
        for peer in (target, writer):
            peer.init({"tcp": "tcp", "cma": None}[transport], nbytes)
        writer("fill", value=OLD)
        writer("raw_connect", peer=target.peer, info=target("raw_info", peer=writer.peer))
        return target, writer

    return make


def warm(target, writer):
    """One small write to its end, so that the connection exists: data then moves without the target's help."""
    writer("raw_post", peer=target.peer, target=target.base, nbytes=64)
    for _ in range(500):
        target("raw_progress", peer=writer.peer, seconds=0.002)
        if writer("raw_progress", peer=target.peer, seconds=0.002) == "DONE":
            break
    assert writer("raw_release") == "released"
    for _ in range(20):  # the connection's own messages: until they are through, the fast lanes are not in use
        target("raw_progress", peer=writer.peer, seconds=0.003)
        writer("raw_progress", peer=target.peer, seconds=0.003)


def post_in_progress(target, writer, nbytes=NBYTES):
    """Post one write of everything over tcp while the target makes no progress; what is on its way stays on its way."""
    warm(target, writer)
    assert writer("raw_post", peer=target.peer, target=target.base, nbytes=nbytes) == "PROC"
    assert writer("raw_progress", peer=target.peer, seconds=0.3) == "PROC"
    assert target("count_of", value=OLD) <= 64, "bytes landed without the target's progress: not receiver-executed"


# --- facts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "deregistered",
    [pytest.param(False, id="registered", marks=pytest.mark.slow), pytest.param(True, id="deregistered")],
)
def test_fact_tcp_write_of_a_reaped_sender_lands_when_the_target_polls(raw_pair, deregistered):
    """tcp: the sender is dead and reaped, the memory perhaps deregistered, and bytes still land in the refilled block."""
    target, writer = raw_pair("tcp")
    post_in_progress(target, writer)
    writer.kill()
    target("fill", value=REFILL)
    if deregistered:
        target("deregister")
    target("raw_progress", peer=writer.peer, seconds=0.5)
    assert target("count_of", value=OLD) > 0, "a reaped sender's tcp write no longer lands: the rule can be relaxed"


@pytest.mark.slow
def test_fact_tcp_nothing_lands_once_the_targets_agent_is_destroyed(raw_pair):
    """tcp: with the target's agent destroyed first, not one byte lands."""
    target, writer = raw_pair("tcp")
    post_in_progress(target, writer)
    writer.kill()
    target("destroy_agent", instance="ctx", generation="c1")
    target("fill", value=REFILL)
    assert target("count_of", value=REFILL) == NBYTES


@pytest.mark.slow
def test_fact_tcp_live_sender_that_releases_in_progress_is_stopped_by_the_targets_agent(raw_pair):
    """tcp: a live sender releases its handle in progress; after the target's agent is destroyed nothing lands."""
    target, writer = raw_pair("tcp")
    post_in_progress(target, writer)
    writer("raw_release")
    target("destroy_agent", instance="ctx", generation="c1")
    target("fill", value=REFILL)
    writer("raw_progress", peer=target.peer, seconds=0.3)
    assert target("count_of", value=REFILL) == NBYTES


def test_fact_cma_stale_metadata_writes_after_the_targets_agent_is_destroyed(raw_pair):
    """CMA: a live sender with stale metadata writes everything although the target's agent is gone."""
    target, writer = raw_pair("cma")
    warm(target, writer)
    writer("raw_prepare", peer=target.peer, target=target.base, nbytes=NBYTES)
    target("destroy_agent", instance="ctx", generation="c1")
    target("fill", value=REFILL)
    state = writer("raw_transfer")
    assert target("count_of", value=OLD) > 0, f"stale metadata no longer writes over CMA ({state}): relax the rule"


@pytest.mark.slow
def test_fact_tcp_source_released_in_progress_and_reused_sends_the_new_bytes(raw_pair):
    """tcp: releasing a handle in progress and refilling its source makes the target receive the new bytes."""
    nbytes = 32 << 20  # more than the sockets' buffers: the rest is read from the source later
    target, writer = raw_pair("tcp", nbytes)
    post_in_progress(target, writer, nbytes)
    writer("raw_release")
    writer("fill", value=NEW)
    for _ in range(40):
        target("raw_progress", peer=writer.peer, seconds=0.02)
        writer("raw_progress", peer=target.peer, seconds=0.02)
        if target("count_of", value=NEW):
            break
    assert target("count_of", value=NEW) > 0, "a released source is no longer read: the rule can be relaxed"


# --- the session ----------------------------------------------------------------------------------------------------


def post_under_session(receiver, sender, together, request=1):
    """The sender has posted, the receiver has made no progress since its request left. Returns the operation."""
    sender("fill", value=OLD)
    (operation,) = receiver(
        "open", request=request, incarnation=0, writers=[sender.peer], count=1, size=NBYTES, tier="direct"
    )
    receiver("poll", count=2)
    sender("poll", seconds=5, until=["ReceiveRequested"])
    sender("ready", request=request)
    assert sender("until_state", operation=operation, states=["POSTING", "IN_FLIGHT", "DONE"], seconds=5) != "HELD"
    return operation


def settle(receiver, sender, together, seconds=5.0):
    """Both sides poll until the receiver's memory is released."""
    names = []
    for _ in range(int(seconds / 0.02)):
        received, _ = together((receiver, "poll", {"seconds": 0.02}), (sender, "poll", {"seconds": 0.02}))
        names += [event[0] for event in received]
        if "MemoryReleased" in names or "MemoryQuarantined" in names:
            break
    return names


@pytest.mark.parametrize("transport", ["tcp", "cma"])
def test_a_cancelled_block_is_not_reusable_before_its_proof_and_the_refill_survives(session_pair, together, transport):
    """The late-write case: target without progress, cancel, reuse. The block comes back only with the proof."""
    receiver, sender = session_pair(transport, nbytes=NBYTES)
    operation = post_under_session(receiver, sender, together)
    assert receiver("cancel", request=1)
    assert receiver("freed_claims") == [], "reusable right after the cancel: the write is still on its way"
    assert receiver("state", operation=operation) == "EXPOSED"
    names = settle(receiver, sender, together)
    assert "TransferCancelled" in names and names[-1] == "MemoryReleased"
    assert receiver("freed_claims") == [1]
    receiver("fill", value=REFILL)
    together((receiver, "poll", {"seconds": 0.3}), (sender, "poll", {"seconds": 0.3}))
    assert receiver("count_of", value=REFILL) == NBYTES, "the refilled block was overwritten"


@pytest.mark.parametrize("transport", ["tcp", "cma"])
def test_a_reaped_sender_alone_proves_nothing_where_the_target_executes(session_pair, together, transport):
    """Sender SIGKILLed and reaped in progress: still owned; with the class's whole proof released, and the refill survives."""
    receiver, sender = session_pair(transport, nbytes=NBYTES, nixl={"bytes_per_post_max": 1 << 20})
    operation = post_under_session(receiver, sender, together)
    sender.kill()
    receiver("peer_died", peer=sender.peer, evidence="process reaped")
    assert receiver("state", operation=operation) == "IN_DOUBT", "a peer's exit taken as proof"
    assert receiver("freed_claims") == []
    receiver("retire", instance="ctx", generation="c1")
    receiver("poll", count=2)
    assert receiver("freed_claims") == [1]
    receiver("fill", value=REFILL)
    receiver("poll", seconds=0.3)
    assert receiver("count_of", value=REFILL) == NBYTES


@pytest.mark.parametrize("transport", ["tcp", "cma"])
def test_destroying_our_agent_is_proof_over_tcp_and_not_over_cma(session_pair, together, transport):
    """A live sender, our agent for it destroyed: tcp memory is free, CMA memory stays owned until the sender is reaped."""
    receiver, sender = session_pair(transport, nbytes=NBYTES)
    sender("fill", value=OLD)
    receiver("open", request=1, incarnation=0, writers=[sender.peer], count=1, size=NBYTES, tier="direct")
    receiver("poll", count=2)
    sender("poll", seconds=5, until=["ReceiveRequested"])
    receiver("retire", instance="ctx", generation="c1")
    receiver("poll", count=2)
    if transport == "tcp":
        assert receiver("freed_claims") == [1]
        receiver("fill", value=REFILL)
    else:
        assert receiver("freed_claims") == [], "agent destruction taken as proof on CMA"
    sender("ready", request=1)  # the live sender now writes with stale metadata
    sender("poll", seconds=0.2)
    if transport == "cma":
        sender.kill()
        receiver("peer_died", peer=sender.peer, evidence="process reaped")
        receiver("poll", count=2)
        assert receiver("freed_claims") == [1]
        receiver("fill", value=REFILL)
    receiver("poll", seconds=0.2)
    assert receiver("count_of", value=REFILL) == NBYTES


@pytest.mark.parametrize("transport", ["tcp", "cma"])
def test_a_source_is_never_released_while_a_write_reads_it(session_pair, together, transport):
    """Sealed and asked for its snapshot in progress: no release, no snapshot; both come with the completion."""
    receiver, sender = session_pair(transport, nbytes=NBYTES)
    operation = post_under_session(receiver, sender, together)
    sender("seal", request=1)
    sender("poll", seconds=0.3)
    state = sender("state", operation=operation)
    if transport == "tcp":
        assert state in ("POSTING", "IN_FLIGHT")
    if state in ("POSTING", "IN_FLIGHT"):
        assert sender("freed_claims") == []
        assert sender("snapshot", request=1) is None
    for _ in range(100):
        together((receiver, "poll", {"seconds": 0.02}), (sender, "poll", {"seconds": 0.02}))
        if sender("freed_claims"):
            break
    assert sender("freed_claims") == [1]
    assert sender("snapshot", request=1) == ["COMPLETED", ["done"], False]
    sender("fill", value=NEW)
    together((receiver, "poll", {"seconds": 0.2}), (sender, "poll", {"seconds": 0.2}))
    assert receiver("count_of", value=OLD) == NBYTES, "bytes of the reused source landed"


@pytest.mark.parametrize("transport", ["tcp", "cma"])
def test_a_later_generation_does_not_advertise_what_an_earlier_one_still_exposes(session_pair, together, transport):
    """Stale metadata: the earlier generation's request is posted late; at most its own block, never given away, is written.

    Whether the library refuses the late post depends on what it noticed before (see the fact about CMA above).
    """
    receiver, sender = session_pair(transport, nbytes=NBYTES)
    sender("fill", value=OLD)
    half = NBYTES // 2  # block 0; the other half is somebody else's
    receiver("open_in_ledger", request=1, writers=[sender.peer], size=half, blocks=["block 0"])
    receiver("poll", count=2)
    sender("poll", seconds=5, until=["ReceiveRequested"])
    receiver("renew", generation="g2")
    receiver("fill", value=REFILL)
    with pytest.raises(RuntimeError, match="AddressStillExposed"):
        receiver("open_in_ledger", request=2, writers=[sender.peer], size=half, blocks=["block 0"])
    receiver("open_in_ledger", request=2, writers=[sender.peer], size=half, blocks=["block 1"])
    sender("ready", request=1)
    together((receiver, "poll", {"seconds": 0.4}), (sender, "poll", {"seconds": 0.4}))
    assert receiver("freed_claims") == []
    late = receiver("count_of", value=OLD)
    assert late <= half
    assert receiver("count_of", value=REFILL) == NBYTES - late, "memory was written that nobody advertised"
    assert sender("transport_statistics")["posts"] > 0, "nothing was late: the rule is not tried"


@pytest.mark.parametrize("transport", ["tcp", "cma"])
def test_a_request_for_an_earlier_generation_of_the_sender_is_sealed_unposted(session_pair, together, transport):
    """Metadata of an earlier incarnation of the sender: the live one answers sealed, and the memory is free at once."""
    receiver, sender = session_pair(transport, nbytes=NBYTES)
    receiver("open_stale", request=1, peer=sender.peer, generation="c0", size=NBYTES)
    received, _ = together(
        (receiver, "poll", {"seconds": 5, "until": ["MemoryReleased"]}),
        (sender, "poll", {"seconds": 0.3}),
    )
    assert [event[0] for event in received] == ["TransferFailed", "MemoryReleased"]
    assert "another generation" in received[0][2]
    assert sender("transport_statistics")["posts"] == 0


# --- reads ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def raw_readers(make_peer):
    """(reader, source) with NIXL alone: the reader knows the source's metadata, the source is filled with OLD."""

    def make(transport, nbytes=NBYTES):
        reader, source = make_peer("gen", "g1"), make_peer("ctx", "c1", 1)
        for peer in (reader, source):
            peer.init({"tcp": "tcp", "cma": None}[transport], nbytes)
        source("fill", value=OLD)
        reader("raw_connect", peer=source.peer, info=source("raw_info", peer=reader.peer))
        source("raw_connect", peer=reader.peer, info=reader("raw_info", peer=source.peer))
        reader("raw_prepare", peer=source.peer, target=source.base, nbytes=64, verb="READ")
        reader("raw_transfer")
        for _ in range(500):
            source("raw_progress", peer=reader.peer, seconds=0.002)
            if reader("raw_progress", peer=source.peer, seconds=0.002) == "DONE":
                break
        assert reader("raw_release") == "released"
        return reader, source

    return make


@pytest.mark.slow
@pytest.mark.parametrize("destroyed", [False, True], ids=["agent lives", "agent destroyed"])
def test_fact_tcp_read_of_a_reaped_source_lands_when_the_reader_polls(raw_readers, destroyed):
    """tcp: the source served and was reaped; its bytes land at the reader's next poll, unless the reader's agent is gone."""
    reader, source = raw_readers("tcp")
    reader("raw_prepare", peer=source.peer, target=source.base, nbytes=NBYTES, verb="READ")
    assert reader("raw_transfer") == "PROC"
    source("raw_progress", peer=reader.peer, seconds=0.3)
    source.kill()
    if destroyed:
        reader("raw_drop")
        reader("destroy_agent", instance="ctx", generation="c1")
    reader("fill", value=REFILL)
    if not destroyed:
        reader("raw_progress", peer=source.peer, seconds=0.5)
        assert reader("count_of", value=OLD) > 0, "a reaped source's bytes no longer land: the rule can be relaxed"
    assert not destroyed or reader("count_of", value=REFILL) == NBYTES


@pytest.mark.slow
def test_fact_cma_read_is_over_when_the_library_says_so(raw_readers):
    """CMA: the reader's own process copies, inside its calls; once its agent is gone nothing more lands."""
    reader, source = raw_readers("cma")
    reader("raw_prepare", peer=source.peer, target=source.base, nbytes=NBYTES, verb="READ")
    reader("raw_transfer")
    reader("raw_drop")
    reader("destroy_agent", instance="ctx", generation="c1")
    reader("fill", value=REFILL)
    source("raw_progress", peer=reader.peer, seconds=0.2)
    assert reader("count_of", value=REFILL) == NBYTES


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["tcp", "cma"])
def test_fact_a_sources_agent_serves_reads_over_tcp_and_is_not_needed_over_cma(raw_readers, transport):
    """With the source's agent destroyed: no byte of a refilled source is read over tcp, every byte over CMA."""
    reader, source = raw_readers(transport)
    reader("raw_prepare", peer=source.peer, target=source.base, nbytes=NBYTES, verb="READ")
    source("destroy_agent", instance="gen", generation="g1")
    source("fill", value=NEW)
    reader("raw_transfer")
    reader("raw_progress", peer=source.peer, seconds=0.3)
    read = reader("count_of", value=NEW)
    assert (read == 0) if transport == "tcp" else (read == NBYTES), read


@pytest.mark.slow
def test_fact_tcp_a_source_that_serves_a_reader_which_died_is_ended_by_the_library(raw_readers):
    """tcp: the process that serves a read aborts when the reader is killed before it answers. So it lends only if told to."""
    reader, source = raw_readers("tcp")
    reader("raw_prepare", peer=source.peer, target=source.base, nbytes=NBYTES, verb="READ")
    assert reader("raw_transfer") == "PROC"
    reader("raw_progress", peer=source.peer, seconds=0.05)
    reader.kill()
    with pytest.raises((RuntimeError, BrokenPipeError), match=r"has ended|Broken pipe"):
        source("raw_progress", peer=reader.peer, seconds=3.0)


def test_a_session_lends_until_the_reader_is_reaped_and_then_takes_back(session_pair, together):
    """CMA. The reader is killed while it may read: owned through seal and loss of the link, released with its death."""
    reader, source = session_pair("cma", nbytes=NBYTES, nixl={"bytes_per_post_max": 65536})
    source("fill", value=OLD)
    (operation,) = reader(
        "open", request=1, incarnation=0, writers=[source.peer], count=8, size=NBYTES // 8, tier="pull"
    )
    reader("poll", count=2)
    source("poll", seconds=5, until=["ReceiveRequested"])
    source("ready", request=1)
    assert source("until_state", operation=operation, states=["LENT"], seconds=5) == "LENT"
    reader("poll", count=2)
    reader.kill()
    source("seal", request=1)
    assert "SourceReleased" not in [event[0] for event in source("poll", seconds=0.5)]
    source("peer_died", peer=reader.peer, evidence="process reaped")
    assert [event[0] for event in source("poll", count=2)][-1] == "SourceReleased"


def test_a_session_reads_nothing_into_memory_that_it_gave_back(session_pair, together):
    """tcp: the source is killed while it is read. Our memory comes back with our agent's end, and stays as it is refilled."""
    reader, source = session_pair("tcp", nbytes=NBYTES)
    source("fill", value=OLD)
    (operation,) = reader("open", request=1, incarnation=0, writers=[source.peer], count=1, size=NBYTES, tier="pull")
    reader("poll", count=2)
    source("poll", seconds=5, until=["ReceiveRequested"])
    source("ready", request=1)
    source("poll", count=3)
    assert reader("until_state", operation=operation, states=["READING"], seconds=5) == "READING"
    source("poll", count=3)
    source.kill()
    reader("peer_died", peer=source.peer, evidence="process reaped")
    assert "MemoryReleased" not in [event[0] for event in reader("poll", count=2)]
    reader("retire", instance="ctx", generation="c1")
    assert "MemoryReleased" in [event[0] for event in reader("poll", count=2)]
    reader("fill", value=REFILL)
    reader("poll", seconds=0.3)
    assert reader("count_of", value=REFILL) == NBYTES
