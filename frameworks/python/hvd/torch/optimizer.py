"""DistributedOptimizer: an optimizer of torch.optim whose gradients are reduced over the ranks."""

from __future__ import annotations

import collections.abc
import contextlib
import gc
import itertools
import typing
import warnings
import weakref

import torch
from torch.utils.weak import WeakIdKeyDictionary

from .. import _loader
from ..errors import UsageError
from ._python_gradients import PythonGradients
from .compression import BF16Compressor, Compression, Compressor, FP16Compressor, NoneCompressor
from .mpi_ops import Adasum, Average, Sum, allreduce, grouped_allreduce
from .process_sets import ProcessSet, _native_of, global_process_set

__all__ = ["DistributedOptimizer"]

_native = _loader.native()
_NATIVE_COMPRESSIONS = {NoneCompressor: 0, FP16Compressor: 1, BF16Compressor: 2}
_adasum_names = itertools.count()
_classes: dict[type, type] = {}
_Named = list[tuple[str, torch.Tensor]]
# The optimizer that reduces the gradient of each parameter, by weak references.
_owners: typing.Any = WeakIdKeyDictionary()


class _Distribution:
    """The reduction of the gradients of one optimizer."""

    def __init__(self, op: int, process_set: ProcessSet, compression: type[Compressor], sparse_as_dense: bool) -> None:
        self.op, self.process_set, self.compression = op, process_set, compression
        self.sparse_as_dense = sparse_as_dense
        self.gradients: typing.Any = None  # None: this rank steps alone
        self.make_gradients: typing.Any = None  # makes them for a list of names and parameters
        self.known: dict[torch.Tensor, str] = {}  # the names that the program has given
        self.accumulating = 0  # contexts of no_sync()
        self.adasum_name: str | None = None
        self.synchronized = False  # by a call of synchronize() since the last step()
        self.skips = 0
        self.warned = False
        self.sparse_dims: dict[torch.Tensor, int] = {}

    def synchronize(self, optimizer: torch.optim.Optimizer) -> None:
        if self.sparse_as_dense:
            for parameter in _parameters_of(optimizer):
                if parameter.grad is not None and parameter.grad.is_sparse:
                    self.sparse_dims[parameter] = parameter.grad.sparse_dim()
        self.gradients.synchronize()
        if self.sparse_as_dense:
            self._make_sparse(optimizer)

    def _make_sparse(self, optimizer: torch.optim.Optimizer) -> None:
        """Makes gradients sparse that are dense because this rank had none in this step; SparseAdam needs sparse ones."""
        always = isinstance(optimizer, torch.optim.SparseAdam)
        for parameter in _parameters_of(optimizer):
            dims = self.sparse_dims.get(parameter, 1 if always else None)
            if dims is not None and parameter.grad is not None and not parameter.grad.is_sparse:
                dense = parameter.grad
                parameter.grad = None
                parameter.grad = dense.to_sparse(dims)

    def warn_of_synchronize(self) -> None:
        if self.warned:
            return
        self.warned = True
        warnings.warn("optimizer.step() called without optimizer.skip_synchronize() after optimizer.synchronize(). The gradients "
                      "are not reduced again; if this is intended, call step() in the context of skip_synchronize()", stacklevel=3)

    def reduced_loss(self, optimizer: torch.optim.Optimizer, closure: typing.Callable[[], typing.Any]) -> typing.Any:
        """Evaluates a closure, and reduces the gradients and the loss, so that all ranks make the same decisions."""
        self.gradients.end_step()
        loss = closure()
        self.synchronize(optimizer)
        if not isinstance(loss, torch.Tensor):
            return loss
        return allreduce(loss.detach(), op=Sum if self.op == Sum else Average, process_set=self.process_set)


def _parameters_of(optimizer: torch.optim.Optimizer) -> collections.abc.Iterator[torch.Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


class _Distributed:
    """The first base of the class of a distributed optimizer. The second one is the class of the wrapped optimizer."""

    _hvd: _Distribution | None = None  # None: a copy, which does not reduce
    _parameter_names: dict[torch.Tensor, str] = {}
    backward_passes_per_step = 1

    def synchronize(self) -> None:
        """Returns when every gradient is final. Clip and inspect gradients after this."""
        hvd = self._hvd
        if hvd is not None and hvd.gradients is not None:
            hvd.synchronize(self)
            hvd.synchronized = True

    @contextlib.contextmanager
    def skip_synchronize(self) -> collections.abc.Iterator[None]:
        """Within the context, step() does not synchronize. Call synchronize() before it."""
        hvd = self._hvd
        if hvd is None:
            yield
            return
        hvd.skips += 1
        try:
            yield
        finally:
            hvd.skips -= 1

    @contextlib.contextmanager
    def no_sync(self) -> collections.abc.Iterator[None]:
        """Within the context backward passes accumulate locally and do not count as passes. step() still reduces."""
        gradients = self._hvd.gradients if self._hvd is not None else None
        if gradients is None:
            yield
            return
        gradients.accumulate(True)
        self._hvd.accumulating += 1
        try:
            yield
        finally:
            gradients.accumulate(False)
            self._hvd.accumulating -= 1

    def set_backward_passes_per_step(self, passes: int) -> None:
        """The number of backward passes whose gradients add up before they are reduced."""
        _check_passes(passes)
        if self._hvd is not None and self._hvd.gradients is not None:
            self._hvd.gradients.set_backward_passes_per_step(passes)
        self.backward_passes_per_step = passes

    def step(self, closure: typing.Any = None) -> typing.Any:
        """Waits for the gradients, unless synchronize() has done so, then makes the step. With a closure the gradients and the
        loss are reduced after each evaluation."""
        hvd = self._hvd
        if hvd is None:
            return super().step(closure)
        if hvd.adasum_name is not None:
            return self._step_by_changes(closure)
        if hvd.gradients is None:
            return super().step(closure)
        if hvd.skips:
            if hvd.gradients.in_flight():
                raise UsageError("step() within skip_synchronize(): gradients are still being reduced; call synchronize() after "
                                 "backward() and before step()")
            result = super().step(closure)
        elif closure is not None:
            result = super().step(lambda: hvd.reduced_loss(self, closure))
        else:
            if hvd.synchronized:
                hvd.warn_of_synchronize()
            hvd.synchronize(self)
            result = super().step()
        hvd.synchronized = False
        hvd.gradients.end_step()
        return result

    step.hooked = True  # the wrapped class's step() runs the step hooks

    def _step_by_changes(self, closure: typing.Any) -> typing.Any:
        """Each rank steps by its own gradients. The parameters then change by the Adasum of the changes."""
        hvd = self._hvd
        parameters = [parameter for parameter in _parameters_of(self) if parameter.requires_grad]
        before = [parameter.detach().clone() for parameter in parameters]
        result = super().step(closure)
        with torch.no_grad():
            changes = torch._foreach_sub([parameter.detach() for parameter in parameters], before)
            combined = grouped_allreduce(changes, name=hvd.adasum_name, compression=hvd.compression, op=Adasum,
                                         process_set=hvd.process_set)
            torch._foreach_add_(before, combined)
            torch._foreach_copy_([parameter.detach() for parameter in parameters], before)
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Waits for gradients that are still being reduced, and drops all gradients."""
        hvd = self._hvd
        if hvd is not None:
            hvd.synchronized = False
            if hvd.gradients is not None:
                hvd.gradients.discard()
        super().zero_grad(set_to_none)

    def load_state_dict(self, state_dict: typing.Any) -> None:
        """Like the wrapped optimizer's. Drops gradients that are being reduced."""
        hvd = self._hvd
        if hvd is not None and hvd.gradients is not None and hvd.gradients.in_flight():
            hvd.gradients.discard()
        super().load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, typing.Any]) -> None:
        """Like the wrapped optimizer's. Every rank of the set calls it between the same steps, with the same parameters, which get
        the names that `named_parameters` has for them. Raises UsageError while gradients are being reduced."""
        hvd = self._hvd
        if hvd is None or hvd.make_gradients is None:
            super().add_param_group(param_group)
            return
        if hvd.gradients.in_flight() or hvd.accumulating:
            raise UsageError("add_param_group: expected a call after step() and outside of no_sync(), got one while gradients are "
                             "being reduced or accumulated")
        super().add_param_group(param_group)
        names = self._parameter_names
        added = [parameter for parameter in _parameters_of(self) if parameter not in names]
        _refuse_owned(added)
        for parameter in added:
            names[parameter] = hvd.known.get(parameter, f"added.{len(names)}")
        hvd.gradients = None  # removes the old hooks before new ones are added
        hvd.gradients = hvd.make_gradients([(names[parameter], parameter) for parameter in dict.fromkeys(_parameters_of(self))],
                                           self.backward_passes_per_step)
        _own(_parameters_of(self), hvd.gradients)

    def __reduce_ex__(self, protocol: typing.Any) -> tuple[typing.Any, ...]:
        return _bare, (type(self).__mro__[2],), self.__getstate__()


def _bare(wrapped: type) -> torch.optim.Optimizer:
    """An optimizer without a state, for copies and pickles."""
    kind = _class_for(wrapped)
    return kind.__new__(kind)


def _class_for(wrapped: type) -> type:
    if wrapped not in _classes:
        _classes[wrapped] = type(wrapped.__name__, (_Distributed, wrapped), {"__module__": wrapped.__module__,
                                                                             "__doc__": wrapped.__doc__})
    return _classes[wrapped]


def _check_passes(passes: int) -> None:
    if not isinstance(passes, int) or passes < 1:
        raise UsageError(f"backward_passes_per_step: expected at least 1, got {passes!r}")


def _names_for(optimizer: torch.optim.Optimizer, named_parameters: typing.Any) -> tuple[_Named, dict[torch.Tensor, str]]:
    """The optimizer's parameters, each once, with their names, and the name of every parameter that the program has given.
    Raises UsageError."""
    own = list(dict.fromkeys(_parameters_of(optimizer)))
    if named_parameters is None:
        return [(f"allreduce.noname.{index}", parameter) for index, parameter in enumerate(own)], {}
    named = list(named_parameters.items() if isinstance(named_parameters, collections.abc.Mapping) else named_parameters)
    if any(not isinstance(item, tuple) or len(item) != 2 for item in named):
        raise UsageError("named_parameters: expected pairs of a name and a parameter, as model.named_parameters() returns them")
    names = [name for name, _ in named]
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twice:
        raise UsageError(f"named_parameters: expected each name once, got {', '.join(map(str, twice))} several times")
    known: dict[torch.Tensor, str] = {}
    for name, parameter in named:
        known.setdefault(parameter, str(name))
    for index, parameter in enumerate(own):
        if parameter not in known:
            raise UsageError(f"named_parameters: expected a name for every parameter of the optimizer, got none for parameter "
                             f"{index} of shape {list(parameter.shape)}")
    return [(known[parameter], parameter) for parameter in own], known


def _groups_for(groups: typing.Any, named: _Named) -> list[list[str]]:
    """The names of parameters that are reduced together. Raises UsageError."""
    if groups is None:
        return []
    trained = [(name, parameter) for name, parameter in named if parameter.requires_grad]
    if isinstance(groups, int) and not isinstance(groups, bool):
        if groups < 1:
            raise UsageError(f"groups: expected a positive number or lists of parameters, got {groups}")
        count = min(groups, max(len(trained), 1))
        bounds = [i * len(trained) // count for i in range(count + 1)]
        return [[name for name, _ in trained[first:end]] for first, end in itertools.pairwise(bounds)]
    if not isinstance(groups, list):
        raise UsageError(f"groups: expected a positive number or lists of parameters, got {type(groups).__qualname__}")
    names = {parameter: name for name, parameter in named}
    seen: set[torch.Tensor] = set()
    for parameter in itertools.chain.from_iterable(groups):
        if not isinstance(parameter, torch.Tensor) or parameter not in names:
            raise UsageError("groups: expected parameters of the optimizer, got " +
                             (f"a tensor of shape {list(parameter.shape)} that is none" if isinstance(parameter, torch.Tensor)
                              else repr(parameter)))
        if parameter in seen:
            raise UsageError(f"groups: expected each parameter once, got '{names[parameter]}' twice")
        seen.add(parameter)
    return [[names[parameter] for parameter in group if parameter.requires_grad] for group in groups]


def _refuse_owned(parameters: collections.abc.Iterable[torch.Tensor]) -> None:
    """Raises UsageError for a parameter whose gradient another optimizer reduces."""
    def owned() -> list[torch.Tensor]:
        found = []
        for parameter in parameters:
            owner = _owners.get(parameter)
            if owner is not None and owner() is not None:
                found.append(parameter)
        return found

    parameters = list(parameters)
    if owned():
        gc.collect()  # a dropped optimizer may be in a reference cycle, such as a scheduler makes
    twice = owned()
    if twice:
        raise UsageError(f"DistributedOptimizer: expected parameters that no other one has, got a parameter of shape "
                         f"{list(twice[0].shape)} whose gradient would be reduced twice; delete the other optimizer first")


def _own(parameters: collections.abc.Iterable[torch.Tensor], gradients: typing.Any) -> None:
    owner = weakref.ref(gradients)
    for parameter in parameters:
        _owners[parameter] = owner


def _check(optimizer: typing.Any, op: int, predivide: float, passes: int) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(f"optimizer: expected one of torch.optim, got {type(optimizer).__qualname__}")
    if isinstance(optimizer, _Distributed):
        raise UsageError("optimizer: expected one that is not distributed yet: its gradients would be reduced twice")
    if op not in (Average, Sum, Adasum):
        raise UsageError(f"op: expected hvd.Average, hvd.Sum or hvd.Adasum, got {op}")
    if predivide != 1.0 and op != Average:
        raise UsageError(f"gradient_predivide_factor: expected 1 for another op than Average, got {predivide}")
    _check_passes(passes)


def DistributedOptimizer(optimizer: torch.optim.Optimizer, named_parameters: typing.Any = None,
                         compression: type[Compressor] = Compression.none, backward_passes_per_step: int = 1, op: int = Average,
                         gradient_predivide_factor: float = 1.0, num_groups: int = 0, groups: typing.Any = None,
                         sparse_as_dense: bool = False, process_set: ProcessSet = global_process_set, *,
                         gradient_as_bucket_view: bool = True, check_every: int = 0) -> torch.optim.Optimizer:
    """An optimizer that reduces the gradients over the ranks, as backward produces them, before it makes a step.

    The result is of a class derived from the optimizer's, and shares its parameter groups, state and defaults. Every rank of the
    set calls this in the same order with equal arguments; a rank outside the set makes its steps alone. The last two
    arguments are those of hvd::DistributedOptimizerOptions. With op Adasum each rank steps by its own gradients, and the changes
    are combined.
    """
    _check(optimizer, op, gradient_predivide_factor, backward_passes_per_step)
    if num_groups:
        warnings.warn("Parameter `num_groups` has been replaced by `groups`", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    named, known = _names_for(optimizer, named_parameters)
    grouped = _groups_for(groups, named)
    native_set = _native_of(process_set)
    kind = _class_for(type(optimizer))
    result = kind.__new__(kind)
    # Does not copy `step`, which a scheduler of the wrapped optimizer may have replaced.
    result.__dict__.update((key, value) for key, value in optimizer.__dict__.items() if key != "step")
    result._parameter_names = {parameter: name for name, parameter in named}
    result.backward_passes_per_step = backward_passes_per_step
    hvd = result._hvd = _Distribution(op, process_set, compression, sparse_as_dense)
    if native_set.rank() < 0 or not named:
        return result
    if op == Adasum:
        hvd.adasum_name = f"adasum{next(_adasum_names)}" if native_set.size() > 1 else None
        return result

    def make_gradients(named: _Named, passes: int) -> typing.Any:
        if compression not in _NATIVE_COMPRESSIONS:
            return PythonGradients(named, op, compression, passes, gradient_predivide_factor, process_set)
        return _native.make_gradients(named, op == Average, _NATIVE_COMPRESSIONS[compression], passes, gradient_predivide_factor,
                                      grouped, sparse_as_dense, gradient_as_bucket_view, check_every, native_set)

    _refuse_owned(parameter for _, parameter in named)
    hvd.known, hvd.make_gradients = known, make_gradients
    hvd.gradients = make_gradients(named, backward_passes_per_step)
    _own((parameter for _, parameter in named), hvd.gradients)
    return result
