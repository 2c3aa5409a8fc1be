"""The collectives of hvd.torch against numpy, on every rank of a job: hvdrun -np N python -m pytest."""

import numpy
import pytest
import torch

import hvd.torch as hvd

DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32,
          torch.float64)
SHAPES = ((), (0,), (1,), (17,), (3, 0), (5, 7), (2, 3, 5))
OPS = {hvd.Average: "Average", hvd.Sum: "Sum", hvd.Min: "Min", hvd.Max: "Max", hvd.Product: "Product"}


@pytest.fixture(scope="module", autouse=True)
def job():
    hvd.init()


def inputs(shape, dtype, first=0):
    """The tensors of all ranks: small integers, so that every dtype holds all sums exactly."""
    tensors = []
    for rank in range(hvd.size()):
        generator = torch.Generator().manual_seed(1000 * rank + first)
        tensors.append(torch.randint(0, 4, shape, generator=generator).to(dtype))
    return tensors


def reduced(tensors, op):
    stack = numpy.stack([tensor.double().numpy() for tensor in tensors])
    if op == hvd.Average:
        sums = stack.sum(0)
        integers = not tensors[0].dtype.is_floating_point
        result = numpy.trunc(sums / len(tensors)) if integers else sums / len(tensors)
    else:
        result = {hvd.Sum: stack.sum, hvd.Min: stack.min, hvd.Max: stack.max, hvd.Product: stack.prod}[op](0)
    return torch.from_numpy(numpy.asarray(result)).to(tensors[0].dtype)


def equal(result, expected):
    assert result.dtype == expected.dtype and result.shape == expected.shape
    tolerance = 1e-2 if expected.dtype in (torch.float16, torch.bfloat16) else 1e-6
    torch.testing.assert_close(result, expected, rtol=tolerance, atol=0)


def awkward(tensor):
    """The same values in memory that is not contiguous."""
    if tensor.dim() == 0:
        return torch.stack([tensor, tensor])[1]
    return torch.stack([tensor, tensor], dim=-1)[..., 0]


@pytest.mark.parametrize("op", OPS, ids=OPS.values())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_allreduce(op, dtype):
    for shape in SHAPES:
        tensors = inputs(shape, dtype)
        own, expected = tensors[hvd.rank()], reduced(tensors, op)
        kept = own.clone()
        equal(hvd.allreduce(own, op=op), expected)
        equal(hvd.synchronize(hvd.allreduce_async(awkward(own), op=op)), expected)
        assert torch.equal(own, kept)
        for form in (hvd.allreduce_, lambda tensor, op: hvd.synchronize(hvd.allreduce_async_(tensor, op=op))):
            target = awkward(own)
            assert form(target, op=op) is target
            equal(target, expected)


def test_grouped_allreduce():
    dtypes = (torch.float32, torch.int64, torch.float16)
    for op in OPS:
        all_inputs = [inputs((4, 3), dtype, first=i) for i, dtype in enumerate(dtypes)]
        own = [tensors[hvd.rank()] for tensors in all_inputs]
        for form in (hvd.grouped_allreduce, lambda own, op: hvd.synchronize(hvd.grouped_allreduce_async(own, op=op))):
            for result, tensors in zip(form(own, op=op), all_inputs, strict=True):
                equal(result, reduced(tensors, op))
        targets = [tensor.clone() for tensor in own]
        results = hvd.grouped_allreduce_(targets, op=op, name="group")
        assert all(result is target for result, target in zip(results, targets, strict=True))
        for target, tensors in zip(targets, all_inputs, strict=True):
            equal(target, reduced(tensors, op))


def test_factors():
    tensors = inputs((9,), torch.float32)
    result = hvd.allreduce(tensors[hvd.rank()], op=hvd.Average, prescale_factor=0.5, postscale_factor=3.0)
    equal(result, (sum(tensors) * 1.5 / hvd.size()))
    # Integers are truncated on each rank before the sum, and once more after it.
    integers = inputs((9,), torch.int32)
    expected = sum((tensor.double() * 0.7).to(torch.int32) for tensor in integers)
    own = integers[hvd.rank()]
    equal(hvd.allreduce(own, op=hvd.Sum, prescale_factor=0.7), expected)
    equal(hvd.grouped_allreduce([own], op=hvd.Sum, prescale_factor=0.7)[0], expected)
    for form in (hvd.allreduce_, lambda *a, **k: hvd.synchronize(hvd.allreduce_async_(*a, **k))):
        target = own.clone()
        assert form(target, op=hvd.Sum, prescale_factor=0.7) is target
        equal(target, expected)
    equal(hvd.allreduce(own, op=hvd.Sum, postscale_factor=0.75), (sum(integers).double() * 0.75).to(torch.int32))


def test_average_argument_and_compression():
    tensors = inputs((6,), torch.float32)
    own = tensors[hvd.rank()]
    with pytest.warns(DeprecationWarning):
        equal(hvd.allreduce(own, average=False), reduced(tensors, hvd.Sum))
        equal(hvd.allreduce(own, True), reduced(tensors, hvd.Average))
    for compression, tolerance in ((hvd.Compression.fp16, 1e-3), (hvd.Compression.bf16, 1e-2)):
        result = hvd.allreduce(own + 0.1, compression=compression)
        torch.testing.assert_close(result, reduced(tensors, hvd.Average) + 0.1, rtol=tolerance, atol=tolerance)
        integers = inputs((6,), torch.int64)
        equal(hvd.allreduce(integers[hvd.rank()], op=hvd.Sum, compression=compression), reduced(integers, hvd.Sum))


def test_adasum():
    if hvd.size() == 2:
        a, b = (torch.arange(4.) + 1, torch.arange(4.) * 2 - 3)
        dot, norm_a, norm_b = (a @ b, a @ a, b @ b)
        expected = (1 - dot / (2 * norm_a)) * a + (1 - dot / (2 * norm_b)) * b
        torch.testing.assert_close(hvd.allreduce((a, b)[hvd.rank()], op=hvd.Adasum), expected)
    same = torch.arange(4.)
    torch.testing.assert_close(hvd.allreduce(same, op=hvd.Adasum), same)


@pytest.mark.parametrize("dtype", DTYPES + (torch.bool,), ids=str)
def test_allgather(dtype):
    for trailing in ((), (3,), (2, 2)):
        tensors = [inputs((rank + 1 if rank % 2 == 0 else 0, *trailing), dtype)[rank] for rank in range(hvd.size())]
        own, expected = tensors[hvd.rank()], torch.cat(tensors)
        equal(hvd.allgather(own), expected)
        equal(hvd.synchronize(hvd.allgather_async(awkward(own))), expected)
        results = hvd.grouped_allgather([own, own[:1]])
        equal(results[0], expected)
        equal(results[1], torch.cat([tensor[:1] for tensor in tensors]))
    scalars = inputs((), dtype)
    equal(hvd.allgather(scalars[hvd.rank()]), torch.stack(scalars))


@pytest.mark.parametrize("dtype", DTYPES + (torch.bool, torch.complex64), ids=str)
def test_broadcast(dtype):
    for shape in SHAPES:
        for root in {0, hvd.size() - 1}:
            tensors = inputs(shape, dtype)
            own, expected = tensors[hvd.rank()], tensors[root]
            equal(hvd.broadcast(own, root), expected)
            equal(hvd.synchronize(hvd.broadcast_async(own, root_rank=root)), expected)
            target = awkward(own)
            assert hvd.broadcast_(target, root) is target
            equal(target, expected)
            target = own.clone()
            assert hvd.synchronize(hvd.broadcast_async_(target, root, name="b")) is target
            equal(target, expected)


@pytest.mark.parametrize("splits_dtype", (torch.int32, torch.int64), ids=str)
def test_alltoall(splits_dtype):
    size, rank = hvd.size(), hvd.rank()
    counts = [[(sender + receiver) % 3 for receiver in range(size)] for sender in range(size)]
    tensors = [inputs((sum(row), 2), torch.float32)[i] for i, row in enumerate(counts)]
    pieces = [list(tensor.split(row)) for tensor, row in zip(tensors, counts, strict=True)]
    expected = torch.cat([pieces[sender][rank] for sender in range(size)])
    splits = torch.tensor(counts[rank], dtype=splits_dtype)
    for result, received in (hvd.alltoall(tensors[rank], splits), hvd.synchronize(hvd.alltoall_async(tensors[rank], splits))):
        equal(result, expected)
        equal(received, torch.tensor([row[rank] for row in counts], dtype=splits_dtype))
    assert hvd.alltoall(tensors[rank], splits=counts[rank])[1].dtype == torch.int32
    equal_shares = torch.arange(2 * size) + 100 * rank
    expected = torch.cat([torch.arange(2 * size)[2 * rank:2 * rank + 2] + 100 * sender for sender in range(size)])
    equal(hvd.alltoall(equal_shares), expected)


def rows_of(rows, rank):
    base, extra = divmod(rows, hvd.size())
    first = rank * base + min(rank, extra)
    return slice(first, first + base + (rank < extra))


@pytest.mark.parametrize("op", (hvd.Average, hvd.Sum), ids=("Average", "Sum"))
def test_reducescatter(op):
    for dtype in DTYPES:
        for rows in (0, 1, 4, 7):
            tensors = inputs((rows, 3), dtype)
            own, expected = tensors[hvd.rank()], reduced(tensors, op)[rows_of(rows, hvd.rank())]
            equal(hvd.reducescatter(own, op=op), expected)
            equal(hvd.synchronize(hvd.reducescatter_async(awkward(own), op=op)), expected)
            for result in hvd.grouped_reducescatter([own, own], op=op, name="g"):
                equal(result, expected)
    tensors = inputs((5,), torch.float32)
    result = hvd.reducescatter(tensors[hvd.rank()], op=op, prescale_factor=2.0, postscale_factor=0.25)
    equal(result, reduced(tensors, op)[rows_of(5, hvd.rank())] / 2)


def test_sparse_allreduce():
    rank, size = hvd.rank(), hvd.size()
    tensors = [torch.sparse_coo_tensor([[r, size]], [1. + r, 2.], (size + 1,)) for r in range(size)]
    expected = sum(tensor.to_dense() for tensor in tensors)
    handle = hvd.sparse_allreduce_async(tensors[rank], name="sparse", op=hvd.Sum)
    equal(hvd.synchronize(handle).to_dense(), expected)
    average = hvd.sparse_allreduce_async(tensors[rank], "sparse", hvd.Average)
    equal(average().to_dense(), expected / size)


def test_calls_beyond_horovod():
    tensors = inputs((2, 3), torch.float32)
    own = tensors[hvd.rank()]
    equal(hvd.all_gather_into_tensor(own, dim=1), torch.cat(tensors, dim=1))
    gathered = hvd.gather(own, 0)
    assert (gathered is None) == (hvd.rank() != 0)
    if gathered is not None:
        equal(gathered, torch.cat(tensors))
    parameter = torch.nn.Parameter(torch.ones(3))
    hvd.scale_loss((parameter * (hvd.rank() + 1)).sum()).backward()
    hvd.all_reduce([parameter])
    equal(parameter.grad, torch.full((3,), (hvd.size() + 1) / 2))


def test_poll_and_order():
    handles = [hvd.allreduce_async(torch.tensor([float(i)]), name=f"op{i}", op=hvd.Sum) for i in range(50)]
    for i in reversed(range(50)):
        equal(hvd.synchronize(handles[i]), torch.tensor([float(i * hvd.size())]))
        assert hvd.poll(handles[i])


def test_objects():
    value = {"rank": hvd.rank(), "tensor": torch.full((2,), float(hvd.rank()))}
    root = hvd.size() - 1
    received = hvd.broadcast_object(value, root_rank=root)
    assert received["rank"] == root and torch.equal(received["tensor"], torch.full((2,), float(root)))
    assert hvd.allgather_object("x" * hvd.rank()) == ["x" * rank for rank in range(hvd.size())]


def test_process_sets():
    size, rank = hvd.size(), hvd.rank()
    assert hvd.global_process_set.ranks == list(range(size)) and hvd.global_process_set.process_set_id == 0
    if size == 1:
        with pytest.raises(ValueError, match="no other set has"):
            hvd.add_process_set([0])
        return
    odd = hvd.ProcessSet(range(1, size, 2))
    assert odd.process_set_id is None and odd.size() is None and odd.rank() is None
    with pytest.raises(ValueError, match="add_process_set"):
        hvd.allreduce(torch.ones(1), process_set=odd)
    assert hvd.add_process_set(odd) is odd
    assert odd.size() == size // 2 and odd.included() == (rank % 2 == 1)
    assert odd.rank() == (rank // 2 if rank % 2 else -1)
    assert hvd.mpi_ops._basics._get_process_set_ids_and_ranks() == {0: list(range(size)), odd.process_set_id: odd.ranks}
    with pytest.raises(ValueError, match="no other set has"):
        hvd.add_process_set(odd.ranks)
    tensors = [tensor for i, tensor in enumerate(inputs((3,), torch.float32)) if i in odd.ranks]
    if odd.included():
        own = tensors[odd.rank()]
        equal(hvd.allreduce(own, process_set=odd), reduced(tensors, hvd.Average))
        equal(hvd.allgather(own, process_set=odd), torch.cat(tensors))
        equal(hvd.broadcast(own, odd.ranks[-1], process_set=odd), tensors[-1])
        assert hvd.broadcast_object(rank, odd.ranks[-1], process_set=odd) == odd.ranks[-1]
        hvd.barrier(odd)
    else:
        with pytest.raises(ValueError):
            hvd.allreduce(torch.ones(1), process_set=odd)
    assert hvd.remove_process_set(odd) and odd.process_set_id is None
    assert not hvd.remove_process_set(odd) and not hvd.remove_process_set(hvd.global_process_set)


def test_a_name_is_in_use_until_a_wait():
    starts = (lambda name: hvd.allreduce_async(torch.ones(2), name=name), lambda name: hvd.allgather_async(torch.ones(2), name=name),
              lambda name: hvd.broadcast_async(torch.ones(2), 0, name=name), lambda name: hvd.alltoall_async(torch.ones(hvd.size()), name=name),
              lambda name: hvd.reducescatter_async(torch.ones(hvd.size()), name=name),
              lambda name: hvd.grouped_allreduce_async([torch.ones(2)], name=name))
    for number, start in enumerate(starts):
        for late in (False, True):  # the operation is done at once on the last rank
            if (hvd.rank() > 0) == late:
                start(f"used{number}")
                with pytest.raises(ValueError, match=f"'used{number}': an asynchronous call of this name has not been waited for"):
                    start(f"used{number}")
            hvd.barrier()
    with pytest.raises(ValueError, match="expected a dense tensor"):
        hvd.allreduce_async(torch.ones(2).to_sparse(), name="refused")
    hvd.synchronize(hvd.allreduce_async(torch.ones(2), name="refused"))


def test_kinds_share_a_name():
    rank, size = hvd.rank(), hvd.size()
    rows = torch.arange(size, dtype=torch.float32) + rank
    starts = {"allreduce": lambda: hvd.allreduce_async(torch.tensor([rank + 1.0]), name="one", op=hvd.Sum),
              "allgather": lambda: hvd.allgather_async(torch.full((rank + 1,), float(rank)), name="one"),
              "broadcast": lambda: hvd.broadcast_async(torch.tensor([float(rank)]), size - 1, name="one"),
              "alltoall": lambda: hvd.alltoall_async(rows, name="one"),
              "reducescatter": lambda: hvd.reducescatter_async(rows, name="one", op=hvd.Sum),
              "sparse": lambda: hvd.sparse_allreduce_async(torch.tensor([rank + 1.0]).to_sparse(), "one", hvd.Sum)}
    total = size * (size + 1) / 2
    expected = {"allreduce": torch.tensor([total]), "allgather": torch.cat([torch.full((r + 1,), float(r)) for r in range(size)]),
                "broadcast": torch.tensor([size - 1.0]), "alltoall": torch.arange(size, dtype=torch.float32) + rank,
                "reducescatter": torch.tensor([size * rank + size * (size - 1) / 2]), "sparse": torch.tensor([total])}
    for turn in range(4):
        order = list(starts)[::-1] if (rank + turn) % 2 else list(starts)
        handles = {kind: starts[kind]() for kind in order}
        for kind in starts:
            result = hvd.synchronize(handles[kind])
            equal(result.to_dense() if kind == "sparse" else result, expected[kind])
    handles = [hvd.grouped_allreduce_async([torch.ones(1), torch.ones(2)], name="one", op=hvd.Sum),
               hvd.grouped_allgather_async([torch.ones(1), torch.ones(2)], name="one")]
    assert hvd.broadcast_object(rank, 0, name="one") == 0
    assert [tensor.sum() for handle in handles for tensor in hvd.synchronize(handle)] == [size, 2 * size, size, 2 * size]
    for blocking in (hvd.allreduce, hvd.allreduce_):
        handle = hvd.allreduce_async(torch.ones(1), name="one")
        with pytest.raises(ValueError, match="allreduce 'one': an asynchronous call of this name has not been waited for"):
            blocking(torch.ones(1), name="one")
        hvd.synchronize(handle)


def test_errors_show_the_kind_before_the_name():
    if hvd.size() == 1:
        return
    dtype = torch.float32 if hvd.rank() else torch.float64
    calls = {"allgather": lambda: hvd.allgather(torch.ones(1, dtype=dtype), name="shown"),
             "broadcast": lambda: hvd.broadcast(torch.ones(1, dtype=dtype), 0, name="shown"),
             "reducescatter": lambda: hvd.reducescatter(torch.ones(4, dtype=dtype), name="shown"),
             "alltoall": lambda: hvd.alltoall(torch.ones(hvd.size(), dtype=dtype), name="shown"),
             "grouped allgather": lambda: hvd.grouped_allgather([torch.ones(1, dtype=dtype)] * 2, name="shown")}
    for kind, call in calls.items():
        with pytest.raises(hvd.MismatchError, match=f"{kind.split()[-1]} '{kind.split()[-1]}.shown(.0)?': dtype differs") as raised:
            call()
        assert str(raised.value).isprintable(), str(raised.value)


def test_join():
    rank, size = hvd.rank(), hvd.size()
    others = list(range(1, size))
    if rank > 0:
        # The average divides by the size of the set, although rank 0 does not contribute.
        total = sum(others)
        equal(hvd.allreduce(torch.tensor([float(rank)]), name="joined"), torch.tensor([total / size]))
        equal(hvd.allreduce(torch.tensor([float(rank)]), name="joined", op=hvd.Sum), torch.tensor([float(total)]))
        for sign in (1, -1):
            integers = torch.tensor([sign * (5 + rank)], dtype=torch.int16)
            expected = torch.tensor([int(sign * sum(5 + other for other in others) / size)], dtype=torch.int16)
            equal(hvd.allreduce(integers, name="joined"), expected)
            equal(hvd.grouped_allreduce_([integers], name="joined")[0], expected)
        large = torch.tensor([2**31 - 1, -2**31], dtype=torch.int32)  # the sum is larger than the type
        expected = (large.to(torch.int64) * len(others)).div(size, rounding_mode="trunc").to(torch.int32)
        equal(hvd.allreduce(large, name="joined"), expected)
        equal(hvd.allgather(torch.tensor([rank]), name="joined"), torch.tensor(others))
        equal(hvd.broadcast(torch.tensor([rank]), 1, name="joined"), torch.tensor([1]))
    last = hvd.join()
    assert 0 <= last < size and (size == 1 or last != 0)
    equal(hvd.allreduce(torch.ones(1), op=hvd.Sum), torch.tensor([float(size)]))


def test_broadcast_parameters():
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, hvd.rank())
    model[1].num_batches_tracked += hvd.rank()
    hvd.broadcast_parameters(model.state_dict(), root_rank=hvd.size() - 1)
    root = hvd.size() - 1
    assert all(torch.equal(parameter, torch.full_like(parameter, root)) for parameter in model.parameters())
    assert model[1].num_batches_tracked == root
    parameter = torch.nn.Parameter(torch.tensor([float(hvd.rank())]))
    hvd.broadcast_parameters([("p", parameter)], 0)
    assert parameter.item() == 0
    with pytest.raises(ValueError, match="params"):
        hvd.broadcast_parameters(5, 0)


OPTIMIZERS = (lambda p: torch.optim.SGD(p, lr=0.1 * (hvd.rank() + 1), momentum=0.9),
              lambda p: torch.optim.Adam(p, lr=0.1 * (hvd.rank() + 1), amsgrad=True),
              lambda p: torch.optim.Adagrad(p, lr=0.1 * (hvd.rank() + 1)),
              lambda p: torch.optim.RMSprop(p, lr=0.1 * (hvd.rank() + 1), centered=True))


@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize("state_at", ("root", "everywhere", "others"))
def test_broadcast_optimizer_state(make, state_at):
    parameters = [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(3, 2))]
    optimizer = make(parameters)
    stepped = {"root": hvd.rank() == 0, "everywhere": True, "others": hvd.rank() != 0}[state_at]
    for _ in range(hvd.rank() + 1 if stepped else 0):
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 1. + hvd.rank())
        optimizer.step()
    before = [parameter.detach().clone() for parameter in parameters]
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    states = hvd.allgather_object(optimizer.state_dict())
    assert states[0]["param_groups"][0]["lr"] == 0.1
    assert bool(states[0]["state"]) == (state_at != "others" or isinstance(optimizer, torch.optim.Adagrad))
    for state in states:
        assert state["param_groups"] == states[0]["param_groups"]
        assert state["state"].keys() == states[0]["state"].keys()
        for key, values in state["state"].items():
            for name, value in values.items():
                assert torch.equal(torch.as_tensor(value), torch.as_tensor(states[0]["state"][key][name])), name
    assert all(torch.equal(parameter, old) for parameter, old in zip(parameters, before, strict=True))
    assert all(parameter.grad is not None for parameter in parameters)


def test_optimizers_that_differ():
    with pytest.raises(ValueError, match="LBFGS"):
        hvd.broadcast_optimizer_state(torch.optim.LBFGS([torch.nn.Parameter(torch.ones(1))]), 0)
    if hvd.size() > 1:
        parameters = [torch.nn.Parameter(torch.ones(1)) for _ in range(1 + (hvd.rank() == 1))]
        with pytest.raises(hvd.MismatchError, match="rank 1 has"):
            hvd.broadcast_optimizer_state(torch.optim.SGD(parameters, lr=0.1), 0)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()
