"""mypy over the sources of the packages that the given files belong to (all packages without files)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def packages_of(files: list[str]) -> list[str]:
    """Names of the packages whose sources are among the files."""
    if not files:
        return sorted(p.name for p in (ROOT / "packages").iterdir() if (p / "src").is_dir())
    parts = [Path(f).parts for f in files]
    return sorted({p[1] for p in parts if len(p) > 3 and p[0] == "packages" and p[2] == "src"})


def main(files: list[str]) -> int:
    """Exit code: the worst of mypy's."""
    worst = 0
    for name in packages_of(files):
        print(f"mypy {name}", flush=True)
        worst = max(worst, subprocess.run([sys.executable, "-m", "mypy", f"packages/{name}/src"], cwd=ROOT).returncode)
    return worst


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
