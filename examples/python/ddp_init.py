"""DataParallel in one process, and DistributedDataParallel over hvd with each way in which ranks find each other.

python ddp_init.py data_parallel
hvdrun -np 2 python ddp_init.py env        also: torchrun --nproc-per-node 2 ddp_init.py env
python ddp_init.py tcp                     starts two ranks itself; also: file, store
"""

import argparse
import datetime
import os
import socket
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.nn.parallel import DataParallel, DistributedDataParallel

RANKS = 2


def train(model: torch.nn.Module, rank: int, size: int) -> float:
    """Each rank has its part of every batch. Returns the last loss of this rank."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(20):
        whole = torch.rand(16, 4, generator=torch.Generator().manual_seed(step))
        x = whole.chunk(size)[rank]
        optimizer.zero_grad()
        loss = (model(x) - x.sum(1, keepdim=True)).pow(2).mean()
        loss.backward()
        optimizer.step()
    return loss.item()


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Linear(4, 1)


def train_group() -> None:
    """Within the default group."""
    rank, size = dist.get_rank(), dist.get_world_size()
    loss = torch.tensor(train(DistributedDataParallel(make_model()), rank, size))
    dist.all_reduce(loss, op=dist.ReduceOp.AVG)
    if rank == 0:
        print(f"{size} ranks: loss {loss:.5f}")
    dist.destroy_process_group()


def run_rank(rank: int, method: str, place: str) -> None:
    if method == "store":
        host, port = place.rsplit(":", 1)
        store = dist.TCPStore(host, int(port), RANKS, is_master=rank == 0, timeout=datetime.timedelta(seconds=60))
        dist.init_process_group("hvd", store=store, rank=rank, world_size=RANKS)
    else:
        dist.init_process_group("hvd", init_method=f"{method}://{place}", rank=rank, world_size=RANKS)
    train_group()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("method", choices=("data_parallel", "env", "tcp", "file", "store"))
    method = parser.parse_args().method
    if method == "data_parallel":  # splits batches among the GPUs of this process; without one it calls the model
        print(f"1 process: loss {train(DataParallel(make_model()), 0, 1):.5f}")
    elif method == "env":
        dist.init_process_group("hvd")
        train_group()
    else:
        with tempfile.TemporaryDirectory() as folder:
            place = os.path.join(folder, "store") if method == "file" else f"localhost:{free_port()}"
            torch.multiprocessing.spawn(run_rank, (method, place), nprocs=RANKS)


if __name__ == "__main__":
    main()
