"""pytest plugin for the checker: one collection, and which tests each of several ``-m``/``-k`` pairs would leave of it.

``STAGE_EXPRESSIONS`` holds the pairs (JSON, null for none); ``STAGE_COLLECTED`` names the file for the answer: ``ids``,
``selected`` (places in ``ids`` by pair), ``gpus`` (how many GPUs each test needs) and ``slow`` (places in ``ids``).
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest


def _gpus(item: Any) -> int:
    counts = [int(mark.kwargs.get("count", 1)) for mark in item.iter_markers("gpus")]
    return max(counts, default=1 if item.get_closest_marker("gpu") else 0)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Ask pytest's own selection once per pair."""
    pairs = json.loads(os.environ["STAGE_EXPRESSIONS"])
    places = {item.nodeid: place for place, item in enumerate(items)}
    selection = config.pluginmanager.get_plugin("mark")
    own = config.option.markexpr, config.option.keyword
    selected = []
    for mark, keyword in pairs:
        config.option.markexpr, config.option.keyword = mark or "", keyword or ""
        left = list(items)
        selection.pytest_collection_modifyitems(items=left, config=config)
        selected.append([places[item.nodeid] for item in left])
    config.option.markexpr, config.option.keyword = own
    answer = {
        "ids": list(places),
        "selected": selected,
        "gpus": [_gpus(item) for item in items],
        "slow": [place for place, item in enumerate(items) if item.get_closest_marker("slow")],
    }
    Path(os.environ["STAGE_COLLECTED"]).write_text(json.dumps(answer), "utf-8")
