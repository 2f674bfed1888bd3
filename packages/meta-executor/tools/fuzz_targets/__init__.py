"""The targets of ``fuzz.py``: each is a context manager that gives seeds, what draws an input of them, and what reads it."""

from __future__ import annotations

from fuzz_targets import control, front, listener, models
from fuzz_targets.drawing import Maker, Refused

TARGETS: dict[str, Maker] = {
    one.__name__: one
    for one in (
        front.chat,
        front.completions,
        front.tokenizing,
        front.paths,
        listener.instance,
        listener.wire_bytes,
        listener.key_file,
        control.launcher,
        control.etcd_records,
        control.etcd_watch,
        models.gguf,
        models.safetensors,
        models.folder_files,
        models.templates,
    )
}

__all__ = ["TARGETS", "Refused"]
