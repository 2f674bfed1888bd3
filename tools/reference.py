"""The reference pages, made from the code: settings, variables, metrics, errors, states, commands, compatibility.

    python tools/reference.py           # exit 1 and a line for each page of docs/reference that differs from the code
    python tools/reference.py --write   # write them

What the code does not say cannot be printed: a setting, a metric or an error without a description is an error that names it,
and so is an environment variable that no line of ``VARIABLES`` tells about.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib
import inspect
import json
import re
import sys
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "docs" / "reference"
MADE = "<!-- Made by `python tools/reference.py --write` from the code. Do not edit. -->\n"

#: Settings of the packages: package → dotted classes.
SETTINGS = {
    "rpc-local-registry": ("rpc_local_registry.RpcConfig",),
    "rpc-batch-submit": ("rpc_batch_submit.BatchSubmitConfig",),
    "comm-broadcast": ("comm_broadcast.BroadcastConfig",),
    "adp-router": ("adp_router.RouterConfig", "adp_router.GateConfig"),
    "pp-agreement": ("pp_agreement.AgreementConfig",),
    "kv-bounce-planner": (
        "kv_bounce_planner.sessions.SessionConfig",
        "kv_bounce_planner.transports._nixl.NixlConfig",
    ),
    "endpoint-lifecycle": ("endpoint_lifecycle.DirectoryConfig",),
}

#: Every environment variable that something here looks at or sets: who does, and what it means.
VARIABLES = {
    "TLLM_RPC_LOCAL_FASTPATH": (
        "rpc-local-registry, meta-executor",
        "1: calls go straight to a worker of the same process; 0: over the socket. Counts where the configuration is "
        "silent",
    ),
    "TLLM_RPC_SUBMIT_BATCH_MAX": (
        "rpc-batch-submit, meta-executor",
        "requests in one call, at least 1; 1 is off. Counts where the configuration is silent",
    ),
    "TLLM_RPC_SUBMIT_BATCH_DELAY_MS": (
        "rpc-batch-submit, meta-executor",
        "longest time that a request waits for company (ms). Counts where the configuration is silent",
    ),
    "META_EXECUTOR_MPIEXEC": (
        "meta-executor",
        "the command line that starts ranks, such as `srun --mpi=pmi2`; without it the `mpiexec` beside the "
        "interpreter, then `PATH`",
    ),
    "META_EXECUTOR_URL": ("`meta-executor explain`, `top`", "the front, or one instance, that is asked; like `--url`"),
    "META_EXECUTOR_API_KEY": (
        "`meta-executor explain`, `top`",
        "an operator's key, where the run's own is not to be had",
    ),
    "META_EXECUTOR_BASE_PYTHON": ("bootstrap.py, nox", "the interpreter that `.venv` is made with"),
    "META_EXECUTOR_OFFLINE": ("tools/fetch_etcd.py", "1: no etcd is fetched; tests against it are NO COVERAGE"),
    "XDG_RUNTIME_DIR": ("meta-executor", "run folders are made below it; without it below the temporary folder"),
    "XDG_CACHE_HOME": ("meta-executor", "converted weights are kept below it; without it below `~/.cache`"),
    "UCX_NET_DEVICES": (
        "UCX; meta-executor sets it",
        "interfaces that KV may use; `lo` where every hostname is a loopback address and it was not set",
    ),
    "UCX_TLS": (
        "UCX; meta-executor sets it",
        "transports that KV may use; `^sysv` where it was not set, tcp alone with "
        "`cache_transceiver_config.transport: tcp`",
    ),
    "OMPI_COMM_WORLD_RANK": ("meta-executor", "set by Open MPI's launcher: which rank this is"),
    "OMPI_COMM_WORLD_SIZE": ("meta-executor", "set by Open MPI's launcher: how many ranks there are"),
    "PMI_RANK": ("meta-executor", "set by hydra (MPICH): which rank this is"),
    "PMI_SIZE": ("meta-executor", "set by hydra (MPICH): how many ranks there are"),
    "PMIX_RANK": ("meta-executor", "set by launchers that speak PMIx: which rank this is"),
    "SLURM_PROCID": ("meta-executor", "set by srun: which rank this is"),
    "SLURM_JOB_NUM_NODES": ("tools/stages", "set by Slurm: how many hosts a stage has"),
}
_VARIABLE = re.compile(r"(?:META_EXECUTOR|TLLM|XDG|UCX|PMIX?|OMPI|SLURM|CUDA)_[A-Z_]+")

#: Tables of states: title, module, table, first state.
MACHINES = (
    ("One owner's lifetime", "endpoint-lifecycle", "endpoint_lifecycle._state", "TRANSITIONS", "NEW"),
    ("Receiving one operation", "kv-bounce-planner", "kv_bounce_planner.sessions.states", "RECEIVE_TRANSITIONS",
     "UNEXPOSED"),
    ("Sending one operation", "kv-bounce-planner", "kv_bounce_planner.sessions.states", "SEND_TRANSITIONS", "HELD"),
    ("A request on one rank", "meta-executor", "meta_executor.executor.ownership", "TRANSITIONS", "WAITING"),
    ("Readiness at every rank but the scheduling one", "pp-agreement", "pp_agreement._state", "MEMBER_TRANSITIONS",
     "IDLE"),
    ("Readiness at the scheduling rank", "pp-agreement", "pp_agreement._state", "SCHEDULER_TRANSITIONS", "IDLE"),
    ("The terminal phase at a rank", "pp-agreement", "pp_agreement._state", "TERMINAL_TRANSITIONS", "OPEN"),
    ("The coordinator's decisions", "pp-agreement", "pp_agreement._state", "PHASE_TRANSITIONS", "GATHERING"),
)  # fmt: skip


#: Figures that the root's README shows: words, file below docs/benchmarks, its figure, how it is said, what makes it.
FIGURES = (
    ("a submit of 8,192 tokens to a worker of the same process, beside pickling it over a socket (processor time)",
     "h200/2026-12-01-bench/rpc-local-registry.1.json", "submit_8192_local_cpu", "{ratio:.4f} of it",
     "nox -s bench -- rpc-local-registry"),
    ("a request that is sent alone, beside one in a batch of 32 (processor time)",
     "h200/2026-12-01-bench/rpc-batch-submit.1.json", "cpu_alone_over_batch_32", "{ratio:.1f} times as much",
     "nox -s bench -- rpc-batch-submit"),
    ("a broadcast of 64 lists of 8,192 tokens, beside mpi4py's `bcast`",
     "h200/2026-12-01-bench/comm-broadcast.1.json", "64 x 8192 list, default, total", "{ratio:.2f} of it",
     "nox -s bench -- comm-broadcast"),
    ("a broadcast of nothing over 4 ranks, beside `bcast` and `allgather` of a status",
     "h200/2026-12-01-bench/comm-broadcast.1.json", "nothing, 4 ranks, level", "{ratio:.1f} times as long",
     "nox -s bench -- comm-broadcast"),
    ("4 ranks' agreement, calls of one iteration, beside a bare exchange of as many frames (processor time)",
     "h200/2026-12-01-bench/pp-agreement.1.json", "hot: thread CPU in calls per iteration, sum of 4 ranks, p50",
     "{ratio:.1f} times as much", "nox -s bench -- pp-agreement"),
    ("a bounce over shared memory, beside its gather, write and scatter alone",
     "two-cores/2026-12-01-kv/bounce.4.json", "bounce, shared memory", "{ratio:.2f} times as long",
     "nox -s bench -- kv-bounce-planner"),
    ("the service's tokens per second, beside those of an earlier commit at the same load",
     "h200/2026-12-01-bench/meta-executor-service.json", "tokens per second", "{ratio:.1f} times as many",
     "python packages/meta-executor/benchmarks/bench_service.py --against 7c5a122"),
)  # fmt: skip
_VERDICTS = {True: "met", False: "**missed**", "undecided": "undecided", None: ""}


class Undescribed(Exception):
    """Something that a reader can meet has no description in the code; the message names it."""


# -- words --------------------------------------------------------------------------------------------------------------


def sentence(text: str) -> str:
    """A docstring's or comment's words as a table cell: one line, code in single backticks, bars escaped."""
    text = re.sub(r":(?:class|func|meth|data|mod|exc|attr):`~?([^`]+)`", r"`\1`", " ".join(text.split()))
    return text.replace("``", "`").replace("|", "\\|")


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def page(title: str, *parts: str) -> str:
    """A whole page."""
    return "\n\n".join([f"# {title}", MADE.strip(), *(part.strip() for part in parts)]) + "\n"


def shown_type(annotation: Any) -> str:
    """A field's type with its range, as a reader of a configuration needs it."""
    import msgspec

    origin = get_origin(annotation)
    if origin is typing.Annotated:
        base, *metas = get_args(annotation)
        bounds = []
        for meta in metas:
            if isinstance(meta, msgspec.Meta):
                pairs = ((">", meta.gt), ("≥", meta.ge), ("<", meta.lt), ("≤", meta.le))
                bounds += [f"{sign} {value}" for sign, value in pairs if value not in (None, 2**31 - 1)]
        return " ".join([shown_type(base), ", ".join(bounds)]).strip()
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in get_args(annotation))
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(shown_type(part) for part in get_args(annotation)))
    if origin in (tuple, list):
        return f"list of {shown_type(get_args(annotation)[0])}"
    names = {int: "integer", float: "number", str: "text", bool: "`true` or `false`", type(None): "`null`"}
    return names.get(annotation, getattr(annotation, "__name__", str(annotation)))


def shown_value(value: Any) -> str:
    """A default, as YAML would have it."""
    if value is None or isinstance(value, bool):
        return {None: "`null`", True: "`true`", False: "`false`"}[value]
    if isinstance(value, tuple) and not value:
        return "none"
    return f"`{value}`"


# -- configuration ------------------------------------------------------------------------------------------------------


def comments_of(module: Any, owner: str) -> dict[str, str]:
    """Field → the ``#:`` comment above it."""
    lines = inspect.getsource(module).splitlines()
    (node,) = [n for n in ast.parse("\n".join(lines)).body if isinstance(n, ast.ClassDef) and n.name == owner]
    found: dict[str, str] = {}
    for field in node.body:
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        words: list[str] = []
        number = field.lineno - 2
        while lines[number].strip().startswith("#:"):
            words.insert(0, lines[number].strip()[2:].strip())
            number -= 1
        found[field.target.id] = " ".join(words)
    return found


def sections() -> dict[type, list[str]]:
    """Each section of the configuration with the places where it stands, in the order of the file."""
    import msgspec

    from meta_executor.config import ServiceConfig

    found: dict[type, list[str]] = {}

    def walk(section: type, at: str) -> None:
        found.setdefault(section, []).append(at)
        for field in msgspec.structs.fields(section):
            if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
                walk(field.type, f"{at}.{field.encode_name}".strip("."))

    walk(ServiceConfig, "")
    return found


def configuration() -> str:
    """The file that ``up``, ``serve`` and ``front`` read."""
    import msgspec

    from meta_executor import config

    parts = [
        "What may stand in the YAML file of `meta-executor up`, `serve`, `front` and `bench`: every key, what it "
        "takes, what it is "
        "when it is not there, and what it does. An unknown key, a value of another type or beyond its range is an "
        "error that "
        "names the key, and nothing is started. `model`, and every setting that both roles share, may also stand at "
        "the top.",
    ]
    for section, places in sections().items():
        words = inspect.getdoc(section) or ""
        name = ", ".join(f"`{place}`" if place else "At the top" for place in places)
        told = comments_of(config, section.__name__)
        rows = []
        for field in msgspec.structs.fields(section):
            key = field.encode_name
            if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
                inner = field.default
                changed = [
                    f"`{f.encode_name}: {getattr(inner, f.name)}`" for f in msgspec.structs.fields(field.type)
                    if getattr(inner, f.name) != f.default and not isinstance(getattr(inner, f.name), msgspec.Struct)
                ]  # fmt: skip
                effect = f"a section: {sentence((inspect.getdoc(field.type) or '').splitlines()[0])}"
                rows.append((f"`{key}`", "section", ", ".join(changed) or "its own defaults", effect))
                continue
            if not told[key]:
                raise Undescribed(f"{section.__name__}.{key} has no comment (#:) that says what it does")
            default = "required" if field.default is msgspec.NODEFAULT else shown_value(field.default)
            rows.append(
                (f"`{key}`", shown_type(field.type), default, re.sub(r"\bNone:", "`null`:", sentence(told[key])))
            )
        parts += [f"## {name}", sentence(words), table(("key", "takes", "default", "effect"), rows)]
    return page("Configuration of a service", *parts)


def described_fields(owner: type) -> dict[str, str]:
    """Field → its words in the class's docstring (``Attributes:`` or ``Args:``); ``a, b: …`` tells about both."""
    text = inspect.getdoc(owner) or ""
    block = re.search(r"^(?:Attributes|Args):\n(?P<body>(?:    .*\n?|\n)+)", text, re.MULTILINE)
    found: dict[str, str] = {}
    names: list[str] = []
    for line in (block["body"] if block else "").splitlines():
        begin = re.fullmatch(r"    (?P<names>\w[\w, ]*): (?P<words>.*)", line)
        if begin:
            names = [name.strip() for name in begin["names"].split(",")]
            found.update(dict.fromkeys(names, begin["words"]))
        elif line.strip():
            found.update({name: f"{found[name]} {line.strip()}" for name in names})
    return found


def load(dotted: str) -> Any:
    """What a dotted name stands for."""
    module, _, name = dotted.rpartition(".")
    return getattr(importlib.import_module(module), name)


def settings() -> str:
    """The configuration classes of the packages."""
    parts = [
        "Each package's settings are one frozen class, checked once. A value that cannot be used is an error that "
        "names the field."
    ]
    for package, classes in SETTINGS.items():
        parts.append(f"## {package}")
        for dotted in classes:
            owner = load(dotted)
            told = described_fields(owner)
            rows = []
            for field in dataclasses.fields(owner):
                if field.name not in told:
                    raise Undescribed(f"{dotted}.{field.name} is not in the docstring of its class")
                default = "required" if field.default is dataclasses.MISSING else f"`{field.default!r}`"
                kind = field.type if isinstance(field.type, str) else getattr(field.type, "__name__", str(field.type))
                rows.append((f"`{field.name}`", f"`{kind}`".replace("|", "\\|"), default, sentence(told[field.name])))
            first = sentence((inspect.getdoc(owner) or "").split("\n\n")[0])
            parts += [f"### `{owner.__name__}`", first, table(("field", "type", "default", "effect"), rows)]
    return page("Settings of the packages", *parts)


# -- environment --------------------------------------------------------------------------------------------------------


def variables_in_code() -> set[str]:
    """Every constant of the code that is the name of an environment variable."""
    files = [
        *ROOT.glob("packages/*/src/**/*.py"),
        *ROOT.glob("tools/*.py"),
        *ROOT.glob("tools/stages/*.py"),
        ROOT / "noxfile.py",
    ]
    found: set[str] = set()
    for path in files:
        if path == Path(__file__).resolve():
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and _VARIABLE.fullmatch(node.value):
                found.add(node.value)
    return found


def environment() -> str:
    """Variables that count."""
    found = variables_in_code()
    for name in sorted(found - set(VARIABLES)):
        raise Undescribed(f"the environment variable {name} has no line in VARIABLES (tools/reference.py)")
    for name in sorted(set(VARIABLES) - found):
        raise Undescribed(f"VARIABLES (tools/reference.py) tells about {name}, which no code names any more")
    rows = [(f"`{name}`", who, sentence(words)) for name, (who, words) in VARIABLES.items()]
    return page(
        "Environment variables",
        "A variable that stands for a setting is read once, where the configuration is, and never by deeper code; a "
        "value that cannot be used "
        "is an error that names the variable. Besides these, `PATH` says where programs are.",
        table(("variable", "who looks at it", "meaning"), rows),
    )


# -- metrics ------------------------------------------------------------------------------------------------------------


def families(registry: Any) -> Iterator[tuple[str, ...]]:
    """Rows for what a registry exposes."""
    for family in registry.collect():
        if not family.documentation:
            raise Undescribed(f"the metric {family.name} has no description")
        name = f"{family.name}_total" if family.type == "counter" else family.name
        yield f"`{name}`", family.type, sentence(family.documentation)


def metrics() -> str:
    """What ``/metrics`` of the front and of an instance give."""
    import msgspec

    from meta_executor import wire
    from meta_executor.config import HttpConfig
    from meta_executor.front.metrics import FrontMetrics
    from meta_executor.listener.bounds import Ledger

    def numbers(owner: type, prefix: str) -> list[tuple[str, ...]]:
        told = comments_of(wire, owner.__name__)
        kept = [f.name for f in msgspec.structs.fields(owner) if f.type in (int, float) and f.name != "rank"]
        for name in kept:
            if not told[name]:
                raise Undescribed(f"{owner.__name__}.{name} has no comment (#:) that says what it counts")
        return [(f"`{prefix}{name}`", "gauge", sentence(told[name])) for name in kept]

    head = ("name", "kind", "meaning")
    return page(
        "Metrics",
        "In Prometheus' text format. Who may read them: [security](../security.md#clients). What reports say beside "
        "them: "
        "[reports](../../packages/meta-executor/docs/reports.md).",
        "## The front, `/metrics`",
        "`ctx_…` and `gen_…` are legs to context and generation instances, `trtllm_…` whole requests under the names "
        "that dashboards of "
        "the field look for, `http_…` the listener.",
        table(head, list(families(FrontMetrics(Ledger(HttpConfig())).registry))),
        "## An instance, `/metrics`",
        "Each is the value of the moment; the counters among them only grow, except those named `…_now`.",
        table(head, numbers(wire.InstanceStatistics, "meta_executor_")),
        "### Of each rank, with the label `rank`",
        table(head, numbers(wire.RankStatistics, "meta_executor_rank_")),
    )


# -- errors -------------------------------------------------------------------------------------------------------------


def errors() -> str:
    """The error trees, as the classes stand below one another."""
    parts = [
        "Every exception that a package raises, by its tree. Which call raises which, and whether the object is "
        "usable afterwards, is the "
        "table *Errors* in each package's README. Those of the service's HTTP side: [what you see "
        "when](../../packages/meta-executor/docs/mistakes.md)."
    ]
    for package in sorted(SETTINGS):
        name = package.replace("-", "_")
        module = importlib.import_module(f"{name}._errors")
        found = {
            value for value in vars(module).values()
            if isinstance(value, type) and issubclass(value, BaseException) and value.__module__.startswith(name)
        }  # fmt: skip
        rows = []
        for owner in sorted(found, key=lambda one: [c.__name__ for c in reversed(one.__mro__)]):
            depth = sum(1 for base in owner.__mro__[1:] if base in found)
            others = [
                base.__name__ for base in owner.__mro__[1:] if base not in found and base.__module__ == "builtins"
            ]
            also = ", ".join(f"`{name}`" for name in others if name not in ("Exception", "BaseException", "object"))
            words = (owner.__dict__.get("__doc__") or "").strip().split("\n\n")[0]
            if not words:
                raise Undescribed(f"{package}: the error {owner.__name__} has no docstring")
            rows.append(("&nbsp;&nbsp;" * depth + f"`{owner.__name__}`", also, sentence(words)))
        parts += [
            f"## {package}",
            f"Calls and what is still usable: [README](../../packages/{package}/README.md#errors).",
            table(("error", "is also a", "when"), rows),
        ]
    return page("Errors", *parts)


# -- states -------------------------------------------------------------------------------------------------------------


def edges_of(states: Mapping[Any, Any]) -> list[tuple[str, str, str]]:
    """(from, event, to) of a table in any of the forms that the packages use."""

    def name(value: Any) -> str:
        return value.name if isinstance(value, Enum) else str(value)

    def words(value: Any) -> str:
        return value.value if isinstance(value, Enum) and isinstance(value.value, str) else name(value)

    found = []
    for key, value in states.items():
        if isinstance(key, tuple):
            target = getattr(value, "target", value)
            roles, styles = getattr(value, "roles", ()), getattr(value, "styles", ())
            only = [word for some in (roles, styles) if len(some) == 1 for word in some]
            found.append((name(key[0]), words(key[1]) + (f" ({', '.join(only)})" if only else ""), name(target)))
        else:
            found += [(name(key), words(event), name(target)) for event, target in value.items()]
    return found


def figure(states: Mapping[Any, Any], first: str) -> str:
    """A state diagram; events that lead from one state to the same other share an arrow."""
    arrows: dict[tuple[str, str], list[str]] = {}
    for state, event, target in edges_of(states):
        arrows.setdefault((state, target), []).append(event.replace("_", " ").lower())
    ends = {target for _, target in arrows} - {state for state, _ in arrows}
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {first}"]
    lines += [f"    {state} --> {target}: {', '.join(events)}" for (state, target), events in arrows.items()]
    lines += [f"    {state} --> [*]" for state in sorted(ends)]
    return "\n".join([*lines, "```"])


def state_page() -> str:
    """All state machines."""
    parts = [
        "Drawn from the tables that the code looks its transitions up in: what is not drawn is refused, with the "
        "story of the object. Why they are "
        "as they are is in each package's design page."
    ]
    package = ""
    for title, owner, module, name, first in sorted(MACHINES, key=lambda machine: machine[1]):
        if owner != package:
            package = owner
            parts.append(f"## {owner}")
            parts.append(f"[Design](../../packages/{owner}/docs/design.md)")
        parts += [f"### {title}", f"`{module}.{name}`", figure(getattr(importlib.import_module(module), name), first)]
    return page("State machines", *parts)


# -- commands -----------------------------------------------------------------------------------------------------------


def commands() -> str:
    """The help of the service's program."""
    import click

    from meta_executor.cli import cli

    def told(command: click.Command, name: str, parent: click.Context | None) -> Iterator[str]:
        with click.Context(
            command, info_name=name, parent=parent, max_content_width=110, terminal_width=110
        ) as context:
            path = context.command_path
            yield f"## `{path}`\n\n```text\n{command.get_help(context).rstrip()}\n```"
            if isinstance(command, click.Group):
                for inner in command.list_commands(context):
                    found = command.get_command(context, inner)
                    if found is not None:
                        yield from told(found, inner, context)

    return page("Commands", "What `--help` prints.", *told(cli, "meta-executor", None))


# -- compatibility ------------------------------------------------------------------------------------------------------


def plain(name: str) -> str:
    """A distribution's name as an index compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def compatibility() -> str:
    """What goes with what, from the packages' own metadata."""
    pins = re.findall(r"^([\w.-]+)==([^\s;#]+)", (ROOT / "constraints.txt").read_text("utf-8"), re.MULTILINE)
    pinned = {plain(name): version for name, version in pins}
    rows, outside = [], {}
    for folder in sorted((ROOT / "packages").iterdir()):
        if not (folder / "pyproject.toml").is_file():
            continue
        project = tomllib.loads((folder / "pyproject.toml").read_text("utf-8"))["project"]
        about = (folder / "src" / folder.name.replace("-", "_") / "__about__.py").read_text("utf-8")
        version = re.search(r"__version__ = \"([^\"]+)\"", about)
        if version is None:
            raise Undescribed(f"{folder.name} has no version")
        extras = project.get("optional-dependencies", {})
        needs = ", ".join(f"`{need}`" for need in project["dependencies"]) or "nothing"
        also = "; ".join(f"`{extra}`: " + ", ".join(f"`{n}`" for n in found) for extra, found in extras.items())
        rows.append((f"[{folder.name}](../../packages/{folder.name}/README.md)", version[1], f"`{project['requires-python']}`",
                     needs, also or "none"))  # fmt: skip
        for need in [*project["dependencies"], *(n for found in extras.values() for n in found)]:
            name = re.match(r"[\w.-]+", need)
            if name and not (ROOT / "packages" / name[0]).is_dir():
                outside.setdefault(plain(name[0]), set()).add(need)
    tried = [
        (f"`{name}`", ", ".join(f"`{need}`" for need in sorted(needs)), f"`{pinned[name]}`" if name in pinned else "not pinned")
        for name, needs in sorted(outside.items())
    ]  # fmt: skip
    return page(
        "Compatibility",
        "Which versions go together. Each of the seven packages installs alone; only meta-executor needs siblings, "
        "and its own metadata say "
        "which versions. That the oldest and the newest of these work is tried by "
        "`nox -s siblings` ([releasing](../releasing.md)).",
        "## Packages",
        table(("package", "version", "Python", "needs", "extras"), rows),
        "## Libraries of others",
        "*Tried* is what `constraints.txt` pins: every test runs with that version.",
        table(("library", "asked for", "tried"), tried),
        "MPI: MPICH 5 (`pip install mpich`) and Open MPI 5 are tried; any launcher that starts ranks as separate "
        "processes and any "
        "library that mpi4py is built for should do. Linux only.",
    )


# -- figures ------------------------------------------------------------------------------------------------------------


def recorded(file: Path) -> dict[str, Any]:
    """Name → figure of a file of JSON lines, as ``tools/bench.py --json`` writes it."""
    lines = [json.loads(line) for line in file.read_text("utf-8").splitlines() if line.startswith("{")]
    return {line["name"]: line for line in lines if "name" in line}


def figures() -> str:
    """The table of the root's README, from the runs that are kept."""
    rows = []
    for words, file, name, form, command in FIGURES:
        figure = recorded(ROOT / "docs" / "benchmarks" / file).get(name)
        if figure is None:
            raise Undescribed(f"docs/benchmarks/{file} has no figure {name!r}")
        said = form.format(ratio=figure["ratio"], value=figure["value"])
        goal = f"{figure['goal']}: {_VERDICTS[figure['met']]}" if figure["goal"] else ""
        machine = file.split("/")[0]
        rows.append((words, said, goal, f"[{machine}](docs/benchmarks/{machine}/README.md)", f"`{command}`"))
    return table(("what", "figure", "goal", "run", "made by"), rows)


def readme() -> str:
    """The root's README with that table between its marks."""
    text = (ROOT / "README.md").read_text("utf-8")
    begin, end = "<!-- figures: begin, made by tools/reference.py -->\n", "<!-- figures: end -->"
    before, _, rest = text.partition(begin)
    _, marked, after = rest.partition(end)
    if not marked:
        raise Undescribed("README.md has no marks for its figures")
    return f"{before}{begin}\n{figures()}\n\n{end}{after}"


# -- main ---------------------------------------------------------------------------------------------------------------

MADE_PAGES = {
    "configuration.md": configuration,
    "settings.md": settings,
    "environment.md": environment,
    "metrics.md": metrics,
    "errors.md": errors,
    "states.md": state_page,
    "commands.md": commands,
    "compatibility.md": compatibility,
    "../../README.md": readme,
}


def main() -> int:
    """Exit 0 when every page equals the code, or was written."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the pages instead of comparing them")
    options = parser.parse_args()
    differ = 0
    for name, make in MADE_PAGES.items():
        file = PAGES / name
        try:
            text = make()
        except Undescribed as error:
            print(f"{file.resolve().relative_to(ROOT)}: {error}", file=sys.stderr)
            return 1
        if options.write:
            file.write_text(text, "utf-8")
        elif not file.is_file() or file.read_text("utf-8") != text:
            print(
                f"{file.resolve().relative_to(ROOT)}: differs from the code; `python tools/reference.py --write` makes it again"
            )
            differ += 1
    if not options.write and not differ:
        print(f"{len(MADE_PAGES)} made pages equal the code")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
