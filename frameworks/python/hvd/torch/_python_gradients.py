"""The reduction of gradients with the program's own class of compression, in Python hooks."""

from __future__ import annotations

import typing
import weakref

import torch

from ..errors import UsageError
from .compression import Compressor
from .mpi_ops import Average, allreduce_async_
from .process_sets import ProcessSet


class PythonGradients:
    """Has the methods of the native class Gradients. Sparse gradients are made dense."""

    def __init__(self, named: list[tuple[str, torch.Tensor]], op: int, compression: type[Compressor], passes: int,
                 predivide: float, process_set: ProcessSet) -> None:
        self._named, self._passes, self._compression = named, passes, compression
        factors = (1 / predivide, predivide) if op == Average else (1.0, 1.0)
        self._how: dict[str, typing.Any] = {"op": op, "prescale_factor": factors[0], "postscale_factor": factors[1],
                                            "process_set": process_set}
        self._counts: dict[torch.Tensor, int] = {}
        self._handles: dict[torch.Tensor, tuple[typing.Any, typing.Any]] = {}
        self._accumulating, self._reduced = 0, False
        self._hooks = [self._hook(name, parameter) for name, parameter in named if parameter.requires_grad]

    def _hook(self, name: str, parameter: torch.Tensor) -> typing.Any:
        weak = weakref.ref(self)

        def hook(parameter: torch.Tensor) -> None:
            self = weak()
            if self is not None:
                self._accumulated(name, parameter)

        return parameter.register_post_accumulate_grad_hook(hook)

    def _accumulated(self, name: str, parameter: torch.Tensor) -> None:
        self._reduced = False
        if self._accumulating:
            return
        count = self._counts[parameter] = self._counts.get(parameter, 0) + 1
        if count > self._passes:
            raise UsageError(f"DistributedOptimizer: backward() reached parameter '{name}' again after its gradient was handed over "
                             f"for this step; expected {self._passes} backward pass(es) for each step")
        if count == self._passes:
            self._start(name, parameter)

    def _start(self, name: str, parameter: torch.Tensor) -> None:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradient = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
        sent, context = self._compression.compress(gradient)
        self._handles[parameter] = (allreduce_async_(sent, name=f"compressed.{name}", **self._how), context)

    def synchronize(self) -> None:
        if self._reduced:
            return
        for name, parameter in self._named:
            if parameter.requires_grad and parameter not in self._handles:
                self._start(name, parameter)
        try:
            for parameter, (handle, context) in self._handles.items():
                parameter.grad = self._compression.decompress(handle.wait(), context)
        finally:
            self._handles.clear()
            self._counts.clear()
        self._reduced = True

    def end_step(self) -> None:
        self._reduced = False

    def discard(self) -> None:
        """Other ranks may have submitted all gradients, so this rank completes them."""
        if self._handles:
            self.synchronize()
        self._counts.clear()
        self._reduced = False

    def in_flight(self) -> bool:
        return bool(self._handles)

    def synchronized(self) -> bool:
        return self._reduced

    def accumulate(self, begin: bool) -> None:
        self._accumulating += 1 if begin else -1

    def set_backward_passes_per_step(self, passes: int) -> None:
        self._passes = passes
