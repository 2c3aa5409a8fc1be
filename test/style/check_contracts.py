#!/usr/bin/env python3
"""Checks that each precondition in a header's comment (@pre) is checked by the code.

Usage: check_contracts.py ROOT    prints one line per @pre that nothing checks; exits 1 when there is one.

The function behind the comment has to contain HVD_EXPECT, or in the LibTorch adapter TORCH_INTERNAL_ASSERT_DEBUG_ONLY;
for a pure virtual function, some implementation has to. "(checked by NAME())" behind the precondition names the function
that contains the check, "(unchecked: REASON)" gives the reason why no function can.
"""

import pathlib
import re
import sys

FOLDERS = ("core", "frameworks", "launcher")
CHECK = re.compile(r"\b(HVD_EXPECT|TORCH_INTERNAL_ASSERT_DEBUG_ONLY)\(")
UNCHECKED = re.compile(r"@pre[^@]*?\(unchecked: [^)]+\)")
ELSEWHERE = re.compile(r"@pre[^@]*?\(checked by ([\w:]+)\(\)\)")
CLASS = re.compile(r"^(?:class|struct) (\w+)[^;{]*\{", re.MULTILINE)
COMMENT = re.compile(r"(?:^[ \t]*///[^\n]*\n)+", re.MULTILINE)
KEYWORDS = {"if", "for", "while", "switch", "return", "sizeof", "decltype", "noexcept", "alignas"}


def function_behind(text):
    """The name of the function that is declared first in the text: the word before the first parenthesis."""
    text = re.sub(r"^\s*template\s*<[^>]*>", "", text)
    for found in re.finditer(r"([A-Za-z_]\w*)\s*\(", text):
        if found.group(1) not in KEYWORDS and not found.group(1).isupper():
            return found.group(1)
    return None


def block(text, begin):
    """From the first brace behind `begin` to the one that closes it; empty for a declaration."""
    semicolon, brace = text.find(";", begin), text.find("{", begin)
    if brace < 0 or 0 <= semicolon < brace:
        return ""
    depth = 0
    for position in range(brace, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[brace:position + 1]
    return ""


def bodies(name, text):
    """Yields the bodies of the functions of this name in the text. The name may be Class::function."""
    for found in re.finditer(rf"(?<![\w:~.>]){name}\s*\(", text):
        depth, position = 0, found.end() - 1
        while position < len(text):
            depth += {"(": 1, ")": -1}.get(text[position], 0)
            position += 1
            if depth == 0:
                break
        # Only attributes stand between the parameters of a definition and its body.
        if re.match(r"[\w\s]*(HVD_\w+\([^)]*\)\s*)*(->[^{;]*)?\{", text[position:]):
            yield block(text, position)


def class_around(text, position):
    for found in CLASS.finditer(text):
        if found.start() < position < found.end() + len(block(text, found.end() - 1)):
            return found.group(1)
    return None


def checked(root, header, text, position, function):
    """Whether a body of the function that is declared at `position` of the header checks something."""
    top = root / header.relative_to(root).parts[0]
    sources = [path for suffix in ("cpp", "cu") for path in sorted(top.glob(f"**/*.{suffix}"))]
    owner = class_around(text, position)
    inline = bodies(function, text[position:])
    if "::" in function:
        owner, name = function.split("::")
        headers = [path.read_text(encoding="utf-8") for path in top.glob("**/*.h")]
        inline = [body for other in headers if re.search(rf"^class {owner}\b", other, re.MULTILINE) for body in bodies(name, other)]
        names = [function]
    elif owner is None:
        sources, names = sorted(header.parent.glob("*.c*")), [function]
    elif re.match(r"[^;{]*= 0;", text[position:]):
        inline, names = [], [r"\w+::" + function, function]
    else:
        names = [f"{owner}::{function}"]
    found = [*inline, *(body for path in sources for name in names for body in bodies(name, path.read_text(encoding="utf-8")))]
    return any(CHECK.search(body) for body in found)


def violations(root):
    for header in sorted(path for folder in FOLDERS for path in root.glob(f"{folder}/**/*.h")):
        text = header.read_text(encoding="utf-8")
        for comment in COMMENT.finditer(text):
            prose = re.sub(r"\n\s*///", "", comment.group())
            if "@pre" not in prose or UNCHECKED.search(prose):
                continue
            function = function_behind(text[comment.end():])
            elsewhere = ELSEWHERE.search(prose)
            position = comment.end()
            if elsewhere:
                function, position = elsewhere.group(1), comment.start()
            if function is None or not checked(root, header, text, position, function):
                line = text.count("\n", 0, comment.start() + comment.group().index("@pre")) + 1
                yield f"{header.relative_to(root)}:{line}: {function}() does not check its @pre"


def main():
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    root = pathlib.Path(sys.argv[1])
    found = list(violations(root))
    count = sum(path.read_text(encoding="utf-8").count("@pre") for folder in FOLDERS for path in root.glob(f"{folder}/**/*.h"))
    print(*found, sep="\n")
    print(f"{count} preconditions, {len(found)} violations")
    return 1 if found or not count else 0


if __name__ == "__main__":
    sys.exit(main())
