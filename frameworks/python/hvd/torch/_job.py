"""Start and end of a job, ranks, and queries of the build, as horovod.torch has them."""

from __future__ import annotations

import atexit
import collections.abc
import os
import sys
import typing

from .. import _loader
from ..errors import NotInitializedError, UsageError
from . import process_sets as _sets

_native = _loader.native()

is_initialized = _native.is_initialized
rank, size = _native.rank, _native.size
local_rank, local_size = _native.local_rank, _native.local_size
cross_rank, cross_size = _native.cross_rank, _native.cross_size
is_homogeneous = _native.is_homogeneous


def init(comm: collections.abc.Sequence[int] | None = None,
         process_sets: collections.abc.Sequence[_sets.ProcessSet] | str | None = None) -> None:
    """Joins the job of the launcher. Without one, starts a job of one rank. Collective. Has no effect within a job.

    `comm` is None or the list of all ranks. `process_sets` are added, unless the job has them. The value "dynamic" changes
    nothing, because sets can always be added later.
    """
    chosen = _chosen_sets(process_sets)
    if comm is not None and not isinstance(comm, collections.abc.Iterable):
        raise UsageError(f"init: comm: expected None or a list of ranks, got {comm!r}; communicators of MPI are not supported")
    _native.finish_start_or_end()  # a call that Ctrl-C has ended
    if not is_initialized():
        _sets._end_job()
        _translate_environment()
        _native.init()
        _report_ignored()
    if comm is not None and sorted(comm) not in ([], list(range(size()))):
        raise UsageError(f"init: comm: expected None or the list of all {size()} ranks, got {list(comm)}; use process_sets for "
                         "some of the ranks")
    _sets._begin_job(chosen)


# Horovod's variables whose names or values differ. The others with a counterpart are read by the library under their own names.
_VARIABLES = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "HVD_STALL_WARNING", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "HVD_STALL_SHUTDOWN"}


def _translate_environment() -> None:
    """Sets hvd's variables from those of Horovod. A variable of hvd that is already set takes precedence."""
    given = os.environ
    if given.get("HOROVOD_STALL_CHECK_DISABLE", "0") not in ("", "0"):
        given.setdefault("HVD_STALL_WARNING", "0")
    for name, own in _VARIABLES.items():
        if name in given:
            given.setdefault(own, given[name])
    if given.get("HOROVOD_TIMELINE", "").upper() == "DYNAMIC":  # none before start_timeline()
        del given["HOROVOD_TIMELINE"]


# Variables of Horovod 0.28.1 that have no counterpart.
_IGNORED = frozenset(f"HOROVOD_{name}" for name in (
    "ADASUM_MPI_CHUNK_SIZE ALLTOALL_ALGORITHM AUTOTUNE AUTOTUNE_BAYES_OPT_MAX_SAMPLES AUTOTUNE_GAUSSIAN_PROCESS_NOISE AUTOTUNE_LOG "
    "AUTOTUNE_STEPS_PER_SAMPLE AUTOTUNE_WARMUP_SAMPLES BATCH_D2D_MEMCOPIES CCL_BGT_AFFINITY CCL_CACHE CONTROLLER CPU_OPERATIONS "
    "CYCLE_TIME DISABLE_GROUP_FUSION DISABLE_NVTX_RANGES DYNAMIC_PROCESS_SETS ELASTIC ENABLE_ASYNC_COMPLETION ENABLE_XLA_OPS "
    "GLOO_IFACE GLOO_RENDEZVOUS_ADDR GLOO_RENDEZVOUS_PORT GLOO_TIMEOUT_SECONDS GPU_OPERATIONS HIERARCHICAL_ALLGATHER "
    "HIERARCHICAL_ALLREDUCE LOG_HIDE_TIME LOG_TIMESTAMP MLSL_BGT_AFFINITY MPI_THREADS_DISABLE NUM_NCCL_STREAMS "
    "REDUCESCATTER_ALGORITHM TIMELINE_MARK_CYCLES THREAD_AFFINITY TORUS_ALLREDUCE").split())


def _report_ignored() -> None:
    """Writes one line at the log level info."""
    ignored = sorted(_IGNORED.intersection(os.environ))
    level = os.environ.get("HVD_LOG_LEVEL") or os.environ.get("HOROVOD_LOG_LEVEL") or ""
    if ignored and level.lower() in ("trace", "debug", "info"):
        print(f"hvd.torch, rank {rank()}: ignored: {', '.join(ignored)}", file=sys.stderr)


def _chosen_sets(process_sets: typing.Any) -> list[typing.Any]:
    if process_sets is None:
        return []
    if isinstance(process_sets, str):
        if process_sets.lower() == "dynamic":
            return []
        raise UsageError(f'init: process_sets: expected None, a list or "dynamic", got {process_sets!r}')
    return list(process_sets)


def shutdown() -> None:
    """Leaves the job. Collective; has no effect outside a job. Outstanding operations end with an error."""
    _native.shutdown()
    _sets._end_job()


@atexit.register
def _leave_at_exit() -> None:
    """Leaves the job at exit, because a program may end without shutdown()."""
    if is_initialized():
        shutdown()


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Starts a Chrome trace of this rank's operations. "{rank}" in the path is replaced by the rank; without it ".rankN" goes
    before the extension. hvd has no cycles, so `mark_cycles` changes nothing."""
    del mark_cycles
    _native.start_timeline(str(file_path))


def stop_timeline() -> None:
    """Completes the trace. Has no effect without one."""
    _native.stop_timeline()


def mpi_threads_supported() -> bool:
    """Whether MPI runs with MPI_THREAD_MULTIPLE, or is not used by this job."""
    _native.rank()  # raises before init()
    return _native.mpi_threads_supported()


def mpi_enabled() -> bool:
    """Whether MPI carries the job's messages."""
    try:
        return _native.controller() == "mpi"
    except NotInitializedError:
        return False


def mpi_built() -> bool:
    """Whether hvd was built with MPI."""
    return _native.mpi_built()


def gloo_enabled() -> bool:
    """False: hvd has no Gloo."""
    return False


def gloo_built() -> bool:
    """False: hvd has no Gloo."""
    return False


def nccl_built() -> int:
    """1 if hvd was built with NCCL, otherwise 0."""
    return int(_native.nccl_built())


def ddl_built() -> bool:
    """False: hvd has no DDL."""
    return False


def ccl_built() -> bool:
    """False: hvd has no oneCCL."""
    return False


def cuda_built() -> bool:
    """Whether hvd was built with CUDA."""
    return _native.cuda_built()


def rocm_built() -> bool:
    """False: hvd has no ROCm."""
    return False


class Basics:
    """The functions of this module as methods; programs use ``horovod.torch.mpi_ops._basics``."""

    Average, Sum, Adasum, Min, Max, Product = range(6)
    for _function in (init, shutdown, is_initialized, rank, size, local_rank, local_size, cross_rank, cross_size, is_homogeneous,
                      start_timeline, stop_timeline, mpi_threads_supported, mpi_enabled, mpi_built, gloo_enabled, gloo_built,
                      nccl_built, ddl_built, ccl_built, cuda_built, rocm_built):
        locals()[_function.__name__] = staticmethod(_function)
    del _function
    _get_process_set_ids_and_ranks = staticmethod(_sets._ids_and_ranks)
