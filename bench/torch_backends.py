#!/usr/bin/env python3
"""Compares the backends "gloo" and "hvd" of torch.distributed in the same processes, with interleaved repetitions.

    torchrun --standalone --nproc-per-node 2 bench/torch_backends.py --shapes shapes.json

`hvd-bench shapes -o shapes.json` writes the shapes. Rows: all_reduce by size; the time that DistributedDataParallel adds to the step
of one rank alone; a step of a small transformer with FSDP2; messages between ranks 0 and 1. A time is that of the slowest rank, and a ratio
is the median of the ratios within a repetition. With mpi4py, `mpirun -np 2 python bench/torch_backends.py` has MPI's calls as a third
contender of all_reduce and of messages.
"""

import argparse
import json
import os
import statistics
import warnings

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import hvd.torch

import gloo_peers
import rank_timing

warnings.filterwarnings("ignore", category=FutureWarning)
BACKENDS = ("gloo", "hvd")


def report(row, samples, base=None):
    """Prints the medians, and hvd's ratio to each other contender, above `base` if given."""
    def above_base(name):
        return [time - alone for time, alone in zip(samples[name], samples[base])] if base else samples[name]

    values = {name: above_base(name) for name in samples if name != base}
    result = {"row": row, "repetitions": len(samples["hvd"]), "us": {name: statistics.median(times) * 1e6 for name, times in samples.items()}}
    result["ratio"] = {name: statistics.median(ours / theirs for ours, theirs in zip(values["hvd"], times))
                       for name, times in values.items() if name != "hvd"}
    if dist.get_rank() == 0:
        times = ", ".join(f"{name} {time:.1f}" for name, time in result["us"].items())
        ratios = ", ".join(f"{ratio:.2f} of {name}" for name, ratio in result["ratio"].items())
        print(f"{row}: us {times}; hvd {'added ' if base else ''}{ratios}; {result['repetitions']} repetitions", flush=True)
    return result


def measure_all_reduce(groups, mpi, bytes_, loop, settings):
    data = {name: torch.zeros(max(1, bytes_ // 4)) for name in BACKENDS}

    def reduce_over(name):
        return lambda: dist.all_reduce(data[name], group=groups[name])

    runs = {name: reduce_over(name) for name in BACKENDS}
    if mpi:
        from mpi4py import MPI
        data["mpi"] = torch.zeros_like(data["hvd"])
        array = data["mpi"].numpy()
        runs["mpi"] = lambda: mpi.Allreduce(MPI.IN_PLACE, array)
    for name, run in runs.items():
        data[name].fill_(dist.get_rank() + 1)
        run()
        assert torch.all(data[name] == settings.ranks * (settings.ranks + 1) / 2), f"{name}: all_reduce of {bytes_} bytes is wrong"
        data[name].zero_()
    return report(f"all_reduce, {bytes_} bytes, {'loop' if loop > 1 else 'single calls'}", rank_timing.interleave(runs, settings, loop))


def measure_ddp(groups, name, shapes, settings, hooks):
    """`hooks`: whether communication hooks divide each bucket as a whole. Without a hook DDP divides each gradient by itself."""
    def wrap(backend):
        def wrap_network(network):
            model = DistributedDataParallel(network, process_group=groups[backend], gradient_as_bucket_view=True)
            if hooks:
                model.register_comm_hook(groups[backend], hvd.torch.ddp_hook if backend == "hvd" else allreduce_hook)
            return model
        return wrap_network

    values = [torch.rand(shape) for shape in shapes]
    contenders = {"alone": gloo_peers.Contender(gloo_peers.Network(values, dist.get_rank() + 1.0), lambda network: network)}
    for backend in BACKENDS:
        contenders[backend] = gloo_peers.Contender(gloo_peers.Network(values, dist.get_rank() + 1.0), wrap(backend))
    for backend in BACKENDS:
        contenders[backend].run()
        assert all(torch.all(tensor.grad == (settings.ranks + 1) / 2) for tensor in contenders[backend].tensors), f"{backend} is wrong"
    return report(f"DDP, {name}{', hooks' if hooks else ''}", rank_timing.interleave({key: contender.run for key, contender in contenders.items()}, settings), base="alone")


def measure_fsdp(groups, settings, backends_memory):
    """`backends_memory`: whether FSDP2 makes the tensors that it sends in the memory that the backend offers."""
    runs = {}
    for backend in BACKENDS:
        torch.manual_seed(1)
        layer = torch.nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
        model = torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        mesh = DeviceMesh.from_group(groups[backend], "cpu")
        for block in model.layers:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        for module in (model, *model.layers):
            module.set_allocate_memory_from_process_group_for_comm(backends_memory)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        batch = torch.rand(2, 16, 256)

        def run(model=model, optimizer=optimizer, batch=batch):
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
        runs[backend] = run
    memory = ", memory of the backend" if backends_memory else ""
    return report(f"FSDP2, four transformer layers, 3.2 million elements{memory}", rank_timing.interleave(runs, settings))


def measure_messages(groups, mpi, bytes_, loop, settings):
    data = torch.ones(max(1, bytes_ // 4))
    rank, other = dist.get_rank(), 1 - dist.get_rank()
    array = data.numpy()

    def turn(send, receive):
        return lambda: (send(), receive()) if rank == 0 else (receive(), send())

    runs = {name: turn(lambda group=groups[name]: dist.send(data, other, group=group), lambda group=groups[name]: dist.recv(data, other, group=group))
            for name in BACKENDS}
    if mpi:
        runs["mpi"] = turn(lambda: mpi.Send(array, other), lambda: mpi.Recv(array, other))
    return report(f"message there and back, {bytes_} bytes", rank_timing.interleave(runs, settings, loop))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", help="what `hvd-bench shapes` wrote; without it, no rows of DDP")
    parser.add_argument("--sets", default="resnet50,small1000,gpt2", help="parameter sets of DDP")
    parser.add_argument("--budget", type=float, default=2.0, help="seconds per row, unless --least takes longer")
    parser.add_argument("--least", type=int, default=5)
    parser.add_argument("--most", type=int, default=500)
    parser.add_argument("--loop", type=int, default=500, help="calls of a loop")
    parser.add_argument("--largest", type=int, default=64 << 20, help="bytes of the largest all_reduce and message")
    parser.add_argument("--retain-heap", action="store_true", help="keep freed memory, as hvd-bench's option does")
    parser.add_argument("--json", help="also write the rows to this file")
    settings = parser.parse_args()
    if settings.retain_heap:
        rank_timing.retain_heap()
    torch.set_num_threads(1)
    mpi = None
    if "OMPI_COMM_WORLD_RANK" in os.environ:
        from mpi4py import MPI
        mpi = MPI.COMM_WORLD
        os.environ.update(RANK=str(mpi.rank), WORLD_SIZE=str(mpi.size), MASTER_ADDR="127.0.0.1", MASTER_PORT=mpi.bcast("29575"))
    dist.init_process_group("gloo")
    groups = {"gloo": dist.group.WORLD, "hvd": dist.new_group(backend="hvd")}
    settings.ranks, settings.meeting = dist.get_world_size(), rank_timing.Meeting()
    rows = [measure_all_reduce(groups, mpi, size, loop, settings)
            for size, loop in ((8, settings.loop), (1 << 10, settings.loop), (1 << 10, 1), (1 << 20, 1), (settings.largest, 1))]
    if settings.ranks == 2:
        rows += [measure_messages(groups, mpi, size, loop, settings) for size, loop in ((8, settings.loop), (settings.largest, 1))]
    rows += [measure_fsdp(groups, settings, backends_memory) for backends_memory in (False, True)]
    if settings.shapes:
        with open(settings.shapes, encoding="utf-8") as file:
            shapes = json.load(file)
        rows += [measure_ddp(groups, name, shapes[name], settings, hooks) for name in settings.sets.split(",") for hooks in (False, True)]
    if settings.json and dist.get_rank() == 0:
        with open(settings.json, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=2)
    dist.barrier()
    os._exit(0)  # see gloo_peers.run_rank


if __name__ == "__main__":
    main()
