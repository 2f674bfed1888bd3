"""The main job, shown: eight real prompts through both instances, answered as they come, and what happened where.

Prints progress, the answers, a table and, last, one JSON line. Exit 0 only if every prompt was answered, every rank decided
what was opened, and everything was drained.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
from rich.console import Console
from rich.table import Table

from kv_bounce_planner.planning import COALESCED_PREFIX
from meta_executor.config import ConfigError, apply_environment, load_service_config
from meta_executor.evidence.verify import verify_folder
from meta_executor.preflight import check_service
from meta_executor.supervise.launch import Launcher, RunFailed
from meta_executor.wire import InstanceStatistics

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "packages" / "meta-executor" / "examples" / "smollm2.yaml"
ANSWER_TOKENS = 48

LIGHTHOUSE = (
    "The keeper of the lighthouse wrote a line in the log each evening: the wind, the sea, the ships that passed. "
)
PROMPTS = (
    "What is the capital of France?",
    "Name three primary colours.",
    "Write one sentence about the sea.",
    "What do bees make?",
    "Explain in one sentence why the sky is blue.",
    "Give me a title for a story about a lighthouse.",
    "What is 7 plus 5?",
    # Over 500 tokens: long enough for the planner's tiers to differ.
    "Here is a story. " + LIGHTHOUSE * 24 + "In one sentence: what did the keeper write down?",
)


@dataclass
class Answer:
    """One prompt's way."""

    number: int
    text: str = ""
    finish_reason: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    first_s: float = 0.0
    total_s: float = 0.0
    error: str | None = None
    pieces: list[str] = field(default_factory=list)


def ask(client: openai.OpenAI, model: str, number: int, prompt: str, say: Any) -> Answer:
    """Stream one answer."""
    answer = Answer(number)
    start = time.monotonic()
    try:
        stream = client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": prompt}], max_tokens=ANSWER_TOKENS, temperature=0.0,
            stream=True, stream_options={"include_usage": True},
        )  # fmt: skip
        for chunk in stream:
            if chunk.choices:
                choice = chunk.choices[0]
                if choice.delta.content:
                    if not answer.pieces:
                        answer.first_s = time.monotonic() - start
                    answer.pieces.append(choice.delta.content)
                answer.finish_reason = choice.finish_reason or answer.finish_reason
            if chunk.usage:
                answer.prompt_tokens = chunk.usage.prompt_tokens
                answer.completion_tokens = chunk.usage.completion_tokens
    except openai.OpenAIError as error:
        answer.error = f"{type(error).__name__}: {error}"
    answer.text = "".join(answer.pieces)
    answer.total_s = time.monotonic() - start
    say(answer)
    return answer


def statistics(launcher: Launcher) -> dict[str, InstanceStatistics]:
    """What each instance counted."""
    found = {}
    for owner, url in launcher.urls().items():
        answer = httpx.get(
            url + "/internal/statistics", headers=launcher.key_header, timeout=10.0, trust_env=False
        ).raise_for_status()
        found[owner] = msgspec.json.decode(answer.content, type=InstanceStatistics)
    return found


def coalesced_lines(logs: Path) -> list[str]:
    """What the receivers logged about transfers that went through the bounce region."""
    lines = [
        line for log in sorted(logs.glob("*.log")) for line in log.read_text("utf-8", errors="replace").splitlines()
    ]
    return [line for line in lines if COALESCED_PREFIX in line]


def main() -> int:
    """Exit code 0 or 1, and 2 for a configuration that cannot start."""
    console = Console(highlight=False, soft_wrap=True)
    lock = threading.Lock()

    def say(line: str) -> None:
        with lock:
            console.print(f"[dim]{time.strftime('%H:%M:%S')}[/dim] ", end="")
            console.print(line, markup=False)

    def show(answer: Answer) -> None:
        with lock:
            prompt = PROMPTS[answer.number]
            console.print(f"\n[bold]{answer.number + 1}. {prompt[:70] + ('…' if len(prompt) > 70 else '')}[/bold]")
            console.print(answer.error or answer.text.strip(), markup=False, style="red" if answer.error else None)

    with tempfile.TemporaryDirectory(prefix="mx-evidence-") as folder:
        evidence, logs = Path(folder, "evidence"), Path(folder, "logs")
        evidence.mkdir()
        logs.mkdir()
        try:
            service = apply_environment(load_service_config(CONFIG), {})
            service = msgspec.structs.replace(service, evidence_dir=str(evidence), log_dir=str(logs))
            check_service(service, with_front=True)
            launcher = Launcher(service, say=say)
            with launcher.started():
                client = openai.OpenAI(
                    base_url=launcher.front_url + "/v1", api_key="none", max_retries=0, timeout=300.0
                )
                model = client.models.list().data[0].id
                say(f"asking {len(PROMPTS)} prompts at {launcher.front_url} (model {model})")
                start = time.monotonic()
                with ThreadPoolExecutor(len(PROMPTS)) as pool:
                    answers = list(pool.map(lambda item: ask(client, model, *item, show), enumerate(PROMPTS)))
                took = time.monotonic() - start
                counts = statistics(launcher)
        except ConfigError as error:
            print(f"demo: error: {error}", file=sys.stderr)
            return 2
        except RunFailed as error:
            print(f"demo: error: {error}", file=sys.stderr)
            return 1
        report = verify_folder(evidence)
        bounced = coalesced_lines(logs)

    table = Table(title="What happened where")
    for name in ("prompt", "prompt tokens", "answer tokens", "first token s", "total s", "end"):
        table.add_column(name, justify="right" if name != "end" else "left")
    for a in answers:
        table.add_row(str(a.number + 1), str(a.prompt_tokens), str(a.completion_tokens), f"{a.first_s:.2f}",
                      f"{a.total_s:.2f}", a.finish_reason or a.error or "?")  # fmt: skip
    console.print(table)
    ranks = Table(title="Ranks")
    for name in ("inst.", "rank", "opened", "decided", "routed", "coalesced", "direct", "merged", "MiB"):
        ranks.add_column(name, justify="right" if name != "inst." else "left")
    for owner, instance in sorted(counts.items()):
        for r in instance.ranks:
            context = instance.role == "context"
            routed = instance.routed_per_rank[r.rank] if r.rank < len(instance.routed_per_rank) else None
            ranks.add_row(
                owner, str(r.rank), str(r.agreement_opened) if context else "–", str(r.agreement_decided) if context else "–",
                "–" if context or routed is None else str(routed),
                str(r.transfers_coalesced), str(r.transfers_direct), str(r.transfers_merged),
                f"{(r.bytes_sent + r.bytes_received) / 2**20:.1f}",
            )  # fmt: skip
    console.print(ranks)
    for line in bounced:
        console.print(line, markup=False)
    console.print(report.text(), markup=False)

    # The receiver plans a transfer and chooses its tier, so it is the one that counts it.
    receivers = [r for instance in counts.values() if instance.role == "generation" for r in instance.ranks]
    agreement = {
        f"{owner}.{r.rank}": {"opened": r.agreement_opened, "decided": r.agreement_decided}
        for owner, instance in counts.items()
        if instance.role == "context"
        for r in instance.ranks
    }
    reasons: dict[str, int] = {}
    for r in receivers:
        for key, value in r.tier_reasons.items():
            reasons[key] = reasons.get(key, 0) + value
    result = {
        "requests": len(answers),
        "ok": sum(a.error is None and a.finish_reason in ("stop", "length") for a in answers),
        "tokens": sum(a.completion_tokens for a in answers),
        "seconds": round(took, 2),
        "agreement": agreement,
        "coalesced_transfers": sum(r.transfers_coalesced for r in receivers),
        "direct_transfers": sum(r.transfers_direct + r.transfers_merged for r in receivers),
        "transfer_reasons": reasons,
        "routed": {o: i.routed_per_rank for o, i in counts.items() if i.role == "generation"},
        "local_submits": sum(i.local_submits for i in counts.values()),
        "rpc_submits": sum(i.rpc_submits for i in counts.values()),
        "endpoint_generations": {o: i.generation for o, i in counts.items()},
        "evidence_ok": report.ok,
    }  # fmt: skip
    good = (
        result["ok"] == result["requests"]
        and report.ok
        and bool(agreement)
        and all(a["opened"] == a["decided"] > 0 for a in agreement.values())
        and result["local_submits"] > 0
        and result["rpc_submits"] > 0
    )
    result["result"] = "PASS" if good else "FAIL"
    print(json.dumps(result), flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
