"""Gradient compression: classes with compress() and decompress()."""

from __future__ import annotations

import typing

import torch

__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


class Compressor:
    """The interface. Programs may derive their own classes."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, typing.Any]:
        """Returns the tensor to send, and a context for decompress()."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: typing.Any) -> torch.Tensor:
        """Returns the reduced tensor in its original form."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sends tensors as they are."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, typing.Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: typing.Any) -> torch.Tensor:
        del ctx
        return tensor


class _CastCompressor(Compressor):
    """Sends floating-point tensors as another type, and restores their type."""

    dtype: torch.dtype

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, typing.Any]:  # type: ignore[override]
        return (tensor.to(cls.dtype) if tensor.dtype.is_floating_point else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: typing.Any) -> torch.Tensor:
        return tensor.to(ctx) if ctx.is_floating_point else tensor


class FP16Compressor(_CastCompressor):
    """Sends floating-point tensors as float16."""

    dtype = torch.float16


class BF16Compressor(_CastCompressor):
    """Sends floating-point tensors as bfloat16."""

    dtype = torch.bfloat16


class Compression:
    """The compressions of this library."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
