"""bootstrap.py and nox hand on what the tool below them says: its exit code, its bundle, Ctrl-C."""

import hashlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parent.parent
ROOT = TOOLS.parent
#: A tool that ends with exit 3 after Ctrl-C, having said what it knows.
TOOL = "#!/bin/sh\ntrap 'echo bundle; exit 3' INT\necho begun\nwhile :; do sleep 0.1; done\n"


def pretending(version, code=""):
    """bootstrap.py run by a Python that says it is another version."""
    source = (TOOLS / "bootstrap.py").read_text().replace("from __future__ import annotations\n", "")
    names = "major minor micro releaselevel serial"
    head = (
        f"import collections, sys\nsys.version_info = collections.namedtuple('V', {names!r})(*{version}, 'final', 0)\n"
    )
    if code:
        source = source.partition('if __name__ == "__main__"')[0] + code
    return head + source


@pytest.mark.parametrize("version", [(3, 9, 0), (3, 10, 4), (3, 14, 0), (4, 0, 0)])
def test_other_pythons_are_refused_by_name(tmp_path, version):
    """bootstrap.py runs on any Python 3 far enough to say which ones it needs; pip says the same of every package."""
    script = tmp_path / "b.py"
    script.write_text(pretending(version))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert done.returncode == 2
    assert f"Python {'.'.join(map(str, version))} is not supported; needs Python 3.11, 3.12 or 3.13" in done.stderr
    for project in (ROOT, *ROOT.glob("packages/*/"), TOOLS / "template"):
        assert 'requires-python = ">=3.11,<3.14"' in (project / "pyproject.toml").read_text(), project


@pytest.mark.parametrize("gpu", [True, False])
def test_an_interpreter_is_not_chosen_for_its_cpu_torch_where_a_gpu_is(tmp_path, gpu):
    """With a card the running Python stays; without one a 3.11 is taken, whose torch is small."""
    card, other = tmp_path / "nvidia-smi", tmp_path / "python3.11"
    card.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA A10 (UUID: x)'\n" if gpu else "#!/bin/sh\nexit 9\n")
    other.write_text("#!/bin/sh\nexit 0\n")
    for program in (card, other):
        program.chmod(0o755)
    script = tmp_path / "b.py"
    script.write_text(pretending((3, 12, 1), "print(preferred_python())\n"))
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, env={**os.environ, "PATH": path}
    )
    assert done.stdout.strip() == (sys.executable if gpu else str(other)), done.stderr
    assert ("a GPU is here" in done.stderr) is gpu


def interrupted(command, number=signal.SIGINT, **options):
    """Start it, wait until its tool has begun, send the signal to it alone; exit code, and all that it and its tool print."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True, **options
    )
    seen = ""
    while "begun" not in seen:
        line = process.stdout.readline()
        assert line, seen
        seen += line
    process.send_signal(number)
    rest, _ = process.communicate(timeout=60)
    return process.returncode, seen + rest


def test_ctrl_c_through_bootstrap_is_the_tools_exit_code(tmp_path):
    """bootstrap becomes nox: no process in between that could die of it, no traceback."""
    (tmp_path / "tools").mkdir()
    shutil.copy2(TOOLS / "bootstrap.py", tmp_path / "tools")
    (tmp_path / "constraints.txt").write_text("")
    environment = tmp_path / ".cache" / "nox-env"
    (environment / "bin").mkdir(parents=True)
    (environment / "bin" / "python").write_text(TOOL)
    (environment / "bin" / "python").chmod(0o755)
    code = "import pathlib, sys; sys.path.insert(0, sys.argv[1]); import bootstrap; print(bootstrap.preferred_python())"
    python = subprocess.run([sys.executable, "-c", code, str(tmp_path / "tools")], capture_output=True, text=True)
    (environment / "stamp").write_text(hashlib.sha256(python.stdout.strip().encode()).hexdigest())
    code, output = interrupted([sys.executable, str(tmp_path / "tools" / "bootstrap.py"), "-l"])
    assert (code, output[output.index("begun") :]) == (3, "begun\nbundle\n")
    assert "Traceback" not in output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_tool_of_nox_ends_as_after_ctrl_c_whatever_ends_nox(tmp_path, number):
    """nox waits for the tool's own end, and hands its code on; a killed one cannot, but its tool ends all the same."""
    pytest.importorskip("nox", reason="NO COVERAGE: nox is not installed")
    (tmp_path / "python").write_text(TOOL)
    (tmp_path / "python").chmod(0o755)
    script = f"import noxfile, pathlib\nnoxfile.BIN = pathlib.Path({str(tmp_path)!r})\nnoxfile.hand_over(None, 'x')\n"
    code, output = interrupted([sys.executable, "-c", script], number, cwd=ROOT)
    assert (code, output) == (-number if number == signal.SIGKILL else 3, "begun\nbundle\n")
