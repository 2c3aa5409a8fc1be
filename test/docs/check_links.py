#!/usr/bin/env python3
"""Looks up the links of all pages: files, and the headings that an anchor names.

Usage: check_links.py ROOT    prints one line per broken link; exits 1 when there is one.

Every page of docs/ must be linked from docs/README.md.
"""

import pathlib
import re
import sys

import pages

LINK = re.compile(r"\]\(([^)\s]+)\)")
EVERY_PAGE = pages.USER_PAGES + pages.DEVELOPER_PAGES + pages.OTHER_PAGES + ("CHANGELOG.md",)
INDEX = "docs/README.md"
NOT_IN_INDEX = ("docs/README.md", "docs/reference/main_page.md")


def anchors_of(root, path):
    """The anchors that GitHub gives the headings of a page."""
    found = []
    for _, line in pages.read(root, path).text:
        if re.match(r"#+ ", line):
            title = re.sub(r"\]\([^)]*\)", "", line.lstrip("#").strip())
            anchor = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
            found.append(anchor if anchor not in found else f"{anchor}-{found.count(anchor)}")
    return found


def links_of(root, path):
    """Yields (line, target file below root, anchor) of each link to a file."""
    for line, text in pages.read(root, path).text:
        for link in LINK.findall(re.sub(r"`[^`]*`", "", text)):
            if not re.match(r"[a-z]+:", link):
                file, _, anchor = link.partition("#")
                target = (root / path).parent / file if file else root / path
                yield line, target.resolve(), anchor


def check(root):
    root = root.resolve()
    linked = set()
    for path in pages.pages_of(root, EVERY_PAGE):
        for line, target, anchor in links_of(root, path):
            if not target.exists():
                yield f"{path}:{line}: there is no {target.relative_to(root) if target.is_relative_to(root) else target}"
                continue
            if path == INDEX:
                linked.add(target.relative_to(root).as_posix())
            if anchor and target.suffix == ".md" and anchor not in anchors_of(root, target.relative_to(root).as_posix()):
                yield f"{path}:{line}: {target.relative_to(root)} has no heading '#{anchor}'"
    for path in pages.pages_of(root, ("docs/**/*.md",)):
        if path not in linked and path not in NOT_IN_INDEX:
            yield f"{path}:1: is not linked from {INDEX}"


def main():
    faults = list(check(pathlib.Path(sys.argv[1])))
    print(*faults, sep="\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
