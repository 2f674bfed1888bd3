"""Known weaknesses of the versions that ``constraints.txt`` pins, as the advisory database of osv.dev knows them.

    python tools/audit.py                       # exit 1 if a pinned version has one that is not in ``ACCEPTED``

One request names all pins. Where the database cannot be reached nothing is known: that is said by name, as NO COVERAGE, and is
exit 0, because a change cannot mend it; ``--strict`` makes it exit 3. Nothing secret is sent, so a proxy that the environment
names may be used.
"""

from __future__ import annotations

import argparse
import http.client
import json
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DATABASE = "https://api.osv.dev/v1/querybatch"
#: The database must answer within this time (s).
LIMIT_S = 10.0
_ANSWER_BYTES_MAX = 16 << 20
#: Advisory → why it does not concern us. One that no pin has any more must be removed here.
ACCEPTED: dict[str, str] = {}


class Unreachable(Exception):
    """The database did not answer, or not as it should. The message says why."""


def pins(text: str) -> dict[str, str]:
    """Distribution → version, of a constraints file.

    Raises:
        ValueError: A line that is neither a pin nor a comment.
    """
    found = {}
    for number, line in enumerate(text.splitlines(), 1):
        line = line.partition("#")[0].partition(";")[0].strip()
        if not line:
            continue
        name, equals, version = line.partition("==")
        if not equals or not name.strip() or not version.strip():
            raise ValueError(f"line {number}: {line!r} pins no version")
        # What follows a plus sign names a build of the same version.
        found[name.strip()] = version.strip().partition("+")[0]
    return found


def ask(body: bytes) -> bytes:
    """Send the question to the database.

    Raises:
        Unreachable: See there.
    """
    request = urllib.request.Request(DATABASE, body, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
            return bytes(answer.read(_ANSWER_BYTES_MAX))
    except urllib.error.HTTPError as error:
        error.close()
        raise Unreachable(f"{DATABASE}: HTTP {error.code}") from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise Unreachable(f"{DATABASE}: {getattr(error, 'reason', error)}") from error


def advisories(pinned: Mapping[str, str], send: Callable[[bytes], bytes] = ask) -> dict[str, list[str]]:
    """Distribution → identifiers of its version's known weaknesses; those without one are left out.

    Raises:
        Unreachable: See there.
    """
    queries = [{"package": {"ecosystem": "PyPI", "name": name}, "version": version} for name, version in pinned.items()]
    try:
        answer: Any = json.loads(send(json.dumps({"queries": queries}).encode()))
        results = [[str(one["id"]) for one in result.get("vulns") or ()] for result in answer["results"]]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Unreachable(f"{DATABASE}: an answer that is none: {type(error).__name__}: {error}") from error
    if len(results) != len(queries):
        raise Unreachable(f"{DATABASE}: {len(results)} answers to {len(queries)} questions")
    return {name: sorted(ids) for name, ids in zip(pinned, results, strict=True) if ids}


def judged(
    pinned: Mapping[str, str], found: Mapping[str, Sequence[str]], accepted: Mapping[str, str]
) -> tuple[list[str], list[str]]:
    """What is wrong, and what is accepted, each a line."""
    wrong, taken = [], []
    for name, ids in found.items():
        for one in ids:
            line = f"{name}=={pinned[name]}: {one}"
            if one in accepted:
                taken.append(f"{line}, accepted: {accepted[one]}")
            else:
                wrong.append(f"{line}: https://osv.dev/vulnerability/{one}")
    known = {one for ids in found.values() for one in ids}
    wrong += [f"ACCEPTED has {one}, which no pin has: remove it" for one in accepted if one not in known]
    return wrong, taken


def main(arguments: Sequence[str] | None = None) -> int:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strict", action="store_true", help="exit 3 where the database cannot be reached")
    options = parser.parse_args(arguments)
    pinned = pins((ROOT / "constraints.txt").read_text("utf-8"))
    try:
        found = advisories(pinned)
    except Unreachable as error:
        print(f"dependency audit: NO COVERAGE: {error}")
        return 3 if options.strict else 0
    wrong, taken = judged(pinned, found, ACCEPTED)
    for line in (*taken, *wrong):
        print(line)
    print(f"dependency audit: {len(pinned)} pins, {len(taken)} accepted, {len(wrong)} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
