"""A whole service whose front has TLS and API keys, as people start it: ``meta-executor up``, openai's client, curl, Ctrl-C.

The same over fake instances, key by key and handshake by handshake, is in the package's tests/front/test_tenants.py.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import ssl
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest
import yaml

pytestmark = [pytest.mark.service, pytest.mark.timeout(240)]
PROGRAM = str(Path(sys.executable).with_name("meta-executor"))
ALICE, OPS, STRANGER = "alice-key-0123456789abcdef", "ops-key-0123456789abcdefgh", "wrong-key-0123456789abcdef"
BODY = {"model": "synthetic", "prompt": "abc", "max_tokens": 4, "temperature": 0}
NOT_TRUSTED = 60  # curl's exit code for a certificate that it does not know


@dataclass
class Running:
    """What a test needs of the service."""

    url: str
    certificate: str

    @property
    def trusted(self) -> ssl.SSLContext:
        """Knows the front's certificate."""
        return ssl.create_default_context(cafile=self.certificate)

    def openai(self, key: str, verify: ssl.SSLContext | bool | None = None) -> openai.OpenAI:
        """A client as its users make one; it tries once."""
        http = openai.DefaultHttpxClient(verify=self.trusted if verify is None else verify, trust_env=False)
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, http_client=http)

    def curl(self, path: str, *options: str, trusted: bool = True) -> subprocess.CompletedProcess[str]:
        """Its answer, then the status in a line."""
        trust = ["--cacert", self.certificate] if trusted else []
        return subprocess.run(
            ["curl", "-sS", "--noproxy", "*", "-w", "\n%{http_code}", *trust, *options, self.url + path],
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    """Started by its program; at the end Ctrl-C, which drains through the front's TLS and leaves with 0."""
    folder = Path(tempfile.mkdtemp(prefix="mx"))
    certificate, key = str(folder / "cert.pem"), str(folder / "key.pem")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=front.example", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate],
        check=True, capture_output=True,
    )  # fmt: skip
    keys = folder / "keys"
    keys.write_text(f"alice {ALICE}\nops {OPS} operator\n")
    for path in (keys, Path(key)):
        path.chmod(0o600)
    config = {
        "port": 0,
        "run_dir": str(folder / "r"),
        "engine": {"kind": "synthetic"},
        "context_servers": {"pipeline_parallel_size": 1},
        "generation_servers": {"tensor_parallel_size": 1},
        "front": {"api_keys_file": str(keys), "tls_certificate_file": certificate, "tls_key_file": key},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    up = subprocess.Popen(
        [PROGRAM, "up", str(folder / "config.yaml")], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    said: list[str] = []
    try:
        assert up.stderr is not None
        for line in up.stderr:
            said.append(line)
            if found := re.search(r"serving (https://127\.0\.0\.1:\d+)/v1", line):
                break
        else:
            raise AssertionError("".join(said))
        yield Running(found[1], certificate)
        up.send_signal(signal.SIGINT)
        rest = up.communicate(timeout=90)[1]
        assert up.returncode == 0 and "left: every process ended" in rest, "".join(said) + rest
    finally:
        if up.poll() is None:
            up.kill()
            up.communicate()
        shutil.rmtree(folder, ignore_errors=True)


def test_who_has_a_key_is_answered_whole_and_streamed(running: Running) -> None:
    """By openai's client and curl, over TLS with the certificate checked."""
    with running.openai(ALICE) as client:
        whole = client.completions.create(**BODY).choices[0].text
        pieces = client.completions.create(**BODY, stream=True)
        assert whole and "".join(piece.choices[0].text for piece in pieces if piece.choices) == whole
        assert [one.id for one in client.models.list()] == ["synthetic"]
    told = running.curl("/v1/completions", "-H", f"authorization: Bearer {ALICE}", "-d", json.dumps(BODY))
    answer, _, status = told.stdout.rpartition("\n")
    assert (status, json.loads(answer)["choices"][0]["text"]) == ("200", whole)


def test_who_has_none_or_a_wrong_one_is_told_so_and_not_what_is_right(running: Running) -> None:
    """401 in the API's shape for every path that wants a key; who only asks whether it lives needs none."""
    with running.openai(STRANGER) as client, pytest.raises(openai.AuthenticationError) as wrong:
        client.completions.create(**BODY)
    assert wrong.value.status_code == 401 and STRANGER not in str(wrong.value)
    for path in ("/v1/completions", "/v1/models", "/metrics", "/server_info", "/debug/routing"):
        answer, _, status = running.curl(path).stdout.rpartition("\n")
        assert status == "401" and set(json.loads(answer)["error"]) == {"message", "type", "param", "code"}, path
    assert running.curl("/health").stdout.endswith("\n200")


def test_a_client_sees_nothing_of_the_others_and_an_operator_does(running: Running) -> None:
    """The same paths with either key, and this package's own client with the operator's."""
    for path in ("/metrics", "/server_info", "/debug/routing"):
        statuses = [running.curl(path, "-H", f"authorization: Bearer {key}").stdout[-3:] for key in (ALICE, OPS)]
        assert statuses[0] in ("401", "403") and statuses[1] == "200", (path, statuses)
    asking = {"META_EXECUTOR_URL": running.url, "META_EXECUTOR_API_KEY": OPS, "SSL_CERT_FILE": running.certificate}
    told = subprocess.run(
        [PROGRAM, "explain", "--json"], capture_output=True, text=True, timeout=60, env={**os.environ, **asking}
    )
    assert told.returncode == 0, told.stderr


def test_without_tls_or_with_an_unknown_certificate_nothing_is_said(running: Running) -> None:
    """Plain HTTP to the port is closed unanswered; a client that does not know the certificate does not send its key."""
    with (
        httpx.Client(trust_env=False, timeout=30) as plain,
        pytest.raises((httpx.RemoteProtocolError, httpx.ReadError)),
    ):
        plain.get(running.url.replace("https:", "http:") + "/health")
    told = running.curl("/health", trusted=False)
    assert told.returncode == NOT_TRUSTED and told.stdout.endswith("\n000"), told
    with running.openai(ALICE, verify=True) as client, pytest.raises(openai.APIConnectionError):
        client.models.list()
    with running.openai(ALICE) as client:
        assert client.completions.create(**BODY).choices[0].text
