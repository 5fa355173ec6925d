"""Each rule of tools/check_words.py finds what it is for, and nothing beside it."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def check(tmp_path: Path):
    """Return a function that writes files and returns the tool's status and its lines."""

    def run(files: dict[str, str], *arguments: str) -> tuple[int, list[str]]:
        for name, text in {"pyproject.toml": "", **files}.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        command = [sys.executable, ROOT / "tools" / "check_words.py", "--root", tmp_path, *arguments]
        done = subprocess.run(command, capture_output=True, text=True)
        return done.returncode, (done.stdout + done.stderr).splitlines()

    return run


def test_allowed_names_are_allowed_in_their_file_alone(check):
    settings = '[tool.check_words]\nallowed_names = ["ns_multigpu/a.py:tell"]\n'
    files = {"pyproject.toml": settings, "ns_multigpu/a.py": "tell = told = 1\n", "ns_multigpu/b.py": "tell = 1\n"}
    status, lines = check(files)
    assert status == 1 and [line.split(":")[0] for line in lines] == ["ns_multigpu/a.py", "ns_multigpu/b.py"]


@pytest.mark.parametrize(
    ("rule", "file", "text", "places"),
    [
        ("identifiers", "ns_multigpu/a.py", "x = 1\nmy_room = 2\nmy_room = 3\n", [2]),
        ("identifiers", "tests/a.py", "def test_FirstRoom(): ...\n", [1]),
        ("identifiers", "tests/a.py", "has_given_up = give = up = 1\n", [1]),
        ("identifiers", "ns_multigpu/room.py", "", [1]),
        ("identifiers", "cuda_ext/a.cu", "// room\nint first_room;\n", [2]),
        ("identifiers", "ns_multigpu/a.py", "groom = roomy = 'room'  # room\n", []),
        ("identifiers", "ns_multigpu/a.py", "zeros_like = balance_like_views = 1\n", [1]),
        ("words", "ns_multigpu/a.py", '"""The rows\nare told."""\n', [2]),
        ("words", "ns_multigpu/a.py", "x = 1  # there is room\n", [1]),
        ("words", "ns_multigpu/a.py", "raise ValueError(f'{x} has no room')\n", [1]),
        ("words", "cuda_ext/a.cpp", 'int room;  // no\n/* the\n room */ f("no Room here");\n', [3, 3]),
        ("words", "docs/a.md", "Of course `room` is code.\n\n    room\n\nA run takes its course.\n", [5]),
        ("words", "ns_multigpu/a.py", "room = 'room'\n", []),
        ("docstrings", "strategies/a.py", '"""What it is."""\n', [1]),
        ("docstrings", "strategies/a.py", 'class A:\n    x: int\n    """Which one."""\n', [3]),
        ("docstrings", "strategies/a.py", 'def f():\n    """\n    Where it is.\n    """\n', [2]),
        ("docstrings", "strategies/a.py", 'def f():\n    """Whatever."""\n    g()\n    "What"\n', []),
        ("docstrings", "strategies/a.py", 'def f():\n    """Pass rows."""\n\n\ndef g():\n    """The rows."""\n', [6]),
        *(
            ("docstrings", "tools/a.py", f'class A:\n    def f(self):\n        """{text}"""\n', [3] * bad)
            for text, bad in {
                "Return it.": 0,
                "All-gather it.": 0,
                "Densify.": 0,
                "Compress it.": 0,
                "Returns it.": 1,
                "A row.": 1,
                "Of rows the last.": 1,
                "[N] rows.": 1,
                "`x` again.": 1,
                "3D points.": 1,
                "Adam's step.": 1,
                "PSNR.": 1,
            }.items()
        ),
        ("docstrings", "tools/a.py", 'class A:\n    @cached_property\n    def f(self):\n        """The rows."""\n', []),
        ("docstrings", "tools/a.py", '@pytest.fixture\ndef f():\n    """The rows."""\n', []),
        ("docstrings", "tools/a.py", 'class A:\n    """The rows."""\n    x: int\n    """The row."""\n', []),
        ("docstrings", "tools/a.py", 'def f():\n    x = 1\n    """The row."""\n', []),
        ("docstrings", "tests/a.py", 'def f():\n    """The rows."""\n', []),
        ("sentences", "README.md", "word " * 25 + "end.\n\n- " + "word " * 24 + "end. " + "word " * 9 + "\n", [1]),
        ("sentences", "docs/a.md", "One.\n" + "word\n" * 26, [2]),
        ("sentences", "docs/a.md", "| " + "word " * 30 + "|\n\n    " + "word " * 30 + "\n# " + "word " * 30, []),
        ("sentences", "docs/a.md", "word `" + "code " * 30 + "`. [word word](" + "a" * 40 + ")\n", []),
        ("sentences", "benchmarks/results/a.md", "word " * 30, []),
        ("hashes", "README.md", "Since `00c21f4` it is so.\n\n    crc32 90b1d7e3\n", [1]),
        ("hashes", "docs/a.md", "1234567 photographs of a facade, defaced\n", []),
    ],
)
def test_a_rule_finds_its_places_and_no_other(check, rule, file, text, places):
    status, lines = check({file: text})
    found = [line.split(": ")[:2] for line in lines]
    assert [where for where in found if where[1] == rule] == [[f"{file}:{place}", rule] for place in places]
    assert status == bool(lines)


@pytest.mark.parametrize(
    ("subject", "words"),
    [
        ("exchange: pad messages to the plan's capacity", []),
        ("core/step/step: embed the flag", []),
        ("Lines of 120", ["form"]),
        ("docs: Wrap tables", ["form"]),
        ("docs: wrapped tables", ["form"]),
        ("docs: the tables", ["form"]),
        ("docs: wrapping", ["form"]),
        ("docs: wraps tables", ["form"]),
        ("docs: wrap " + "t" * 62, ["length"]),
        ("docs: wrap " + "t" * 61, []),
    ],
)
def test_commit_subjects(check, tmp_path, subject, words):
    git = ["git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run([*git, "init", "-q"], check=True)
    for message in ("Not looked at", subject):
        subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", message], check=True)
    status, lines = check({}, "--since", "HEAD~1")
    found = ["length" if "characters" in line else "form" for line in lines]
    assert (status, found) == (bool(words), words)
