"""hvd: collectives of torch.distributed over shared memory, MPI and UCX.

With the package installed, ``torch.distributed.init_process_group("hvd")`` needs no import. ``import hvd`` loads neither
torch nor MPI nor UCX; the first call that needs hvd's library does.
"""

from __future__ import annotations

import json
import typing

from . import _loader
from ._run import run

__version__ = _loader.VERSION
__all__ = ["build_info", "cmake_prefix_path", "controller", "fail", "init", "init_method", "is_initialized", "local_rank",
           "local_size", "metrics", "rank", "run", "shutdown", "size"]


def init() -> None:
    """Joins the job of the launcher: hvdrun, mpirun, srun or torchrun. Without one, starts a job of one rank. Collective.

    ``torch.distributed.init_process_group("hvd")`` then uses that job. Raises RuntimeError when it is called twice, and when
    the ranks cannot find each other.
    """
    _loader.native().init()


def shutdown() -> None:
    """Leaves the job. Collective; has no effect outside a job. Outstanding operations end with an error."""
    _loader.native().shutdown()


def fail(cause: str) -> None:
    """Reports to the launcher and to the other ranks that this rank is about to end because of an error.

    The other ranks' operations then end with an error that contains the cause. An exception that ends the program is reported
    without this call. Has no effect outside a job, or when the job has failed already.
    """
    _loader.native().fail(cause)


def is_initialized() -> bool:
    """Whether this process is in a job, which it has joined with init() or with a process group."""
    return _loader.native().is_initialized()


def rank() -> int:
    """This process's rank in the job, 0 to size() - 1. Raises RuntimeError outside a job, as the functions below do."""
    return _loader.native().rank()


def size() -> int:
    """The number of ranks in the job."""
    return _loader.native().size()


def local_rank() -> int:
    """This process's number among the ranks of its host."""
    return _loader.native().local_rank()


def local_size() -> int:
    """The number of ranks on this host."""
    return _loader.native().local_size()


def init_method() -> str:
    """How the ranks found each other, such as "store://" (through torch's store) or "mpi://"."""
    return _loader.native().init_method()


def controller() -> str:
    """The carrier of the job's messages: "mpi", "ucx" or "local"."""
    return _loader.native().controller()


def build_info() -> str:
    """One line "name: value" for each component. Does not need a job."""
    return _loader.native().build_info()


def metrics() -> dict[str, typing.Any]:
    """Counters of this rank since it joined the job. docs/configuration.md lists them."""
    return json.loads(_loader.native().metrics_json())


def cmake_prefix_path() -> str:
    """A value for CMAKE_PREFIX_PATH with which find_package(hvd) finds the C++ libraries of this package."""
    return str(_loader.FOLDER)
