"""Calls beyond Horovod's, with the results of the C++ library."""

from __future__ import annotations

import collections.abc

import torch

from .. import _loader
from ..errors import UsageError
from .mpi_ops import Sum, allgather
from .process_sets import ProcessSet, _native_of, global_process_set

_native = _loader.native()


def scale_loss(loss: torch.Tensor, process_set: ProcessSet = global_process_set) -> torch.Tensor:
    """Returns loss / size of the set: the sum of the gradients over the ranks is then the gradient of the average loss."""
    return _native.scale_loss(loss, _native_of(process_set))


def all_reduce(parameters: collections.abc.Iterable[torch.Tensor], op: int = Sum,
               process_set: ProcessSet = global_process_set) -> None:
    """Reduces the parameters' ``.grad`` in place, in one group. A ``.grad`` that is None counts as zeros."""
    _native.all_reduce(list(parameters), op, _native_of(process_set))


def gather(tensor: torch.Tensor, dst_rank: int = 0, name: str | None = None,
           process_set: ProcessSet = global_process_set) -> torch.Tensor | None:
    """Like allgather(), but only the destination, a rank of the job, gets the result; the others get None. Not differentiable."""
    return _native.gather(tensor, dst_rank, name or "", _native_of(process_set))


def all_gather_into_tensor(tensor: torch.Tensor, dim: int = 0, name: str | None = None,
                           process_set: ProcessSet = global_process_set) -> torch.Tensor:
    """Like allgather(), with its derivative, but along any dimension."""
    dims = max(tensor.dim(), 1)
    if not -dims <= dim < dims:
        raise UsageError(f"all_gather_into_tensor: dim: expected {-dims} to {dims - 1} for a tensor of shape "
                         f"{list(tensor.shape)}, got {dim}")
    if dim in (0, -dims):
        return allgather(tensor, name, process_set)
    return allgather(tensor.movedim(dim, 0), name, process_set).movedim(0, dim).contiguous()
