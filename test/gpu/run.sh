#!/usr/bin/env bash
# Runs the tests and benchmarks that need a GPU, the most informative first, and records the results.
# Usage: bash test/gpu/run.sh [--only PART[,PART...]] [--list] [--build-only] [RESULTS]
#   RESULTS       a file, default build/gpu/results.txt. Every line is written at once, so that the file is useful
#                 when the run is cut off. Each part's output is in RESULTS.d/PART.txt too, and a table of all parts is at the end.
#   --only        these parts alone, in the order of the list; their results are added to those of earlier runs in RESULTS.
#                 --list names them all, with their limits.
#   --build-only  builds the binaries without LibTorch, for 'setup.sh --bundle', which takes them to a host that need not build.
#   HVD_GPU_SECONDS: limit of the whole run, default 3600. Parts beyond it are cut off or left out, which the table shows.
# A part that fails, hangs, or cannot be built does not end the others. Uses .deps/env.sh if 'setup.sh --from' has created it.
# Exits with 0 when all parts that were asked for passed, with 1 when one failed or, on a host with a GPU, could not run,
# and with 2 when no part failed and there is no GPU.
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cd "$here/../.." || exit 1
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
# shellcheck disable=SC1091
[[ ! -e .deps/env.sh ]] || source .deps/env.sh

only=
mode=run
results=
while (($# > 0)); do
  case $1 in
    --only) only=${2:-} && shift ;;
    --list) mode=list ;;
    --build-only) mode=build ;;
    -h | --help) sed -n '2,13s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" && exit 0 ;;
    -*) printf "run.sh: unknown option '%s' (known: --only, --list, --build-only)\n" "$1" >&2 && exit 64 ;;
    *) results=$1 ;;
  esac
  shift
done
build=${HVD_GPU_BUILD:-build/gpu}
results=${results:-$build/results.txt}
# shellcheck source=test/gpu/parts.sh
source "$here/parts.sh"

part_limit() { sed -n "s/^$1 \([0-9]*\) .*/\1/p" <<<"$parts"; }
part_names() { sed 's/ .*//' <<<"$parts"; }
if [[ $mode == list ]]; then
  printf '%-12s %6s  %s\n' part limit what
  while read -r name limit what; do printf '%-12s %4s s  %s\n' "$name" "$limit" "$what"; done <<<"$parts"
  exit 0
fi
for name in ${only//,/ }; do
  [[ -n $(part_limit "$name") ]] && continue
  printf "run.sh: there is no part '%s' (known: %s)\n" "$name" "$(part_names | paste -sd ' ')" >&2
  exit 64
done
[[ $mode == run ]] || only=build
asked=()
for name in $(part_names); do
  [[ -z $only || ,$only, == *,"$name",* ]] && asked+=("$name")
done
mkdir -p "$build" "$results.d"
table=$results.d/table
touch "$results" "$table"
if [[ -z $only ]]; then
  : >"$results"
  : >"$table"
fi
gpus=0
! command -v nvidia-smi >/dev/null || gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')

note() { printf '%s\n' "$*" | tee -a "$results"; }
left_in_all() { echo $((${HVD_GPU_SECONDS:-3600} - SECONDS)); }

# --- For the parts ---------------------------------------------------------------------------------------------------
# Variables of a part: output, deadline and verdict, which is "ok" until a command fails.
left() {
  local here=$((deadline - SECONDS)) all
  all=$(left_in_all)
  echo $((here < all ? here : all))
}
say() { printf '%s\n' "$*" | tee -a "$output" "$results"; }
# Keeps the first reason.
fail() { [[ $verdict == failed* ]] || verdict="failed: $*"; }
# run COMMAND...: runs it within the part's limit, in a separate session, so that processes that it leaves behind can be ended, such as
# ranks of an mpirun that was killed, and so that a signal to this script is handled at once.
command=
run() {
  local code limit printer
  limit=$(left)
  if ((limit < 3)); then
    fail "no time left for: $*"
    return 1
  fi
  say "\$ $*"
  rm -f "$results.d/pipe" && mkfifo "$results.d/pipe"
  tee -a "$output" "$results" <"$results.d/pipe" &
  printer=$!
  setsid timeout --kill-after=10 "$limit" "$@" </dev/null >"$results.d/pipe" 2>&1 &
  command=$!
  wait "$command"
  code=$?
  end_session "$command"
  command=
  end_soon "$printer"
  rm -f "$results.d/pipe"
  ((code == 0)) && return
  if ((code == 124 || code == 137)); then
    fail "stopped after $limit s: $*"
  else
    fail "code $code: $*"
  fi
  return 1
}
# Runs a program that measures. Such a program succeeds if it cannot measure, and then prints "skipped:".
measure() {
  local lines
  lines=$(wc -l <"$output")
  run "$@"
  ! tail -n "+$((lines + 2))" "$output" | grep -q '^skipped: ' || fail "skipped: $*"
}
end_session() {
  local file line fields
  for file in /proc/[0-9]*/stat; do
    { read -r line <"$file"; } 2>/dev/null || continue
    # shellcheck disable=SC2206
    fields=(${line##*) })  # state, parent, group, session
    [[ ${fields[3]:-} != "$1" ]] || kill -KILL "${line%% *}" 2>/dev/null
  done
}
# A process that has left the session may still hold the pipe open.
end_soon() {
  local i
  for ((i = 0; i < 30; ++i)); do
    kill -0 "$1" 2>/dev/null || break
    sleep 0.1
  done
  kill "$1" 2>/dev/null
  wait "$1" 2>/dev/null
}
# needs_gpu; needs FILE...: requirements of a part. If they return false, the part returns.
needs_gpu() {
  ((gpus > 0)) && return
  verdict="not run: no GPU"
  return 1
}
needs() {
  local file
  for file in "$@"; do
    [[ -e $file ]] && continue
    verdict="not run: $file is missing$(grep -qs . "$build/failed" && sed 's/^/; /' "$build/failed")"
    return 1
  done
}
# tests REGEX [REASON]: runs these tests of the build. A skipped test is a failure, unless it was skipped for this reason.
tests() {
  local lines log=$build/Testing/Temporary/LastTest.log reasons
  needs "$build/CTestTestfile.cmake" || return 0
  lines=$(wc -l <"$output")
  run ctest --test-dir "$build" --output-on-failure --no-tests=error -R "$1"
  tail -n "+$((lines + 1))" "$output" | grep -q '(Skipped)' || return 0
  reasons=$(grep -shE 'skipped: |no GPU' "$log" | sort -u)
  say "${reasons:-skipped without a reason}"
  if [[ -n ${2:-} && -n $reasons ]] && ! grep -qvE "$2" <<<"$reasons"; then
    [[ $verdict != ok ]] || verdict="ok, but skipped: $1 ($2)"
  else
    fail "skipped tests: $1"
  fi
}

# --- The run ---------------------------------------------------------------------------------------------------------
clocks() {
  ((gpus == 0)) || timeout 10 nvidia-smi --format=csv,noheader \
    --query-gpu=clocks.sm,clocks.mem,temperature.gpu,power.draw,clocks_throttle_reasons.active 2>/dev/null | head -n 1
}

# The commit of the binaries, which may come from a bundle.
commit() {
  if [[ -e $build/PREBUILT ]]; then
    cat "$build/PREBUILT"
  else
    git describe --always --dirty 2>/dev/null || echo unknown
  fi
}
row() { printf '%-12s %5s s  %-14s  %s\n' "$1" "$2" "$commit" "$3" >>"$table"; }

begin_run() {
  local name built=here
  [[ ! -e $build/PREBUILT ]] || built=elsewhere
  commit=$(commit)
  for name in "${asked[@]}"; do sed -i "/^$name /d" "$table"; done
  note "=== run of $(date -u +%FT%TZ): ${only:-all parts}"
  note "commit $commit, binaries built $built; $(uname -srm), $(nproc) cores"
  if ((gpus > 0)); then
    timeout 10 nvidia-smi --format=csv,noheader --query-gpu=name,driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit 2>&1 |
      tee -a "$results"
  else
    note "there is no GPU here: nvidia-smi does not list one"
  fi
  # NCCL and MPI need lo, which is down in minimal containers.
  if command -v ip >/dev/null && ! ip -o link show lo 2>/dev/null | grep -q '[<,]UP[,>]'; then
    ip link set lo up 2>/dev/null || note "lo is down and could not be set up"
  fi
  start_torch_build
}

run_part() {
  local name=$1 begin=$SECONDS limit output=$results.d/$1.txt verdict=ok deadline
  limit=$(part_limit "$name")
  deadline=$((SECONDS + limit))
  : >"$output"
  note "" && note "=== $name (at most $limit s) $(clocks)"
  if (($(left_in_all) < 5)); then
    verdict="not run: HVD_GPU_SECONDS are over"
  else
    "part_${name//-/_}"
  fi
  note "--- $name: $verdict, $((SECONDS - begin)) s"
  row "$name" "$((SECONDS - begin))" "$verdict"
}

# Prints the table in the order of the parts, including the results of earlier runs.
sorted_table() {
  local name
  for name in $(part_names); do
    grep "^$name " "$table" || printf '%-12s %5s    %-14s  %s\n' "$name" - - "not asked for"
  done
}

finish() {
  trap - EXIT INT TERM HUP
  if [[ -n $command ]]; then
    kill "$command" 2>/dev/null
    sleep 1
    end_session "$command"
  fi
  end_torch_build
  local name verdicts verdict found
  for name in "${asked[@]}"; do
    grep -q "^$name " "$table" || row "$name" 0 "not run: the run was ended before"
  done
  verdicts=$(for name in "${asked[@]}"; do grep "^$name " "$table"; done)
  note "" && note "=== all parts"
  sorted_table >"$table.sorted" && mv "$table.sorted" "$table"
  tee -a "$results" <"$table"
  for verdict in failed 'not run'; do
    found=$(sed -n "s/^\([^ ]*\) .* $verdict: .*/\1/p" <<<"$verdicts" | paste -sd ' ')
    [[ -z $found ]] || note "$verdict ($(wc -w <<<"$found") of ${#asked[@]}): $found"
  done
  note "results: $results"
  if grep -q ' failed: ' <<<"$verdicts"; then exit 1; fi
  if grep -q 'not run: no GPU' <<<"$verdicts"; then exit 2; fi
  if grep -q 'not run: ' <<<"$verdicts"; then exit 1; fi
  exit 0
}
trap finish EXIT
trap 'exit 1' INT TERM HUP

begin_run
for name in "${asked[@]}"; do run_part "$name"; done
