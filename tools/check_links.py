"""Check that every relative link of the Markdown pages names a file that exists, and an anchor that its page has.

Links to other sites are not followed. Anchors are those that GitHub makes of headings.
"""

import argparse
import re
import sys
import unicodedata
from pathlib import Path

LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^()\s]+(?:\([^()\s]*\))?)[^)]*\)")
CODE = re.compile(r"`[^`]*`")
FOLDERS = ("docs", "benchmarks", "examples")


def pages(root: Path) -> list[Path]:
    """Return the Markdown pages of `root` and of its folders `FOLDERS`."""
    return sorted(root.glob("*.md")) + [page for folder in FOLDERS for page in sorted((root / folder).rglob("*.md"))]


def prose(text: str) -> list[tuple[int, str]]:
    """Return numbered lines of a page without its code: fenced blocks, and indented ones after a gap or heading."""
    lines, fenced, indented, empty = [], False, False, True
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
            continue
        indented = line.startswith("    ") and (empty or indented) and not line.lstrip().startswith(("- ", "* "))
        empty = not line.strip() or line.startswith("#")
        if not fenced and not indented:
            lines.append((number, line))
    return lines


def anchor(heading: str) -> str:
    """Return GitHub's anchor of a heading: lower case, spaces as hyphens, without punctuation."""
    heading = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
    kept = [c for c in heading if c in " -_" or unicodedata.category(c)[0] in "LN"]
    return "".join(kept).replace(" ", "-")


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings; the n-th repetition of one ends in -n."""
    found: set[str] = set()
    for _, line in prose(text):
        if match := re.match(r"#{1,6} +(.*?)#*$", line):
            name = anchor(match[1])
            repeated = next(n for n in range(10_000) if (f"{name}-{n}" if n else name) not in found)
            found.add(f"{name}-{repeated}" if repeated else name)
    return found


def dead_links(root: Path) -> list[str]:
    """Return a line for each dead link of the pages under `root`: page, line number, target and reason."""
    dead = []
    for page in pages(root):
        for number, line in prose(page.read_text(encoding="utf-8")):
            for target in LINK.findall(CODE.sub("", line)):
                if re.match(r"[a-z]+:", target):
                    continue
                path, _, name = target.partition("#")
                file = (page.parent / path).resolve() if path else page
                where = f"{page.relative_to(root)}:{number}: {target}"
                if not file.exists():
                    dead.append(f"{where}: no such file")
                elif name and file.suffix == ".md" and name not in anchors(file.read_text(encoding="utf-8")):
                    dead.append(f"{where}: no such heading")
    return dead


def main() -> None:
    """Print dead links, and end with status 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1], help="the repository's root")
    dead = dead_links(parser.parse_args().root.resolve())
    print("\n".join(dead), end="\n" if dead else "")
    sys.exit(1 if dead else 0)


if __name__ == "__main__":
    main()
