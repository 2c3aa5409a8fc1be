#!/usr/bin/env bash
# The example of the Trainer on a small generated data set: it learns on 1, 2 and 3 ranks, and a run that was killed or got SIGTERM at
# any moment ends, after resumes, with the model and the logs of an undisturbed one.
# Usage: mnist_trainer_test.sh MNIST_TRAINER HVDRUN
set -euo pipefail

program=$1
hvdrun=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
source "$(dirname "$0")/idx_files.sh"

fail() {
  printf 'mnist_trainer_test: %s\n' "$*" >&2
  cat "$work/out" >&2
  exit 1
}

# train RANKS FOLDER OPTIONS... : trains, and writes the output to $work/out.
train() {
  "$hvdrun" -np "$1" --grace 60 "$program" --data "$work/data" --output_dir "$work/$2" --report_to csv --disable_progress "${@:3}" \
    >"$work/out" 2>&1 </dev/null
}

# logs FOLDER: the lines of the log but for times.
logs() { grep -v '_per_second\|runtime' "$work/$1/log.csv"; }

# same FOLDER: fails unless the model and the log are those of the undisturbed run.
same() {
  cmp "$work/whole/model.safetensors" "$work/$1/model.safetensors" || fail "the model of $1 differs"
  diff <(logs whole) <(logs "$1") || fail "the log of $1 differs"
}

mkdir "$work/data"
idx_files "$work/data" train 1600
idx_files "$work/data" t10k 101
for ranks in 1 2 3; do
  train "$ranks" "learns$ranks" --per_device_train_batch_size 16 --learning_rate 3e-3 || fail "training failed on $ranks ranks"
  grep -Eq "'eval_accuracy': (0\\.9|1)[0-9]*,.*'epoch': 2}" "$work/out" || fail "the network did not learn on $ranks ranks"
  grep -q "Num examples = 1,600" "$work/out" || fail "no header"
done

# With workers, accumulation and a loss scale; killed at random moments, also while it saves.
rm -r "$work/data" && mkdir "$work/data"
idx_files "$work/data" train 403
idx_files "$work/data" t10k 21
options=(--per_device_train_batch_size 8 --gradient_accumulation_steps 2 --dataloader_num_workers 2 --save_strategy steps --save_steps 3
         --eval_strategy steps --eval_steps 10 --logging_steps 4 --num_train_epochs 6 --max_grad_norm 0.5 --fp16)
begin=$(date +%s%N)
train 2 whole "${options[@]}" || fail "the undisturbed run failed"
tenths=$((($(date +%s%N) - begin) / 100000000 + 1))
seed=${HVD_TEST_SEED:-$$}
RANDOM=$seed
echo "seed: $seed; the undisturbed run took $tenths tenths of a second"
kills=0
for ((i = 0; i < 12; ++i)); do
  "$hvdrun" -np 2 "$program" --data "$work/data" --output_dir "$work/killed" --report_to csv --disable_progress --resume "${options[@]}" \
    >"$work/out" 2>&1 </dev/null &
  job=$!
  pause=$((RANDOM % tenths + 4))
  # The first kill comes soon after a checkpoint, so that there is one also where the run is short.
  for ((wait = 0; i == 0 && wait < 600; ++wait)); do
    [[ ! -e $work/killed/checkpoint-3 ]] || break
    sleep 0.05
  done
  ((i == 0)) || sleep "$((pause / 10)).$((pause % 10))"
  # One rank is killed; hvdrun ends the other.
  rank=$(pgrep -f "^$program .*--output_dir $work/killed " | shuf -n 1 || true)
  [[ -z $rank ]] || kill -KILL "$rank" 2>/dev/null || true
  code=0
  wait "$job" || code=$?
  ((code == 0)) && break
  kills=$((kills + 1))
done
((code == 0)) || train 2 killed --resume "${options[@]}" || fail "the last resume failed"
echo "killed $kills times"
((kills > 0)) || fail "no rank was killed"
same killed

# SIGTERM to hvdrun: the ranks save and end with code 143. The loop must not read the last run's output.
rm "$work/out"
"$hvdrun" -np 2 --grace 60 "$program" --data "$work/data" --output_dir "$work/ended" --report_to csv --disable_progress \
  --save_steps 1000 "${options[@]:0:8}" "${options[@]:10}" >"$work/out" 2>&1 </dev/null &
job=$!
for ((i = 0; i < 600; ++i)); do
  ! grep -qs "'loss'" "$work/out" || break
  sleep 0.05
done
kill -TERM "$job" 2>/dev/null || true
code=0
wait "$job" || code=$?
((code == 143)) || fail "exit code $code after SIGTERM, expected 143"
grep -q "SIGTERM was received, and $work/ended/checkpoint-[0-9]* is saved" "$work/out" || fail "no message about SIGTERM"
train 2 ended --resume --save_steps 1000 "${options[@]:0:8}" "${options[@]:10}" || fail "no resume after SIGTERM"
grep -q "Continuing from global step" "$work/out" || fail "it started from the beginning"
same ended

# An error is one clear line and the exit code 1.
code=0
train 2 killed --learning_rate 5 || code=$?
((code == 1)) || fail "exit code $code for another run's output_dir"
grep -q "has checkpoints of another run" "$work/out" || fail "no clear message"
echo "mnist_trainer_test: ok"
