"""A pass of a Clang tool over each source file of `core` and `launcher`, by the compile commands of a build."""

import argparse
import concurrent.futures
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import tempfile

FOLDERS = ("core", "launcher")
SKIPPED = 77
VERSIONS = ["", *(f"-{version}" for version in range(30, 13, -1))]
# Most of the time goes into these, so they are parsed once.
STANDARD = ("algorithm", "array", "atomic", "chrono", "condition_variable", "deque", "functional", "map", "memory", "mutex",
            "optional", "set", "span", "sstream", "string", "thread", "unordered_map", "variant", "vector")
LANGUAGE = "-std=c++20"


def find_all(program):
    """The program in each version that is installed; Debian's default first."""
    return [found for version in VERSIONS if (found := shutil.which(f"{program}{version}"))]


def options_of(entry):
    """The options of the compile command that Clang needs too."""
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
    """Returns the number of units for which a command fails. command(file, options) returns its words."""
    with tempfile.TemporaryDirectory() as folder:
        standard = []
        if len(todo) > 1:
            standard = ["-include-pch", str(precompile(clang, pathlib.Path(folder)))]
        faults = 0
        with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            for code, printed in pool.map(run, [command(file, standard + options) for file, options in todo]):
                faults += code != 0
                if code:
                    print(printed, flush=True)
    return faults


def main(description, find_tool, command):
    """The main function of a check. find_tool() returns (path of the tool, path of clang++), or None if it is not
    installed; command(tool, root, alone, file, options) returns its words, `alone` for files named on the command line."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("root", type=pathlib.Path)
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("files", nargs="*")
    arguments = parser.parse_args()
    root, build = arguments.root.resolve(), arguments.build.resolve()

    found = find_tool()
    if found is None:
        print("skipped: the tool was not found; 'bash third_party/setup.sh --clang' installs it")
        return SKIPPED
    tool, clang = found
    todo = [(file, [LANGUAGE, f"-I{root}/core", f"-I{root}/core/include"]) for file in arguments.files]
    if not arguments.files:
        todo = sorted(units(root, build))
    alone = bool(arguments.files)
    faults = check_all(clang, todo, lambda file, options: command(tool, root, alone, file, options))
    print(f"{len(todo)} units, {faults} with faults ({tool})")
    return 1 if faults or not todo else 0
