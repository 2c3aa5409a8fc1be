#!/usr/bin/env python3
"""Compares the ten most telling ratios of hvd-bench with stored ones: a minute before and a minute after a change.

    python3 bench/gate.py [--build build/bench]      measures, prints the ratios, and exits with 1 if one is worse than stored
    python3 bench/gate.py --store                    measures and stores the ratios in bench/gate.json

A ratio is hvd's time over a peer's in the same processes, so it is steadier than a time. It differs between cores that share a cache
("near"), cores of one chip ("middle") and others ("far"), and a virtual machine may move between them while it runs. So each ratio is stored
for each state, and a row whose state changed while it was measured is not judged. Without LibTorch the steps have no rows.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile

STORED = pathlib.Path(__file__).with_name("gate.json")
# Round trip of a flag between two cores, in nanoseconds. The state is "near" below the first, "far" above the second, and "middle" between.
NEAR, FAR = 220, 350
# A ratio of the same program varies by up to this factor from one run to the next on a busy machine.
TOLERANCE = 1.35

RUNS = {
    "small": "--retain-heap collectives --kinds allreduce --min 8 --max 8 --budget 0.3",
    "medium": "--retain-heap collectives --kinds allreduce,broadcast,allgather --min 16KiB --max 1MiB --factor 64 --budget 1.2",
    "large": "--retain-heap collectives --kinds allreduce --min 16MiB --max 16MiB --loop 1 --budget 4",
    "shared": "--retain-heap collectives --kinds allreduce --shared-memory --min 16MiB --max 16MiB --loop 1 --budget 3",
    "steps": "--retain-heap step --sets small1000,resnet50 --contenders alone,hvd,mpi,mpi-chunked --budget 8",
}

# Name, run, kind or parameter set, bytes, column, peer.
RATIOS = [
    ("allreduce 8 B, loop, of MPI", "small", "allreduce", 8, "loop_ratio_to", "mpi"),
    ("allreduce 8 B, single, of MPI", "small", "allreduce", 8, "ratio_to", "mpi"),
    ("allreduce 16 KiB, loop, of MPI", "medium", "allreduce", 16 << 10, "loop_ratio_to", "mpi"),
    ("allreduce 1 MiB, single, of chunked MPI", "medium", "allreduce", 1 << 20, "ratio_to", "mpi-chunked"),
    ("broadcast 1 MiB, single, of MPI", "medium", "broadcast", 1 << 20, "ratio_to", "mpi"),
    ("allgather 1 MiB, single, of MPI", "medium", "allgather", 1 << 20, "ratio_to", "mpi"),
    ("allreduce 16 MiB, single, of chunked MPI", "large", "allreduce", 16 << 20, "ratio_to", "mpi-chunked"),
    ("allreduce 16 MiB in shared memory, of raw", "shared", "allreduce", 16 << 20, "ratio_to", "raw-shared"),
    ("step of small1000, added, of MPI", "steps", "small1000", None, "hvd_added_ratio", "mpi"),
    ("step of resnet50, added, of chunked MPI", "steps", "resnet50", None, "hvd_added_ratio", "mpi-chunked"),
]


def state_of(cores):
    """ "near", "middle", "far", or None for a row whose cores moved while it was measured. `cores` is what hvd-bench reports before and after."""
    trips = [cores[when]["round_trip_ns"] for when in ("before", "after")]
    if None in trips:
        return None
    if max(trips) < NEAR:
        return "near"
    if min(trips) > FAR:
        return "far"
    return "middle" if NEAR <= min(trips) and max(trips) <= FAR else None


def find(document, name, size, column, peer):
    """(ratio, state) of a row in a document of hvd-bench; the ratio is None if it was not measured."""
    for row in document["rows"]:
        if size is None and row.get("set") == name:
            return row["contenders"].get(peer, {}).get(column), state_of(document["cores"])
        if size is not None and row.get("kind") == name and row["bytes"] == size:
            return row[column].get(peer), state_of(row["cores"])
    return None, None


def collect(documents):
    """{name: {state: ratio}} of the ratios that were measured in a known state."""
    found = {}
    for name, run, row, size, column, peer in RATIOS:
        if run not in documents:
            continue
        ratio, state = find(documents[run], row, size, column, peer)
        if ratio is not None:
            found[name] = {state or "mixed": ratio}
    return found


def judge(measured, stored):
    """[(name, state, ratio, stored ratio or None, verdict)] in the order of RATIOS. Only "worse" is a failure."""
    rows = []
    for name, *_ in RATIOS:
        if name not in measured:
            rows.append((name, "", None, None, "not measured"))
            continue
        for state, ratio in measured[name].items():
            before = stored.get(name, {}).get(state)
            if before is None:
                verdict = "the cores moved" if state == "mixed" else "nothing stored"
            else:
                verdict = "worse" if ratio > before * TOLERANCE else "better" if ratio < before / TOLERANCE else "same"
            rows.append((name, state, ratio, before, verdict))
    return rows


def merge(stored, measured):
    """The stored ratios with those that were measured in a known state."""
    merged = {name: dict(states) for name, states in stored.items()}
    for name, states in measured.items():
        known = {state: round(ratio, 3) for state, ratio in states.items() if state != "mixed"}
        if known:
            merged.setdefault(name, {}).update(known)
    return merged


def measure(bench, run):
    """The document of a run, or None if this build has no such command."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "result.json")
        command = ["mpirun", "--bind-to", "core", "-np", "2", str(bench), "--json", path, *RUNS[run].split()]
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        result = subprocess.run(command, env=environment, capture_output=True, text=True)
        if result.returncode == 0:
            with open(path, encoding="utf-8") as file:
                return json.load(file)
    if run == "steps" and "step" in result.stderr:
        return None
    sys.exit(f"gate.py: {' '.join(command)} ended with {result.returncode}:\n{result.stderr}{result.stdout}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", type=pathlib.Path, default=pathlib.Path("build/bench"), help="a build with the preset bench")
    parser.add_argument("--store", action="store_true", help="store the ratios instead of judging them")
    parser.add_argument("--runs", default=",".join(RUNS), help="which runs, separated by commas")
    options = parser.parse_args()
    documents = {}
    for run in options.runs.split(","):
        document = measure(options.build / "bench" / "hvd-bench", run)
        if document is not None:
            documents[run] = document
    stored = json.loads(STORED.read_text(encoding="utf-8"))["ratios"] if STORED.exists() else {}
    measured = collect(documents)
    rows = judge(measured, stored)
    for name, state, ratio, before, verdict in rows:
        print(f"{name:44} {state:6} {'-' if ratio is None else f'{ratio:.3f}':>7} {'-' if before is None else f'{before:.3f}':>7}  {verdict}")
    if options.store:
        STORED.write_text(json.dumps({"ratios": merge(stored, measured)}, indent=1) + "\n", encoding="utf-8")
        return 0
    return 1 if any(row[-1] == "worse" for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
