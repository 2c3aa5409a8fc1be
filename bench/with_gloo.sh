#!/usr/bin/env bash
# Measures PyTorch on gloo, then hvd-bench with those figures in its tables. bench/README.md.
#   bash bench/with_gloo.sh [BUILD [RESULTS]]        default: build/bench, BUILD/bench-results
# RANKS (2), PYTHON (of the environment that LibTorch was installed into), SIZES, STEPS and HEAP change what is measured:
#   SIZES="--min 4 --max 65536" STEPS="--sets mnist" HEAP=--retain-heap bash bench/with_gloo.sh
set -euo pipefail
cd "$(dirname "$0")/.."
build=${1:-build/bench}
results=${2:-$build/bench-results}
ranks=${RANKS:-2}
read -ra sizes <<<"${SIZES:-}"
read -ra steps <<<"${STEPS:-}"
read -ra heap <<<"${HEAP:-}"
bench=$build/bench/hvd-bench
mkdir -p "$results"

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
"$bench" shapes -o "$results/shapes.json"
"${PYTHON:-.venv/bin/python}" bench/gloo_peers.py --shapes "$results/shapes.json" -o "$results/gloo.json" --ranks "$ranks" \
  "${sizes[@]}" "${steps[@]}" "${heap[@]}"
run=(mpirun --oversubscribe --bind-to none -np "$ranks" "$bench" "${heap[@]}")
"${run[@]}" collectives --kinds allreduce "${sizes[@]}" --gloo "$results/gloo.json" --json "$results/collectives.json"
"${run[@]}" step "${steps[@]}" --gloo "$results/gloo.json" --json "$results/step.json"
