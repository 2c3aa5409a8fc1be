#!/usr/bin/env python3
"""Measures how plainly the comments and the pages are written: the rates of words that well-kept code bases hardly use.

Usage: check_words.py ROOT [--list [FOLDER]]    prints the rates; exits 1 when one is above its limit.
  --list   also prints each place, below FOLDER only if one is given.

A rate is the number of uses per 1,000 words. CONTRIBUTING.md has the rules that these limits stand for. The limits are
those that gloo, tensorpipe, LevelDB, Horovod, UCC, NCCL and others meet.
"""

import argparse
import pathlib
import re
import sys

FOLDERS = ("bench", "core", "examples", "frameworks", "launcher", "test")
CODE = {".h", ".c", ".cpp", ".cu", ".cuh"}
# Files whose texts quote other words, or hold words that are data.
EXEMPT = ("test/style/", "test/fuzz/corpus/", "CONTRIBUTING.md")

LIMITS = (  # (name, pattern, uses per 1,000 words at most)
    ("nothing", r"\bnothing\b", 0.7),
    ("nobody, somebody, whoever, whom", r"\b(nobody|somebody|whoever|whom|whomever)\b", 0.0),
    ("what is", r"\bwhat is\b", 0.2),
    ("none", r"\bnone\b", 0.4),
    ("says", r"\bsays\b", 0.2),
    ("who", r"\bwho\b", 0.3),
    # A sentence that begins with "Of" or with a clause in place of its subject has to be read twice.
    ("clause as subject", r"(?:^|(?<=[.:;!?] ))(?:Of|Whom|Whose|Whoever|One that|(?:What|Who|That) (?!follows|(?:[^.?!]|\.\w)*\?))\b", 0.1),
)
COMMENT = re.compile(r'"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'|(?P<line>(?://[^\n]*(?:\n[ \t]*|$))+)|(?P<block>/\*.*?\*/)', re.DOTALL)
FENCE = re.compile(r"^```.*?^```|^ {4}[^\n]*$|`[^`\n]*`|\]\([^)]*\)", re.DOTALL | re.MULTILINE)


def comments(text):
    """Yields (line number, prose) of each comment; neighbouring lines are one comment."""
    for match in COMMENT.finditer(text):
        if match.group("line") or match.group("block"):
            # A quoted word is a name or a message, and a line that is indented is code or a table.
            lines = [line for line in re.sub(r"^[ \t]*(?:///?<?|/\*\*?<?|\*/?)", "", match.group(0), flags=re.MULTILINE).split("\n")
                     if not line.startswith("   ")]
            prose = re.sub(r"`[^`]*`|\"[^\"]*\"", " x ", " ".join(lines))
            yield text.count("\n", 0, match.start()) + 1, " ".join(prose.split())


def paragraphs(text):
    """Yields (line number, prose) of each paragraph, list item or table cell of a page."""
    text = FENCE.sub(lambda match: re.sub(r"[^\n]", " ", match.group(0)), text)
    for match in re.finditer(r"(?:[^\n]+\n?)+?(?=\n|\Z|[ \t]*[-*|#])", text):
        for cell in match.group(0).split("|"):
            prose = " ".join(re.sub(r"^[\s*#>-]+|\"[^\"]*\"", " ", cell).split())
            if prose:
                yield text.count("\n", 0, match.start()) + 1, prose


def texts(root):
    """Yields (kind, path, line, prose) of all that is measured."""
    for folder in FOLDERS:
        for file in sorted((root / folder).rglob("*")):
            path = file.relative_to(root).as_posix()
            if file.suffix in CODE and not path.startswith(EXEMPT):
                for line, prose in comments(file.read_text(encoding="utf-8")):
                    yield "comments", path, line, prose
    for file in sorted(file for pattern in ("*.md", "docs/**/*.md", "bench/*.md", "third_party/*.md") for file in root.glob(pattern)):
        path = file.relative_to(root).as_posix()
        if not path.startswith(EXEMPT):
            for line, prose in paragraphs(file.read_text(encoding="utf-8")):
                yield "pages", path, line, prose


def measure(root):
    """Returns {kind: words} and {(kind, name): [(path, line, words around)]}."""
    words = {"comments": 0, "pages": 0}
    uses = {(kind, name): [] for kind in words for name, _, _ in LIMITS}
    patterns = [(name, re.compile(pattern, 0 if name == "clause as subject" else re.IGNORECASE)) for name, pattern, _ in LIMITS]
    for kind, path, line, prose in texts(root):
        words[kind] += len(re.findall(r"[A-Za-z][A-Za-z'-]*", prose))
        for name, pattern in patterns:
            for match in pattern.finditer(prose):
                uses[kind, name].append((path, line, prose[max(0, match.start() - 30):match.end() + 50]))
    return words, uses


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("root", type=pathlib.Path)
    parser.add_argument("--list", nargs="?", const="", metavar="FOLDER")
    arguments = parser.parse_args()

    words, uses = measure(arguments.root)
    failed = not all(words.values())
    for kind in words:
        print(f"{kind}: {words[kind]} words")
        for name, _, limit in LIMITS:
            rate = 1000 * len(uses[kind, name]) / max(words[kind], 1)
            failed = failed or rate > limit
            print(f"  {rate:6.2f} (at most {limit:.1f})  {name}{'  <-- too many' if rate > limit else ''}")
            if arguments.list is not None:
                for path, line, around in uses[kind, name]:
                    if path.startswith(arguments.list):
                        print(f"    {path}:{line}: ...{around}...")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
