#!/usr/bin/env bash
# The MNIST example on a small generated data set: the network learns, its accuracy does not depend on the number of ranks that
# test, and a resumed run has the result of an uninterrupted one.
# Usage: mnist_test.sh MNIST HVDRUN [OPTIONS...]
set -euo pipefail

mnist=$1
hvdrun=("${@:2}")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

fail() {
  printf 'mnist_test: %s\n' "$*" >&2
  exit 1
}

source "$(dirname "$0")/idx_files.sh"

# train RANKS OPTIONS... : trains, and writes the output to $work/out.
train() {
  "${hvdrun[@]}" -np "$1" "$mnist" --data "$work/data" --batch-size 8 "${@:2}" >"$work/out" 2>&1 </dev/null ||
    fail "training failed: $(cat "$work/out")"
}
accuracy() { sed -n 's/^.*test accuracy \([01]\.[0-9]\{4\}\)$/\1/p' "$work/out"; }

# The last epoch's mean loss, over all samples.
loss() { sed -n 's/^.*epoch 2\/2: mean loss \([0-9.]*\),.*$/\1/p' "$work/out"; }

mkdir "$work"/{data,whole,cut,stopped}
idx_files "$work/data" train 403
idx_files "$work/data" t10k 101
gzip "$work/data/t10k-images-idx3-ubyte"

# Two epochs in one run, and in two runs.
train 2 --epochs 2 --checkpoints "$work/whole"
whole=$(accuracy) whole_loss=$(loss)
[[ $(tail -n 1 "$work/out") == *"test accuracy $whole" ]] || fail "the last line is not the accuracy: $(tail -n 1 "$work/out")"
[[ $whole > 0.9 ]] || fail "the network did not learn: $(cat "$work/out")"
[[ -n $whole_loss ]] || fail "no loss: $(cat "$work/out")"
train 2 --epochs 1 --checkpoints "$work/cut"
train 2 --epochs 2 --checkpoints "$work/cut" --workers 1
grep -q "resumed after step 26, in epoch 2" "$work/out" || fail "it started from the beginning: $(cat "$work/out")"
[[ $(accuracy) == "$whole" ]] || fail "accuracy $(accuracy) after a resume, $whole without"
[[ $(loss) == "$whole_loss" ]] || fail "loss $(loss) after a resume, $whole_loss without"

# Ended by SIGTERM at any point, and started again.
"${hvdrun[@]}" -np 2 --grace 60 "$mnist" --data "$work/data" --batch-size 8 --epochs 2 --checkpoints "$work/stopped" >"$work/out" 2>&1 \
  </dev/null &
job=$!
for ((i = 0; i < 600; ++i)); do
  ! grep -q "epoch 1/2" "$work/out" || break
  sleep 0.1
done
kill -TERM "$job" 2>/dev/null || true  # it may have ended
wait "$job" || true
grep -q "stopped by SIGTERM" "$work/out" || [[ -n $(accuracy) ]] || fail "neither stopped nor finished: $(cat "$work/out")"
train 2 --epochs 2 --checkpoints "$work/stopped"
grep -q "resumed after step" "$work/out" || fail "it started from the beginning: $(cat "$work/out")"
[[ $(accuracy) == "$whole" ]] || fail "accuracy $(accuracy) after SIGTERM, $whole without"

# No epoch left: only the test runs, with 101 images on 1, 2 and 3 ranks.
for ranks in 1 2 3; do
  train "$ranks" --epochs 2 --checkpoints "$work/whole"
  [[ $(accuracy) == "$whole" ]] || fail "accuracy $(accuracy) on $ranks ranks, $whole on 2"
done
OMP_NUM_THREADS=1 "$mnist" --data "$work/data" --epochs 2 --checkpoints "$work/whole" >"$work/out" || fail "failed alone"
[[ $(accuracy) == "$whole" ]] || fail "accuracy $(accuracy) without a launcher, $whole with"

# In 16 bits, with and without scaled losses.
train 2 --epochs 2 --device cpu --precision bf16
[[ $(accuracy) > 0.8 ]] || fail "the network did not learn in bf16: $(cat "$work/out")"
if [[ -n ${HVD_TEST_LONG:-} ]]; then
  train 2 --epochs 2 --device cpu --precision fp16
  [[ $(accuracy) > 0.8 ]] || fail "the network did not learn in fp16: $(cat "$work/out")"
else
  # A processor without fp16 arithmetic takes a tenth of a second per image, so this run has few images.
  rm "$work/data/"*
  idx_files "$work/data" train 48
  idx_files "$work/data" t10k 16
  train 2 --epochs 1 --device cpu --precision fp16
  [[ -n $(accuracy) ]] || fail "no accuracy after training in fp16: $(cat "$work/out")"
fi

# An error is one clear line and the exit code 1.
code=0
"${hvdrun[@]}" -np 2 "$mnist" --data "$work/none" >"$work/out" 2>&1 </dev/null || code=$?
((code == 1)) || fail "exit code $code without a data set: $(cat "$work/out")"
grep -q "rank [01]: neither 'train-images-idx3-ubyte' nor" "$work/out" || fail "no clear message: $(cat "$work/out")"
code=0
CUDA_VISIBLE_DEVICES='' "${hvdrun[@]}" -np 2 "$mnist" --data "$work/data" --device cuda >"$work/out" 2>&1 </dev/null || code=$?
((code == 1)) || fail "exit code $code for --device cuda without a GPU: $(cat "$work/out")"
grep -q "rank [01]: --device cuda: expected a GPU" "$work/out" || fail "no clear message: $(cat "$work/out")"
echo "mnist_test: ok"
