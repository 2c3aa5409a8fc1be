#!/usr/bin/env bash
# From a fresh checkout to a trained network: sets the machine up, builds, and trains examples/mnist.cpp on two ranks.
# Options go to the program: bash examples/quickstart.sh --epochs 1     (see mnist --help)
# The option --without-mpi must come first: Open MPI is then not installed, and the ranks use UCX.
# The last line is the result: "test accuracy 0.8912", a fraction of 1.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

die() {
  printf 'quickstart: error: %s\n' "$*" >&2
  exit 1
}

# Runs a build command quietly and shows the end of its output when it fails.
quietly() {
  if ! "$@" >"$log" 2>&1; then
    tail -n 40 "$log" >&2
    return 1
  fi
}

log=$(mktemp)
trap 'rm -f "$log"' EXIT

setup=() launch=()
if [[ ${1:-} == --without-mpi ]]; then
  setup=(--without-mpi) launch=(--controller ucx)
  shift
fi
bash third_party/setup.sh "${setup[@]}"
echo "quickstart: configuring build/release"
# test/run.sh configures the same folder without the examples.
quietly cmake --preset release -DHVD_BUILD_EXAMPLES=ON || die "cmake failed; its last lines are above"
echo "quickstart: building mnist and hvdrun (some minutes the first time: LibTorch's headers are slow to compile)"
quietly cmake --build --preset release --target mnist hvdrun || die "the build failed; its last lines are above"

echo "quickstart: training on 2 ranks"
build/release/launcher/hvdrun "${launch[@]}" -np 2 build/release/examples/mnist "$@" </dev/null | tee "$log" || die "training failed"
result=$(sed -n 's/^.*\(test accuracy [0-9.]*\)$/\1/p' "$log" | tail -n 1)
[[ -n $result ]] || die "training ended without a result"
printf '%s\n' "$result"
