"""torch.distributed over hvd, against torch's and numpy's own computations."""

import datetime
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist

LIMIT = 60  # seconds
SIZES = (1, 2, 4)
SHAPES = ((), (0,), (1,), (7,), (3, 5), (2, 0, 3))
REDUCED = (torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64)
FEW = (torch.int64, torch.bfloat16, torch.float32)  # where the number of ranks is tested
MOVED = (*REDUCED, torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.uint16)


def values(rank, shape, dtype):
    """Small whole numbers that differ by rank, so that sums and products of a few are exact in each dtype."""
    return (torch.arange(int(np.prod(shape))) % 3 + rank + 1).reshape(shape).to(dtype)


def expect_equal(actual, expected):
    assert actual.dtype == expected.dtype and actual.shape == expected.shape, (actual, expected)
    as_bytes = [torch.cat([t.flatten(), t.new_empty(0)]).view(torch.uint8) for t in (actual, expected)]
    assert torch.equal(*as_bytes), (actual, expected)


def reduce_everything(rank, size):
    numpy_of = {dist.ReduceOp.SUM: np.add, dist.ReduceOp.PRODUCT: np.multiply, dist.ReduceOp.MIN: np.minimum,
                dist.ReduceOp.MAX: np.maximum}
    for dtype in REDUCED if size == 2 else FEW:
        for shape in SHAPES:
            for op, function in numpy_of.items():
                inputs = [values(r, shape, dtype) for r in range(size)]
                wide = np.stack([t.to(torch.float64).numpy() for t in inputs])
                expected = torch.from_numpy(np.asarray(function.reduce(wide, axis=0))).to(dtype)
                own = inputs[rank].clone()
                dist.all_reduce(own, op=op)
                expect_equal(own, expected)
                rooted = inputs[rank].clone()
                dist.reduce(rooted, dst=size - 1, op=op)
                expect_equal(rooted, expected if rank == size - 1 else inputs[rank])
    average = values(rank, (6,), torch.float32)
    dist.all_reduce(average, op=dist.ReduceOp.AVG)
    assert torch.allclose(average, sum(values(r, (6,), torch.float32) for r in range(size)) / size)
    pairs = torch.full((3,), complex(rank, 1), dtype=torch.complex64)
    dist.all_reduce(pairs)
    expect_equal(pairs, torch.full((3,), complex(size * (size - 1) / 2, size), dtype=torch.complex64))
    bits = torch.full((2,), 1 << rank)
    dist.all_reduce(bits, op=dist.ReduceOp.BOR)
    expect_equal(bits, torch.full((2,), (1 << size) - 1))


def move_everything(rank, size):
    for dtype in MOVED if size == 2 else FEW:
        for shape in SHAPES:
            inputs = [values(r, shape, dtype) for r in range(size)]
            message = inputs[rank].clone()
            dist.broadcast(message, src=size - 1)
            expect_equal(message, inputs[-1])
            gathered = [torch.empty(shape, dtype=dtype) for _ in range(size)]
            dist.all_gather(gathered, inputs[rank])
            for got, expected in zip(gathered, inputs):
                expect_equal(got, expected)
            whole = torch.empty((size, *shape), dtype=dtype)
            dist.all_gather_into_tensor(whole, inputs[rank])
            expect_equal(whole, torch.stack(inputs))
            dist.gather(inputs[rank], gathered if rank == 0 else None, dst=0)
            share = torch.empty(shape, dtype=dtype)
            dist.scatter(share, inputs if rank == 0 else None, src=0)
            expect_equal(share, inputs[rank])
            outputs = [torch.empty(shape, dtype=dtype) for _ in range(size)]
            dist.all_to_all(outputs, [inputs[rank]] * size)
            for got, expected in zip(outputs, inputs):
                expect_equal(got, expected)


def exchange_shares(rank, size):
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX):
        rows = [torch.arange(size * 3, dtype=torch.float64).reshape(size, 3) * (r + 1) for r in range(size)]
        stacked = torch.stack(rows)
        expected = {dist.ReduceOp.SUM: stacked.sum(0), dist.ReduceOp.AVG: stacked.mean(0),
                    dist.ReduceOp.MAX: stacked.amax(0)}[op][rank]
        output = torch.empty(3, dtype=torch.float64)
        dist.reduce_scatter_tensor(output, rows[rank].reshape(-1), op=op)
        assert torch.allclose(output, expected)
        dist.reduce_scatter(output, list(rows[rank]), op=op)
        assert torch.allclose(output, expected)
    sends, receives = [r + 1 for r in range(size)], [rank + 1] * size
    output = torch.empty(sum(receives), 2)
    dist.all_to_all_single(output, torch.full((sum(sends), 2), float(rank)), receives, sends)
    expect_equal(output, torch.arange(size, dtype=torch.float32).repeat_interleave(rank + 1)[:, None].expand(-1, 2).contiguous())
    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank, "text": "x" * rank})
    assert objects == [{"rank": r, "text": "x" * r} for r in range(size)]
    received = [None]
    dist.broadcast_object_list(box := [("from", rank)], src=0)
    assert box == [("from", 0)]
    dist.scatter_object_list(received, [("to", r) for r in range(size)], src=0)
    assert received == [("to", rank)]
    dist.barrier()


@pytest.mark.parametrize("size", SIZES)
def test_operations(on_ranks, size):
    on_ranks(all_operations, size)


def all_operations(rank, size):
    reduce_everything(rank, size)
    move_everything(rank, size)
    exchange_shares(rank, size)


def use_works(rank, size):
    tensor = torch.full((5,), float(rank + 1))
    work = dist.all_reduce(tensor, async_op=True)
    future = work.get_future().then(lambda f: f.value()[0].sum().item())
    assert future.wait() == 5 * size * (size + 1) / 2
    assert work.is_completed() and work.is_success() and work.result()[0] is not None

    def communicate(finished):  # as PowerSGD's callbacks do
        inner = dist.all_reduce(finished.value()[0].clone(), async_op=True).get_future()
        return inner.wait()[0]

    doubled = dist.all_reduce(torch.ones(2), async_op=True).get_future().then(communicate)
    assert doubled.wait().tolist() == [size * size] * 2
    base = torch.full((3, 4), float(rank))
    dist.all_reduce(base.t(), async_op=True).wait()
    expect_equal(base, torch.full((3, 4), size * (size - 1) / 2))


def test_works_and_futures(on_ranks):
    on_ranks(use_works, 2)


def groups_and_restarts(rank, size, path):
    import hvd

    assert dist.get_backend() == "hvd" and hvd.is_initialized() and (hvd.rank(), hvd.size()) == (rank, size)
    assert hvd.init_method().startswith("store://") and hvd.metrics()["completed_operations"] >= 0
    everyone = dist.new_group(timeout=datetime.timedelta(seconds=20))
    groups = [None, everyone] if rank == 0 else [everyone, None]  # the order differs, which each group may
    works = {id(g): dist.all_reduce(torch.ones(1), group=g, async_op=True) for g in groups}
    for work in works.values():
        work.wait()
    alone = [dist.new_group([r]) for r in range(size)][rank]
    tensor = torch.full((2,), rank + 1.0)
    dist.all_reduce(tensor, group=alone)
    assert tensor.tolist() == [rank + 1.0] * 2
    got = torch.zeros(2)
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, tensor, 1 - rank), dist.P2POp(dist.irecv, got, 1 - rank)]):
        work.wait()
    assert got.tolist() == [2.0 - rank] * 2
    if rank == 0:
        dist.send(tensor, 1, tag=3)
    else:
        assert dist.recv(got, tag=3) == 0 and got.tolist() == [1.0, 1.0]
    dist.destroy_process_group(everyone)
    dist.destroy_process_group()
    assert not hvd.is_initialized()
    dist.init_process_group("cpu:hvd", init_method=f"file://{path}", rank=rank, world_size=size)
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [size] * 3


def test_groups_and_a_second_start(on_ranks, tmp_path):
    on_ranks(groups_and_restarts, 2, tmp_path / "second")


def shrink(rank, size):
    part = dist.new_group(list(range(size)))
    if rank != 1:
        smaller = dist.distributed_c10d.shrink_group([1], group=part)
        assert dist.get_world_size(smaller) == size - 1 and dist.get_rank(smaller) == (0 if rank == 0 else rank - 1)
        tensor = torch.full((2,), rank + 1.0)
        dist.all_reduce(tensor, group=smaller)
        assert tensor.tolist() == [size * (size + 1) / 2 - 2] * 2
        backend = smaller._get_backend(torch.device("cpu"))
        with pytest.raises(RuntimeError, match="is one of those to exclude"):
            backend.shrink([backend.rank()])
        with pytest.raises(RuntimeError, match="expected 0, SHRINK_DEFAULT"):
            backend.shrink([0], 1)
    tensor = torch.ones(1)
    dist.all_reduce(tensor)  # the group of all ranks goes on
    assert tensor.item() == size


def test_a_group_shrinks(on_ranks):
    on_ranks(shrink, 4)


def abort(rank, size, path):
    import hvd

    dist.all_reduce(torch.ones(1))
    # The message shows that rank 1 has ended the allreduce, which the abort would end with an error.
    dist.send(torch.ones(1), 0) if rank == 1 else dist.recv(torch.ones(1), 1)
    if rank == 0:
        pending = dist.all_reduce(torch.ones(1), async_op=True)
        dist.distributed_c10d._abort_process_group()
        with pytest.raises(dist.DistBackendError, match="rank 0 has called abort"):
            pending.wait()
    else:
        with pytest.raises(dist.DistBackendError, match="rank 0 has called abort"):
            dist.recv(torch.ones(1), 0)
        dist.destroy_process_group()
    assert not hvd.is_initialized()
    dist.init_process_group("hvd", init_method=f"file://{path}", rank=rank, world_size=size)
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor.item() == size


def test_abort_ends_all_operations_and_allows_a_new_start(on_ranks, tmp_path):
    on_ranks(abort, 2, tmp_path / "again")


def disagree(rank, size):
    from torch.distributed import DistBackendError

    with pytest.raises(DistBackendError, match="hvd: .*rank"):
        dist.all_reduce(torch.ones(2 + rank))
    with pytest.raises(DistBackendError, match="kind of operation differs: rank 0 allreduce, rank 1 broadcast"):
        dist.broadcast(torch.ones(2), 0) if rank == 1 else dist.all_reduce(torch.ones(2))
    import hvd.torch

    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    hvd.torch.monitored_barrier(timeout=datetime.timedelta(seconds=20))
    if rank == 0:
        with pytest.raises(DistBackendError, match=" timeout of 200 ms .* the call: 1"):
            hvd.torch.monitored_barrier(timeout=datetime.timedelta(milliseconds=200))
        late = dist.all_reduce(torch.ones(1), async_op=True)
        with pytest.raises(DistBackendError, match=" timeout of 100 ms "):
            late.wait(datetime.timedelta(milliseconds=100))
        store.set("rank 0 has seen the timeouts", "")
    store.wait(["rank 0 has seen the timeouts"])


def test_errors(on_ranks):
    on_ranks(disagree, 2)


def wait_for_a_missing_rank(rank, size, path):
    dist.destroy_process_group()
    dist.init_process_group("hvd", init_method=f"file://{path}", rank=rank, world_size=size, timeout=datetime.timedelta(seconds=4))
    store = dist.distributed_c10d._get_default_store()
    for _ in range(100):  # steps that are replayed, in which ranks report late
        dist.all_reduce(torch.ones(1))
    if rank == 0:
        for call in (lambda: dist.all_reduce(torch.ones(1)), dist.new_group):
            with pytest.raises(dist.DistBackendError, match="timeout of an operation has passed: .*missing: rank 1 "):
                call()
        store.set("rank 0 has seen the errors", "")
    store.wait(["rank 0 has seen the errors"], datetime.timedelta(seconds=30))


def test_a_timeout_names_the_missing_rank(on_ranks, tmp_path):
    on_ranks(wait_for_a_missing_rank, 2, tmp_path / "second")


def wait_for_different_calls(rank, size):
    store = dist.distributed_c10d._get_default_store()
    pair = dist.new_group([1, 2])
    for _ in range(100):  # steps that are replayed
        dist.all_reduce(torch.ones(1))
    dist.barrier()
    if rank == 0:
        work = dist.all_reduce(torch.ones(1), async_op=True)
        store.wait(["rank 1 waits"], datetime.timedelta(seconds=30))
        text = r" timeout of 300 ms .* for 2 of 3 ranks: rank 1 .* and waits for broadcast '.*'; rank 2 .* has no operation outstanding;"
        with pytest.raises(dist.DistBackendError, match=text):
            work.wait(datetime.timedelta(milliseconds=300))
        message = dist.irecv(torch.empty(1), 2, tag=5)
        with pytest.raises(dist.DistBackendError, match=r" timeout of 200 ms .* for its send: rank 0 waits for .*; rank 2 has no "):
            message.wait(datetime.timedelta(milliseconds=200))
        store.set("rank 0 has seen the errors", "")
    elif rank == 1:
        theirs = dist.broadcast(torch.ones(1), 1, group=pair, async_op=True)
        store.set("rank 1 waits", "")
    store.wait(["rank 0 has seen the errors"], datetime.timedelta(seconds=30))
    if rank == 1:
        work = dist.all_reduce(torch.ones(1), async_op=True)
    elif rank == 2:
        theirs = dist.broadcast(torch.ones(1), 1, group=pair, async_op=True)
        message = dist.isend(torch.ones(1), 0, tag=5)
        work = dist.all_reduce(torch.ones(1), async_op=True)
    for one in [work] + ([theirs] if rank > 0 else []) + ([message] if rank != 1 else []):
        one.wait(datetime.timedelta(seconds=30))


def test_the_timeout_of_a_wait_names_the_missing_ranks_and_their_calls(on_ranks):
    on_ranks(wait_for_different_calls, 3)


def wait_for_a_signal(rank, size):
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["rank 0 was interrupted"], datetime.timedelta(seconds=30))
        dist.all_reduce(torch.ones(1))
        return
    counted = [0]
    stop = threading.Event()

    def count():
        while not stop.wait(0.01):
            counted[0] += 1

    other = threading.Thread(target=count)
    other.start()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sender = threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT))
    sender.start()
    work = dist.all_reduce(torch.ones(1), async_op=True)
    with pytest.raises(KeyboardInterrupt):
        work.wait()
    assert not work.is_completed()
    store.set("rank 0 was interrupted", "")
    stop.set()
    other.join()
    work.wait()
    assert counted[0] > 10, "other threads of Python stood still"


def test_ctrl_c_ends_a_wait(on_ranks):
    on_ranks(wait_for_a_signal, 2)


RAISES = """
import sys, time, torch, torch.distributed as dist
rank, path, delay = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
dist.init_process_group("hvd", init_method="file://" + path, rank=rank, world_size=2)
dist.barrier()
if rank == 1:
    raise ValueError("a mistake of rank 1")
time.sleep(delay)
dist.all_reduce(torch.ones(3))
"""


@pytest.mark.parametrize("delay", [0, 2], ids=["during a call", "before a call"])
def test_a_rank_that_raises_ends_the_others(tmp_path, delay):
    ranks = [subprocess.Popen([sys.executable, "-c", RAISES, str(rank), str(tmp_path / "store"), str(delay)],
                              stderr=subprocess.PIPE, text=True) for rank in (0, 1)]
    texts = [rank.communicate(timeout=LIMIT)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1, 1]
    assert "a mistake of rank 1" in texts[1]
    assert "DistBackendError: hvd: " in texts[0] and "lost rank 1" in texts[0], texts[0]
    assert "it failed: <string>:7: ValueError: a mistake of rank 1" in texts[0], texts[0]


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
        self.register_buffer("steps", torch.zeros(1))

    def forward(self, x):
        return self.layers(x)


def train(rank, size, hook):
    torch.manual_seed(0)
    net = torch.nn.parallel.DistributedDataParallel(Net(), bucket_cap_mb=0.0005)
    if hook == "powersgd":
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
        net.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif hook == "fp16":
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        net.register_comm_hook(None, default_hooks.fp16_compress_hook)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    data = torch.Generator().manual_seed(rank)
    for _ in range(5):
        optimizer.zero_grad()
        net(torch.randn(4, 8, generator=data)).square().mean().backward()
        optimizer.step()
    return [p.detach().numpy().copy() for p in net.parameters()]


@pytest.mark.parametrize("hook", [None, "fp16", "powersgd"])
def test_ddp_equals_gloo(on_ranks, hook):
    ours, other = on_ranks(train, 2, hook)
    reference, _ = on_ranks(train, 2, hook, backend="gloo")
    for a, b, c in zip(ours, other, reference):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(a, c)
