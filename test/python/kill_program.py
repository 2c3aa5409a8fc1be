"""One rank of kill_campaign.py: a program drawn from a seed, which the plan's victim leaves at a moment of it.

Usage: kill_program.py FOLDER    of a job with plan.json; writes what happens to it to FOLDER/rank.N
"""

import datetime
import importlib
import json
import os
import random
import signal
import sys
import threading
import time

import torch
import torch.distributed as dist

SIZES = (2, 16384, 1048576)  # elements of float32 for each rank
INIT, END = "init", "end"  # the moments before the first and after the last step


class Mistake(Exception):
    """The exception of a victim that raises."""


class Journal:
    """Records events as lines of JSON, each with a time that the campaign compares with those of other ranks."""

    def __init__(self, path):
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, event, **details):
        os.write(self._file, json.dumps({"event": event, "time": time.monotonic(), **details}).encode() + b"\n")


class Fault:
    """What the victim does. The other ranks have one that never happens."""

    def __init__(self, plan, rank, journal):
        self.plan, self.journal = plan, journal
        self.mine = rank == plan["victim"] and plan["fault"] != "none"

    def at(self, moment):
        """Called before each step. A fault happens here, or some time later while the step runs."""
        if not self.mine or moment != self.plan["moment"]:
            return
        if self.plan["during_us"] is None:
            self.happen()
        else:
            threading.Timer(self.plan["during_us"] * 1e-6, self.happen).start()

    def within(self, moment):
        """Called by Python code that torch calls in a step: raises where the plan says so."""
        if self.mine and self.plan["fault"] == "raise within" and moment == self.plan["moment"]:
            self.raise_mistake()

    def happen(self):
        kind = self.plan["fault"]
        if kind == "raise":
            self.raise_mistake()
        if kind == "raise within":
            return
        self.journal.write("fault")
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif kind == "_exit":
            os._exit(self.plan["code"])
        elif kind == "exit":
            sys.exit(self.plan["code"])
        elif kind == "hang":
            time.sleep(3600)
        elif kind == "leave":
            dist.destroy_process_group()
            sys.exit(0)

    def raise_mistake(self):
        line = sys._getframe().f_lineno + 2
        self.journal.write("fault", cause=f"{__file__}:{line}: {Mistake.__qualname__}: a mistake of {os.getpid()}")
        raise Mistake(f"a mistake of {os.getpid()}")


class Data(torch.utils.data.Dataset):
    def __init__(self, rank):
        self.rank = rank

    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.full((8,), float(self.rank + index % 5))


class Program:
    """The steps. Every random number but those of `own` is the same on all ranks."""

    def __init__(self, plan, rank, fault):
        self.plan, self.rank, self.size, self.fault = plan, rank, plan["size"], fault
        self.groups = [(None, list(range(self.size)))]  # with their ranks; the group is of no use where this rank is not among them
        self.model = self.optimizer = self.loader = self.batches = None
        self.step = 0

    def group(self, numbers):
        return self.groups[0 if numbers.random() < 0.5 else -1]

    def expect(self, tensor, value):
        if not bool((tensor == value).all()):
            raise AssertionError(f"step {self.step}, {self.plan['steps'][self.step]}: expected {value}, got {tensor.flatten()[:4]}")

    def reduce(self, numbers):
        (group, ranks), count = self.group(numbers), numbers.choice(SIZES)
        kind = numbers.choice(("all", "root", "scatter", "max"))
        if self.rank not in ranks:
            return
        tensor = torch.full((count,), self.rank + 1.0)
        total = sum(ranks) + len(ranks)
        if kind == "all":
            dist.all_reduce(tensor, group=group)
            self.expect(tensor, total)
        elif kind == "root":
            dist.reduce(tensor, ranks[-1], group=group)
            self.expect(tensor, total if self.rank == ranks[-1] else self.rank + 1)
        elif kind == "max":
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group)
            self.expect(tensor, ranks[-1] + 1)
        else:
            share = torch.empty(count)
            dist.reduce_scatter_tensor(share, tensor.repeat(len(ranks)), group=group)
            self.expect(share, total)

    def move(self, numbers):
        (group, ranks), count = self.group(numbers), numbers.choice(SIZES)
        kind = numbers.choice(("broadcast", "all_gather", "gather", "scatter", "all_to_all", "barrier"))
        if self.rank not in ranks:
            return
        tensor = torch.full((count,), float(self.rank))
        parts = [torch.empty(count) for _ in ranks]
        first = self.rank == ranks[0]
        if kind == "broadcast":
            dist.broadcast(tensor, ranks[-1], group=group)
            self.expect(tensor, ranks[-1])
        elif kind == "scatter":
            dist.scatter(tensor, [torch.full((count,), r + 0.5) for r in ranks] if first else None, ranks[0], group=group)
            self.expect(tensor, self.rank + 0.5)
        elif kind == "barrier":
            dist.barrier(group=group)
        else:
            if kind == "all_gather":
                dist.all_gather(parts, tensor, group=group)
            elif kind == "gather":
                dist.gather(tensor, parts if first else None, ranks[0], group=group)
            else:
                dist.all_to_all(parts, [tensor] * len(ranks), group=group)
            for rank, part in zip(ranks, parts):
                if kind != "gather" or first:
                    self.expect(part, rank)

    def works(self, numbers):
        count, kind = numbers.choice(SIZES), numbers.choice(("wait", "future", "then", "poll"))
        tensors = [torch.full((count,), float(self.rank + i)) for i in range(3)]
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        if kind == "then":
            for future in [work.get_future().then(lambda done: done.value()[0].add_(0)) for work in works]:
                future.wait()
        for work in reversed(works):
            if kind == "future":
                work.get_future().wait()
            while kind == "poll" and not work.is_completed():
                time.sleep(0.001)
            work.wait()
        for i, tensor in enumerate(tensors):
            self.expect(tensor, self.size * (self.size - 1) / 2 + i * self.size)

    def messages(self, numbers):
        count, kind = numbers.choice(SIZES), numbers.choice(("ring", "any", "pair", "batch"))
        after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        own, got = torch.full((count,), float(self.rank)), torch.empty(count)
        if kind == "batch":
            for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, own, after), dist.P2POp(dist.irecv, got, before)]):
                work.wait()
        elif kind == "pair" and self.rank in (0, self.size - 1):
            before = self.size - 1 - self.rank
            if self.rank == 0:
                dist.send(own, before, tag=7)
            dist.recv(got, before, tag=7)
            if self.rank > 0:
                dist.send(own, before, tag=7)
        elif kind != "pair":
            sent = dist.isend(own, after, tag=self.step)
            dist.recv(got, before if kind == "ring" else None, tag=self.step)
            sent.wait()
        if kind != "pair" or self.rank in (0, self.size - 1):
            self.expect(got, before)

    def objects(self, numbers):
        kind = numbers.choice(("all_gather", "broadcast", "scatter"))
        if kind == "all_gather":
            dist.all_gather_object(got := [None] * self.size, {"rank": self.rank})
            right = got == [{"rank": rank} for rank in range(self.size)]
        elif kind == "broadcast":
            dist.broadcast_object_list(got := [f"rank {self.rank}"], src=self.size - 1)
            right = got == [f"rank {self.size - 1}"]
        else:
            dist.scatter_object_list(got := [None], list(range(self.size)) if self.rank == 0 else None, src=0)
            right = got == [self.rank]
        if not right:
            raise AssertionError(f"step {self.step}: {kind} of objects gave {got}")

    def barrier(self, numbers):
        import hvd.torch

        hvd.torch.monitored_barrier(wait_all_ranks=numbers.random() < 0.5)

    def new_group(self, numbers):
        ranks = sorted(numbers.sample(range(self.size), numbers.randint(1, self.size)))
        if len(self.groups) > 1 and numbers.random() < 0.3:
            group, members = self.groups.pop()
            if self.rank in members:
                dist.destroy_process_group(group)
        self.groups.append((dist.new_group(ranks), ranks))

    def train(self, numbers):
        if self.model is None:
            torch.manual_seed(0)
            net = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
            self.model = torch.nn.parallel.DistributedDataParallel(net, bucket_cap_mb=0.001)
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
            net[0].weight.register_hook(lambda gradient: self.fault.within(self.step))
        for _ in range(numbers.randint(1, 20)):
            self.optimizer.zero_grad()
            self.model(torch.full((4, 8), self.rank + 1.0)).square().mean().backward()
            self.optimizer.step()

    def load(self, numbers):
        if self.loader is None:
            self.loader = torch.utils.data.DataLoader(Data(self.rank), batch_size=4, num_workers=self.plan["workers"],
                                                      persistent_workers=numbers.random() < 0.5)
        if self.batches is None:
            self.batches = iter(self.loader)
        for _ in range(numbers.randint(1, 6)):
            batch = next(self.batches, None)
            if batch is None:
                self.batches = None
                break
            before = batch[0, 0].item() - self.rank
            dist.all_reduce(batch)
            self.expect(batch[0], before * self.size + self.size * (self.size - 1) / 2)

    def hvd_reduce(self, numbers):
        import hvd.torch as hvd

        count = numbers.choice(SIZES)
        total = self.size * (self.size + 1) / 2
        kind = numbers.choice(("allreduce", "in place", "group", "scatter", "handles"))
        tensor = torch.full((count,), self.rank + 1.0)
        if kind == "allreduce":
            self.expect(hvd.allreduce(tensor, name="reduce", op=hvd.Sum), total)
        elif kind == "in place":
            self.expect(hvd.allreduce_(tensor, name="in place"), total / self.size)
        elif kind == "group":
            for result in hvd.grouped_allreduce([tensor, tensor], name="group", op=hvd.Sum):
                self.expect(result, total)
        elif kind == "scatter":
            self.expect(hvd.reducescatter(tensor.repeat(self.size), name="scatter", op=hvd.Sum), total)
        else:
            handles = [hvd.allreduce_async(tensor, name=f"handle.{number}", op=hvd.Sum) for number in range(4)]
            for handle in handles:
                self.expect(hvd.synchronize(handle), total)

    def hvd_move(self, numbers):
        import hvd.torch as hvd

        kind = numbers.choice(("allgather", "broadcast", "alltoall", "object"))
        tensor = torch.full((self.rank + 1, 2), float(self.rank))
        if kind == "allgather":
            self.expect(hvd.allgather(tensor, name="gather")[-1], self.size - 1)
        elif kind == "broadcast":
            root = numbers.randrange(self.size)
            self.expect(hvd.broadcast(torch.full((numbers.choice(SIZES),), float(self.rank)), root, name="broadcast"), root)
        elif kind == "alltoall":
            self.expect(hvd.alltoall(torch.arange(float(self.size)), name="exchange"), self.rank)
        elif hvd.allgather_object(self.rank) != list(range(self.size)):
            raise AssertionError(f"step {self.step}: wrong objects")

    def hvd_sets(self, numbers):
        import hvd.torch as hvd

        chosen = hvd.add_process_set(sorted(numbers.sample(range(self.size), self.size - 1)))
        if chosen.included():
            self.expect(hvd.allreduce(torch.ones(4), name="set", op=hvd.Sum, process_set=chosen), self.size - 1)
        hvd.barrier()
        hvd.remove_process_set(chosen)

    def hvd_train(self, numbers):
        import hvd.torch as hvd

        if self.model is None:
            torch.manual_seed(0)
            self.model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
            self.optimizer = hvd.DistributedOptimizer(torch.optim.SGD(self.model.parameters(), lr=0.01),
                                                      self.model.named_parameters())
            self.model[0].weight.register_hook(lambda gradient: self.fault.within(self.step))
        for _ in range(numbers.randint(1, 20)):
            self.optimizer.zero_grad()
            self.model(torch.full((4, 8), self.rank + 1.0)).square().mean().backward()
            self.optimizer.step()

    def run(self):
        for self.step, name in enumerate(self.plan["steps"]):
            self.fault.at(self.step)
            getattr(self, name)(random.Random(f"{self.plan['seed']} {self.step}"))
        self.step = END


class OtherThread:
    """Reduces a tensor over a group of its own until all ranks have finished their program."""

    def __init__(self, journal, size):
        self.group, self.journal, self.size = dist.new_group(), journal, size
        self.finished = 0
        self.thread = threading.Thread(target=self.run, daemon=size % 2 == 0)
        self.thread.start()

    def run(self):
        try:
            total = torch.zeros(1)
            while int(total) < self.size:
                total = torch.full((1,), float(self.finished))
                dist.all_reduce(total, group=self.group)
        except Exception as error:
            self.journal.write("error in thread", type=type(error).__name__, text=str(error))

    def join(self):
        self.finished = 1
        self.thread.join()


def join(plan, rank, method=None, size=None):
    """Joins the job as the plan says, or by another init method."""
    options = {"timeout": datetime.timedelta(seconds=plan["timeout"])}
    if method is None and plan["way"] == "store":
        options["store"] = dist.FileStore(os.path.join(plan["folder"], "store"), plan["size"])
    elif method or plan["way"] in ("tcp", "file"):
        options["init_method"] = method or plan["method"]
    if method or plan["way"] in ("tcp", "file", "store"):
        options |= {"rank": rank, "world_size": size or plan["size"]}
    dist.init_process_group("hvd", **options)


def work(plan, rank, fault, journal):
    journal.write("start", pid=os.getpid())
    fault.at(INIT)
    join(plan, rank)
    if plan["horovod"]:
        import hvd.torch

        hvd.torch.init()  # within the job of the default group
    journal.write("joined")
    other = OtherThread(journal, plan["size"]) if plan["thread"] else None
    Program(plan, rank, fault).run()
    if other:
        other.join()
    journal.write("steps made")
    dist.barrier()  # needs every rank
    fault.at(END)
    journal.write("leaving")
    dist.destroy_process_group()


def use_the_failed_job(journal):
    """Further calls must fail at once, too."""
    try:
        dist.all_reduce(torch.ones(1))
        journal.write("second", type="none", text="")
    except Exception as error:
        journal.write("second", type=type(error).__name__, text=str(error))


def start_again(plan, rank, journal):
    """The survivors make a job of their own."""
    survivors = [r for r in range(plan["size"]) if r != plan["victim"]]
    join(plan, survivors.index(rank), f"file://{plan['folder']}/again", len(survivors))
    dist.all_reduce(total := torch.ones(1))
    dist.destroy_process_group()
    journal.write("again", total=total.item())


def main(plan, rank):
    """Returns the exit code. Leaves exceptions that the plan wants to end the program to the interpreter."""
    torch.set_num_threads(1)
    if {"train", "hvd_train"}.intersection(plan["steps"]):
        importlib.import_module("torch._dynamo")  # DDP and optimizers import it, for seconds in which a rank does not notice a loss
    # torchrun ends the other ranks as soon as it has seen that one has failed. Their own errors are of interest here.
    signal.signal(signal.SIGTERM, lambda *_: None)
    journal = Journal(os.path.join(plan["folder"], f"rank.{rank}"))
    if plan["horovod"]:
        os.environ["HVD_STALL_SHUTDOWN"] = str(plan["timeout"])  # calls of hvd.torch have no timeout of their own
    try:
        work(plan, rank, Fault(plan, rank, journal), journal)
    except Mistake:
        raise
    except Exception as error:
        internal = "HorovodInternalError" in (kind.__name__ for kind in type(error).__mro__)
        journal.write("error", type=type(error).__name__, text=str(error), internal=internal, rank=getattr(error, "rank", None))
        if plan["fault"] == "none" or plan["after"] == "raise":
            journal.write("ending")  # hvd reports the exception to the other ranks
            raise
        use_the_failed_job(journal)
        journal.write("ending")
        if plan["after"] in ("destroy", "again"):
            if dist.is_initialized():
                dist.destroy_process_group()
            journal.write("destroyed")
        if plan["after"] == "again":
            start_again(plan, rank, journal)
        return 4
    journal.write("finished")
    return 0


if __name__ == "__main__":
    with open(os.path.join(sys.argv[1], "plan.json"), encoding="utf-8") as file:
        sys.exit(main(json.load(file), int(os.environ["RANK"])))
