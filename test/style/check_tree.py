#!/usr/bin/env python3
"""Checks the source tree against docs/architecture.md: which layer may include which, and how long files and functions may be.

Usage: check_tree.py ROOT [--longest N]    prints one line per violation; exits 1 when there is one.
"""

import argparse
import pathlib
import re
import sys

FOLDERS = ("core", "frameworks", "launcher", "examples", "bench", "test")
CODE = {".h", ".c", ".cpp", ".cu", ".cuh"}
TEXT = CODE | {".py", ".sh", ".cmake"}
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60

# Libraries that only some folders may include: (pattern of the <include>, allowed prefixes of the path, name).
LIBRARIES = (
    (r"(torch|ATen|c10|caffe2)/", ("frameworks/torch/", "frameworks/python/", "examples/", "test/torch/", "test/examples/", "test/install/",
                                   "test/gpu/", "bench/", "test/fault/", "test/start/", "test/docs/"), "LibTorch"),
    (r"mpi(-ext)?\.h$", ("core/transport/mpi/", "bench/", "test/"), "MPI"),
    (r"(cuda|cuda_runtime|cuda_runtime_api|cuda_fp16|cuda_bf16|nccl|driver_types)\b.*",
     ("core/device/cuda/", "core/backend/nccl/", "test/gpu/", "test/unit/device/cuda/"), "CUDA and NCCL"),
    (r"(ucp|uct|ucs|ucm)/", ("core/transport/ucx/", "test/support/count_ucx_calls.cpp", "bench/ucx_stream.cpp"), "UCX"),
    (r"asio\b", ("core/bootstrap/socket_server.cpp", "launcher/", "test/unit/launcher/"), "Asio"),
    (r"spdlog/", ("core/base/log_spdlog.cpp",), "spdlog"),
    (r"(gtest|gmock)/", ("test/", "bench/"), "GoogleTest"),
)

# Layers above the core, by the longest matching prefix, and what each may include: a layer, or a file. "public" is core/include/hvd.
# The compiler checks the layers within the core: each has an include root of its own (core/CMakeLists.txt).
LAYERS = {
    "core/include/": "public",
    "frameworks/torch/include/": "torch's interface",
    "frameworks/torch/c10d/": "torch/c10d",
    "frameworks/python/": "python",
    "frameworks/torch/tensors/": "torch/tensors",
    "frameworks/torch/operations/": "torch/operations",
    "frameworks/torch/data/": "torch/data",
    "frameworks/torch/layers/": "torch/layers",
    "frameworks/torch/reducer/": "torch/reducer",
    "frameworks/torch/optimizer/": "torch/optimizer",
    "frameworks/torch/sharded/": "torch/sharded",
    "frameworks/torch/start/": "torch/start",
    "frameworks/torch/state/": "torch/state",
    "frameworks/torch/checkpoint/": "torch/checkpoint",
    "frameworks/torch/elastic/": "torch/elastic",
    "frameworks/torch/trainer/": "torch/trainer",
    "frameworks/torch/accelerator/": "torch/accelerator",
    "launcher/system/": "launcher/system",
    "launcher/command/": "launcher/command",
    "launcher/reports/": "launcher/reports",
    "launcher/agent/": "launcher/agent",
    "launcher/mpirun/": "launcher/mpirun",
    "launcher/processes/": "launcher/processes",
    "launcher/elastic/": "launcher/elastic",
    "launcher/nodes/": "launcher/nodes",
    "launcher/doctor/": "launcher/doctor",
    "launcher/": "launcher",
    "examples/": "examples",
    "core/bootstrap/": "bootstrap",
    "core/base/": "base",
    "core/": "core",
}
MAY_INCLUDE = {
    "public": set(),
    "torch's interface": {"public"},
    "torch/tensors": {"base/text.h", "torch's interface", "public"},
    "torch/start": {"base/text.h", "torch's interface", "public"},
    "torch/operations": {"base/text.h", "torch/tensors", "torch's interface", "public"},
    "torch/c10d": {"base/text.h", "torch/operations", "torch/tensors", "torch's interface", "public"},
    "python": {"torch's interface", "public"},
    "torch/data": {"base/text.h", "torch/operations", "torch/tensors", "torch's interface", "public"},
    "torch/layers": {"base/text.h", "torch/operations", "torch/tensors", "torch's interface", "public"},
    "torch/reducer": {"base/text.h", "torch/operations", "torch/tensors", "torch's interface", "public"},
    "torch/optimizer": {"base/text.h", "torch/reducer", "torch/operations", "torch/tensors", "torch's interface", "public"},
    "torch/sharded": {"base/text.h", "torch/optimizer", "torch/reducer", "torch/operations", "torch/tensors",
                      "torch's interface", "public"},
    "torch/state": {"base/text.h", "torch/sharded", "torch/optimizer", "torch/reducer", "torch/data", "torch/operations",
                    "torch/tensors", "torch's interface", "public"},
    "torch/checkpoint": {"base/text.h", "torch/state", "torch/data", "torch/operations", "torch/tensors", "torch's interface", "public"},
    "torch/elastic": {"base/text.h", "torch/checkpoint", "torch/state", "torch/sharded", "torch/optimizer", "torch/reducer", "torch/data", "torch/tensors", "torch's interface", "public"},
    "torch/trainer": {"base/text.h", "torch/accelerator", "torch/checkpoint", "torch/reducer", "torch/operations", "torch's interface", "public"},
    "torch/accelerator": {"base/text.h", "torch/optimizer", "torch/operations", "torch/tensors", "torch's interface", "public"},
    "launcher/system": {"base", "public"},
    "launcher/command": {"launcher/system", "base", "public"},
    "launcher/reports": {"launcher/system", "base", "public"},
    "launcher/agent": {"member/lease.h", "transport/node/life_lock.h", "launcher/command", "launcher/reports", "launcher/system", "base", "public"},
    "launcher/mpirun": {"launcher/agent", "launcher/command", "launcher/reports", "launcher/system",
                        "launcher/processes/job_starter.h", "base", "public"},
    "launcher/processes": {"launcher/agent", "launcher/mpirun", "launcher/command", "launcher/reports", "launcher/system", "bootstrap/store_server.h", "base", "public"},
    "launcher/elastic": {"member/coordinator.h", "member/messages.h", "negotiation/codec.h", "launcher/processes/agent_spawner.h", "launcher/processes/job_output.h", "launcher/agent",
                         "launcher/command", "launcher/reports", "launcher/system", "base", "public"},
    "launcher/nodes": {"bootstrap/socket_store.h", "base", "public"},
    "launcher/doctor": {"launcher/agent/core_share.h", "launcher/mpirun/job_folder.h", "launcher/command", "launcher/reports", "launcher/system", "base", "public"},
    "launcher": {"launcher/agent", "launcher/doctor", "launcher/elastic", "launcher/mpirun", "launcher/command", "launcher/processes", "launcher/system", "base", "public"},
    "examples": {"public", "torch's interface"},
}

# Below these folders a lock is one that Clang's thread safety analysis knows.
LOCKS_WITH_ANNOTATIONS = ("core/", "launcher/")
BARE_LOCK = re.compile(r"\bstd::(mutex|timed_mutex|recursive_mutex|shared_mutex|lock_guard|unique_lock|scoped_lock|shared_lock|"
                       r"condition_variable)\w*")

# The control logic gets time, threads and messages from outside, so that a simulation can own them.
PURE = ("core/negotiation/", "core/member/")
CONTROL_MUST_NOT_INCLUDE = {"thread", "mutex", "condition_variable", "atomic", "future", "semaphore", "iostream",
                            "fstream", "unistd.h"}
CONTROL_MUST_NOT_CALL = re.compile(r"::now\(|\bgetenv\(|\bsleep_for\(|\brand\(|random_device")

# Optional parts are chosen at run time. Variants for an instruction set are not optional parts.
OPTION_MACRO = re.compile(r"^\s*#\s*(?:el)?if(?:n?def)?\b.*\bHVD_(?:HAVE|WITH|BUILD)_(?!AVX|SSE|NEON|F16C)\w+", re.MULTILINE)
MAY_USE_OPTION_MACROS = ("core/bootstrap/backends.cpp", "core/bootstrap/gpu.cpp")
# The language that reads a header, and its version, are no options.
CONDITIONAL = re.compile(r"^\s*#\s*(?!ifdef\s+__cplusplus\s*$|if\s+__cplusplus < 202002L\s*$)(?:el)?if(?:n?def)?\b", re.MULTILINE)
INCLUDE = re.compile(r'^\s*#\s*include\s+(?:"([^"]+)"|<([^>]+)>)', re.MULTILINE)


def blank(match):
    return re.sub(r"[^\n]", " ", match.group(0))


def without_comments(text):
    """The text with comments blanked; line numbers stay."""
    pattern = r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"'
    return re.sub(pattern, lambda m: m.group(0) if m.group(0)[0] == '"' else blank(m), text, flags=re.DOTALL)


def without_literals(text):
    """The code with literals and preprocessor lines blanked as well, for counting braces."""
    text = re.sub(r'R"([^(\s]*)\(.*?\)\1"', blank, text, flags=re.DOTALL)
    text = re.sub(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|(?<![0-9a-fA-F])\'(?:\\.[^\']*|[^\'\\\n])\'', blank, text,
                  flags=re.DOTALL)
    return re.sub(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", blank, text, flags=re.MULTILINE)


def block_kind(header):
    if re.search(r"\b(namespace|extern)\b[^()]*$", header):
        return "scope"
    if re.search(r"\)\s*:(?!:)[^;]*[\w>]\s*$", header) and not re.search(r"\)\s*$", header):
        return "initializer"  # in a constructor's member list
    if header.count("(") > header.count(")"):
        return "other"  # a default argument
    if "(" in header and not re.search(r"=\s*$", header):
        return "function"
    if re.search(r"\b(class|struct|enum|union)\b", header):
        return "scope"
    return "other"


def functions(text):
    """Yields (first line, lines, header) of each outermost function, found by its braces."""
    code = without_literals(text)
    stack = []  # (kind, header, line)
    header = ""
    line = 1
    inside = 0  # depth of function bodies
    for char in code:
        if char == "\n":
            line += 1
        if char == "{":
            kind = "other" if inside else block_kind(header)
            stack.append((kind, header, line))
            inside += kind == "function"
            header = ""
        elif char == "}":
            if not stack:
                return
            kind, opened, first = stack.pop()
            header = ""
            if kind == "function":
                inside -= 1
                yield first, line - first + 1, " ".join(opened.split())[-70:]
            elif kind == "initializer" or opened.count("(") > opened.count(")"):
                header = opened  # the function's own brace is yet to come
        elif char == ";":
            header = ""
        else:
            header += char


def layer_of(path):
    matches = [prefix for prefix in LAYERS if path.startswith(prefix)]
    return LAYERS[max(matches, key=len)] if matches else None


def target_of(root, path, include):
    """The path in the tree that a quoted or angled include means, or None when it is not ours."""
    folder = str(pathlib.PurePosixPath(path).parent) + "/"
    own = "launcher/" if path.startswith(("launcher/", "test/launcher/")) else "frameworks/torch/"
    for base in (folder, own, "core/", "core/include/", "frameworks/torch/include/", ""):
        if (root / (base + include)).is_file():
            return base + include
    return None


def may_include(path, target):
    layer, wanted = layer_of(path), layer_of(target)
    if layer not in MAY_INCLUDE or wanted is None or layer == wanted:
        return True  # tests may look everywhere
    return any(name in (wanted, target.removeprefix("core/")) for name in MAY_INCLUDE[layer])


def check_includes(root, path, text):
    for match in INCLUDE.finditer(without_comments(text)):
        quoted, angled = match.groups()
        include = quoted or angled
        line = text.count("\n", 0, match.start(1 if quoted else 2)) + 1
        for pattern, allowed, name in LIBRARIES:
            if angled and re.match(pattern, angled) and not path.startswith(allowed):
                yield f"{path}:{line}: includes <{angled}>; {name} belongs to {', '.join(allowed)}"
        if path.startswith(PURE) and include in CONTROL_MUST_NOT_INCLUDE:
            yield f"{path}:{line}: includes <{include}>; the control logic has no thread, clock or file"
        target = target_of(root, path, include) if quoted or include.startswith("hvd/") else None
        if target and not may_include(path, target):
            yield f"{path}:{line}: includes \"{include}\"; {layer_of(path)} must not depend on {layer_of(target)}"


def check_file(root, path):
    text = (root / path).read_text(encoding="utf-8")
    lines = text.count("\n")
    if lines > MAX_FILE_LINES:
        yield f"{path}:1: has {lines} lines, at most {MAX_FILE_LINES} are allowed"
    if pathlib.PurePosixPath(path).suffix not in CODE:
        return
    if path.startswith(("core/", "frameworks/", "launcher/")) and layer_of(path) is None:
        yield f"{path}:1: is in no layer; check_tree.py lists them"
    yield from check_includes(root, path, text)
    code = without_comments(text)
    if path not in MAY_USE_OPTION_MACROS and not path.startswith("test/"):
        for match in OPTION_MACRO.finditer(code):
            yield (f"{path}:{text.count(chr(10), 0, match.end()) + 1}: only {' and '.join(MAY_USE_OPTION_MACROS)} may ask "
                   "the preprocessor what was built")
    if "include/hvd/" in path and CONDITIONAL.search(code):
        yield f"{path}:1: a public header must not have #if: its layout would depend on an option"
    if path.startswith(LOCKS_WITH_ANNOTATIONS) and path != "core/base/mutex.h":
        for match in BARE_LOCK.finditer(code):
            yield (f"{path}:{text.count(chr(10), 0, match.start()) + 1}: uses {match.group(0)}; core/base/mutex.h has Mutex, "
                   "MutexLock and Condition, which the compiler checks")
    if path.startswith(PURE) and CONTROL_MUST_NOT_CALL.search(code):
        yield f"{path}:1: the control logic gets time, randomness and settings as arguments"
    for first, length, header in functions(text):
        if length > MAX_FUNCTION_LINES:
            yield f"{path}:{first}: a function of {length} lines, at most {MAX_FUNCTION_LINES} are allowed: {header}"


def sources(root):
    for folder in FOLDERS:
        for file in sorted((root / folder).rglob("*")):
            if file.is_file() and (file.suffix in TEXT or file.name == "CMakeLists.txt"):
                yield file.relative_to(root).as_posix()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("root", type=pathlib.Path)
    parser.add_argument("--longest", type=int, default=0, metavar="N", help="also list the N longest functions")
    arguments = parser.parse_args()

    paths = list(sources(arguments.root))
    violations = [violation for path in paths for violation in check_file(arguments.root, path)]
    print(*violations, sep="\n")
    if arguments.longest:
        found = [(length, path, first, header) for path in paths if pathlib.PurePosixPath(path).suffix in CODE
                 for first, length, header in functions((arguments.root / path).read_text(encoding="utf-8"))]
        for length, path, first, header in sorted(found, reverse=True)[:arguments.longest]:
            print(f"{length:4} lines  {path}:{first}: {header}")
    print(f"{len(paths)} files, {len(violations)} violations")
    return 1 if violations or not paths else 0


if __name__ == "__main__":
    sys.exit(main())
