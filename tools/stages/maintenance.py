"""Stages that rest for a known reason: ``maintenance_stages.txt`` beside the table, where there is one.

    Reason: the racks are being moved
    A10-PyTorch-*
    A100X-PyTorch-1

A resting stage is NOT RUN with that reason, also when it is named: nothing is known about it.
"""

from __future__ import annotations

from pathlib import Path

from .errors import ListError, StageError
from .table import Stage, select_by_name


def read_maintenance(path: Path, stages: tuple[Stage, ...]) -> dict[str, str]:
    """Reason by stage name; a missing file rests nothing.

    Raises:
        ListError: A name stands before any reason, a reason is empty, or a name matches no stage.
    """
    resting: dict[str, str] = {}
    reason = ""
    for number, text in enumerate(path.read_text("utf-8").splitlines() if path.exists() else [], 1):
        line = text.split("#", 1)[0].strip()
        if not line:
            continue
        if line.startswith("Reason:"):
            reason = line.removeprefix("Reason:").strip()
            if not reason:
                raise ListError(path, number, "Reason: says none")
            continue
        if not reason:
            raise ListError(path, number, f"{line!r} stands before any Reason:")
        try:
            resting |= {stage.name: reason for stage in select_by_name(stages, line)}
        except StageError as error:
            raise ListError(path, number, str(error)) from error
    return resting
