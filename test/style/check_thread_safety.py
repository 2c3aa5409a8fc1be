#!/usr/bin/env python3
"""Has Clang check which lock each field and function of `core` and `launcher` needs (core/base/thread_annotations.h), by
the compile commands of a build.

Usage: check_thread_safety.py ROOT BUILD [FILE]...

With FILEs it looks at these alone, with the options of core. Prints what Clang says; exits 1 when that is anything,
77 when Clang is not installed.
"""

import argparse
import concurrent.futures
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile

FOLDERS = ("core", "launcher")
SKIPPED = 77
CLANGS = ["clang++"] + [f"clang++-{version}" for version in range(30, 13, -1)]
# Most of the time goes into these, so they are parsed once.
STANDARD = ("algorithm", "array", "atomic", "chrono", "condition_variable", "deque", "functional", "map", "memory", "mutex",
            "optional", "set", "span", "sstream", "string", "thread", "unordered_map", "variant", "vector")
LANGUAGE = "-std=c++20"


def find_clang():
    return next((found for found in map(shutil.which, CLANGS) if found), None)


def options_of(entry):
    """What the file is compiled with that Clang has to know too."""
    words = shlex.split(entry["command"]) if "command" in entry else entry["arguments"]
    options = []
    for index, word in enumerate(words):
        if word == "-isystem":
            options += words[index:index + 2]
        elif word.startswith(("-D", "-U", "-I", "-std=")):
            options.append(word)
    return options


def units(root, build):
    """(file, options) of each source file of FOLDERS, several in one where the build compiles them so; once each."""
    folders = tuple(f"{root}/{folder}/" for folder in FOLDERS)
    seen = set()
    for entry in json.loads((build / "compile_commands.json").read_text(encoding="utf-8")):
        file = os.path.normpath(os.path.join(entry["directory"], entry["file"]))
        if not file.endswith((".cpp", ".cxx")):
            continue
        sources = [file]
        if file.startswith(f"{build}/"):
            sources = re.findall(r'^#include "([^"]+)"', pathlib.Path(file).read_text(encoding="utf-8"), re.MULTILINE)
        sources = {source for source in sources if source.startswith(folders)}
        if sources - seen:
            seen |= sources
            yield file, options_of(entry)


def precompile(clang, folder):
    header = folder / "standard.h"
    header.write_text("".join(f"#include <{name}>\n" for name in STANDARD), encoding="utf-8")
    compiled = folder / "standard.pch"
    subprocess.run([clang, LANGUAGE, "-x", "c++-header", header, "-o", compiled], check=True)
    return compiled


def run(words):
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return done.returncode, (done.stdout + done.stderr).strip()


def check_all(clang, todo, command):
    """How many of the units a command finds fault with. command(file, options): its words."""
    with tempfile.TemporaryDirectory() as folder:
        standard = []
        if len(todo) > 1:
            standard = ["-include-pch", str(precompile(clang, pathlib.Path(folder)))]
        faults = 0
        with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            for code, said in pool.map(run, [command(file, standard + options) for file, options in todo]):
                faults += code != 0
                if code:
                    print(said, flush=True)
    return faults


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("root", type=pathlib.Path)
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("files", nargs="*")
    arguments = parser.parse_args()
    root, build = arguments.root.resolve(), arguments.build.resolve()

    clang = find_clang()
    if clang is None:
        print("skipped: clang++ was not found; 'bash third_party/setup.sh --clang' installs it")
        return SKIPPED
    todo = [(file, [LANGUAGE, f"-I{root}/core", f"-I{root}/core/include"]) for file in arguments.files]
    if not arguments.files:
        todo = sorted(units(root, build))
    faults = check_all(clang, todo, lambda file, options: [clang, "-fsyntax-only", "-Wthread-safety", "-Werror",
                                                           *options, file])
    print(f"{len(todo)} units, {faults} with faults ({clang})")
    return 1 if faults or not todo else 0


if __name__ == "__main__":
    sys.exit(main())
