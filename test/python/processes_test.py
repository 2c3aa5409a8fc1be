"""Processes and threads of a rank beside its groups, and what many operations cost in memory."""

import gc
import logging
import multiprocessing
import os
import pathlib
import subprocess
import sys
import threading

import pytest
import torch
import torch.distributed as dist

LIMIT = 60  # seconds

CHILD = """
import os, sys, torch, torch.distributed as dist
rank, path, ending = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("hvd", init_method="file://" + path, rank=rank, world_size=2)
work = dist.all_reduce(torch.ones(1), async_op=True)
child = os.fork()
if child == 0:
    if ending == "call":
        try:
            dist.all_reduce(torch.ones(1))
        except RuntimeError as error:
            print("the child:", error, flush=True)
            os._exit(7)
        os._exit(8)
    elif ending == "raise":
        raise ValueError("a mistake of a child")
    elif ending == "destroy":
        dist.destroy_process_group()
    sys.exit(7)
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
work.wait()
for _ in range(100):
    dist.all_reduce(total := torch.ones(1000))
print("total", total[0].item(), "child", code)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("ending", ["exit", "raise", "call", "destroy"])
def test_a_forked_child_leaves_the_job_alone(tmp_path, ending):
    ranks = [subprocess.Popen([sys.executable, "-c", CHILD, str(rank), str(tmp_path / "store"), ending],
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for rank in (0, 1)]
    texts = [rank.communicate(timeout=LIMIT) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], texts
    for output, errors in texts:
        assert f"total 2.0 child {1 if ending == 'raise' else 7}" in output, (output, errors)
        assert ("a mistake of a child" in errors) == (ending == "raise")
        assert ("which was made by fork()" in output) == (ending == "call"), output


def raise_on_rank_1(rank, path):
    dist.init_process_group("hvd", init_method=f"file://{path}", rank=rank, world_size=2)
    if rank == 1:
        dist.barrier()
        raise ValueError("a mistake of rank 1")
    try:
        # Rank 1 can leave the barrier and fail while rank 0 is still in it.
        dist.barrier()
        dist.all_reduce(torch.ones(1))
    except dist.DistBackendError as error:
        (path.parent / "error").write_text(str(error))


@pytest.mark.parametrize("module", ["multiprocessing", "torch.multiprocessing"])
def test_an_exception_that_multiprocessing_catches_is_the_cause(tmp_path, module):
    if module == "multiprocessing":
        context = multiprocessing.get_context("fork")
        processes = [context.Process(target=raise_on_rank_1, args=(rank, tmp_path / "store")) for rank in (0, 1)]
        for process in processes:
            process.start()
    else:
        processes = torch.multiprocessing.start_processes(raise_on_rank_1, (tmp_path / "store",), 2, join=False,
                                                          start_method="fork").processes
    for process in processes:
        process.join(LIMIT)
    assert [process.exitcode for process in processes] == [0, 1]
    text = (tmp_path / "error").read_text()
    assert "lost rank 1" in text and f"it failed: {__file__}:" in text and "ValueError: a mistake of rank 1" in text, text


ENDING = """
import sys, threading, time, torch, torch.distributed as dist
rank, path, kind = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("hvd", init_method="file://" + path, rank=rank, world_size=2)
group = dist.new_group()
dist.barrier()
if rank == 0 and kind == "thread":
    threading.Thread(target=dist.all_reduce, args=(torch.ones(1),), kwargs={"group": group}, daemon=True).start()
elif rank == 0 and kind == "loop":
    alone = dist.new_group([0], use_local_synchronization=True)
    def reduce():
        while True:
            dist.all_reduce(torch.ones(1), group=alone)
    threading.Thread(target=reduce, daemon=True).start()
elif rank == 0:
    future = dist.all_reduce(torch.ones(1), group=group, async_op=True).get_future().then(lambda done: done.value())
time.sleep(0.5 + rank)
"""


@pytest.mark.parametrize("kind", ["thread", "loop", "callback"])
def test_a_wait_of_another_thread_leaves_the_end_of_the_process_alone(tmp_path, kind):
    ranks = [subprocess.Popen([sys.executable, "-c", ENDING, str(rank), str(tmp_path / "store"), kind], stderr=subprocess.PIPE,
                              text=True) for rank in (0, 1)]
    texts = [rank.communicate(timeout=LIMIT)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], texts


class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return torch.tensor(float(index * index))


def load_with_workers(rank, size, persistent):
    net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
    sampler = torch.utils.data.DistributedSampler(Squares(), shuffle=False)
    loader = torch.utils.data.DataLoader(Squares(), batch_size=4, sampler=sampler, num_workers=2, persistent_workers=persistent)
    for _ in range(2):
        seen = torch.zeros(1)
        for batch in loader:
            net(batch[:, None] * 1e-3).sum().backward()
            dist.all_reduce(part := batch.sum().reshape(1))
            seen += part
        assert seen.item() == sum(i * i for i in range(40))
    dist.barrier()
    return net.module.weight.grad


@pytest.mark.parametrize("persistent", [False, True])
def test_data_loader_workers(on_ranks, persistent):
    first, second = on_ranks(load_with_workers, 2, persistent)
    assert torch.equal(first, second)


def use_groups_from_threads(rank, size):
    """Each thread has groups of its own, of which some have all ranks and some two, and another order of calls on each rank."""
    groups = [[dist.new_group(ranks) for ranks in (range(size), (0, size - 1))] for _ in range(4)]
    errors = []

    def run(number):
        everyone, pair = groups[number]
        try:
            for step in range(100):
                tensor = torch.full((1 + 1000 * (step % 3),), float(number + rank))
                works = [dist.all_reduce(tensor, group=everyone, async_op=step % 2 == 0)]
                if rank in (0, size - 1):
                    dist.all_gather_object(got := [None, None], (number, step, rank), group=pair)
                    assert got == [(number, step, 0), (number, step, size - 1)]
                if works[0]:
                    works[0].wait()
                assert (tensor == size * number + size * (size - 1) / 2).all(), (number, step)
        except Exception as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in (range(4) if rank % 2 else reversed(range(4)))]
    for thread in threads:
        thread.start()
    dist.all_reduce(total := torch.ones(1))
    for thread in threads:
        thread.join()
    assert not errors, errors
    assert total.item() == size
    dist.barrier()


@pytest.mark.parametrize("size", [2, 3])
def test_threads_with_groups_of_their_own(on_ranks, size):
    on_ranks(use_groups_from_threads, size)


def every_kind_of_call(rank, size, group):
    tensor, whole = torch.ones(64), torch.empty(64 * size)
    dist.all_reduce(tensor, group=group)
    dist.all_reduce(tensor, group=group, async_op=True).wait()
    dist.broadcast(tensor, 0, group=group)
    dist.all_gather_into_tensor(whole, tensor, group=group)
    dist.reduce_scatter_tensor(tensor, whole, group=group)
    dist.all_to_all_single(torch.empty(64), tensor, group=group)
    dist.all_reduce(tensor, group=group, async_op=True).get_future().then(lambda done: done.value()[0].sum()).wait()
    messages = [dist.isend(tensor, 1 - rank, group=group), dist.irecv(torch.empty(64), 1 - rank, group=group)]
    for message in messages:
        message.wait()
    dist.barrier(group=group)
    return 10


def usage():
    gc.collect()
    found = {"descriptors": len(os.listdir("/proc/self/fd")), "threads": len(os.listdir("/proc/self/task")),
             "objects": len(gc.get_objects()), "references": sys.getrefcount(None),
             "maps": pathlib.Path("/proc/self/maps").read_text().count("\n")}
    resident = int(pathlib.Path("/proc/self/statm").read_text().split()[1])  # last, because the others need memory, too
    return found | {"bytes": resident * os.sysconf("SC_PAGE_SIZE")}


def growth(function, count):
    """What this many calls leave behind after as many others, which fill caches: the smaller of two measurements. A replay that another
    process interrupts fills further caches once."""
    logging.disable()  # or pytest keeps what torch logs of each error
    found = [usage()]
    for _ in range(3):
        for _ in range(count):
            function()
        found.append(usage())
    _, first, second, third = found
    return {name: min(second[name] - first[name], third[name] - second[name]) for name in first}


def call_10000_times(rank, size):
    return growth(lambda: every_kind_of_call(rank, size, None), 1000)


def make_100_groups(rank, size):
    def make():
        group = dist.new_group()
        every_kind_of_call(rank, size, group)
        dist.destroy_process_group(group)

    grown = growth(make, 100)
    grown["objects"] -= 100  # torch keeps one for each group
    return grown


def fail_500_times(rank, size):
    def fail():
        with pytest.raises(dist.DistBackendError):
            dist.all_reduce(torch.ones(2 + rank))

    return growth(fail, 500)


# malloc grows the heap in steps of 132 KiB, and a few of them may fall into the second half.
@pytest.mark.parametrize("function, kibibytes", [(call_10000_times, 640), (make_100_groups, 768), (fail_500_times, 640)])
def test_calls_leave_nothing_behind(on_ranks, function, kibibytes):
    for grown in on_ranks(function, 2):
        assert grown["bytes"] <= kibibytes * 1024, grown
        for name in ("descriptors", "threads", "maps", "objects", "references"):
            assert grown[name] <= 5, grown
