#!/usr/bin/env python3
"""The campaign of kills: short jobs of Python programs over hvd, one for each seed, in which one rank fails.

Usage: kill_campaign.py [--seeds N] [--first SEED] [--horovod] [--verbose] [--stacks]

Each job has two to four ranks, started by `python -m hvd`, by torchrun or by hand, which run the program of kill_program.py. At a
moment of it one rank is killed, stopped, raises, exits, leaves or hangs. Each other rank must raise DistBackendError in time with
that rank's number and, after an exception, its text and place. No process and no file may remain. With --horovod the steps are
calls of hvd.torch, which raise a HorovodInternalError; one of a lost rank has its number.
"""

import argparse
import collections
import ctypes
import fcntl
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

import torch._dynamo  # noqa: F401  ranks that are started by hand are forked from this process, which saves them the import

import kill_program

STEPS = ("reduce", "move", "works", "messages", "objects", "barrier", "new_group", "train")
HOROVOD_STEPS = ("hvd_reduce", "hvd_move", "hvd_train", "hvd_sets")
FAULTS = {"kill": 30, "stop": 10, "raise": 14, "raise within": 6, "_exit": 10, "exit": 10, "leave": 8, "hang": 6, "none": 6}
PEER_TIMEOUT = 3  # seconds until a stopped rank is lost
TIMEOUT = 6  # seconds, of the groups
GRACE = 10  # seconds that hvdrun leaves the other ranks
PATIENCE = 120  # seconds until a job hangs
# Seconds from the fault to the error. An interpreter that has imported torch takes long to end.
LIMITS = {"stop": PEER_TIMEOUT + 4, "hang": TIMEOUT + 5, "exit": 10}
LIMIT = 4
# The classes of hvd.torch's errors. A rank that ends because of the victim is lost to the others, so PeerLostError is always possible.
CLASSES = {"exit": ("ShutdownError", "PeerLostError"), "leave": ("ShutdownError", "PeerLostError"), "hang": ("StalledError", "PeerLostError")}
CALLBACK = "Got the following error when running the callback: DistBackendError: "  # torch's error for a future of then()
WORKER_LIMIT = 8  # seconds: data-loader workers look for their parent every 5 s


def make_plan(seed, horovod=False):
    """The plan of a seed depends on the seed alone."""
    numbers = random.Random(seed)
    way = numbers.choices(("file", "tcp", "store", "hvdrun", "torchrun"), (3, 3, 2, 2, 1))[0]
    size = numbers.randint(2, 4 if way in ("file", "tcp", "store") else 3)
    fault = numbers.choices(list(FAULTS), FAULTS.values())[0]
    steps = [numbers.choice(STEPS) for _ in range(numbers.randint(4, 14))]
    workers = 0 if way == "torchrun" else numbers.choice((0, 0, 1, 2))  # torchrun's signals end the workers, too
    if workers:
        steps = ["load" if numbers.random() < 0.4 else step for step in steps]
    if way in ("hvdrun", "torchrun") and fault != "raise within" and numbers.random() < 0.7:
        steps = ["reduce" if step == "train" else step for step in steps]  # DDP imports much
    moment = numbers.choices((kill_program.INIT, kill_program.END, numbers.randrange(len(steps))), (1, 1, 12))[0]
    if fault == "leave" and moment == kill_program.INIT:
        moment = 0
    if fault == "raise within":
        moment = numbers.randrange(len(steps))
        steps[moment] = "train"
    if horovod:
        steps = [numbers.choice(HOROVOD_STEPS) for _ in steps]
        if fault == "raise within":
            steps[moment] = "hvd_train"
        workers = 0
    late = fault in ("kill", "stop", "_exit") and numbers.random() < 0.6
    during = int(numbers.uniform(0, numbers.choice((1000, 5000, 50000)))) if late else None
    after = numbers.choice(("raise", "exit", "destroy", "again"))
    if after == "again" and (way not in ("file", "tcp", "store") or fault in ("leave", "hang")):
        after = "destroy"
    return {"seed": seed, "way": way, "size": size, "fault": fault, "victim": numbers.randrange(size), "steps": steps,
            "workers": workers, "moment": moment, "during_us": during, "thread": numbers.random() < 0.3 and not horovod, "after": after,
            "code": numbers.choice((0, 3)), "timeout": TIMEOUT, "horovod": horovod}


def describe(plan):
    moment = plan["moment"]
    step = moment if isinstance(moment, str) else f"step {moment} ({plan['steps'][moment]})"
    late = "" if plan["during_us"] is None else f" + {plan['during_us']} us"
    extra = (", another thread" if plan["thread"] else "") + (f", {plan['workers']} workers" if plan["workers"] else "")
    return (f"seed {plan['seed']}: {plan['way']}, {plan['size']} ranks, rank {plan['victim']}: {plan['fault']} at {step}{late}{extra}, "
            f"others: {plan['after']}")


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class BecomeRank(Exception):
    """Raised in a forked child up to the end of this module, so that the rank ends as a program of its own does."""


def become(folder, environment, plan=None, rank=None, words=None):
    """In a child: runs a rank, or the words as a program."""
    os.setsid()
    output = os.open(os.path.join(folder, "output" if rank is None else f"output.{rank}"), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(environment)
    if words:
        os.execv(words[0], words)
    tempfile.tempdir = None
    raise BecomeRank(plan, rank)


class Job:
    """The processes of a seed. This process adopts those that lose their parent, so none escapes."""

    def __init__(self, plan):
        self.plan, self.folder = plan, tempfile.mkdtemp(prefix="hvd-kill-campaign-")
        plan["folder"] = self.folder
        plan["method"] = f"tcp://127.0.0.1:{free_port()}" if plan["way"] == "tcp" else f"file://{self.folder}/store"
        self.temporary = os.path.join(self.folder, "tmp")
        os.mkdir(self.temporary)
        with open(os.path.join(self.folder, "plan.json"), "w", encoding="utf-8") as file:
            json.dump(plan, file)
        self.environment = {"HVD_PEER_TIMEOUT": str(PEER_TIMEOUT), "HVD_DEADLOCK_TIMEOUT": "0", "OMP_NUM_THREADS": "1",
                            "TMPDIR": self.temporary, "TORCHINDUCTOR_CACHE_DIR": os.path.join(self.folder, "cache"), "PYTHONDONTWRITEBYTECODE": "1"}
        self.codes = {}  # of ended children by process id; negative: the signal
        self.children = []
        self.start()

    def start(self):
        program = [kill_program.__file__, self.folder]
        words = {"hvdrun": ["hvd", "-np", str(self.plan["size"]), "--fail-grace", str(GRACE), *program],
                 "torchrun": ["torch.distributed.run", "--nproc-per-node", str(self.plan["size"]), "--master-port", str(free_port()),
                              *program]}.get(self.plan["way"])
        for rank in range(self.plan["size"]) if words is None else [None]:
            child = os.fork()
            if child == 0:
                become(self.folder, self.environment, self.plan, rank, words and [sys.executable, "-B", "-m", *words])
            self.children.append(child)

    def reap(self):
        """Collects the codes of children that have ended, among them adopted ones."""
        while True:
            try:
                child, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if child == 0:
                return
            self.codes[child] = os.waitstatus_to_exitcode(status)

    def events(self, rank):
        try:
            with open(os.path.join(self.folder, f"rank.{rank}"), encoding="utf-8") as file:
                return [json.loads(line) for line in file]
        except FileNotFoundError:
            return []

    def event(self, rank, name):
        return next((event for event in self.events(rank) if event["event"] == name), None)

    def process_of(self, rank):
        """The rank's process id. In a job by hand it is a child, else it is in the journal."""
        if len(self.children) == self.plan["size"]:
            return self.children[rank]
        start = self.event(rank, "start")
        return start and start["pid"]

    def survivors(self):
        return [rank for rank in range(self.plan["size"]) if self.plan["fault"] == "none" or rank != self.plan["victim"]]

    def wait(self, stacks):
        """Waits for the end of all children. Ends a victim that is stopped or hangs when no other rank is left, unless hvdrun does."""
        deadline, defects = time.monotonic() + PATIENCE, []
        while not all(child in self.codes for child in self.children):
            others_ended = all(process and not exists(process) for process in map(self.process_of, self.survivors()))
            if self.plan["way"] != "hvdrun" and others_ended and self.plan["fault"] in ("stop", "hang", "leave"):
                if self.plan["fault"] != "leave" and exists(self.process_of(self.plan["victim"])):
                    os.kill(self.process_of(self.plan["victim"]), signal.SIGKILL)
            if time.monotonic() > deadline:
                defects.append(f"the job has not ended within {PATIENCE} s")
                defects += end_all(stacks)
                break
            time.sleep(0.01)
            self.reap()
        return defects

    def remove(self):
        shutil.rmtree(self.folder, ignore_errors=True)


def exists(process):
    """Whether this process runs or is stopped; a zombie does not count."""
    try:
        with open(f"/proc/{process}/stat", encoding="utf-8") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def descendants():
    """This process's descendants that run."""
    parents = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", encoding="utf-8") as file:
                parents[int(name)] = int(file.read().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
    found, new = set(), {os.getpid()}
    while new:
        new = {child for child, parent in parents.items() if parent in new} - found
        found |= new
    return {process for process in found if exists(process)}


def command_of(process):
    try:
        with open(f"/proc/{process}/cmdline", encoding="utf-8") as file:
            return file.read().replace("\0", " ").strip()
    except (FileNotFoundError, ProcessLookupError):
        return "ended"


def end_all(stacks):
    """Kills all descendants and returns a line for each, with its stacks if wanted."""
    lines = []
    for process in sorted(descendants()):
        lines.append(f"process {process} was there: {command_of(process)}")
        if stacks:
            shown = subprocess.run(["gdb", "-p", str(process), "-batch", "-ex", "thread apply all bt"], capture_output=True, text=True)
            lines.append(shown.stdout)
    for process in descendants():
        os.kill(process, signal.SIGKILL)
    return lines


def judge_horovod(plan, job, rank, error):
    """The defects of an error of hvd.torch: its class, its rank, and its text."""
    victim, kind, text = plan["victim"], error["type"], error["text"]
    ended = [r for r in job.survivors() if (end := job.event(r, "ending")) and end["time"] < error["time"]]
    if kind not in CLASSES.get(plan["fault"], ("PeerLostError",)):
        return [f"rank {rank} raised {kind} after {plan['fault']}: {text}"]
    if kind == "PeerLostError" and error["rank"] not in (victim, *ended):
        return [f"rank {rank} raised {kind} of rank {error['rank']}, expected {victim}: {text}"]
    # The error of a rank that has ended because of the victim names the victim.
    if not re.search(rf"\branks? ([0-9, and]*\b)?{victim}\b", text):
        return [f"rank {rank} raised {kind} that does not name rank {victim}: {text}"]
    return []


def judge_error(plan, job, rank, fault):
    """The defects of a survivor's error, and the seconds until it."""
    error = job.event(rank, "error")
    early = plan["moment"] in (kill_program.INIT, kill_program.END)
    if error is None:
        # The victim may have left before its late fault.
        if job.event(rank, "finished") and (plan["moment"] == kill_program.END or job.event(plan["victim"], "leaving")):
            return [], 0
        return [f"rank {rank} has not raised"], 0
    defects, delay, text = [], error["time"] - fault["time"], error["text"]
    if error["internal"]:
        defects += judge_horovod(plan, job, rank, error)
    elif plan["horovod"] and not early and not job.event(rank, "steps made"):  # afterwards torch's barrier fails
        defects.append(f"rank {rank} raised {error['type']}, expected a HorovodInternalError: {text}")
    elif error["type"] != "DistBackendError" and not text.startswith(CALLBACK) and not (early and error["type"].startswith("Dist")):
        defects.append(f"rank {rank} raised {error['type']}: {text}")
    elif not re.search(rf"\brank {plan['victim']}\b|made the call: ([0-9, ]* )?{plan['victim']}\b", text) and error["type"] == "DistBackendError":
        # A rank that ends because of the victim may be the one that another rank waits for.
        ended = [r for r in job.survivors() if job.event(r, "error") and job.event(r, "error")["time"] < error["time"]]
        if plan["fault"] not in ("hang", "leave") or not any(re.search(rf"\brank {r}\b", text) for r in ended):
            defects.append(f"rank {rank} does not name rank {plan['victim']}: {text}")
    if fault.get("cause") and fault["cause"] not in text and not early:
        defects.append(f"rank {rank} does not show the cause {fault['cause']}: {text}")
    # torch's own store may wait for nearly twice its timeout for the rank that hosts it.
    limit = 2 * TIMEOUT + LIMIT if early else LIMITS.get(plan["fault"], LIMIT)
    if delay > limit:
        defects.append(f"rank {rank} raised after {delay:.1f} s, expected at most {limit}: {text}")
    return defects, delay


def judge_rest(plan, job, rank):
    """The defects of what a survivor does after its error."""
    defects = []
    second, again = job.event(rank, "second"), job.event(rank, "again")
    if second and second["type"] != "DistBackendError" and plan["fault"] not in ("leave", "hang") and plan["moment"] != kill_program.INIT:
        defects.append(f"rank {rank}: a further call: {second['type']}: {second['text']}")
    if job.event(rank, "error") and plan["after"] == "again" and (again is None or again["total"] != plan["size"] - 1):
        defects.append(f"rank {rank} has not started again: {again}")
    thread = job.event(rank, "error in thread")
    if thread and thread["type"] != "DistBackendError" and not thread["text"].startswith("hvd is shutting down on this rank"):
        defects.append(f"rank {rank}: the other thread raised {thread['type']}: {thread['text']}")
    if job.codes and len(job.children) == plan["size"]:
        expected = 0 if job.event(rank, "finished") else 1 if plan["after"] == "raise" else 4
        if job.codes.get(job.children[rank]) != expected:
            defects.append(f"rank {rank} ended with code {job.codes.get(job.children[rank])}, expected {expected}")
    return defects


def abandoned(name):
    """Whether no process holds the lock of this name in /dev/shm. Jobs outside the campaign hold theirs while they run."""
    try:
        file = os.open(f"/dev/shm/{name}", os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(file)


def abandoned_since(before):
    """New names of hvd in /dev/shm that no process holds. A second check spares those that had no lock yet."""
    def find():
        return [name for name in os.listdir("/dev/shm") if name.startswith("hvd") and name not in before and abandoned(name)]

    if find():
        time.sleep(0.5)
    return find()


def judge_remains(job, before):
    """The defects of the job's end: processes and files."""
    deadline = time.monotonic() + WORKER_LIMIT
    while descendants() and time.monotonic() < deadline:
        time.sleep(0.05)
        job.reap()
    defects = end_all(False)
    job.reap()
    # torchrun's and multiprocessing's own folders remain when a process is killed.
    left = [name for name in os.listdir(job.temporary) if not name.startswith(("torchelastic_", "pymp-"))]
    left += abandoned_since(before)
    left += [name for name in os.listdir(job.folder) if name.startswith(("store.", "again."))]
    return defects + [f"left {name}" for name in left]


def output_of(job):
    text = ""
    for name in sorted(name for name in os.listdir(job.folder) if name.startswith(("output", "rank."))):
        with open(os.path.join(job.folder, name), encoding="utf-8", errors="replace") as file:
            text += f"--- {name}\n{file.read()}"
    return text


def run_job(seed, stacks, horovod):
    """Returns the plan, the defects, the longest time from the fault to an error (None: no fault happened), and the output."""
    plan, before = make_plan(seed, horovod), set(os.listdir("/dev/shm"))
    job = Job(plan)
    defects = job.wait(stacks)
    defects += judge_remains(job, before)
    fault, longest = job.event(plan["victim"], "fault"), None
    if fault:
        longest = 0
        for rank in job.survivors():
            found, delay = judge_error(plan, job, rank, fault)
            defects += found
            longest = max(longest, delay)
    for rank in job.survivors():
        defects += judge_rest(plan, job, rank)
        if not fault and not job.event(rank, "finished"):
            defects.append(f"rank {rank} has not finished, and no fault has happened")
    text = output_of(job)
    for sign in ("Segmentation fault", "Fatal Python error", "terminate called", "Aborted"):
        if sign in text:
            defects.append(f"the output contains {sign!r}")
    if len(job.children) == 1 and job.codes.get(job.children[0]) == 0 and any(job.event(rank, "error") for rank in job.survivors()):
        defects.append(f"{plan['way']} ended with code 0")
    job.remove()
    return plan, defects, longest, text


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=10, help="the number of seeds")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--horovod", action="store_true", help="programs of hvd.torch instead of torch.distributed")
    parser.add_argument("--verbose", action="store_true", help="print the output of jobs that were as expected, too")
    parser.add_argument("--stacks", action="store_true", help="print the stacks of processes that hang, from gdb")
    return parser.parse_args()


def main():
    arguments = parse_arguments()
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    rows, repetitions = collections.defaultdict(lambda: [0, 0, 0, 0.0]), []
    for seed in range(arguments.first, arguments.first + arguments.seeds):
        began = time.monotonic()
        plan, defects, longest, text = run_job(seed, arguments.stacks, arguments.horovod)
        print(f"{describe(plan)}: {'WRONG' if defects else 'right'} after {time.monotonic() - began:.1f} s")
        for defect in defects:
            print(f"    {defect}")
        if defects or arguments.verbose:
            print(text, flush=True)
        for name in (plan["fault"], "all"):
            row = rows[name]
            rows[name] = [row[0] + 1, row[1] + (longest is not None), row[2] + bool(defects), max(row[3], longest or 0)]
        if defects:
            repetitions.append(f"{sys.argv[0]} --first {seed} --seeds 1 --verbose --stacks{' --horovod' if arguments.horovod else ''}")
    print(f"{'fault':22} {'jobs':>5} {'happened':>9} {'wrong':>6}  slowest detection")
    for name, row in rows.items():
        print(f"{name:22} {row[0]:5} {row[1]:9} {row[2]:6}  {row[3]:.2f} s")
    print("\n".join(repetitions))
    return 1 if repetitions else 0


if __name__ == "__main__":
    try:
        result = main()
    except BecomeRank as chosen:
        rank = chosen
    else:
        sys.exit(result)
    sys.exit(kill_program.main(*rank.args))
