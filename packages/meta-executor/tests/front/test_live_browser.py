"""The live page in a real browser, under load: three widths, light and dark, numbers as in ``/metrics``, a key that is typed.

Wants Chromium's headless shell (Debian: ``apt-get install chromium-headless-shell``), spoken to over a pipe. With
``LIVE_SCREENSHOTS=FOLDER`` the pictures are kept there for a person to look at.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from meta_executor.listener.access import KeyFile

BROWSER = next(filter(None, map(shutil.which, ("chromium-headless-shell", "chromium", "google-chrome"))), None)
pytestmark = [
    pytest.mark.asyncio,
    pytest.mark.timeout(180),
    pytest.mark.skipif(
        BROWSER is None, reason="NO COVERAGE: no Chromium (Debian: apt-get install chromium-headless-shell)"
    ),
]
OPERATOR = "o" * 32
#: Pairs of boxes that lie on one another, boxes that leave the page, and how far the page can be pushed sideways.
LAYOUT = """(() => {
  const boxes = [...document.querySelectorAll("header > *, section, form, dl > div, h2, .plot p")]
    .filter(one => one.offsetParent && one.getBoundingClientRect().width);
  const named = one => `${one.tagName} ${one.id || one.textContent.slice(0, 20)}`;
  const wrong = [];
  boxes.forEach((one, place) => boxes.slice(place + 1).forEach(other => {
    if (one.contains(other) || other.contains(one)) return;
    const a = one.getBoundingClientRect(), b = other.getBoundingClientRect();
    if (a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1)
      wrong.push(`${named(one)} on ${named(other)}`);
  }));
  boxes.forEach(one => {
    const a = one.getBoundingClientRect();
    if (a.right > innerWidth + 1 || a.left < 0) wrong.push(`${named(one)} leaves`);
  });
  return {wrong, wider: document.documentElement.scrollWidth - innerWidth};
})()"""
SHOWN = """Object.fromEntries([...document.querySelectorAll("#front > div")].map(
  one => [one.firstChild.textContent, Number(one.lastChild.textContent.replaceAll(",", ""))]))"""


class Page:
    """One page of a browser, over the pipe that it was started with."""

    def __init__(self, reader: asyncio.StreamReader, to: int) -> None:
        self._reader = reader
        self._to = to
        self._number = 0
        self.session = ""
        self.complaints: list[str] = []

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and wait for its answer; what the page complains about meanwhile is kept."""
        self._number += 1
        session = {"sessionId": self.session} if self.session else {}
        os.write(
            self._to,
            json.dumps({"id": self._number, "method": method, "params": parameters, **session}).encode() + b"\0",
        )
        while True:
            told = json.loads((await asyncio.wait_for(self._reader.readuntil(b"\0"), 30))[:-1])
            if told.get("id") == self._number:
                assert "error" not in told, told
                return told["result"]
            if told.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.complaints.append(json.dumps(told["params"])[:500])

    async def value(self, expression: str) -> Any:
        """What an expression is in the page."""
        told = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    async def open(self, url: str) -> None:
        """Go there, and wait until it is loaded."""
        await self.call("Page.navigate", url=url)
        await self.until(f"location.href === {json.dumps(url)} && document.readyState === 'complete'")

    async def until(self, expression: str) -> None:
        """Wait until an expression is true."""
        async with asyncio.timeout(60):
            while not await self.value(expression):
                await asyncio.sleep(0.1)

    async def picture(self, name: str) -> None:
        """Keep a picture, if pictures are wanted."""
        folder = os.environ.get("LIVE_SCREENSHOTS")
        if folder:
            shot = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
            Path(folder, f"{name}.png").write_bytes(base64.b64decode(shot["data"]))


@contextlib.asynccontextmanager
async def browser(folder: Path) -> AsyncIterator[Page]:
    """A browser with one empty page; gone afterwards."""
    assert BROWSER is not None
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()

    def bind() -> None:
        # The browser reads commands from descriptor 3 and answers on 4.
        copies = os.dup(theirs_in), os.dup(theirs_out)
        os.dup2(copies[0], 3)
        os.dup2(copies[1], 4)

    process = await asyncio.create_subprocess_exec(
        BROWSER, "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--no-first-run", f"--user-data-dir={folder}",
        "--no-proxy-server", stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL, preexec_fn=bind, close_fds=False,
    )  # fmt: skip
    os.close(theirs_in)
    os.close(theirs_out)
    reader = asyncio.StreamReader(limit=64 << 20)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(ours_in, "rb", 0)
    )
    page = Page(reader, ours_out)
    try:
        target = (await page.call("Target.createTarget", url="about:blank"))["targetId"]
        page.session = (await page.call("Target.attachToTarget", targetId=target, flatten=True))["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            await page.call(f"{domain}.enable")
        yield page
    finally:
        process.kill()
        await process.wait()
        transport.close()
        os.close(ours_out)


async def ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def shape(page: Page, width: int, scheme: str) -> None:
    await page.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
    await page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])


async def test_under_load_at_three_widths(make_cluster: Any, tmp_path: Path) -> None:
    """Nothing lies on anything else, nothing leaves the page; the plots have lines; no complaint; dark is dark."""
    async with (
        make_cluster(generations=2) as cluster,
        browser(tmp_path) as page,
        contextlib.AsyncExitStack() as stack,
    ):

        async def load() -> None:
            while True:
                await asyncio.gather(*(cluster.complete() for _ in range(4)))

        loading = asyncio.create_task(load())
        stack.push_async_callback(ended, loading)
        await shape(page, 1400, "light")
        await page.open(f"{cluster.url}/")
        await page.until("lines.tokens.length >= 3 && lines.first.some(value => value > 0)")
        for width, scheme in ((1400, "light"), (800, "dark"), (360, "light")):
            await shape(page, width, scheme)
            await page.picture(f"live-{width}-{scheme}")
            assert await page.value(LAYOUT) == {"wrong": [], "wider": 0}, width
            light = await page.value("getComputedStyle(document.body).backgroundColor === 'rgb(255, 255, 255)'")
            assert light is (scheme == "light")
        assert await page.value("document.querySelectorAll('#tokens path, #first path').length") == 2
        assert await page.value("document.querySelectorAll('#instances tr').length") == 3
        # With the keyboard alone the tables that are wider than the page can be reached.
        assert await page.value("[...document.querySelectorAll('.scroll')].every(one => one.tabIndex === 0)")
        await ended(loading)
        await asyncio.wait_for(cluster.service.wait_idle(), 10)
        await page.until("before.running === 0")
        text = (await cluster.client.get(f"{cluster.url}/metrics")).text
        told = {s.name: s.value for family in text_string_to_metric_families(text) for s in family.samples}
        await page.until(f"before.values.total_requests_total === {told['total_requests_total']}")
        shown = await page.value(SHOWN)
        assert shown["accepted"] == told["total_requests_total"] > 8
        assert shown["answered"] == told["total_responses_total"]
        assert shown["answer tokens"] == told["trtllm_generation_tokens_total"]
        assert page.complaints == []


async def test_a_key_is_asked_for_and_typed(make_cluster: Any, tmp_path: Path) -> None:
    """With the keyboard; a wrong one is told, the right one shows the service, and it is kept nowhere."""
    file = tmp_path / "keys"
    file.write_text(f"two {OPERATOR} operator\n")
    file.chmod(0o600)
    async with make_cluster(keys=KeyFile(file)) as cluster, browser(tmp_path / "profile") as page:
        await page.open(f"{cluster.url}/")
        await page.until("document.activeElement.id === 'key' && !by('ask').hidden")
        for key, then in (
            ("wrong", "by('state').textContent.includes('not an operator')"),
            (OPERATOR, "!by('all').hidden"),
        ):
            await page.call("Input.insertText", text=key)
            for kind in ("rawKeyDown", "char", "keyUp"):
                await page.call("Input.dispatchKeyEvent", type=kind, key="Enter", windowsVirtualKeyCode=13, text="\r")
            await page.until(then)
        assert await page.value("by('ask').hidden && localStorage.length + sessionStorage.length") == 0
        assert await page.value("document.cookie") == ""
