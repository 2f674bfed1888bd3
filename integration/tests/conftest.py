"""One running service for all tests of this folder that ask for it: the demo's configuration, the real model."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec
import pytest

from hosts import Network, Unavailable
from meta_executor.config import ServiceConfig, apply_environment, load_service_config
from meta_executor.supervise.launch import Launcher
from meta_executor.wire import InstanceStatistics
from service_on_hosts import Site

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "packages" / "meta-executor" / "examples" / "smollm2.yaml"


@dataclass
class Service:
    """What a test needs of a running service."""

    url: str
    launcher: Launcher
    config: ServiceConfig
    log_dir: Path
    evidence_dir: Path
    lines: list[str]

    def statistics(self) -> dict[str, InstanceStatistics]:
        """Counters of each instance."""
        found = {}
        for owner, url in self.launcher.urls().items():
            answer = httpx.get(
                f"{url}/internal/statistics", headers=self.launcher.key_header, trust_env=False
            ).raise_for_status()
            found[owner] = msgspec.json.decode(answer.content, type=InstanceStatistics)
        return found


@pytest.fixture(scope="session")
def short_folder() -> Iterator[Path]:
    """A folder with a short path: the names of sockets below it are limited."""
    folder = Path(tempfile.mkdtemp(prefix="mx"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def service(short_folder: Path) -> Iterator[Service]:
    """The service, drained at the end: an unclean drain fails the last test that used it."""
    config = msgspec.structs.replace(
        apply_environment(load_service_config(EXAMPLE), {}),
        run_dir=str(short_folder / "r"),
        log_dir=str(short_folder / "logs"),
        evidence_dir=str(short_folder / "evidence"),
    )
    lines: list[str] = []
    launcher = Launcher(config, say=lines.append)
    with launcher.started():
        yield Service(launcher.front_url, launcher, config, short_folder / "logs", short_folder / "evidence", lines)


@pytest.fixture
def site() -> Iterator[Site]:
    """Three hosts, and nothing on them yet."""
    folder = Path(tempfile.mkdtemp(prefix="mx"))
    try:
        with Network(("ctx", "gen", "front")) as network:
            made = Site(network, folder, shutil.which("etcd") or "etcd")
            try:
                yield made
            finally:
                made.remove()
    except Unavailable as error:
        pytest.skip(f"NO COVERAGE: network namespaces cannot be made here: {error}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
