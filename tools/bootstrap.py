#!/usr/bin/env python3
"""Make an environment for nox and become it, with the arguments given. Needs nothing but Python 3.11 to 3.13 and a package
index.

    python3 tools/bootstrap.py -s demo     # the service answers eight prompts
    python3 tools/bootstrap.py -s tests    # the test suite
    python3 tools/bootstrap.py -l          # every job there is

The sessions that need torch share one environment, ``.venv`` at the root. On a machine without a GPU it is made with Python
3.11 when one can be found, because the pinned torch has a small CPU build for it; with another Python the same pin may be a
build of gigabytes. Where a GPU is, it is made with the interpreter that runs this: a CPU build would leave the GPU untested.

Exit code: nox's own, also after Ctrl-C: this process is replaced by nox.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = ROOT / ".cache" / "nox-env"
STAMP = ENVIRONMENT / "stamp"
SUPPORTED = ((3, 11), (3, 12), (3, 13))
#: What the stage runner says for "nothing ran": an interrupt before nox has begun is that.
NOT_RUN = 3


def has_gpu() -> bool:
    """Whether nvidia-smi lists a GPU."""
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0 and "GPU" in done.stdout


def preferred_python() -> str:
    """Python 3.11 if there is one and no GPU, else the running interpreter, said so in one line."""
    if sys.version_info[:2] == (3, 11):
        return sys.executable
    running = f"{sys.version_info.major}.{sys.version_info.minor}"
    if has_gpu():
        print(f"bootstrap: a GPU is here: using Python {running} and its build of torch", file=sys.stderr, flush=True)
        return sys.executable
    candidates = [
        shutil.which("python3.11"),
        *map(str, sorted(Path.home().glob(".pyenv/versions/3.11.*/bin/python3.11"))),
    ]
    for candidate in candidates:
        if candidate and subprocess.run([candidate, "-c", ""], capture_output=True).returncode == 0:
            return candidate
    print(
        f"bootstrap: no Python 3.11 found, using {running}; the pinned torch may be a download of gigabytes for it",
        file=sys.stderr,
        flush=True,
    )
    return sys.executable


def ensure_nox(python: str) -> Path:
    """The nox environment, made when it is missing or the pins changed. Returns its interpreter."""
    wanted = hashlib.sha256((ROOT / "constraints.txt").read_bytes() + python.encode()).hexdigest()
    interpreter = ENVIRONMENT / "bin" / "python"
    if interpreter.exists() and STAMP.exists() and STAMP.read_text() == wanted:
        return interpreter
    print("bootstrap: making the environment for nox", flush=True)
    shutil.rmtree(ENVIRONMENT, ignore_errors=True)
    subprocess.run([python, "-m", "venv", str(ENVIRONMENT)], check=True)
    subprocess.run(
        [str(interpreter), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c",
         str(ROOT / "constraints.txt"), "nox", "pyyaml"],
        check=True, cwd=ROOT,
    )  # fmt: skip
    STAMP.write_text(wanted)
    return interpreter


def main() -> int:
    """Become nox, or say why not: an exit code."""
    if sys.version_info[:2] not in SUPPORTED:
        running = ".".join(map(str, sys.version_info[:3]))
        print(f"bootstrap: Python {running} is not supported; needs Python 3.11, 3.12 or 3.13", file=sys.stderr)
        return 2
    try:
        python = preferred_python()
        interpreter = ensure_nox(python)
    except subprocess.CalledProcessError as error:
        print(f"bootstrap: {' '.join(map(str, error.cmd[:4]))} … failed with exit {error.returncode}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("bootstrap: interrupted; nothing was run", file=sys.stderr)
        return NOT_RUN
    environment = {k: v for k, v in os.environ.items() if k not in ("VIRTUAL_ENV", "PYTHONHOME")}
    environment["META_EXECUTOR_BASE_PYTHON"] = python
    # Interpreters that pyenv keeps are invisible until they are named; name all, the chosen one first.
    versions = sorted(p.name for p in Path.home().glob(".pyenv/versions/3.1[1-3].*"))
    if versions:
        environment["PYENV_VERSION"] = ":".join(versions)
    os.chdir(ROOT)
    sys.stdout.flush()
    os.execve(interpreter, [str(interpreter), "-m", "nox", "-f", str(ROOT / "noxfile.py"), *sys.argv[1:]], environment)
    raise AssertionError("execve does not return")


if __name__ == "__main__":
    sys.exit(main())
