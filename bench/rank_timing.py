"""Times of calls that the ranks of one host make together."""

import ctypes
import mmap
import os
import random
import tempfile
import time

import torch
import torch.distributed as dist


class Meeting:
    """A counter for each rank in a shared file. All ranks leave meet() within a microsecond. A barrier of gloo takes longer, and brings gloo's
    code into the caches before the next call is measured."""

    def __init__(self):
        names = [None]
        if dist.get_rank() == 0:
            with tempfile.NamedTemporaryFile(delete=False) as file:
                file.write(bytes(64 * dist.get_world_size()))
            names = [file.name]
        dist.broadcast_object_list(names)
        with open(names[0], "r+b") as file:
            self._counters = memoryview(mmap.mmap(file.fileno(), 0)).cast("Q")
        dist.barrier()
        if dist.get_rank() == 0:
            os.unlink(names[0])
        self._others = [8 * rank for rank in range(dist.get_world_size()) if rank != dist.get_rank()]
        self._meetings = 0

    def meet(self):
        self._meetings += 1
        self._counters[8 * dist.get_rank()] = self._meetings
        for other in self._others:
            while self._counters[other] < self._meetings:
                pass


def slowest(samples):
    """For each sample, the largest value of all ranks, in seconds."""
    times = torch.tensor(samples, dtype=torch.float64)
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    return times.tolist()


def interleave(runs, settings, loop=1, prepare=lambda name: None):
    """{name: seconds of each repetition} of functions that run `loop` times, in a newly drawn order in each repetition.

    `settings` has a Meeting and the limits `budget` (seconds), `least` and `most`. prepare(name) runs before each time that is taken.
    """
    def timed(name):
        prepare(name)
        settings.meeting.meet()
        begin = time.perf_counter()
        for _ in range(loop):
            runs[name]()
        return (time.perf_counter() - begin) / loop

    for _ in range(3):
        each = slowest([sum(timed(name) for name in runs) * loop])[0]
    samples = {name: [] for name in runs}
    order = random.Random(1)  # the same on every rank
    for _ in range(min(max(settings.least, int(settings.budget / max(each, 1e-9))), settings.most)):
        for name in order.sample(list(runs), len(runs)):
            samples[name].append(timed(name))
    return {name: slowest(times) for name, times in samples.items()}


def retain_heap():
    """Keeps freed memory in the process, as `hvd-bench --retain-heap` does."""
    libc = ctypes.CDLL(None)
    m_mmap_max, m_trim_threshold = -4, -1
    libc.mallopt(m_mmap_max, 0)
    libc.mallopt(m_trim_threshold, -1)
