#!/usr/bin/env bash
# Sets the machine up, builds with warnings as errors, and runs every test: the debug build with all labels, then unit and sim
# under AddressSanitizer and UBSan, unit and sim under ThreadSanitizer, then the fuzz targets for a short while.
# Usage: bash test/run.sh [dev|asan-ubsan|tsan|fuzz]...     without a name: all of them.
# Goes on after a failure; the summary at the end holds ctest's closing line of each part, and the exit code tells.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
jobs=$(nproc)
summary=()
failed=0
targets=()
log=$(mktemp)
trap 'rm -f "$log"' EXIT

section() { printf '\n=== %s (at %d:%02d)\n' "$1" $((SECONDS / 60)) $((SECONDS % 60)); }

# record PART RESULT TEXT
record() {
  summary+=("$1:" "$3")
  [[ $2 == passed ]] || failed=1
}

# build PART CONFIGURE_ARGUMENTS... : configures and builds build/PART, or only its "${targets[@]}"; records a failure.
build() {
  local part=$1
  shift
  section "$part: build"
  if cmake "$@" >"$log" 2>&1 && cmake --build "build/$part" -j "$jobs" "${targets[@]}" >"$log" 2>&1; then
    tail -n 1 "$log"
    return 0
  fi
  tail -n 60 "$log"
  record "$part" failed "the build failed"
  return 1
}

# run_tests PART CTEST_ARGUMENTS... : runs ctest in build/PART and records its closing line.
run_tests() {
  local part=$1 result=passed wrapper=()
  shift
  # The sanitizers of GCC 12 fail at random where the kernel randomises addresses more than they expect.
  if [[ $part == *san ]] && setarch -R true 2>/dev/null; then
    wrapper=(setarch -R)
  fi
  section "$part: ctest"
  "${wrapper[@]}" ctest --test-dir "build/$part" --output-on-failure --no-tests=error "$@" </dev/null 2>&1 |
    tee "$log" || result=failed
  record "$part" "$result" "$(grep -E 'tests passed,|^No tests were found' "$log" | tail -n 1)"
}

run_dev() {
  build dev --preset dev && run_tests dev -LE large -j "$jobs"
}

# The dev part runs all seeds of the simulations. They have one thread, so ThreadSanitizer finds little in them.
run_asan_ubsan() {
  build asan-ubsan --preset asan-ubsan && HVD_SIM_SEEDS=300 run_tests asan-ubsan -L 'unit|sim' -j "$jobs"
}

run_tsan() {
  build tsan --preset tsan && HVD_SIM_SEEDS=40 run_tests tsan -L 'unit|sim' -j "$jobs"
}

run_fuzz() {
  local clang targets=(--target decode_fuzzer)
  clang=$(compgen -c clang++ | grep -E '^clang\+\+(-[0-9]+)?$' | sort -V | tail -n 1)
  build fuzz -S . -B build/fuzz -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo -DCMAKE_CXX_COMPILER="$clang" \
    -DCMAKE_C_COMPILER="${clang/clang++/clang}" -DHVD_BUILD_FUZZERS=ON -DHVD_WITH_TORCH=OFF -DHVD_WITH_MPI=OFF \
    -DHVD_BUILD_LAUNCHER=OFF && run_tests fuzz -R decode_fuzzer
}

section "setup"
bash third_party/setup.sh --fuzz || exit 1

parts=("$@")
((${#parts[@]})) || parts=(dev asan-ubsan tsan fuzz)
for part in "${parts[@]}"; do
  case $part in
    dev | asan-ubsan | tsan | fuzz) "run_${part/-/_}" ;;
    *) record "$part" failed "unknown (known: dev asan-ubsan tsan fuzz)" ;;
  esac
done

section "summary"
printf '%s\n' "${summary[@]}"
exit "$failed"
