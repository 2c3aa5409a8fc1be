"""The pages of hvd as text: fenced blocks with the comments before them, code spans, table rows."""

import dataclasses
import pathlib
import re

# Pages for users, in which every name of hvd must be public.
USER_PAGES = ("README.md", "examples/README.md", "docs/*.md", "docs/guides/*.md")
# Pages about the inside of hvd: their C++ is compiled too, but they may name what is not public.
DEVELOPER_PAGES = ("docs/architecture.md", "docs/benchmarks.md", "docs/glossary.md", "docs/gpu_gotchas.md", "docs/models.md",
                   "docs/protocol.md", "docs/testing.md", "docs/threading.md")
OTHER_PAGES = ("CONTRIBUTING.md", "bench/README.md", "third_party/README.md", "docs/howto/*.md", "docs/decisions/*.md",
               "docs/reference/*.md")

FENCE = re.compile(r"^```(.*)$")
DIRECTIVE = re.compile(r"^<!-- code: (.*?) -->$")
SPAN = re.compile(r"`([^`\n]+)`")


@dataclasses.dataclass
class Block:
    page: str
    line: int  # of the first line of code
    language: str
    directive: str
    code: str

    @property
    def place(self):
        return f"{self.page}:{self.line}"


@dataclasses.dataclass
class Page:
    path: str
    blocks: list
    text: list  # (line number, line) outside of blocks
    directives: list  # (line number, directive) that do not precede a block
    faults: list  # "page:line: message"


def pages_of(root, patterns):
    """The paths below root that match, without repetition."""
    found = {}
    for pattern in patterns:
        for file in sorted(root.glob(pattern)):
            found.setdefault(file.relative_to(root).as_posix())
    return list(found)


def read(root, path):
    """Splits a page into its blocks and the other lines."""
    page = Page(path, [], [], [], [])
    lines = (pathlib.Path(root) / path).read_text(encoding="utf-8").split("\n")
    directive, block, previous = None, None, ""  # directive: (line, text) that waits for its block
    for number, line in enumerate(lines, 1):
        fence = FENCE.match(line)
        if block is not None:
            if fence and not fence.group(1):
                block.code = "\n".join(lines[block.line - 1:number - 1]) + "\n"
                page.blocks.append(block)
                block = None
        elif fence:
            if not fence.group(1):
                page.faults.append(f"{path}:{number}: a block without a language; expected ```cpp, c, sh, python, cmake or text")
            block = Block(path, number + 1, (fence.group(1).split() or ["text"])[0], directive[1] if directive else "", "")
            directive = None
        else:
            page.text.append((number, line))
            match = DIRECTIVE.match(line)
            if directive and (match or line):
                page.directives.append(directive)
                directive = None
            if match:
                directive = (number, match.group(1))
            if line.startswith("    ") and not line.isspace() and not previous and not re.match(r" *([-*]|\d+\.) ", line):
                page.faults.append(f"{path}:{number}: an indented block; expected a fence with a language, such as ```sh")
        previous = line.strip()
    if block is not None:
        page.faults.append(f"{path}:{block.line - 1}: a block without an end; expected ``` on a line of its own")
    if directive:
        page.directives.append(directive)
    return page


def table_rows(page):
    """Yields (line number, cells) of each row of a table, without the header's rule."""
    for number, line in page.text:
        if line.startswith("| ") and not set(line) <= set("|-: "):
            yield number, [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))]
