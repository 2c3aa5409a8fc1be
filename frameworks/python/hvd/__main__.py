"""``python -m hvd`` is hvdrun. If the program's name ends in .py, this interpreter runs it."""

from __future__ import annotations

import os
import shutil
import sys

from . import _loader


def find_hvdrun() -> str:
    """The hvdrun of this package, else that of PATH. Raises SystemExit when there is none."""
    own = _loader.FOLDER / "bin" / "hvdrun"
    found = str(own) if own.exists() else shutil.which("hvdrun")
    if found is None:
        raise SystemExit("python -m hvd: hvdrun is neither in the package nor on PATH; install hvd again, with "
                         "HVD_BUILD_LAUNCHER=ON")
    return found


def main() -> None:
    hvdrun = find_hvdrun()
    os.environ.setdefault("PYTHON_EXEC", sys.executable)  # hvdrun's and torchrun's variable for the interpreter
    os.execv(hvdrun, [hvdrun, *sys.argv[1:]])


if __name__ == "__main__":
    main()
