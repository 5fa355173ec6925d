"""Check names, docstrings, prose and commit subjects against the project's vocabulary. Rules:

- identifiers: no name in Python, C++ and CUDA, and no file, has a word of `NAMES`;
- words: no docstring, comment, message or page has a word of `WORDS`;
- docstrings: no docstring begins with a word of `FIRST_WORDS`; those of functions, but of tests, begin with a verb;
- sentences: no sentence of README and docs is longer than `LONGEST_SENTENCE`, outside of tables and code;
- hashes: README and docs name no commit;
- commits: subjects since `commits_since` (or `--since`) are `area: imperative`, of at most `LONGEST_SUBJECT`.
"""

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

sys.path.insert(0, str(Path(__file__).parent))
from check_links import prose

LONGEST_SENTENCE = 25
LONGEST_SUBJECT = 72
FIRST_WORDS = ("What", "Which", "Where", "How", "Who", "That")
FOLDERS = ("ns_multigpu", "strategies", "cuda_ext", "benchmarks", "demo", "examples", "tests", "tools")
SKIPPED = ("tools/check_words.py", "tests/tools/test_check_words.py")  # they spell out what they look for
NATIVE = (".cpp", ".h", ".cu", ".cuh")

NAMES = {
    "room": "capacity",
    "rooms": "capacities, shape buckets",
    "tell": "publish, all_gather, put_rows",
    "told": "gathered, put_rows",
    "leave": "send",
    "arrive": "receive",
    "bring": "receive, return",
    "journey": "staged exchange",
    "flight": "handle",
    "landed": "wait",
    "stay": "local",
    "staying": "local",
    "travel": "exchange",
    "travelling": "exchanged",
    "relays": "hierarchical all-to-all",
    "handed": "forwarded",
    "meeting": "rendezvous",
    "course": "run, trajectory, schedule",
    "courses": "runs, trajectories, schedules",
    "reach": "footprint, overlaps",
    "reaches": "footprint, overlaps",
    "witness": "finite flag",
    "learnt": "state",
    "knowledge": "state",
    "foresee": "prefetch",
    "foreseen": "prefetched",
    "foretold": "predicted",
    "ways": "candidates",
    "trials": "candidates",
    "holding": "shard index",
    "leveling": "balancing",
    "like views": "balanced views",
    "ghost": "boundary splat",
    "ghosts": "boundary splats",
    "crossing": "boundary splats",
    "hiding": "occlusion",
    "carrier": "pixel exchange",
    "carriers": "pixel exchange",
    "pieces": "fragments",
    "composable": "supports_fused",
    "serving": "input queue",
    "served": "queued",
    "feed": "step inputs",
    "feeding": "step inputs",
    "rehearse": "warm_up",
    "rehearsal": "warm_up",
    "lent": "step lock",
    "viewer strides": "viewer throttle",
    "goodbye": "run summary",
    "listing": "index map",
    "parting": "split",
    "arranging": "reshard",
    "settle": "place, exchange, agree",
    "settled": "placed, exchanged, agreed",
    "settling": "placement",
    "arrived": "received",
    "births": "children",
    "halves": "split rule",
    "steady": "deterministic",
    "taking": "gather",
    "give up": "cancel, release",
    "given up": "cancelled, released",
    "giving up": "cancelling, releasing",
    "beside": "checkpoint directory",
    "elsewhere": "render override",
    "homes": "owners",
    "dealt": "distributed",
}
"""Words that names no longer have (several in a row with spaces), and the field's word instead."""

WORDS = {
    r"rooms?": "capacity",
    r"tells?|told": "publish, gather, pass",
    r"courses?(?<!of course)": "run, trajectory, schedule",
    r"reach(?:es|ed|ing)?": "overlap, touch, footprint; access, get to",
    r"leaves?(?= (?:for|the rank|its rank|to))": "send",
    r"arrives?": "receive",
    r"bring(?:s|ing)?|brought": "receive, return, copy",
    r"journeys?|(?<!in )flights?": "exchange, handle",
    r"travel(?:s|led|ling)?": "be sent, be exchanged",
    r"witness(?:es)?": "finite flag",
    r"learnt": "measured, stored",
    r"foresees?|foreseen|foretell|foretold": "predict, prefetch",
    r"ghosts?": "boundary splats",
    r"lent|lends?": "held by the training thread",
    r"rehears(?:e|es|ed|al)": "warm up",
    r"goodbye|last words": "run summary",
    r"dealt out|deals? out": "distribute round-robin",
    r"kinds? of points?": "primitive",
    r"put off|puts off": "defer",
    r"given up|gives up": "cancel, release",
    r"lets? go": "release",
    r"taken again|takes? a step again": "retry",
    r"nobody|everybody|somebody|whoever": "name the rank, thread or user",
    r"beside": "next to, compared with, in the same directory",
    r"elsewhere": "on another rank, in another file",
    r"anew": "again, rebuild",
    r"by turns": "alternately",
    r"meanwhile|thereby|therein|hence|hereby": "say it in two sentences",
}
"""Patterns of whole words that prose no longer has, and what it says instead."""

PATTERNS = {re.compile(rf"\b(?:{word})\b", re.IGNORECASE): instead for word, instead in WORDS.items()}
ANY_NAME = re.compile(rf"\b(?:{'|'.join(NAMES)})\b")
ANY_WORD = re.compile("|".join(pattern.pattern for pattern in PATTERNS), re.IGNORECASE)
SAID = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.DOTALL)  # comments and strings of C++
HASH = re.compile(r"\b(?=[0-9a-f]*[0-9])(?=[0-9a-f]*[a-f])[0-9a-f]{7,40}\b")
NAME = re.compile(r"[A-Za-z_]\w*")
SUBJECT = re.compile(r"[a-z0-9_/.-]+(, [a-z0-9_/.-]+)*: (?P<verb>[a-z]\S*)( .*)?$")
NO_VERB = re.compile(r"(an?|the|no|what|which|where|how|who|that|more|it|.+[^e]ed|.+ing|.+(?<!s)s)$")
VERBS_ALL_THE_SAME = {"bring", "string", "embed", "shed", "alias", "bias", "focus"}
FIRST_VERB = re.compile(  # no article, preposition or pronoun; no third person or plural
    r"(?!(?:An?|The|Of|In|On|At|By|To|For|From|With|Within|Without|As|Before|After|Over|Per|All|Any|Both|Each|Every|Half"
    r"|Its|No|One|Some|This|Those|Two|Whether|Why)[\s.,:;])[A-Z][a-z]+(?:-[a-z]+)*(?<!(?<!s)s)(?=[\s.,:;])"
)


Finding = tuple[str, str]
"""A place that breaks a rule, `file:line`, and what to do."""


def parts(name: str) -> list[str]:
    """Return the words of an identifier in lower case: those between underscores and capitals."""
    return [part.lower() for part in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]


def files(root: Path, *suffixes: str) -> Iterator[tuple[str, Path]]:
    """Yield name and path of the files under `FOLDERS` that have one of the suffixes."""
    for folder in FOLDERS:
        for file in sorted((root / folder).rglob("*")):
            if file.suffix in suffixes and (name := file.relative_to(root).as_posix()) not in SKIPPED:
                yield name, file


def pages(root: Path) -> Iterator[tuple[str, str]]:
    """Yield name and text of README and docs."""
    for page in [*root.glob("README.md"), *sorted((root / "docs").rglob("*.md"))]:
        yield page.relative_to(root).as_posix(), page.read_text(encoding="utf-8")


def identifiers(root: Path, allowed: Sequence[str] = ()) -> Iterator[Finding]:
    """Find names that are defined or used with a word of `NAMES`, each once a file, and files named so.

    Args:
        allowed: names, or `file:name`, that another library or an option has, or that mean what the word means.
    """
    for where, file in files(root, ".py", *NATIVE):
        text = file.read_text(encoding="utf-8")
        names = {file.stem: 1}
        if file.suffix == ".py":
            for token in tokenize.generate_tokens(io.StringIO(text).readline):
                if token.type == tokenize.NAME:
                    names.setdefault(token.string, token.start[0])
        else:
            text = SAID.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)
            for number, line in enumerate(text.splitlines(), 1):
                for name in NAME.findall(line):
                    names.setdefault(name, number)
        for name, number in names.items():
            if name in allowed or f"{where}:{name}" in allowed:
                continue
            for word in dict.fromkeys(ANY_NAME.findall(" ".join(parts(name)))):
                yield f"{where}:{number}", f"{name}: {NAMES[word]}"


def is_called(node: ast.AST) -> bool:
    """Return whether a node is a function that is called by its name: no property and no fixture."""
    return isinstance(node, ast.FunctionDef) and not any(
        re.search("property|fixture", ast.unparse(decorator)) for decorator in node.decorator_list
    )


def documented(tree: ast.Module) -> Iterator[tuple[int, str, bool]]:
    """Yield (line, text, whether of a function) of docstrings of a module, its classes, functions and attributes."""
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        for position, child in enumerate(node.body):
            after_name = position and isinstance(node.body[position - 1], (ast.Assign, ast.AnnAssign))
            if (
                (not position or after_name)
                and isinstance(child, ast.Expr)
                and isinstance(child.value, ast.Constant)
                and isinstance(child.value.value, str)
            ):
                yield child.lineno, child.value.value, not position and is_called(node)


def docstrings(root: Path) -> Iterator[Finding]:
    """Find docstrings whose first word is one of `FIRST_WORDS`, and those of functions that begin without a verb."""
    for where, file in files(root, ".py"):
        for line, text, of_function in documented(ast.parse(file.read_text(encoding="utf-8"))):
            first = (text.split() or [""])[0]
            if re.match("[A-Za-z]*", first)[0] in FIRST_WORDS:
                yield f"{where}:{line}", f"docstring begins with {first!r}: begin with a verb or a noun"
            elif of_function and not where.startswith("tests/") and not FIRST_VERB.match(text.lstrip() + " "):
                yield f"{where}:{line}", f"docstring of a function begins with {first!r}: begin with a verb"


def texts(file: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of what a source file says in words: docstrings, comments, and strings of several words."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".py":
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            kinds = (tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.COMMENT))
            if token.type in kinds and " " in token.string.strip():
                yield from enumerate(token.string.splitlines(), token.start[0])
        return
    for match in SAID.finditer(text):
        if match[0][0] == "/" or " " in match[0].strip():
            yield from enumerate(match[0].splitlines(), text.count("\n", 0, match.start()) + 1)


def words(root: Path) -> Iterator[Finding]:
    """Find words of `WORDS` in docstrings, comments, messages and pages; code in backticks apart."""
    said = [(where, texts(file)) for where, file in files(root, ".py", *NATIVE)]
    said += [(where, iter(prose(text))) for where, text in pages(root)]
    for where, lines in said:
        for number, line in lines:
            line = re.sub(r"`[^`]*`|\]\([^)]*\)", "", line)
            for pattern, instead in PATTERNS.items() if ANY_WORD.search(line) else ():
                for match in pattern.finditer(line):
                    yield f"{where}:{number}", f"{match[0]!r}: {instead}"


def sentences_of(text: str) -> Iterator[tuple[int, str]]:
    """Yield (line, sentence) of a page's paragraphs and list items, without tables, code and headings."""
    paragraphs: list[tuple[int, str]] = []
    open_ = False
    for number, line in prose(text):
        stripped = line.strip()
        if not stripped or stripped.startswith(("|", "#", "<", "![")):
            open_ = False
            continue
        item = re.match(r"([-*]|\d+\.) +", stripped)
        if item or not open_ or number != paragraphs[-1][0] + paragraphs[-1][1].count("\n") + 1:
            paragraphs.append((number, stripped[item.end() :] if item else stripped))
        else:
            paragraphs[-1] = (paragraphs[-1][0], f"{paragraphs[-1][1]}\n{stripped}")
        open_ = True
    for number, paragraph in paragraphs:
        plain = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"`[^`]*`", "code", paragraph))
        start = 0
        for end in [*(m.end() for m in re.finditer(r"[.!?][)*\"”]*(?=\s|$)", plain)), len(plain)]:
            if sentence := plain[start:end].strip():
                lead = len(plain[start:end]) - len(plain[start:end].lstrip())
                yield number + plain.count("\n", 0, start + lead), sentence
            start = end


def sentences(root: Path) -> Iterator[Finding]:
    """Find sentences of README and docs that are longer than `LONGEST_SENTENCE` words."""
    for where, text in pages(root):
        for number, sentence in sentences_of(text):
            length = sum(any(c.isalnum() for c in word) for word in sentence.split())
            if length > LONGEST_SENTENCE:
                yield f"{where}:{number}", f"{length} words: {' '.join(sentence.split()[:8])} …"


def hashes(root: Path) -> Iterator[Finding]:
    """Find commit hashes in README and docs; code blocks may show checksums."""
    for where, text in pages(root):
        for number, line in prose(text):
            for match in HASH.findall(line):
                yield f"{where}:{number}", f"{match}: pages name no commit"


def commits(root: Path, since: str | None) -> Iterator[Finding]:
    """Find commit subjects after `since` that are not `area: imperative`, or longer than `LONGEST_SUBJECT`."""
    if not since:
        return
    command = ["git", "log", "--no-merges", "--format=%h %s", f"{since}..HEAD"]
    log = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    for line in log.splitlines():
        commit, _, subject = line.partition(" ")
        match = SUBJECT.match(subject)
        verb = match["verb"] if match else ""
        if len(subject) > LONGEST_SUBJECT:
            yield commit, f"{len(subject)} characters: {subject}"
        if not verb or (NO_VERB.match(verb) and verb not in VERBS_ALL_THE_SAME):
            yield commit, f"not `area: imperative`: {subject}"


def main() -> None:
    """Print what the rules find, and end with status 1 if it is anything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1], help="the repository's root")
    parser.add_argument("--since", help="commit behind which subjects are checked, instead of pyproject's")
    given = parser.parse_args()
    root = given.root.resolve()
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    settings = project.get("tool", {}).get("check_words", {})
    found = {
        "identifiers": identifiers(root, settings.get("allowed_names", [])),
        "words": words(root),
        "docstrings": docstrings(root),
        "sentences": sentences(root),
        "hashes": hashes(root),
        "commits": commits(root, given.since or settings.get("commits_since")),
    }
    lines = [f"{place}: {rule}: {advice}" for rule, findings in found.items() for place, advice in findings]
    print(*lines, sep="\n", end="\n" if lines else "")
    sys.exit(1 if lines else 0)


if __name__ == "__main__":
    main()
