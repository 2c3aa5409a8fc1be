#!/usr/bin/env python3
"""Measures PyTorch on gloo for hvd-bench: all_reduce by size, and a step with DistributedDataParallel.

The LibTorch of the wheel has no headers of gloo, so this peer is measured through Python, in processes of its own, right before
hvd-bench: what it writes is shown with `hvd-bench collectives --gloo FILE` and `hvd-bench step --gloo FILE`. with_gloo.sh does both.
It needs the Python environment that LibTorch was installed into.
"""

import argparse
import json
import os
import tempfile
import warnings

warnings.filterwarnings("ignore", message=".*[Nn]um[Pp]y.*")

import torch
import torch.distributed as distributed
import torch.multiprocessing
from torch.nn.parallel import DistributedDataParallel

import rank_timing

LEARNING_RATE = 1e-6


class Network(torch.nn.Module):
    """A network whose backward writes one gradient after another into new memory, the last parameter's first, as in model.cpp. Uses only
    PyTorch's own operations, since a function in Python would cost more than a small gradient."""

    def __init__(self, values, value):
        super().__init__()
        # They share memory, as hvd-bench's contenders do.
        self.registered = torch.nn.ParameterList([torch.nn.Parameter(tensor.detach()) for tensor in values])
        self.tensors = list(self.registered)  # much faster to iterate over
        self.value = value

    def forward(self):
        activation = torch.zeros(())
        for parameter in self.tensors:
            activation = torch.add(activation, parameter.sum(), alpha=self.value)
        return activation


class Contender:
    def __init__(self, network, wrap):
        self.tensors = network.tensors
        self.model = wrap(network)
        self.optimizer = torch.optim.SGD(self.tensors, lr=LEARNING_RATE)

    def run(self):
        self.optimizer.zero_grad()
        self.model().backward()
        self.optimizer.step()


def percentile(samples, share):
    """As in statistics.cpp: the nearest rank."""
    return sorted(samples)[max(1, -int(-(share * len(samples) - 1e-9) // 1)) - 1]


def microseconds(samples):
    return {name: percentile(samples, share) * 1e6 for name, share in (("p50_us", 0.5), ("p95_us", 0.95), ("p99_us", 0.99))}


def measure_all_reduce(bytes_, rank, settings):
    data = torch.empty(max(1, bytes_ // 4))

    def run():
        distributed.all_reduce(data)

    data.fill_(rank + 1)
    run()
    if not torch.all(data == settings.ranks * (settings.ranks + 1) / 2):
        raise RuntimeError(f"gloo's all_reduce of {bytes_} bytes is wrong")
    samples = rank_timing.interleave({"gloo": run}, settings, prepare=lambda _: data.fill_(rank + 1))["gloo"]
    entry = microseconds(samples)
    entry["repetitions"] = len(samples)
    entry["algbw_gb_per_s"] = data.nbytes / entry["p50_us"] / 1e3
    return entry


def measure_step(shapes, rank, settings):
    values = [torch.rand(shape) for shape in shapes]
    wrap = {
        "python-alone": lambda network: network,
        "ddp-gloo": lambda network: DistributedDataParallel(network, gradient_as_bucket_view=True),
        "ddp-gloo-copy": lambda network: DistributedDataParallel(network, gradient_as_bucket_view=False),
    }
    contenders = {name: Contender(Network(values, rank + 1.0), wrapper) for name, wrapper in wrap.items()}
    for name, contender in contenders.items():
        contender.run()
        expected = rank + 1 if name == "python-alone" else (settings.ranks + 1) / 2
        if not all(torch.all(tensor.grad == expected) for tensor in contender.tensors):
            raise RuntimeError(f"the gradients of {name} are wrong")

    # Each contender steps once before its time is taken, since the others have disturbed its memory.
    samples = rank_timing.interleave({name: contender.run for name, contender in contenders.items()}, settings,
                                     prepare=lambda name: contenders[name].run())
    alone = samples["python-alone"]
    result = {name: microseconds(times) for name, times in samples.items()}
    for name, times in samples.items():
        if name != "python-alone":
            added = microseconds([ours - theirs for ours, theirs in zip(times, alone)])
            result[name].update({"added_p50_us": added["p50_us"], "added_p95_us": added["p95_us"],
                                 "added_percent": added["p50_us"] / result["python-alone"]["p50_us"] * 100,
                                 "repetitions": len(times)})
    return result


def run_rank(rank, settings, meeting_point):
    if settings.retain_heap:
        rank_timing.retain_heap()
    torch.set_num_threads(max(1, os.cpu_count() // settings.ranks))
    distributed.init_process_group("gloo", init_method=f"file://{meeting_point}", rank=rank, world_size=settings.ranks)
    settings.meeting = rank_timing.Meeting()
    result = {"torch": torch.__version__, "ranks": settings.ranks, "retain_heap": settings.retain_heap, "allreduce": {}, "step": {}}
    size = settings.min
    while size <= settings.max:
        result["allreduce"][str(size)] = measure_all_reduce(size, rank, settings)
        size *= settings.factor
    with open(settings.shapes, encoding="utf-8") as file:
        shapes = json.load(file)
    for name in filter(None, settings.sets.split(",")):
        result["step"][name] = measure_step(shapes[name], rank, settings)
    if rank == 0:
        with open(settings.output, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=2)
    distributed.barrier()
    distributed.destroy_process_group()
    # Skips the end of the interpreter. After it, a thread of gloo that still holds a tensor would call the interpreter, and the process
    # would abort (pytorch#179291). All results have been written.
    os._exit(0)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", required=True, help="what `hvd-bench shapes` wrote")
    parser.add_argument("-o", "--output", default="gloo.json")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--min", type=int, default=4, help="smallest all_reduce, bytes")
    parser.add_argument("--max", type=int, default=256 << 20)
    parser.add_argument("--factor", type=int, default=4)
    parser.add_argument("--sets", default="resnet50,gpt2,small1000,mnist", help="parameter sets; empty: no steps")
    parser.add_argument("--budget", type=float, default=1.0, help="seconds per size and parameter set, unless --least takes longer")
    parser.add_argument("--least", type=int, default=20)
    parser.add_argument("--most", type=int, default=2000)
    parser.add_argument("--retain-heap", action="store_true")
    settings = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run_rank, (settings, os.path.join(folder, "meeting_point")), nprocs=settings.ranks)


if __name__ == "__main__":
    main()
