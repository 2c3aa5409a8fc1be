#!/usr/bin/env python3
"""Checks the format of the tree: code against .clang-format, no line of it above 100 columns; prose in Markdown at most 120 wide.

Usage: check_format.py ROOT [--fix] [FILE]...    prints one line per violation; exits 1 when there is one, 77 when there is no
clang-format of the version that third_party/setup.sh --clang installs (others format differently).
  --fix  formats the code instead, and wraps the prose
Without a FILE: the whole tree.
"""

import argparse
import concurrent.futures
import os
import pathlib
import re
import shutil
import subprocess
import sys
import textwrap

FOLDERS = ("bench", "core", "docs", "examples", "frameworks", "launcher", "test", "third_party")
CODE = {".h", ".c", ".cpp", ".cu", ".cuh"}
CODE_COLUMNS = 100
PROSE_COLUMNS = 120
SKIPPED = 77


def wanted_version(root):
    setup = (root / "third_party/setup.sh").read_text(encoding="utf-8")
    return re.search(r"^clang_format_version=(\S+)$", setup, re.MULTILINE).group(1)


def all_files(root):
    for pattern in ("*.md", *(f"{folder}/**/*" for folder in FOLDERS)):
        for file in sorted(root.glob(pattern)):
            if file.is_file() and (file.suffix in CODE or file.suffix == ".md"):
                yield file.relative_to(root).as_posix()


def find_clang_format(root):
    """The program of the wanted version, or None."""
    # The wheel's program is behind a script that costs more time than it.
    wheels = root.glob(".venv/lib/python3*/site-packages/clang_format/data/bin/clang-format")
    for candidate in (*wheels, shutil.which("clang-format")):
        if candidate is None or not pathlib.Path(candidate).exists():
            continue
        answer = subprocess.run([candidate, "--version"], stdout=subprocess.PIPE, text=True, check=False).stdout
        if re.search(rf"version {re.escape(wanted_version(root))}\b", answer):
            return str(candidate)
    return None


def format_code(program, root, files, fix):
    """Yields a violation per file that is formatted otherwise; with `fix` formats them."""
    def run(chunk):
        how = ["-i"] if fix else ["--dry-run", "--Werror"]
        result = subprocess.run([program, *how, *chunk], cwd=root, stderr=subprocess.PIPE, text=True, check=fix)
        return re.findall(r"^(.*?):(\d+):\d+: error: code should be", result.stderr, re.MULTILINE)
    chunks = [files[at:at + 32] for at in range(0, len(files), 32)]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for found in pool.map(run, chunks):
            first_of = dict(reversed(found))
            yield from (f"{file}:{line}: is not formatted" for file, line in sorted(first_of.items()))


def long_lines(file, text):
    for number, line in enumerate(text.splitlines(), 1):
        if len(line) > CODE_COLUMNS:
            yield f"{file}:{number}: has {len(line)} columns, at most {CODE_COLUMNS} are allowed"


def is_free(line):
    """May be as wide as it likes: a table, or what has no blank to break at."""
    return line.lstrip().startswith("|") or not re.search(r"\S\s+\S", re.sub(r"^\s*([-*]|\d+\.|>)\s+", "", line))


def paragraphs(text):
    """Yields (number of the first line, its lines, whether it is prose) of the pieces of a page, in order."""
    lines = text.split("\n")
    at = 0
    while at < len(lines):
        first, line = at, lines[at]
        at += 1
        if line.lstrip().startswith("```"):
            while at < len(lines) and not lines[at].lstrip().startswith("```"):
                at += 1
            at += 1
            yield first + 1, lines[first:at], False
        elif re.match(r" {4}|\t", line) or not line.strip() or line.startswith(("#", "|", "<")):
            yield first + 1, [line], False
        else:
            while at < len(lines) and lines[at].strip() and not re.match(r"\s*([-*+]|\d+\.)\s|#|\||```|<", lines[at]):
                at += 1
            yield first + 1, lines[first:at], True


def wrapped(lines):
    """The paragraph's lines anew, when one is too long; the others are indented as its first line is."""
    if all(len(line) <= PROSE_COLUMNS or is_free(line) for line in lines):
        return lines
    bullet = re.match(r"\s*(?:(?:[-*+]|\d+\.)\s+)?", lines[0]).group(0)
    text = " ".join(line.strip() for line in lines)[len(bullet.lstrip()):]
    # Short code and the texts of links stay on one line, to be found by a search.
    text = re.sub(r"`[^`]{1,60}`|\[[^]]{1,50}\]\(", lambda match: match.group(0).replace(" ", "\0"), text)
    pieces = textwrap.wrap(text, PROSE_COLUMNS, initial_indent=bullet, subsequent_indent=" " * len(bullet),
                           break_long_words=False, break_on_hyphens=False)
    return [piece.replace("\0", " ") for piece in pieces]


def check_prose(file, text):
    for first, lines, prose in paragraphs(text):
        for number, line in enumerate(lines, first):
            if prose and len(line) > PROSE_COLUMNS and not is_free(line):
                yield f"{file}:{number}: has {len(line)} columns of prose, at most {PROSE_COLUMNS} are allowed"


def wrap_prose(text):
    return "\n".join(line for _, lines, prose in paragraphs(text) for line in (wrapped(lines) if prose else lines))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("root", type=pathlib.Path)
    parser.add_argument("files", nargs="*")
    parser.add_argument("--fix", action="store_true")
    arguments = parser.parse_intermixed_args()  # pre-commit puts the files behind --fix
    root = arguments.root.resolve()
    files = arguments.files or list(all_files(root))
    program = find_clang_format(root)
    if program is None:
        print(f"no clang-format {wanted_version(root)}: bash third_party/setup.sh --clang installs it")
        return SKIPPED

    code = [file for file in files if pathlib.PurePosixPath(file).suffix in CODE]
    violations = list(format_code(program, root, code, arguments.fix))
    for file in code:
        violations += long_lines(file, (root / file).read_text(encoding="utf-8"))
    pages = [file for file in files if file.endswith(".md")]
    for file in pages:
        if arguments.fix:
            text = (root / file).read_text(encoding="utf-8")
            (root / file).write_text(wrap_prose(text), encoding="utf-8")
        violations += check_prose(file, (root / file).read_text(encoding="utf-8"))
    print(*violations, sep="\n")
    if violations and not arguments.fix:
        print("mend it with: python3 test/style/check_format.py . --fix")
    print(f"{len(code)} files of code and {len(pages)} pages, {len(violations)} violations")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
