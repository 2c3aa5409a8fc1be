"""DistributedDataParallel and the optimizers and hooks made for it: over hvd, two ranks train to the bits that they have over gloo."""

import contextlib

import pytest
import torch
import torch._dynamo  # noqa: F401  DDP imports it: here, once rather than in each rank
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

STEPS = 4


class Net(torch.nn.Module):
    """Layers of several sizes, a buffer that differs by rank, and two branches."""

    def __init__(self, checkpointed=False):
        super().__init__()
        self.first = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU())
        self.branches = torch.nn.ModuleList(torch.nn.Linear(16, 5) for _ in range(2))
        self.last = torch.nn.Linear(5, 3)
        self.checkpointed = checkpointed

    def forward(self, x, branch=None):
        x = checkpoint(self.first, x, use_reentrant=False) if self.checkpointed else self.first(x)
        chosen = self.branches if branch is None else [self.branches[branch]]
        return self.last(sum(layer(x) for layer in chosen))


def batches(rank, count):
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(6, 8, generator=generator) for _ in range(count)]


def wrap(checkpointed=False, bucket_cap_mb=0.0005, **options):
    torch.manual_seed(0)
    return DistributedDataParallel(Net(checkpointed), bucket_cap_mb=bucket_cap_mb, **options)


def train(net, optimizer, inputs, branch=lambda step: None, accumulate=lambda step: False):
    for step, x in enumerate(inputs):
        with net.no_sync() if accumulate(step) else contextlib.nullcontext():
            net(x, branch(step)).square().mean().backward()
        if not accumulate(step):
            optimizer.step()
            optimizer.zero_grad()
    return {name: tensor.detach().clone() for name, tensor in net.module.state_dict().items()}


def sgd(net):
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def train_in_every_mode(rank, size):
    results = {}
    for name, options in {"plain": {}, "views": {"gradient_as_bucket_view": True}, "static": {"static_graph": True},
                          "static, checkpointed": {"static_graph": True, "checkpointed": True},
                          "without buffers": {"broadcast_buffers": False}}.items():
        net = wrap(**options)
        results[name] = train(net, sgd(net), batches(rank, STEPS))
    net = wrap(find_unused_parameters=True)
    results["unused"] = train(net, sgd(net), batches(rank, STEPS), branch=lambda step: (step + rank) % 2)
    net = wrap(find_unused_parameters=True)
    results["unused everywhere"] = train(net, sgd(net), batches(rank, STEPS), branch=lambda step: 0)
    net = wrap()
    results["accumulated"] = train(net, sgd(net), batches(rank, 6), accumulate=lambda step: step % 3 != 2)
    return results


def test_modes(equals_gloo):
    ours = equals_gloo(train_in_every_mode, 2)
    for mode in ours[0]:
        for name, tensor in ours[0][mode].items():
            if "running" not in name:  # the buffers of rank 0 are broadcast before each step, not after the last one
                assert torch.equal(tensor, ours[1][mode][name]), (mode, name)


def mapping_of(address):
    """The name of the file in which this address lies, from the process's table of mappings."""
    with open("/proc/self/maps", encoding="utf-8") as file:
        for line in file:
            words = line.split()
            begin, end = (int(word, 16) for word in words[0].split("-"))
            if begin <= address < end:
                return words[5] if len(words) > 5 else ""
    return None


def find_buckets(rank, size):
    names = set()

    def record(state, bucket):
        names.add(mapping_of(bucket.buffer().data_ptr()))
        return default_hooks.allreduce_hook(state, bucket)

    net = wrap()
    net.register_comm_hook(None, record)
    train(net, sgd(net), batches(rank, STEPS))
    return names


def test_buckets_lie_where_they_are_reduced(on_ranks, monkeypatch):
    for names in on_ranks(find_buckets, 2):
        assert len(names) == 1 and "hvd-arena" in names.pop()
    monkeypatch.setenv("DDP_DISABLE_COMM_MEM", "1")
    for names in on_ranks(find_buckets, 2):
        assert not any("hvd-arena" in name for name in names)


def train_with_hooks(rank, size):
    power = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=0.5)
    hooks = {"allreduce": (None, default_hooks.allreduce_hook), "fp16": (None, default_hooks.fp16_compress_hook),
             "PowerSGD": (power, powerSGD_hook.powerSGD_hook),
             "fp16 around a hook": (None, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook))}
    results = {}
    for name, (state, hook) in hooks.items():
        # PowerSGD calls collectives from callbacks, in an order that depends on the time when there are several buckets.
        net = wrap(bucket_cap_mb=25 if state else 0.0005)
        net.register_comm_hook(state, hook)
        results[name] = train(net, sgd(net), batches(rank, STEPS))
    for kind in (dist.BuiltinCommHookType.ALLREDUCE, dist.BuiltinCommHookType.FP16_COMPRESS):
        net = wrap()
        net._register_builtin_comm_hook(kind)
        results[str(kind)] = train(net, sgd(net), batches(rank, STEPS))
    net = wrap()
    alone = dist.new_group([rank], use_local_synchronization=True)
    net.register_comm_hook(post_localSGD_hook.PostLocalSGDState(None, alone, start_localSGD_iter=2), post_localSGD_hook.post_localSGD_hook)
    averaged = PostLocalSGDOptimizer(sgd(net), PeriodicModelAverager(period=2, warmup_steps=2))
    results["post-local SGD"] = train(net, averaged, batches(rank, STEPS))
    return results


def test_hooks(equals_gloo):
    equals_gloo(train_with_hooks, 2)


def train_uneven_inputs(rank, size):
    net = wrap()
    optimizer = sgd(net)
    with net.join():
        results = {"net.join": train(net, optimizer, batches(rank, STEPS + 2 * rank))}
    net = wrap()
    optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.Adam, lr=0.01)
    with Join([net, optimizer]):
        results["Join"] = train(net, optimizer, batches(rank, STEPS + 1 - rank))
    net = wrap()
    try:
        with net.join(throw_on_early_termination=True):
            train(net, sgd(net), batches(rank, STEPS + rank))
    except RuntimeError as error:
        results["thrown"] = torch.tensor("exhausted" in str(error))
    return results


def test_join(equals_gloo):
    for results in equals_gloo(train_uneven_inputs, 2):
        assert results["thrown"].item()


def train_with_a_sharded_optimizer(rank, size):
    results = {}
    for views in (False, True):
        net = wrap()
        optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.Adam, parameters_as_bucket_view=views, lr=0.01)
        results[f"views {views}"] = train(net, optimizer, batches(rank, STEPS))
        optimizer.consolidate_state_dict(to=1)
        if rank == 1:
            state = optimizer.state_dict()["state"]
            results[f"state {views}"] = [state[k]["exp_avg"] for k in sorted(state)]
    net = wrap()
    whole = torch.optim.Adam(net.parameters(), lr=0.01)
    reference = train(net, whole, batches(rank, STEPS))
    for name, tensor in reference.items():
        assert torch.equal(tensor, results["views False"][name]), name
    return results


def test_zero_redundancy_optimizer(equals_gloo):
    equals_gloo(train_with_a_sharded_optimizer, 2)


def train_on_four(rank, size):
    net = wrap(gradient_as_bucket_view=True)
    results = {"world": train(net, sgd(net), batches(rank, STEPS))}
    pair, _ = dist.new_subgroups(2)
    net = wrap(process_group=pair)
    results["pair"] = train(net, sgd(net), batches(rank, STEPS))
    return results


def test_four_ranks_and_pairs(equals_gloo):
    ours = equals_gloo(train_on_four, 4, rtol=1e-5)
    weights = [rank["pair"]["last.weight"] for rank in ours]
    assert torch.equal(weights[0], weights[1]) and torch.equal(weights[2], weights[3]) and not torch.equal(weights[0], weights[2])


def train_with_our_hook(rank, size, path):
    import hvd
    import hvd.torch

    net = wrap()
    results = {"gloo": train(net, sgd(net), batches(rank, STEPS))}
    assert not hvd.is_initialized()
    for attempt in ("first", "second"):
        net = wrap()
        net.register_comm_hook(None, hvd.torch.ddp_hook)
        results[attempt] = train(net, sgd(net), batches(rank, STEPS))
        assert hvd.is_initialized() and hvd.metrics()["completed_operations"] >= STEPS
        dist.destroy_process_group()
        assert not hvd.is_initialized()
        dist.init_process_group("gloo", init_method=f"file://{path}-{attempt}", rank=rank, world_size=size)
    everyone = dist.new_group(backend="hvd")
    pair = [dist.new_group([first, first + 1], backend="hvd") for first in range(0, size, 2)][rank // 2]
    for name, group in {"everyone": everyone, "pair": pair}.items():
        net = wrap()
        net.register_comm_hook(group, hvd.torch.ddp_hook)
        results[name] = train(net, sgd(net), batches(rank, STEPS))
    return results


def test_our_hook_while_the_group_is_gloo(on_ranks, tmp_path):
    for results in on_ranks(train_with_our_hook, 2, tmp_path / "store", backend="gloo"):
        for name in ("first", "second", "everyone", "pair"):
            torch.testing.assert_close(results[name], results["gloo"], rtol=0, atol=0)


@pytest.mark.parametrize("wrong", ["count", "shape"])
def test_models_that_differ_are_an_error(on_ranks, wrong):
    on_ranks(wrap_different_models, 2, wrong)


def wrap_different_models(rank, size, wrong):
    layers = [torch.nn.Linear(4, 4), torch.nn.Linear(4, 3)]
    if rank == 1:
        layers = layers[:1] if wrong == "count" else [torch.nn.Linear(4, 5), torch.nn.Linear(5, 3)]
    with pytest.raises(RuntimeError, match="param|rank"):
        DistributedDataParallel(torch.nn.Sequential(*layers))
