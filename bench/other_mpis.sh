#!/usr/bin/env bash
# hvd's collectives beside those of Open MPI, MPICH and Intel MPI, each in a separate run, with one table at the end. bench/README.md.
#   bash bench/other_mpis.sh [BUILD [RESULTS]]        default: build/bench, BUILD/bench-results
# MPICH comes from third_party/setup.sh. Intel MPI is installed from PyPI into .venv/impi (120 MB) unless it is there.
# OPTIONS changes what is measured:
#   OPTIONS="--kinds broadcast --min 1KiB --max 64MiB --budget 2" bash bench/other_mpis.sh
set -euo pipefail
cd "$(dirname "$0")/.."
build=${1:-build/bench}
results=${2:-$build/bench-results}
read -ra options <<<"${OPTIONS:---kinds allreduce --min 1KiB --max 64MiB --budget 1}"
mkdir -p "$results"
[[ -x .venv/impi/bin/mpiexec ]] || .venv/bin/python -m pip install --quiet --no-deps --prefix .venv/impi 'impi-rt==2021.19.*'
cmake --build "$build" --target hvd-bench hvd-bench-abi | tail -n 1

export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
arguments=(--retain-heap collectives "${options[@]}")
mpirun --bind-to core -np 2 "$build/bench/hvd-bench" --json "$results/open-mpi.json" "${arguments[@]}" >/dev/null
for mpi in mpich impi; do
  HVD_TEST_MPIEXEC=$PWD/.venv/$mpi/bin/mpiexec bash test/mpi/any_mpi.sh -l -n 2 "$build/bench/hvd-bench-abi" --json "$results/$mpi.json" \
    "${arguments[@]}" >/dev/null
done

# Columns: hvd's time over each MPI's, in single calls and in loops. Each row depends on the distance of the cores during the run of its MPI.
python3 - "$results" <<'EOF'
import json, sys
names = ["open-mpi", "mpich", "impi"]
documents = {name: json.load(open(f"{sys.argv[1]}/{name}.json")) for name in names}
rows = {name: {(row["kind"], row["bytes"]): row for row in document["rows"]} for name, document in documents.items()}
def text(value):
    return "-" if value is None else f"{value:.2f}"
def distance(row):
    return "..".join(f"{row['cores'][when]['round_trip_ns'] or 0:.0f}" for when in ("before", "after"))
print("hvd's time over the peer's; ns: round trip between the cores, before and after")
print(f"{'':12}{'bytes':>10} ", "".join(f"| {name:>9} ns   us  single   loop  chunked " for name in names))
for kind, size in rows[names[0]]:
    line = f"{kind:12}{size:10} "
    for name in names:
        row = rows[name][kind, size]
        single, loop = row["ratio_to"], row["loop_ratio_to"]
        line += (f" | {distance(row):>10} {text(row['contenders']['hvd']['p50_us']):>8} {text(single['mpi']):>5} {text(loop['mpi']):>5} "
                 f"{text(single['mpi-chunked']):>6} ")
    print(line)
EOF
