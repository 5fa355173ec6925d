"""Dead links of Markdown pages are found, and nothing else is called dead."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = """# Faults, and `what` they say

## Two GPUs: 1.85 times

## Two GPUs: 1.85 times
"""


@pytest.fixture
def check(tmp_path: Path):
    """Return a function that writes README.md with a text and returns the tool's status and output."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "faults.md").write_text(PAGE)

    def run(text: str) -> tuple[int, str]:
        (tmp_path / "README.md").write_text(text)
        command = [sys.executable, ROOT / "tools" / "check_links.py", "--root", tmp_path]
        done = subprocess.run(command, capture_output=True, text=True)
        assert not done.stderr
        return done.returncode, done.stdout

    return run


@pytest.mark.parametrize(
    "link",
    [
        "[a](docs/faults.md)",
        "[a](docs/faults.md#faults-and-what-they-say)",
        "[a](docs/faults.md#two-gpus-185-times)",
        "[a](docs/faults.md#two-gpus-185-times-1)",
        "[a](https://example.org/nowhere.md)",
        "[a](#here)\n# Here",
        "`[a](gone.md)`",
        "```\n[a](gone.md)\n```",
        "text\n\n    [a](gone.md)",
        "# Text\n    [a](gone.md)\n      [a](gone.md)",
    ],
)
def test_valid_links_and_code_are_not_dead(check, link):
    assert check(link) == (0, "")


@pytest.mark.parametrize(
    ("link", "reason"),
    [
        ("one [a](gone.md)", "README.md:1: gone.md: no such file"),
        ("\n![a [b](docs/faults.md)](gone.png)", "README.md:2: gone.png: no such file"),
        ("[a](docs/faults.md#two-gpus)", "README.md:1: docs/faults.md#two-gpus: no such heading"),
        ("[a](docs/faults.md#two-gpus-185-times-2)", "no such heading"),
        ("[a](#there)\n# Here", "README.md:1: #there: no such heading"),
        ("- item\n    [a](gone.md)", "README.md:2: gone.md: no such file"),
    ],
)
def test_a_dead_link_is_named_with_its_place(check, link, reason):
    status, output = check(link)
    assert status == 1
    assert reason in output


def test_pages_in_folders_are_read_relative_to_themselves(check, tmp_path):
    (tmp_path / "docs" / "more.md").write_text("[a](faults.md) [b](docs/faults.md)")
    status, output = check("")
    assert status == 1
    assert output == "docs/more.md:1: docs/faults.md: no such file\n"


def test_this_repository_has_no_dead_link():
    done = subprocess.run([sys.executable, ROOT / "tools" / "check_links.py"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")
