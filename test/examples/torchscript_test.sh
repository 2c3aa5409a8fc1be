#!/usr/bin/env bash
# The example that trains an exported model: Python exports it, two ranks train it on Fashion-MNIST, and Python uses the result.
# Usage: torchscript_test.sh TORCHSCRIPT HVDRUN PYTHON FOLDER    (FOLDER is examples/torchscript)
# Ends with 77, which ctest takes for a skipped test, without Python's safetensors or the data set.
set -euo pipefail

program=$1 hvdrun=$2 python=$3 folder=$4
data=/usr/share/datasets/fashion-mnist
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

fail() {
  printf 'torchscript_test: %s\n' "$*" >&2
  exit 1
}

"$python" -c 'import torch, safetensors.torch' 2>/dev/null || exit 77
[[ -d $data ]] || exit 77

"$python" -B "$folder/export_model.py" "$work/net.pt" >/dev/null
"$hvdrun" -np 2 "$program" "$work/net.pt" "$work/trained" >"$work/out" 2>&1 </dev/null ||
  fail "training failed: $(cat "$work/out")"
accuracy=$(sed -n 's/^.*test accuracy \([01]\.[0-9]*\) after 300 steps$/\1/p' "$work/out")
[[ $accuracy > 0.75 ]] || fail "the model did not learn: $(cat "$work/out")"
"$python" -B "$folder/use_model.py" "$work/trained.pt" "$work/trained.safetensors" >"$work/out" 2>&1 ||
  fail "Python: $(cat "$work/out")"
echo "torchscript_test: ok, accuracy $accuracy"
