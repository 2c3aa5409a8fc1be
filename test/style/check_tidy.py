#!/usr/bin/env python3
"""Has clang-tidy look at `core` and `launcher`, with the checks of .clang-tidy, by the compile commands of a build.

Usage: check_tidy.py ROOT BUILD [FILE]...

With FILEs it looks at these alone, with the options of core. Prints what clang-tidy says; exits 1 when that is anything,
77 when it is not installed. Of the checks, those that need a new look at every path through a function are not in the
list: they take minutes.
"""

import argparse
import pathlib
import re
import shutil
import subprocess
import sys

from check_thread_safety import LANGUAGE, SKIPPED, check_all, units

# With the clang++ of the same version, whose precompiled headers it reads.
VERSIONS = ["", *(f"-{version}" for version in range(30, 13, -1))]


def version_of(program):
    said = subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout
    return re.search(r"version (\d+)", said).group(1)


def find_tools():
    tidies = [found for version in VERSIONS if (found := shutil.which(f"clang-tidy{version}"))]
    clangs = [found for version in VERSIONS if (found := shutil.which(f"clang++{version}"))]
    return next(((tidy, clang) for tidy in tidies for clang in clangs if version_of(tidy) == version_of(clang)),
                (None, None))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("root", type=pathlib.Path)
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("files", nargs="*")
    arguments = parser.parse_args()
    root, build = arguments.root.resolve(), arguments.build.resolve()

    tidy, clang = find_tools()
    if tidy is None:
        print("skipped: no clang-tidy with its clang++ was found; 'bash third_party/setup.sh --clang' installs them")
        return SKIPPED
    todo = [(file, [LANGUAGE, f"-I{root}/core", f"-I{root}/core/include"]) for file in arguments.files]
    if not arguments.files:
        todo = sorted(units(root, build))
    own = [tidy, "--quiet", f"--config-file={root}/.clang-tidy"]
    if arguments.files:
        own.append("--header-filter=.*")
    faults = check_all(clang, todo, lambda file, options: [*own, file, "--", *options])
    print(f"{len(todo)} units, {faults} with faults ({tidy})")
    return 1 if faults or not todo else 0


if __name__ == "__main__":
    sys.exit(main())
