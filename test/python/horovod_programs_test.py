"""The distribution horovod, hvd.run() and horovodrun: programs that import horovod.torch."""

import os
import pathlib
import subprocess
import sys
import time

import pytest

import hvd

SHIM = pathlib.Path(__file__).parents[2] / "frameworks/python/horovod"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1",
               "PYTHONPATH": os.pathsep.join([str(SHIM), os.environ.get("PYTHONPATH", "")])}


def python(*words, **options):
    return subprocess.run([sys.executable, *map(str, words)], capture_output=True, text=True, timeout=60, env=ENVIRONMENT, **options)


def test_the_modules_are_the_same_objects():
    done = python("-c", """
import horovod.torch as hvd, sys
import hvd.torch as own
assert hvd is own
import horovod, horovod.torch
from horovod.torch import mpi_ops, elastic
from horovod.torch.compression import Compression
from horovod.torch.mpi_ops import allreduce
import horovod.torch.functions
assert horovod.torch is own and mpi_ops is own.mpi_ops and allreduce is own.allreduce and Compression is own.Compression
from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from horovod.common.process_sets import ProcessSet
from horovod.common.elastic import State, ObjectState, run_fn
from horovod.common.util import mpi_built, env, split_list, num_rank_is_power_2
assert HorovodInternalError is own.HorovodInternalError and ProcessSet is own.ProcessSet
assert split_list([1, 2, 3, 4, 5], 2) == [[1, 2, 3], [4, 5]] and num_rank_is_power_2(8) and not num_rank_is_power_2(6)
assert horovod.run is __import__("hvd").run
""")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ("tensorflow", "keras", "mxnet", "spark", "ray"))
def test_other_frameworks_are_refused(name):
    done = python("-c", f"import horovod.{name}")
    assert done.returncode == 1 and f"ImportError: horovod.{name} is not provided" in done.stderr, done.stderr


PROGRAM = """
import os, sys
import torch
import horovod.torch as hvd

hvd.init()
assert (int(os.environ["HOROVOD_RANK"]), int(os.environ["HOROVOD_SIZE"])) == (hvd.rank(), hvd.size())
assert int(os.environ["HOROVOD_LOCAL_RANK"]) == hvd.local_rank()
torch.manual_seed(hvd.rank())
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * hvd.size(), momentum=0.9)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
for _ in range(3):
    optimizer.zero_grad()
    model(torch.rand(4, 2)).pow(2).mean().backward()
    optimizer.step()
digest = hvd.allgather(torch.cat([p.detach().flatten() for p in model.parameters()])[None], name="digest")
assert digest.shape[0] == 2 and torch.equal(digest[0], digest[1])
print("done", sys.argv[1:], os.environ.get("HVD_FUSION_THRESHOLD"))
"""


def test_horovodrun(tmp_path):
    program = tmp_path / "train me.py"
    program.write_text(PROGRAM)
    done = python("-m", "horovod.runner.launch", "-np", 2, "-H", "localhost:2", "--fusion-threshold-mb", 32, "--cycle-time-ms", 3,
                  "--no-stall-check", "--log-level", "WARNING", sys.executable, program, "--epochs", 1)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("done ['--epochs', '1'] 33554432") == 2, done.stdout


def test_horovodrun_passes_the_status_on():
    done = python("-m", "horovod.runner.launch", "-np", 2, sys.executable, "-c", "import os, sys; sys.exit(int(os.environ['RANK']) * 7)")
    assert done.returncode == 7, done.stderr


@pytest.mark.parametrize("words", (["--min-np", "1", "-np", "2", "true"], ["-np", "2"], ["true"], ["-np", "2", "--autotune", "true"]))
def test_horovodrun_refuses(words):
    done = python("-m", "horovod.runner.launch", *words)
    assert done.returncode == 2 and ("not supported" in done.stderr or "expected -np" in done.stderr), done.stderr


def add(a, b=0):
    import hvd.torch

    hvd.torch.init()
    return hvd.torch.allgather_object((hvd.torch.rank(), a + b))


def fail_on_one(rank):
    import hvd.torch

    hvd.torch.init()
    if hvd.torch.rank() == rank:
        raise KeyError("the data set is empty")
    hvd.torch.barrier()
    time.sleep(5)


RUN = """
import sys
sys.path.insert(0, {folder!r})
import horovod_programs_test as functions
import hvd
if __name__ == "__main__":
    print(hvd.run(functions.add, (3,), {{"b": 4}}, num_proc=2))
    try:
        hvd.run(functions.fail_on_one, (1,), num_proc=2)
    except KeyError as error:
        print(error.args, "fail_on_one" in str(error.__cause__))
"""


def test_run(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(RUN.format(folder=str(pathlib.Path(__file__).parent)))
    done = python(program)
    lines = done.stdout.splitlines()
    assert "[[(0, 7), (1, 7)], [(0, 7), (1, 7)]]" in lines, done.stdout + done.stderr
    assert "('the data set is empty',) True" in lines, done.stdout + done.stderr


MAIN = """
import hvd

def own(value):
    import hvd.torch
    hvd.torch.init()
    return value * 10 + hvd.torch.rank()

if __name__ == "__main__":
    print(hvd.run(own, (4,), np=2))
"""


def test_run_of_a_function_of_the_program(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(MAIN)
    done = python(program)
    assert "[40, 41]" in done.stdout, done.stdout + done.stderr


def test_run_refuses():
    with pytest.raises(ValueError, match="num_proc"):
        hvd.run(add, num_proc=0)
    with pytest.raises(ValueError, match="min_num_proc"):
        hvd.run(add, num_proc=2, min_num_proc=1)


ELASTIC = """
import torch
import horovod.torch as hvd

hvd.init()
torch.manual_seed(hvd.rank())
model = torch.nn.Linear(2, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
sampler = hvd.elastic.ElasticSampler(range(10), shuffle=False)
state = hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, batch=hvd.rank(), epoch=0)

@hvd.elastic.run
def train(state):
    assert state.batch == 0
    same = hvd.allgather(model.weight.detach())
    assert all(torch.equal(row, same[0]) for row in same)
    before = model.weight.detach().clone()
    state.epoch = 5
    state.commit()
    with torch.no_grad():
        model.weight += 1
    state.epoch = 6
    state.restore()
    assert state.epoch == 5 and torch.equal(model.weight, before)
    assert list(sampler) == list(range(hvd.rank(), 10, 2))
    sampler.record_batch(0, 2)
    assert sampler.processed_num == 2
    state.sync()
    assert sampler.processed_num == 4
    assert list(sampler) == [4 + hvd.rank(), 6 + hvd.rank(), 8 + hvd.rank()], list(sampler)
    return "trained"

assert train(state) == "trained"
"""


def test_elastic_state(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(ELASTIC)
    done = python("-m", "horovod.runner.launch", "-np", 2, sys.executable, program)
    assert done.returncode == 0, done.stderr
