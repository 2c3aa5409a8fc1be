"""The blocking collectives as operators of torch.library: torch.compile keeps them in its graphs, in the order of the program.

They are registered with an effect, so no pass of the compiler merges, moves or drops one. Results whose rows depend on other
ranks have a size that is known only at run time. A process set is given by its number.
"""

from __future__ import annotations

import typing

import torch
from torch.library import custom_op

from .. import _loader
from ..errors import UsageError
from . import process_sets as _sets
from ._derivatives import _backward_name, _refuse_op

_native = _loader.native()
_AVERAGE, _SUM = 0, 1
_Ctx = typing.Any


def _set_of(number: int) -> typing.Any:
    """The native set with that number."""
    known = _sets.global_process_set if number == 0 else _sets._added.get(number)
    if known is None:
        raise UsageError(f"process_set: expected a set of this job, got the number {number}, which a compiled function has kept; "
                         "call torch.compiler.reset() after remove_process_set() or shutdown()")
    return known._native


def _new_size() -> typing.Any:
    """A size that depends on the other ranks. torch.library's own function for it works only if a setting allows it."""
    context = torch.library.get_ctx()
    shape_env = context._shape_env
    if shape_env is None:
        raise UsageError("hvd: the number of rows depends on the other ranks, which a fake tensor does not have")
    size = shape_env.create_unbacked_symint()
    torch._check(size >= 0)
    return size


def _empty_rows(tensor: torch.Tensor, rows: typing.Any) -> torch.Tensor:
    return tensor.new_empty((rows, *tensor.shape[1:]))


def _share(tensor: torch.Tensor, number: int) -> typing.Any:
    """The rows of this rank in the result of a reducescatter."""
    process_set = _set_of(number)
    size, rank = process_set.size(), process_set.rank()
    return tensor.shape[0] // size + (1 if rank < tensor.shape[0] % size else 0)


@custom_op("hvd::allreduce", mutates_args=())
def allreduce(tensor: torch.Tensor, name: str, op: int, prescale: float, postscale: float, process_set: int) -> torch.Tensor:
    return _native.allreduce(tensor, name, op, prescale, postscale, _set_of(process_set))


@allreduce.register_fake
def _(tensor: torch.Tensor, *_: typing.Any) -> torch.Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


@custom_op("hvd::grouped_allreduce", mutates_args=())
def grouped_allreduce(tensors: list[torch.Tensor], name: str, op: int, prescale: float, postscale: float,
                      process_set: int) -> list[torch.Tensor]:
    return _native.grouped_allreduce_async(tensors, name, op, prescale, postscale, _set_of(process_set)).wait()


@grouped_allreduce.register_fake
def _(tensors: list[torch.Tensor], *_: typing.Any) -> list[torch.Tensor]:
    return [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in tensors]


@custom_op("hvd::allgather", mutates_args=())
def allgather(tensor: torch.Tensor, name: str, process_set: int) -> torch.Tensor:
    return _native.allgather_async(tensor, name, _set_of(process_set)).wait()


@allgather.register_fake
def _(tensor: torch.Tensor, *_: typing.Any) -> torch.Tensor:
    return _empty_rows(tensor, _new_size())


@custom_op("hvd::grouped_allgather", mutates_args=())
def grouped_allgather(tensors: list[torch.Tensor], name: str, process_set: int) -> list[torch.Tensor]:
    return _native.grouped_allgather_async(tensors, name, _set_of(process_set)).wait()


@grouped_allgather.register_fake
def _(tensors: list[torch.Tensor], *_: typing.Any) -> list[torch.Tensor]:
    return [_empty_rows(tensor, _new_size()) for tensor in tensors]


@custom_op("hvd::broadcast", mutates_args=())
def broadcast(tensor: torch.Tensor, root_rank: int, name: str, process_set: int) -> torch.Tensor:
    return _native.broadcast_async(tensor, root_rank, name, _set_of(process_set)).wait()


@broadcast.register_fake
def _(tensor: torch.Tensor, *_: typing.Any) -> torch.Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


@custom_op("hvd::alltoall", mutates_args=())
def alltoall(tensor: torch.Tensor, splits: torch.Tensor, name: str, process_set: int) -> list[torch.Tensor]:
    """The received rows and splits. Returns a list, because inductor does not find new sizes in a pair."""
    return list(_native.alltoall_async(tensor, splits, name, _set_of(process_set)).wait())


@alltoall.register_fake
def _(tensor: torch.Tensor, splits: torch.Tensor, *_: typing.Any) -> list[torch.Tensor]:
    return [_empty_rows(tensor, _new_size()), torch.empty_like(splits)]


@custom_op("hvd::reducescatter", mutates_args=())
def reducescatter(tensor: torch.Tensor, name: str, op: int, process_set: int, prescale: float, postscale: float) -> torch.Tensor:
    return _native.reducescatter_async(tensor, name, op, prescale, postscale, _set_of(process_set)).wait()


@reducescatter.register_fake
def _(tensor: torch.Tensor, name: str, op: int, process_set: int, *_: typing.Any) -> torch.Tensor:
    return _empty_rows(tensor, _share(tensor, process_set))


@custom_op("hvd::grouped_reducescatter", mutates_args=())
def grouped_reducescatter(tensors: list[torch.Tensor], name: str, op: int, process_set: int, prescale: float,
                          postscale: float) -> list[torch.Tensor]:
    return _native.grouped_reducescatter_async(tensors, name, op, prescale, postscale, _set_of(process_set)).wait()


@grouped_reducescatter.register_fake
def _(tensors: list[torch.Tensor], name: str, op: int, process_set: int, *_: typing.Any) -> list[torch.Tensor]:
    return [_empty_rows(tensor, _share(tensor, process_set)) for tensor in tensors]


# The backward functions of operators that change the number of rows. `rows` are the numbers of rows of the gradients to return.


@custom_op("hvd::allgather_backward", mutates_args=())
def allgather_backward(gradients: list[torch.Tensor], rows: list[int], name: str, process_set: int) -> list[torch.Tensor]:
    native = _set_of(process_set)
    counts = _native.allgather_async(torch.tensor([rows]), f"{name}.rows" if name else "", native).wait()
    averages = _native.grouped_allreduce_async(gradients, name, _AVERAGE, 1.0, 1.0, native).wait()
    first = counts[:native.rank()].sum(0).tolist()
    return [average[begin:begin + count].clone() for average, begin, count in zip(averages, first, rows)]


@allgather_backward.register_fake
def _(gradients: list[torch.Tensor], rows: list[int], *_: typing.Any) -> list[torch.Tensor]:
    return [_empty_rows(gradient, count) for gradient, count in zip(gradients, rows)]


@custom_op("hvd::reducescatter_backward", mutates_args=())
def reducescatter_backward(gradients: list[torch.Tensor], rows: list[int], name: str, process_set: int) -> list[torch.Tensor]:
    return _native.grouped_allgather_async(gradients, name, _set_of(process_set)).wait()


@reducescatter_backward.register_fake
def _(gradients: list[torch.Tensor], rows: list[int], *_: typing.Any) -> list[torch.Tensor]:
    return [_empty_rows(gradient, count) for gradient, count in zip(gradients, rows)]


@custom_op("hvd::alltoall_backward", mutates_args=())
def alltoall_backward(gradient: torch.Tensor, splits: torch.Tensor, rows: int, name: str, process_set: int) -> torch.Tensor:
    return _native.alltoall_async(gradient, splits, name, _set_of(process_set)).wait()[0]


@alltoall_backward.register_fake
def _(gradient: torch.Tensor, splits: torch.Tensor, rows: int, *_: typing.Any) -> torch.Tensor:
    return _empty_rows(gradient, rows)


def _keep_arguments(ctx: _Ctx, inputs: tuple[typing.Any, ...], output: typing.Any) -> None:
    first, *ctx.how = inputs
    ctx.rows = [tensor.shape[0] for tensor in first] if isinstance(first, list) else [first.shape[0]] if first.dim() else [1]


def _allreduce_backward(ctx: _Ctx, gradient: torch.Tensor) -> tuple[typing.Any, ...]:
    name, op, *how = ctx.how
    _refuse_op(op)
    return allreduce(gradient.contiguous(), _backward_name(name), op, *how), None, None, None, None, None


def _grouped_allreduce_backward(ctx: _Ctx, gradients: list[torch.Tensor]) -> tuple[typing.Any, ...]:
    name, op, *how = ctx.how
    _refuse_op(op)
    return grouped_allreduce(gradients, _backward_name(name), op, *how), None, None, None, None, None


def _allgather_backward(ctx: _Ctx, gradient: torch.Tensor) -> tuple[typing.Any, ...]:
    name, number = ctx.how
    return allgather_backward([gradient], ctx.rows, _backward_name(name), number)[0], None, None


def _grouped_allgather_backward(ctx: _Ctx, gradients: list[torch.Tensor]) -> tuple[typing.Any, ...]:
    name, number = ctx.how
    return allgather_backward(gradients, ctx.rows, _backward_name(name), number), None, None


def _broadcast_backward(ctx: _Ctx, gradient: torch.Tensor) -> tuple[typing.Any, ...]:
    root_rank, name, number = ctx.how
    average = allreduce(gradient, _backward_name(name), _AVERAGE, 1.0, 1.0, number)
    return average if _native.rank() == root_rank else average * 0, None, None, None


def _keep_alltoall(ctx: _Ctx, inputs: tuple[typing.Any, ...], output: typing.Any) -> None:
    tensor, _splits, *ctx.how = inputs
    ctx.rows = tensor.shape[0]
    ctx.save_for_backward(output[1])


def _alltoall_backward(ctx: _Ctx, gradients: list[torch.Tensor]) -> tuple[typing.Any, ...]:
    name, number = ctx.how
    splits, = ctx.saved_tensors
    return alltoall_backward(gradients[0], splits, ctx.rows, _backward_name(name), number), None, None, None


def _scaled(gradients: list[torch.Tensor], op: int, number: int, prescale: float, postscale: float) -> list[torch.Tensor]:
    factor = prescale * postscale * (_set_of(number).size() if op == _SUM else 1)
    return [gradient * factor for gradient in gradients]


def _reducescatter_backward(ctx: _Ctx, gradient: torch.Tensor) -> tuple[typing.Any, ...]:
    name, *how = ctx.how
    own = reducescatter_backward(_scaled([gradient], *how), ctx.rows, _backward_name(name), how[1])[0]
    return own, None, None, None, None, None


def _grouped_reducescatter_backward(ctx: _Ctx, gradients: list[torch.Tensor]) -> tuple[typing.Any, ...]:
    name, *how = ctx.how
    own = reducescatter_backward(_scaled(gradients, *how), ctx.rows, _backward_name(name), how[1])
    return own, None, None, None, None, None


def _complete() -> None:
    derivatives = ((allreduce, _allreduce_backward), (grouped_allreduce, _grouped_allreduce_backward),
                   (allgather, _allgather_backward), (grouped_allgather, _grouped_allgather_backward),
                   (broadcast, _broadcast_backward), (reducescatter, _reducescatter_backward),
                   (grouped_reducescatter, _grouped_reducescatter_backward))
    for operator, backward in derivatives:
        operator.register_autograd(backward, setup_context=_keep_arguments)
    alltoall.register_autograd(_alltoall_backward, setup_context=_keep_alltoall)
    for operator in (*(pair[0] for pair in derivatives), alltoall, allgather_backward, reducescatter_backward, alltoall_backward):
        operator.register_effect(torch.library.EffectType.ORDERED)


_complete()
