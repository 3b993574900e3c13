"""The code on the pages of docs/, run as it stands; and every public name is on one of them."""

from __future__ import annotations

import re
import sys

import pytest
from launcher import ROOT, mpirun

import hpczero
from hpczero.cli.train_settings import TrainSettings

PAGES = {page.name: page.read_text() for page in (ROOT / "docs").glob("*.md")}


# What running a page on two ranks prints, among other things.
PRINTED = {
    "library.md": ["11 elements", "10 elements", "(1e-05, 1e-05, 5e-06)"],
    "aggregator.md": [
        '"w" is float64 (4, 3) on the host on rank 1; float64 (3, 4) on the host on rank 0',
        "num_nodes=16, devices_per_node=8, and the communicator has 2 ranks on one node",
        "32 ranks needs a communicator",
    ],
    "hangs.md": ["rank 1 of 2 calls all_reduce of 6 elements", "[2. 2. 2. 2. 2.]"],
    "choice.md": ["all_reduce of 4000000 bytes, float32, order=canonical: "],
}


@pytest.mark.parametrize("page", PRINTED)
def test_the_code_of_a_page_runs_on_two_ranks_and_prints_what_the_page_says(page, tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", PAGES[page], re.DOTALL)
    (tmp_path / "page.py").write_text("\n".join(blocks))
    done = mpirun(2, [sys.executable, "page.py"], timeout=180, cwd=tmp_path)
    assert done.status == 0, done
    assert [text for text in PRINTED[page] if text not in done.stdout] == [], done


def test_no_other_page_has_python_that_nobody_runs():
    assert {name for name, text in PAGES.items() if "```python" in text} == PRINTED.keys()


def test_every_public_name_is_documented():
    text = (ROOT / "README.md").read_text() + "".join(PAGES.values())
    missing = [name for name in hpczero.__all__ if not re.search(rf"\b{name}\b", text) and name != "__version__"]
    assert not missing


def test_the_file_on_the_command_line_page_is_accepted(tmp_path):
    from hpczero.settings import resolve

    (block,) = re.findall(r"```toml\n(.*?)```", PAGES["train.md"], re.DOTALL)
    (tmp_path / "train.toml").write_text(block)
    resolved = resolve(TrainSettings, "train", file=tmp_path / "train.toml", environ={}, flags={})
    assert (resolved.settings.stage, resolved.settings.lr, resolved.settings.batch) == (3, 2e-3, 32)


def test_every_link_between_the_pages_leads_somewhere():
    for page, folder in [("README.md", ROOT), *((name, ROOT / "docs") for name in PAGES)]:
        for target in re.findall(r"\]\(([^)#:]+)\)", (folder / page).read_text()):
            assert (folder / target).exists(), f"{page}: {target}"
