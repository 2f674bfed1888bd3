"""``nox -s vllm``: makes vLLM's environment and the model's folder, runs the checks, prints the benchmark's table.

    nox -s vllm                       # everything: some minutes after an installation of some minutes and 3.5 GB
    nox -s vllm -- --only checks      # or: bench
    nox -s vllm -- --rounds 3 --tokens 128 1024

The environment is ``.cache/vllm``, made again when its requirements change. Exit 1: a check failed.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CACHE = ROOT / ".cache" / "vllm"
REQUIREMENTS = HERE / "requirements.txt"
#: vLLM's CPU build brings them for another torch than its own; imported, they end it.
UNWANTED = ("torchvision", "torchaudio", "torchcodec")
#: Their metadata asks for CUDA builds of torch.
WITHOUT_DEPENDENCIES = ("nixl", "nixl-cu12")


def pinned(name: str) -> str:
    """``name==version`` as the repository pins it."""
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    return next(line for line in lines if line.split("==")[0] == name)


def environment(folder: Path) -> Path:
    """The interpreter of an environment with vLLM and NIXL; made where it is missing or old."""
    python, stamp = folder / "bin" / "python", folder / "stamp"
    wanted = hashlib.sha256(
        Path(__file__).read_bytes() + REQUIREMENTS.read_bytes() + pinned("nixl").encode()
    ).hexdigest()
    if python.exists() and stamp.exists() and stamp.read_text() == wanted:
        return python
    print(f"installing vLLM's CPU build into {folder}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    pip = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", pinned("torch")], check=True)
    subprocess.run([*pip, "install", "-r", str(REQUIREMENTS), pinned("torch")], check=True)
    subprocess.run([*pip, "uninstall", "--yes", *UNWANTED], check=True)
    subprocess.run([*pip, "install", "--no-deps", *(pinned(name) for name in WITHOUT_DEPENDENCIES)], check=True)
    stamp.write_text(wanted)
    return python


def model_folder(folder: Path) -> Path:
    """SmolLM2-135M in vLLM's format, float32."""
    if not (folder / "config.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        sys.path.insert(0, str(ROOT / "packages" / "meta-executor" / "benchmarks"))
        from peers import write_folder

        write_folder("smollm2", folder)
    return folder


def main() -> int:
    """Checks, then the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("checks", "bench"))
    parser.add_argument(
        "--python", type=Path, help="an interpreter that has vLLM, in place of an environment made here"
    )
    known, rest = parser.parse_known_args()
    python = known.python or environment(CACHE / "environment")
    model = model_folder(CACHE / "smollm2")
    failed = 0
    if known.only != "bench":
        # Not the repository's own settings of pytest: they name plugins of the other environment.
        pytest = ["-m", "pytest", "-c", os.devnull, "--rootdir", str(HERE), "--noconftest", "-p", "no:cacheprovider"]
        command = [str(python), *pytest, "-v", "--timeout", "1200", str(HERE / "checks.py")]
        failed = subprocess.run(command, cwd=HERE, env={**os.environ, "VLLM_CHECKS_MODEL": str(model)}).returncode
    if known.only != "checks":
        failed = (
            subprocess.run([str(python), str(HERE / "bench_vllm.py"), str(model), *rest], cwd=HERE).returncode or failed
        )
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
