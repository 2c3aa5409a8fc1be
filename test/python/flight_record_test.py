"""The flight record of the backend, as torchfrtrace reads it."""

import datetime
import os
import pathlib
import pickle
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist


def make_every_call(rank):
    own, all_of = torch.ones(4), torch.empty(8)
    for _ in range(3):
        dist.all_reduce(own)
    dist.all_gather([torch.empty(4), torch.empty(4)], own)
    dist.all_gather_into_tensor(all_of, own)
    dist.reduce_scatter(own, [own, own])
    dist.reduce_scatter_tensor(own, all_of)
    dist.broadcast(own, 0)
    dist.reduce(own, 0)
    dist.scatter(torch.empty(4), [own, own] if rank == 0 else None)
    dist.gather(own, [torch.empty(4), torch.empty(4)] if rank == 0 else None)
    dist.all_to_all_single(torch.empty(4), own)
    dist.all_to_all([torch.empty(2), torch.empty(2)], [torch.ones(2), torch.ones(2)])
    dist.barrier()
    dist.send(own, 1) if rank == 0 else dist.recv(own, 0)
    dist.all_reduce(own, group=dist.new_group([0, 1]))


def record_every_call(rank, size, folder):
    import hvd.torch

    make_every_call(rank)
    record = hvd.torch.flight_record()
    (pathlib.Path(folder) / f"record_{rank}").write_bytes(record)
    return pickle.loads(record)


def call_differently(rank, size):
    make_every_call(rank)
    with pytest.raises(dist.DistBackendError):
        dist.all_reduce(torch.ones(2)) if rank == 0 else dist.broadcast(torch.ones(2), 0)


def wait_for_an_absent_rank(rank, size):
    if rank == 0:
        with pytest.raises(dist.DistBackendError, match=" timeout "):
            dist.all_reduce(torch.ones(2), async_op=True).wait(datetime.timedelta(milliseconds=100))
        dist.barrier()
    else:
        time.sleep(1)
        dist.all_reduce(torch.ones(2))
        dist.barrier()


def compare(folder):
    """What torchfrtrace prints about the records of the ranks."""
    done = subprocess.run([sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", folder], capture_output=True,
                          text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_equal_calls_are_no_error(on_ranks, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "100")
    for rank, record in enumerate(on_ranks(record_every_call, 2, str(tmp_path))):
        entries = record["entries"]
        assert {entry["state"] for entry in entries} == {"completed"}
        names = [entry["profiling_name"] for entry in entries]
        assert names[:3] == ["gloo:all_reduce"] * 3
        assert ("gloo:send 0->1", "gloo:recv 1<-0")[rank] in names
        assert entries[0]["input_sizes"] == entries[0]["output_sizes"] == [[4]]
        assert {frame["name"] for frame in entries[0]["frames"]} >= {"make_every_call", "all_reduce"}
        assert [group["ranks"] for group in record["pg_config"].values()] == ["[0, 1]"] * 2
    output = compare(tmp_path)
    assert "error" not in output, output


@pytest.mark.parametrize("program, text", [(call_differently, "Expected collective type: 'all_reduce' does not match found"),
                                           (wait_for_an_absent_rank, None)])
def test_a_failure_writes_the_records(on_ranks, tmp_path, monkeypatch, program, text):
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", str(tmp_path / "trace_"))
    on_ranks(program, 2)
    if text is not None:
        assert sorted(os.listdir(tmp_path)) == ["trace_0", "trace_1"]
        output = compare(tmp_path)
        assert text in output and "Culprit rank 1" in output, output
    else:
        entry, = pickle.loads((tmp_path / "trace_0").read_bytes())["entries"]
        assert (entry["profiling_name"], entry["state"]) == ("gloo:all_reduce", "scheduled")
        assert os.listdir(tmp_path) == ["trace_0"]


def test_no_record_without_the_variables(on_ranks, tmp_path, monkeypatch):
    monkeypatch.delenv("TORCH_FR_BUFFER_SIZE", raising=False)
    monkeypatch.delenv("TORCH_FR_DUMP_TEMP_FILE", raising=False)
    assert on_ranks(no_record, 1) == [b""]


def no_record(rank, size):
    import hvd.torch

    dist.all_reduce(torch.ones(2))
    return hvd.torch.flight_record()
