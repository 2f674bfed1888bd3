"""Time to first token of a disaggregated prompt in vLLM: this connector, vLLM's own over NIXL, and computing it again.

    python bench_vllm.py FOLDER [--rounds N] [--tokens 128 1024 4000] [--threads N]

FOLDER holds the model in vLLM's format. A pair of engines (one thread each by default) per connector and block size of the
decoding side, the prefilling side having 128. Everything is measured in turn in every round, and every answer must be what the
decoding side answers alone, or that is said. The first token is counted from the prompt's arrival at the prefilling side, and
from its arrival at the decoding side: that is a transfer and one step, and shows what a transfer saves.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from driver import Engine, both_at_once, bounce, one_after_the_other, prompts, transfer_id

PREFILL_BLOCK, VOCABULARY, ANSWER = 128, 49_152, 4
#: Each engine of vLLM's own connector listens on a port of its own.
PORT = 15_600


def nixl(role: str) -> dict[str, Any]:
    """vLLM's own connector."""
    return {"kv_connector": "NixlConnector", "kv_role": role, "kv_buffer_device": "cpu"}


def start(stack: ExitStack, model: Path, folder: Path, kind: str, blocks: int, threads: int) -> tuple[Engine, Engine]:
    """A prefilling and a decoding engine. Raises what ended one of them, and then leaves none."""
    with ExitStack() as pair:
        made = []
        for place, (role, block_tokens) in enumerate((("kv_producer", PREFILL_BLOCK), ("kv_consumer", blocks))):
            transfer = bounce(role, folder) if kind == "bounce" else nixl(role)
            port = PORT + 10 * place + blocks
            log = folder / f"{kind}-{blocks}-{role}.log"
            environment = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(port)}
            engine = Engine(
                model, log, block_tokens=block_tokens, threads=threads, transfer=transfer, environment=environment
            )
            made.append(pair.enter_context(engine))
        for engine in made:
            engine.ready()
        stack.push(pair.pop_all())
    return made[0], made[1]


def last_words(folder: Path) -> str:
    """The last error that an engine wrote."""
    newest = max(folder.glob("*.log"), key=lambda path: path.stat().st_mtime)
    found = [line for line in newest.read_text(errors="replace").splitlines() if "Error" in line]
    return f"{newest.name}: {found[-1] if found else 'no error in it'}"


def figure(values: list[float]) -> str:
    """Median, lowest and highest, milliseconds."""
    ms = sorted(1e3 * value for value in values)
    return f"{statistics.median(ms):8.1f} ({ms[0]:.1f}-{ms[-1]:.1f})" if ms else "–"


def ratio(ours: list[float], theirs: list[float]) -> str:
    """Ours over theirs, round by round, or "undecided" where the rounds disagree about who is faster."""
    found = sorted(a / b for a, b in zip(ours, theirs, strict=False))
    if not found:
        return "–"
    text = f"{statistics.median(found):.2f} ({found[0]:.2f}-{found[-1]:.2f})"
    return text if found[-1] < 1 or found[0] > 1 else f"{text} undecided"


def measure(options: argparse.Namespace, folder: Path, blocks: int) -> None:
    """One block size of the decoding side."""
    first: dict[tuple[str, int], list[float]] = defaultdict(list)
    decode: dict[tuple[str, int], list[float]] = defaultdict(list)
    moved: dict[int, list[float]] = defaultdict(list)
    tiers: set[str] = set()
    wrong: list[str] = []
    with ExitStack() as stack:
        pairs = {"bounce": start(stack, options.model, folder, "bounce", blocks, options.threads)}
        try:
            pairs["nixl"] = start(stack, options.model, folder, "nixl", blocks, options.threads)
        except (ConnectionError, TimeoutError) as error:
            print(
                f"blocks {PREFILL_BLOCK} → {blocks}: vLLM's NixlConnector does not start: {error}; {last_words(folder)}"
            )
        prefill, decoding = pairs["bounce"]
        prefill.ask("source", prompts(1, 64, VOCABULARY)[0], 1, {"transfer_id": transfer_id()})
        sources = prefill.wait("source").params["sources"]
        for turn in range(options.rounds + 1):  # the first warms
            for tokens in options.tokens:
                prompt = prompts(1, tokens, VOCABULARY, seed=1000 * turn + tokens)[0]
                name = f"{turn}-{tokens}"
                began_s = time.monotonic()
                decoding.ask(f"again-{name}", prompt, ANSWER)
                expected = decoding.wait(f"again-{name}")
                timed = {"again": (time.monotonic() - began_s, expected.first_s, expected)}
                for kind, pair in list(pairs.items()):
                    try:
                        made = one_after_the_other(*pair, name, prompt, ANSWER, mine=kind == "bounce")
                        timed[kind] = made.first_s, made.decode_first_s, made.answer
                    except (ConnectionError, TimeoutError, RuntimeError) as error:
                        del pairs[kind]
                        said = f"{error}; {last_words(folder)}"
                        print(f"blocks {PREFILL_BLOCK} → {blocks}, {tokens} tokens: {kind} fails: {said}")
                made = both_at_once(prefill, decoding, f"both-{name}", prompt, ANSWER, sources)
                timed["both"] = made.first_s, made.decode_first_s, made.answer
                newest = decoding.state()["timings"][-2:]
                for kind, (first_s, decode_s, answer) in timed.items():
                    if answer.tokens != expected.tokens:
                        wrong.append(f"{kind} {name}")
                    if turn:
                        first[kind, tokens].append(expected.first_s if kind == "again" else first_s)
                        decode[kind, tokens].append(decode_s)
                if turn:
                    moved[tokens].append(newest[0][1])
                    tiers.update(f"{tokens}: {tier}" for tier in newest[0][3])
    print(f"\nblocks {PREFILL_BLOCK} → {blocks}, {options.rounds} rounds, milliseconds: median (lowest-highest)")
    print("| prompt tokens | | first token | at the decoding side | transfer |")
    print("|---|---|---|---|---|")
    for tokens in options.tokens:
        for kind, words in (
            ("bounce", "this connector"), ("both", "this connector, asked at once"), ("nixl", "vLLM's NixlConnector"),
            ("again", "computed again"),
        ):  # fmt: skip
            transfer = figure(moved[tokens]) if kind == "bounce" else ""
            print(
                f"| {tokens} | {words} | {figure(first[kind, tokens])} | {figure(decode[kind, tokens])} | {transfer} |"
            )
        print(
            f"| {tokens} | this / NixlConnector | {ratio(first['bounce', tokens], first['nixl', tokens])} "
            f"| {ratio(decode['bounce', tokens], decode['nixl', tokens])} | |"
        )
        print(f"| {tokens} | this / computed again | | {ratio(decode['bounce', tokens], decode['again', tokens])} | |")
    print(
        f"tiers: {', '.join(sorted(tiers))}; answers that differ from the decoding side's own: {wrong or 'none'}",
        flush=True,
    )


def main() -> None:
    """The table of each block size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, metavar="FOLDER")
    parser.add_argument("--rounds", type=int, default=5, help="of everything (count)")
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 1024, 4000], help="of each prompt (count)")
    parser.add_argument("--blocks", type=int, nargs="+", default=[128, 32], help="of the decoding side, tokens")
    parser.add_argument("--threads", type=int, default=1, help="of each engine (count)")
    options = parser.parse_args()
    for blocks in options.blocks:
        with tempfile.TemporaryDirectory(prefix="vllm-") as folder:
            measure(options, Path(folder), blocks)


if __name__ == "__main__":
    main()
