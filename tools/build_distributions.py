"""Build wheels and sdists of all packages, check them, and install them in clean environments.

    nox -s build                  # build, check, install on every supported Python that is here
    nox -s build -- --no-install  # build and check only

Each of the seven is installed alone, from its wheel and from its folder, without its extras, and imported; its README's
example is run. The composing package is installed with its siblings from ``dist/`` on Python 3.11, and alone it must fail
the way its README says.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
COMPOSER = "meta-executor"
PYTHONS = ("3.11", "3.12", "3.13")
PIP = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", str(ROOT / "constraints.txt"))


class BuildFailed(Exception):
    """A distribution is not what it should be; the message names it."""


def packages() -> list[str]:
    """Names of all packages."""
    return sorted(p.name for p in (ROOT / "packages").iterdir() if (p / "pyproject.toml").is_file())


def run(*command: str | Path, cwd: Path = ROOT, check: bool = True, env: dict[str, str] | None = None) -> str:
    """Run a command; its output, or a failure with it."""
    done = subprocess.run(
        [str(c) for c in command], cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, **(env or {})},
    )  # fmt: skip
    if check and done.returncode != 0:
        raise BuildFailed(f"{' '.join(str(c) for c in command)}\n{done.stdout[-3000:]}")
    return done.stdout if done.returncode == 0 else f"exit {done.returncode}\n{done.stdout}"


def build(name: str) -> None:
    """Wheel and sdist of one package, and what must be in them."""
    run(sys.executable, "-m", "hatchling", "build", "-d", DIST, cwd=ROOT / "packages" / name)
    module = name.replace("-", "_")
    wheel = next(DIST.glob(f"{module}-*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        for wanted in (f"{module}/__init__.py", f"{module}/py.typed"):
            if wanted not in names:
                raise BuildFailed(f"{wheel.name} lacks {wanted}")
        if not any(n.endswith("licenses/LICENSE") for n in names):
            raise BuildFailed(f"{wheel.name} lacks its licence")
        if stray := [n for n in names if not n.startswith((f"{module}/", f"{module}-"))]:
            raise BuildFailed(f"{wheel.name} brings {stray[0]}, which is not its own")
    with tarfile.open(next(DIST.glob(f"{module}-*.tar.gz"))) as archive:
        inner = {n.split("/", 1)[1] for n in archive.getnames() if "/" in n}
        for wanted in ("README.md", "CHANGELOG.md", "LICENSE", f"src/{module}/__init__.py", "docs/design.md"):
            if wanted not in inner:
                raise BuildFailed(f"sdist of {name} lacks {wanted}")
    run(sys.executable, "-m", "twine", "check", "--strict", *DIST.glob(f"{module}-*"))


def find_python(version: str) -> str | None:
    """An interpreter of that version, on the path or under pyenv."""
    if sys.version_info[:2] == tuple(map(int, version.split("."))):
        return sys.executable
    candidates = [
        shutil.which(f"python{version}"),
        *sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python")),
    ]
    for candidate in candidates:
        if candidate and subprocess.run([str(candidate), "-c", ""], capture_output=True).returncode == 0:
            return str(candidate)
    return None


def fresh_environment(python: str, folder: Path) -> Path:
    """A new virtual environment; its interpreter."""
    run(python, "-m", "venv", folder)
    return folder / "bin" / "python"


def readme_example(name: str) -> str | None:
    """The first plain ``python`` block of a package's README."""
    import re

    text = (ROOT / "packages" / name / "README.md").read_text("utf-8")
    found = re.search(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return found.group(1) if found else None


def install_alone(name: str, version: str, python: str) -> None:
    """From wheel and from folder, without extras: installs, imports, runs its README."""
    module = name.replace("-", "_")
    for what, target in (("wheel", str(next(DIST.glob(f"{module}-*.whl")))), ("folder", f"./packages/{name}")):
        if what == "folder" and version != PYTHONS[0]:
            continue
        with tempfile.TemporaryDirectory() as scratch:
            interpreter = fresh_environment(python, Path(scratch, "env"))
            run(interpreter, *PIP, target)
            run(interpreter, "-W", "error", "-c", f"import {module}; print({module}.__version__)", cwd=Path(scratch))
            example = readme_example(name)
            if example is None:
                raise BuildFailed(f"packages/{name}/README.md has no ```python block")
            Path(scratch, "example.py").write_text(example)
            run(interpreter, "-W", "error", "example.py", cwd=Path(scratch))
            print(f"{name}: installs alone from its {what} on {version}, imports, its example runs", flush=True)


def install_composer(python: str) -> None:
    """With its siblings it installs; alone it fails as its README says."""
    with tempfile.TemporaryDirectory() as scratch:
        interpreter = fresh_environment(python, Path(scratch, "env"))
        output = run(interpreter, *PIP, f"./packages/{COMPOSER}", check=False)
        if not output.startswith("exit ") or "No matching distribution" not in output:
            raise BuildFailed(
                f"{COMPOSER} alone should not install before its siblings are published:\n{output[-800:]}"
            )
        run(interpreter, *PIP, "torch")
        run(interpreter, *PIP, "--find-links", DIST, COMPOSER)
        run(interpreter, "-c", "import meta_executor.cli, meta_executor.supervise.launch", cwd=Path(scratch))
        text = run(Path(scratch, "env", "bin", "meta-executor"), "--version", cwd=Path(scratch))
        print(f"{COMPOSER}: alone refused as its README says, from dist installs: {text.strip()}", flush=True)


def main() -> int:
    """Exit 0 when everything was built, checked and installed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-install", action="store_true")
    options = parser.parse_args()
    shutil.rmtree(DIST, ignore_errors=True)
    try:
        for name in packages():
            build(name)
            print(f"{name}: wheel and sdist built and checked", flush=True)
        if options.no_install:
            return 0
        for version in PYTHONS:
            python = find_python(version)
            if python is None:
                raise BuildFailed(f"no Python {version} here: its installs are not covered")
            for name in packages():
                if name != COMPOSER:
                    install_alone(name, version, python)
        install_composer(str(find_python(PYTHONS[0])))
    except BuildFailed as error:
        print(f"build: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
