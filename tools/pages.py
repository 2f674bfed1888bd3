"""The documentation's site: every page of the repository, where it lies, with its links and code blocks checked.

    python tools/pages.py                    # check links, blocks and the navigation; builds nothing, needs nothing
    python tools/pages.py --gather FOLDER    # besides: what mkdocs builds the site from (`nox -s docs`)

Pages keep their places, so a link that works in a checkout works on the site. What is checked: a link leads to a page (and a
heading in it) or a file of this repository; every block of code is of a kind that a test executes, or says why not:

    ```python            a whole program         (integration/tests/test_readmes.py, test_pages.py)
    ```sh                commands, one a line    (integration/tests/test_commands.py)
    ```yaml              a service's settings    (integration/tests/test_pages.py)
    ```sh not run: WHY   printed, and only read
    ```text              what a program printed, or a drawing; mermaid, json and diff likewise
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

import yaml

ROOT = Path(__file__).resolve().parent.parent
NAVIGATION = ROOT / "docs" / "nav.yml"
#: Files of Markdown that are no pages: parts of changelogs, what new packages are made from, results of runs.
NO_PAGES = re.compile(r"(?:.*/)?changes/.*|tools/template/.*|results/.*|\.github/.*|docs/benchmarks/[^/]*/[^/]*/.*")
#: Language → marks that a test executes ("": none).
EXECUTED = {
    "python": {"", "mpi", "mpi2", "mpi4", "groups", "continued"},
    "sh": {""},
    "yaml": {""},
}
#: What nobody could execute.
SHOWN = {"text", "mermaid", "json", "diff"}
_FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>`{3,})(?P<info>[^`\n]*)$")
_LINK = re.compile(r"(?<!\\)\[(?:[^\[\]]|\[[^\[\]]*\])*\]\((?P<target>[^()\s]+(?:\([^()\s]*\))?)\)")
_HEADING = re.compile(r"^#{1,6} +(?P<words>.+?) *#*$", re.MULTILINE)
#: Names in the first column of a table are not broken in the middle; wide tables have room.
_STYLE = """\
.md-grid { max-width: 76rem; }
.md-typeset td:first-child code { word-break: normal; overflow-wrap: normal; }
"""
_CONFIG = """\
site_name: Disaggregated serving
docs_dir: {pages}
site_dir: {site}
use_directory_urls: true
theme:
  name: material
  font: false
  features: [navigation.sections, navigation.top, search.suggest, content.code.copy, toc.follow]
  palette:
    - media: "(prefers-color-scheme: light)"
      scheme: default
      toggle: {{icon: material/weather-night, name: Dark}}
    - media: "(prefers-color-scheme: dark)"
      scheme: slate
      toggle: {{icon: material/weather-sunny, name: Light}}
plugins: [search]
extra_css: [site.css]
validation:
  nav: {{omitted_files: warn, not_found: warn, absolute_links: warn}}
  links: {{not_found: warn, anchors: warn, absolute_links: warn, unrecognized_links: warn}}
markdown_extensions:
  - tables
  - attr_list
  - toc: {{permalink: true}}
  - pymdownx.superfences:
      custom_fences:
        - {{name: mermaid, class: mermaid, format: !!python/name:pymdownx.superfences.fence_code_format }}
"""


@dataclass(frozen=True)
class Block:
    """A block of code.

    Attributes:
        page: From the root.
        line: Where it begins (count from 1).
        language: First word behind the fence.
        mark: The rest of that line.
        text: What is in it.
    """

    page: str
    line: int
    language: str
    mark: str
    text: str


def tracked() -> set[str]:
    """Files under version control or about to be, from the root."""
    out = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    ).stdout.decode()
    return {name for name in out.split("\0") if name and (ROOT / name).is_file()}


def pages(files: set[str]) -> list[str]:
    """Those of them that are pages."""
    return sorted(name for name in files if name.endswith(".md") and not NO_PAGES.fullmatch(name))


def blocks(page: str, text: str) -> Iterator[Block]:
    """Every fenced block of a page."""
    begin: tuple[int, str, str] | None = None
    inside: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        fence = _FENCE.match(line)
        if begin is None and fence:
            begin, inside = (number, fence["ticks"], fence["info"].strip()), []
        elif begin is not None and fence and fence["ticks"] == begin[1] and not fence["info"].strip():
            language, _, mark = begin[2].partition(" ")
            yield Block(page, begin[0], language, mark.strip(), "\n".join(inside) + "\n")
            begin = None
        elif begin is not None:
            inside.append(line)


def block_problem(block: Block) -> str | None:
    """Why nobody would notice that this block is wrong; None: somebody would."""
    if block.language in SHOWN:
        return None
    if re.fullmatch(r"not run: .{8,}", block.mark):
        return None
    if block.mark in EXECUTED.get(block.language, ()):
        return None
    said = f"```{block.language} {block.mark}".strip()
    return f'{said}: no test executes this kind; say why with "not run: WHY", or choose one of tools/pages.py'


def prose(text: str) -> str:
    """A page without its blocks and spans of code."""
    kept, inside = [], ""
    for line in text.splitlines():
        fence = _FENCE.match(line)
        if fence and (not inside or fence["ticks"] == inside):
            inside = "" if inside else fence["ticks"]
            kept.append("")
        else:
            kept.append("" if inside else re.sub(r"(?<!`)`[^`\n]+`(?!`)", "``", line))
    return "\n".join(kept)


def anchors(text: str) -> set[str]:
    """The names of a page's headings, as the site and the forges make them."""
    seen: Counter[str] = Counter()
    found = set()
    without_blocks = re.sub(r"^ *(`{3,})[^`\n]*\n.*?^ *\1 *$", "", text, flags=re.MULTILINE | re.DOTALL)
    for heading in _HEADING.finditer(without_blocks):
        words = re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading["words"])
        slug = re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", words).strip().lower())
        found.add(slug if not seen[slug] else f"{slug}_{seen[slug]}")
        seen[slug] += 1
    return found


def links(page: str, text: str) -> Iterator[tuple[str, str, str]]:
    """(as written, path from the root, heading) of each link into this repository."""
    for link in _LINK.finditer(prose(text)):
        target = link["target"]
        if re.match(r"[a-z][a-z0-9+.-]*:", target):
            continue
        path, _, heading = unquote(target).partition("#")
        resolved = (ROOT / page).parent.joinpath(path).resolve() if path else ROOT / page
        inside = resolved.relative_to(ROOT).as_posix() if resolved.is_relative_to(ROOT) else ""
        yield target, inside, heading


def navigation(known: list[str]) -> tuple[list[object], list[str]]:
    """The site's navigation, and what is wrong with it."""
    listed = yaml.safe_load(NAVIGATION.read_text("utf-8"))
    lines = [line for section in listed for lines in section.values() for line in lines]
    named = {line for line in lines if isinstance(line, str) and not line.endswith("/*")}
    left = [page for page in known if page not in named]
    problems = [f"docs/nav.yml: {name} is no page" for name in sorted(named - set(known))]

    def below(pattern: str) -> list[object]:
        nonlocal left
        folder = pattern.removesuffix("*")
        deep = folder != "docs/"  # what is below its folders has lines of its own
        taken = [page for page in left if page.startswith(folder) and (deep or "/" not in page[len(folder) :])]
        left = [page for page in left if page not in taken]
        return sorted(taken, key=lambda page: (not page.endswith("README.md"), page))

    tree: list[object] = []
    for section in listed:
        for title, items in section.items():
            inner: list[object] = []
            for item in items:
                if isinstance(item, dict):
                    inner += [{name: below(pattern)} for name, pattern in item.items()]
                else:
                    inner += below(item) if item.endswith("/*") else [item]
            tree.append({title: inner})
    return tree, problems + [f"{page}: is in no line of docs/nav.yml" for page in left]


def check(files: set[str]) -> list[str]:
    """Everything that is wrong, a line each."""
    known = pages(files)
    texts = {page: (ROOT / page).read_text("utf-8") for page in known}
    folders = {parent.as_posix() for name in files for parent in Path(name).parents}
    problems = navigation(known)[1]
    for page, text in texts.items():
        problems += [f"{page}:{b.line}: {why}" for b in blocks(page, text) if (why := block_problem(b))]
        for target, path, heading in links(page, text):
            if path not in files:
                why = "is a folder: name the file in it" if path in folders else "is not there"
                problems.append(f"{page}: the link {target} {why}")
            elif heading and path in texts and heading not in anchors(texts[path]):
                problems.append(f"{page}: the link {target} names a heading that {path} has not")
    return problems


def gather(files: set[str], folder: Path) -> None:
    """Pages and what they link to, with mkdocs' settings, into a folder that is made anew."""
    shutil.rmtree(folder, ignore_errors=True)
    out = folder / "pages"
    known = pages(files)
    for page in known:
        text = (ROOT / page).read_text("utf-8")
        target = out / page
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(
            "\n".join(
                f"{fence['indent']}{fence['ticks']}{fence['info'].strip().partition(' ')[0]}"
                if (fence := _FENCE.match(line))
                else line
                for line in text.splitlines()
            )
            + "\n",
            "utf-8",
        )
        for _, path, _ in links(page, text):
            if path in files and path not in known:
                (out / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / path, out / path)
    (out / "site.css").write_text(_STYLE, "utf-8")
    tree, _ = navigation(known)
    config = _CONFIG.format(pages=out, site=folder / "site")
    (folder / "mkdocs.yml").write_text(f"{config}{yaml.safe_dump({'nav': tree}, sort_keys=False)}", "utf-8")


def main() -> int:
    """Exit 0 when nothing is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gather", type=Path, metavar="FOLDER", help="put there what mkdocs builds the site from")
    options = parser.parse_args()
    files = tracked()
    problems = check(files)
    for problem in problems:
        print(problem)
    if problems:
        print(f"{len(problems)} problems")
        return 1
    known = pages(files)
    kinds = Counter(
        "not run" if b.mark.startswith("not run") else "shown" if b.language in SHOWN else "executed"
        for page in known
        for b in blocks(page, (ROOT / page).read_text("utf-8"))
    )
    if options.gather:
        gather(files, options.gather.resolve())
    print(f"{len(known)} pages; blocks: " + ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
