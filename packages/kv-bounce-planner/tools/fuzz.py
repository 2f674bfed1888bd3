"""Fuzz plans, reports and codecs: ``python packages/kv-bounce-planner/tools/fuzz.py --count 20000 [--seed 0]``.

Five kinds in turn, each against something dumber than itself:

* pairs     random layout pairs against the per-byte oracle, both derivations, codecs, round trips;
* slices    the same pairs in random slices: each its own bytes, all of them the request's;
* doubts    broken pairs (missing ranks, foreign shapes, bad ids, short tables): a refusal with a fail-open code or a
            layout error, never another exception;
* bytes     mutated messages with a repaired checksum: a codec error, or a value that encodes to the very same bytes;
* reports   mutated fragments: accepted exactly when they partition the plan's bytes.

Exit code 0 when nothing was found, 1 with the seed that reproduces it.
"""

# ruff: noqa: S311, T201 - a fuzzer draws with seeds and prints what it ran

from __future__ import annotations

import argparse
import importlib.util
import random
import struct
import sys
import time
import traceback
import zlib
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np

import kv_bounce_planner as kv


def _load(name: str) -> ModuleType:
    path = Path(__file__).resolve().parents[1] / "tests" / f"{name}.py"
    full = f"kv_bounce_planner_fuzz_{name}"
    if full not in sys.modules:
        spec = importlib.util.spec_from_file_location(full, path)
        if spec is None or spec.loader is None:
            raise SystemExit(f"{path} is missing")
        module = importlib.util.module_from_spec(spec)
        sys.modules[full] = module
        spec.loader.exec_module(module)
    return sys.modules[full]


def check_pair(seed: int) -> str:
    """One random pair against the oracle."""
    plan = _load("test_plan_oracle").check_case(seed)
    return f"{min(len(plan.writers), 3)} writers"


def check_slices(seed: int) -> str:
    """One random pair in random slices against the oracle."""
    found = _load("test_slices").check_sliced(seed)
    return "several" if found["several"] else "one"


def check_doubt(seed: int) -> str:
    """One broken pair: only the fail-open answers."""
    rng = random.Random(seed)
    case = _load("oracles").random_case(seed)
    source, target, blocks, tokens = case.source, case.target, case.target_blocks, case.tokens
    adp = case.source_adp_rank
    kind = rng.choice(["rank", "adp", "shape", "ids", "short", "late", "tables", "tokens", "layers"])
    if kind == "rank":
        ranks = list(source.ranks)
        ranks[rng.randrange(len(ranks))] = None
        source = replace(source, ranks=tuple(ranks))
    elif kind == "adp":
        adp = None
    elif kind == "shape":
        groups = list(target.groups)
        if groups:
            i = rng.randrange(len(groups))
            groups[i] = replace(groups[i], dtype=rng.choice(["e1", "e2", "e3"]))
        target = replace(target, groups=tuple(groups))
    elif kind == "layers":
        groups = [replace(g, layer_ids=tuple(n + 1 for n in g.layer_ids)) for g in target.groups]
        target = replace(target, groups=tuple(groups))
    else:
        tables = dict(blocks.tables)
        if tables:
            key = rng.choice(sorted(tables))
            ids, first = tables[key].block_ids.copy(), tables[key].first_token
            if kind == "ids" and len(ids):
                ids[rng.randrange(len(ids))] = rng.choice([0, 5, 10**6, 2**62, -1])
            elif kind == "short":
                ids = ids[: rng.randrange(len(ids) + 1)]
            elif kind == "late":
                first += rng.choice([1, 2, 8, 2**40])
            elif kind == "tables":
                del tables[key]
            if kind != "tables":
                tables[key] = kv.BlockTable(ids, first)
        blocks = kv.RequestBlocks(tables)
        if kind == "tokens":
            tokens = kv.TokenRange(tokens.start, tokens.end + rng.choice([1, 9, 2**50]))
    found = kv.try_plan_destination(source, target, blocks, tokens, source_adp_rank=adp)
    if isinstance(found, kv.Refusal):
        if found.reason.when != "fail_open":
            raise AssertionError(f"{found} is no fail-open code")
        return f"{kind}: {found.reason.value}"
    found.validate_cover(*kv.request_ranges(target, blocks, tokens))
    return f"{kind}: planned"


def _messages(seed: int) -> list[tuple[bytes, object, object]]:
    case = _load("oracles").random_case(seed)
    plan = kv.plan_destination(
        case.source, case.target, case.target_blocks, case.tokens, source_adp_rank=case.source_adp_rank
    )
    found: list[tuple[bytes, object, object]] = [
        (kv.encode_plan(plan), kv.decode_plan, kv.encode_plan),
        (kv.encode_blocks(case.target_blocks, case.tokens), kv.decode_blocks, lambda pair: kv.encode_blocks(*pair)),
    ]
    for writer in plan.writers.values():
        for explicit in (False, True):
            report = kv.WriterReport.for_transfer(writer, operation_id=bytes(16), bound_base=64, explicit=explicit)
            found.append((kv.encode_report(report), kv.decode_report, kv.encode_report))
    return found


def check_bytes(seed: int) -> str:
    """One mutated message with a repaired checksum."""
    rng = random.Random(seed)
    data, decode, encode = rng.choice(_messages(seed % 997))
    body = bytearray(data[:-4])
    for _ in range(rng.randint(1, 3)):
        kind = rng.randrange(5)
        at = rng.randrange(4, len(body)) if len(body) > 4 else 0
        if kind == 0:
            body[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            body[at] = rng.choice([0, 1, 0x7F, 0x80, 0xFF])
        elif kind == 2:
            del body[at : at + rng.randint(1, 8)]
        elif kind == 3:
            body[at:at] = bytes(rng.randrange(256) for _ in range(rng.randint(1, 8)))
        else:
            body[at : at + 8] = struct.pack("<Q", rng.choice([0, 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1]))
        if not body:
            break
    mutated = bytes(body) + struct.pack("<I", zlib.crc32(bytes(body)))
    if rng.random() < 0.1:
        mutated = bytes(rng.randrange(256) for _ in range(rng.randrange(200)))
    try:
        value = decode(mutated)  # type: ignore[operator]
    except kv.CodecError as error:
        return f"refused: {error.reason.value if error.reason else 'none'}"
    if encode(value) != mutated:  # type: ignore[operator]
        raise AssertionError("two encodings of one value were accepted")
    return "decoded"


def check_report(seed: int) -> str:
    """One mutated list of fragments against a set of bytes."""
    rng = random.Random(seed)
    addresses, sizes, at = [], [], rng.randrange(1 << 40)
    for _ in range(rng.randint(1, 8)):
        sizes.append(rng.randint(1, 12))
        addresses.append(at)
        at += sizes[-1] + rng.randint(1, 6)
    plan = kv.WriterPlan(rng.randrange(4), np.array(addresses), np.array(sizes), 1, 1)
    wanted = sorted(b for a, n in zip(addresses, sizes, strict=True) for b in range(a, a + n))
    pieces: list[list[int]] = []
    for byte in wanted:
        if pieces and sum(pieces[-1]) == byte and rng.random() < 0.7:
            pieces[-1][1] += 1
        else:
            pieces.append([byte, 1])
    rng.shuffle(pieces)
    for _ in range(rng.choice([0, 1, 1, 2, 3])):
        i, j = rng.randrange(len(pieces)), rng.randrange(len(pieces))
        kind = rng.randrange(6)
        if kind == 0:
            pieces[i][0] += rng.choice([-1, 1, 8, 1 << 45])
        elif kind == 1:
            pieces[i][1] += rng.choice([-1, 1, 4, 1 << 61])
        elif kind == 2:
            pieces[i] = list(pieces[j])
        elif kind == 3 and len(pieces) > 1:
            del pieces[i]
        elif kind == 4:
            pieces.append([pieces[i][0], pieces[i][1]])
        else:
            pieces[i][1] -= 1
            pieces[j][1] += 1
    small = all(0 < n < 1 << 20 for _, n in pieces) and sum(n for _, n in pieces) <= len(wanted) + 64
    partition = small and sorted(b for a, n in pieces for b in range(a, a + n)) == wanted
    try:
        kv.check_fragments(plan, np.array([a for a, _ in pieces], np.int64), np.array([n for _, n in pieces], np.int64))
    except kv.ReportRefused as refused:
        if partition:
            raise AssertionError("an honest segmentation was refused") from refused
        if refused.reason.when != "fail_closed":
            raise AssertionError(f"{refused.reason} is no fail-closed code") from refused
        return f"refused: {refused.reason.value}"
    if not partition:
        raise AssertionError("fragments that are not the plan's bytes were accepted")
    return "accepted"


CHECKS = {
    "pairs": check_pair,
    "slices": check_slices,
    "doubts": check_doubt,
    "bytes": check_bytes,
    "reports": check_report,
}


def run(count: int, seed: int, kinds: list[str]) -> int:
    """Run ``count`` of each kind. Returns the exit code."""
    for kind in kinds:
        outcomes: Counter[str] = Counter()
        begin = time.perf_counter()
        for number in range(seed, seed + count):
            try:
                outcomes[CHECKS[kind](number)] += 1
            except Exception as error:  # noqa: BLE001 - whatever it is, it is a finding
                traceback.print_exc()
                print(f"FOUND {kind} --seed {number} --count 1: {type(error).__name__}: {error}")
                return 1
        took = time.perf_counter() - begin
        shown = ", ".join(f"{name} {n}" for name, n in outcomes.most_common(12))
        print(f"{kind}: {count} from seed {seed} in {took:.1f} s, nothing found ({shown})", flush=True)
    return 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--count", type=int, default=20_000, help="of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=sorted(CHECKS), action="append", help="default: all")
    chosen = parser.parse_args(arguments)
    if chosen.count < 1:
        parser.error("--count is at least 1")
    return run(chosen.count, chosen.seed, chosen.kind or list(CHECKS))


if __name__ == "__main__":
    raise SystemExit(main())
