#!/usr/bin/env bash
# The example of the Accelerator on a small generated data set: it learns on 1, 2 and 3 ranks, and each image of the test set counts once.
# Usage: mnist_accelerator_test.sh MNIST_ACCELERATOR HVDRUN
set -euo pipefail

program=$1
hvdrun=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
source "$(dirname "$0")/idx_files.sh"

idx_files "$work" train 1600
idx_files "$work" t10k 101

for ranks in 1 2 3; do
  "$hvdrun" -np "$ranks" "$program" "$work" 2 >"$work/out" 2>&1 </dev/null || { cat "$work/out" && exit 1; }
  grep -Eq "epoch 2: accuracy (0\\.9|1\\.0)[0-9]* on 101 images" "$work/out" || { cat "$work/out" && exit 1; }
done
OMP_NUM_THREADS=1 "$program" "$work" 1 | grep -q "epoch 1: accuracy .* on 101 images"
echo "mnist_accelerator_test: ok"
