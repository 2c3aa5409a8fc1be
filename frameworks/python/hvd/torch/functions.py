"""State that all ranks share: parameters, optimizer state, and objects."""

from __future__ import annotations

import collections.abc
import pickle
import typing

import torch

from .. import _loader
from .._run import dumps as _dumps
from ..errors import MismatchError, UsageError
from .process_sets import ProcessSet, _native_of, global_process_set

__all__ = ["allgather_object", "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters"]

_native = _loader.native()


def broadcast_object(obj: typing.Any, root_rank: int = 0, name: str | None = None,
                     process_set: ProcessSet = global_process_set) -> typing.Any:
    """Returns the root's object, which is pickled. The other ranks' objects are not used. Collective over the set."""
    own = _native.rank() == root_rank
    received = _native.broadcast_bytes(_dumps(obj) if own else b"", root_rank, name or "", _native_of(process_set))
    return obj if own else pickle.loads(received)


def allgather_object(obj: typing.Any, name: str | None = None) -> list[typing.Any]:
    """Returns the objects of all ranks, which are pickled, in rank order. Collective over all ranks."""
    return [pickle.loads(one) for one in _native.allgather_bytes(_dumps(obj), name or "", _native_of(global_process_set))]


def broadcast_parameters(params: typing.Any, root_rank: int) -> None:
    """Overwrites the tensors of every rank with the root's. Collective over all ranks.

    `params` is a state_dict(), named_parameters(), or a list of pairs of a name and a tensor, or of tensors.
    """
    _native.broadcast_parameters(_named_tensors(params), root_rank, _native_of(global_process_set))


def _named_tensors(params: typing.Any) -> list[tuple[str, torch.Tensor]]:
    if isinstance(params, collections.abc.Mapping):
        items = sorted(params.items())
    elif isinstance(params, collections.abc.Iterable) and not isinstance(params, (str, torch.Tensor)):
        items = [item if isinstance(item, tuple) else (str(index), item) for index, item in enumerate(params)]
    else:
        raise UsageError(f"broadcast_parameters: params: expected a state_dict() or named_parameters(), got "
                         f"{type(params).__qualname__}")
    named: dict[str, torch.Tensor] = {}
    for name, tensor in items:
        if tensor is None:
            continue
        if not isinstance(tensor, torch.Tensor):
            raise UsageError(f"broadcast_parameters: params: expected tensors, got {type(tensor).__qualname__} for {name!r}")
        if name in named:
            raise UsageError(f"broadcast_parameters: params: expected each name once, got {name!r} twice")
        named[str(name)] = tensor
    return list(named.items())


class _Place:
    """Stands for a tensor in the pickled state of an optimizer."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype


def _mapped(value: typing.Any, change: typing.Callable[[typing.Any], typing.Any]) -> typing.Any:
    """A copy of nested dictionaries, lists and tuples, with `change` applied to everything else."""
    if isinstance(value, dict):
        return {key: _mapped(item, change) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_mapped(item, change) for item in value)
    return change(value)


def _group_sizes(optimizer: torch.optim.Optimizer) -> list[int]:
    return [len(group["params"]) for group in optimizer.param_groups]


def _require_equal_groups(optimizer: torch.optim.Optimizer) -> None:
    """Raises the same MismatchError on every rank if the groups differ, so that no rank is left waiting in a collective."""
    sizes = allgather_object(_group_sizes(optimizer), "broadcast_optimizer_state.groups")
    for rank, other in enumerate(sizes):
        if other != sizes[0]:
            raise MismatchError(f"broadcast_optimizer_state: the numbers of parameters in the groups differ: rank 0 has "
                                f"{sizes[0]}, rank {rank} has {other}; construct the same optimizer on every rank")


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int, model: typing.Any = None) -> None:
    """Replaces the state and the options of the optimizer on every rank with the root's. Collective over all ranks.

    Parameters without a gradient have zeros in `.grad` afterwards. `model` is not used.
    """
    del model
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UsageError("broadcast_optimizer_state: optimizer: expected one whose state is kept for each parameter, got LBFGS")
    _require_equal_groups(optimizer)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
    own = _native.rank() == root_rank
    tensors: list[torch.Tensor] = []

    def take(value: typing.Any) -> typing.Any:
        if not isinstance(value, torch.Tensor):
            return value
        tensors.append(value)
        return _Place(value)

    def put(value: typing.Any) -> typing.Any:
        if not isinstance(value, _Place):
            return value
        tensors.append(torch.empty(value.shape, dtype=value.dtype))
        return tensors[-1]

    state = broadcast_object(_mapped(optimizer.state_dict(), take) if own else None, root_rank,
                             "broadcast_optimizer_state.objects")
    if not own:
        state = _mapped(state, put)
    _native.broadcast_parameters([(f"optimizer.{i}", tensor) for i, tensor in enumerate(tensors)], root_rank,
                                 _native_of(global_process_set))
    if not own:
        optimizer.load_state_dict(state)
