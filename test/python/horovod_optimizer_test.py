"""hvd.torch.DistributedOptimizer, GradScaler and SyncBatchNorm, on every rank of a job: hvdrun -np N python -m pytest.

Most tests compare training on N ranks with one process that has all their data, which every rank computes for itself."""

import copy
import io
import warnings

import pytest
import torch

import hvd.torch as hvd

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01), "Adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1), "Adamax": lambda p: torch.optim.Adamax(p, lr=0.1),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.1), "RAdam": lambda p: torch.optim.RAdam(p, lr=0.1),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1), "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1), "ASGD": lambda p: torch.optim.ASGD(p, lr=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.1), "Rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
}


@pytest.fixture(scope="module", autouse=True)
def job():
    hvd.init()


def make_model(seed=1):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2)).double()


def batch(rank, step):
    return torch.rand(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(100 * rank + step))


def loss_of(model, data):
    return (model(data) ** 2).mean()


def train_alone(make, steps=3, passes=1, clip=None, model=None, average=True):
    """One process with the data of all ranks."""
    model = model or make_model()
    optimizer = make(model.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(passes):
            total = sum(loss_of(model, batch(rank, step * passes + part)) for rank in range(hvd.size()))
            (total / hvd.size() if average else total).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return model


def same(model, expected, rtol=1e-9, atol=1e-10):
    for own, other in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=rtol, atol=atol)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_trains_as_one_process(name):
    model = make_model()
    inner = OPTIMIZERS[name](model.parameters())
    optimizer = hvd.DistributedOptimizer(inner, named_parameters=model.named_parameters())
    assert isinstance(optimizer, type(inner)) and type(optimizer).__name__ == name
    assert optimizer.param_groups is inner.param_groups and optimizer.state is inner.state
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, batch(hvd.rank(), step)).backward()
        optimizer.step()
    same(model, train_alone(OPTIMIZERS[name]), rtol=1e-6, atol=1e-8)
    digest = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert all(torch.equal(digest, other) for other in hvd.allgather(digest[None]))


SGD = OPTIMIZERS["SGD"]
OPTIONS = {
    "unnamed": {"named_parameters": None}, "no views": {"gradient_as_bucket_view": False}, "groups": {"groups": 2},
    "one group": {"groups": 1}, "predivide": {"gradient_predivide_factor": 2.0}, "sum": {"op": hvd.Sum},
    "checked": {"check_every": 1},
}


@pytest.mark.parametrize("options", OPTIONS)
def test_options(options):
    model = make_model()
    chosen = {"named_parameters": model.named_parameters(), **OPTIONS[options]}
    optimizer = hvd.DistributedOptimizer(SGD(model.parameters()), **chosen)
    for step in range(3):
        loss_of(model, batch(hvd.rank(), step)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    same(model, train_alone(SGD, average=options != "sum"))


class Halves(hvd.compression.Compressor):
    """A compression of the program: it is exact for these numbers."""

    calls = 0

    @classmethod
    def compress(cls, tensor):
        cls.calls += 1
        return tensor / 2, 2

    @staticmethod
    def decompress(tensor, ctx):
        return tensor * ctx


@pytest.mark.parametrize("compression", (hvd.Compression.fp16, hvd.Compression.bf16, Halves), ids=("fp16", "bf16", "own"))
def test_compression(compression):
    model = make_model()
    optimizer = hvd.DistributedOptimizer(SGD(model.parameters()), model.named_parameters(), compression=compression)
    for step in range(3):
        loss_of(model, batch(hvd.rank(), step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    tolerance = 1e-9 if compression is Halves else 1e-2
    same(model, train_alone(SGD), rtol=tolerance, atol=tolerance)
    assert compression is not Halves or Halves.calls == 12


def test_groups_of_parameters():
    model = make_model()
    weights = [model[0].weight, model[2].weight]
    optimizer = hvd.DistributedOptimizer(SGD(model.parameters()), model.named_parameters(), groups=[weights])
    for step in range(3):
        loss_of(model, batch(hvd.rank(), step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    same(model, train_alone(SGD))


@pytest.mark.parametrize("compression", (hvd.Compression.none, Halves), ids=("native", "Python"))
def test_accumulation_and_clipping(compression):
    model = make_model()
    optimizer = hvd.DistributedOptimizer(SGD(model.parameters()), model.named_parameters(), compression=compression)
    optimizer.set_backward_passes_per_step(2)
    for step in range(3):
        optimizer.zero_grad()
        for part in range(2):
            loss_of(model, batch(hvd.rank(), 2 * step + part)).backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        with optimizer.skip_synchronize():
            optimizer.step()
    same(model, train_alone(SGD, passes=2, clip=0.05))
    for _ in range(2):
        loss_of(model, batch(0, 0)).backward()
    with pytest.raises(hvd.UsageError, match="parameter '"):
        loss_of(model, batch(0, 0)).backward()
    optimizer.zero_grad()
    with optimizer.no_sync():
        for part in range(5):
            loss_of(model, batch(hvd.rank(), part)).backward()
    optimizer.step()


def test_step_after_synchronize_warns_once_and_reduces_nothing_twice():
    model = make_model()
    optimizer = hvd.DistributedOptimizer(SGD(model.parameters()), model.named_parameters(), op=hvd.Sum)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, batch(hvd.rank(), step)).backward()
            optimizer.synchronize()
            optimizer.step()
    texts = [str(warning.message) for warning in caught]
    assert sum(text.startswith("optimizer.step() called without optimizer.skip_synchronize()") for text in texts) == 1, texts
    same(model, train_alone(SGD, average=False))


def test_a_rank_without_a_gradient_contributes_zeros():
    model = torch.nn.ModuleList([torch.nn.Linear(2, 1, bias=False) for _ in range(max(hvd.size(), 2))])
    for layer in model:
        torch.nn.init.ones_(layer.weight)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters())
    for _ in range(2):
        optimizer.zero_grad()
        model[hvd.rank()](torch.ones(1, 2)).sum().backward()
        optimizer.step()
    for rank in range(hvd.size()):
        torch.testing.assert_close(model[rank].weight.detach(), torch.full((1, 2), 1 - 2 / hvd.size()))


def test_frozen_parameters_and_two_optimizers():
    models = [make_model(seed) for seed in (1, 2)]
    models[0][0].weight.requires_grad_(False)
    optimizers = [hvd.DistributedOptimizer(SGD(model.parameters()), model.named_parameters()) for model in models]
    expected = [make_model(seed) for seed in (1, 2)]
    expected[0][0].weight.requires_grad_(False)
    for step in range(3):
        for model in models:
            loss_of(model, batch(hvd.rank(), step)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for model, start in zip(models, expected, strict=True):
        same(model, train_alone(SGD, model=start))


def test_a_group_that_is_added_later():
    for named in (True, False):
        model, expected = make_model(), make_model()
        optimizer = hvd.DistributedOptimizer(SGD(model[0].parameters()), model.named_parameters() if named else None)
        alone = SGD(expected[0].parameters())
        for step in range(5):
            if step == 2:
                optimizer.add_param_group({"params": model[2].parameters(), "lr": 0.05})
                alone.add_param_group({"params": expected[2].parameters(), "lr": 0.05})
            optimizer.zero_grad()
            alone.zero_grad()
            model[2].zero_grad()
            expected[2].zero_grad()
            loss_of(model, batch(hvd.rank(), step)).backward()
            (sum(loss_of(expected, batch(rank, step)) for rank in range(hvd.size())) / hvd.size()).backward()
            optimizer.step()
            alone.step()
        same(model, expected)
        names = optimizer._parameter_names
        assert len(names) == 4 and (not named or names[model[2].weight] == "2.weight")
        loss_of(model, batch(hvd.rank(), 9)).backward()
        with pytest.raises(ValueError, match="add_param_group: expected a call after step"):
            optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
        optimizer.step()


def test_a_parameter_belongs_to_one_optimizer():
    model = make_model()
    optimizer = hvd.DistributedOptimizer(SGD(model.parameters()), model.named_parameters())
    with pytest.raises(ValueError, match=r"shape \[5, 3\] whose gradient would be reduced twice"):
        hvd.DistributedOptimizer(SGD([model[0].weight]))
    other = hvd.DistributedOptimizer(SGD([torch.nn.Parameter(torch.ones(1))]))
    with pytest.raises(ValueError, match="reduced twice"):
        other.add_param_group({"params": [model[0].weight]})
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    del optimizer, scheduler
    again = hvd.DistributedOptimizer(SGD(model.parameters()), model.named_parameters())
    for step in range(3):
        again.zero_grad()
        loss_of(model, batch(hvd.rank(), step)).backward()
        again.step()
    same(model, train_alone(SGD))


def test_process_set_and_a_rank_outside():
    if hvd.size() == 1:
        pytest.skip("needs a rank outside")
    inside = hvd.add_process_set(range(hvd.size() - 1))
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters(), process_set=inside)
    model(torch.full((1, 1), float(hvd.rank()))).sum().backward()
    optimizer.step()
    mean = sum(range(hvd.size() - 1)) / (hvd.size() - 1)
    assert model.weight.item() == pytest.approx(-mean if inside.included() else -hvd.rank())
    hvd.barrier()
    del optimizer
    hvd.remove_process_set(inside)


def test_schedulers_hooks_state_and_copies():
    model = make_model()
    inner = SGD(model.parameters())
    early = torch.optim.lr_scheduler.StepLR(inner, 1, gamma=0.5)
    optimizer = hvd.DistributedOptimizer(inner, model.named_parameters())
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    late = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    loss_of(model, batch(hvd.rank(), 0)).backward()
    optimizer.step()
    late.step()
    early.step()
    assert calls == [1] and optimizer.param_groups[0]["lr"] == pytest.approx(0.025)
    saved = optimizer.state_dict()
    clone = copy.deepcopy(optimizer)
    assert type(clone) is type(optimizer) and clone.state_dict()["param_groups"] == saved["param_groups"]
    file = io.BytesIO()
    torch.save(optimizer, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert isinstance(loaded, torch.optim.SGD) and loaded.state_dict()["param_groups"] == saved["param_groups"]
    other = hvd.DistributedOptimizer(SGD(make_model().parameters()))
    other.load_state_dict(saved)
    assert other.param_groups[0]["lr"] == pytest.approx(0.025)
    hvd.broadcast_optimizer_state(optimizer, 0)
    assert optimizer._parameter_names == {parameter: name for name, parameter in model.named_parameters()}


def test_closures():
    def closure_for(model, optimizer, ranks):
        def closure():
            optimizer.zero_grad()
            loss = sum(loss_of(model, batch(rank, 0)) for rank in ranks) / len(ranks)
            loss.backward()
            return loss

        return closure

    def make(parameters):
        return torch.optim.LBFGS(parameters, lr=0.5, max_iter=4)

    model, expected = make_model(), make_model()
    optimizer = hvd.DistributedOptimizer(make(model.parameters()), model.named_parameters())
    alone = make(expected.parameters())
    for _ in range(2):
        optimizer.step(closure_for(model, optimizer, [hvd.rank()]))
        alone.step(closure_for(expected, alone, range(hvd.size())))
    same(model, expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("as_dense", (False, True))
def test_sparse_gradients(as_dense):
    table, expected = (torch.nn.Embedding(6, 2, sparse=True) for _ in range(2))
    for layer in (table, expected):
        torch.nn.init.ones_(layer.weight)
    optimizer = hvd.DistributedOptimizer(torch.optim.SparseAdam(table.parameters(), lr=0.1), table.named_parameters(),
                                         sparse_as_dense=as_dense)
    alone = torch.optim.SparseAdam(expected.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        alone.zero_grad()
        table(torch.tensor([hvd.rank(), 5])).sum().backward()
        sum(expected(torch.tensor([rank, 5])).sum() / hvd.size() for rank in range(hvd.size())).backward()
        optimizer.step()
        assert table.weight.grad.is_sparse
        alone.step()
    torch.testing.assert_close(table.weight, expected.weight)


def test_adasum():
    model = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), model.named_parameters(), op=hvd.Adasum)
    # Equal changes count once, so that the result is that of one rank.
    for step in range(1, 3):
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        torch.testing.assert_close(model.weight.detach(), torch.full((1, 2), -0.5 * step))
    if hvd.size() == 2:  # orthogonal changes add up
        torch.nn.init.zeros_(model.weight)
        optimizer.zero_grad()
        model(torch.eye(2)[hvd.rank()][None]).sum().backward()
        optimizer.step()
        torch.testing.assert_close(model.weight.detach(), torch.full((1, 2), -0.5))


def test_average_while_a_rank_has_joined():
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters())
    for step in range(2 + (hvd.rank() > 0)):
        optimizer.zero_grad()
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
    hvd.join()
    if hvd.rank() > 0:
        assert model.weight.item() == pytest.approx(-2 - (hvd.size() - 1) / hvd.size())


@pytest.mark.parametrize("overflow_on", (None, 0))
def test_grad_scaler(overflow_on):
    model = make_model()
    optimizer = hvd.DistributedOptimizer(SGD(model.parameters()), model.named_parameters())
    scaler = hvd.GradScaler(init_scale=8.0)
    for step in range(3):
        optimizer.zero_grad()
        loss = loss_of(model, batch(hvd.rank(), step))
        if step == 3 - 1 and overflow_on == hvd.rank():
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        if step == 1:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    skipped = overflow_on is not None
    assert scaler.get_scale() == (4.0 if skipped else 8.0)
    same(model, train_alone(SGD, steps=2 if skipped else 3))


@pytest.mark.parametrize("shape", ((3,), (3, 4), (3, 2, 2), (3, 2, 2, 2)))
def test_sync_batch_norm(shape):
    layers = [layer.double() for layer in (hvd.SyncBatchNorm(3), torch.nn.modules.batchnorm._BatchNorm(3))]
    layers[1]._check_input_dim = lambda input: None
    layers.append(hvd.convert_sync_batchnorm(torch.nn.Sequential(torch.nn.BatchNorm1d(3)))[0].double())
    inputs = [torch.rand(2 + rank, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
              for rank in range(hvd.size())]
    own, joined = inputs[hvd.rank()].clone().requires_grad_(), torch.cat(inputs).requires_grad_()
    first = sum(2 + rank for rank in range(hvd.rank()))
    for layer in (layers[0], layers[2]):
        own.grad = joined.grad = None
        layers[1].reset_running_stats()
        output, expected = layer(own), layers[1](joined)
        torch.testing.assert_close(output, expected[first:first + own.shape[0]])
        (output ** 3).sum().backward()
        (expected ** 3).sum().backward()
        torch.testing.assert_close(own.grad, joined.grad[first:first + own.shape[0]])
        torch.testing.assert_close(layer.running_mean, layers[1].running_mean)
        torch.testing.assert_close(layer.running_var, layers[1].running_var)
        weight = hvd.allreduce(layer.weight.grad, op=hvd.Sum)
        torch.testing.assert_close(weight, layers[1].weight.grad)
        layers[1].weight.grad = layers[1].bias.grad = None
        copy.deepcopy(layer)(own.detach())
        layer.eval()
        torch.testing.assert_close(layer(own.detach()).shape, own.shape)


def wrong(**options):
    model = make_model()
    return hvd.DistributedOptimizer(SGD(model.parameters()), **{"named_parameters": model.named_parameters(), **options})


WRONG = {
    "passes": (lambda: wrong(backward_passes_per_step=0), "backward_passes_per_step"),
    "predivide": (lambda: wrong(op=hvd.Sum, gradient_predivide_factor=2.0), "gradient_predivide_factor"),
    "op": (lambda: wrong(op=hvd.Max), "op: expected"),
    "unnamed": (lambda: wrong(named_parameters=[("a", torch.nn.Parameter(torch.ones(1)))]), "a name for every parameter"),
    "duplicates": (lambda: wrong(named_parameters=[("a", p) for p in make_model().parameters()]), "each name once"),
    "no pairs": (lambda: wrong(named_parameters=make_model().parameters()), "pairs"),
    "group number": (lambda: wrong(groups=-1), "groups"),
    "foreign": (lambda: wrong(groups=[[torch.ones(1)]]), "groups"),
    "wrapped": (lambda: hvd.DistributedOptimizer(wrong()), "twice"),
    "no optimizer": (lambda: hvd.DistributedOptimizer(5), "optimizer"),
    "later passes": (lambda: wrong().set_backward_passes_per_step(0), "backward_passes_per_step"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments(case):
    call, text = WRONG[case]
    with pytest.raises(ValueError, match=text):
        call()


def test_a_parameter_twice_in_groups():
    model = make_model()
    with pytest.raises(ValueError, match="each parameter once"):
        hvd.DistributedOptimizer(SGD(model.parameters()), groups=[[model[0].weight], [model[0].weight]])
