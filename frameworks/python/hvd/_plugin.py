"""The entry point of torch.backends: registers hvd with torch.distributed."""

from __future__ import annotations

import typing


def register() -> None:
    """Registers the backend "hvd" for the devices that hvd and torch were built for, unless it is registered.

    torch calls this at the end of ``import torch``, where an exception would make the import fail, so this does not raise.
    """
    try:
        import torch
        import torch.distributed as dist

        from . import _build

        devices = ["cpu", "cuda"] if _build.WITH_CUDA and torch.backends.cuda.is_built() else ["cpu"]
        if dist.is_available() and "hvd" not in dist.Backend.backend_list:
            dist.Backend.register_backend("hvd", _make_backend, extended_api=True, devices=devices)
    except Exception as error:  # noqa: BLE001
        import warnings

        warnings.warn(f"hvd could not register its backend with torch.distributed: {error}", stacklevel=2)


def _make_backend(group: typing.Any, options: typing.Any) -> typing.Any:
    """Makes the backend of a group. `group` is torch's DistributedBackendOptions. Collective over the group."""
    import os

    import torch

    from . import _loader

    # DistributedDataParallel allocates its buckets through the backend if this variable is 0. The variable also concerns NCCL,
    # so it is not set where torch has GPUs.
    if not torch.cuda.is_available():
        os.environ.setdefault("DDP_DISABLE_COMM_MEM", "0")
    # Torch 2.14 has groups that join no job before reconfigure().
    enable_reconfigure = any(getattr(source, "enable_reconfigure", False) for source in (group, options))
    return _loader.native().make_backend(group.store, group.group_rank, group.group_size,
                                         list(group.global_ranks_in_group), group.timeout, enable_reconfigure)
