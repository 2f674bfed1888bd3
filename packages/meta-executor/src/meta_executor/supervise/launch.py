"""The launcher: starts the worlds and the front, watches them, drains them, and leaves nothing behind.

One thread, one selector: messages of the processes (:mod:`report`) and the process handles of the children that it started
itself. Whatever ends unexpectedly is named once, the first one first; then either the whole run ends, or, when asked,
the instance that lost a rank comes back under a new identity while the others go on.

Children are killed by identity (pid and start time), never by group: each rank of an ``mpiexec`` world has a session of
its own. Every child also dies with its parent, so a killed launcher leaves no process either.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import httpx
import msgspec

from meta_executor import wire
from meta_executor.addresses import advertised_url, resolved
from meta_executor.config import ConfigError, InstanceSpec, RunSpec, ServiceConfig
from meta_executor.evidence.records import DRAINED, LifetimeRecord, RunRecord, write_run
from meta_executor.listener.tls import pinned_context
from meta_executor.mpi_launcher import LauncherError, find_launcher, outside_of_a_world, world_size
from meta_executor.private_files import NotPrivateError, copy_files, open_folder, write_file
from meta_executor.supervise.exposure import beyond_loopback, shown_url, warning
from meta_executor.supervise.find_run import FRONT_URL
from meta_executor.supervise.guard import describe_status
from meta_executor.supervise.procfs import ProcessIdentity, descendants, descends_from, die_with_parent
from meta_executor.supervise.report import Exited, Listener, Memory, Message, Orphaned, Ready, Started, Status
from meta_executor.supervise.rundir import RunDirectory, default_base, read_key, remove_stale_runs
from meta_executor.supervise.shm import segments_of

RestartPolicy = Literal["never", "instance"]

#: Events that arrive within this time of the first death are looked at together before one is named (s).
_CAUSE_WINDOW_S = 0.25
#: Survivors of a death may write their evidence for this long before they are ended (s).
_SURVIVOR_GRACE_S = 1.5
#: After a death the front may let what still runs end for this long (s).
_FRONT_GRACE_S = 5.0
#: Then it has this long to tell the clients of what did not (s).
_FRONT_CUT_S = 2.0
#: A killed process is gone within this time, or is reported (s): it hangs in the kernel then.
_KILL_WAIT_S = 10.0
#: An instance is started again at most so many times without having been ready in between (count); then the run ends.
_STARTS_IN_A_ROW_MAX = 3


def world_command(ranks: int, program: list[str]) -> list[str]:
    """The command line that runs a program on that many ranks of this machine.

    Raises:
        ConfigError: There is no launcher of MPI worlds.
    """
    try:
        return find_launcher().command(ranks, program)
    except LauncherError as error:
        raise ConfigError("mpiexec", str(error)) from error


@dataclass(frozen=True)
class Death:
    """What ended without being asked to."""

    owner_id: str
    rank: int | None
    what: str
    pid: int
    text: str

    def __str__(self) -> str:
        where = f"{self.owner_id} rank {self.rank}" if self.rank is not None else f"{self.what} of {self.owner_id}"
        if self.owner_id == "front":
            where = "front"
        return f"{where} (pid {self.pid}) died: {self.text}"


@dataclass
class _Member:
    """A rank and its guard, as they reported themselves."""

    rank: ProcessIdentity | None = None
    guard: ProcessIdentity | None = None
    proxy: ProcessIdentity | None = None
    phase: str = "starting"
    exited: bool = False
    died: bool = False


@dataclass
class _Component:
    """An instance's world, or the front."""

    owner_id: str
    spec: InstanceSpec | None
    process: subprocess.Popen[bytes] | None = None
    identity: ProcessIdentity | None = None
    instance_id: str = ""
    url: str | None = None
    ready: bool = False
    said_ready: bool = False
    started_s: float = 0.0
    members: dict[int, _Member] = field(default_factory=dict)
    phase_shown: str = ""
    #: Where its log begins in the file that starts of one name share (bytes).
    log_offset: int = 0

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def spent(self) -> bool:
        """One of its ranks died and none is left: its guards wait for the launcher only."""
        ranks = self.members.values()
        return any(member.died for member in ranks) and all(member.exited for member in ranks)


class RunFailed(Exception):
    """The run ended by something that nobody asked for. The message is one line."""


class Launcher:
    """One run of a service, or of a single instance of it.

    Args:
        service: The configuration.
        say: Takes one line for the person who started it.
        roles: Which instances to start.
        with_front: Start the front, too.
        restart: What to do when an instance loses a process.
        worker: Interpreter arguments that run one rank; an engine with ranks of its own gives its module here.
        front: Interpreter arguments that run the front.
    """

    def __init__(
        self,
        service: ServiceConfig,
        *,
        say: Callable[[str], None],
        roles: tuple[str, ...] = ("context", "generation"),
        with_front: bool = True,
        restart: RestartPolicy = "never",
        worker: tuple[str, ...] = ("-m", "meta_executor.rank.worker"),
        front: tuple[str, ...] = ("-m", "meta_executor.front"),
    ) -> None:
        self._worker = worker
        self._front = front
        self._service = service
        self._say = say
        self._roles = roles
        self._with_front = with_front
        self._restart = restart
        self._selector = selectors.DefaultSelector()
        self._components: dict[str, _Component] = {}
        self._interrupts = 0
        self._draining = False
        #: Deaths that came while another one was acted on.
        self._pending: list[Death] = []
        #: Instances that have been ready, with the port where the front was told to find them; None: any will do.
        self._served_at: dict[str, int | None] = {}
        #: Bound and not listening: ports that nobody else is given while their instances are away.
        self._held: list[socket.socket] = []
        #: Starts in a row that did not become ready (count).
        self._failed_starts: dict[str, int] = {}
        #: By instance identity: each lifetime, and how it ended.
        self._lifetimes: dict[str, LifetimeRecord] = {}
        self.deaths: list[Death] = []
        self.restarts = 0

    # -- the whole life ------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def started(self) -> Iterator[Launcher]:
        """Start everything and wait until it can serve; on leaving, drain (or kill, when it failed) and clean up.

        Raises:
            ConfigError: Something configured cannot be used. Nothing is left running.
            RunFailed: A component died, or was not ready in time.
        """
        # Before anything is made and until everything is gone: whatever the moment of a signal, what was begun is taken apart.
        handlers = {number: signal.signal(number, self._on_signal) for number in _end_signals()}
        try:
            with self._life():
                yield self
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    @contextlib.contextmanager
    def _life(self) -> Iterator[None]:
        self._check_copies()
        self._warn_of_listeners()
        base = Path(self._service.run_dir) if self._service.run_dir else default_base()
        for stale in remove_stale_runs(base):
            self._say(f"removed what a killed run had left in {stale}")
        world_command(1, [])  # without a launcher nothing is begun
        key = None if self._service.key_file is None else read_key(self._service.key_file)
        self._directory = RunDirectory.create(base, secrets.token_hex(4), key)
        self._key_hex = (self._directory.path / "key").read_text("ascii")
        clean = False
        try:
            self.run = self._write_spec()
            self._listener = Listener(self._directory.path)
            self._selector.register(self._listener, selectors.EVENT_READ, None)
            try:
                for spec in self.run.instances:
                    if not spec.url:
                        self._start_instance(spec)
                self._wait_ready(tuple(self._components))
                if self._with_front:
                    self._start_front()
                    self._wait_ready(("front",))
                yield
                clean = self._drain()
            finally:
                if not clean:
                    self._let_front_answer()
                self._kill_everything()
                if (lost := self._keep_files()) is not None:
                    self._say(lost)
                    if clean:
                        clean = False
                        raise RunFailed(lost)
        finally:
            if hasattr(self, "_listener"):
                self._selector.unregister(self._listener)
                self._listener.close()
            self._selector.close()
            for held in self._held:
                held.close()
            if clean:
                self._directory.remove()
            else:
                logs = self._directory.keep_logs()
                if any(logs.iterdir()):
                    self._say(f"logs stay in {logs} until the next start")
                else:
                    shutil.rmtree(self._directory.path, ignore_errors=True)

    def wait(self) -> None:
        """Serve until somebody asks for the end (SIGINT, SIGTERM), or something died.

        Raises:
            RunFailed: Something died and was not to be restarted.
        """
        while not self._interrupts:
            self.turn(1.0)

    @property
    def front_url(self) -> str:
        """Where the front answers."""
        return self._components["front"].url or ""

    def urls(self) -> dict[str, str]:
        """Where each instance answers."""
        there = {spec.owner_id: spec.url for spec in self.run.instances if spec.url}
        return there | {owner: c.url or "" for owner, c in self._components.items() if owner != "front"}

    @property
    def key_header(self) -> dict[str, str]:
        """The header that an instance's internal requests carry."""
        return {wire.KEY_HEADER: self._key_hex}

    def processes(self) -> dict[str, int]:
        """Name → pid of every process of the run that is known; for tests and for the reader."""
        found: dict[str, int] = {"launcher": os.getpid()}
        for owner, component in self._components.items():
            if component.identity is not None:
                found[owner if owner == "front" else f"{owner}/mpiexec"] = component.identity.pid
            for rank, member in component.members.items():
                for name, identity in (("rank", member.rank), ("guard", member.guard), ("hydra", member.proxy)):
                    if identity is not None:
                        found[f"{owner}/{name}{rank}"] = identity.pid
        return found

    # -- starting ------------------------------------------------------------------------------------------------------

    def _warn_of_listeners(self) -> None:
        """Name each listener that more than this machine can reach, before it is there."""
        listeners = [
            (f"{prefix}-{index}", section.hostname)
            for role, prefix, section in (
                ("context", "ctx", self._service.context_servers),
                ("generation", "gen", self._service.generation_servers),
            )
            for index in range(0 if section.urls else section.num_instances)
            if role in self._roles
        ]
        if self._with_front:
            listeners.append(("front", self._service.hostname))
        front = self._service.front
        keys, tls = front.api_keys_file is not None, front.tls_certificate_file is not None
        for name, hostname in listeners:
            if (text := warning(name, hostname, keys=keys, tls=tls)) is not None:
                self._say(text)

    def _write_spec(self) -> RunSpec:
        instances = []
        for role, prefix in (("context", "ctx"), ("generation", "gen")):
            if role not in self._roles:
                continue
            section = self._service.context_servers if role == "context" else self._service.generation_servers
            for index in range(len(section.urls) or section.num_instances):
                instances.append(
                    InstanceSpec(
                        owner_id=f"{prefix}-{index}",
                        role=role,  # type: ignore[arg-type]
                        index=index,
                        config=section,
                        port=section.port + index if section.port else 0,
                        url=section.urls[index].rstrip("/") if section.urls else "",
                    )
                )
        run = RunSpec(
            run_id=self._directory.path.name,
            run_dir=str(self._directory.path),
            launcher_pid=os.getpid(),
            service=self._service,
            instances=tuple(instances),
        )
        run.save()
        return run

    def _environment(self) -> dict[str, str]:
        threads = str(self._service.engine.threads)
        alone = not any(beyond_loopback(spec.config.hostname) for spec in self.run.instances)
        environment = {
            # UCX listens on every interface unless it is told.
            **({"UCX_NET_DEVICES": "lo"} if alone else {}),
            # Its System V segments are open to this account's group whatever the umask; the POSIX ones are not.
            "UCX_TLS": "^sysv",
            **(os.environ if world_size() is None else outside_of_a_world(os.environ)),
            "TMPDIR": str(self._directory.path / "tmp"),
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "PYTHONUNBUFFERED": "1",
        }
        if any(spec.config.cache_transceiver_config.transport != "auto" for spec in self.run.instances):
            # The variable would win over what NIXL's backend is told, and memory be taken for proven that is not.
            del environment["UCX_TLS"]
        return environment

    def _spawn(self, component: _Component, command: list[str]) -> None:
        path = self._directory.path / "logs" / f"{component.owner_id}.log"
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(path, flags, 0o600), "ab") as log:
            component.log_offset = os.fstat(log.fileno()).st_size
            component.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment(),
                # Not our process group: Ctrl-C is ours to handle, once, in order.
                start_new_session=True,
                # What a process of the run writes is its user's only.
                umask=0o077,
                preexec_fn=die_with_parent,
            )
        component.identity = ProcessIdentity.of(component.process.pid)
        component.started_s = time.monotonic()
        self._components[component.owner_id] = component
        handle = os.pidfd_open(component.process.pid)
        self._selector.register(handle, selectors.EVENT_READ, component.owner_id)

    def _hold_port(self, spec: InstanceSpec) -> int:
        """A free port that stays this instance's until the run ends, also while it starts again: the front was told of it.

        A socket that is bound and does not listen is in nobody's way who binds with SO_REUSEADDR, as the instance does. The
        system gives its port to no connection, and to no listener that asks for any port.
        """
        try:
            family, address = resolved(spec.config.hostname, 0)
            held = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
            self._held.append(held)
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind(address)
        except OSError as error:
            raise RunFailed(f"{spec.owner_id}: cannot listen at {spec.config.hostname}: {error}") from error
        return int(held.getsockname()[1])

    def _start_instance(self, spec: InstanceSpec, port: int | None = None) -> None:
        if not spec.port and self._restart == "instance" and self._service.discovery.store is None:
            port = self._hold_port(spec)
        if port is not None and port != spec.port:
            spec = msgspec.structs.replace(spec, port=port)
            self.run = msgspec.structs.replace(
                self.run, instances=tuple(spec if s.owner_id == spec.owner_id else s for s in self.run.instances)
            )
            self.run.save()
        component = _Component(spec.owner_id, spec, instance_id=secrets.token_hex(16))
        self._lifetimes[component.instance_id] = LifetimeRecord(
            spec.owner_id, component.instance_id, spec.role, spec.config.world_size, "it ended with the run"
        )
        run_dir = str(self._directory.path)
        self._spawn(
            component,
            world_command(spec.config.world_size, [
                sys.executable, "-m", "meta_executor.supervise.guard", "--run-dir", run_dir, "--owner", spec.owner_id,
                "--instance-id", component.instance_id, "--launcher-pid", str(os.getpid()), "--",
                sys.executable, *self._worker, "--run-dir", run_dir, "--owner", spec.owner_id,
                "--instance-id", component.instance_id,
            ]),
        )  # fmt: skip
        self._say(f"{spec.owner_id}: starting {spec.config.world_size} {spec.role} ranks")

    def _start_front(self) -> None:
        component = _Component("front", None)
        listed = self.urls()
        if self._service.discovery.store is not None:  # what we started registers; what runs already may know no store
            listed = {spec.owner_id: spec.url for spec in self.run.instances if spec.url}
        servers = [part for owner, url in listed.items() for part in ("--server", f"{owner}={url}")]
        self._spawn(
            component,
            [sys.executable, *self._front, "--run-dir", str(self._directory.path), *servers],
        )

    def _wait_ready(self, owners: tuple[str, ...]) -> None:
        deadline = time.monotonic() + self._service.start_timeout_s
        while not all(self._components[owner].ready for owner in owners):
            if self._interrupts:
                raise RunFailed("interrupted while starting")
            if time.monotonic() > deadline:
                late = [
                    f"{owner} ({', '.join(sorted({m.phase for m in self._components[owner].members.values()}))})"
                    for owner in owners
                    if not self._components[owner].ready
                ]
                raise RunFailed(f"not ready within {self._service.start_timeout_s:.0f} s: {', '.join(late)}")
            self.turn(0.5)

    # -- watching ------------------------------------------------------------------------------------------------------

    def _on_signal(self, number: int, _frame: object) -> None:
        self._interrupts += 1
        if self._interrupts == 1:
            self._say(f"{signal.Signals(number).name}: draining; once more kills")

    def turn(self, timeout_s: float) -> None:
        """Take in what happened, or wait for it so long; act on deaths.

        Raises:
            RunFailed: Something died and was not to be restarted.
        """
        waiting, self._pending = self._pending, []
        suspects = [*waiting, *self._collect(0.0 if waiting else timeout_s), *self._late_starts()]
        if self._draining or not suspects:
            return
        # What belongs to the same event arrives within a moment; the cause is chosen among all of it.
        end = time.monotonic() + _CAUSE_WINDOW_S
        while (left := end - time.monotonic()) > 0:
            suspects += self._collect(left)
        cause = _first_cause(suspects)
        self._pending += [death for death in suspects if death.owner_id != cause.owner_id]
        self._on_death(cause)

    def _late_starts(self) -> list[Death]:
        """Instances that were started again and are not ready when they should be."""
        late = []
        limit_s = self._service.start_timeout_s
        for owner_id in self._served_at:
            component = self._components[owner_id]
            if component.running and not component.ready and time.monotonic() - component.started_s > limit_s:
                pid = component.process.pid if component.process else 0
                late.append(Death(owner_id, None, "start", pid, f"not ready within {limit_s:.0f} s"))
        return late

    def _collect(self, timeout_s: float) -> list[Death]:
        deaths = []
        ready = self._selector.select(timeout_s)
        # Messages first: a rank's own report is older than the end of what carried it.
        for key, _ in sorted(ready, key=lambda item: item[0].data is not None):
            if key.data is None:
                for message in self._listener.receive():
                    deaths += self._on_message(message)
                for why in self._listener.refusals():
                    self._say(why)
            else:
                deaths += self._on_child_end(str(key.data), key.fd)
        return deaths

    def _on_message(self, message: Message) -> list[Death]:
        component = self._components.get(message.owner_id)
        if component is None or message.instance_id not in ("", component.instance_id):
            return []  # of a start that was ended: its last words say nothing about the present one
        told = message.told()
        if message.owner_id == "front":
            if isinstance(told, Ready):
                component.url, component.ready = told.url, True
                write_file(self._directory.path / FRONT_URL, component.url.encode())
                self._say_ready(component)
            return []
        member = component.members.setdefault(message.rank, _Member())
        if isinstance(told, Started):
            member.guard = ProcessIdentity(message.pid, told.guard_start_ticks)
            member.rank = ProcessIdentity(told.rank_pid, told.rank_start_ticks)
            # An orphan names whoever adopted it: that one is never ended by us.
            started = component.process.pid if component.process else 0
            proxy = ProcessIdentity.of(told.parent_pid)
            member.proxy = proxy if proxy and started and descends_from(proxy.pid, started) else None
            member.exited = member.died = False
        elif isinstance(told, Status):
            member.phase = told.phase
            self._say_progress(component)
        elif isinstance(told, Memory):
            sizes = f"rss {told.rss_bytes / 2**20:.0f} MiB, kv {told.kv_bytes / 2**20:.0f} MiB"
            self._say(f"{message.owner_id} rank {message.rank}: {sizes}")
        elif isinstance(told, Ready) and told.instance_id == component.instance_id:
            component.url, component.ready = told.url, True
            self._say_ready(component)
        elif isinstance(told, Orphaned) and component.running:
            return [Death(message.owner_id, None, told.what, told.gone_pid, "gone")]
        elif isinstance(told, Exited):
            member.exited, member.died = True, told.status != 0
            if member.died:
                return [Death(message.owner_id, message.rank, "rank", told.rank_pid, told.text)]
        return []

    def _on_child_end(self, owner_id: str, descriptor: int) -> list[Death]:
        self._selector.unregister(descriptor)
        os.close(descriptor)
        component = self._components[owner_id]
        process = component.process
        if process is None or (component.identity and component.identity.alive()):
            return []
        code = process.wait()
        component.ready = False
        text = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit {code}"
        if code == 0 and component.said_ready and owner_id != "front":
            text = "exit 0, though nobody asked for it"
        return [Death(owner_id, None, "mpiexec" if component.spec else "front", process.pid, text)]

    def _on_death(self, death: Death) -> None:
        self.deaths.append(death)
        self._say(str(death))
        component = self._components[death.owner_id]
        self._ended(component, str(death))
        spec = component.spec
        self._end_survivors(component)
        if self._restart != "instance" or spec is None or death.owner_id not in self._served_at:
            raise RunFailed(str(death) + self._log_hint(component))
        failed = 0 if component.said_ready else self._failed_starts.get(death.owner_id, 0) + 1
        self._failed_starts[death.owner_id] = failed
        if failed >= _STARTS_IN_A_ROW_MAX:
            raise RunFailed(f"{death}, as in {failed} starts in a row{self._log_hint(component)}")
        self.restarts += 1
        # What is left of its end is nothing new.
        self._pending = [other for other in self._pending if other.owner_id != death.owner_id]
        self._start_instance(spec, self._served_at[death.owner_id])

    def _ended(self, component: _Component, how: str) -> None:
        """Note how a lifetime ended."""
        lifetime = self._lifetimes.get(component.instance_id)
        if lifetime is not None:
            self._lifetimes[component.instance_id] = msgspec.structs.replace(lifetime, ended=how)

    def _end_survivors(self, component: _Component) -> None:
        """Give survivors the time to write what they know, then end the world that lost a process."""
        end = time.monotonic() + _SURVIVOR_GRACE_S
        while component.spec and component.running and (left := end - time.monotonic()) > 0:
            self._pending += [d for d in self._collect(left) if d.owner_id != component.owner_id]
            if component.members and all(m.exited for m in component.members.values()):
                break
        self._kill(component)

    def _log_hint(self, component: _Component) -> str:
        path = self._directory.path / "logs" / f"{component.owner_id}.log"
        try:
            with path.open("rb") as log:
                log.seek(component.log_offset)
                lines = [line for line in log.read().decode("utf-8", "replace").splitlines() if line.strip()]
        except OSError:
            return ""
        return f"; its last line: {lines[-1][:300]}" if lines else ""

    def _say_progress(self, component: _Component) -> None:
        phases: dict[str, int] = {}
        for member in component.members.values():
            phases[member.phase] = phases.get(member.phase, 0) + 1
        world = component.spec.config.world_size if component.spec else 1
        text = ", ".join(f"{phase} {count}/{world}" for phase, count in phases.items())
        if len(phases) == 1 and sum(phases.values()) == world and text != component.phase_shown:
            component.phase_shown = text
            self._say(f"{component.owner_id}: {next(iter(phases))}")

    def _say_ready(self, component: _Component) -> None:
        component.said_ready = True
        if component.spec is not None:
            # Where the front was told an address, it is that address which must answer again.
            port = None if self._service.discovery.store is not None else httpx.URL(component.url or "").port
            self._served_at[component.owner_id] = port
            self._failed_starts.pop(component.owner_id, None)
        took = time.monotonic() - component.started_s
        url = component.url or ""
        if component.spec is None:
            url = shown_url(self._service.hostname, url)
        else:
            config = component.spec.config
            told = advertised_url(config.hostname, config.advertised_host, url)
            url = told if config.advertised_host else shown_url(config.hostname, url)
        self._say(f"{component.owner_id}: ready at {url} after {took:.1f} s")

    # -- ending --------------------------------------------------------------------------------------------------------

    def _post(self, url: str, path: str) -> str | None:
        """POST with the run's key. Returns what went wrong, or None."""
        certificate = self._service.front.tls_certificate_file
        try:
            answer = httpx.post(
                url + path,
                headers=self.key_header,
                timeout=5.0,
                trust_env=False,
                verify=pinned_context(certificate) if certificate and url.startswith("https:") else False,
            )
        except httpx.HTTPError as error:
            return f"{type(error).__name__}: {error}"
        return None if answer.is_success else f"HTTP {answer.status_code}"

    def _drain(self) -> bool:
        """Front first, then the instances. Returns whether everything left by itself with 0."""
        self._draining = True
        clean = True
        deadline = time.monotonic() + self._service.drain_timeout_s
        for wave in (["front"], [o for o in self._components if o != "front"]):
            wanted = [self._components[owner] for owner in wave if owner in self._components]
            waiting = [component for component in wanted if component.running]
            for component in wanted:
                if not component.running:  # by itself, since the drain began
                    clean &= self._judge_leaving(component)
            for component in [c for c in waiting if not c.ready]:
                # It has taken nothing that could be drained.
                clean = False
                waiting.remove(component)
                self._kill(component)
                self._ended(component, "it was ended while it was starting")
                self._say(f"{component.owner_id}: ended while it was starting")
            for component in waiting:
                problem = self._post(component.url or "", "/internal/drain")
                if problem is not None:
                    # Perhaps it leaves already, drained by somebody: how it ends decides.
                    self._say(f"{component.owner_id}: cannot be told to drain: {problem}")
            for component in waiting:
                while (
                    component.running and not component.spent and time.monotonic() < deadline and self._interrupts <= 1
                ):
                    self._collect(0.1)
                if component.running:
                    clean = False
                    how = "lost a rank while it drained" if component.spent else "did not leave in time"
                    self._ended(component, f"it {how} and was killed")
                    self._say(f"{component.owner_id}: {how}, killed")
                    continue
                clean &= self._judge_leaving(component)
        if not clean:
            raise RunFailed("the drain was not clean")
        return clean

    def _judge_leaving(self, component: _Component) -> bool:
        """Say how a component has left; whether that was a proven end."""
        code = component.process.wait() if component.process else 0
        if code == 0:
            self._ended(component, DRAINED)
            self._say(f"{component.owner_id}: drained")
            return True
        self._ended(component, f"it left with exit {code}")
        self._say(f"{component.owner_id}: left with exit {code}{self._log_hint(component)}")
        return False

    def _let_front_answer(self) -> None:
        """After a death: the front lets running answers end, tells the clients of those that do not, and leaves."""
        front = self._components.get("front")
        if front is None or front.process is None or not front.running or not front.ready or self._interrupts > 1:
            return
        self._draining = True
        if self._post(front.url or "", "/internal/drain") is None:
            self._await_end(front, _FRONT_GRACE_S)
            if front.running:
                # While it drains, a signal makes it end every stream with an error; SIGKILL would break them off.
                front.process.send_signal(signal.SIGTERM)
                self._await_end(front, _FRONT_CUT_S)

    def _await_end(self, component: _Component, timeout_s: float) -> None:
        end = time.monotonic() + timeout_s
        while component.running and (left := end - time.monotonic()) > 0:
            self._collect(min(left, 0.1))

    def _kill(self, component: _Component) -> None:
        known = [
            identity
            for member in component.members.values()
            for identity in (member.rank, member.guard, member.proxy)
            if identity is not None
        ]
        # Their names go with a world's start; one that is ended before that cannot remove them any more.
        ranks = [member.rank for member in component.members.values() if member.rank is not None]
        segments = {path for rank in ranks for path in segments_of(rank.pid)}
        if component.process is not None:
            # It starts nobody any more, and has no word on the death of those that are ended here.
            component.process.send_signal(signal.SIGSTOP)
        for identity in known:
            identity.kill()
        if component.process is not None and component.process.returncode is None:
            # Also who has not reported yet: they are found by their parents, until nobody begins another one.
            while below := [found for found in descendants(component.process.pid) if found not in known]:
                known += below
                segments |= {path for found in below for path in segments_of(found.pid)}
                for identity in below:
                    identity.kill()
        if component.process is not None:
            component.process.kill()
            component.process.wait()
        for identity in known:
            if not identity.wait_gone(_KILL_WAIT_S):
                self._say(
                    f"{component.owner_id}: process {identity.pid} did not end within {_KILL_WAIT_S:.0f} s of SIGKILL"
                )
        for path in segments:
            Path(path).unlink(missing_ok=True)

    def _kill_everything(self) -> None:
        with contextlib.suppress(OSError):
            for message in self._listener.receive():
                self._on_message(message)
        for component in self._components.values():
            self._kill(component)

    def _wanted_copies(self) -> Iterator[tuple[str, str, str]]:
        """(folder of the run, field of the configuration, its value) of what is to be kept."""
        for name, configured, wanted in (
            ("evidence", "evidence_dir", self._service.evidence_dir),
            ("logs", "log_dir", self._service.log_dir),
        ):
            if wanted is not None:
                yield name, configured, wanted

    def _check_copies(self) -> None:
        """Say now, and not after the run, that its files cannot be kept where they were wanted."""
        for _, configured, wanted in self._wanted_copies():
            try:
                os.close(open_folder(wanted, create=True))
            except NotPrivateError as error:
                raise ConfigError(configured, str(error)) from error
            except OSError as error:
                raise ConfigError(configured, f"cannot make {wanted}: {error.strerror}") from error

    def _keep_files(self) -> str | None:
        """Copy what was asked for out of the run folder. Returns what could not be kept, or None."""
        problems = []
        try:
            run = RunRecord(run_id=self._directory.path.name, lifetimes=list(self._lifetimes.values()))
            write_run(self._directory.path / "evidence", run)
        except OSError as error:
            problems.append(f"the record of the run cannot be written: {error}")
        for name, configured, wanted in self._wanted_copies():
            try:
                target = open_folder(wanted, create=True)
                try:
                    copy_files(self._directory.path / name, target)
                finally:
                    os.close(target)
            except (OSError, NotPrivateError) as error:
                problems.append(f"{configured}: {name} cannot be kept in {wanted}: {error}")
        return "; ".join(problems) or None


def _end_signals() -> tuple[signal.Signals, ...]:
    """What asks for the end; a run whose terminal was taken away on purpose (nohup) goes on without it."""
    hangup = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
    return (signal.SIGINT, signal.SIGTERM, *hangup)


def _first_cause(suspects: list[Death]) -> Death:
    """The one to name: a process of ours that was killed explains what died in its train, and the first rank the rest."""

    def order(item: tuple[int, Death]) -> tuple[int, int]:
        position, death = item
        if death.rank is None and death.text.startswith("signal"):
            return (0, position)
        if death.rank is None and death.text == "gone":
            return (1, position)
        if death.rank is not None:
            return (2, position)
        return (3, position)

    return min(enumerate(suspects), key=order)[1]


__all__ = ["Death", "Launcher", "RestartPolicy", "RunFailed", "describe_status", "world_command"]
