"""Shared test behaviour: a test marked ``mpi(N)`` runs on N ranks, wherever it is started from.

Inside a world of N ranks (``mpiexec -n N python -m pytest ...``) the tests of that size run on every rank and the others are
deselected. Outside any world each such test is started in a world of its own as a child, and its verdict is the child's:
nothing is skipped, so nothing that did not run can look green. Such a world ends with the pytest that started it, however
that ends.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).resolve().parent / "tools"))

from lifeline import Tethered
from worlds import launcher

# A loaded machine draws slowly: that is no fault of what is tested, and tests have a limit of their own.
settings.register_profile("repository", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("repository")

#: Set in the worlds that this file starts, for launchers that say the size in a way of their own (Slurm's).
_WORLD = "REPOSITORY_TEST_WORLD"
#: What a test marked slow may take where it says nothing itself: some take minutes, on a busy machine thrice that.
_SLOW_LIMIT_S = 900.0
#: A child world may take this long beyond the test's own limit: interpreter start, MPI start and teardown.
_WORLD_START_S = 60.0


def _world_size() -> int | None:
    return int(os.environ[_WORLD]) if _WORLD in os.environ else launcher.world_size()


def _ranks_of(item: pytest.Item) -> int | None:
    marker = item.get_closest_marker("mpi")
    if marker is None:
        return None
    if len(marker.args) != 1 or not isinstance(marker.args[0], int) or marker.args[0] < 1:
        raise pytest.UsageError(f"{item.nodeid}: mpi marker wants one rank count >= 1, got {marker.args!r}")
    return marker.args[0]


def pytest_configure(config: pytest.Config) -> None:
    """Tests are always run with bytes of their own: no bytecode races between ranks that share a folder."""
    if _world_size() is not None:
        sys.dont_write_bytecode = True


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give slow tests their time; inside a world keep exactly the tests of its size."""
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(_SLOW_LIMIT_S))
    world = _world_size()
    if world is None:
        return
    kept = [item for item in items if _ranks_of(item) == world]
    dropped = [item for item in items if _ranks_of(item) != world]
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = kept


def _limit_s(item: pytest.Item) -> float:
    """What one test may take, as pytest-timeout decides it: its own mark, the option, the environment, the configuration."""
    marker = item.get_closest_marker("timeout")
    wanted = (
        (marker.args[0] if marker.args else marker.kwargs.get("timeout")) if marker else None,
        item.config.getoption("timeout", None), os.environ.get("PYTEST_TIMEOUT"), item.config.getini("timeout"),
    )  # fmt: skip
    return next((float(limit) for limit in wanted if limit), 120.0)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Outside a world start the test in one."""
    ranks = _ranks_of(pyfuncitem)
    if ranks is None or _world_size() is not None:
        return None
    limit_s = _limit_s(pyfuncitem)
    path, _, name = pyfuncitem.nodeid.partition("::")
    test = f"{pyfuncitem.config.rootpath / path}::{name}"
    program = [sys.executable, "-m", "pytest", test, "-q", "-x", "--no-header", "-p", "no:cacheprovider", "-rs",
               "-o", f"timeout={limit_s}"]  # fmt: skip
    try:
        command = launcher.find_launcher().command(ranks, program)
    except launcher.LauncherError as error:
        pytest.fail(str(error), pytrace=False)
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "STAGE_"))}
    environment = {**launcher.outside_of_a_world(kept), _WORLD: str(ranks), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    world = Tethered(
        command, cwd=pyfuncitem.config.rootpath, env=environment,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True, errors="replace",
    )  # fmt: skip
    try:
        output, _ = world.process.communicate(timeout=limit_s + _WORLD_START_S)
    except subprocess.TimeoutExpired:
        world.cut()
        output, _ = world.process.communicate()
        pytest.fail(f"{ranks} ranks did not finish within {limit_s + _WORLD_START_S:.0f} s\n{output}", pytrace=False)
    finally:
        world.cut()
        world.process.wait()
    passed, skipped = output.count("1 passed"), output.count("1 skipped")
    if world.process.returncode == 0 and skipped == ranks:
        reasons = [line.partition(": ")[2] for line in output.splitlines() if line.startswith("SKIPPED")]
        pytest.skip(reasons[0] if reasons else f"skipped on all {ranks} ranks")
    if world.process.returncode != 0 or passed != ranks:
        pytest.fail(
            f"{ranks} ranks: exit {world.process.returncode}, {passed} of {ranks} ranks passed\n{output}", pytrace=False
        )
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test of several GPUs is NO COVERAGE where there are fewer."""
    marker = item.get_closest_marker("gpus")
    if marker is None:
        return
    count = marker.kwargs["count"]
    torch = pytest.importorskip("torch", reason="NO COVERAGE: torch is not installed")
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found < count:
        pytest.skip(f"NO COVERAGE: needs {count} GPUs, torch.cuda sees {found}")


@pytest.fixture
def world_comm(request: pytest.FixtureRequest) -> object:
    """The world communicator of a test marked ``mpi``; None where the test is only started in a world of its own."""
    if request.node.get_closest_marker("mpi") is None:
        pytest.fail("world_comm without a world: mark the test with @pytest.mark.mpi(ranks)", pytrace=False)
    if _world_size() is None:
        return None
    from mpi4py import MPI

    size, wanted = MPI.COMM_WORLD.size, _ranks_of(request.node)
    if size != wanted:
        pytest.fail(f"a world of {size} ranks, not {wanted}: the launcher is not that of mpi4py's MPI", pytrace=False)
    return MPI.COMM_WORLD
