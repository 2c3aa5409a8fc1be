"""The collectives of horovod.torch: its names, signatures and derivatives."""

from __future__ import annotations

import collections.abc
import typing
import warnings

import torch

from .. import _loader
from ..errors import HorovodInternalError, UsageError  # noqa: F401
from . import _derivatives as _grad
from . import _operators
from ._job import (Basics, ccl_built, cross_rank, cross_size, cuda_built, ddl_built, gloo_built,  # noqa: F401
                   gloo_enabled, init, is_homogeneous, is_initialized, local_rank, local_size, mpi_built, mpi_enabled,
                   mpi_threads_supported, nccl_built, rank, rocm_built, shutdown, size, start_timeline, stop_timeline)
from .compression import Compression, Compressor
from .process_sets import ProcessSet, _native_of, add_process_set, global_process_set, remove_process_set  # noqa: F401

_native = _loader.native()
_basics = Basics()

Average, Sum, Adasum = Basics.Average, Basics.Sum, Basics.Adasum
Min, Max, Product = Basics.Min, Basics.Max, Basics.Product

Handle = _native.Handle
Tensors = collections.abc.Sequence[torch.Tensor]


def handle_average_backwards_compatibility(op: int | None, average: bool | None) -> int:
    """The reduction that `op` and the deprecated `average` select. Raises UsageError when both are given."""
    if average is None:
        return Average if op is None else op
    if op is not None:
        raise UsageError(f"op and average: expected only one of them, got op {op} and average {average}")
    warnings.warn("Parameter `average` has been replaced with `op`", DeprecationWarning, stacklevel=3)
    return Average if average else Sum


def _records(tensor: typing.Any) -> bool:
    return torch.is_grad_enabled() and tensor.requires_grad


_compiling = torch.compiler.is_compiling  # within torch.compile the operators of torch.library are called


def _number_of(process_set: ProcessSet) -> int:
    number = process_set.process_set_id
    if number is None:
        raise UsageError(f"process_set: expected a set of this job, got one of ranks {process_set.ranks}")
    return number


def _list_of(tensors: typing.Any) -> list[torch.Tensor]:
    if isinstance(tensors, torch.Tensor) or not isinstance(tensors, collections.abc.Iterable):
        raise UsageError(f"tensors: expected a list of tensors, got {type(tensors).__qualname__}")
    tensors = list(tensors)
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise UsageError(f"tensors: expected tensors, got {type(tensor).__qualname__}")
    return tensors


def allreduce_async(tensor: torch.Tensor, average: bool | None = None, name: str | None = None, op: int | None = None,
                    prescale_factor: float = 1.0, postscale_factor: float = 1.0,
                    process_set: ProcessSet = global_process_set) -> Handle:
    """Like allreduce(), but returns a handle for poll() and synchronize(). Autograd does not record it."""
    op = handle_average_backwards_compatibility(op, average)
    return _native.allreduce_async(tensor, name or "", op, prescale_factor, postscale_factor, _native_of(process_set))


def allreduce(tensor: torch.Tensor, average: bool | None = None, name: str | None = None,
              compression: type[Compressor] = Compression.none, op: int | None = None, prescale_factor: float = 1.0,
              postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set) -> torch.Tensor:
    """Reduces the tensor over the ranks of the set: postscale_factor * op(prescale_factor * tensor). The default is Average,
    which divides by the size of the set. Differentiable with Average and Sum."""
    op = handle_average_backwards_compatibility(op, average)
    sent, context = compression.compress(tensor)
    if _compiling():
        result = _operators.allreduce(sent, name or "", op, prescale_factor, postscale_factor, _number_of(process_set))
    elif _records(sent):
        result = _grad.Allreduce.apply(sent, name or "", op, prescale_factor, postscale_factor, process_set)
    else:
        result = _native.allreduce(sent, name or "", op, prescale_factor, postscale_factor, _native_of(process_set))
    return compression.decompress(result, context)


def allreduce_async_(tensor: torch.Tensor, average: bool | None = None, name: str | None = None, op: int | None = None,
                     prescale_factor: float = 1.0, postscale_factor: float = 1.0,
                     process_set: ProcessSet = global_process_set) -> Handle:
    """Like allreduce_(), but returns a handle for poll() and synchronize()."""
    op = handle_average_backwards_compatibility(op, average)
    return _native.allreduce_async_(tensor, name or "", op, prescale_factor, postscale_factor, _native_of(process_set))


def allreduce_(tensor: torch.Tensor, average: bool | None = None, name: str | None = None, op: int | None = None,
               prescale_factor: float = 1.0, postscale_factor: float = 1.0,
               process_set: ProcessSet = global_process_set) -> torch.Tensor:
    """Like allreduce(), but writes the result into the tensor, which it returns. Autograd does not record it."""
    if _compiling():
        with torch.no_grad():
            result = allreduce(tensor, average, name, Compression.none, op, prescale_factor, postscale_factor, process_set)
            return tensor.copy_(result)
    op = handle_average_backwards_compatibility(op, average)
    return _native.allreduce_(tensor, name or "", op, prescale_factor, postscale_factor, _native_of(process_set))


def grouped_allreduce_async(tensors: Tensors, average: bool | None = None, name: str | None = None, op: int | None = None,
                            prescale_factor: float = 1.0, postscale_factor: float = 1.0,
                            process_set: ProcessSet = global_process_set) -> Handle:
    """Like grouped_allreduce(), but returns a handle for poll() and synchronize(). Autograd does not record it."""
    op = handle_average_backwards_compatibility(op, average)
    return _native.grouped_allreduce_async(_list_of(tensors), name or "", op, prescale_factor, postscale_factor,
                                           _native_of(process_set))


def grouped_allreduce(tensors: Tensors, average: bool | None = None, name: str | None = None,
                      compression: type[Compressor] = Compression.none, op: int | None = None, prescale_factor: float = 1.0,
                      postscale_factor: float = 1.0, process_set: ProcessSet = global_process_set) -> list[torch.Tensor]:
    """Like allreduce() for several tensors, which are reduced together: all succeed or all fail."""
    op = handle_average_backwards_compatibility(op, average)
    pairs = [compression.compress(tensor) for tensor in _list_of(tensors)]
    sent = [tensor for tensor, _ in pairs]
    if _compiling():
        results = _operators.grouped_allreduce(sent, name or "", op, prescale_factor, postscale_factor, _number_of(process_set))
    elif any(map(_records, sent)):
        results = _grad.GroupedAllreduce.apply(name or "", op, prescale_factor, postscale_factor, process_set, *sent)
    else:
        results = grouped_allreduce_async(sent, None, name, op, prescale_factor, postscale_factor, process_set).wait()
    return [compression.decompress(result, context) for result, (_, context) in zip(results, pairs)]


def grouped_allreduce_async_(tensors: Tensors, average: bool | None = None, name: str | None = None, op: int | None = None,
                             prescale_factor: float = 1.0, postscale_factor: float = 1.0,
                             process_set: ProcessSet = global_process_set) -> Handle:
    """Like grouped_allreduce_(), but returns a handle for poll() and synchronize()."""
    op = handle_average_backwards_compatibility(op, average)
    return _native.grouped_allreduce_async_(_list_of(tensors), name or "", op, prescale_factor, postscale_factor,
                                            _native_of(process_set))


def grouped_allreduce_(tensors: Tensors, average: bool | None = None, name: str | None = None, op: int | None = None,
                       prescale_factor: float = 1.0, postscale_factor: float = 1.0,
                       process_set: ProcessSet = global_process_set) -> list[torch.Tensor]:
    """Like grouped_allreduce(), but writes the results into the tensors, which it returns."""
    op = handle_average_backwards_compatibility(op, average)
    if _compiling():
        with torch.no_grad():
            results = grouped_allreduce(tensors, None, name, Compression.none, op, prescale_factor, postscale_factor, process_set)
            return [tensor.copy_(result) for tensor, result in zip(tensors, results)]
    return grouped_allreduce_async_(tensors, None, name, op, prescale_factor, postscale_factor, process_set).wait()


def sparse_allreduce_async(tensor: torch.Tensor, name: str, op: int, process_set: ProcessSet = global_process_set) -> Handle:
    """Reduces a sparse COO tensor with Average or Sum. The handle can also be called, which returns the result."""
    return _native.sparse_allreduce_async(tensor, name or "", op, 1.0, 1.0, _native_of(process_set))


def allgather_async(tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Handle:
    """Like allgather(), but returns a handle for poll() and synchronize(). Autograd does not record it."""
    return _native.allgather_async(tensor, name or "", _native_of(process_set))


def allgather(tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> torch.Tensor:
    """Concatenates the tensors of all ranks of the set along dimension 0, whose size may differ between ranks.

    Differentiable: backward returns this rank's rows of the average of the gradients.
    """
    if _compiling():
        return _operators.allgather(tensor if tensor.dim() else tensor.reshape(1), name or "", _number_of(process_set))
    if _records(tensor):
        return _grad.Allgather.apply(tensor, name or "", process_set)
    return allgather_async(tensor, name, process_set).wait()


def grouped_allgather_async(tensors: Tensors, name: str | None = None,
                            process_set: ProcessSet = global_process_set) -> Handle:
    """Like grouped_allgather(), but returns a handle for poll() and synchronize(). Autograd does not record it."""
    return _native.grouped_allgather_async(_list_of(tensors), name or "", _native_of(process_set))


def grouped_allgather(tensors: Tensors, name: str | None = None,
                      process_set: ProcessSet = global_process_set) -> list[torch.Tensor]:
    """Like allgather() for several tensors, which are gathered together: all succeed or all fail."""
    tensors = _list_of(tensors)
    if _compiling():
        rows = [tensor if tensor.dim() else tensor.reshape(1) for tensor in tensors]
        return _operators.grouped_allgather(rows, name or "", _number_of(process_set))
    if any(map(_records, tensors)):
        return list(_grad.GroupedAllgather.apply(name or "", process_set, *tensors))
    return grouped_allgather_async(tensors, name, process_set).wait()


def broadcast_async(tensor: torch.Tensor, root_rank: int, name: str | None = None,
                    process_set: ProcessSet = global_process_set) -> Handle:
    """Like broadcast(), but returns a handle for poll() and synchronize(). Autograd does not record it."""
    return _native.broadcast_async(tensor, root_rank, name or "", _native_of(process_set))


def broadcast(tensor: torch.Tensor, root_rank: int, name: str | None = None,
              process_set: ProcessSet = global_process_set) -> torch.Tensor:
    """Returns the root's tensor. `root_rank` is a rank of the job, even if `process_set` is given.

    Differentiable: backward returns the average of the gradients on the root, and zeros on the other ranks.
    """
    if _compiling():
        return _operators.broadcast(tensor, root_rank, name or "", _number_of(process_set))
    if _records(tensor):
        return _grad.Broadcast.apply(tensor, root_rank, name or "", process_set)
    return broadcast_async(tensor, root_rank, name, process_set).wait()


def broadcast_async_(tensor: torch.Tensor, root_rank: int, name: str | None = None,
                     process_set: ProcessSet = global_process_set) -> Handle:
    """Like broadcast_(), but returns a handle for poll() and synchronize()."""
    return _native.broadcast_async_(tensor, root_rank, name or "", _native_of(process_set))


def broadcast_(tensor: torch.Tensor, root_rank: int, name: str | None = None,
               process_set: ProcessSet = global_process_set) -> torch.Tensor:
    """Like broadcast(), but writes the result into the tensor, which it returns. Autograd does not record it."""
    if _compiling():
        with torch.no_grad():
            return tensor.copy_(broadcast(tensor, root_rank, name, process_set))
    return broadcast_async_(tensor, root_rank, name, process_set).wait()


def _splits_of(splits: typing.Any) -> torch.Tensor | None:
    if splits is None or isinstance(splits, torch.Tensor):
        return splits
    return torch.tensor(splits, dtype=torch.int32)


def alltoall_async(tensor: torch.Tensor, splits: torch.Tensor | None = None, name: str | None = None,
                   process_set: ProcessSet = global_process_set) -> Handle:
    """Like alltoall(), but returns a handle for poll() and synchronize(). Autograd does not record it."""
    return _native.alltoall_async(tensor, _splits_of(splits), name or "", _native_of(process_set))


def _compiled_alltoall(tensor: torch.Tensor, splits: typing.Any, name: str | None,
                       process_set: ProcessSet) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    size = len(process_set.ranks or ())
    given = _splits_of(splits)
    if given is None:
        if tensor.shape[0] % size != 0:
            raise UsageError(f"alltoall: expected rows that are a multiple of {size}, got {tensor.shape[0]}; pass splits")
        given = torch.full((size,), tensor.shape[0] // size, dtype=torch.int32)
    output, received = _operators.alltoall(tensor, given, name or "", _number_of(process_set))
    return output if splits is None else (output, received)


def alltoall(tensor: torch.Tensor, splits: torch.Tensor | None = None, name: str | None = None,
             process_set: ProcessSet = global_process_set) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Sends the first splits[0] rows to the first rank of the set, the next splits[1] to the second, and so on; without
    `splits`, equal shares. Returns the received rows, and with `splits` also the number of rows from each rank. Differentiable.
    """
    if _compiling():
        return _compiled_alltoall(tensor, splits, name, process_set)
    if _records(tensor):
        return _grad.Alltoall.apply(tensor, _splits_of(splits), name or "", process_set)
    return alltoall_async(tensor, splits, name, process_set).wait()


def reducescatter_async(tensor: torch.Tensor, name: str | None = None, op: int = Average,
                        process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0,
                        postscale_factor: float = 1.0) -> Handle:
    """Like reducescatter(), but returns a handle for poll() and synchronize(). Autograd does not record it."""
    return _native.reducescatter_async(tensor, name or "", op, prescale_factor, postscale_factor, _native_of(process_set))


def reducescatter(tensor: torch.Tensor, name: str | None = None, compression: type[Compressor] = Compression.none,
                  op: int = Average, process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0,
                  postscale_factor: float = 1.0) -> torch.Tensor:
    """Reduces with Average or Sum, and returns this rank's rows of the result: an equal share, and one row more on each of
    the first ranks if there is a remainder.

    Differentiable: backward gathers the gradients, and multiplies them by both factors and, with Sum, by the size of the set.
    """
    sent, context = compression.compress(tensor)
    if _compiling():
        result = _operators.reducescatter(sent, name or "", op, _number_of(process_set), prescale_factor, postscale_factor)
    elif _records(sent):
        result = _grad.Reducescatter.apply(sent, name or "", op, process_set, prescale_factor, postscale_factor)
    else:
        result = reducescatter_async(sent, name, op, process_set, prescale_factor, postscale_factor).wait()
    return compression.decompress(result, context)


def grouped_reducescatter_async(tensors: Tensors, name: str | None = None, op: int = Average,
                                process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0,
                                postscale_factor: float = 1.0) -> Handle:
    """Like grouped_reducescatter(), but returns a handle for poll() and synchronize(). Autograd does not record it."""
    return _native.grouped_reducescatter_async(_list_of(tensors), name or "", op, prescale_factor, postscale_factor,
                                               _native_of(process_set))


def grouped_reducescatter(tensors: Tensors, name: str | None = None, compression: type[Compressor] = Compression.none,
                          op: int = Average, process_set: ProcessSet = global_process_set, prescale_factor: float = 1.0,
                          postscale_factor: float = 1.0) -> list[torch.Tensor]:
    """Like reducescatter() for several tensors, which are reduced together: all succeed or all fail."""
    pairs = [compression.compress(tensor) for tensor in _list_of(tensors)]
    sent = [tensor for tensor, _ in pairs]
    if _compiling():
        results = _operators.grouped_reducescatter(sent, name or "", op, _number_of(process_set), prescale_factor,
                                                   postscale_factor)
    elif any(map(_records, sent)):
        results = _grad.GroupedReducescatter.apply(name or "", op, process_set, prescale_factor, postscale_factor, *sent)
    else:
        results = grouped_reducescatter_async(sent, name, op, process_set, prescale_factor, postscale_factor).wait()
    return [compression.decompress(result, context) for result, (_, context) in zip(results, pairs)]


def _handle_of(handle: typing.Any) -> Handle:
    if not isinstance(handle, Handle):
        raise UsageError(f"handle: expected one that an asynchronous call has returned, got {handle!r}")
    return handle


def poll(handle: Handle) -> bool:
    """Whether synchronize() would return at once."""
    return _handle_of(handle).poll()


def synchronize(handle: Handle) -> typing.Any:
    """Waits for an asynchronous operation and returns its result: a tensor, a list for a group, or a tensor and the received
    splits for alltoall with splits. Raises the operation's error."""
    return _handle_of(handle).wait()


def join(device: int = -1) -> int:
    """Declares that this rank has no more data, and waits until all ranks have done so. Until then this rank contributes zeros,
    or no rows, to the operations of the other ranks. Returns the last rank to join. `device` is not used."""
    del device
    return _native.join()


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Returns when every rank of the set has called it."""
    _native.barrier(_native_of(process_set))
