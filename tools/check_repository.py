"""Rules of this repository that no general tool knows. Each prints ``file:line: what and why``; exit 1 if any was broken.

- layering: no package imports another (meta-executor may import all); a foreign library is imported by its adapter only
- pinned memory: pinned or registered allocations only through the modules named in ``PINNED_ALLOCATORS``
- no proxies of the environment: every HTTP client says ``trust_env=False``, or a key would go to ``HTTP_PROXY``
- licence, version and files that every package has; nothing at the top level that is not named in ``TOP_LEVEL``
- keys and tokens that were committed by mistake
- whitespace and YAML
- sign-off of every commit since a given one (DCO), with ``--sign-off-since REV``
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {path.name: path.name.replace("-", "_") for path in sorted((ROOT / "packages").iterdir()) if path.is_dir()}
#: What lies at the top level: anything else, a note or an output, got there by mistake.
TOP_LEVEL = frozenset({
    ".ci", ".dockerignore", ".github", ".gitignore", ".pre-commit-config.yaml", "ARCHITECTURE.md", "CONTRIBUTING.md", "LICENSE",
    "NOTICE", "README.md", "SECURITY.md", "conftest.py", "constraints.txt", "deploy", "docs", "integration", "noxfile.py",
    "packages", "pyproject.toml", "testlists", "tools",
})  # fmt: skip
#: The composing package; it alone imports its siblings.
COMPOSER = "meta-executor"
#: Foreign library → file stems that may import it inside a package that follows the pure-core shape.
ADAPTERS = {
    "mpi4py": {"_mpi"},
    "zmq": {"_zmq"},
    "nixl": {"_nixl"},
    "torch": {"_torch", "_triton"},  # Triton's kernels take torch's tensors
    "triton": {"_triton"},
    "asyncio": {"_asyncio"},
    "etcd3gw": {"_etcd"},
    "nvtx": {"_nvtx"},
}
#: In meta-executor the rooms decide: library → folders or modules (relative to the package) that may import it.
ROOMS = {
    "torch": ("engine/", "executor/", "rank/"),  # device memory and streams, where they are imported on demand
    "mpi4py": ("rank/", "executor/"),
    "nixl": ("executor/", "rank/"),
    "starlette": ("front/", "api/", "listener/"),
    "uvicorn": ("front/", "api/", "listener/"),
}
#: Import order of the rooms: each may import what stands before it.
ROOM_ORDER = (
    "reasons", "private_files", "mpi_launcher", "config", "wire", "discovery", "evidence", "recent", "listener", "engine",
    "executor", "supervise", "api", "rank", "front", "preflight", "bench", "observe", "cli",
)  # fmt: skip
#: The front is not allowed to reach these rooms even though they stand below it.
FRONT_FORBIDDEN = ("executor", "rank")
#: What a request is and what an answer is, the front knows as every room does.
FRONT_ALLOWED = ("executor.request",)
PINNED = re.compile(r"\bpin_memory\b|\bcudaHostAlloc\b|\bcudaHostRegister\b|\bcudaMallocHost\b")
PINNED_ALLOCATORS = {"packages/meta-executor/src/meta_executor/engine/memory.py"}
#: What makes an httpx client or sends with a new one; each takes ``trust_env``.
HTTPX_CLIENTS = {
    "Client", "AsyncClient", "HTTPTransport", "AsyncHTTPTransport",
    "request", "stream", "get", "options", "head", "post", "put", "patch", "delete",
}  # fmt: skip
#: Forms that issuers gave their keys so that they can be found. Each is a fixed beginning and one run of characters.
SECRETS = {
    "a private key": re.compile(rb"-----BEGIN [A-Z ]{0,20}PRIVATE KEY-----"),
    "an AWS access key": re.compile(rb"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"),
    "a GitHub token": re.compile(rb"\b(?:gh[pousr]_[0-9A-Za-z]{36}|github_pat_[0-9A-Za-z_]{50})"),
    "a GitLab token": re.compile(rb"\bglpat-[0-9A-Za-z_-]{20}"),
    "a Hugging Face token": re.compile(rb"\bhf_[0-9A-Za-z]{34}\b"),
    "a PyPI token": re.compile(rb"\bpypi-AgE[0-9A-Za-z_-]{50}"),
    "an OpenAI key": re.compile(rb"\bsk-(?:proj-)?[0-9A-Za-z_-]{40}"),
    "a Slack token": re.compile(rb"\bxox[abprs]-[0-9A-Za-z-]{20}"),
    "a Google API key": re.compile(rb"\bAIza[0-9A-Za-z_-]{35}"),
    "a password in an address": re.compile(rb"\b[a-z]{2,10}://[^/\s:@]{1,60}:[^/\s:@{}<$]{8,80}@[a-z0-9]"),
}
#: Larger files are data.
_SECRET_FILE_BYTES_MAX = 4 << 20
TEXT_SUFFIXES = {".py", ".md", ".toml", ".yml", ".yaml", ".txt", ".cfg", ".sh"}


def tracked_files() -> list[Path]:
    """Files under version control or about to be."""
    out = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    ).stdout.decode()
    return [ROOT / name for name in out.split("\0") if name and (ROOT / name).is_file()]


def imports_of(path: Path) -> Iterator[tuple[int, str, bool]]:
    """(line, dotted module, only for type checking) of every import in a file."""
    tree = ast.parse(path.read_text("utf-8"), str(path))
    typing_only: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            typing_only.update(inner for statement in node.body for inner in ast.walk(statement))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, node in typing_only
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.lineno, node.module, node in typing_only
            if "." not in node.module and node.module in PACKAGES.values():
                # ``from package import module`` names its module here only.
                for alias in node.names:
                    yield node.lineno, f"{node.module}.{alias.name}", node in typing_only


def check_layering(files: list[Path]) -> Iterator[str]:
    """Who imports whom."""
    for path in files:
        relative = path.relative_to(ROOT)
        parts = relative.parts
        if path.suffix != ".py" or len(parts) < 5 or parts[0] != "packages" or parts[2] != "src":
            continue
        package, module = parts[1], PACKAGES[parts[1]]
        inside = "/".join(parts[4:])
        for line, name, typing_only in imports_of(path):
            top = name.split(".")[0]
            if top in PACKAGES.values() and top != module and package != COMPOSER:
                yield f"{relative}:{line}: {package} imports {top}: only {COMPOSER} may import its siblings"
            if typing_only:
                continue
            if package == COMPOSER:
                if top in ROOMS and not inside.startswith(ROOMS[top]):
                    yield f"{relative}:{line}: {top} is imported outside of {', '.join(ROOMS[top])}"
                yield from _check_room(relative, line, inside, name)
            elif top in ADAPTERS and not (
                path.stem in ADAPTERS[top]
                or any(path.stem.startswith(f"{stem}_") or path.stem.endswith(stem) for stem in ADAPTERS[top])
                or path.stem in ("testing", "__main__")
            ):
                allowed = ", ".join(sorted(ADAPTERS[top]))
                yield f"{relative}:{line}: {top} is imported outside of its adapter ({allowed}.py)"


def _room_of(inside: str) -> str | None:
    name = inside.split("/")[0].removesuffix(".py")
    return name if name in ROOM_ORDER else None


def _check_room(relative: Path, line: int, inside: str, name: str) -> Iterator[str]:
    parts = name.split(".")
    if parts[0] != "meta_executor" or len(parts) < 2 or parts[1] not in ROOM_ORDER:
        return
    here = _room_of(inside)
    if here is None:
        return
    there = parts[1]
    if ROOM_ORDER.index(there) > ROOM_ORDER.index(here):
        yield f"{relative}:{line}: {here} imports {there}, which stands above it"
    if here == "front" and there in FRONT_FORBIDDEN and ".".join(parts[1:3]) not in FRONT_ALLOWED:
        yield f"{relative}:{line}: the front imports {name}: it talks to instances over their stream or HTTP only"


def check_pinned_memory(files: list[Path]) -> Iterator[str]:
    """Pinned allocations go through one module, so that they are counted and released in one place."""
    for path in files:
        relative = str(path.relative_to(ROOT))
        if path.suffix != ".py" or "/src/" not in relative or relative in PINNED_ALLOCATORS:
            continue
        for number, text in enumerate(path.read_text("utf-8").splitlines(), 1):
            if PINNED.search(text.split("#")[0]):
                yield f"{relative}:{number}: pinned memory outside of {', '.join(sorted(PINNED_ALLOCATORS))}"


def check_environment_proxies(files: list[Path]) -> Iterator[str]:
    """What carries a key or a prompt goes where it was sent, not to a proxy that a shell's environment names."""
    for path in files:
        if path.suffix != ".py":
            continue
        tree = ast.parse(path.read_text("utf-8"), str(path))
        modules, names = {"httpx"}, {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                modules.update(alias.asname for alias in node.names if alias.name == "httpx" and alias.asname)
            elif isinstance(node, ast.ImportFrom) and node.module == "httpx":
                names.update({alias.asname or alias.name: alias.name for alias in node.names})
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            function, name = node.func, None
            if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
                name = function.attr if function.value.id in modules else None
            elif isinstance(function, ast.Name):
                name = names.get(function.id)
            trusts = [word.value for word in node.keywords if word.arg == "trust_env"]
            if name in HTTPX_CLIENTS and not (
                trusts and isinstance(trusts[0], ast.Constant) and trusts[0].value is False
            ):
                yield f"{path.relative_to(ROOT)}:{node.lineno}: httpx.{name} without trust_env=False"


def check_package_files(_files: list[Path]) -> Iterator[str]:
    """What every distribution has."""
    licence = (ROOT / "LICENSE").read_text("utf-8")
    for package, module in PACKAGES.items():
        folder = ROOT / "packages" / package
        for name in (
            "pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", "docs/design.md",
            f"src/{module}/__about__.py", f"src/{module}/__init__.py", f"src/{module}/py.typed",
        ):  # fmt: skip
            if not (folder / name).is_file():
                yield f"packages/{package}/{name}: missing"
        if (folder / "LICENSE").is_file() and (folder / "LICENSE").read_text("utf-8") != licence:
            yield f"packages/{package}/LICENSE: differs from the repository's"
        if not list(folder.glob("tests/**/test_*.py")):
            yield f"packages/{package}/tests: no tests"


def check_top_level(files: list[Path]) -> Iterator[str]:
    """Nothing lies there by mistake."""
    for name in sorted({path.relative_to(ROOT).parts[0] for path in files} - TOP_LEVEL):
        yield f"{name}: is not one of the files and folders of the top level"


def check_whitespace(files: list[Path]) -> Iterator[str]:
    """No trailing blanks, no tabs in Python and YAML, one newline at the end."""
    for path in files:
        if path.suffix not in TEXT_SUFFIXES:
            continue
        relative = path.relative_to(ROOT)
        text = path.read_text("utf-8")
        if text and not text.endswith("\n"):
            yield f"{relative}: no newline at the end"
        if text.endswith("\n\n"):
            yield f"{relative}: blank lines at the end"
        for number, line in enumerate(text.split("\n"), 1):
            if line != line.rstrip() and path.suffix != ".md":
                yield f"{relative}:{number}: trailing blanks"
            if "\t" in line and path.suffix in (".py", ".yml", ".yaml"):
                yield f"{relative}:{number}: tab"
            if line.startswith(("<<<<<<< ", ">>>>>>> ")):
                yield f"{relative}:{number}: merge marker"


def check_secrets(files: list[Path]) -> Iterator[str]:
    """Keys and tokens that were committed by mistake, by the forms that their issuers gave them; never shown."""
    for path in files:
        if path.stat().st_size > _SECRET_FILE_BYTES_MAX:
            continue
        for number, line in enumerate(path.read_bytes().splitlines(), 1):
            for name, form in SECRETS.items():
                if form.search(line):
                    yield f"{path.relative_to(ROOT)}:{number}: this looks like {name}"


def check_yaml(files: list[Path]) -> Iterator[str]:
    """Every YAML file is one, without duplicate keys."""
    for path in files:
        if path.suffix in (".yml", ".yaml"):
            try:
                list(yaml.load_all(path.read_text("utf-8"), Loader=_UniqueKeys))
            except yaml.YAMLError as error:
                yield f"{path.relative_to(ROOT)}: {error}".replace("\n", " ")


class _UniqueKeys(yaml.SafeLoader):
    """A key that stands twice silently wins over the first: refuse it."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[object, object]:
        """Build a mapping whose keys differ."""
        seen: set[object] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} stands twice", key_node.start_mark)
            seen.add(key)
        return dict(super().construct_mapping(node, deep=deep))


def check_sign_off(since: str) -> Iterator[str]:
    """Every commit carries its author's sign-off."""
    out = subprocess.run(
        ["git", "log", "--no-merges", "--format=%h%x1f%an <%ae>%x1f%(trailers:key=Signed-off-by,valueonly,separator=%x1e)%x00",
         f"{since}..HEAD" if since else "HEAD"],
        cwd=ROOT, check=True, capture_output=True,
    ).stdout.decode()  # fmt: skip
    for record in filter(None, (r.strip("\n") for r in out.split("\0"))):
        commit, author, trailers = record.split("\x1f")
        if author not in trailers.split("\x1e"):
            yield f"{commit}: no Signed-off-by of {author.split(' <')[0]} (git commit -s)"


CHECKS: dict[str, Callable[[list[Path]], Iterator[str]]] = {
    "layering": check_layering,
    "pinned-memory": check_pinned_memory,
    "environment-proxies": check_environment_proxies,
    "package-files": check_package_files,
    "top-level": check_top_level,
    "whitespace": check_whitespace,
    "secrets": check_secrets,
    "yaml": check_yaml,
}


def main(arguments: list[str] | None = None) -> int:
    """Exit 0 when nothing was broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checks", nargs="*", help=f"only these: {', '.join(CHECKS)}")
    parser.add_argument("--sign-off-since", metavar="REV", help="check commits after REV; empty: all")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.checks if name not in CHECKS]
    if unknown:
        parser.error(f"unknown check {unknown[0]!r}; there are {', '.join(CHECKS)}")
    files = tracked_files()
    problems: list[str] = []
    for name in options.checks or CHECKS:
        problems += [f"{problem} [{name}]" for problem in CHECKS[name](files)]
    if options.sign_off_since is not None or not options.checks:
        problems += [f"{p} [sign-off]" for p in check_sign_off(options.sign_off_since or "")]
    for problem in problems:
        print(problem)
    print(f"{len(problems)} problems" if problems else "repository rules hold")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
