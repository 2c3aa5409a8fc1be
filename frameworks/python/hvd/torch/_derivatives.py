"""The derivatives of the collectives, with Horovod's factors. backward() communicates, under the name of the operation
followed by ".backward", so every rank must run it."""

from __future__ import annotations

import typing

import torch

from .. import _loader
from ..errors import UsageError
from .process_sets import _native_of

_native = _loader.native()
_Ctx = typing.Any
_DIFFERENTIABLE = (0, 1)  # Average and Sum


def _backward_name(name: str) -> str:
    return f"{name}.backward" if name else ""


def _refuse_op(op: int) -> None:
    if op not in _DIFFERENTIABLE:
        names = ("Average", "Sum", "Adasum", "Min", "Max", "Product")
        raise UsageError(f"allreduce: op {names[op]} has no derivative, but backward() has reached it; use Average or Sum, or "
                         "detach() the tensor")


class Allreduce(torch.autograd.Function):
    """Backward: the same reduction of the gradient."""

    @staticmethod
    def forward(ctx: _Ctx, tensor: torch.Tensor, name: str, op: int, prescale: float, postscale: float,
                process_set: typing.Any) -> torch.Tensor:
        ctx.how = (_backward_name(name), op, prescale, postscale, process_set)
        return _native.allreduce(tensor, name, op, prescale, postscale, _native_of(process_set))

    @staticmethod
    def backward(ctx: _Ctx, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        from .mpi_ops import allreduce

        name, op, prescale, postscale, process_set = ctx.how
        _refuse_op(op)
        reduced = allreduce(gradient, name=name, op=op, prescale_factor=prescale, postscale_factor=postscale,
                            process_set=process_set)
        return reduced, None, None, None, None, None


class GroupedAllreduce(torch.autograd.Function):
    """Backward: the same reduction of the gradients."""

    @staticmethod
    def forward(ctx: _Ctx, name: str, op: int, prescale: float, postscale: float, process_set: typing.Any,
                *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.how = (_backward_name(name), op, prescale, postscale, process_set)
        handle = _native.grouped_allreduce_async(list(tensors), name, op, prescale, postscale, _native_of(process_set))
        return tuple(handle.wait())

    @staticmethod
    def backward(ctx: _Ctx, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        from .mpi_ops import grouped_allreduce

        name, op, prescale, postscale, process_set = ctx.how
        _refuse_op(op)
        reduced = grouped_allreduce(gradients, name=name, op=op, prescale_factor=prescale, postscale_factor=postscale,
                                    process_set=process_set)
        return (None, None, None, None, None, *reduced)


def _rows_of(tensor: torch.Tensor) -> int:
    return tensor.shape[0] if tensor.dim() else 1


def _first_rows(counts: torch.Tensor, process_set: typing.Any) -> list[int]:
    """The first row of each of this rank's tensors in the results. `counts` has a row per rank, a column per tensor."""
    return counts[:process_set.rank()].sum(0).tolist()


class GroupedAllgather(torch.autograd.Function):
    """Backward: this rank's rows of the average of the gradients."""

    @staticmethod
    def forward(ctx: _Ctx, name: str, process_set: typing.Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        native = _native_of(process_set)
        counts = torch.tensor([[_rows_of(tensor) for tensor in tensors]])
        handle = _native.grouped_allgather_async([*tensors, counts], name, native)
        *results, all_counts = handle.wait()
        ctx.shapes = [tensor.shape for tensor in tensors]
        ctx.first_rows = _first_rows(all_counts, process_set)
        ctx.name, ctx.process_set = _backward_name(name), process_set
        return tuple(results)

    @staticmethod
    def backward(ctx: _Ctx, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        from .mpi_ops import Average, grouped_allreduce

        averages = grouped_allreduce(gradients, name=ctx.name, op=Average, process_set=ctx.process_set)
        own = [average[first:first + (shape[0] if shape else 1)].reshape(shape)
               for average, first, shape in zip(averages, ctx.first_rows, ctx.shapes)]
        return (None, None, *own)


class Allgather(torch.autograd.Function):
    """Backward: this rank's rows of the average of the gradients."""

    @staticmethod
    def forward(ctx: _Ctx, tensor: torch.Tensor, name: str, process_set: typing.Any) -> torch.Tensor:
        native = _native_of(process_set)
        counts = torch.tensor([[_rows_of(tensor)]])
        rows = _native.allgather_async(counts, f"{name}.rows" if name else "", native)
        result = _native.allgather_async(tensor, name, native).wait()
        ctx.first_rows = _first_rows(rows.wait(), process_set)
        ctx.shape, ctx.name, ctx.process_set = tensor.shape, _backward_name(name), process_set
        return result

    @staticmethod
    def backward(ctx: _Ctx, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        from .mpi_ops import Average, allreduce

        average = allreduce(gradient, name=ctx.name, op=Average, process_set=ctx.process_set)
        first, rows = ctx.first_rows[0], ctx.shape[0] if ctx.shape else 1
        return average[first:first + rows].reshape(ctx.shape), None, None


class Broadcast(torch.autograd.Function):
    """Backward: the average of the gradients on the root, zeros on the other ranks."""

    @staticmethod
    def forward(ctx: _Ctx, tensor: torch.Tensor, root_rank: int, name: str, process_set: typing.Any) -> torch.Tensor:
        ctx.root_rank, ctx.name, ctx.process_set = root_rank, _backward_name(name), process_set
        return _native.broadcast_async(tensor, root_rank, name, _native_of(process_set)).wait()

    @staticmethod
    def backward(ctx: _Ctx, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        from .mpi_ops import Average, allreduce

        average = allreduce(gradient, name=ctx.name, op=Average, process_set=ctx.process_set)
        if _native.rank() != ctx.root_rank:
            average = average * 0
        return average, None, None, None


class Alltoall(torch.autograd.Function):
    """Backward: the reverse exchange."""

    @staticmethod
    def forward(ctx: _Ctx, tensor: torch.Tensor, splits: torch.Tensor | None, name: str,
                process_set: typing.Any) -> typing.Any:
        native = _native_of(process_set)
        size = native.size()
        sent = splits
        if sent is None and tensor.dim() and tensor.shape[0] % size == 0:
            sent = torch.full((size,), tensor.shape[0] // size, dtype=torch.int32)
        result = _native.alltoall_async(tensor, sent, name, native).wait()
        ctx.name, ctx.process_set = _backward_name(name), process_set
        ctx.received_splits = result[1]
        if splits is None:
            return result[0]
        ctx.mark_non_differentiable(result[1])
        return result

    @staticmethod
    def backward(ctx: _Ctx, gradient: torch.Tensor, *_: typing.Any) -> tuple[torch.Tensor | None, ...]:
        from .mpi_ops import alltoall

        own, _splits = alltoall(gradient, ctx.received_splits, ctx.name, ctx.process_set)
        return own, None, None, None


def _scattered(gradient: torch.Tensor, op: int, process_set: typing.Any, prescale: float, postscale: float) -> torch.Tensor:
    factor = prescale * postscale * (process_set.size() if op == 1 else 1)
    return gradient if factor == 1 else gradient * factor


class Reducescatter(torch.autograd.Function):
    """Backward: the gathered gradient, times both factors and, for a sum, times the size of the set."""

    @staticmethod
    def forward(ctx: _Ctx, tensor: torch.Tensor, name: str, op: int, process_set: typing.Any, prescale: float,
                postscale: float) -> torch.Tensor:
        ctx.name, ctx.how = _backward_name(name), (op, process_set, prescale, postscale)
        return _native.reducescatter_async(tensor, name, op, prescale, postscale, _native_of(process_set)).wait()

    @staticmethod
    def backward(ctx: _Ctx, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        from .mpi_ops import allgather

        whole = allgather(_scattered(gradient, *ctx.how), ctx.name, ctx.how[1])
        return whole, None, None, None, None, None


class GroupedReducescatter(torch.autograd.Function):
    """Backward: as Reducescatter."""

    @staticmethod
    def forward(ctx: _Ctx, name: str, op: int, process_set: typing.Any, prescale: float, postscale: float,
                *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.name, ctx.how = _backward_name(name), (op, process_set, prescale, postscale)
        handle = _native.grouped_reducescatter_async(list(tensors), name, op, prescale, postscale, _native_of(process_set))
        return tuple(handle.wait())

    @staticmethod
    def backward(ctx: _Ctx, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        from .mpi_ops import grouped_allgather

        whole = grouped_allgather([_scattered(gradient, *ctx.how) for gradient in gradients], ctx.name, ctx.how[1])
        return (None, None, None, None, None, *whole)
