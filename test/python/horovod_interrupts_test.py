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
    "step": step,
    "barrier": hvd.barrier,
    "join": hvd.join,
}
step()  # at their first step the ranks compare their parameters, in several operations
delays = open(sys.argv[1], "w") if hvd.rank() == 0 else None
for name, call in CALLS.items():
    if name != "join":
        hvd.barrier()
    if hvd.rank() == 1:
        time.sleep(1.2)
        call()
        continue
    sent = []
    timer = threading.Timer(0.3, lambda: (sent.append(time.monotonic()), os.kill(os.getpid(), signal.SIGINT)))
    timer.start()
    try:
        call()
        timer.cancel()
        delays.write(f"{name} none\\n")
    except KeyboardInterrupt:
        delays.write(f"{name} {time.monotonic() - sent[0]:.2f}\\n")
    if name == "step":
        optimizer.synchronize()  # waits for the same gradients
        assert model.weight.grad is not None
        with optimizer.skip_synchronize():
            optimizer.step()
    elif name == "join":
        time.sleep(2)  # this rank cannot call anything until the other one has joined
if delays:
    delays.close()
hvd.barrier()
"""


def test_ctrl_c_ends_blocking_calls(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    words = [shutil.which("hvdrun"), "-np", "2", sys.executable, program, tmp_path / "delays"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, env=ENVIRONMENT)
    assert done.returncode == 0, done.stdout + done.stderr
    delays = dict(line.split() for line in (tmp_path / "delays").read_text().splitlines())
    assert len(delays) == 9
    late = {name: delay for name, delay in delays.items() if delay == "none" or float(delay) > 0.6}
    assert not late, late  # 0.1 s, and 0.9 s until the other rank makes the call
