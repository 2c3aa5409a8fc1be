#!/usr/bin/env bash
# Sets the machine up, builds, and runs the tests, with warnings as errors: the dev build with all labels, then unit, sim and the fuzz
# target under AddressSanitizer and UBSan, then what has threads under ThreadSanitizer. Clang compiles these, and the default compiler
# the optimised libraries and hvdrun, in which it may warn: GCC's warnings depend on how it optimises.
# Usage: bash test/run.sh [--long] [dev|asan-ubsan|tsan|release]...     without a name: all of them.
#   --long   all seeds, all numbers of processes, whole campaigns, tensors above 2^31 elements, the examples as a project of their own,
#            and every source file compiled by itself; the default compiler compiles dev, too. Hours.
# Goes on after a failure; the summary at the end holds the time of each part, the slowest tests, those over their budget, and ctest's
# closing line of each part. The exit code tells.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
jobs=$(nproc)
summary=()
times=()
results=()
failed=0
log=$(mktemp)
trap 'rm -f "$log"' EXIT

section() { printf '\n=== %s (at %d:%02d)\n' "$1" $((SECONDS / 60)) $((SECONDS % 60)); }

# took NAME SINCE : notes how long a part took.
took() { times+=("$(printf '%-18s %3d:%02d' "$1" $(((SECONDS - $2) / 60)) $(((SECONDS - $2) % 60)))"); }

# record PART RESULT TEXT
record() {
  summary+=("$1:" "$3")
  [[ $2 == passed ]] || failed=1
}

# build PART CONFIGURE_ARGUMENTS... : configures build/PART and builds what its preset names; records a failure.
build() {
  local part=$1 since=$SECONDS
  shift
  section "$part: build"
  if cmake --preset "$part" "${build_options[@]}" "$@" >"$log" 2>&1 && cmake --build --preset "$part" -j "$jobs" >"$log" 2>&1; then
    tail -n 1 "$log"
    took "$part: build" "$since"
    return 0
  fi
  tail -n 60 "$log"
  record "$part" failed "the build failed"
  return 1
}

# run_tests PART CTEST_ARGUMENTS... : runs ctest in build/PART and records its closing line.
run_tests() {
  local part=$1 result=passed wrapper=() since=$SECONDS junit=$PWD/build/$1/tests.xml
  shift
  # The sanitizers fail at random where the kernel randomises addresses more than they expect.
  if [[ $part == *san ]] && setarch -R true 2>/dev/null; then
    wrapper=(setarch -R)
  fi
  section "$part: ctest"
  "${wrapper[@]}" ctest --test-dir "build/$part" --output-on-failure --no-tests=error --output-junit "$junit" -j "$jobs" "$@" "${test_options[@]}" \
    </dev/null 2>&1 | tee "$log" || result=failed
  took "$part: tests" "$since"
  results+=("build/$part")
  record "$part" "$result" "$(grep -E 'tests passed,|^No tests were found' "$log" | tail -n 1)"
}

run_dev() { build dev "${dev_compiler[@]}" && run_tests dev; }

run_asan_ubsan() { build asan-ubsan "${with_clang[@]}" && HVD_SIM_SEEDS=100 run_tests asan-ubsan -L 'unit|sim|fuzz'; }

# What has one thread has no races.
run_tsan() { build tsan "${with_clang[@]}" && HVD_SIM_SEEDS=100 run_tests tsan -L threads; }

run_release() { build release -DHVD_BUILD_EXAMPLES=OFF && record release passed "built"; }

build_options=()
test_options=(-LE '^long$')
parts=()
for argument in "$@"; do
  case $argument in
    --long)
      export HVD_TEST_LONG=1
      build_options=(-DCMAKE_UNITY_BUILD=OFF)
      test_options=()
      ;;
    dev | asan-ubsan | tsan | release) parts+=("$argument") ;;
    *)
      printf 'test/run.sh: unknown argument "%s" (known: --long, dev, asan-ubsan, tsan, release)\n' "$argument" >&2
      exit 2
      ;;
  esac
done
((${#parts[@]})) || parts=(dev asan-ubsan tsan release)

section "setup"
bash third_party/setup.sh --clang || exit 1
took setup 0

# Debian's clang++, or the newest clang++-N. It compiles the tests of the LibTorch adapter in a third and sanitized code in a fifth of the
# time that GCC 12 takes.
clang=$(compgen -c clang++ | grep -E '^clang\+\+(-[0-9]+)?$' | sort -V | tail -n 1)
with_clang=(-DCMAKE_CXX_COMPILER="$clang" -DCMAKE_C_COMPILER="${clang/clang++/clang}")
dev_compiler=()
[[ -n ${HVD_TEST_LONG:-} ]] || dev_compiler=("${with_clang[@]}")

for part in "${parts[@]}"; do
  "run_${part/-/_}"
done

section "times"
printf '%s\n' "${times[@]}"
((${#results[@]} == 0)) || python3 test/report_times.py "${results[@]}"
section "summary"
printf '%s\n' "${summary[@]}"
exit "$failed"
