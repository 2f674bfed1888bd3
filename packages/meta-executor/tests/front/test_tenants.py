"""Keys, TLS and what they keep apart: who may ask what, whose conversations and prefixes meet, and what is said to whom."""

from __future__ import annotations

import asyncio
import datetime
import json
import logging
import ssl
from pathlib import Path
from typing import Any

import httpx
import pytest

from meta_executor.config import ConfigError, FrontConfig, HttpConfig
from meta_executor.front.tenants import Tenants
from meta_executor.listener.access import Caller, KeyFile
from meta_executor.listener.credentials import credentials
from meta_executor.listener.serving import listen, url_of

pytestmark = pytest.mark.asyncio

ALICE, BOB, OPS = "alice-key-0123456789abcdef", "bob-key-0123456789abcdefgh", "ops-key-0123456789abcdefgh"
BODY = {"model": "synthetic", "prompt": "hello", "temperature": 0}


@pytest.fixture
def keys(tmp_path: Path) -> KeyFile:
    path = tmp_path / "keys"
    path.write_text(f"alice {ALICE}\nbob {BOB}\nops {OPS} operator\n")
    path.chmod(0o600)
    return KeyFile(path)


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[str, str]:
    """A self-signed certificate for another name, and its key."""
    pytest.importorskip("cryptography")
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "front.example")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    files = tmp_path / "cert.pem", tmp_path / "key.pem"
    files[0].write_bytes(made.public_bytes(pem))
    files[1].write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()))
    return str(files[0]), str(files[1])


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def test_who_may_over_http(make_cluster: Any, keys: KeyFile, caplog: pytest.LogCaptureFixture) -> None:
    """401 without a key, 403 for another's path, statistics for operators; no key in any log."""
    with caplog.at_level(logging.DEBUG):
        async with make_cluster(keys=keys, body_bytes_max=1000) as cluster:
            async with httpx.AsyncClient(base_url=cluster.url, trust_env=False, timeout=20) as client:
                answer = await client.post("/v1/completions", json=BODY)
                assert (answer.status_code, answer.json()["error"]["type"]) == (401, "authentication_error")
                assert answer.headers["www-authenticate"] == "Bearer"
                assert (
                    await client.post("/v1/completions", content=b"x" * 999, headers=bearer("y" * 30))
                ).status_code == 401
                assert (await client.get("/nothing")).status_code == 401
                assert (await client.get("/health")).status_code == 200
                answer = await client.post("/v1/completions", json=BODY, headers=bearer(ALICE))
                assert answer.json()["choices"][0]["text"] == "Hello, world!"
                for path in ("/metrics", "/server_info", "/cluster_info", "/debug/routing", "/debug/reservations"):
                    assert (await client.get(path)).status_code == 401
                    answer = await client.get(path, headers=bearer(ALICE))
                    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "forbidden")
                    assert (await client.get(path, headers=bearer(OPS))).status_code == 200
                for headers in ({}, bearer(ALICE), bearer(OPS)):
                    assert (await client.post("/internal/drain", headers=headers)).status_code == 401
                metrics = (await client.get("/metrics", headers=bearer(OPS))).text
                assert 'http_refusals_total{code="unauthorized"}' in metrics
                assert 'http_refusals_total{code="forbidden"} 5.0' in metrics
            await cluster.settled()
    for secret in (ALICE, BOB, OPS):
        assert secret not in caplog.text


async def test_requests_are_counted_by_key(make_cluster: Any, keys: KeyFile) -> None:
    """One key's bound is not another's, though both come from one address."""
    async with make_cluster(keys=keys, max_requests_per_client=1) as cluster:
        cluster.context.gate = asyncio.Event()

        async def ask(key: str) -> httpx.Response:
            async with httpx.AsyncClient(trust_env=False, timeout=20) as client:
                return await client.post(f"{cluster.url}/v1/completions", json=BODY, headers=bearer(key))

        first = asyncio.create_task(ask(ALICE))
        await cluster.context.started.wait()
        assert (await ask(ALICE)).status_code == 429
        cluster.context.gate.set()
        assert (await ask(BOB)).status_code == 200 == (await first).status_code
        await cluster.settled()
        assert not cluster.service._tenants._running


async def test_conversations_and_prefixes_of_two_keys_never_meet(make_cluster: Any, keys: KeyFile) -> None:
    """The same id of two keys is two conversations; prefixes are salted per key; one key keeps both."""
    async with make_cluster(keys=keys) as cluster:
        async with httpx.AsyncClient(base_url=cluster.url, trust_env=False, timeout=20) as client:
            for key in (ALICE, BOB, ALICE):
                answer = await client.post(
                    "/v1/completions", json={**BODY, "conversation_id": "same"}, headers=bearer(key)
                )
                assert answer.status_code == 200
        alice, bob, again = cluster.context.received
        for field in ("conversation_id", "cache_salt"):
            assert getattr(alice, field) == getattr(again, field) != getattr(bob, field)
            assert getattr(alice, field) not in ("", "same", None)
        generated = cluster.generation.received
        assert [one.cache_salt for one in generated] == [one.cache_salt for one in (alice, bob, again)]


async def test_what_is_shared_without_keys_or_by_setting() -> None:
    """Without a name nothing changes; ``prefix_sharing: all`` shares prefixes, never conversations; another run differs."""
    nobody, alice = Caller("", "1.2.3.4"), Caller("alice", "1.2.3.4")
    own, everybody, other = Tenants(b"a", "per_key"), Tenants(b"a", "all"), Tenants(b"b", "per_key")
    assert own.conversation(nobody, "x") == "x" and own.cache_salt(nobody) == ""
    assert own.conversation(alice, None) is None
    assert everybody.cache_salt(alice) == "" and everybody.conversation(alice, "x") != "x"
    assert own.cache_salt(alice) != other.cache_salt(alice)
    assert len({own.conversation(Caller(name), text) for name, text in (("a", "bc"), ("ab", "c"), ("a", "b"))}) == 3


async def test_tls(make_cluster: Any, certificate: tuple[str, str]) -> None:
    """The front speaks TLS 1.2 or newer and nothing else on its port; a handshake that does not end is closed."""
    _, tls = credentials(FrontConfig(tls_certificate_file=certificate[0], tls_key_file=certificate[1]))
    async with make_cluster(tls=tls, http=HttpConfig(header_timeout_s=0.3)) as cluster:
        assert cluster.url.startswith("https://127.0.0.1:")
        assert (await cluster.complete()).json()["choices"][0]["text"] == "Hello, world!"
        host, port = "127.0.0.1", httpx.URL(cluster.url).port
        for first in (b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n", b"\x16\x03\x01"):
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(first)
            got = b""
            async with asyncio.timeout(20):
                try:
                    got = await reader.read()
                except ConnectionError:
                    got = b""
            assert b"HTTP" not in got
            writer.close()
        old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
        with pytest.warns(DeprecationWarning, match="TLSv1_1"):
            old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await asyncio.open_connection(host, port, ssl=old)


async def test_handshakes_that_do_not_end_are_bounded(make_cluster: Any, certificate: tuple[str, str]) -> None:
    """A client that connects and says nothing is counted from the start: one too many is closed at once, and all are let go."""
    _, tls = credentials(FrontConfig(tls_certificate_file=certificate[0], tls_key_file=certificate[1]))
    bounds = HttpConfig(header_timeout_s=3600.0, connections_per_client_max=3)
    async with make_cluster(tls=tls, http=bounds) as cluster:
        ledger = cluster.service.ledger
        assert (await cluster.complete()).status_code == 200
        port = httpx.URL(cluster.url).port
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(4)]
        ended = [asyncio.create_task(reader.read()) for reader, _ in silent]
        async with asyncio.timeout(20):
            done, _ = await asyncio.wait(ended, return_when=asyncio.FIRST_COMPLETED)
            assert [task.result() for task in done] == [b""]
            assert (ledger.handshakes, ledger.refused["too_many_handshakes"]) == (3, 1)
            for _, writer in silent:
                writer.close()
            await asyncio.gather(*ended, return_exceptions=True)
            while ledger.handshakes:
                await asyncio.sleep(0.01)
        assert (await cluster.complete()).status_code == 200
        assert ledger.refused["tls_handshake"] == 3 and not ledger._handshakes


async def test_the_launcher_trusts_this_certificate_and_no_other(
    make_cluster: Any, certificate: tuple[str, str], tmp_path: Path
) -> None:
    """The run's key is sent to a front that shows the configured certificate, whatever name it is for."""
    from meta_executor.listener.tls import TlsError, pinned_context

    _, tls = credentials(FrontConfig(tls_certificate_file=certificate[0], tls_key_file=certificate[1]))
    async with make_cluster(tls=tls) as cluster:
        url = f"{cluster.url}/health"
        async with httpx.AsyncClient(verify=pinned_context(certificate[0]), trust_env=False) as client:
            assert (await client.get(url)).status_code == 200
        async with httpx.AsyncClient(trust_env=False) as client:
            with pytest.raises(httpx.ConnectError, match="certificate"):
                await client.get(url)
    with pytest.raises(TlsError, match="No such file"):
        pinned_context(str(tmp_path / "gone"))


async def test_credentials_that_cannot_be_used_are_named(tmp_path: Path, certificate: tuple[str, str]) -> None:
    """Before anything is started: the field, the file and the reason."""
    nonsense = tmp_path / "nonsense"
    nonsense.write_text("x")
    for config, field in (
        ({"api_keys_file": str(tmp_path / "gone")}, "front.api_keys_file"),
        (
            {"tls_certificate_file": str(tmp_path / "gone"), "tls_key_file": certificate[1]},
            "front.tls_certificate_file",
        ),
        ({"tls_certificate_file": str(nonsense), "tls_key_file": certificate[1]}, "front.tls_certificate_file"),
        ({"tls_certificate_file": certificate[0], "tls_key_file": certificate[0]}, "front.tls_certificate_file"),
    ):
        with pytest.raises(ConfigError, match=r"gone|nonsense|cert\.pem") as caught:
            credentials(FrontConfig(**config))
        assert caught.value.field == field
    assert credentials(FrontConfig()) == (None, None)


@pytest.mark.parametrize("hostname", ["::1", "::"])
async def test_ipv6(make_cluster: Any, hostname: str) -> None:
    """The ready address has brackets and is served; every address means IPv4 as well."""
    try:
        listener = listen(hostname, 0)
    except OSError:
        pytest.skip("no IPv6 here")
    listener.close()
    async with make_cluster(hostname=hostname) as cluster:
        assert cluster.url.startswith("http://[::1]:")
        assert (await cluster.complete()).status_code == 200
        other = f"http://127.0.0.1:{httpx.URL(cluster.url).port}/health"
        if hostname == "::":
            assert (await cluster.client.get(other)).status_code == 200
        else:
            with pytest.raises(httpx.ConnectError):
                await cluster.client.get(other)


@pytest.mark.parametrize("hostname", ["127.0.0.1", "127.0.0.2", "localhost", "0.0.0.0", ""])
async def test_a_listener_is_where_it_was_configured(hostname: str) -> None:
    """At that address and at no other."""
    listener = listen(hostname, 0)
    address = listener.getsockname()[0]
    assert address == {"": "0.0.0.0"}.get(hostname, address if hostname == "localhost" else hostname)
    want = "127.0.0.1" if hostname in ("", "0.0.0.0") else address
    assert url_of(listener) in (
        f"http://{want}:{listener.getsockname()[1]}",
        f"http://[{want}]:{listener.getsockname()[1]}",
    )
    listener.close()


async def test_a_key_that_is_taken_away_is_refused_at_once(make_cluster: Any, tmp_path: Path) -> None:
    """The next request after the file has changed, without a restart."""
    path = tmp_path / "keys"
    path.write_text(f"alice {ALICE}\nbob {BOB}\n")
    path.chmod(0o600)
    now = [0.0]
    keys = KeyFile(path, clock=lambda: now[0])
    async with make_cluster(keys=keys) as cluster, httpx.AsyncClient(base_url=cluster.url, trust_env=False) as client:
        assert (await client.get("/version", headers=bearer(ALICE))).status_code == 200
        path.write_text(f"bob {BOB}\n")
        now[0] += 2.0
        assert (await client.get("/version", headers=bearer(ALICE))).status_code == 401
        assert (await client.get("/version", headers=bearer(BOB))).status_code == 200
        assert (
            json.loads((await client.get("/version", headers=bearer(ALICE))).content)["error"]["code"] == "unauthorized"
        )
