"""Make a package from ``tools/template``: ``nox -s new_package -- NAME ["One-line summary"]``.

The result passes every session as it is; replace its example core by yours.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TEMPLATE = ROOT / "tools" / "template"


def make(name: str, summary: str, packages: Path, licence: Path) -> Path:
    """Write the package's files.

    Raises:
        ValueError: The name is not a distribution name, or is taken.
    """
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name):
        raise ValueError(f"{name!r}: want lower-case words joined by hyphens")
    folder = packages / name
    if folder.exists():
        raise ValueError(f"{name!r}: {folder} exists")
    module = name.replace("-", "_")
    for source in sorted(TEMPLATE.rglob("*")):
        if source.is_dir() or "__pycache__" in source.parts:
            continue
        target = folder / str(source.relative_to(TEMPLATE)).replace("MODULE", module)
        target.parent.mkdir(parents=True, exist_ok=True)
        text = source.read_text("utf-8")
        target.write_text(text.replace("MODULE", module).replace("NAME", name).replace("SUMMARY", summary), "utf-8")
    (folder / "src" / module / "py.typed").write_text("")
    shutil.copy2(licence, folder / "LICENSE")
    # Names change the length of lines and the order of imports: have them as the formatter would.
    for command in (["check", "--fix", "-q"], ["format", "-q"]):
        subprocess.run([sys.executable, "-m", "ruff", *command, str(folder)], check=True, cwd=ROOT)
    return folder


def main() -> int:
    """Exit 0 when the package was made, 2 for a bad name."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("summary", nargs="?", default="A new package")
    options = parser.parse_args()
    try:
        folder = make(options.name, options.summary.rstrip("."), ROOT / "packages", ROOT / "LICENSE")
    except ValueError as error:
        print(f"new_package: {error}", file=sys.stderr)
        return 2
    print(f"made {folder.relative_to(ROOT)}; its tests: nox -s 'package-3.11({options.name})'")
    return 0


if __name__ == "__main__":
    sys.exit(main())
