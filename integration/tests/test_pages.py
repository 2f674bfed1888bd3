"""The documentation's pages: links, code blocks and what is made from the code."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import pages
import reference
from meta_executor.config import service_config

ROOT = Path(__file__).resolve().parents[2]
FILES = pages.tracked()
TEXTS = {page: (ROOT / page).read_text("utf-8") for page in pages.pages(FILES)}
BLOCKS = [block for page, text in TEXTS.items() for block in pages.blocks(page, text)]


def named(block: pages.Block) -> str:
    return f"{block.page}:{block.line}"


def test_links_blocks_and_navigation() -> None:
    """Links lead somewhere, blocks are of a kind that is executed or say why not, pages are in the navigation."""
    assert len(TEXTS) > 40 and len(BLOCKS) > 40
    assert pages.check(FILES) == []


@pytest.mark.parametrize("name", reference.MADE_PAGES)
def test_a_reference_page_equals_the_code(name: str) -> None:
    """What ``python tools/reference.py --write`` would write."""
    assert (reference.PAGES / name).read_text("utf-8") == reference.MADE_PAGES[name]()


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "yaml" and not b.mark], ids=named)
def test_a_printed_configuration_is_one(block: pages.Block) -> None:
    """It is taken as it stands."""
    service_config(yaml.safe_load(block.text))


@pytest.mark.parametrize(
    "block",
    [b for b in BLOCKS if b.language == "python" and not b.mark and not b.page.endswith("README.md")],
    ids=named,
)
def test_a_printed_program_runs(block: pages.Block, tmp_path: Path) -> None:
    """In an empty folder, with warnings as errors; what the READMEs print, test_readmes.py runs."""
    (tmp_path / "program.py").write_text(block.text)
    done = subprocess.run(
        [sys.executable, "-W", "error", "program.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


# -- the checks themselves ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("info", "found"),
    [
        ("python", False), ("python mpi4", False), ("sh", False), ("text", False), ("sh not run: wants a cluster", False),
        ("sh not run", True), ("python maybe", True), ("rust", True), ("", True),
    ],
)  # fmt: skip
def test_a_block_that_nobody_executes_is_found(info: str, found: bool) -> None:
    (block,) = pages.blocks("docs/x.md", f"words\n```{info}\ncode\n```\n")
    assert (pages.block_problem(block) is not None) is found


def test_a_link_that_leads_nowhere_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """To a page, a heading, a folder; not what stands in code."""
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    monkeypatch.setattr(pages, "NAVIGATION", tmp_path / "docs" / "nav.yml")
    (tmp_path / "docs" / "sub").mkdir(parents=True)
    (tmp_path / "docs" / "nav.yml").write_text("- All:\n    - docs/*\n")
    (tmp_path / "docs" / "sub" / "b.txt").write_text("")
    (tmp_path / "docs" / "a.md").write_text(
        "# A head, with `code`\n[1](a.md#a-head-with-code) [2](b.md) [3](a.md#none) [4](sub) [5](sub/b.txt) `[6](no.md)`\n"
        "```text\n[7](no.md)\n```\n"
    )
    problems = pages.check({"docs/a.md", "docs/sub/b.txt", "docs/nav.yml"})
    assert [re.findall(r"the link (\S+)", problem)[0] for problem in problems] == ["b.md", "a.md#none", "sub"]


def test_a_page_that_is_in_no_line_of_the_navigation_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(pages, "NAVIGATION", tmp_path / "nav.yml")
    (tmp_path / "nav.yml").write_text("- One:\n    - docs/a.md\n    - docs/gone.md\n- Two:\n    - docs/how-to/*\n")
    tree, problems = pages.navigation(["docs/a.md", "docs/b.md", "docs/how-to/c.md"])
    assert tree == [{"One": ["docs/a.md", "docs/gone.md"]}, {"Two": ["docs/how-to/c.md"]}]
    assert problems == ["docs/nav.yml: docs/gone.md is no page", "docs/b.md: is in no line of docs/nav.yml"]


def test_a_setting_without_a_description_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "comments_of", lambda module, owner: dict.fromkeys(["hostname"], ""))
    with pytest.raises(reference.Undescribed, match=r"ServiceConfig\.hostname"):
        reference.configuration()


def test_a_variable_that_nobody_tells_about_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """In either direction."""
    monkeypatch.setattr(reference, "variables_in_code", lambda: {*reference.VARIABLES, "META_EXECUTOR_NEW"})
    with pytest.raises(reference.Undescribed, match="META_EXECUTOR_NEW"):
        reference.environment()
    monkeypatch.setattr(reference, "variables_in_code", lambda: set(reference.VARIABLES) - {"UCX_TLS"})
    with pytest.raises(reference.Undescribed, match="UCX_TLS"):
        reference.environment()


# -- deploy -------------------------------------------------------------------------------------------------------------


def deployed() -> dict[str, str]:
    """Every service configuration in ``deploy``, with what stands for an address or a host filled in."""
    kubernetes = list(yaml.safe_load_all((ROOT / "deploy" / "kubernetes" / "service.yaml").read_text("utf-8")))
    (told,) = [one["data"]["service.yaml"] for one in kubernetes if one["kind"] == "ConfigMap"]
    batch = (ROOT / "deploy" / "slurm" / "service.sbatch").read_text("utf-8").split("<<YAML\n")[1].split("\nYAML\n")[0]
    return {
        "image": (ROOT / "deploy" / "service.yaml").read_text("utf-8"),
        "kubernetes": told.replace("POD_IP", "10.1.2.3"),
        "slurm": batch.replace("${hosts[0]}", "node-1")
        .replace("${hosts[1]}", "node-2")
        .replace("$run", "/scratch/run"),
    }


@pytest.mark.parametrize("name", ["image", "kubernetes", "slurm"])
def test_a_deployed_configuration_is_one(name: str) -> None:
    """The linters of ``nox -s docs`` do not look into it."""
    service_config(yaml.safe_load(deployed()[name]))
