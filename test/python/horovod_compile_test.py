"""hvd.torch within torch.compile and torch.func, on every rank of a job: hvdrun -np N python -m pytest."""

import shutil

import pytest
import torch

import hvd.torch as hvd


@pytest.fixture(scope="module", autouse=True)
def job():
    hvd.init()


def rows(count):
    return torch.arange(float(count)).reshape(-1, 1) + hvd.rank()


def weighted(results):
    """A loss whose gradients differ between results and ranks."""
    return sum((result * (place + 1)).sum() * (hvd.rank() + 1) for place, result in enumerate(results))


CASES = {
    "allreduce": (lambda x: hvd.allreduce(x * 2, name="a") + 1, 6),
    "two of one name": (lambda x: hvd.allreduce(x, name="a") + hvd.allreduce(x, name="a"), 6),
    "sum": (lambda x: hvd.allreduce(x * 2, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0), 6),
    "compression": (lambda x: hvd.allreduce(x * 2, name="a", compression=hvd.Compression.fp16), 6),
    "grouped_allreduce": (lambda x: hvd.grouped_allreduce([x * 2, x + 1], name="g"), 6),
    "allgather": (lambda x: hvd.allgather(x * 2, name="a") + 1, None),  # another number of rows on each rank
    "grouped_allgather": (lambda x: hvd.grouped_allgather([x * 2, x + 1], name="a"), None),
    "broadcast": (lambda x: hvd.broadcast(x * 2, 0, name="a") + 1, 6),
    "alltoall": (lambda x: hvd.alltoall(x * 2, name="a") + 1, 12),
    "alltoall with splits": (lambda x, size: hvd.alltoall(x * 2, torch.full((size,), 2), name="a")[0] + 1, "size"),
    "reducescatter": (lambda x: hvd.reducescatter(x * 2, name="a", op=hvd.Sum) + 1, 7),
    "grouped_reducescatter": (lambda x: hvd.grouped_reducescatter([x * 2, x + 1], name="a"), 7),
}


def compare(function, own, backend):
    """Compares results and derivatives of the compiled function, without a break of the graph, with those of the function."""
    torch._dynamo.reset()
    inputs = [own.clone().requires_grad_(True) for _ in range(2)]
    results = [function(inputs[0]), torch.compile(function, fullgraph=True, backend=backend)(inputs[1])]
    torch.testing.assert_close(results[1], results[0])
    for result in results:
        weighted(result if isinstance(result, list) else [result]).backward()
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad)


@pytest.mark.parametrize("name", CASES)
def test_a_compiled_collective_is_the_eager_one(name):
    function, count = CASES[name]
    if count == "size":
        size = hvd.size()
        compare(lambda x: function(x, size), rows(2 * size), "aot_eager")
    else:
        compare(function, rows(count or hvd.rank() + 1), "aot_eager")


@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="inductor needs a C++ compiler")
@pytest.mark.parametrize("name", ("two of one name", "allgather", "alltoall", "reducescatter"))
def test_inductor(name):
    function, count = CASES[name]
    compare(function, rows(count or hvd.rank() + 1), "inductor")


@pytest.mark.parametrize("call", (lambda x: hvd.allreduce_(x, name="a"), lambda x: hvd.broadcast_(x, 0, name="a"),
                                  lambda x: hvd.grouped_allreduce_([x], name="a")[0]))
def test_in_place(call):
    torch._dynamo.reset()
    tensors = [rows(3), rows(3)]
    results = [call(tensors[0]), torch.compile(call, fullgraph=True, backend="aot_eager")(tensors[1])]
    torch.testing.assert_close(tensors[1], tensors[0])
    torch.testing.assert_close(results[1], results[0])


def test_no_call_is_merged_or_dropped():
    """Every call of the program runs, also without a use of its result and beside an equal one."""
    torch._dynamo.reset()

    def calls(x):
        hvd.allreduce(x, name="unused")
        first = hvd.allreduce(x, name="equal")
        second = hvd.allreduce(x, name="equal")
        return first + second

    compiled = torch.compile(calls, fullgraph=True, backend="inductor" if shutil.which("g++") else "aot_eager")
    compiled(rows(3))
    before = hvd.metrics()["completed_operations"]
    compiled(rows(3))
    assert hvd.metrics()["completed_operations"] - before == 3


def test_a_process_set():
    if hvd.size() < 2:
        pytest.skip("needs two ranks")
    pair = hvd.add_process_set([0, hvd.size() - 1]) if hvd.size() > 2 else hvd.add_process_set([0])
    if pair.included():
        compare(lambda x: hvd.allreduce(x * 2, name="a", process_set=pair), rows(3), "aot_eager")
    hvd.barrier()
    hvd.remove_process_set(pair)
    if hvd.rank() == 0:
        torch._dynamo.reset()
        with pytest.raises(ValueError, match="process_set"):
            torch.compile(lambda x: hvd.allreduce(x, name="a", process_set=pair), backend="aot_eager")(rows(3))


def test_other_calls_break_the_graph():
    torch._dynamo.reset()

    def function(x):
        y = x * 2
        handle = hvd.allreduce_async(y.detach(), name="b", op=hvd.Sum)
        hvd.barrier()
        return hvd.synchronize(handle) * hvd.size() + hvd.rank() + hvd.allreduce(x, name="c")

    own = rows(3)
    torch.testing.assert_close(torch.compile(function, backend="aot_eager")(own), function(own))


def test_a_compiled_model_trains_as_the_eager_one():
    def train(compiled):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
        forward = torch.compile(model, backend="aot_eager") if compiled else model
        data = torch.Generator().manual_seed(hvd.rank())
        for _ in range(4):
            optimizer.zero_grad()
            forward(torch.randn(5, 3, generator=data)).pow(2).mean().backward()
            optimizer.step()
        return [parameter.detach() for parameter in model.parameters()]

    torch.testing.assert_close(train(True), train(False))


@pytest.mark.parametrize("transform", (torch.func.grad, torch.func.vmap, torch.func.hessian, torch.func.jacrev))
@pytest.mark.parametrize("call", (lambda x: hvd.allreduce(x, op=hvd.Sum), hvd.allgather, lambda x: hvd.broadcast(x, 0),
                                  lambda x: hvd.allreduce_async(x).wait(), lambda x: hvd.grouped_allreduce([x])[0]))
def test_transforms_are_errors(transform, call):
    # In a set of one rank nothing is exchanged, so ranks that raise the error leave no call behind.
    function = (lambda x: call(x)) if transform is torch.func.vmap else (lambda x: call(x * x).sum())
    with pytest.raises((ValueError, RuntimeError)):
        transform(function)(torch.ones(3, 2) + hvd.rank())
    hvd.barrier()
