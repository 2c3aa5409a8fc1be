"""GradScaler: like torch.amp.GradScaler, for distributed optimizers."""

from __future__ import annotations

import typing

import torch

from .mpi_ops import Max, allreduce_
from .optimizer import _Distributed
from .process_sets import global_process_set

__all__ = ["GradScaler"]


class GradScaler(torch.amp.GradScaler):
    """Unscales reduced gradients, and skips a step on every rank if a gradient of any rank is not finite.

    ``step(optimizer)`` synchronizes, unscales and steps. To clip gradients, call ``unscale_(optimizer)`` before it. Use one
    scaler for each process set. The default device is the GPU if there is one, otherwise the CPU.
    """

    def __init__(self, device: str | None = None, *arguments: typing.Any, **options: typing.Any) -> None:
        super().__init__(device or ("cuda" if torch.cuda.is_available() else "cpu"), *arguments, **options)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        if not self._enabled:
            return
        if isinstance(optimizer, _Distributed):
            optimizer.synchronize()
        super().unscale_(optimizer)
        process_set = global_process_set
        if isinstance(optimizer, _Distributed) and optimizer._hvd is not None:
            process_set = optimizer._hvd.process_set
        if not process_set.included():
            return
        for found in self._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values():
            allreduce_(found, name="grad_scaler.found_inf", op=Max, process_set=process_set)

    def step(self, optimizer: torch.optim.Optimizer, *arguments: typing.Any, **options: typing.Any) -> typing.Any:
        if not self._enabled or not isinstance(optimizer, _Distributed):
            return super().step(optimizer, *arguments, **options)
        if self._per_optimizer_states[id(optimizer)]["stage"] is torch.amp.grad_scaler.OptState.READY:
            self.unscale_(optimizer)
        with optimizer.skip_synchronize():
            result = super().step(optimizer, *arguments, **options)
        hvd = optimizer._hvd
        if hvd is not None:
            hvd.synchronized = False
            if hvd.gradients is not None:
                hvd.gradients.end_step()  # also after a step that was skipped
        return result
