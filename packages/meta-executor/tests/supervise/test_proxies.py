"""A proxy that the environment names never sees the run's key: whatever talks to the run talks to it directly."""

import asyncio
import socketserver
import threading
import urllib.request

import pytest

from meta_executor.config import service_config
from meta_executor.front.http_legs import HttpLegs
from meta_executor.observe import ServiceClient
from meta_executor.supervise.launch import Launcher

KEY = "5e" * 32


class Recorder(socketserver.ThreadingTCPServer):
    """Answers every request with ``{}`` and keeps its head."""

    daemon_threads = True

    def __init__(self):
        self.heads = []
        super().__init__(("127.0.0.1", 0), self._answer)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def _answer(self, connection, _address, _server):
        head = b""
        while not head.endswith(b"\r\n\r\n") and (piece := connection.recv(65536)):
            head += piece
        self.heads.append(head)
        connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}")

    def stop(self):
        self.shutdown()
        self.server_close()


@pytest.fixture
def servers(monkeypatch):
    """(what is meant, what the environment names as its proxy)."""
    meant, proxy = Recorder(), Recorder()
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, proxy.url)
        monkeypatch.setenv(name.upper(), proxy.url)
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    yield meant, proxy
    meant.stop()
    proxy.stop()


def post_of_the_launcher(url):
    launcher = Launcher(service_config({}), say=lambda _: None)
    launcher._key_hex = KEY
    assert launcher._post(url, "/internal/drain") is None


def ask_of_an_observer(url):
    with ServiceClient(url, key=KEY) as client:
        client._response(url, "/debug/routing")


def leg_of_the_front(url):
    async def ask():
        legs = HttpLegs(KEY)
        try:
            await legs.server_info(url)
        finally:
            await legs.close()

    asyncio.run(ask())


@pytest.mark.parametrize("send", [post_of_the_launcher, ask_of_an_observer, leg_of_the_front])
def test_the_key_goes_to_the_run_and_nowhere_else(servers, send):
    """The request arrives where it was sent, with the key; the proxy hears nothing."""
    meant, proxy = servers
    send(meant.url)
    assert [KEY.encode() in head for head in meant.heads] == [True]
    assert proxy.heads == []


def test_the_recorder_is_a_proxy_that_clients_use(servers):
    """What trusts the environment is recorded: the test above can fail."""
    meant, proxy = servers
    with urllib.request.build_opener(urllib.request.ProxyHandler()).open(meant.url, timeout=10) as answer:
        assert answer.status == 200
    assert len(proxy.heads) == 1
    assert meant.heads == []
