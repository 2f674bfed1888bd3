"""The package imports, plans and copies with every optional library absent."""

from __future__ import annotations

import subprocess
import sys

BLOCKED = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "triton", "nixl", "nixl_cu12", "nixl_cu13", "zmq", "matplotlib", "mpi4py"}:
            raise ImportError(f"blocked: {name}")
        return None

sys.meta_path.insert(0, Block())
import numpy as np
import kv_bounce_planner as kv

from kv_bounce_planner.planning import *

layout = kv.KVLayout.uniform(
    rank=0, first_layer=0, layer_count=1, head_total=1, head_dim=4, element_bytes=2, block_tokens=4, block_count=4,
    key_bases=[4096],
)
plan = kv.plan_transfer(
    layout, layout, tokens=kv.TokenRange(0, 8), target_blocks=kv.RequestBlocks.single([1, 2]),
    source_blocks={0: kv.RequestBlocks.single([0, 3])},
)
assert kv.decode_plan(kv.encode_plan(plan)) == plan
assert kv.draw(plan).startswith(b"<svg")
memory = np.arange(64, dtype=np.uint8)
out = np.zeros(8, np.uint8)
kv.gather(np.array([memory.ctypes.data + 8, memory.ctypes.data]), np.array([4, 4]), out.ctypes.data)
assert out.tolist() == [8, 9, 10, 11, 0, 1, 2, 3]
for name in ("TorchCopier", "TritonCopier"):
    try:
        getattr(kv, name)
    except ImportError:
        pass
    else:
        raise AssertionError(name)
try:
    kv.draw(plan, format="png")
except kv.TransportError:
    pass
else:
    raise AssertionError("png")
assert not {"torch", "triton", "nixl", "zmq", "matplotlib"} & set(sys.modules)
print("imported")
"""


def test_core_works_with_every_optional_library_blocked() -> None:
    """A fresh interpreter in which importing any of them fails."""
    done = subprocess.run([sys.executable, "-c", BLOCKED], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "imported"


def test_import_alone_pulls_in_no_optional_library() -> None:
    """Adapters are imported when asked for, not before, even where they are installed."""
    code = (
        "import sys, kv_bounce_planner; print(sorted({'torch','triton','nixl','zmq','matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_the_faces_hold_what_they_name() -> None:
    """Two faces of bounded size; every name is there; adapters are named where their library is installed."""
    from kv_bounce_planner import planning, sessions

    for face, names_max in ((planning, 75), (sessions, 40)):
        names = dir(face)
        assert len(names) <= names_max, (face.__name__, len(names))
        assert set(face.__all__) <= set(names)
        for name in face.__all__:
            assert getattr(face, name) is not None
    assert {"NixlTransport", "ZmqControlChannel"} <= set(sessions.__all__)
    assert {"TorchCopier", "TritonCopier"} <= set(dir(planning))


def test_the_package_itself_gives_the_names_of_both_faces() -> None:
    """``import kv_bounce_planner as kv`` is enough for a script."""
    import kv_bounce_planner as kv
    from kv_bounce_planner import planning, sessions

    assert kv.KVLayout is planning.KVLayout
    assert kv.Receiver is sessions.Receiver
    assert set(dir(kv)) == {*dir(planning), *dir(sessions), "planning", "sessions", "__version__"}
