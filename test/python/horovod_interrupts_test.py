"""Ctrl-C in the blocking calls of hvd.torch, while another rank is late."""

import os
import shutil
import subprocess
import sys

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}

PROGRAM = """
import os, signal, sys, threading, time
import torch
import hvd.torch as hvd

hvd.init()
signal.signal(signal.SIGINT, signal.default_int_handler)
model = torch.nn.Linear(2, 1)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())

def step():
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()

CALLS = {
    "allreduce": lambda: hvd.allreduce(torch.ones(2), name="a"),
    "allreduce_": lambda: hvd.allreduce_(torch.ones(2), name="b"),
    "grouped_allreduce": lambda: hvd.grouped_allreduce([torch.ones(2)], name="c"),
    "allgather": lambda: hvd.allgather(torch.ones(2), name="d"),
    "broadcast": lambda: hvd.broadcast(torch.ones(2), 1, name="e"),
    "synchronize": lambda: hvd.synchronize(hvd.allreduce_async(torch.ones(2), name="g")),
    "SyncBatchNorm": lambda: layer(torch.rand(3, 2)),
    "step": step,
    "barrier": hvd.barrier,
    "allgather_object": lambda: hvd.allgather_object(hvd.rank(), name="h"),
    "broadcast_object": lambda: hvd.broadcast_object(hvd.rank(), 1, name="i"),
    "add_process_set": lambda: hvd.add_process_set(first),
    "remove_process_set": lambda: hvd.remove_process_set(first),
    "join": hvd.join,
}
first, layer = hvd.ProcessSet([1]), hvd.SyncBatchNorm(2)
step()  # at their first step the ranks compare their parameters, in several operations
delays = open(sys.argv[1], "w") if hvd.rank() == 0 else None

def reach(event):
    open(sys.argv[1] + "." + event.replace(" ", "-"), "w").close()

def wait_for(event):
    limit = time.monotonic() + 30
    while not os.path.exists(sys.argv[1] + "." + event.replace(" ", "-")) and time.monotonic() < limit:
        time.sleep(0.01)

# The other rank makes the call when this one was interrupted in it.
def interrupted(name, call):
    sent = []
    timer = threading.Timer(0.3, lambda: (sent.append(time.monotonic()), os.kill(os.getpid(), signal.SIGINT)))
    timer.start()
    try:
        call()
        timer.cancel()
        delays.write(f"{name} none\\n")
    except KeyboardInterrupt:
        delays.write(f"{name} {time.monotonic() - sent[0]:.2f}\\n")
    reach("interrupted in " + name)

def fails(call):
    try:
        call()
    except hvd.StalledError:
        return
    raise AssertionError("no error")

for name, call in CALLS.items():
    if name != "join":
        hvd.barrier()
    if hvd.rank() == 1:
        wait_for("interrupted in " + name)
        fails(call) if name == "broadcast_object" else call()
        reach("returned from " + name)
        continue
    interrupted(name, call)
    if name == "step":
        optimizer.synchronize()  # waits for the same gradients
        assert model.weight.grad is not None
        with optimizer.skip_synchronize():
            optimizer.step()
    elif name == "broadcast_object":
        time.sleep(1.2)
        fails(call)  # the other rank waits for the second of two operations
    elif name.endswith("process_set"):
        call()  # waits for the same change
        assert first.size() == (1 if name.startswith("add") else None)
    elif name == "join":
        wait_for("returned from join")  # this rank cannot call anything until the other one has joined
assert hvd.allgather_object(hvd.rank(), name="h") == [0, 1]
if hvd.rank() == 1:
    wait_for("interrupted in shutdown")
    hvd.shutdown()
else:
    interrupted("shutdown", hvd.shutdown)
hvd.init()  # waits for the end of the job
assert hvd.allreduce(torch.ones(1), op=hvd.Sum) == 2
if delays:
    delays.close()
hvd.barrier()
"""

LATE = """
import os, signal, sys, threading, time
import torch
import hvd.torch as hvd

if sys.argv[1] == "late":
    limit = time.monotonic() + 30
    while not os.path.exists(sys.argv[2]) and time.monotonic() < limit:
        time.sleep(0.01)
    hvd.init()
else:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sent = []
    threading.Timer(0.5, lambda: (sent.append(time.monotonic()), os.kill(os.getpid(), signal.SIGINT))).start()
    try:
        hvd.init()
        sys.exit("not interrupted")
    except KeyboardInterrupt:
        delay = time.monotonic() - sent[0]
    assert delay < 10, delay  # 0.1 s on an idle machine, and 30 s until the other rank begins in vain
    open(sys.argv[2], "w").close()
    assert not hvd.is_initialized()
    try:
        hvd.rank()
        sys.exit("a rank before the job")
    except hvd.NotInitializedError:
        pass
    if sys.argv[1] == "ends":
        sys.exit(0)
    hvd.init()  # goes on with the same start
assert hvd.allreduce(torch.ones(1), op=hvd.Sum) == 2
"""


def test_ctrl_c_ends_blocking_calls(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    words = [shutil.which("hvdrun"), "-np", "2", sys.executable, program, tmp_path / "delays"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, env={**ENVIRONMENT, "HVD_DEADLOCK_TIMEOUT": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    delays = dict(line.split() for line in (tmp_path / "delays").read_text().splitlines())
    assert len(delays) == 15
    late = {name: delay for name, delay in delays.items() if delay == "none" or float(delay) > 10}
    assert not late, late  # 0.1 s on an idle machine, and 30 s until the other rank makes the call in vain


def start(program, rank, folder, *words):
    environment = {**ENVIRONMENT, "HVD_INIT_METHOD": f"file://{folder}/meet", "RANK": str(rank), "WORLD_SIZE": "2"}
    return subprocess.Popen([sys.executable, program, *words], env=environment, stderr=subprocess.PIPE, text=True)


def test_ctrl_c_ends_init(tmp_path):
    program = tmp_path / "late.py"
    program.write_text(LATE)
    interrupted = tmp_path / "interrupted"
    ranks = [start(program, 0, tmp_path, "goes on", interrupted), start(program, 1, tmp_path, "late", interrupted)]
    for rank in ranks:
        _, errors = rank.communicate(timeout=60)
        assert rank.returncode == 0, errors


def test_ctrl_c_in_init_lets_the_process_end(tmp_path):
    program = tmp_path / "late.py"
    program.write_text(LATE)
    alone = start(program, 0, tmp_path, "ends", tmp_path / "interrupted")
    _, errors = alone.communicate(timeout=60)
    assert alone.returncode == 0, errors
