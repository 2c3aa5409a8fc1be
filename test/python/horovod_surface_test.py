"""The names, signatures and modules of hvd.torch, and what its processes do at their end."""

import inspect
import json
import os
import pickle
import subprocess
import sys

import pytest

import hvd.errors
import hvd.torch

# The signatures of horovod.torch 0.28.1: NAME=VALUE for a default, G for the set of all ranks.
REDUCTION = "average=None, name=None, op=None, prescale_factor=1.0, postscale_factor=1.0, process_set=G"
COMPRESSED = "average=None, name=None, compression=none, op=None, prescale_factor=1.0, postscale_factor=1.0, process_set=G"
SCATTER = "name=None, op=0, process_set=G, prescale_factor=1.0, postscale_factor=1.0"
COMPRESSED_SCATTER = "name=None, compression=none, op=0, process_set=G, prescale_factor=1.0, postscale_factor=1.0"
OPTIMIZER = ("named_parameters=None, compression=none, backward_passes_per_step=1, op=0, gradient_predivide_factor=1.0, "
             "num_groups=0, groups=None, sparse_as_dense=False, process_set=G")
SIGNATURES = {
    "init": "comm=None, process_sets=None", "shutdown": "", "start_timeline": "file_path, mark_cycles=False",
    "stop_timeline": "", "mpi_threads_supported": "", "mpi_enabled": "", "mpi_built": "", "gloo_enabled": "", "gloo_built": "",
    "nccl_built": "", "ddl_built": "", "ccl_built": "", "cuda_built": "", "rocm_built": "",
    "allreduce": f"tensor, {COMPRESSED}", "allreduce_async": f"tensor, {REDUCTION}", "allreduce_": f"tensor, {REDUCTION}",
    "allreduce_async_": f"tensor, {REDUCTION}", "grouped_allreduce": f"tensors, {COMPRESSED}",
    "grouped_allreduce_async": f"tensors, {REDUCTION}", "grouped_allreduce_": f"tensors, {REDUCTION}",
    "grouped_allreduce_async_": f"tensors, {REDUCTION}", "sparse_allreduce_async": "tensor, name, op, process_set=G",
    "allgather": "tensor, name=None, process_set=G", "allgather_async": "tensor, name=None, process_set=G",
    "grouped_allgather": "tensors, name=None, process_set=G", "grouped_allgather_async": "tensors, name=None, process_set=G",
    "broadcast": "tensor, root_rank, name=None, process_set=G", "broadcast_async": "tensor, root_rank, name=None, process_set=G",
    "broadcast_": "tensor, root_rank, name=None, process_set=G",
    "broadcast_async_": "tensor, root_rank, name=None, process_set=G",
    "alltoall": "tensor, splits=None, name=None, process_set=G",
    "alltoall_async": "tensor, splits=None, name=None, process_set=G",
    "reducescatter": f"tensor, {COMPRESSED_SCATTER}", "reducescatter_async": f"tensor, {SCATTER}",
    "grouped_reducescatter": f"tensors, {COMPRESSED_SCATTER}", "grouped_reducescatter_async": f"tensors, {SCATTER}",
    "poll": "handle", "synchronize": "handle", "join": "device=-1", "barrier": "process_set=G",
    "ProcessSet": "ranks_or_comm", "add_process_set": "process_set", "remove_process_set": "process_set",
    "broadcast_parameters": "params, root_rank", "broadcast_optimizer_state": "optimizer, root_rank, model=None",
    "broadcast_object": "obj, root_rank=0, name=None, process_set=G", "allgather_object": "obj, name=None",
    "SyncBatchNorm": "num_features, eps=1e-05, momentum=0.1, affine=True, track_running_stats=True",
}
WITHOUT_ARGUMENTS = ("is_initialized", "rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")
VALUES = ("Average", "Sum", "Adasum", "Min", "Max", "Product", "Compression", "global_process_set", "HorovodInternalError")


def written(function):
    def default(value):
        return {hvd.torch.global_process_set: "G", hvd.torch.Compression.none: "none"}.get(value, repr(value))

    parameters = inspect.signature(function).parameters.values()
    return ", ".join(p.name if p.default is p.empty else f"{p.name}={default(p.default)}" for p in parameters)


def test_signatures():
    assert {name: written(getattr(hvd.torch, name)) for name in SIGNATURES} == SIGNATURES
    assert all(hasattr(hvd.torch, name) for name in (*WITHOUT_ARGUMENTS, *VALUES))
    assert [getattr(hvd.torch, name) for name in VALUES[:6]] == list(range(6))
    wrapper = written(hvd.torch.DistributedOptimizer)
    assert wrapper.startswith(f"optimizer, {OPTIMIZER}, ")  # Horovod's, and keywords of hvd
    kinds = [parameter.kind for parameter in inspect.signature(hvd.torch.DistributedOptimizer).parameters.values()]
    assert kinds.count(inspect.Parameter.POSITIONAL_OR_KEYWORD) == 10
    assert set(SIGNATURES) | set(WITHOUT_ARGUMENTS) | set(VALUES) <= set(hvd.torch.__all__)


def test_submodules_have_horovods_names():
    from hvd.torch import compression, elastic, functions, mpi_ops, optimizer, sync_batch_norm

    assert optimizer.DistributedOptimizer is hvd.torch.DistributedOptimizer and hvd.torch.elastic is elastic
    assert sync_batch_norm.SyncBatchNorm is hvd.torch.SyncBatchNorm
    assert mpi_ops.allreduce is hvd.torch.allreduce
    assert functions.broadcast_object is hvd.torch.broadcast_object
    assert compression.Compression is hvd.torch.Compression
    assert mpi_ops._basics.rank is mpi_ops.rank


def test_the_older_names_stay():
    for name in ("ddp_hook", "flight_record", "monitored_barrier"):
        assert callable(getattr(hvd.torch, name))


def test_errors():
    errors = hvd.errors
    assert issubclass(errors.UsageError, ValueError) and issubclass(errors.UsageError, RuntimeError)
    assert issubclass(errors.NotInitializedError, errors.UsageError)
    assert issubclass(errors.HorovodInternalError, RuntimeError)
    for kind in (errors.MismatchError, errors.StalledError, errors.PeerLostError, errors.ShutdownError):
        assert issubclass(kind, errors.HorovodInternalError)
    lost = pickle.loads(pickle.dumps(errors.PeerLostError("rank 3 is lost", 3)))
    assert lost.rank == 3 and str(lost) == "rank 3 is lost"


def hvdrun(tmp_path, ranks, code, **variables):
    program = tmp_path / "program.py"
    program.write_text("import sys, torch, hvd.torch as hvd\nhvd.init()\nrank, size = hvd.rank(), hvd.size()\n" + code)
    return subprocess.run([sys.executable, "-m", "hvd", "-np", str(ranks), str(program)], capture_output=True, text=True,
                          timeout=60, env={**os.environ, "OMP_NUM_THREADS": "1", **variables})


def test_end_without_shutdown(tmp_path):
    done = hvdrun(tmp_path, 2, "hvd.allreduce(torch.ones(1))\nif rank: import time; time.sleep(0.5)\n")
    assert done.returncode == 0, done.stderr
    assert "error" not in done.stderr.lower(), done.stderr


def test_end_with_a_status(tmp_path):
    done = hvdrun(tmp_path, 2, "hvd.allreduce(torch.ones(1))\nif rank: sys.exit(3)\n")
    assert done.returncode == 3, done.stderr


def test_an_exception_is_the_cause_on_the_other_ranks(tmp_path):
    done = hvdrun(tmp_path, 2, """
hvd.allreduce(torch.ones(1))
if rank == 1:
    raise KeyError("no such sample")
try:
    hvd.allreduce(torch.ones(1), name="next")
except hvd.PeerLostError as error:
    print("lost", error.rank, "no such sample" in str(error), isinstance(error, hvd.HorovodInternalError), flush=True)
    raise
""")
    assert done.returncode == 1
    assert "lost 1 True True" in done.stdout, done.stdout + done.stderr
    assert "program.py" in done.stderr and "KeyError" in done.stderr


def test_a_killed_rank_has_its_number_in_the_error(tmp_path):
    done = hvdrun(tmp_path, 2, """
import os, signal
for step in range(1000000):
    if rank == 1 and step == 50:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        hvd.allreduce(torch.ones(1000), name="step")
    except hvd.PeerLostError as error:
        print("lost", error.rank, flush=True)
        sys.exit(5)
""")
    assert done.returncode == 128 + 9, done.stderr
    assert "lost 1" in done.stdout, done.stdout + done.stderr


def test_operations_use_no_more_memory(tmp_path):
    done = hvdrun(tmp_path, 2, """
import gc
tensor = torch.ones(64)
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
def work(count):
    for _ in range(count):
        hvd.allreduce(tensor, name="a"); hvd.allgather(tensor, name="b"); hvd.synchronize(hvd.broadcast_async_(tensor, 0, "c"))
    gc.collect()
work(4000)
objects, memory, references = len(gc.get_objects()), resident(), sys.getrefcount(tensor)
work(6000)
assert len(gc.get_objects()) - objects < 50, len(gc.get_objects()) - objects
assert sys.getrefcount(tensor) == references
assert resident() - memory < 2_000_000, resident() - memory  # 110 bytes for each operation
""")
    assert done.returncode == 0, done.stderr


def test_timeline(tmp_path):
    done = hvdrun(tmp_path, 2, f"""
hvd.start_timeline(r"{tmp_path}/trace.json", mark_cycles=True)
hvd.allreduce(torch.ones(1), name="traced")
hvd.allgather(torch.ones(1), name="gathered")
hvd.stop_timeline()
""")
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        names = {event["args"].get("name") for event in json.loads((tmp_path / f"trace.rank{rank}.json").read_text()) if "args" in event}
        assert {"traced", "allgather.gathered"} <= names, names


def test_different_calls_of_one_name(tmp_path):
    """Two kinds may share a name, so that the ranks find out only when each of them waits."""
    done = hvdrun(tmp_path, 2, """
try:
    (hvd.allgather if hvd.rank() else hvd.allreduce)(torch.ones(1), name="mixed")
except hvd.StalledError as error:
    print(f"rank {hvd.rank()}: {error}")
assert hvd.allreduce(torch.ones(1), name="next", op=hvd.Sum) == 2
""", HVD_DEADLOCK_TIMEOUT="1")
    assert done.returncode == 0, done.stderr
    texts = [line for line in done.stdout.splitlines() if "mixed" in line]
    assert len(texts) == 2 and all(text.isprintable() for text in texts), done.stdout
    assert any("allgather 'allgather.mixed'" in text for text in texts) and any("allreduce 'mixed'" in text for text in texts), texts


def test_horovods_variables():
    code = ("import os, hvd.torch as hvd; hvd.init(); print(*(os.environ.get(n) for n in ('HVD_STALL_WARNING', 'HVD_STALL_SHUTDOWN',"
            " 'HOROVOD_TIMELINE')))")

    def settings(**variables):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60,
                              env={**os.environ, **variables})
        return done.stdout.split() or done.stderr

    assert settings(HOROVOD_STALL_CHECK_TIME_SECONDS="7", HOROVOD_STALL_SHUTDOWN_TIME_SECONDS="9",
                    HOROVOD_TIMELINE="DYNAMIC") == ["7", "9", "None"]
    assert settings(HOROVOD_STALL_CHECK_DISABLE="1", HOROVOD_STALL_CHECK_TIME_SECONDS="7") == ["0", "None", "None"]
    assert settings(HVD_STALL_WARNING="3", HOROVOD_STALL_CHECK_TIME_SECONDS="7") == ["3", "None", "None"]


def test_ignored_variables_are_logged():
    def logged(level):
        done = subprocess.run([sys.executable, "-c", "import hvd.torch as hvd; hvd.init(); hvd.init()"], capture_output=True, text=True,
                              timeout=60, env={**os.environ, "HVD_LOG_LEVEL": level, "HOROVOD_CYCLE_TIME": "3",
                                               "HOROVOD_AUTOTUNE": "1", "HOROVOD_FUSION_THRESHOLD": "1048576"})
        assert done.returncode == 0, done.stderr
        return [line for line in done.stderr.splitlines() if line.startswith("hvd.torch")]

    assert logged("info") == ["hvd.torch, rank 0: ignored: HOROVOD_AUTOTUNE, HOROVOD_CYCLE_TIME"]
    assert logged("warning") == []


@pytest.mark.parametrize("name", ("mpi_threads_supported", "rank", "is_homogeneous"))
def test_queries_before_init(name):
    code = f"import hvd.torch as hvd\ntry: hvd.{name}()\nexcept ValueError as error: print(type(error).__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "NotInitializedError", done.stdout + done.stderr
