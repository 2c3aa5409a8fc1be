#!/usr/bin/env python3
"""Measures hvd.torch: a small allreduce, and the time that its DistributedOptimizer adds to a step, beside DDP on gloo in the same processes.

    torchrun --standalone --nproc-per-node 2 bench/horovod_reach.py --shapes shapes.json

`hvd-bench shapes -o shapes.json` writes the shapes. Repetitions are interleaved; a time is that of the slowest rank, and a ratio is the
median of the ratios within a repetition. On one rank the wrapped optimizer is compared with the bare one. With `--cpp FILE` it is compared,
without gloo, with the time that the C++ adapter adds to the same steps; measure it first: `hvd-bench step --contenders alone,hvd --json FILE`.
"""

import argparse
import json
import statistics
import warnings

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gloo_peers
import hvd.torch as hvd
import rank_timing

warnings.filterwarnings("ignore", category=FutureWarning)


class Wrapped(gloo_peers.Contender):
    """A step with hvd.torch.DistributedOptimizer."""

    def __init__(self, network):
        super().__init__(network, lambda own: own)
        self.optimizer = hvd.DistributedOptimizer(self.optimizer, named_parameters=network.named_parameters())


def median(times):
    return statistics.median(times) * 1e6


def print_row(row, result, text):
    if dist.get_rank() == 0:
        print(f"{row}: {text}", flush=True)
    return {"row": row, **result}


def measure_small(settings):
    """Named allreduce_ of 8 bytes in a loop, and the same call of torch.distributed over gloo."""
    ours, theirs = torch.zeros(2), torch.zeros(2)
    runs = {"hvd": lambda: hvd.allreduce_(ours, name="small", op=hvd.Sum), "gloo": lambda: dist.all_reduce(theirs)}
    ours.fill_(dist.get_rank() + 1)
    runs["hvd"]()
    assert torch.all(ours == settings.ranks * (settings.ranks + 1) / 2), "allreduce_ is wrong"
    ours.zero_()
    samples = rank_timing.interleave(runs, settings, loop=1000)
    result = {name: median(times) for name, times in samples.items()}
    return print_row("allreduce_, 8 bytes, loop of 1000", {"us": result}, ", ".join(f"{name} {us:.2f} us" for name, us in result.items()))


def contenders_of(shapes, settings):
    values, factor = [torch.rand(shape) for shape in shapes], dist.get_rank() + 1.0
    contenders = {"alone": gloo_peers.Contender(gloo_peers.Network(values, factor), lambda network: network),
                  "hvd": Wrapped(gloo_peers.Network(values, factor))}
    if settings.ranks > 1 and not settings.cpp:  # hvd-bench has measured without a third contender too
        contenders["gloo"] = gloo_peers.Contender(gloo_peers.Network(values, factor),
                                                  lambda network: DistributedDataParallel(network, gradient_as_bucket_view=True))
    for name in contenders:  # in the same order on every rank
        if name == "alone":
            continue
        contenders[name].run()
        assert all(torch.all(tensor.grad == (settings.ranks + 1) / 2) for tensor in contenders[name].tensors), f"{name} is wrong"
    return contenders


def measure_step(name, shapes, settings):
    contenders = contenders_of(shapes, settings)
    # Each contender steps once before its time is taken, since the others have disturbed its memory.
    samples = rank_timing.interleave({key: contender.run for key, contender in contenders.items()}, settings,
                                     prepare=lambda key: contenders[key].run())
    result = {"us": {key: median(times) for key, times in samples.items()}}
    if settings.ranks == 1:
        result["ratio"] = statistics.median(ours / bare for ours, bare in zip(samples["hvd"], samples["alone"]))
        return print_row(f"one rank, {name}", result, f"wrapped {result['ratio']:.3f} of the bare optimizer")
    result["added_us"] = {key: median([time - bare for time, bare in zip(samples[key], samples["alone"])]) for key in samples if key != "alone"}
    other, title = ("cpp", "the C++ adapter") if settings.cpp else ("gloo", "DDP on gloo")
    if settings.cpp:
        result["added_us"]["cpp"] = settings.added_by_cpp[name]
    result["ratio"] = result["added_us"]["hvd"] / result["added_us"][other]
    text = f"added {result['added_us']['hvd']:.0f} us, {title} {result['added_us'][other]:.0f} us: {result['ratio']:.3f}"
    return print_row(f"DistributedOptimizer, {name}", result, text)


def added_by_cpp(path, ranks):
    """The times that hvd-bench has measured, by set of shapes, in microseconds."""
    if not path:
        return {}
    with open(path, encoding="utf-8") as file:
        report = json.load(file)
    assert report["command"] == "step" and report["environment"]["ranks"] == ranks, f"{path} is not of `hvd-bench step` with {ranks} ranks"
    return {row["set"]: row["contenders"]["hvd"]["added_p50_us"] for row in report["rows"] if not row["compute"]}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", required=True)
    parser.add_argument("--sets", default="resnet50,gpt2,small1000", help="the sets of shapes, with commas")
    parser.add_argument("--budget", type=float, default=10, help="seconds for each row")
    parser.add_argument("--least", type=int, default=11, help="repetitions at least")
    parser.add_argument("--most", type=int, default=1000)
    parser.add_argument("--cpp", help="a file that hvd-bench step --json has written, to compare with instead of gloo")
    parser.add_argument("--json", help="also write the rows to this file")
    settings = parser.parse_args()
    with open(settings.shapes, encoding="utf-8") as file:
        models = json.load(file)
    dist.init_process_group("gloo")
    settings.ranks = dist.get_world_size()
    settings.added_by_cpp = added_by_cpp(settings.cpp, settings.ranks)
    dist.new_group(backend="hvd")  # joins the job, which hvd.torch uses
    hvd.init()
    settings.meeting = rank_timing.Meeting()
    rank_timing.retain_heap()
    rows = [measure_small(settings)] if settings.ranks > 1 else []
    rows += [measure_step(name, models[name], settings) for name in settings.sets.split(",")]
    if settings.json and dist.get_rank() == 0:
        with open(settings.json, "w", encoding="utf-8") as file:
            json.dump({"ranks": settings.ranks, "rows": rows}, file, indent=1)
    dist.barrier()
    hvd.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
