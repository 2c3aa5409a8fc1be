#!/usr/bin/env python3
"""Compiles the code in the pages: every block of C++ and C, and the calls in the guides' tables.

Usage: check_code_blocks.py ROOT BUILD [--keep FILE]    exits 1 with a line "page:line: error" per fault, 77 if BUILD has
no LibTorch. --keep also writes the C++ that is compiled to FILE.

All blocks of C++ are one translation unit, because LibTorch's headers take most of the time. Names that a page leaves out,
such as `train_set`, are declared in prelude.h. A comment on a line of its own before a block describes it:

    <!-- code: definitions -->             at the scope of a namespace; otherwise the block is the body of a function
    <!-- code: global -->                  outside of every namespace, for specialisations of hvd's templates
    <!-- code: continues -->               the body goes on from the block before it on the page
    <!-- code: not compiled: REASON -->    at most MAX_NOT_COMPILED blocks

A block with an #include is a whole file. In a page with the comment `<!-- code: the last column of tables -->` the code
spans of that column are compiled as well: a statement (with its `;`), an expression, or options in braces. In every page
for users the names that begin with `hvd::` must be declared in the public headers.

Shell blocks are read by `bash -n`, Python blocks by Python. Every block must name its language.
"""

import argparse
import json
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile

import pages

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "style"))
import clang_pass

LANGUAGES = {"cpp", "c", "sh", "python", "cmake", "text"}
MAX_NOT_COMPILED = 3
TABLES = "the last column of tables"
# Names that begin with hvd:: and are targets of CMake.
TARGETS = {"hvd::core", "hvd::torch"}
# Namespaces below hvd, of which a using-declaration cannot name one.
NAMESPACES = {"hvd::elastic"}
# Spans in a table that are no C++: commands, variables, headers, files.
NOT_CPP = re.compile(r"^(hvdrun|torchrun|mpirun|#include|HVD_|\./|-|[\w./-]+\.(md|json|h|yaml)$)")
WARNINGS = ["-Wall", "-Wextra", "-Werror", "-Wno-unused-variable", "-Wno-unused-but-set-variable", "-Wno-unused-parameter",
            "-Wno-unused-value", "-Wno-unused-function", "-Wno-unused-local-typedefs"]


def compiler_of(entry):
    """The compiler of a compile command."""
    words = shlex.split(entry["command"]) if "command" in entry else entry["arguments"]
    return next(word for word in words if re.search(r"(\+\+|cxx)[\w.-]*$", word) and not word.startswith("-"))


def torch_command(build):
    """(compiler, options) of a file that uses LibTorch, or None."""
    file = build / "compile_commands.json"
    for entry in json.loads(file.read_text(encoding="utf-8")) if file.is_file() else []:
        if "csrc/api/include" in (entry.get("command") or " ".join(entry["arguments"])):
            return compiler_of(entry), clang_pass.options_of(entry)
    return None


def located(number, page, code):
    return f'#line {number} "{page}"\n{code}\n'


class Unit:
    """Collects the C++ of all pages."""

    def __init__(self):
        self.includes, self.parts, self.faults, self.skipped = [], [], [], []
        self.open = False  # a function that the next block may continue

    def close(self):
        if self.open:
            self.parts.append("}\n}\n")
        self.open = False

    def begin(self):
        self.close()
        self.parts.append(f"namespace block_{len(self.parts)} {{\nusing namespace docs;\n")

    def add(self, block):
        directive, code = block.directive, block.code
        if directive.startswith("not compiled: ") and len(directive) > 30:
            self.skipped.append(block)
            return
        if directive == "continues":
            if not self.open:
                self.faults.append(f"{block.place}: continues, but no block of the page is before it")
                return
            self.parts.append(located(block.line, block.page, code))
            return
        if "#include" in code:
            self.includes += re.findall(r"^#include .*$", code, re.MULTILINE)
            code = re.sub(r"^#include .*$", "", code, flags=re.MULTILINE)
            code = re.sub(r"\bint main\(", "auto program(", code)
            directive = directive or "definitions"
        if directive == "global":
            self.close()
            self.parts.append("using namespace docs;\n" + located(block.line, block.page, code))
        elif directive == "definitions":
            self.begin()
            self.parts.append(located(block.line, block.page, code) + "}\n")
        elif not directive:
            self.begin()
            self.parts.append("void code() {\n" + located(block.line, block.page, code))
            self.open = True
        else:
            self.faults.append(f"{block.place}: expected 'definitions', 'global', 'continues' or 'not compiled: REASON' with a "
                               f"reason, got '{directive}'")

    def add_cell(self, page, line, spans):
        """The code spans of a table's cell: the body of one function."""
        code = [located(line, page, statement) for span in spans if (statement := statement_of(span))]
        if code:
            self.begin()
            self.parts.append("void code() {\n" + "".join(code) + "}\n}\n")

    def add_names(self, names):
        """names: {name: (page, line)}, each of which begins with hvd::"""
        self.begin()
        self.parts.append("void names() {\n" + "".join(located(line, page, declaration_of(name))
                                                        for name, (page, line) in sorted(names.items())) + "}\n}\n")

    def text(self):
        self.close()
        includes = "".join(f"{line}\n" for line in dict.fromkeys(self.includes))
        return '#include "test/docs/prelude.h"\n' + includes + "".join(self.parts)


def declaration_of(name):
    """C++ that compiles if the name is declared."""
    return f"{{ namespace named = {name}; }}" if name in NAMESPACES else f"{{ using {name}; }}"


def statement_of(span):
    """C++ that compiles if the span is right, or None if it is no C++."""
    if NOT_CPP.match(span) or not re.search(r"[(;:{=]", span):
        return None
    if span.startswith("{.") or span.startswith(".") and "=" in span:
        values = span if span.startswith("{") else "{" + span + "}"
        return f"static_assert(fits_options([]<class T>() {{ return requires {{ T{values}; }}; }}));"
    if re.fullmatch(r"[\w:]+", span):
        return None  # a name alone, which add_names() has if it is hvd's
    return span if span.endswith((";", "}")) else f"static_cast<void>({span});"


def names_in(page):
    """Yields (line, name) of each name of namespace hvd that the page's text mentions."""
    for number, line in page.text:
        for span in pages.SPAN.findall(line):
            for name in re.findall(r"(?<![\w:])hvd::\w+(?:::\w+)*", span):
                if "::".join(name.split("::")[:2]) not in TARGETS:
                    yield number, name


def run(words, **options):
    return subprocess.run(words, capture_output=True, text=True, check=False, **options)


def shell_faults(block):
    done = run(["bash", "-n"], input=block.code)
    return [f"{block.page}:{block.line + int(line) - 1}: {text}"
            for line, text in re.findall(r"line (\d+): (.*)", done.stderr)][:1] if done.returncode else []


def python_faults(block):
    try:
        compile(block.code, block.page, "exec")
    except SyntaxError as error:
        return [f"{block.page}:{block.line + (error.lineno or 1) - 1}: {error.msg}"]
    return []


def c_faults(root, block):
    """A block of C by itself; without an #include it is the body of a function."""
    code = located(block.line, block.page, block.code)
    if "#include" not in block.code:
        code = '#include "test/docs/prelude_c.h"\nint code(int rank) {\n' + code + "return 0;\n}\n"
    done = run(["cc", "-std=c99", "-fsyntax-only", "-pedantic", "-Icore/include", "-I.", "-x", "c", *WARNINGS, "-"], input=code,
               cwd=root)
    return errors_in(done.stderr) if done.returncode else []


def errors_in(output):
    return [line for line in output.splitlines() if re.match(r"\S+:\d+:\d+: (fatal )?error", line)] or [output]


def collect(root):
    """Reads all pages. Returns (Unit of C++, blocks of other languages, faults)."""
    unit, others, faults, names = Unit(), [], [], {}
    user = [path for path in pages.pages_of(root, pages.USER_PAGES) if path not in pages.DEVELOPER_PAGES]
    headers = "\n".join(file.read_text(encoding="utf-8") for folder in ("core/include", "frameworks/torch/include")
                        for file in (root / folder).rglob("*.h"))
    known = set(re.findall(r"\w+", headers)).__contains__
    for path in pages.pages_of(root, pages.USER_PAGES + pages.DEVELOPER_PAGES + pages.OTHER_PAGES):
        page = pages.read(root, path)
        unit.close()
        faults += page.faults
        for block in page.blocks:
            if block.language not in LANGUAGES:
                faults.append(f"{block.place}: unknown language '{block.language}'; expected one of {', '.join(sorted(LANGUAGES))}")
            unit.add(block) if block.language == "cpp" else others.append(block)
        tables = [directive for _, directive in page.directives if directive == TABLES]
        faults += [f"{path}:{line}: '{directive}' is before no block" for line, directive in page.directives if directive != TABLES]
        if tables:
            for line, cells in pages.table_rows(page):
                spans = [span.replace("\\|", "|") for span in pages.SPAN.findall(cells[-1])]
                unit.add_cell(path, line, spans)
                faults += [f"{path}:{line}: `{span}` is in no public header" for span in spans
                           if re.fullmatch(r"[.a-z]\w*", span) and not known(span.strip("."))]
        if path in user:
            for line, name in names_in(page):
                names.setdefault("::".join(name.split("::")[:2]), (path, line))
                if not known(name.split("::")[-1]):
                    faults.append(f"{path}:{line}: `{name}` is in no public header")
    unit.add_names(names)
    if len(unit.skipped) > MAX_NOT_COMPILED:
        faults += [f"{block.place}: not compiled, and at most {MAX_NOT_COMPILED} blocks may be" for block in unit.skipped]
    return unit, others, faults + unit.faults


def check(root, command, keep=None):
    """Returns (faults, counts) of the pages below root. command: (compiler, options)."""
    unit, others, faults = collect(root)
    readers = {"sh": shell_faults, "python": python_faults, "c": lambda block: c_faults(root, block)}
    for block in others:
        faults += readers.get(block.language, lambda _: [])(block)
    with tempfile.TemporaryDirectory() as folder:
        file = keep or pathlib.Path(folder) / "pages.cpp"
        file.write_text(unit.text(), encoding="utf-8")
        compiler, options = command
        limit = "-ferror-limit=200" if "clang" in pathlib.Path(compiler).name else "-fmax-errors=200"
        done = run([compiler, *options, f"-I{root}", "-fsyntax-only", limit, *WARNINGS, str(file)], cwd=root)
    faults += errors_in(done.stderr) if done.returncode else []
    pieces = sum(1 for part in unit.parts if "#line" in part)
    return faults, {"pieces of C++": pieces, "blocks of other languages": len(others), "not compiled": len(unit.skipped)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("root", type=pathlib.Path)
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("--keep", type=pathlib.Path, metavar="FILE")
    arguments = parser.parse_args()
    command = torch_command(arguments.build)
    if command is None:
        print(f"skipped: {arguments.build} has no compile command with LibTorch")
        return 77

    faults, counts = check(arguments.root.resolve(), command, arguments.keep)
    print(*faults, sep="\n")
    print(", ".join(f"{count} {name}" for name, count in counts.items()), f"{len(faults)} faults", sep=", ")
    return 1 if faults or not counts["pieces of C++"] else 0


if __name__ == "__main__":
    sys.exit(main())
