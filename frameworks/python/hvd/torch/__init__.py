"""The calls of horovod.torch, and what hvd adds to torch.distributed."""

# Without `from __future__ import annotations`: DistributedDataParallel compares a hook's annotations with its own types.
import datetime
import typing

import torch
import torch.distributed as dist

from .. import _loader, build_info, metrics
from ..errors import (HorovodInternalError, MismatchError, NotInitializedError, PeerLostError, ShutdownError, StalledError,
                      UsageError)
from . import elastic
from ._extras import all_gather_into_tensor, all_reduce, gather, scale_loss
from .compression import Compression
from .functions import allgather_object, broadcast_object, broadcast_optimizer_state, broadcast_parameters
from .grad_scaler import GradScaler
from .mpi_ops import (Adasum, Average, Max, Min, ProcessSet, Product, Sum, add_process_set, allgather, allgather_async, allreduce,
                      allreduce_, allreduce_async, allreduce_async_, alltoall, alltoall_async, barrier, broadcast, broadcast_,
                      broadcast_async, broadcast_async_, ccl_built, cross_rank, cross_size, cuda_built, ddl_built,
                      global_process_set, gloo_built, gloo_enabled, grouped_allgather, grouped_allgather_async,
                      grouped_allreduce, grouped_allreduce_, grouped_allreduce_async, grouped_allreduce_async_,
                      grouped_reducescatter, grouped_reducescatter_async, init, is_homogeneous, is_initialized, join, local_rank,
                      local_size, mpi_built, mpi_enabled, mpi_threads_supported, nccl_built, poll, rank, reducescatter,
                      reducescatter_async, remove_process_set, rocm_built, shutdown, size, sparse_allreduce_async,
                      start_timeline, stop_timeline, synchronize)
from .optimizer import DistributedOptimizer
from .sync_batch_norm import SyncBatchNorm, convert_sync_batchnorm

__all__ = ["Adasum", "Average", "Compression", "DistributedOptimizer", "GradScaler", "HorovodInternalError", "Max", "Min", "MismatchError", "NotInitializedError",
           "PeerLostError", "ProcessSet", "Product", "ShutdownError", "StalledError", "Sum", "SyncBatchNorm", "UsageError", "add_process_set",
           "all_gather_into_tensor", "all_reduce", "allgather", "allgather_async", "allgather_object", "allreduce", "allreduce_",
           "allreduce_async", "allreduce_async_", "alltoall", "alltoall_async", "barrier", "broadcast", "broadcast_",
           "broadcast_async", "broadcast_async_", "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters",
           "build_info", "ccl_built", "convert_sync_batchnorm", "elastic", "cross_rank", "cross_size", "cuda_built", "ddl_built", "ddp_hook", "flight_record",
           "gather", "global_process_set", "gloo_built", "gloo_enabled", "grouped_allgather", "grouped_allgather_async",
           "grouped_allreduce", "grouped_allreduce_", "grouped_allreduce_async", "grouped_allreduce_async_",
           "grouped_reducescatter", "grouped_reducescatter_async", "init", "is_homogeneous", "is_initialized", "join",
           "local_rank", "local_size", "metrics", "monitored_barrier", "mpi_built", "mpi_enabled", "mpi_threads_supported",
           "nccl_built", "poll", "rank", "reducescatter", "reducescatter_async", "remove_process_set", "rocm_built", "scale_loss",
           "shutdown", "size", "sparse_allreduce_async", "start_timeline", "stop_timeline", "synchronize"]

# The default group at the time of the first hook without a group, and hvd's group of the same ranks.
_groups: tuple[typing.Any, typing.Any] = (None, None)


def ddp_hook(state: dist.ProcessGroup | None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A communication hook for DistributedDataParallel whose own group has another backend, such as gloo.

    ``model.register_comm_hook(None, hvd.torch.ddp_hook)`` averages the gradients over all ranks through hvd. `state` is the
    group to use, ``torch.distributed.new_group(ranks, backend="hvd")``; with None the first call makes a group of all ranks, and
    is collective over them. `state` must not be None for a model whose process group has only some of the ranks.

    Returns a future with the averaged bucket, which is the bucket's own memory.
    """
    group = state if state is not None else _group_of_all_ranks()
    work = dist.all_reduce(bucket.buffer(), op=dist.ReduceOp.AVG, group=group, async_op=True)
    return work.get_future().then(lambda finished: finished.value()[0])


def _group_of_all_ranks() -> dist.ProcessGroup:
    global _groups
    if _groups[0] is not dist.group.WORLD:
        _groups = (dist.group.WORLD, dist.new_group(backend="hvd"))
    return _groups[1]


def monitored_barrier(group: dist.ProcessGroup | None = None, timeout: datetime.timedelta | None = None,
                      wait_all_ranks: bool = False) -> None:
    """torch.distributed.monitored_barrier() for a group of the backend "hvd", which torch offers for gloo only.

    Raises torch.distributed.DistBackendError when ranks have not made the call within `timeout` (None: the group's). The text
    names the first of them, or all of them with `wait_all_ranks`.
    """
    chosen = group if group is not None else dist.group.WORLD
    backend = chosen._get_backend(torch.device("cpu"))
    limit = timeout if timeout is not None else datetime.timedelta(milliseconds=-1)
    _loader.native().monitored_barrier(backend, limit, wait_all_ranks)


def flight_record() -> bytes:
    """The last operations of this process's groups with the backend "hvd", in the format of PyTorch's flight recorder.

    A pickled dictionary with the stack of each operation's caller; ``torchfrtrace`` compares the files of all ranks. Empty unless
    the environment has ``TORCH_FR_BUFFER_SIZE``, the number of operations to keep, or ``TORCH_FR_DUMP_TEMP_FILE``. With the
    latter, the first failure or timeout also writes the record to the file of that name followed by the rank.
    """
    return _loader.native().flight_record()
