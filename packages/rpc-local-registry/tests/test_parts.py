"""Parts by themselves: bodies that nobody of ours wrote, inboxes, errors on the wire."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from rpc_local_registry import (
    RpcAuthenticationError,
    RpcClient,
    RpcClosed,
    RpcConfig,
    RpcRemoteError,
    RpcServer,
    RpcStreamingError,
    StreamSource,
    new_key,
    rpc_method,
)
from rpc_local_registry._codec import DECODE_ERRORS, EXT_ARRAY, TypedDecoder
from rpc_local_registry._errors import MESSAGE_CHARS_MAX, TRACEBACK_CHARS_MAX, cause_table, describe, rebuild
from rpc_local_registry._streams import _EMPTY, Inbox
from rpc_local_registry.testing import eventually


def reference(code: int, index: int) -> bytes:
    """A body that is one array of ten numbers, by its extension and the number of its buffer."""
    return msgspec.msgpack.encode(msgspec.msgpack.Ext(code, msgspec.msgpack.encode((index, "<f8", (10,)))))


class TestBodies:
    """What a holder of the key can write into one."""

    BUFFERS = (memoryview(bytes(80)), memoryview(np.ones(10).tobytes()))

    @pytest.mark.parametrize(
        ("code", "index"), [(EXT_ARRAY, 2), (EXT_ARRAY, -1), (EXT_ARRAY, -2), (EXT_ARRAY, 1 << 40), (0, 0), (2, 1)]
    )  # fmt: skip
    def test_references_to_nothing(self, code: int, index: int) -> None:
        """Buffers are counted from the first one, and arrays have one extension."""
        with pytest.raises(DECODE_ERRORS):
            TypedDecoder(Any).decode(reference(code, index), self.BUFFERS)

    def test_references(self) -> None:
        """Each names its buffer; without buffers there is nothing to name."""
        for index in (0, 1):
            made = TypedDecoder(Any).decode(reference(EXT_ARRAY, index), self.BUFFERS)
            assert made.tolist() == [float(index)] * 10
            with pytest.raises(DECODE_ERRORS):
                TypedDecoder(Any).decode(reference(EXT_ARRAY, index))


class TestInbox:
    """One producer's queue, one consumer."""

    def test_what_is_discarded_is_gone(self) -> None:
        """What was not read at the end is, unless it is discarded; once closed, even again."""
        for discard in (False, True):
            inbox: Inbox[int] = Inbox()
            inbox.put(1)
            inbox.put(2)
            assert inbox.close(discard=discard)
            assert len(inbox) == (0 if discard else 2)
            assert inbox.take_nowait() is (_EMPTY if discard else 1)
            assert not inbox.close(discard=True)
            assert inbox.take_nowait() is _EMPTY

    def test_a_second_reader_is_refused(self) -> None:
        """And the first one still hears of the next item."""
        inbox: Inbox[int] = Inbox()
        told: list[int] = []
        assert inbox.watch(lambda: told.append(1))
        with pytest.raises(RpcStreamingError, match="one consumer"):
            inbox.watch(lambda: told.append(2))
        inbox.put(5)
        assert told == [1]


class Picky(Exception):
    """Its constructor wants more than a message."""

    def __init__(self, left: int, right: int) -> None:
        super().__init__(f"{left} and {right}")


class TestErrors:
    """What of an exception travels."""

    def test_long_texts_are_cut_in_the_middle(self) -> None:
        """Message and traceback."""

        def fail(depth: int) -> None:
            if depth:
                fail(depth - 1)
            raise ValueError("a" + "x" * 10 * TRACEBACK_CHARS_MAX + "z")

        with pytest.raises(ValueError, match="x") as caught:
            fail(20)
        body = describe(caught.value)
        for text, most in ((body.message, MESSAGE_CHARS_MAX), (body.remote_traceback, TRACEBACK_CHARS_MAX)):
            assert len(text) <= most
            assert "[...]" in text
        assert (body.message[0], body.message[-1]) == ("a", "z")

    def test_an_exception_that_cannot_be_made_is_told_by_its_name(self) -> None:
        """Although its class is allowed."""
        error = rebuild(describe(Picky(1, 2)), cause_table([Picky]))
        assert isinstance(error, RpcRemoteError)
        assert error.__cause__ is None
        assert "Picky" in str(error)
        assert "1 and 2" in str(error)


def test_local_streams_end_with_their_client(key: bytes) -> None:
    """As those over the socket do; the worker hears of it."""
    opened: list[StreamSource[int]] = []
    left: list[str] = []

    class Worker:
        @rpc_method(streaming=True, non_blocking=True)
        def push(self) -> StreamSource[int]:
            """A stream that nobody closes."""
            opened.append(StreamSource(on_cancel=lambda: left.append("left")))
            return opened[-1]

    with RpcServer(Worker(), "ipc://", key) as server:
        for count, fast_path in enumerate((True, False), 1):
            client = RpcClient(server.address, key, fast_path=fast_path)
            stream = client.push().remote_streaming(timeout_s=20)
            eventually(lambda wanted=count: len(opened) == wanted)
            client.close()
            with pytest.raises(RpcClosed):
                next(stream)
            eventually(lambda wanted=count: left == ["left"] * wanted)


def test_a_wrong_key_has_no_local_path(key: bytes) -> None:
    """A client that enters is told at once, though its server is in this very process; nothing is said to be local."""

    class Worker:
        @rpc_method(non_blocking=True)
        def ok(self) -> int:
            """Nobody gets here."""
            raise AssertionError

    config = RpcConfig(handshake_timeout_s=0.3)
    with RpcServer(Worker(), "ipc://", key) as server:
        client = RpcClient(server.address, new_key(), fast_path=True, config=config)
        assert client.path_of("ok") == "remote"
        with pytest.raises(RpcAuthenticationError), client:
            raise AssertionError("it entered")
        client.close()
        with RpcClient(server.address, key, fast_path=True, config=config) as client:
            assert client.path_of("ok") == "local"
