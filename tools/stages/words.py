"""The words of stage names, conditions and prefixes, and what they mean: ``words.yml``, where they are data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from .errors import nearest


@dataclass(frozen=True)
class Words:
    """The file. Each mapping goes from the word of a name to what queries and conditions call it."""

    backends: dict[str, str]
    models: dict[str, str]
    orchestrators: dict[str, str]
    gpus: dict[str, str]
    keys: tuple[str, ...]


WORDS = Words(**yaml.safe_load(Path(__file__).with_name("words.yml").read_text("utf-8")))


def meaning(family: str, words: Mapping[str, str]) -> str | None:
    """What the first of the words that stands between dashes in a stage family's name means; None: none does."""
    return next((value for word, value in words.items() if word in family.split("-")[1:]), None)


def doubtful(family: str) -> Iterator[str]:
    """Words of a name that have no meaning and are nearly one that has: such a stage would match every backend or model."""
    known = {*WORDS.backends, *WORDS.models, *WORDS.orchestrators}
    for word in family.split("-")[1:]:
        near = nearest(word, known, count=1, cutoff=0.75) or nearest(word.lower(), {k.lower() for k in known}, 1, 0.75)
        if word not in known and near:
            yield f"{word!r} of {family} has no meaning{near}"
