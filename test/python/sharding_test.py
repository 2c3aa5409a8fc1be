"""FSDP2, tensor parallelism, DTensor, device meshes, pipelines and checkpoints: over hvd as over gloo. Sums of two ranks are equal bit
for bit."""

import pytest
import torch
import torch._dynamo  # noqa: F401  imported here once rather than in each rank
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, ShardingStrategy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel, loss_parallel,
                                               parallelize_module)

STEPS = 3


class Block(torch.nn.Module):
    def __init__(self, width=8, hidden=16):
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up = torch.nn.Linear(width, hidden)
        self.down = torch.nn.Linear(hidden, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(torch.nn.Module):
    def __init__(self, blocks=2):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(blocks))
        self.last = torch.nn.Linear(8, 5)  # 5 rows are not divisible by the ranks

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def batches(seed, count=STEPS):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(4, 6, 8, generator=generator) for _ in range(count)]


def train(net, seed, optimizer=None, clip=None):
    optimizer = optimizer or torch.optim.AdamW(net.parameters(), lr=0.01)
    for x in batches(seed):
        net(x).float().square().mean().backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()


def whole(net):
    return get_model_state_dict(net, options=StateDictOptions(full_state_dict=True))


def shard(mesh, **options):
    net = Net()
    for block in net.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(net, mesh=mesh, **options)


def train_fully_sharded(rank, size):
    mesh = init_device_mesh("cpu", (size,))
    results = {}
    bfloat16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for name, options in {"plain": {}, "kept": {"reshard_after_forward": False}, "bfloat16": {"mp_policy": bfloat16},
                          "float16": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.float16)}}.items():
        net = shard(mesh, **options)
        train(net, rank, clip=1.0 if name == "plain" else None)
        results[name] = whole(net)
    net = shard(mesh)
    for module in (net, *net.blocks):
        module.set_allocate_memory_from_process_group_for_comm(True)  # no effect over gloo
    train(net, rank)
    results["memory of the backend"] = whole(net)
    net = shard(mesh)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step, x in enumerate(batches(rank, 4)):
        net.set_requires_gradient_sync(step % 2 == 1)
        net(x).square().mean().backward()
        if step % 2 == 1:
            optimizer.step()
            optimizer.zero_grad()
    results["accumulated"] = whole(net)
    return results


def test_fsdp2(equals_gloo):
    equals_gloo(train_fully_sharded, 2)


def train_with_a_divide_factor(rank, size):
    net = shard(init_device_mesh("cpu", (size,)))
    for module in (*net.blocks, net):
        module.set_gradient_divide_factor(4.0)
    for x in batches(rank, 1):
        net(x).square().mean().backward()
    return {name: parameter.grad.full_tensor() for name, parameter in net.named_parameters()}


def test_fsdp2_with_a_divide_factor(on_ranks):
    """A premultiplied sum, which gloo does not have."""
    single = Net()
    for rank in range(2):
        (single(batches(rank, 1)[0]).square().mean() / 4).backward()
    ours = on_ranks(train_with_a_divide_factor, 2)
    for name, parameter in single.named_parameters():
        torch.testing.assert_close(ours[0][name], parameter.grad, msg=name)


def train_fsdp1(rank, size):
    results = {}
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP):
        net = FullyShardedDataParallel(Net(), sharding_strategy=strategy, device_id=torch.device("cpu"), use_orig_params=True)
        train(net, rank)
        with FullyShardedDataParallel.summon_full_params(net):
            results[str(strategy)] = [parameter.detach().clone() for parameter in net.parameters()]
    return results


def test_fsdp1(equals_gloo):
    equals_gloo(train_fsdp1, 2)


def train_hybrid(rank, size):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    net = shard(mesh)
    train(net, rank)
    return whole(net)


def test_hybrid_sharding_on_four(equals_gloo):
    equals_gloo(train_hybrid, 4)


PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}
SEQUENCE_PLAN = {"norm": SequenceParallel(), "up": ColwiseParallel(input_layouts=Shard(1)),
                 "down": RowwiseParallel(output_layouts=Shard(1))}


def parallelize(mesh, plan):
    net = Net()
    for block in net.blocks:
        parallelize_module(block, mesh, plan)
    return net


def train_tensor_parallel(rank, size):
    mesh = init_device_mesh("cpu", (size,))
    results = {}
    net = parallelize(mesh, PLAN)
    train(net, 0)
    results["columns and rows"] = whole(net)
    net = Net()
    enter = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=True)
    parallelize_module(net.blocks[0], mesh, {"": enter, **SEQUENCE_PLAN})
    parallelize_module(net.blocks[1], mesh, SEQUENCE_PLAN)
    parallelize_module(net, mesh, {"last": ColwiseParallel(input_layouts=Shard(1), use_local_output=False)})
    target = torch.arange(24) % 5
    with loss_parallel():
        loss = torch.nn.functional.cross_entropy(net(batches(0)[0]).flatten(0, 1), target)
        loss.backward()
    results["loss"] = loss.full_tensor() if isinstance(loss, DTensor) else loss
    results["gradients"] = {n: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for n, p in net.named_parameters()}
    return results


def test_tensor_parallel(equals_gloo):
    ours = equals_gloo(train_tensor_parallel, 2)
    alone = Net()
    train(alone, 0)
    for name, tensor in alone.state_dict().items():
        torch.testing.assert_close(ours[0]["columns and rows"][name], tensor, msg=name)


def train_in_two_dimensions(rank, size):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    net = parallelize(mesh["tp"], PLAN)
    for block in net.blocks:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(net, mesh=mesh["dp"])
    train(net, mesh.get_local_rank("dp"))
    flat = mesh["dp", "tp"]._flatten("all")
    total = torch.tensor([float(rank)])
    dist.all_reduce(total, group=flat.get_group())
    return {"total": total, "own group": torch.tensor(dist.get_process_group_ranks(mesh.get_group("tp"))), **whole(net)}


def test_two_dimensions_on_four(equals_gloo):
    for rank, results in enumerate(equals_gloo(train_in_two_dimensions, 4)):
        assert results["total"].item() == 6 and results["own group"].tolist() == [rank // 2 * 2, rank // 2 * 2 + 1]


def redistribute(rank, size):
    mesh = init_device_mesh("cpu", (size,))
    results = {}
    for shape in ((4, 6), (5, 3), (1, 7)):
        for dtype in (torch.float32, torch.int64, torch.bfloat16):
            start = torch.arange(shape[0] * shape[1]).reshape(shape).to(dtype)
            sharded = distribute_tensor(start, mesh, [Shard(0)])
            other = sharded.redistribute(mesh, [Shard(1)])
            partial = DTensor.from_local(start * (rank + 1), mesh, [Partial()])
            results[shape, dtype] = [sharded.full_tensor(), other.to_local(), other.redistribute(mesh, [Replicate()]).to_local(),
                                     partial.redistribute(mesh, [Shard(0)]).to_local(), partial.full_tensor(),
                                     (sharded @ other.redistribute(mesh, [Replicate()]).t()).full_tensor(),
                                     DTensor.from_local(start + rank, mesh, [Partial("max")]).full_tensor()]
            assert torch.equal(results[shape, dtype][0], start) and torch.equal(results[shape, dtype][2], start)
    return results


def test_dtensor(equals_gloo):
    equals_gloo(redistribute, 2)


def call_functional_collectives(rank, size):
    group = dist.group.WORLD
    x = torch.arange(8.0).reshape(4, 2) * (rank + 1)
    results = [functional.all_reduce(x, "sum", group), functional.all_gather_tensor(x, 1, group),
               functional.reduce_scatter_tensor(x, "sum", 0, group), functional.broadcast(x, 1, group),
               functional.all_to_all_single(x, [1, 3] if rank == 0 else [3, 1], [1, 3] if rank == 0 else [3, 1], group),
               *functional.all_reduce_coalesced([x, x + 1], "max", group),
               *functional.all_gather_into_tensor_coalesced([x, x + 1], group)]
    results = [functional.wait_tensor(tensor) for tensor in results]
    y = x.clone().requires_grad_()
    import torch.distributed.nn.functional as differentiable

    gathered = torch.cat(differentiable.all_gather(y * 2))
    (differentiable.all_reduce(y * y).sum() + gathered.square().sum()).backward()
    return [*results, y.grad]


def test_functional_collectives(equals_gloo):
    equals_gloo(call_functional_collectives, 2)


def train_pipelines(rank, size):
    results = []
    for schedule in (ScheduleGPipe, Schedule1F1B):
        net = Net(blocks=2)
        part = torch.nn.Sequential(net.blocks[0]) if rank == 0 else torch.nn.Sequential(net.blocks[1], net.last)
        stage = PipelineStage(part, rank, size, torch.device("cpu"))
        pipeline = schedule(stage, n_microbatches=4, loss_fn=torch.nn.functional.mse_loss)
        losses = []
        if rank == 0:
            pipeline.step(batches(0)[0])
        else:
            pipeline.step(target=torch.ones(4, 6, 5), losses=losses)
        results.append([*losses, *(parameter.grad for parameter in part.parameters())])
    return results


def test_pipelines(equals_gloo):
    equals_gloo(train_pipelines, 2)


def save_and_load(rank, size, path, background):
    mesh = init_device_mesh("cpu", (size,))

    def state_of(net, optimizer):
        model, state = get_state_dict(net, optimizer)
        return {"model": model, "optimizer": state, "rank": torch.tensor(rank)}

    net = shard(mesh)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    train(net, rank, optimizer)
    state = state_of(net, optimizer)
    dcp.async_save(state, checkpoint_id=path).result() if background else dcp.save(state, checkpoint_id=path)
    saved = whole(net)
    train(net, rank + 10, optimizer)
    expected = whole(net)
    net = shard(mesh)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.5)
    state = state_of(net, optimizer)
    dcp.load(state, checkpoint_id=path)
    set_state_dict(net, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    train(net, rank + 10, optimizer)
    resumed = whole(net)
    assert not expected or all(torch.equal(expected[name], resumed[name]) for name in expected)
    return saved, resumed


@pytest.mark.parametrize("background", [False, True])
def test_distributed_checkpoint(on_ranks, tmp_path, background):
    ours, reference = (on_ranks(save_and_load, 2, tmp_path / backend, background, backend=backend) for backend in ("hvd", "gloo"))
    torch.testing.assert_close(ours, reference, rtol=0, atol=0)
    loaded = {"model": Net().state_dict()}  # by one process, without a group
    dcp.load(loaded, checkpoint_id=tmp_path / "hvd", no_dist=True)
    torch.testing.assert_close(loaded["model"], ours[0][0], rtol=0, atol=0)
