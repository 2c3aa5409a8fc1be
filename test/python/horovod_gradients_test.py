"""The derivatives of hvd.torch's collectives and its errors, on every rank of a job: hvdrun -np N python -m pytest."""

import pytest
import torch

import hvd.torch as hvd


@pytest.fixture(scope="module", autouse=True)
def job():
    hvd.init()


def leaf(*shape):
    return torch.full(shape, 1. + hvd.rank(), dtype=torch.float64, requires_grad=True)


def weights(*shape):
    """The weights of a loss, which differ between ranks: the gradient of the collective's result."""
    return weights_of(hvd.rank(), *shape)


def weights_of(rank, *shape):
    return torch.rand(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))


def all_weights(*shape):
    return [weights_of(rank, *shape) for rank in range(hvd.size())]


def gradient_of(result, tensor):
    (result * weights(*result.shape)).sum().backward()
    return tensor.grad


@pytest.mark.parametrize("op", (hvd.Average, hvd.Sum), ids=("Average", "Sum"))
def test_allreduce(op):
    divisor = hvd.size() if op == hvd.Average else 1
    expected = sum(all_weights(3, 2)) * 6 / divisor
    tensor = leaf(3, 2)
    result = hvd.allreduce(tensor, name="a", op=op, prescale_factor=2.0, postscale_factor=3.0)
    torch.testing.assert_close(gradient_of(result, tensor), expected)
    tensors = [leaf(3, 2), leaf(3, 2)]
    results = hvd.grouped_allreduce(tensors, op=op, prescale_factor=2.0, postscale_factor=3.0)
    sum((result * weights(3, 2)).sum() for result in results).backward()
    for tensor in tensors:
        torch.testing.assert_close(tensor.grad, expected)


def test_compression_keeps_the_gradient():
    tensor = torch.ones(4, requires_grad=True)
    hvd.allreduce(tensor, compression=hvd.Compression.fp16).sum().backward()
    assert tensor.grad.dtype == torch.float32 and torch.equal(tensor.grad, torch.ones(4))


def test_allgather():
    rows = [rank % 3 for rank in range(hvd.size())]
    first = sum(rows[:hvd.rank()])
    average = sum(all_weights(sum(rows), 2)) / hvd.size()
    expected = average[first:first + rows[hvd.rank()]]
    tensor = leaf(rows[hvd.rank()], 2)
    torch.testing.assert_close(gradient_of(hvd.allgather(tensor, name="g"), tensor), expected)
    scalar = leaf()
    torch.testing.assert_close(gradient_of(hvd.allgather(scalar), scalar),
                               (sum(all_weights(hvd.size())) / hvd.size())[hvd.rank()])
    tensors = [leaf(rows[hvd.rank()], 2), leaf(1)]
    gathered, ones = hvd.grouped_allgather(tensors)
    ((gathered * weights(sum(rows), 2)).sum() + ones.sum()).backward()
    torch.testing.assert_close(tensors[0].grad, expected)
    torch.testing.assert_close(tensors[1].grad, torch.ones(1, dtype=torch.float64))


def test_broadcast():
    root = hvd.size() - 1
    tensor = leaf(3)
    average = sum(all_weights(3)) / hvd.size()
    expected = average if hvd.rank() == root else torch.zeros(3, dtype=torch.float64)
    torch.testing.assert_close(gradient_of(hvd.broadcast(tensor, root), tensor), expected)


@pytest.mark.parametrize("with_splits", (True, False))
def test_alltoall(with_splits):
    size, rank = hvd.size(), hvd.rank()
    counts = [[1 + with_splits * (sender + receiver) % 2 for receiver in range(size)] for sender in range(size)]
    received = [[row[receiver] for row in counts] for receiver in range(size)]
    tensor = leaf(sum(counts[rank]))
    result = hvd.alltoall(tensor, splits=counts[rank]) if with_splits else hvd.alltoall(tensor)
    output = result[0] if with_splits else result
    expected = torch.cat([weights_of(receiver, sum(received[receiver])).split(received[receiver])[rank]
                          for receiver in range(size)])
    torch.testing.assert_close(gradient_of(output, tensor), expected)


@pytest.mark.parametrize("op", (hvd.Average, hvd.Sum), ids=("Average", "Sum"))
def test_reducescatter(op):
    factor = 6 * (hvd.size() if op == hvd.Sum else 1)
    rows = [5 // hvd.size() + (rank < 5 % hvd.size()) for rank in range(hvd.size())]
    expected = torch.cat([weights_of(rank, rows[rank], 2) for rank in range(hvd.size())]) * factor
    tensor = leaf(5, 2)
    result = hvd.reducescatter(tensor, op=op, prescale_factor=2.0, postscale_factor=3.0)
    torch.testing.assert_close(gradient_of(result, tensor), expected)
    grouped = leaf(5, 2)
    result, = hvd.grouped_reducescatter([grouped], op=op, prescale_factor=2.0, postscale_factor=3.0)
    torch.testing.assert_close(gradient_of(result, grouped), expected)


@pytest.mark.parametrize("op", (hvd.Min, hvd.Max, hvd.Product, hvd.Adasum))
def test_reductions_without_a_derivative(op):
    tensor = leaf(2)
    result = hvd.allreduce(tensor, op=op)
    assert result.requires_grad
    with pytest.raises(ValueError, match="no derivative"):
        result.sum().backward()


def test_second_derivative():
    tensor = leaf(2)
    first, = torch.autograd.grad((hvd.allreduce(tensor, op=hvd.Sum) ** 3).sum(), tensor, create_graph=True)
    second, = torch.autograd.grad(first.sum(), tensor)
    total = sum(range(1, hvd.size() + 1))
    torch.testing.assert_close(second, torch.full((2,), 6. * total * hvd.size() ** 2, dtype=torch.float64))


def test_transforms_are_refused():
    with pytest.raises(RuntimeError):
        torch.func.grad(lambda tensor: hvd.allreduce(tensor).sum())(torch.ones(2))
    with pytest.raises(RuntimeError, match="torch.func"):
        torch.func.vmap(hvd.allreduce)(torch.ones(2, 2))


WRONG = {
    "layout": (lambda: hvd.allreduce(torch.eye(2).to_sparse()), "layout"),
    "dtype": (lambda: hvd.allreduce(torch.zeros(2, dtype=torch.complex64), op=hvd.Max), "complex"),
    "op": (lambda: hvd.allreduce(torch.ones(1), op=17), "op: expected"),
    "scalar": (lambda: hvd.reducescatter(torch.tensor(1.)), "scalar"),
    "reducescatter op": (lambda: hvd.reducescatter(torch.ones(4), op=hvd.Max), "op: expected"),
    "splits": (lambda: hvd.alltoall(torch.ones(3), splits=[5] * hvd.size()), "splits"),
    "negative splits": (lambda: hvd.alltoall(torch.ones(3), splits=[-1] * hvd.size()), "splits"),
    "split dtype": (lambda: hvd.alltoall(torch.ones(3), splits=torch.ones(hvd.size())), "splits"),
    "root": (lambda: hvd.broadcast(torch.ones(1), hvd.size()), "root"),
    "two ops": (lambda: hvd.allreduce(torch.ones(1), average=True, op=hvd.Sum), "op and average"),
    "handle": (lambda: hvd.synchronize(7), "handle"),
    "tensors": (lambda: hvd.grouped_allreduce(torch.ones(2)), "tensors"),
    "set": (lambda: hvd.allreduce(torch.ones(1), process_set=[0]), "process_set"),
    "set rank": (lambda: hvd.add_process_set([0, hvd.size()]), "rank"),
    "set of strings": (lambda: hvd.ProcessSet(["a"]), "integers"),
    "comm": (lambda: hvd.init(comm=[hvd.size()]), "comm"),
    "sets": (lambda: hvd.init(process_sets="static"), "dynamic"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments(case):
    call, text = WRONG[case]
    with pytest.raises(ValueError, match=text) as caught:
        call()
    assert isinstance(caught.value, hvd.UsageError)
    assert hvd.allreduce(torch.ones(1), name="after", op=hvd.Sum).item() == hvd.size()  # nothing was sent


def test_name_in_flight_twice():
    if hvd.size() == 1:
        pytest.skip("an operation of one rank is done at once")
    hvd.barrier()
    if hvd.rank() == 0:
        handle = hvd.allreduce_async(torch.ones(1), name="twice")
        with pytest.raises(ValueError, match="twice"):
            hvd.allreduce_async(torch.ones(1), name="twice")
        hvd.barrier()
    else:
        hvd.barrier()
        handle = hvd.allreduce_async(torch.ones(1), name="twice")
    assert hvd.synchronize(handle).item() == 1


def test_ranks_that_disagree():
    if hvd.size() == 1:
        pytest.skip("one rank agrees with itself")
    rank = hvd.rank()
    cases = (lambda: hvd.allreduce(torch.ones(1 + rank), name="shape"),
             lambda: hvd.allreduce(torch.ones(1, dtype=(torch.float32, torch.float64)[rank % 2]), name="dtype"),
             lambda: hvd.allreduce(torch.ones(1), name="op", op=(hvd.Sum, hvd.Max)[rank % 2]),
             lambda: hvd.allreduce(torch.ones(1), name="factor", prescale_factor=1. + rank),
             lambda: hvd.allgather(torch.ones(1, 1 + rank), name="rows"),
             lambda: hvd.broadcast(torch.ones(1), rank % 2, name="root"),
             lambda: hvd.grouped_allreduce([torch.ones(1), torch.ones(1 + rank)], name="group"))
    for call in cases:
        with pytest.raises(hvd.HorovodInternalError) as caught:
            call()
        assert isinstance(caught.value, hvd.MismatchError)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()


def test_errors_in_backward_keep_their_class():
    if hvd.size() == 1:
        pytest.skip("one rank agrees with itself")
    tensor = torch.ones(2, requires_grad=True)
    result = hvd.allreduce(tensor, name="before")
    gradient = torch.ones(2)
    hvd.barrier()
    if hvd.rank() == 0:
        other = hvd.allreduce_async(torch.ones(3), name="before.backward")
        with pytest.raises(hvd.MismatchError):
            hvd.synchronize(other)
    else:
        with pytest.raises(hvd.MismatchError, match="shape"):
            result.backward(gradient)
    hvd.barrier()


def test_repeated_init_and_another_job():
    hvd.init()
    hvd.init(comm=list(range(hvd.size())), process_sets="dynamic")
    size, rank = hvd.size(), hvd.rank()
    handle = hvd.allreduce_async(torch.ones(1), name="old")
    hvd.synchronize(handle)
    ranks = list(range(size - 1)) or [0]
    chosen = hvd.ProcessSet(ranks)
    hvd.init(process_sets=[chosen])
    assert (chosen.process_set_id is None) == (size == 1)
    hvd.shutdown()
    assert not hvd.is_initialized() and chosen.process_set_id is None
    hvd.shutdown()
    for call in (hvd.rank, hvd.size, hvd.local_rank, hvd.cross_size, hvd.join, hvd.barrier,
                 lambda: hvd.allreduce(torch.ones(1)), lambda: hvd.broadcast_object(1), lambda: hvd.add_process_set([0])):
        with pytest.raises(ValueError) as caught:
            call()
        assert isinstance(caught.value, hvd.NotInitializedError)
    for call in (hvd.poll, hvd.synchronize):
        with pytest.raises(ValueError, match="job"):
            call(handle)
    hvd.init(process_sets=[chosen])
    assert (hvd.size(), hvd.rank()) == (size, rank)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size
    hvd.remove_process_set(chosen)
