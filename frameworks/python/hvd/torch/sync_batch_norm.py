"""SyncBatchNorm: batch normalization with the statistics of the batches of all ranks."""

from __future__ import annotations

import typing

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from .. import _loader
from ..errors import UsageError
from .process_sets import ProcessSet, _native_of, global_process_set

__all__ = ["SyncBatchNorm", "convert_sync_batchnorm"]

_native = _loader.native()


class SyncBatchNorm(_BatchNorm):
    """In training, forward and backward equal those of BatchNorm on the joined batch. In evaluation, and with one rank, the layer
    is BatchNorm and does not communicate. All ranks of `process_set` run the same layers in the same order."""

    process_set: ProcessSet = global_process_set
    _layer: typing.Any = None

    def __init__(self, num_features: int, eps: float = 1e-5, momentum: float | None = 0.1, affine: bool = True,
                 track_running_stats: bool = True) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2 or input.size(1) != self.num_features:
            raise UsageError(f"SyncBatchNorm: input: expected {self.num_features} features in dimension 1, got shape "
                             f"{list(input.shape)}")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self._check_input_dim(input)
        if not self.training or _native_of(self.process_set).size() == 1:
            return super().forward(input)
        factor = 0.0
        if self.track_running_stats:
            self.num_batches_tracked.add_(1)
            factor = 1 / self.num_batches_tracked.item() if self.momentum is None else self.momentum
        if self._layer is None:
            self._layer = _native.BatchNormLayer(self.num_features, self.eps, self.track_running_stats,
                                                 _native_of(self.process_set))
        flat = input.flatten(2) if input.dim() > 3 else input
        output = self._layer.forward(flat, self.weight, self.bias, self.running_mean, self.running_var, factor)
        return output.reshape(input.shape)

    def __getstate__(self) -> dict[str, typing.Any]:
        """The state for copies, without the exchange: a copy has its own."""
        return {key: value for key, value in self.__dict__.items() if key != "_layer"}


def convert_sync_batchnorm(module: torch.nn.Module, process_set: ProcessSet = global_process_set) -> torch.nn.Module:
    """Returns the module with every BatchNorm layer replaced by a SyncBatchNorm with the same parameters and buffers."""
    if isinstance(module, _BatchNorm) and not isinstance(module, SyncBatchNorm):
        layer = SyncBatchNorm(module.num_features, module.eps, module.momentum, module.affine, module.track_running_stats)
        layer.weight, layer.bias = module.weight, module.bias
        layer.running_mean, layer.running_var = module.running_mean, module.running_var
        layer.num_batches_tracked, layer.training = module.num_batches_tracked, module.training
        layer.process_set = process_set
        return layer
    for name, child in module.named_children():
        setattr(module, name, convert_sync_batchnorm(child, process_set))
    return module
