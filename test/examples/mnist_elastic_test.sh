#!/usr/bin/env bash
# The elastic example on a small generated data set: alone, as an ordinary job, and as an elastic job in which a rank is killed
# and which learns nevertheless.
# Usage: mnist_elastic_test.sh MNIST_ELASTIC HVDRUN
set -euo pipefail

program=$1
hvdrun=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
source "$(dirname "$0")/idx_files.sh"
export OMP_NUM_THREADS=1

idx_files "$work" train 6400
idx_files "$work" t10k 101

learned='epoch 4: accuracy (0\.9|1\.0)'
fail() { cat "$work/out"; echo "mnist_elastic_test: $1"; exit 1; }
"$program" "$work" 1 >"$work/out" 2>&1 </dev/null || fail "alone"
grep -q "epoch 1: accuracy" "$work/out" || fail "alone: output"
"$hvdrun" -np 2 "$program" "$work" 1 >"$work/out" 2>&1 </dev/null || fail "an ordinary job"
grep -q "epoch 1: accuracy" "$work/out" || fail "an ordinary job: output"

"$hvdrun" -np 3 --min-np 2 "$program" "$work" 4 >"$work/out" 2>&1 </dev/null &
job=$!
for _ in $(seq 600); do
  grep -q 'epoch 1: accuracy' "$work/out" && break
  sleep 0.1
done
victim=$(pgrep -f "^$program $work" | tail -1 || true)
[[ -n $victim ]] && kill -KILL "$victim"
wait "$job" || fail "an elastic job"
grep -Eq "$learned" "$work/out" || fail "an elastic job: accuracy"
grep -Eq '3 -> [23] ranks' "$work/out" || fail "an elastic job: no change of the ranks"
echo "mnist_elastic_test: ok"
