"""How the cost of a request grows with ranks and with requests, from the service's own code.

    python scaling.py                # both tables; Markdown
    python scaling.py messages       # frames and bytes per request: exact, the same on every machine
    python scaling.py steps          # processor time of a decoding loop by rows, and how many rows fill a core
    python scaling.py limits --costs ../../../docs/benchmarks/scaling/h200-host.json    # what is full when, on paper

*Messages*: two whole instances in one process (``executor/testing.py``), in which ranks, agreement and KV control run as they
do over MPI and sockets, serve so many requests at once; frames are counted where they are sent. Activations and KV bytes are
the model's and are left out. *Steps*: the loop of one attention-DP rank whose engine takes no time. *Limits*: of unit costs
that were measured on one machine, how many requests per second fill a core of each part, and how many parts a load of so many
requests at once wants.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from bench_loop import per_step_s

from meta_executor.executor.testing import Pair, PairConfig
from meta_executor.wire import ScheduleStyle

STYLES: tuple[ScheduleStyle, ...] = ("context_first", "generation_first")
RANKS = (2, 4, 8, 16, 32, 64)
AT_ONCE = (1, 8, 64)
PROMPT, ANSWER, BLOCK = 24, 6, 4
#: Of the model, however many ranks share them (count).
LAYERS = 64
#: Rows of a step, and how long the device takes for one (ms).
ROWS = (256, 1024, 4096, 16_384)
DEVICE_MS = (20.0, 50.0, 100.0)
#: Of a core, what a loop may use before its device waits for it (0-1).
FULL = 0.85


@dataclass(frozen=True)
class Counted:
    """Per request: frames and bytes, of all ranks together and of the rank that has most.

    Attributes:
        agreement: Frames and bytes between context ranks that agree.
        pipeline: Work, schedules and results between context ranks.
        answers: Between generation ranks: work and hand-overs.
        control: KV control between the instances.
        busiest: Frames that the context rank with most of them sends and receives, without KV control.
    """

    agreement: tuple[float, float]
    pipeline: tuple[float, float]
    answers: tuple[float, float]
    control: tuple[float, float]
    busiest: float


def count_messages(ranks: int, requests: int, style: ScheduleStyle, generation_ranks: int = 2) -> Counted:
    """Serve so many requests at once to their end."""
    blocks = requests * (-(-(PROMPT + ANSWER) // BLOCK) + 1)
    config = PairConfig(
        stages=ranks, generation_ranks=generation_ranks, context_blocks=blocks, generation_blocks=blocks, block_tokens=BLOCK,
        max_batch_size=8, max_num_tokens=8 * PROMPT, layer_count=LAYERS, credits=max(64, 2 * requests),
    )  # fmt: skip
    pair = Pair(config)
    between: dict[tuple[int, int], int] = {}

    def seen(source: int, target: int) -> float:
        between[source, target] = between.get((source, target), 0) + 1
        return 0.0

    pair.agreement_network.delay_s = seen
    ids = range(1, requests + 1)
    try:
        for number in ids:
            prompt = [3 + (7 * number + place) % 900 for place in range(PROMPT)]
            if style == "generation_first":
                pair.submit_generation(number, prompt, max_tokens=ANSWER, style=style)
            pair.submit_context(number, prompt, max_tokens=ANSWER, style=style)
        if style == "context_first":
            sent: set[int] = set()

            def all_sent() -> bool:
                for number in ids:
                    if number not in sent and pair.context.answers.get(number):
                        sent.add(number)
                        prompt = [3 + (7 * number + place) % 900 for place in range(PROMPT)]
                        first = pair.context.tokens(number)[0]
                        pair.submit_generation(number, prompt, max_tokens=ANSWER, first_token=first)
                return len(sent) == requests

            pair.run(all_sent, rounds_max=100_000)
        pair.run(lambda: all(pair.generation.finish(number) for number in ids) and pair.idle(), rounds_max=100_000)
        pair.validate()
    finally:
        pair.close()
    for (source, target), (count, _) in pair.context.links.sent.items():
        between[source, target] = between.get((source, target), 0) + count
    of_rank = [sum(n for link, n in between.items() if rank in link) for rank in range(ranks)]
    control = [len(frame) for _, _, frame in pair.network.log]
    network = pair.agreement_network
    return Counted(
        (network.frames / requests, network.frame_bytes / requests),
        _per(pair.context.links.sent.values(), requests),
        _per(pair.generation.links.sent.values(), requests),
        (len(control) / requests, sum(control) / requests),
        max(of_rank) / requests,
    )


def _per(sent: Iterable[tuple[int, int]], requests: int) -> tuple[float, float]:
    counts, sizes = zip(*sent) if (sent := list(sent)) else ((), ())
    return sum(counts) / requests, sum(sizes) / requests


def messages_table(ranks: Sequence[int], at_once: Sequence[int]) -> list[str]:
    """Markdown."""
    lines = [
        "| schedule | context ranks | at once | agreement | pipeline | busiest rank | KV control | generation ranks |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for style in STYLES:
        for size in ranks:
            for requests in at_once:
                one = count_messages(size, requests, style)
                cells = [
                    style.replace("_", "-"),
                    str(size),
                    str(requests),
                    *(f"{frames:.1f} ({size_bytes:,.0f} B)" for frames, size_bytes in (one.agreement, one.pipeline)),
                    f"{one.busiest:.1f}",
                    *(f"{frames:.1f} ({size_bytes:,.0f} B)" for frames, size_bytes in (one.control, one.answers)),
                ]
                lines.append(f"| {' | '.join(cells)} |")
    return lines


def line_through(rows: Sequence[int], spent_s: Sequence[float]) -> tuple[float, float]:
    """(of a step, of a row) in s: the line with the least relative squared error."""
    x, y = np.asarray(rows, float), np.asarray(spent_s, float)
    matrix = np.stack([1 / y, x / y], axis=1)
    (fixed, each), *_ = np.linalg.lstsq(matrix, np.ones(len(y)), rcond=None)
    return float(fixed), float(each)


def rows_that_fill(fixed_s: float, each_s: float, device_ms: float) -> int:
    """Rows at which the loop uses ``FULL`` of the device's time, which then begins to wait for it (count)."""
    return max(int((FULL * device_ms / 1e3 - fixed_s) / each_s), 0)


def steps_table(rows: Sequence[int], rounds: int = 5) -> list[str]:
    """Markdown; every row of it is a median of rounds in turn."""
    spent: dict[int, list[float]] = {count: [] for count in rows}
    for _ in range(rounds):
        for count in rows:
            spent[count].append(per_step_s(count, max(4, 40_000 // count)))
    middle = [statistics.median(spent[count]) for count in rows]
    fixed, each = line_through(rows, middle)
    lines = ["| rows of a step | processor time of the loop, ms | us a row | quartiles, ms |", "|---|---|---|---|"]
    for count, value in zip(rows, middle):
        low, _, high = statistics.quantiles(spent[count], n=4)
        lines.append(
            f"| {count} | {1e3 * value:.3f} | {1e6 * value / count:.3f} | {1e3 * low:.3f} to {1e3 * high:.3f} |"
        )
    lines += [
        "",
        f"A step costs {1e6 * fixed:.0f} us and {1e9 * each:.0f} ns a row, so {FULL:.0%} of a core is full at:",
        "",
    ]
    lines += ["| device time of a step | rows of one rank | tokens per second of one rank |", "|---|---|---|"]
    for device_ms in DEVICE_MS:
        full = rows_that_fill(fixed, each, device_ms)
        lines.append(f"| {device_ms:g} ms | {full:,} | {1e3 * full / device_ms:,.0f} |")
    return lines


class Costs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Processor time of each part, measured on one machine in one run.

    Attributes:
        answer_tokens: Of a request in that run.
        context_rank_us_per_request: One context rank, all its threads.
        generation_rank_us_per_token: One generation rank, all its threads, KV transfers included.
        coordinator_us_per_request: What the agreement costs the rank that coordinates, with ``coordinator_ranks`` ranks.
    """

    machine: str
    source: str
    answer_tokens: int
    front_us_per_token: float
    context_rank_us_per_request: float
    generation_rank_us_per_token: float
    coordinator_us_per_request: float
    coordinator_ranks: int

    def coordinator_us(self, ranks: int) -> float:
        """With so many ranks: its frames grow with the others."""
        return self.coordinator_us_per_request * (ranks - 1) / (self.coordinator_ranks - 1)

    def full_at(self) -> dict[str, float]:
        """Requests per second at which ``FULL`` of one core of each part is used."""
        core_us = FULL * 1e6
        per_request = {
            "front": self.front_us_per_token * self.answer_tokens,
            "context rank": self.context_rank_us_per_request,
            "generation rank": self.generation_rank_us_per_token * self.answer_tokens,
        } | {f"agreement's coordinator of {ranks} ranks": self.coordinator_us(ranks) for ranks in (4, 16, 64)}
        return {name: core_us / us for name, us in per_request.items()}

    def wanted(self, at_once: int, step_ms: float) -> tuple[float, dict[str, int]]:
        """(requests per second, parts that carry them) of so many requests at once, each a token per step."""
        per_second = at_once / (self.answer_tokens * step_ms / 1e3)
        full = self.full_at()
        names = ("front", "context rank", "generation rank")
        return per_second, {name: math.ceil(per_second / full[name]) for name in names}


def limits_table(costs: Costs) -> list[str]:
    """Markdown."""
    lines = [f"Of {costs.machine} ({costs.source}), {costs.answer_tokens} answer tokens:", ""]
    lines += [f"| part | requests per second that fill {FULL:.0%} of a core | tokens per second |", "|---|---|---|"]
    lines += [f"| {name} | {rate:,.0f} | {rate * costs.answer_tokens:,.0f} |" for name, rate in costs.full_at().items()]
    lines += [
        "",
        "| at once | step | requests per second | fronts | context instances | generation ranks |",
        "|---|---|---|---|---|---|",
    ]
    for at_once, step_ms in (
        (400, 20.0),
        (2048, 50.0),
        (2880, 100.0),
        (10_000, 50.0),
        (100_000, 50.0),
        (100_000, 100.0),
    ):
        rate, wanted = costs.wanted(at_once, step_ms)
        cells = [f"{at_once:,}", f"{step_ms:g} ms", f"{rate:,.0f}", *(f"{count:,}" for count in wanted.values())]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> None:
    """Print the tables that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="messages | steps | limits")
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--at-once", type=int, nargs="+", default=AT_ONCE, help="requests (count)")
    parser.add_argument("--costs", type=Path, help="unit costs of a machine (JSON)")
    options = parser.parse_args()
    if unknown := set(options.parts) - {"messages", "steps", "limits"}:
        parser.error(f"{', '.join(sorted(unknown))}: want messages, steps or limits")
    if "limits" in options.parts and options.costs is None:
        parser.error("limits wants --costs")
    if not options.parts or "messages" in options.parts:
        print("\n".join(messages_table(options.ranks, options.at_once)), "\n")
    if not options.parts or "steps" in options.parts:
        print("\n".join(steps_table(ROWS)))
    if options.costs is not None:
        print("\n".join(limits_table(msgspec.json.decode(options.costs.read_bytes(), type=Costs))))


if __name__ == "__main__":
    main()
