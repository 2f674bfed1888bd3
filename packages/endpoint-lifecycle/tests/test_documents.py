"""The documents say what the code does: the example runs, the figure is the table's, the error table is complete."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import endpoint_lifecycle
from endpoint_lifecycle import EndpointError
from endpoint_lifecycle._state import TRANSITIONS, render_mermaid

PACKAGE = Path(__file__).resolve().parents[1]


def test_readme_example_runs_as_it_stands(tmp_path: Path) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", (PACKAGE / "README.md").read_text(), re.DOTALL)
    done = subprocess.run([sys.executable, "-W", "error", "-c", block], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "admitted by" in done.stdout
    assert done.stdout.endswith("at rest: Load(count=0, weight=0)\n")


def test_dispatch_example_serves_everybody(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(PACKAGE / "examples" / "dispatch.py")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.stdout == "(200, 'served by http://10.0.0.2:8000')\n" * 4, done.stderr


def test_state_figure_is_drawn_from_the_table() -> None:
    (figure,) = re.findall(r"```mermaid\n(.*?)\n```", (PACKAGE / "docs" / "design.md").read_text(), re.DOTALL)
    assert figure == render_mermaid()
    assert figure.count("-->") == len(TRANSITIONS) + 3


def test_error_table_names_every_error_that_callers_meet() -> None:
    table = (PACKAGE / "README.md").read_text().partition("## Errors")[2]
    bases = {"EndpointError", "LocalProtocolError", "RemoteProtocolError", "Unavailable"}
    for name in endpoint_lifecycle.__all__:
        kind = getattr(endpoint_lifecycle, name)
        if isinstance(kind, type) and issubclass(kind, EndpointError) and name not in bases:
            assert f"`{name}`" in table, f"{name} is missing from the error table"


def test_layout_comment_names_every_module() -> None:
    layout = endpoint_lifecycle.__doc__ or ""
    for module in (PACKAGE / "src" / "endpoint_lifecycle").glob("*.py"):
        if module.name not in ("__init__.py", "__about__.py"):
            assert f"{module.name} " in layout, f"{module.name} is not in the layout comment"


def test_package_imports_and_works_with_its_extras_blocked(tmp_path: Path) -> None:
    """etcd3gw and requests raise on import; everything but the etcd store is there, and says what is missing."""
    program = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("etcd3gw", "requests", "numpy", "torch", "mpi4py", "zmq", "starlette"):
            raise ImportError(f"{name} is blocked")
sys.meta_path.insert(0, Block())
import endpoint_lifecycle, endpoint_lifecycle.testing
for name in endpoint_lifecycle.__all__:
    getattr(endpoint_lifecycle, name)
assert not {"requests", "etcd3gw", "numpy"} & set(sys.modules)
try:
    import endpoint_lifecycle.etcd
except ImportError as error:
    assert "etcd3gw" in str(error) or "requests" in str(error)
else:
    raise SystemExit("etcd imported without its library")
print("fine")
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        capture_output=True,
        text=True,
        env=dict(os.environ),
        cwd=tmp_path,
    )
    assert done.stdout == "fine\n", done.stderr


def test_core_reads_no_clock_environment_or_loop() -> None:
    """The pure modules import none of what would let them wait, read the time or do I/O by themselves."""
    forbidden = re.compile(
        r"^\s*(?:import|from) (asyncio|time|os|socket|logging|threading|random|subprocess)\b", re.MULTILINE
    )
    for name in (
        "_directory",
        "_slots",
        "_views",
        "_record",
        "_state",
        "_discovery",
        "_http",
        "_errors",
        "_lease_table",
    ):
        text = (PACKAGE / "src" / "endpoint_lifecycle" / f"{name}.py").read_text()
        assert not forbidden.search(text), name
