#!/usr/bin/env python3
"""Has clang-tidy look at `core` and `launcher`, with the checks of .clang-tidy, by the compile commands of a build.

Usage: check_tidy.py ROOT BUILD [FILE]...

With FILEs it looks at these alone, with the options of core. Prints clang-tidy's warnings; exits 1 when there is one,
77 when it is not installed. Of the checks, those that need a new look at every path through a function are not in the
list: they take minutes.
"""

import re
import subprocess
import sys

import clang_pass


def version_of(program):
    printed = subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout
    return re.search(r"version (\d+)", printed).group(1)


def find_tool():
    """With the clang++ of the same version, whose precompiled headers it reads."""
    return next(((tidy, clang) for tidy in clang_pass.find_all("clang-tidy") for clang in clang_pass.find_all("clang++")
                 if version_of(tidy) == version_of(clang)), None)


def command(tidy, root, alone, file, options):
    own = [tidy, "--quiet", f"--config-file={root}/.clang-tidy"]
    return [*own, *(["--header-filter=.*"] if alone else []), file, "--", *options]


if __name__ == "__main__":
    sys.exit(clang_pass.main(__doc__.splitlines()[0], find_tool, command))
