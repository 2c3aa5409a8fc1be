"""Runs functions on several ranks, each in a process that is forked from this one."""

import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
LIMIT = 60  # seconds that the ranks of one test may take


def _rank_main(function, rank, size, backend, path, pipe, arguments):
    import torch.distributed as dist

    try:
        dist.init_process_group(backend, init_method=f"file://{path}", rank=rank, world_size=size)
        result = function(rank, size, *arguments)
        if dist.is_initialized():
            dist.destroy_process_group()
        pipe.send_bytes(pickle.dumps((True, result)))  # send() would pass tensors as descriptors of this process
    except BaseException:  # noqa: BLE001
        pipe.send((False, traceback.format_exc()))
    pipe.close()
    sys.stdout.flush()
    os._exit(0)


class Ranks:
    """The running ranks of one test."""

    def __init__(self, function, size, backend, arguments):
        context = multiprocessing.get_context("fork")
        self._folder = tempfile.TemporaryDirectory(prefix="hvd-python-test-")
        path = os.path.join(self._folder.name, "store")
        self.processes, self._pipes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_rank_main, args=(function, rank, size, backend, path, theirs, arguments))
            process.start()
            theirs.close()
            self.processes.append(process)
            self._pipes.append(ours)

    def results(self):
        """The results in rank order. Fails the test when a rank has raised, ended or not returned in time."""
        limit, results, errors = time.monotonic() + LIMIT, [], []
        for rank, pipe in enumerate(self._pipes):
            try:
                ok, value = pipe.recv() if pipe.poll(max(0, limit - time.monotonic())) else (False, "no result in time")
            except EOFError:
                ok, value = False, "the process has ended"
            results.append(value)
            if not ok:
                errors.append(f"rank {rank}: {value}")
        for process in self.processes:
            process.join(max(0.1, limit - time.monotonic()))
            if process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
                process.join()
        self._folder.cleanup()
        assert not errors, "\n".join(errors)
        return results


@pytest.fixture
def start_ranks():
    """start_ranks(function, size, *arguments, backend="hvd"): starts function(rank, size, *arguments) on that many ranks."""
    def start(function, size, *arguments, backend="hvd"):
        return Ranks(function, size, backend, arguments)

    return start


@pytest.fixture
def equals_gloo(on_ranks):
    """equals_gloo(function, size, *arguments, rtol=0): runs the function over hvd and over gloo and compares the results, lists or
    dictionaries of tensors, of each rank: bit for bit, or to a relative error where gloo adds in another order than hvd."""
    def run(function, size, *arguments, rtol=0):
        import torch

        ours, reference = (on_ranks(function, size, *arguments, backend=backend) for backend in ("hvd", "gloo"))
        assert any(tensor.numel() for tensor in torch.utils._pytree.tree_leaves(reference)), "the function returns no tensor"
        torch.testing.assert_close(ours, reference, rtol=rtol, atol=rtol, equal_nan=True)
        return ours

    return run


@pytest.fixture
def on_ranks(start_ranks):
    """As start_ranks, but waits for the results."""
    def run(function, size, *arguments, backend="hvd"):
        return start_ranks(function, size, *arguments, backend=backend).results()

    return run
