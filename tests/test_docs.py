"""What README and docs claim is what the code does."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import evenep

ROOT = Path(__file__).parent.parent
DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]


def test_the_readme_example_runs_and_balances(tmp_path: Path) -> None:
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert code is not None
    script = tmp_path / "example.py"
    script.write_text(code[1])
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    for before, after in eval(done.stdout):
        assert before > 1.5
        assert after < 1.05


def test_the_readme_is_short_and_links_lead_somewhere() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) < 200
    for page in DOCS:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.parametrize("page", DOCS, ids=lambda p: p.name)
def test_files_and_names_that_docs_mention_exist(page: Path) -> None:
    text = page.read_text()
    for path in re.findall(r"`((?:tests|docs|src)/[\w/.]+)`", text):
        assert (ROOT / path).exists(), path
    rooms = "plan|transport|experts|exchange|weights|formats"
    for path in re.findall(rf"`((?:{rooms})/[\w/.]*)`", text):
        if "NAME" not in path:
            assert (ROOT / "src/evenep" / path).exists(), path


def test_every_public_name_exists_and_is_documented() -> None:
    for name in evenep.__all__:
        assert (getattr(evenep, name).__doc__ or "").strip(), name
