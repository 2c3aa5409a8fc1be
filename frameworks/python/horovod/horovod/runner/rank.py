"""One rank of horovodrun: sets Horovod's variables, and becomes the program. python -m horovod.runner.rank COMMAND..."""

from __future__ import annotations

import os
import sys

from .launch import VARIABLES


def main() -> None:
    for name, variable in VARIABLES.items():
        if variable in os.environ:
            os.environ[name] = os.environ[variable]
    command = sys.argv[1:]
    try:
        os.execvp(command[0], command)
    except OSError as error:
        raise SystemExit(f"horovodrun: cannot run {command[0]}: {error.strerror}") from None


if __name__ == "__main__":
    main()
