"""Process sets: groups of ranks that communicate among themselves."""

from __future__ import annotations

import collections.abc
import typing

from .. import _loader
from ..errors import UsageError

__all__ = ["ProcessSet", "add_process_set", "global_process_set", "remove_process_set"]

_native = _loader.native()

# The sets of this job by their numbers, without the one of all ranks.
_added: dict[int, ProcessSet] = {}


class ProcessSet:
    """A set of ranks, which init() or add_process_set() makes usable. `process_set_id` is None before that.

    `ranks_or_comm` is a sequence of ranks.
    """

    process_set_id: int | None = None
    ranks: list[int] | None = None
    mpi_comm: typing.Any = None
    _native: typing.Any = None

    def __init__(self, ranks_or_comm: collections.abc.Sequence[int]) -> None:
        if not isinstance(ranks_or_comm, collections.abc.Iterable):
            raise UsageError(f"ProcessSet: ranks_or_comm: expected a sequence of ranks, got {ranks_or_comm!r}; "
                             "communicators of MPI are not supported")
        ranks = list(ranks_or_comm)
        if any(not isinstance(rank, int) or isinstance(rank, bool) for rank in ranks):
            raise UsageError(f"ProcessSet: ranks_or_comm: expected integers, got {ranks!r}")
        self.ranks = sorted(ranks)

    def _enroll(self, native: typing.Any) -> None:
        self._native, self.process_set_id, self.ranks = native, native.id, native.ranks()

    def _invalidate(self) -> None:
        self._native, self.process_set_id = None, None

    def size(self) -> int | None:
        """The number of ranks; None before the set is usable."""
        return None if self._native is None else self._native.size()

    def rank(self) -> int | None:
        """This process's position in the set, -1 outside it; None before the set is usable."""
        return None if self._native is None else self._native.rank()

    def included(self) -> bool | None:
        """Whether this process is in the set; None before the set is usable."""
        return None if self._native is None else self._native.rank() >= 0

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"

    __repr__ = __str__

    def __reduce__(self) -> tuple[typing.Any, ...]:
        return _restored, (self.process_set_id, self.ranks)


def _restored(number: int | None, ranks: list[int]) -> ProcessSet:
    """A copy refers to the set of this job with the same number and ranks, if there is one."""
    if number == 0:
        return global_process_set
    known = _added.get(number) if number is not None else None
    return known if known is not None and known.ranks == ranks else ProcessSet(ranks)


# All ranks. Its ranks are known after init().
global_process_set = ProcessSet([])
global_process_set.process_set_id = 0
global_process_set._native = _native.ProcessSet()


def _native_of(process_set: ProcessSet) -> typing.Any:
    """The native set. Raises UsageError for another type, and for a set that is not usable."""
    native = getattr(process_set, "_native", None)
    if native is not None:
        return native
    if not isinstance(process_set, ProcessSet):
        raise UsageError(f"process_set: expected a ProcessSet, got {process_set!r}")
    raise UsageError(f"process_set: expected a set of this job, got {process_set}; call hvd.add_process_set() with it after "
                     "hvd.init(), or pass it to hvd.init()")


def add_process_set(process_set: ProcessSet | collections.abc.Sequence[int]) -> ProcessSet:
    """Makes a set usable, and returns it. Collective over all ranks of the job, with equal ranks.

    Raises UsageError for ranks that do not exist and when the job has a set of the same ranks.
    """
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    ranks = process_set.ranks
    for other in (global_process_set, *_added.values()):
        if _native.is_initialized() and other._native.ranks() == ranks:
            raise UsageError(f"add_process_set: ranks: expected ranks that no other set has, got {ranks}, which are those of "
                             f"{other}")
    process_set._enroll(_native.add_process_set(ranks))
    _added[process_set.process_set_id] = process_set
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Removes a set. Collective over all ranks of the job.

    Returns False, without an effect, for the set of all ranks and for one that is not usable.
    """
    number = process_set.process_set_id
    if number is None or number == 0:
        return False
    _native.remove_process_set(process_set._native)
    _added.pop(number, None)
    process_set._invalidate()
    return True


def _begin_job(process_sets: collections.abc.Iterable[ProcessSet | collections.abc.Sequence[int]]) -> None:
    """Called after init(). Adds the given sets, except those whose ranks are already the ranks of a set of the job."""
    global_process_set.ranks = global_process_set._native.ranks()
    for process_set in process_sets:
        chosen = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
        known = [chosen.ranks == other.ranks for other in (global_process_set, *_added.values())]
        if any(known):
            if chosen.process_set_id is None or chosen not in _added.values():
                chosen._invalidate()
            continue
        add_process_set(chosen)


def _end_job() -> None:
    for process_set in _added.values():
        process_set._invalidate()
    _added.clear()
    global_process_set.ranks = []


def _ids_and_ranks() -> dict[int, list[int]]:
    """The ranks of every set of the job by its number."""
    sets = {0: global_process_set._native.ranks()}
    sets.update((number, list(process_set.ranks)) for number, process_set in _added.items())
    return sets
