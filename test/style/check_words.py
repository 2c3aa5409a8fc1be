#!/usr/bin/env python3
"""Checks that the code and the pages use the words of docs/glossary.md, and none of those that they have replaced.

Usage: check_words.py ROOT    prints one line per violation; exits 1 when there is one.
The old words are in words.txt beside this script.
"""

import dataclasses
import pathlib
import re
import sys

FOLDERS = ("bench", "core", "docs", "examples", "frameworks", "launcher", "test")
SUFFIXES = {".h", ".c", ".cpp", ".cu", ".cuh", ".md", ".pml", ".py", ".sh", ".cmake"}
# What was decided and changed is told in the words of its time; and the list itself has to name them.
EXEMPT = ("CHANGELOG.md", "docs/decisions/", "docs/glossary.md", "test/style/", "test/fuzz/corpus/")


@dataclasses.dataclass
class Rule:
    pattern: re.Pattern
    paths: re.Pattern
    instead: str
    allowed: re.Pattern  # where the line, or its path before a colon, has this, the word is another's


def read_rules(text):
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        fields = line.split("\t")
        if len(fields) != 4:
            raise SystemExit(f"words.txt:{number}: expected 4 fields with a tab between them, got {len(fields)}")
        pattern, paths, instead, allowed = fields
        yield Rule(re.compile(pattern), re.compile(paths), instead, re.compile(allowed if allowed != "-" else r"(?!)"))


def violations(root, rules):
    files = [file for pattern in ("*.md", *(f"{folder}/**/*" for folder in FOLDERS)) for file in root.glob(pattern)]
    for file in sorted(files):
        path = file.relative_to(root).as_posix()
        if not file.is_file() or path.startswith(EXEMPT) or file.suffix not in SUFFIXES and file.name != "CMakeLists.txt":
            continue
        mine = [rule for rule in rules if rule.paths.search(path)]
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            for rule in mine:
                found = rule.pattern.search(line)
                if found and not rule.allowed.search(f"{path}:{line}"):
                    yield f"{path}:{number}: \"{found.group(0)}\": write {rule.instead} (docs/glossary.md)"


def main():
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    rules = list(read_rules((pathlib.Path(__file__).parent / "words.txt").read_text(encoding="utf-8")))
    found = list(violations(pathlib.Path(sys.argv[1]), rules))
    print(*found, sep="\n")
    print(f"{len(rules)} rules, {len(found)} violations")
    return 1 if found or not rules else 0


if __name__ == "__main__":
    sys.exit(main())
