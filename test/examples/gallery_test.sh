#!/usr/bin/env bash
# Runs an example, and checks the numbers that it prints: they are wrong if the example, or the part of hvd that it shows, is broken.
# Usage: gallery_test.sh EXAMPLE FOLDER HVDRUN SOURCES     (FOLDER has the programs, SOURCES is examples/)
set -euo pipefail
example=$1 folder=$2 hvdrun=$3 sources=$4
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
source "$(dirname "$0")/idx_files.sh"

fail() {
  printf '%s: %s; the output:\n' "$example" "$*" >&2
  cat "$work/out" >&2
  exit 1
}

# run RANKS [ARGUMENTS...]: runs the example, and leaves its output in $work/out.
run() {
  "$hvdrun" -np "$1" "$folder/$example" "${@:2}" >"$work/out" 2>&1 </dev/null || fail "failed on $1 ranks"
}

# number PATTERN: prints the number that the group of an extended regular expression matches in the last such line.
number() {
  local found
  found=$(sed -nE "s/^.*$1.*$/\1/p" "$work/out" | tail -n 1)
  [[ -n $found ]] || fail "no line matches '$1'"
  printf '%s\n' "$found"
}

# holds EXPRESSION: fails unless awk evaluates it to true.
holds() { awk "BEGIN { exit !($1) }" || fail "expected $1"; }
# close A B TOLERANCE
close() { holds "($1) - ($2) < $3 && ($2) - ($1) < $3"; }
contains() { grep -qE "$1" "$work/out" || fail "no line matches '$1'"; }

case $example in
  accumulation)
    run 2
    whole=$(number '^.*whole batches +loss ([0-9.]+),')
    counted=$(number '^.*counted passes +loss ([0-9.]+),')
    guarded=$(number '^.*guarded passes +loss ([0-9.]+),')
    holds "$whole < 0.5"
    close "$whole" "$counted" 0.0001
    close "$whole" "$guarded" 0.0001
    (($(grep -c 'weights equal on 2 ranks' "$work/out") == 3)) || fail "weights differ"
    # 161 float32, and a few bytes for comparisons: a reduction in each pass would be four times as much.
    for way in whole counted guarded; do
      holds "$(number "$way .*, ([0-9]+) bytes reduced") < 1000"
    done
    ;;
  elastic)  # as an ordinary job; test/elastic has the others
    run 3
    contains 'step 0: 0 -> 3 ranks'
    contains 'y = 3\.0000 x \+ -1\.0000, loss [0-9.]+e-[0-9]+, on 3 ranks'
    ;;
  gan)
    run 2
    close "$(number 'mean ([0-9.-]+),')" 3 0.3
    close "$(number 'deviation ([0-9.]+);')" 0.5 0.25
    contains 'both models are equal on 2 ranks'
    ;;
  gradient_hook)
    run 2
    first=$(number 'step +0 +loss ([0-9.]+)') last=$(number 'step 400 +loss ([0-9.]+)')
    holds "$last < 0.1 * $first"
    close "$(number '] ([0-9.]+) % of the gradients were sent')" 10 0.5
    contains 'weights are equal on 2 ranks'
    ;;
  launch)
    "$folder/launch" 3 >"$work/out" 2>&1 || fail "failed"
    for rank in 0 1 2; do
      holds "$(number "rank $rank: loss [0-9.]+, then ([0-9.]+)") < 0.1 * $(number "rank $rank: loss ([0-9.]+),")"
    done
    contains 'weights are identical on 3 ranks'
    ;;
  minimal)
    run 1
    alone=$(number 'step +20 +loss ([0-9.]+)')
    run 3
    # Without scale_loss() the steps would be three times as long.
    close "$alone" "$(number 'step +20 +loss ([0-9.]+)')" "0.6 * $alone"
    holds "$(number 'step 100 +loss ([0-9.]+)') < 0.1"
    contains 'weights are identical on 3 ranks'
    ;;
  mixed_precision)
    idx_files "$work" train 640
    run 2 "$work"
    full=$(number 'Float +loss ([0-9.]+),')
    holds "$full < 0.5"
    close "$full" "$(number 'BFloat16 +loss ([0-9.]+),')" 0.02
    close "$full" "$(number 'Half +loss ([0-9.]+),')" 0.15
    contains 'Float .* 0 steps skipped'
    contains 'BFloat16 .* 0 steps skipped'
    # Each skipped step halves the scale, which begins with 2^30.
    skipped=$(number 'Half .* ([0-9]+) steps skipped')
    holds "$skipped >= 1 && $skipped <= 20"
    holds "$(number 'Half .* scale ([0-9]+)') == 2 ^ (30 - $skipped)"
    (($(grep -c 'weights equal on 2 ranks' "$work/out") == 3)) || fail "weights differ"
    ;;
  process_sets)
    run 4
    first=$(number 'first model ([0-9.]+),') second=$(number 'second model ([0-9.]+),') mean=$(number 'their mean ([0-9.]+)')
    holds "$first < 0.05 && $second < 0.05"
    holds "$mean <= ($first + $second) / 2 + 0.00001"
    contains 'weights are equal within each set, and different between the sets'
    ;;
  distributed)
    lines=$(diff "$sources/single.cpp" "$sources/distributed.cpp" | grep -c '^[<>]' || true)
    ((lines >= 1 && lines <= 10)) || fail "single.cpp and distributed.cpp differ in $lines lines, expected at most 10"
    idx_files "$work" train 1600
    idx_files "$work" t10k 200
    OMP_NUM_THREADS=1 "$folder/single" "$work" >"$work/out"
    loss=$(number 'epoch 2: test loss ([0-9.]+),') accuracy=$(number 'epoch 2: .* accuracy ([0-9.]+)')
    holds "$loss < 0.5 && $accuracy > 0.9"
    for ranks in 1 2 4; do
      run "$ranks" "$work"
      close "$loss" "$(number 'epoch 2: test loss ([0-9.]+),')" 0.0002
      close "$accuracy" "$(number 'epoch 2: .* accuracy ([0-9.]+)')" 0.0001
      (($(grep -c 'test loss' "$work/out") == 2)) || fail "more than one rank has printed"
    done
    ;;
  sampler)
    run 3
    holds "$(number 'epoch 9 +loss ([0-9.]+)') < 0.0001"
    contains '3 ranks used all samples in every epoch'
    ;;
  sharded_transformer)
    run 3
    holds "$(number 'step 120 +loss ([0-9.]+)') < 0.05"
    contains '3 ranks have one model, and at most 3[345] % of the state each'
    ;;
  sync_batch_norm)
    run 3
    holds "$(number 'step 100 +loss ([0-9.]+)') < 0.2 * $(number 'step +0 +loss ([0-9.]+)')"
    contains '3 ranks evaluate one model'
    ;;
  without_torch)
    run 3
    contains 'y = 3\.0000 x \+ -1\.0000, loss [0-9.]+e-[0-9]+, on 3 ranks'
    grep -o 'y = .*' "$work/out" >"$work/cpp"
    example=c_interface
    run 3
    grep -o 'y = .*' "$work/out" | diff - "$work/cpp" || fail "the programs in C and in C++ have different results"
    ;;
  *)
    echo "gallery_test.sh: there is no check for '$example'" >&2
    exit 2
    ;;
esac
echo "$example: ok"
