"""A model that ranks train together by two calls of hvd, without a wrapper: scale_loss() and all_reduce().

hvdrun -np 2 python horovod_sample.py            the calls of horovod.torch
hvdrun -np 2 python horovod_sample.py --dist     the same training by torch.distributed
"""

import argparse

import torch

STEPS, BATCH = 100, 32


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    numbers = torch.Generator().manual_seed(1000 * rank + step)
    x = torch.rand(BATCH, 4, generator=numbers)
    return x, x.sum(1, keepdim=True).sin()


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))


def train_with_hvd() -> None:
    import hvd.torch as hvd

    hvd.init()
    model = make_model()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for step in range(STEPS):
        x, y = batch(hvd.rank(), step)
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        hvd.scale_loss(loss).backward()  # the sum of the gradients is then that of the mean loss
        hvd.all_reduce(model.parameters())
        optimizer.step()
    mean = hvd.allreduce(loss.detach(), name="loss")
    if hvd.rank() == 0:
        print(f"{hvd.size()} ranks, step {STEPS}: loss {mean:.6f}")
    hvd.shutdown()


def train_with_torch_distributed() -> None:
    import torch.distributed as dist

    dist.init_process_group("hvd")
    rank, size = dist.get_rank(), dist.get_world_size()
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for step in range(STEPS):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        (loss / size).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
    mean = loss.detach()
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    if rank == 0:
        print(f"{size} ranks, step {STEPS}: loss {mean:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dist", action="store_true", help="use torch.distributed")
    train_with_torch_distributed() if parser.parse_args().dist else train_with_hvd()
