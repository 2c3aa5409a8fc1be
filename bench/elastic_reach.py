#!/usr/bin/env python3
"""Measures the repairs of elastic jobs under hvdrun: the rows of docs/elastic.md.

    bench/elastic_reach.py --build build/bench --json elastic.json              all rows, 1,000 kills: about 15 minutes
    bench/elastic_reach.py --build build/dev --kills 10 --rows kill stopped     some rows, fewer kills

Each row is a job of its own, of four ranks on this machine. A repair lasts from the signal until the last survivor has completed a step of a
later generation. Run it on an idle machine.
"""

import argparse
import json
import os
import pathlib
import random
import re
import signal
import statistics
import subprocess
import threading
import time

RANKS = 4
PATIENCE = 120


class Job:
    """A job under hvdrun, and the lines of its workers."""

    def __init__(self, build, options, program, peer_timeout=30):
        environment = dict(os.environ, HVD_PEER_TIMEOUT=str(peer_timeout))
        command = [build / "launcher/hvdrun", "--bind", "none", *options, build / "bench/elastic_worker", *program]
        self.lines = []
        self.changed = threading.Condition()
        self.process = subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment)
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self):
        for line in self.process.stdout:
            found = re.match(r"\[w?(\d+)\] (\w+) (.*)", line)
            if not found:
                continue
            fields = dict(field.split("=") for field in found[3].split())
            with self.changed:
                self.lines.append({"worker": int(found[1]), "kind": found[2], **{name: int(value) for name, value in fields.items()}})
                self.changed.notify_all()
        with self.changed:
            self.changed.notify_all()

    def wait_for(self, what, choose):
        """The first result of `choose` that is not empty."""
        limit = time.monotonic() + PATIENCE
        with self.changed:
            while not (found := choose(self.lines)):
                if not self.changed.wait(limit - time.monotonic()) and time.monotonic() >= limit:
                    raise SystemExit(f"elastic_reach: {what} did not happen within {PATIENCE} s")
        return found

    def wait_for_generation(self, size, after=0, worker=None):
        """The lines of the newest generation, once it is whole, has this size and a higher number than `after`."""

        def choose(lines):
            newest = max((line["generation"] for line in lines if line["kind"] == "first"), default=0)
            members = [line for line in lines if line["kind"] == "first" and line["generation"] == newest]
            # The first step of a generation is complete on all ranks when it is complete on one, so a member that dies later is counted.
            whole = newest > after and len(members) == size and members[0]["size"] == size
            return members if whole and (worker is None or any(line["worker"] >= worker for line in members)) else None

        return self.wait_for(f"a generation of {size} ranks", choose)

    def wait_for_repair(self, generation, survivors, since):
        """The time at which the last survivor has completed a step of a later generation, in nanoseconds after `since`."""

        def choose(lines):
            later = {}
            for line in lines:
                if line["kind"] == "first" and line["generation"] > generation and line["worker"] in survivors:
                    later.setdefault(line["worker"], line["at"])
            return [max(later.values()) - since] if len(later) == len(survivors) else None

        return self.wait_for("a repair", choose)[0]

    def end(self):
        self.process.send_signal(signal.SIGTERM)
        self.process.wait()
        self.reader.join()


def summary(times):
    """Milliseconds of a list of nanoseconds."""
    ordered = sorted(time / 1e6 for time in times)
    return {"count": len(ordered), "median_ms": statistics.median(ordered), "p99_ms": ordered[(len(ordered) - 1) * 99 // 100], "longest_ms": ordered[-1]}


def disturb(job, settings, count, number, oldest_victim=1, spared=0):
    """Signals one rank of a whole generation at a time, and returns how long each repair took."""
    times = []
    generation = 0
    for _ in range(count):
        members = job.wait_for_generation(RANKS, generation, oldest_victim)
        time.sleep(settings.random.uniform(0.05, 0.4))
        victims = [line for line in members if line["worker"] >= oldest_victim and line["worker"] != spared]
        victim = settings.random.choice(victims)
        survivors = {line["worker"] for line in members} - {victim["worker"]}
        since = time.monotonic_ns()
        os.kill(victim["pid"], number)
        generation = victim["generation"]
        times.append(job.wait_for_repair(generation, survivors, since))
    return times


ELASTIC = ["-np", RANKS, "--min-np", 1]


def measure_kill(settings):
    job = Job(settings.build, ELASTIC, [])
    times = disturb(job, settings, settings.kills, signal.SIGKILL)
    job.end()
    return summary(times)


def measure_large(settings):
    job = Job(settings.build, ELASTIC, [f"resident={settings.resident}"])
    disturb(job, settings, 1, signal.SIGKILL)  # its replacement is the first large worker
    times = disturb(job, settings, settings.few, signal.SIGKILL, oldest_victim=RANKS + 1)
    job.end()
    return {"resident_mib": settings.resident, **summary(times)}


def measure_stopped(settings):
    timeout = 1
    job = Job(settings.build, ELASTIC, [], peer_timeout=timeout)
    times = disturb(job, settings, settings.few, signal.SIGSTOP)
    job.end()
    return {"peer_timeout_s": timeout, **summary([time - timeout * 10**9 for time in times])}


def agent_of(worker):
    return int(pathlib.Path(f"/proc/{worker['pid']}/stat").read_text().rsplit(")", 1)[1].split()[1])


def measure_host(settings):
    """One of two pretended hosts ends with its two ranks and its agent at once. The ranks of both hosts share this machine's memory."""
    hosts = ["-H", "here:2,there:2", "--rsh", pathlib.Path(__file__).resolve().parent.parent / "test/launcher/pretended_agent.sh"]
    job = Job(settings.build, ELASTIC + hosts, [])
    times, generation = [], 0
    for _ in range(settings.few):
        members = job.wait_for_generation(RANKS, generation)
        time.sleep(settings.random.uniform(0.05, 0.4))
        agent = agent_of(settings.random.choice(members))
        lost = [line for line in members if agent_of(line) == agent]
        generation = members[0]["generation"]
        since = time.monotonic_ns()
        for pid in [agent] + [line["pid"] for line in lost]:
            os.kill(pid, signal.SIGKILL)
        survivors = {line["worker"] for line in members} - {line["worker"] for line in lost}
        times.append(job.wait_for_repair(generation, survivors, since))
    job.end()
    return summary(times)


def measure_joiner(settings):
    """The time of a survivor's step in which a joiner is admitted, including the copies of the commit."""
    job = Job(settings.build, ELASTIC, [f"state={settings.state}"])
    waits, lost = [], 0
    for _ in range(settings.few):
        members = job.wait_for_generation(RANKS)
        time.sleep(0.3)
        victim = settings.random.choice(members)
        os.kill(victim["pid"], signal.SIGKILL)
        newest = max(line["worker"] for line in members)
        admitted = job.wait_for_generation(RANKS, worker=newest + 1)
        for line in admitted:
            if line["worker"] <= newest:
                waits.append(line["waited"])
                lost += line["last"] - line["step"]
    job.end()
    return {"state_mib": settings.state, "lost_steps": lost, **summary(waits)}


def line_of(job, kind):
    found = job.wait_for(f"a line '{kind}'", lambda lines: [line for line in lines if line["kind"] == kind])[0]
    job.process.wait()
    return found


def measure_commit(settings):
    job = Job(settings.build, ELASTIC, ["steps=10", "commits=10000", "tracked=161"])
    return {"tracked": 161, "median_us": line_of(job, "commit")["median"] / 1e3}


def measure_steady(settings):
    """The step of an elastic job, and that of the same program under MPI, by turns."""
    ratios, own = [], []
    for _ in range(settings.turns):
        times = {}
        for name, options in {"elastic": ["-np", RANKS, "--min-np", RANKS], "mpi": ["-np", RANKS, "--controller", "mpi"]}.items():
            line = line_of(Job(settings.build, options, [f"steps={settings.steps}"]), "steady")
            times[name] = line["nanoseconds"] / line["steps"]
        ratios.append(times["elastic"] / times["mpi"])
        own.append(times["elastic"])
    return {"step_us": statistics.median(own) / 1e3, "ratio_to_mpi": statistics.median(ratios), "ratios": ratios}


def measure_memory(settings):
    """The resident memory of a worker that survives, after the first ten repairs and after all."""
    job = Job(settings.build, ELASTIC, [])
    disturb(job, settings, 10, signal.SIGKILL, spared=1)
    resident = lambda: max((line["at"], line["resident"]) for line in job.lines if line["kind"] == "first" and line["worker"] == 1)[1]
    early = resident()
    disturb(job, settings, max(settings.kills - 10, 1), signal.SIGKILL, spared=1)
    late = resident()
    job.end()
    return {"repairs": max(settings.kills, 11), "early_kib": early >> 10, "late_kib": late >> 10, "ratio": late / early}


ROWS = {
    "kill": measure_kill,
    "large": measure_large,
    "stopped": measure_stopped,
    "host": measure_host,
    "joiner": measure_joiner,
    "commit": measure_commit,
    "steady": measure_steady,
    "memory": measure_memory,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=lambda path: pathlib.Path(path).resolve(), required=True, help="the build folder")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--kills", type=int, default=1000, help="of the rows kill and memory")
    parser.add_argument("--few", type=int, default=10, help="repetitions of the rows large, stopped, host and joiner")
    parser.add_argument("--turns", type=int, default=5, help="of the row steady")
    parser.add_argument("--steps", type=int, default=50000, help="of a turn")
    parser.add_argument("--resident", type=int, default=4096, help="MiB of the rank that is killed in the row large")
    parser.add_argument("--state", type=int, default=100, help="MiB that a joiner receives")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", help="write the rows to this file")
    settings = parser.parse_args()
    settings.random = random.Random(settings.seed)
    results = {}
    for row in settings.rows:
        results[row] = ROWS[row](settings)
        print(f"{row}: {json.dumps(results[row])}", flush=True)
    if settings.json:
        pathlib.Path(settings.json).write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
