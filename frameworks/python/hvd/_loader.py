"""Loads hvd._C, the native module, at its first use."""

from __future__ import annotations

import atexit
import importlib
import pathlib
import sys
import threading
import traceback
import types

from . import _build
from ._build import PYTHON_VERSION, TORCH_VERSION, VERSION  # noqa: F401

# The folder of lib, bin and include. In an editable installation the Python sources are in another folder.
FOLDER = pathlib.Path(_build.__file__).parent

_REBUILD = "pip install --force-reinstall --no-deps --no-cache-dir ."


def _minor(version: str) -> tuple[str, ...]:
    return tuple(version.split("+")[0].split(".")[:2])


def check_versions(torch_version: str, python_version: str) -> None:
    """Raises ImportError unless hvd was built for these versions of torch and Python (both "X.Y.Z")."""
    for name, here, built in (("torch", torch_version, TORCH_VERSION), ("Python", python_version, PYTHON_VERSION)):
        if _minor(here) != _minor(built):
            raise ImportError(
                f"hvd {VERSION} was built for {name} {'.'.join(_minor(built))}, and this is {name} {here}; "
                f"install {name} {'.'.join(_minor(built))}, or build hvd again in this environment, in its source folder: {_REBUILD}")


def _report_uncaught_exceptions(module: types.ModuleType) -> None:
    """Reports an exception that ends the program to hvdrun and the other ranks, which show it as the cause."""
    import multiprocessing.util  # torch has imported it

    previous = sys.excepthook

    def report(error: BaseException | None) -> None:
        if isinstance(error, Exception):
            frames = traceback.extract_tb(error.__traceback__)
            place = f"{frames[-1].filename}:{frames[-1].lineno}: " if frames else ""
            module.fail(f"{place}{type(error).__qualname__}: {error}")

    def report_to_hook(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
        report(error)
        previous(kind, error, trace)

    def report_to_parent() -> None:
        # multiprocessing calls this while the exception is under way. torch.multiprocessing has replaced it by SystemExit.
        error = sys.exc_info()[1]
        report(error.__context__ if isinstance(error, SystemExit) else error)

    sys.excepthook = report_to_hook
    if multiprocessing.parent_process() is not None:  # multiprocessing catches exceptions before the hook
        multiprocessing.util.Finalize(None, report_to_parent, exitpriority=1000)


def _stop_threads_at_exit(module: types.ModuleType) -> None:
    """Stops daemon threads that are in a call of torch.distributed at the end of the program; they would crash it."""
    def stop() -> None:
        if threading.active_count() > 1:
            module.stop_threads()

    atexit.register(stop)


def native() -> types.ModuleType:
    """The module hvd._C. Imports torch. Raises ImportError when the versions differ or a library is missing."""
    loaded = sys.modules.get("hvd._C")
    if loaded is not None:
        return loaded
    import torch

    check_versions(torch.__version__, ".".join(map(str, sys.version_info[:3])))
    module = importlib.import_module("hvd._C")
    _report_uncaught_exceptions(module)
    _stop_threads_at_exit(module)
    return module
