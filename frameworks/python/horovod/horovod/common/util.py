"""Horovod's queries of the build, and small functions that programs import."""

from __future__ import annotations

import collections.abc
import contextlib
import os
import typing

_T = typing.TypeVar("_T")


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether there is a framework of that name: only "torch"."""
    del verbose
    return ext_base_name == "torch"


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether the framework can reduce on a GPU."""
    del verbose
    from hvd.torch import cuda_built

    return ext_base_name == "torch" and cuda_built()


def _query(name: str) -> bool:
    import hvd.torch

    return bool(getattr(hvd.torch, name)())


def mpi_built(verbose: bool = False) -> bool:
    """Whether hvd was built with MPI."""
    del verbose
    return _query("mpi_built")


def gloo_built(verbose: bool = False) -> bool:
    """False: hvd has no Gloo."""
    del verbose
    return _query("gloo_built")


def nccl_built(verbose: bool = False) -> bool:
    """Whether hvd was built with NCCL."""
    del verbose
    return _query("nccl_built")


def ddl_built(verbose: bool = False) -> bool:
    """False: hvd has no DDL."""
    del verbose
    return _query("ddl_built")


def ccl_built(verbose: bool = False) -> bool:
    """False: hvd has no oneCCL."""
    del verbose
    return _query("ccl_built")


@contextlib.contextmanager
def env(**kwargs: typing.Any) -> collections.abc.Iterator[None]:
    """Sets variables of the environment within a context. None removes one."""
    before = {name: os.environ.get(name) for name in kwargs}

    def put(values: dict[str, typing.Any]) -> None:
        for name, value in values.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = str(value)

    put(kwargs)
    try:
        yield
    finally:
        put(before)


def num_rank_is_power_2(num_rank: int) -> bool:
    """Whether the number is a power of two."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def split_list(l: list[_T], n: int) -> list[list[_T]]:  # noqa: E741
    """Splits a list into n consecutive parts, whose lengths differ by at most one."""
    size, extra = divmod(len(l), n)
    bounds = [i * size + min(i, extra) for i in range(n + 1)]
    return [l[first:end] for first, end in zip(bounds, bounds[1:])]


def is_iterable(x: typing.Any) -> bool:
    """Whether iter() accepts the object."""
    try:
        iter(x)
    except TypeError:
        return False
    return True
