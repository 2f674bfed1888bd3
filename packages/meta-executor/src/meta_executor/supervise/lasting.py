"""What a process has made when it has started, and keeps until it ends."""

from __future__ import annotations

import gc


def set_apart_what_lasts() -> None:
    """Nothing that is there now is looked at by the garbage collector again. For the end of a start.

    A process of ours has some hundred thousand objects by then, modules mostly. Walking them all, as the collector does now and
    then, takes 30 to 40 ms in which no other thread of the process runs: a step of a rank's loop, or every stream of a front,
    waits for so long (measured, two cores).
    """
    gc.collect()
    gc.freeze()
