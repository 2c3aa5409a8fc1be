#!/usr/bin/env python3
"""Compares the texts of errors and warnings in the sources with the rows of docs/guides/troubleshooting.md.

Usage: check_error_texts.py ROOT [--list]    exits 1 with a line per fault. --list prints each row with its texts.

The first cell of a row has patterns in code spans: constant parts of a text, with an ellipsis for what lies between them. A
text belongs to every row whose parts it contains in this order. Each text needs a row, and each pattern needs a text. In
the sources a text is a statement's literals, joined by ellipses (error_texts.py).

Each exception of the public headers needs a row in the table of docs/errors.md.

A new text that states what was expected and what was found has a row already, as a wrong argument. For any other add a
row, or a pattern to a row with the same remedy.
"""

import argparse
import pathlib
import re
import sys

import error_texts
import pages

PAGE = "docs/guides/troubleshooting.md"
CLASSES_PAGE = "docs/errors.md"
CLASS = re.compile(r"^class (\w*Error)\b(?: final)? : public ", re.MULTILINE)
MIN_LETTERS_OF_PATTERN = 8


def matcher(pattern):
    """A regular expression that finds the constant parts in order."""
    parts = [re.escape(" ".join(part.split())) for part in pattern.split("…")]
    return re.compile(".*".join(part for part in parts if part))


def rows_of(root):
    """Returns [(line, [(pattern, matcher)])], and faults."""
    rows, faults = [], []
    for line, cells in pages.table_rows(pages.read(root, PAGE)):
        patterns = pages.SPAN.findall(cells[0])
        if not patterns:
            continue
        rows.append((line, [(pattern, matcher(pattern)) for pattern in patterns]))
        faults += [f"{PAGE}:{line}: `{pattern}` has too few letters to find a text by"
                   for pattern in patterns if len(re.findall(r"\w", pattern)) < MIN_LETTERS_OF_PATTERN]
        if len(cells) < 3 or not all(cells[:3]):
            faults.append(f"{PAGE}:{line}: expected a text, its cause and what to do")
    return rows, faults


def classes_without_row(root):
    """Faults for exceptions of the public headers that the table of classes lacks."""
    described = {span for _, cells in pages.table_rows(pages.read(root, CLASSES_PAGE)) for span in pages.SPAN.findall(cells[0])}
    for folder in ("core/include", "frameworks/torch/include"):
        for header in sorted((root / folder).rglob("*.h")):
            for name in CLASS.findall(header.read_text(encoding="utf-8")):
                if name not in described:
                    yield f"{header.relative_to(root)}: {name} has no row in {CLASSES_PAGE}"


def check(root):
    """Returns (faults, {(line, pattern): texts})."""
    rows, faults = rows_of(root)
    faults += classes_without_row(root)
    found = {(line, pattern): [] for line, patterns in rows for pattern, _ in patterns}
    for text in error_texts.all_texts(root):
        hits = [(line, pattern) for line, patterns in rows for pattern, regex in patterns if regex.search(text.text)]
        for hit in hits:
            found[hit].append(text)
        if text.needs_row and not hits:
            faults.append(f"{text} <-- has no row in {PAGE}")
    faults += [f"{PAGE}:{line}: `{pattern}` is in no text of the sources" for (line, pattern), texts in found.items() if not texts]
    return faults, found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("root", type=pathlib.Path)
    parser.add_argument("--list", action="store_true")
    arguments = parser.parse_args()
    faults, found = check(arguments.root)
    if arguments.list:
        for (line, pattern), texts in found.items():
            print(f"{PAGE}:{line}: `{pattern}`", *(f"  {text}" for text in texts), sep="\n")
    print(*faults, sep="\n")
    texts = {text for texts in found.values() for text in texts if text.needs_row}
    print(f"{len(texts)} texts, {len(found)} patterns, {len(faults)} faults")
    return 1 if faults or not texts else 0


if __name__ == "__main__":
    sys.exit(main())
