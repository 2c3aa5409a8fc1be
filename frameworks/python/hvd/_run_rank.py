"""One rank of run(): python -m hvd._run_rank FOLDER."""

from __future__ import annotations

import os
import pathlib
import pickle
import sys
import time
import traceback
import typing

from ._run import dumps


def _write(folder: pathlib.Path, record: typing.Any) -> None:
    """Writes the record to a file that gets its name only when it is complete."""
    file = folder / f"rank{os.environ['RANK']}"
    part = file.with_suffix(".part")
    part.write_bytes(dumps(record))
    part.rename(file)


def main() -> None:
    folder = pathlib.Path(sys.argv[1])
    program, _paths = pickle.loads((folder / "main").read_bytes())
    try:
        if program is not None:
            import multiprocessing.spawn

            multiprocessing.spawn._fixup_main_from_path(program)
        func, args, kwargs = pickle.loads((folder / "call").read_bytes())
        _write(folder, (True, time.time(), func(*args, **kwargs), ""))
    except BaseException as error:
        text = "".join(traceback.format_exception(error))
        try:
            _write(folder, (False, time.time(), error, text))
        except Exception:  # the exception cannot be pickled
            _write(folder, (False, time.time(), RuntimeError(f"{type(error).__qualname__}: {error}"), text))
        raise


if __name__ == "__main__":
    main()
