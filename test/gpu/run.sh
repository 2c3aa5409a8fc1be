#!/usr/bin/env bash
# Builds everything that needs a GPU, runs its tests and benchmarks, and writes what came out to one file.
# Usage: bash test/gpu/run.sh [RESULTS]       default: build/gpu/results.txt
#   HVD_GPU_SECONDS: how long all of it may take (default 3600); what does not fit is cut off or left out, and the results say so. Every
#   line is in the results as soon as it is known, so that they are of use when the script is stopped.
# Takes .deps/env.sh when third_party/setup.sh --from has made it. Exits with 1 when something failed or was skipped on a host with a GPU,
# and with 2 without a GPU.
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
left() { echo $((${HVD_GPU_SECONDS:-3600} - SECONDS)); }
# run LIMIT COMMAND...: its output goes to the results; a failure counts, and so does taking longer than LIMIT seconds.
run() {
  local limit=$1 code
  shift
  ((limit < $(left))) || limit=$(left)
  if ((limit < 5)); then
    note "left out, HVD_GPU_SECONDS are over: $*" && failed=1
    return
  fi
  note "\$ $*"
  timeout --kill-after=10 "$limit" "$@" </dev/null 2>&1 | tee -a "$results"
  code=${PIPESTATUS[0]}
  ((code != 124 && code != 137)) || note "stopped after $limit s"
  ((code == 0)) || { note "ended with code $code, at ${SECONDS} s" && failed=1; }
}
# A test that says "no GPU" on a host that has one has not done its work.
expect_no_skips() {
  ((gpus > 0)) && grep -q '(Skipped)' "$results" || return 0
  note "tests were skipped although there is a GPU" && failed=1
}

section "machine"
note "$(date -u +%FT%TZ) $(uname -srm), $(nproc) cores, commit $(git rev-parse --short HEAD 2>/dev/null || echo unknown)"
if ! command -v nvidia-smi >/dev/null || ! nvidia-smi -L >/dev/null 2>&1; then
  note "there is no GPU here (nvidia-smi does not list one): only the build is tried"
  gpus=0
else
  gpus=$(nvidia-smi -L | wc -l)
  run 30 nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.sm,clocks.max.sm,clocks.mem,clocks.max.mem,power.limit --format=csv
fi

section "build"
targets=(gpu_kernels_test gpu_pack_bench hvd-build-info device_test nccl_channel_test runtime_device_test cuda_api_test)
options=(-DCMAKE_BUILD_TYPE=Release -DHVD_WITH_CUDA=ON -DHVD_WITH_TORCH=OFF)
if cmake -G Ninja -S . -B "$build" "${options[@]}" >"$build/configure.log" 2>&1; then
  grep 'hvd:' "$build/configure.log" | tee -a "$results"
else
  tail -n 20 "$build/configure.log" | tee -a "$results"
  exit 1
fi
grep -q '^HVD_WITH_MPI:BOOL=ON' "$build/CMakeCache.txt" && targets+=(gpu_job_test gpu_job_bench)
grep -q 'hvd: NCCL' "$build/configure.log" && targets+=(gpu_nccl_conformance_test)
if ! timeout --kill-after=10 "$(left)" cmake --build "$build" -j "$(nproc)" --target "${targets[@]}" >"$build/build.log" 2>&1; then
  note "the build failed; the end of $build/build.log:"
  tail -n 40 "$build/build.log" | tee -a "$results"
  exit 1
fi
note "built at $SECONDS s: ${targets[*]}"
run 60 "$build/launcher/hvd-build-info"

# With LibTorch, while the tests of the core run: the one that Torch_DIR names, else the python's own if it has CUDA, else as for every
# build. Hosts may lack parts of the toolkit that LibTorch's CMake files look for, so first without that search.
torch_build=$build/torch
build_with_torch() {
  local options=(-DCMAKE_BUILD_TYPE=Release -DHVD_WITH_CUDA=ON -DHVD_WITH_TORCH=ON) prefix search
  prefix=$(python3 -c 'import torch; print(torch.utils.cmake_prefix_path if torch.version.cuda else "")' 2>/dev/null || true)
  [[ -z $prefix || -n ${Torch_DIR:-} ]] || options+=("-DTorch_DIR=$prefix/Torch")
  for search in OFF ON; do
    rm -rf "$torch_build/CMakeCache.txt" "$torch_build/CMakeFiles"
    if cmake -G Ninja -S . -B "$torch_build" "${options[@]}" -DHVD_TORCH_NEEDS_TOOLKIT=$search; then
      cmake --build "$torch_build" -j "$(nproc)" --target gpu_torch_test mnist hvdrun || return 3
      # LibTorch's NCCL is worth a try, but not the rest of the benchmark.
      cmake --build "$torch_build" -j "$(nproc)" --target gpu_step_bench && return 0
      cmake -DHVD_BENCH_WITH_NCCL=OFF "$torch_build" && cmake --build "$torch_build" -j "$(nproc)" --target gpu_step_bench && return 0
      return 4
    fi
  done
  return 2
}
export -f build_with_torch
torch_build=$torch_build timeout --kill-after=10 "$(left)" bash -c build_with_torch >"$build/build-torch.log" 2>&1 </dev/null &
torch_job=$!

section "tests"
run 120 ctest --test-dir "$build" --output-on-failure -R '^(device_test|nccl_channel_test|runtime_device_test|cuda_api_test)$'
run 300 ctest --test-dir "$build" --output-on-failure -L gpu

section "LibTorch"
mnist=$torch_build/examples/mnist
data=${HVD_MNIST_DATA:-/usr/share/datasets/fashion-mnist}
wait "$torch_job"
torch_result=$?
note "the build with LibTorch ended at $SECONDS s"
if ((torch_result == 2)); then
  note "skipped: no LibTorch to build against; the end of $build/build-torch.log:"
  tail -n 20 "$build/build-torch.log" | tee -a "$results"
  ((gpus == 0)) || failed=1
elif ((torch_result != 0 && torch_result != 4)); then
  note "the build with LibTorch failed with code $torch_result; the end of $build/build-torch.log:"
  tail -n 40 "$build/build-torch.log" | tee -a "$results"
  failed=1
else
  if ((torch_result == 4)); then
    note "gpu_step_bench could not be built; the end of $build/build-torch.log:"
    tail -n 40 "$build/build-torch.log" | tee -a "$results"
    failed=1
  fi
  # Tests of the core belong to the first build.
  run 200 ctest --test-dir "$torch_build" --output-on-failure -R '^gpu_torch_test'
  torch_dir=$(sed -n 's/^Torch_DIR:[A-Z]*=//p' "$torch_build/CMakeCache.txt")
  if ((gpus > 0)) && [[ ! -e $torch_dir/../../../lib/libtorch_cuda.so ]]; then
    note "mnist and gpu_step_bench were skipped: the LibTorch in $torch_dir was built without CUDA; Torch_DIR names another"
  elif ((gpus > 0)) && [[ -d $data ]]; then
    for precision in bf16 fp16; do
      run 120 "$torch_build/launcher/hvdrun" -np 2 "$mnist" --data "$data" --epochs 1 --device cuda --precision "$precision"
    done
  elif ((gpus > 0)); then
    note "mnist was skipped: there is no data set in $data; HVD_MNIST_DATA names another folder"
  fi
fi
expect_no_skips
((gpus > 0)) || exit 2

section "benchmarks"
run 60 "$build/test/gpu/gpu_pack_bench" resnet50
run 60 "$build/test/gpu/gpu_pack_bench" gpt2
if [[ -x $build/test/gpu/gpu_job_bench ]]; then
  export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
  run 60 mpirun -np 1 "$build/test/gpu/gpu_job_bench"
  run 60 mpirun --oversubscribe --bind-to none -np 2 env HVD_BACKEND=shm "$build/test/gpu/gpu_job_bench"
fi
if ((torch_result == 0)) && [[ -e $torch_dir/../../../lib/libtorch_cuda.so ]]; then
  run 150 "$torch_build/launcher/hvdrun" -np 1 "$torch_build/test/gpu/gpu_step_bench"
fi
section "sanitizers"
if command -v compute-sanitizer >/dev/null; then
  run 150 compute-sanitizer --tool memcheck --error-exitcode 9 "$build/test/gpu/gpu_kernels_test"
  run 150 compute-sanitizer --tool racecheck --error-exitcode 9 "$build/test/gpu/gpu_kernels_test" --gtest_filter='*TenThousand*:*Fills*'
else
  note "skipped: compute-sanitizer is not on PATH"
fi

note "" && note "results: $results"
exit "$failed"
