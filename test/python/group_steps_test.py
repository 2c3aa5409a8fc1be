"""Steps on groups of some ranks: they are not negotiated, and errors in them are those of negotiated steps."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

STEADY = 40  # steps after which no operation is negotiated any more


def overlapping_groups(rank, size):
    """The groups {r, r + 1} that this rank is in, made by their members alone, by their first rank."""
    groups = {}
    for first in range(size - 1):
        if rank in (first, first + 1):
            groups[first] = dist.new_group([first, first + 1], use_local_synchronization=True)
    return groups


def step(rank, groups):
    """Calls of different kinds, some of them equal, as of layers of equal shapes."""
    for first, group in groups.items():
        for elements in (10, 10, 10, 300):
            total = torch.full((elements,), rank + 1.0)
            dist.all_reduce(total, group=group)
            assert total.tolist() == [2 * first + 3.0] * elements
        gathered = torch.empty(4)
        dist.all_gather_into_tensor(gathered, torch.full((2,), float(rank)), group=group)
        assert gathered.tolist() == [first, first, first + 1, first + 1]
        dist.broadcast(total, first, group=group)


def count_messages(rank, size):
    import hvd

    groups = overlapping_groups(rank, size)
    for _ in range(STEADY):
        step(rank, groups)
    time.sleep(1.5)  # messages under way arrive
    for _ in range(STEADY):
        step(rank, groups)
    before = hvd.metrics()
    for _ in range(20):
        step(rank, groups)
    after = hvd.metrics()
    time.sleep(1.5)  # otherwise a rank that still counts could receive a message of one that ends
    return {name: after[name] - before[name] for name in ("control_messages_sent", "plans_applied", "locked_operations")}


@pytest.mark.parametrize("size", [3, 4])
def test_steady_steps_of_groups_are_not_negotiated(on_ranks, size):
    for rank, counts in enumerate(on_ranks(count_messages, size)):
        groups = 1 if rank in (0, size - 1) else 2
        assert counts == {"control_messages_sent": 0, "plans_applied": 0, "locked_operations": 20 * 6 * groups}


def disagree(rank, size):
    groups = overlapping_groups(rank, size)
    for _ in range(STEADY):
        step(rank, groups)
    begin = time.monotonic()
    if rank in (1, 2):
        other = "rank 1 .*rank 2 .*"
        with pytest.raises(RuntimeError, match="shape differs: " + other):
            dist.all_reduce(torch.ones(10 if rank == 1 else 11), group=groups[1])
        with pytest.raises(RuntimeError, match="kind of operation differs: " + other):
            if rank == 1:
                dist.all_reduce(torch.ones(10), group=groups[1])
            else:
                dist.broadcast(torch.ones(300), 1, group=groups[1])
    assert time.monotonic() - begin < 5  # 10 s if it were found as a deadlock
    for _ in range(STEADY):
        step(rank, groups)


def test_ranks_that_disagree_after_steady_steps(on_ranks):
    on_ranks(disagree, 4)


def die(rank, size):
    groups = overlapping_groups(rank, size)
    for _ in range(STEADY):
        step(rank, groups)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match="rank 2"):
        while True:
            step(rank, groups)
    assert time.monotonic() - begin < 15  # 30 s without a heartbeat
    os._exit(7)


def test_a_rank_that_dies_in_steady_steps_is_named(start_ranks):
    ranks = start_ranks(die, 4)
    for process in ranks.processes:
        process.join(30)
    assert [process.exitcode for process in ranks.processes] == [7, 7, -signal.SIGKILL, 7]
