#!/usr/bin/env bash
# Builds everything that needs a GPU, runs its tests and benchmarks, and writes what came out to one file.
# Usage: bash test/gpu/run.sh [RESULTS]       default: build/gpu/results.txt
# Takes .deps/env.sh when third_party/setup.sh --from has made it. Exits with 1 when something failed, and with 2 without a GPU.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 1
results=${1:-build/gpu/results.txt}
build=build/gpu
failed=0
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
# shellcheck disable=SC1091
[[ ! -e .deps/env.sh ]] || source .deps/env.sh
mkdir -p "$build" "$(dirname "$results")"
: >"$results"

note() { printf '%s\n' "$*" | tee -a "$results"; }
section() { note "" && note "=== $1"; }
# Runs a command; its output goes to the results, and a failure counts.
run() {
  note "\$ $*"
  "$@" </dev/null 2>&1 | tee -a "$results"
  local code=${PIPESTATUS[0]}
  ((code == 0)) || { note "ended with code $code" && failed=1; }
}

section "machine"
note "$(date -u +%FT%TZ) $(uname -srm), $(nproc) cores, commit $(git rev-parse --short HEAD 2>/dev/null || echo unknown)"
if ! command -v nvidia-smi >/dev/null || ! nvidia-smi -L >/dev/null 2>&1; then
  note "there is no GPU here (nvidia-smi does not list one): only the build is tried"
  gpus=0
else
  gpus=$(nvidia-smi -L | wc -l)
  run nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.sm,clocks.max.sm,clocks.mem,clocks.max.mem,power.limit --format=csv
fi

section "build"
targets=(gpu_kernels_test gpu_pack_bench hvd-build-info device_test nccl_channel_test runtime_device_test)
options=(-DCMAKE_BUILD_TYPE=Release -DHVD_WITH_CUDA=ON -DHVD_WITH_TORCH=OFF)
if cmake -G Ninja -S . -B "$build" "${options[@]}" >"$build/configure.log" 2>&1; then
  grep 'hvd:' "$build/configure.log" | tee -a "$results"
else
  tail -n 20 "$build/configure.log" | tee -a "$results"
  exit 1
fi
grep -q '^HVD_WITH_MPI:BOOL=ON' "$build/CMakeCache.txt" && targets+=(gpu_job_test)
grep -q 'hvd: NCCL' "$build/configure.log" && targets+=(gpu_nccl_conformance_test)
if ! cmake --build "$build" -j "$(nproc)" --target "${targets[@]}" >"$build/build.log" 2>&1; then
  note "the build failed; the end of $build/build.log:"
  tail -n 40 "$build/build.log" | tee -a "$results"
  exit 1
fi
note "built: ${targets[*]}"
run "$build/launcher/hvd-build-info"

section "tests"
run ctest --test-dir "$build" --output-on-failure -R '^(device_test|nccl_channel_test|runtime_device_test)$'
run ctest --test-dir "$build" --output-on-failure -L gpu

section "LibTorch"
# One that was built with CUDA: in .venv or named by Torch_DIR or CMAKE_PREFIX_PATH as for every build, or the python's own.
torch_build=$build/torch
torch_options=(-DCMAKE_BUILD_TYPE=Release -DHVD_WITH_CUDA=ON -DHVD_WITH_TORCH=ON)
torch_prefix=$(python3 -c 'import torch; print(torch.utils.cmake_prefix_path if torch.version.cuda else "")' 2>/dev/null || true)
[[ -z $torch_prefix || -n ${Torch_DIR:-}${CMAKE_PREFIX_PATH:-} ]] || torch_options+=("-DCMAKE_PREFIX_PATH=$torch_prefix")
mnist=$torch_build/examples/mnist
data=${HVD_MNIST_DATA:-/usr/share/datasets/fashion-mnist}
if ! cmake -G Ninja -S . -B "$torch_build" "${torch_options[@]}" >"$build/configure-torch.log" 2>&1; then
  note "skipped: no LibTorch to build against; the end of $build/configure-torch.log:"
  tail -n 5 "$build/configure-torch.log" | tee -a "$results"
elif ! cmake --build "$torch_build" -j "$(nproc)" --target gpu_torch_test mnist hvdrun >"$build/build-torch.log" 2>&1; then
  note "the build with LibTorch failed; the end of $build/build-torch.log:"
  tail -n 40 "$build/build-torch.log" | tee -a "$results"
  failed=1
else
  # Tests of the core belong to the first build.
  run ctest --test-dir "$torch_build" --output-on-failure -R '^gpu_torch_test'
  torch_dir=$(sed -n 's/^Torch_DIR:[A-Z]*=//p' "$torch_build/CMakeCache.txt")
  if ((gpus > 0)) && [[ ! -e $torch_dir/../../../lib/libtorch_cuda.so ]]; then
    note "mnist was skipped: the LibTorch in $torch_dir was built without CUDA; Torch_DIR names another"
  elif ((gpus > 0)) && [[ -d $data ]]; then
    for precision in bf16 fp16; do
      run "$torch_build/launcher/hvdrun" -np 2 "$mnist" --data "$data" --epochs 1 --device cuda --precision "$precision"
    done
  elif ((gpus > 0)); then
    note "mnist was skipped: there is no data set in $data; HVD_MNIST_DATA names another folder"
  fi
fi
((gpus > 0)) || exit 2

section "sanitizers"
if command -v compute-sanitizer >/dev/null; then
  run compute-sanitizer --tool memcheck --error-exitcode 9 "$build/test/gpu/gpu_kernels_test"
  run compute-sanitizer --tool racecheck --error-exitcode 9 "$build/test/gpu/gpu_kernels_test" --gtest_filter='*TenThousand*:*Fills*'
else
  note "skipped: compute-sanitizer is not on PATH"
fi

section "benchmarks"
run "$build/test/gpu/gpu_pack_bench" resnet50
run "$build/test/gpu/gpu_pack_bench" gpt2
note "" && note "results: $results"
exit "$failed"
