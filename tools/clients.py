"""Other people's clients and tools against this service, each in an environment of its own.

    python tools/clients.py              all of them, against a small service that is started for it
    python tools/clients.py openai curl  only these
    python tools/clients.py --url URL --model NAME …   against a service that runs

Environments are made under ``.cache/clients`` from the package index and kept. Ends with one line per client: ``passed``,
``FAILED``, or ``NO COVERAGE`` where it could not be installed; exit 0 only if every one passed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache" / "clients"
PROGRAMS = ROOT / "tools" / "client_programs"
CONSTRAINTS = ROOT / "constraints.txt"
#: For an installation, and for a client's run (s).
INSTALL_S, RUN_S = 600, 300
#: For the service's drain (s), and what is kept of what it said (lines).
END_S, SAID_LINES = 60, 200

SERVICE = """
port: 0
engine: {kind: synthetic}
max_batch_size: 16
context_servers: {pipeline_parallel_size: 1}
generation_servers: {tensor_parallel_size: 1}
"""

#: What a first look with curl asks, and what must be in the answer.
CURL = (
    (("/v1/models",), '"id":"MODEL"'),
    (("/health",), '"status":"ok"'),
    (("/v1/completions", "-d", '{"model": "MODEL", "prompt": "Hello", "max_tokens": 4}'), '"completion_tokens":4'),
    (("/v1/completions", "-d", '{"model": "MODEL", "prompt": "Hello", "max_tokens": 4, "stream": true}'), "[DONE]"),
    (("/v1/chat/completions", "-d", '{"model": "MODEL", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}'),
     '"role":"assistant"'),
    (("/tokenize", "-d", '{"prompt": "Hello"}'), '"tokens":['),
    (("/v1/completions", "-d", "{"), '"code":"invalid_json"'),
    (("/metrics",), "trtllm_request_success_total{"),
)  # fmt: skip


@dataclass(frozen=True)
class Client:
    """One of them.

    Attributes:
        package: In the package index; "" where nothing is installed.
        pinned: Further packages, at the versions of ``constraints.txt``: of torch a small build.
        command: Words; PYTHON, BIN, URL, MODEL and TOKENIZER stand for what they say.
    """

    package: str
    command: tuple[str, ...]
    pinned: tuple[str, ...] = ()


CLIENTS = {
    "openai": Client("openai", ("PYTHON", str(PROGRAMS / "with_openai.py"), "URL", "MODEL")),
    "curl": Client("", ()),
    "litellm": Client("litellm", ("PYTHON", str(PROGRAMS / "with_litellm.py"), "URL", "MODEL")),
    "schemathesis": Client(
        "schemathesis",
        (
            "BIN/schemathesis", "run", "URL/openapi.json", "--phases", "coverage,fuzzing", "--max-examples", "40",
            "--max-time", "90", "--seed", "1", "--no-color",
            # Rules between two fields (min_tokens up to max_tokens, say) are not in the schema.
            "--exclude-checks", "positive_data_acceptance",
        ),
    ),
    "aiperf": Client(
        "aiperf",
        (
            "BIN/aiperf", "profile", "--model", "MODEL", "--url", "URL", "--endpoint-type", "chat", "--streaming",
            "--concurrency", "4", "--request-count", "16", "--tokenizer", "TOKENIZER", "--synthetic-input-tokens-mean",
            "64", "--output-tokens-mean", "16", "--extra-inputs", "min_tokens:16", "--extra-inputs", "ignore_eos:true",
            "--ui", "none",
        ),
    ),
    "guidellm": Client(
        "guidellm", ("PYTHON", str(PROGRAMS / "with_guidellm.py"), "URL", "MODEL", "TOKENIZER"), pinned=("torch",)
    ),
}  # fmt: skip


def environment_of(name: str, client: Client) -> Path | None:
    """The client's interpreter; None where it cannot be installed, with the reason said."""
    folder = CACHE / name
    python = folder / "bin" / "python"
    if (folder / "installed").exists():
        return python
    shutil.rmtree(folder, ignore_errors=True)
    try:
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, capture_output=True, timeout=INSTALL_S)
        install = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", client.package]
        install += [line for line in CONSTRAINTS.read_text("utf-8").split() if line.split("==")[0] in client.pinned]
        subprocess.run(install, check=True, capture_output=True, text=True, timeout=INSTALL_S)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        print(f"{name}: {client.package} cannot be installed: {str(getattr(error, 'stderr', '') or error)[-300:]}")
        return None
    (folder / "installed").touch()
    return python


@contextlib.contextmanager
def service(folder: Path) -> Iterator[str]:
    """A small service of its own; gives its address."""
    config = folder / "service.yaml"
    config.write_text(SERVICE, "utf-8")
    process = subprocess.Popen(
        [sys.executable, "-m", "meta_executor", "up", str(config)], stderr=subprocess.PIPE, text=True
    )
    said: deque[str] = deque(maxlen=SAID_LINES)
    address: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def read() -> None:
        # To its end: a service whose words nobody takes stops when the pipe is full.
        for line in process.stderr or ():
            said.append(line)
            if line.startswith("serving "):
                address.put(line.split()[1].removesuffix("/v1"))
        address.put(None)

    reader = threading.Thread(target=read, name="what the service says")
    reader.start()
    try:
        url = address.get()
        if url is None:
            raise SystemExit("the service did not start:\n" + "".join(said))
        yield url
    finally:
        process.send_signal(signal.SIGINT)
        try:
            code = process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        reader.join()
        if code != 0:
            print(f"the service ended with {code}; it said last:", *said, sep="\n")


def tokenizer_folder(folder: Path) -> None:
    """The synthetic model's tokenizer, as load tools read one."""
    from meta_executor.engine.tokenizer import Tokenizer

    folder.mkdir(exist_ok=True)
    Tokenizer.synthetic(32000).save(folder)


def run_curl(url: str, model: str) -> bool:
    """A first look, as a how-to has it."""
    for words, wanted in CURL:
        path, *rest = (word.replace("MODEL", model) for word in words)
        done = subprocess.run(["curl", "-sS", "--max-time", "30", url + path, *rest], capture_output=True, text=True)
        wanted = wanted.replace("MODEL", model)
        print(f"{'ok' if wanted in done.stdout else 'WRONG'}  curl {path} {' '.join(rest)}")
        if wanted not in done.stdout:
            print(done.stdout[-500:], done.stderr[-500:])
            return False
    return True


def run(name: str, url: str, model: str, folder: Path) -> str:
    """One client. Returns how it went."""
    if name == "curl":
        if shutil.which("curl") is None:
            return "NO COVERAGE"
        return "passed" if run_curl(url, model) else "FAILED"
    client = CLIENTS[name]
    python = environment_of(name, client)
    if python is None:
        return "NO COVERAGE"
    # aiperf takes an absolute path for a name in a hub.
    values = {"PYTHON": str(python), "MODEL": model, "TOKENIZER": "./tokenizer"}
    command = [
        values.get(word, word.replace("BIN/", f"{python.parent}/").replace("URL", url)) for word in client.command
    ]
    environment = {**os.environ, "NO_PROXY": "127.0.0.1,localhost"}
    try:
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=RUN_S)
    except subprocess.TimeoutExpired:
        print(f"{name}: no end within {RUN_S} s")
        return "FAILED"
    print(done.stdout[-4000:], done.stderr[-2000:], sep="\n")
    return "passed" if done.returncode == 0 else "FAILED"


def main() -> int:
    """Run them, say how each went."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", choices=[*CLIENTS, []], help="default: all")
    parser.add_argument("--url", help="a service that runs")
    parser.add_argument("--model", default="synthetic")
    options = parser.parse_args()
    names = options.names or list(CLIENTS)
    results: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="mx-clients-") as scratch:
        folder = Path(scratch)
        tokenizer_folder(folder / "tokenizer")
        with contextlib.ExitStack() as stack:
            url = options.url or stack.enter_context(service(folder))
            for name in names:
                print(f"== {name}", flush=True)
                results[name] = run(name, url, options.model, folder)
    print(json.dumps(results))
    return 0 if all(result == "passed" for result in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
