#!/usr/bin/env python3
"""Has Clang check which lock each field and function of `core` and `launcher` needs (core/base/mutex.h), by
the compile commands of a build.

Usage: check_thread_safety.py ROOT BUILD [FILE]...

With FILEs it looks at these alone, with the options of core. Prints Clang's warnings; exits 1 when there is one,
77 when Clang is not installed.
"""

import sys

import clang_pass


def find_tool():
    return next(((clang, clang) for clang in clang_pass.find_all("clang++")), None)


def command(clang, _root, _alone, file, options):
    return [clang, "-fsyntax-only", "-Wthread-safety", "-Werror", *options, file]


if __name__ == "__main__":
    sys.exit(clang_pass.main(__doc__.splitlines()[0], find_tool, command))
