#!/usr/bin/env python3
"""Counts the files and lines of each top folder, and the type names of the product.

Usage: count_code.py ROOT [--names]
  --names   also prints each name that several types have, with their files

The files are those that git tracks. A type is a class, struct, union or enum with a body; an alias is a `using NAME =`.
Nested types count. Types of tests, examples and bench are not counted.
"""

import argparse
import collections
import pathlib
import re
import subprocess
import sys

CODE = {".h", ".c", ".cpp", ".cu", ".cuh"}
PRODUCT = ("core", "frameworks", "launcher")
ATTRIBUTES = r"(?:\[\[\w+\]\]\s+|alignas\([^)]*\)\s+|[A-Z_]+\([^)]*\)\s+|HVD_\w+\s+)*"
TYPE = re.compile(rf"^\s*(?:template\s*<[^;{{]*>\s*)?(?:class|struct|union|enum(?:\s+class|\s+struct)?)\s+{ATTRIBUTES}"
                  r"([A-Za-z_]\w*(?:::\w+)*)\s*(?:final\s*)?(?::[^:;{][^;{]*)?\{", re.MULTILINE)
ALIAS = re.compile(r"^\s*using\s+([A-Z]\w*)\s*=", re.MULTILINE)


def sources(root):
    listed = subprocess.run(["git", "-C", root, "ls-files"], check=True, stdout=subprocess.PIPE, text=True).stdout
    return [path for path in listed.splitlines() if pathlib.PurePosixPath(path).suffix in CODE and (root / path).is_file()]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("root", type=pathlib.Path)
    parser.add_argument("--names", action="store_true")
    arguments = parser.parse_args()

    files, lines = collections.Counter(), collections.Counter()
    types = collections.defaultdict(list)
    aliases = set()
    for path in sources(arguments.root):
        text = (arguments.root / path).read_text(encoding="utf-8")
        folder = path.split("/")[0]
        files[folder] += 1
        lines[folder] += text.count("\n")
        if folder in PRODUCT:
            code = re.sub(r"//.*", "", text)
            for name in TYPE.findall(code):
                types[name].append(path)
            aliases.update(ALIAS.findall(code))
    rows = [(folder, files[folder], lines[folder]) for folder in sorted(files)]
    rows.append(("product", sum(files[folder] for folder in PRODUCT), sum(lines[folder] for folder in PRODUCT)))
    for folder, count, length in rows:
        print(f"{folder:12} {count:4} files {length:6} lines")
    repeated = {name: places for name, places in sorted(types.items()) if len(places) > 1}
    print(f"{sum(map(len, types.values()))} types with {len(types)} names, {len(aliases)} names of aliases; "
          f"{len(repeated)} names of several types")
    if arguments.names:
        for name, places in repeated.items():
            print(f"  {name}: {', '.join(places)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
