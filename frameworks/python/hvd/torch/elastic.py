"""States of elastic programs. Ranks do not change: a lost rank ends run()."""

from __future__ import annotations

import collections.abc
import copy
import functools
import math
import typing

import torch

from ..errors import HorovodInternalError
from .functions import broadcast_object, broadcast_optimizer_state, broadcast_parameters
from .mpi_ops import init, rank, size

__all__ = ["ElasticSampler", "HostsUpdatedInterrupt", "ObjectState", "State", "TorchState", "run", "run_fn"]


class HostsUpdatedInterrupt(RuntimeError):
    """Hosts have been added or removed. hvd does not raise it."""

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__()
        self.skip_sync = skip_sync


class State:
    """The values that a program saves and restores together. Derived classes define save(), restore() and sync()."""

    def __init__(self, bcast_object: typing.Any = broadcast_object, get_rank: typing.Any = rank) -> None:
        self._bcast_object, self._rank = bcast_object, get_rank
        self._reset_callbacks: list[typing.Callable[[], None]] = []

    def register_reset_callbacks(self, callbacks: collections.abc.Iterable[typing.Callable[[], None]]) -> None:
        """Adds functions that on_reset() calls."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: typing.Any, update_res: typing.Any) -> None:
        """Has no effect: hosts do not change."""

    def commit(self) -> None:
        """Saves the state for restore()."""
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Has no effect: hosts do not change."""

    def save(self) -> None:
        raise NotImplementedError

    def restore(self) -> None:
        raise NotImplementedError

    def sync(self) -> None:
        raise NotImplementedError

    def reset(self) -> None:
        """Called by on_reset()."""


class ObjectState(State):
    """A state of objects, each of which is an attribute."""

    def __init__(self, bcast_object: typing.Any = broadcast_object, get_rank: typing.Any = rank, **kwargs: typing.Any) -> None:
        super().__init__(bcast_object, get_rank)
        self._saved_state = kwargs
        self._set_attrs()

    def save(self) -> None:
        self._saved_state = {name: getattr(self, name) for name in self._saved_state}

    def restore(self) -> None:
        self._set_attrs()

    def sync(self) -> None:
        """Replaces the objects by those of rank 0."""
        if self._saved_state:
            self._saved_state = self._bcast_object(self._saved_state)
            self._set_attrs()

    def _set_attrs(self) -> None:
        for name, value in self._saved_state.items():
            setattr(self, name, value)


class _Saved:
    """A model, an optimizer or a sampler, with the state to which it can return."""

    def __init__(self, value: typing.Any) -> None:
        self.value = value
        self.save()

    def save(self) -> None:
        self._state = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        self.value.load_state_dict(copy.deepcopy(self._state))

    def sync(self) -> None:
        if isinstance(self.value, torch.nn.Module):
            broadcast_parameters(self.value.state_dict(), 0)
        elif isinstance(self.value, torch.optim.Optimizer):
            broadcast_optimizer_state(self.value, 0)
        else:
            self.value.gather()
        self.save()


class TorchState(ObjectState):
    """A state of models, optimizers, samplers and further objects, each of which is an attribute."""

    def __init__(self, model: typing.Any = None, optimizer: typing.Any = None, **kwargs: typing.Any) -> None:
        values = {**kwargs, **{name: value for name, value in (("model", model), ("optimizer", optimizer)) if value is not None}}
        self._handlers: dict[str, _Saved] = {}
        for name, value in list(values.items()):
            if isinstance(value, (torch.nn.Module, torch.optim.Optimizer, ElasticSampler)):
                self._handlers[name] = _Saved(values.pop(name))
                object.__setattr__(self, name, value)
        super().__init__(broadcast_object, rank, **values)

    def __setattr__(self, name: str, value: typing.Any) -> None:
        """A new model or optimizer replaces the former one."""
        handlers = self.__dict__.get("_handlers", {})
        if name in handlers and handlers[name].value is not value:
            handlers[name] = _Saved(value)
        super().__setattr__(name, value)

    def save(self) -> None:
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        for handler in self._handlers.values():
            handler.sync()
        super().sync()


class ElasticSampler(torch.utils.data.Sampler):
    """Shares the samples of a data set among the ranks, without those that have been processed in this epoch."""

    def __init__(self, dataset: typing.Any, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch = 0
        self.processed_indices: set[int] = set()
        self.reset()
        self._share()

    @property
    def processed_num(self) -> int:
        """The number of samples that are known to have been processed in this epoch."""
        return len(self.processed_indices)

    def set_epoch(self, epoch: int) -> None:
        """Begins an epoch: no sample counts as processed."""
        self.epoch = epoch
        self.processed_indices = set()
        self.reset()
        self._share()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Marks the samples of this rank's batch with that number as processed."""
        self.record_indices(self.get_indices(batch_idx, batch_size))

    def record_indices(self, indices: collections.abc.Iterable[int]) -> None:
        """Marks samples as processed."""
        self.processed_indices.update(indices)

    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        """The samples of this rank's batch with that number."""
        first = batch_idx * batch_size
        return self.indices[first:min(first + batch_size, len(self.indices))]

    def state_dict(self) -> dict[str, typing.Any]:
        return {"epoch": self.epoch, "processed_indices": set(self.processed_indices)}

    def load_state_dict(self, state_dict: dict[str, typing.Any]) -> None:
        self.epoch, self.processed_indices = state_dict["epoch"], set(state_dict["processed_indices"])
        self.reset()

    def gather(self) -> None:
        """Unites the processed samples of all ranks."""
        from .functions import allgather_object

        states = allgather_object(self.state_dict())
        processed = set().union(*(state["processed_indices"] for state in states))
        self.load_state_dict({"epoch": states[0]["epoch"], "processed_indices": processed})

    def reset(self) -> None:
        """Finds the remaining samples, which the next iteration shares among the ranks. Batches of the last one can still be
        recorded."""
        self.rank, self.num_replicas = rank(), size()
        remaining = [index for index in range(len(self.dataset)) if index not in self.processed_indices]
        if self.shuffle:
            order = torch.randperm(len(remaining), generator=torch.Generator().manual_seed(self.seed + self.epoch))
            remaining = [remaining[i] for i in order.tolist()]
        self.remaining_indices = remaining
        self.num_samples = math.ceil(len(remaining) / self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def _share(self) -> None:
        """Chooses this rank's samples. The first samples are repeated at the end, so that all ranks have equal numbers."""
        remaining = self.remaining_indices
        padded = (remaining * math.ceil(self.total_size / len(remaining)))[:self.total_size] if remaining else []
        self.indices = padded[self.rank::self.num_replicas]

    def __iter__(self) -> collections.abc.Iterator[int]:
        self._share()
        return iter(self.indices)

    def __len__(self) -> int:
        return self.num_samples


def run_fn(func: typing.Callable[..., typing.Any], reset: typing.Callable[[], None]) -> typing.Callable[..., typing.Any]:
    """Makes a function of a state and further arguments that synchronizes the state and calls `func`. `reset` is not used."""
    del reset

    @functools.wraps(func)
    def wrapper(state: State, *args: typing.Any, **kwargs: typing.Any) -> typing.Any:
        state.sync()
        try:
            return func(state, *args, **kwargs)
        except HorovodInternalError as error:
            state.restore()
            if hasattr(error, "add_note"):  # from Python 3.11 on
                error.add_note("hvd.elastic.run: the state is that of the last commit(). hvd restarts no rank: start the job again, "
                               "from a checkpoint")
            raise

    return wrapper


def run(func: typing.Callable[..., typing.Any]) -> typing.Callable[..., typing.Any]:
    """A decorator for the training function, whose first argument is the state. Ranks do not change while it runs: the error of a
    lost rank ends it, with the state of the last commit()."""
    return run_fn(func, init)
