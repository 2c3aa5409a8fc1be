#!/usr/bin/env python3
"""Makes the reference of the public headers with doxygen, and treats its warnings as errors.

Usage: check_reference.py ROOT    exits 1 with the warnings, 77 without doxygen.

Every class, struct, enumeration and group needs a comment. A member or function may do without one where its name or
its group's comment says enough, so doxygen's warnings about single members are left out.
"""

import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

MEMBER = re.compile(r"warning: Member .* \((?!enumeration)[\w ]+\) of .* is not documented\.$")


def warnings(root, output):
    """The lines of doxygen's output that count, for the Doxyfile of this tree."""
    settings = (root / "docs/reference/Doxyfile").read_text() + f"\nOUTPUT_DIRECTORY = {output}\n"
    result = subprocess.run(["doxygen", "-"], input=settings, cwd=root, capture_output=True, text=True)
    if result.returncode != 0:
        return result.stderr.splitlines() or [f"doxygen exited with {result.returncode}"]
    return [line for line in result.stderr.splitlines() if line and not MEMBER.search(line)]


def main():
    root = pathlib.Path(sys.argv[1])
    if shutil.which("doxygen") is None:
        print("skipped: doxygen is not installed (third_party/setup.sh --clang installs it)")
        return 77
    with tempfile.TemporaryDirectory() as output:
        found = warnings(root, output)
    print("\n".join(found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
