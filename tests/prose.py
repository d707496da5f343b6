"""Collect the prose of this repository, draw samples from it, and count the habits that readers stumble over.

`python -m tests.prose` prints, for each habit, how many pieces of prose match it. A piece is one docstring, one block
of comment lines, one paragraph of a page, or one text of a log line or an error. `--sample 60 --seed 7` prints pieces
drawn at random with file and line. `--list HABIT` prints each match. `--check` compares the matches of each file with
`tests/prose_allowed.json` and fails if a file has more. `make check` runs it; `--accept` writes that file anew.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ALLOWED = Path(__file__).with_name("prose_allowed.json")
GENERATED = frozenset(
    f"docs/{name}.md"
    for name in ("benchmarks", "beside-kafka", "compatibility", "curves", "isolation", "machine-limit")
)
"""Reports that a command writes: the prose in them is in the command's source."""
SPEAKS_OF_HABITS = frozenset({"tests/prose.py", "tests/test_prose.py"})
"""Files that name the habits in order to count them."""
LOG_METHODS = frozenset({"debug", "info", "warning", "error", "exception", "critical"})


@dataclass(frozen=True)
class Habit:
    name: str
    pattern: re.Pattern[str]
    only: frozenset[str] = frozenset()
    """Kinds of prose to which the habit applies; all if empty."""


def _habit(name: str, pattern: str, *only: str) -> Habit:
    return Habit(name, re.compile(pattern), frozenset(only))


HABITS = (
    _habit("opens-without-a-noun", r"^(Of|What|Who|Whose|Where|Whether|As|That)\b(?! \w+ is\?)", "docstring"),
    _habit("nobody-acts", r"\b([Ss]ome|[Nn]o|[Aa]ny)body\b|\b[Ww]ho asks\b|\b[Ww]h(o|at|ich)ever\b"),
    _habit("is-told", r"\b(is|are|was|were|be|been|being|has|have) told\b|\btells? of\b|\btold of\b"),
    _habit("who-as-subject", r"(?:^|[.;:] |\n)(Who|What|Of what|Of which|Of whom)\b(?![^.;:\n]*\?)"),
    _habit("where-for-if", r"\b[Ww]here (there (is|are|was|were)|none|nothing|no|neither|one (is|has|was))\b"),
    _habit("let-go", r"\b(let|lets|letting) (\w+ )?go\b(?!-)"),
    _habit("none-is", r"\b(what there is|what is so|none (is|are|was|were)|there (is|are) none|one that is not)\b"),
    _habit("for-as-because", r"[,;:] for (it|they|there|no|none|nothing|one|what|who|else|then|these|those)\b"),
    _habit("take-in", r"\b([Tt]akes?|[Tt]ook|[Tt]aken|[Tt]aking) in\b"),
    _habit("meanwhile", r"\b[Mm]eanwhile\b"),
    _habit("look-past", r"\b(not|never) looked at\b|\blook(s|ed)? past\b|\blooks? at nothing\b"),
    _habit("held-up", r"\b(is|are|was|were) held up\b|\bholds? (\w+ )?up (every|other|a|all)\b"),
    _habit("who-has-it", r"\bwho (has|had) (it|them)\b|\bwho is to\b|\bno more known\b|\bput out\b"),
)


@dataclass(frozen=True)
class Piece:
    path: str
    line: int
    kind: str
    """"docstring", "comment", "text" or "page"."""
    text: str

    def habits(self) -> list[str]:
        return [h.name for h in HABITS if (not h.only or self.kind in h.only) and h.pattern.search(self.text)]


def tracked(root: Path = ROOT) -> list[str]:
    """Paths of the files that hold prose, in git's order."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py", "*.sql", "*.md"],
        cwd=root, check=True, capture_output=True, text=True,
    )  # fmt: skip
    skipped = GENERATED | SPEAKS_OF_HABITS
    return [path for path in listed.stdout.splitlines() if path not in skipped and (root / path).exists()]


def _below(paths: list[str], files: list[str]) -> list[str]:
    """Return those of `files` that `paths` names, directly or by a folder above them."""
    named = [Path(path) for path in paths]
    return [file for file in files if any(Path(file).is_relative_to(path) for path in named)]


def pieces(root: Path = ROOT, paths: Iterable[str] | None = None) -> Iterator[Piece]:
    for path in tracked(root) if paths is None else paths:
        source = (root / path).read_text(encoding="utf-8")
        if path.endswith(".py"):
            yield from python_pieces(path, source)
        elif path.endswith(".sql"):
            yield from sql_pieces(path, source)
        else:
            yield from page_pieces(path, source)


def python_pieces(path: str, source: str) -> Iterator[Piece]:
    """Docstrings (of attributes too), blocks of comment lines, and the texts of log lines and errors."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield Piece(path, node.lineno, "docstring", _joined(node.value.value))
        elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            yield from _texts(path, node.exc)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in LOG_METHODS:
            yield from _texts(path, node)
    block: list[str] = []
    begun = last = 0
    for token in tokenize.generate_tokens(iter(source.splitlines(keepends=True)).__next__):
        if token.type != tokenize.COMMENT:
            continue
        text = token.string.lstrip("#").strip()
        if text.startswith(("!", "fmt:", "noqa", "type:", "pyright:")) or not text:
            continue
        if block and token.start[0] != last + 1:
            yield Piece(path, begun, "comment", " ".join(block))
            block = []
        if not block:
            begun = token.start[0]
        block.append(text)
        last = token.start[0]
    if block:
        yield Piece(path, begun, "comment", " ".join(block))


def _texts(path: str, call: ast.Call) -> Iterator[Piece]:
    for argument in [*call.args, *(keyword.value for keyword in call.keywords)]:
        parts = argument.values if isinstance(argument, ast.JoinedStr) else [argument]
        said = [part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)]
        text = _joined(" … ".join(said))
        if text.count(" ") >= 2:
            yield Piece(path, argument.lineno, "text", text)


def sql_pieces(path: str, source: str) -> Iterator[Piece]:
    block: list[str] = []
    begun = 0
    for number, line in enumerate([*source.splitlines(), ""], 1):
        text = line.strip()
        if text.startswith("--"):
            if not block:
                begun = number
            block.append(text.lstrip("-").strip())
        elif block:
            yield Piece(path, begun, "comment", _joined(" ".join(block)))
            block = []


def page_pieces(path: str, source: str) -> Iterator[Piece]:
    """Paragraphs, items of lists and rows of tables. Code blocks are no prose."""
    block: list[str] = []
    begun = 0
    in_code = False

    def ended() -> Iterator[Piece]:
        if block:
            yield Piece(path, begun, "page", _joined(" ".join(block)))
            block.clear()

    for number, line in enumerate([*source.splitlines(), ""], 1):
        text = line.strip()
        if text.startswith("```"):
            yield from ended()
            in_code = not in_code
            continue
        if in_code:
            continue
        starts = text.startswith(("- ", "* ", "|", "#", "> ")) or re.match(r"\d+\. ", text)
        if not text or starts:
            yield from ended()
        if text and not text.startswith("<!--"):
            if not block:
                begun = number
            block.append(re.sub(r"^(- |\* |#+ |> |\d+\. )", "", text))


def _joined(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()


def matches_by_file(found: Iterable[Piece]) -> dict[str, int]:
    counted: Counter[str] = Counter()
    for piece in found:
        counted[piece.path] += bool(piece.habits())
    return {path: number for path, number in sorted(counted.items()) if number}


def grown(now: dict[str, int], allowed: dict[str, int]) -> dict[str, tuple[int, int]]:
    """Files with more matches than allowed, and both numbers."""
    return {path: (n, allowed.get(path, 0)) for path, n in now.items() if n > allowed.get(path, 0)}


def _check(found: list[Piece]) -> int:
    allowed: dict[str, int] = json.loads(ALLOWED.read_text())
    worse = grown(matches_by_file(found), allowed)
    for piece in found:
        if piece.path in worse and piece.habits():
            print(f"{piece.path}:{piece.line}: {', '.join(piece.habits())}: {piece.text[:160]}")
    for path, (number, bound) in worse.items():
        print(f"{path}: {number} pieces of prose match a habit, {bound} are allowed", file=sys.stderr)
    if worse:
        print("Say who acts, and begin a docstring with a verb or a noun (CONTRIBUTING.md).", file=sys.stderr)
    return 1 if worse else 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.prose", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("paths", nargs="*", help="count in these files and folders only")
    parser.add_argument("--sample", type=int, metavar="N", help="print N docstrings and comments drawn at random")
    parser.add_argument("--seed", type=int, default=0, metavar="S")
    parser.add_argument("--list", metavar="HABIT", help="print each match of this habit, or of `all`")
    parser.add_argument("--by-file", action="store_true", help="print how many pieces match in each file")
    parser.add_argument("--check", action="store_true", help="fail if a file has more matches than it may have")
    parser.add_argument("--accept", action="store_true", help="write down today's matches as what is allowed")
    options = parser.parse_args(arguments)
    if options.accept and options.paths:
        parser.error("--accept writes down the matches of the whole project: leave the paths out")
    found = list(pieces(paths=_below(options.paths, tracked()) if options.paths else None))
    if options.sample:
        drawn = [piece for piece in found if piece.kind in ("docstring", "comment")]
        for piece in random.Random(options.seed).sample(drawn, min(options.sample, len(drawn))):
            print(f"{piece.path}:{piece.line} [{piece.kind}]\n    {piece.text}\n")
        return 0
    if options.list:
        for piece in found:
            habits = piece.habits()
            if options.list in habits or (options.list == "all" and habits):
                print(f"{piece.path}:{piece.line}: {', '.join(habits)}: {piece.text}")
        return 0
    if options.accept:
        ALLOWED.write_text(json.dumps(matches_by_file(found), indent=1) + "\n")
        return 0
    if options.check:
        return _check(found)
    if options.by_file:
        for path, number in sorted(matches_by_file(found).items(), key=lambda item: -item[1]):
            print(f"{number:5} {path}")
        return 0
    counted: Counter[str] = Counter(habit for piece in found for habit in piece.habits())
    for habit in HABITS:
        print(f"{counted[habit.name]:6}  {habit.name}")
    touched = sum(1 for piece in found if piece.habits())
    print(f"{touched:6}  of {len(found)} pieces of prose match at least one habit ({100 * touched / len(found):.1f} %)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
