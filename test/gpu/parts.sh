# The parts of run.sh, the most informative first, in case the run is cut off. Sourced by run.sh, which defines run, measure, tests,
# needs, needs_gpu, say and fail, and $build and $results.

# name, limit in seconds, description
parts="machine 60 the host's GPUs and how they are joined
build 900 binaries without LibTorch, unless they came with a bundle
kernels 60 packing, casting and scaling on the device against the host
conformance 120 every collective on the real NCCL, one rank
one 90 a job of one rank
staged 240 jobs of 2 and 4 ranks on one GPU, through the host's memory
nccl 360 jobs of 2 and 4 ranks on one GPU, on NCCL
torch-build 900 the adapter with the host's LibTorch; built beside the parts before it
torch 300 the adapter's tests on the device: one rank, two ranks through the host, two ranks on NCCL
pack 90 time of packing beside a copy, a copy per tensor and _foreach_ calls
job-bench 180 host time of a batch at one rank and at two ranks on NCCL, and the bandwidth of the staged path
step-bench 90 how much longer a training step takes, beside DistributedDataParallel's engine
mnist 300 an example, in bf16 and fp16 through the host, and in bf16 on NCCL
fault 400 a rank of three is killed, exits or throws while NCCL's kernels wait for it
elastic 340 workers of an elastic job of three ranks on one GPU are killed, 50 times
memcheck 150 the kernels under compute-sanitizer
racecheck 150 the kernels under compute-sanitizer's race detector
simulated 400 the data plane and whole jobs on simulated devices, for a host without one too"

core_targets=(gpu_kernels_test gpu_pack_bench hvd-build-info device_test nccl_channel_test runtime_device_test cuda_api_test kernels_test)
job_targets=(gpu_job_test gpu_job_bench simulated_gpu_job_test)
nccl_targets=(gpu_nccl_conformance_test)  # and with MPI:
nccl_job_targets=(gpu_fault_test gpu_fault_program simulated_gpu_fault_test simulated_gpu_fault_program)
elastic_targets=(gpu_elastic_program simulated_gpu_elastic_program simulated_gpu_reconfigure_test hvdrun)  # with UCX, too
simulated='^(device_test|nccl_channel_test|runtime_device_test|cuda_api_test|kernels_test)$|^simulated_gpu_'
torch_build=$build/torch
torch_job=

part_machine() {
  needs_gpu || return
  run nvidia-smi --format=csv --query-gpu=name,memory.total,clocks.sm,clocks.max.sm,clocks.mem,clocks.max.mem,power.limit,ecc.mode.current
  run nvidia-smi topo -m
}

# --- Builds ----------------------------------------------------------------------------------------------------------
part_build() {
  rm -f "$build/failed"
  if [[ -e $build/PREBUILT ]]; then
    say "the bundle's binaries are taken; remove $build to build here"
    run "$build/launcher/hvd-build-info"
    return
  fi
  local targets=("${core_targets[@]}")
  if ! run cmake -G Ninja -S . -B "$build" -DCMAKE_BUILD_TYPE=Release -DHVD_WITH_CUDA=ON -DHVD_WITH_TORCH=OFF \
    -DCMAKE_BUILD_RPATH_USE_ORIGIN=ON; then
    echo "it could not be configured" >"$build/failed"
    return
  fi
  local mpi=0
  grep -q 'hvd: MPI' "$output" && mpi=1 && targets+=("${job_targets[@]}")
  if grep -q 'hvd: NCCL' "$output"; then
    targets+=("${nccl_targets[@]}")
    ((mpi == 0)) || targets+=("${nccl_job_targets[@]}")
    ((mpi == 0)) || ! grep -q 'hvd: UCX' "$output" || targets+=("${elastic_targets[@]}")
  fi
  # Build as much as possible, even if a target fails.
  run cmake --build "$build" -j "$(nproc)" -- -k 0 "${targets[@]}" || echo "its build failed" >"$build/failed"
  [[ ! -e $build/launcher/hvd-build-info ]] || run "$build/launcher/hvd-build-info"
}

# Uses the LibTorch that Torch_DIR names, else the python's own if it has CUDA, else the default of every build. Hosts may lack parts of
# the toolkit that LibTorch's CMake files search for, so the first attempt skips that search.
build_with_torch() {
  local options=(-DCMAKE_BUILD_TYPE=Release -DHVD_WITH_CUDA=ON -DHVD_WITH_TORCH=ON) prefix search
  prefix=$(python3 -c 'import torch; print(torch.utils.cmake_prefix_path if torch.version.cuda else "")' 2>/dev/null || true)
  [[ -z $prefix || -n ${Torch_DIR:-} ]] || options+=("-DTorch_DIR=$prefix/Torch")
  for search in OFF ON; do
    rm -rf "$torch_build/CMakeCache.txt" "$torch_build/CMakeFiles"
    cmake -G Ninja -S . -B "$torch_build" "${options[@]}" -DHVD_TORCH_NEEDS_TOOLKIT=$search || continue
    cmake --build "$torch_build" -j "$(nproc)" --target gpu_torch_test mnist hvdrun || return 3
    # Build the benchmark without LibTorch's NCCL if it does not build with it.
    cmake --build "$torch_build" -j "$(nproc)" --target gpu_step_bench && return 0
    cmake -DHVD_BENCH_WITH_NCCL=OFF "$torch_build" && cmake --build "$torch_build" -j "$(nproc)" --target gpu_step_bench && return 0
    return 4
  done
  return 2
}

begin_torch_build() {
  mkdir -p "$torch_build"
  export torch_build && export -f build_with_torch
  setsid timeout --kill-after=10 "$(left_in_all)" bash -c build_with_torch >"$build/build-torch.log" 2>&1 </dev/null &
  torch_job=$!
}
# Builds in the background during the parts before torch-build, if there are cores for both, because it takes minutes. No part before
# torch-build measures times.
start_torch_build() {
  [[ " ${asked[*]} " == *" torch-build "* ]] && ((gpus > 0 && $(nproc) >= 4)) || return 0
  begin_torch_build
}
end_torch_build() {
  [[ -z $torch_job ]] || end_session "$torch_job"
  torch_job=
}

part_torch_build() {
  needs_gpu || return
  local code
  [[ -n $torch_job ]] || begin_torch_build
  # wait has no timeout.
  while kill -0 "$torch_job" 2>/dev/null && (($(left) > 2)); do sleep 1; done
  if kill -0 "$torch_job" 2>/dev/null; then
    end_torch_build
    fail "stopped, and another run goes on from there; the end of $build/build-torch.log is above"
    run tail -n 20 "$build/build-torch.log"
    return
  fi
  wait "$torch_job"
  code=$?
  torch_job=
  ((code == 0)) && return
  run tail -n 40 "$build/build-torch.log"
  case $code in
    2) verdict="not run: no LibTorch to build against" ;;
    4) fail "gpu_step_bench could not be built" ;;
    *) fail "the build ended with code $code" ;;
  esac
}

# --- The core --------------------------------------------------------------------------------------------------------
part_kernels() {
  needs_gpu && needs "$build/test/gpu/gpu_kernels_test" && tests '^gpu_kernels_test$'
}

part_pack() {
  needs_gpu && needs "$build/test/gpu/gpu_pack_bench" || return
  measure "$build/test/gpu/gpu_pack_bench" resnet50
  measure "$build/test/gpu/gpu_pack_bench" gpt2
}

part_conformance() {
  needs_gpu && needs "$build/test/gpu/gpu_nccl_conformance_test" && tests '^gpu_nccl_conformance_test$'
}

part_one() {
  needs_gpu && needs "$build/test/gpu/gpu_job_test" && tests '^gpu_job_test\.one$'
}

part_staged() {
  needs_gpu && needs "$build/test/gpu/gpu_job_test" && tests '^gpu_job_test\.staged\.'
}

part_nccl() {
  needs_gpu && needs "$build/test/gpu/gpu_job_test" || return
  tests '^gpu_job_test\.hostid\.'
  tests '^gpu_job_test\.shared\.' 'NCCL lets ranks share a GPU from 2.30 on'
}

part_fault() {
  needs_gpu && needs "$build/test/gpu/gpu_fault_test" && tests '^gpu_fault_test$'
}

part_elastic() {
  needs_gpu && needs "$build/test/gpu/gpu_elastic_program" "$build/launcher/hvdrun" && tests '^gpu_elastic_test$'
}

part_job_bench() {
  needs_gpu && needs "$build/test/gpu/gpu_job_bench" || return
  # One rank neither packs nor sends. Two ranks of NCCL share a GPU if each has its own host id.
  measure mpirun -np 1 "$build/test/gpu/gpu_job_bench"
  # shellcheck disable=SC2016
  measure mpirun --oversubscribe --bind-to none -np 2 env HVD_BACKEND=nccl NCCL_NVLS_ENABLE=0 NCCL_MNNVL_ENABLE=0 NCCL_MAX_CTAS=8 \
    sh -c 'NCCL_HOSTID=hvd-$OMPI_COMM_WORLD_RANK exec "$0"' "$build/test/gpu/gpu_job_bench"
  measure mpirun --oversubscribe --bind-to none -np 2 env HVD_BACKEND=shm "$build/test/gpu/gpu_job_bench"
}

sanitize() {
  needs_gpu && needs "$build/test/gpu/gpu_kernels_test" || return
  if ! command -v compute-sanitizer >/dev/null; then
    verdict="not run: compute-sanitizer is not on PATH"
    return
  fi
  run compute-sanitizer --error-exitcode 9 "$@"
}
part_memcheck() { sanitize --tool memcheck "$build/test/gpu/gpu_kernels_test"; }
part_racecheck() { sanitize --tool racecheck "$build/test/gpu/gpu_kernels_test" --gtest_filter='*TenThousand*:*Fills*'; }

part_simulated() { needs "$build/CTestTestfile.cmake" && tests "$simulated"; }

# --- With LibTorch ---------------------------------------------------------------------------------------------------
torch_has_cuda() {
  local folder
  folder=$(sed -n 's/^Torch_DIR:[A-Z]*=//p' "$torch_build/CMakeCache.txt")
  [[ -e $folder/../../../lib/libtorch_cuda.so ]] && return
  verdict="not run: the LibTorch in $folder was built without CUDA; Torch_DIR names another"
  return 1
}

part_torch() {
  needs_gpu && needs "$torch_build/test/gpu/gpu_torch_test" && torch_has_cuda || return
  build=$torch_build tests '^gpu_torch_test'
}

part_step_bench() {
  needs_gpu && needs "$torch_build/test/gpu/gpu_step_bench" && torch_has_cuda || return
  measure "$torch_build/launcher/hvdrun" -np 1 "$torch_build/test/gpu/gpu_step_bench" --seconds 20
}

part_mnist() {
  local data=${HVD_MNIST_DATA:-/usr/share/datasets/fashion-mnist} precision
  needs_gpu && needs "$torch_build/examples/mnist" "$data" && torch_has_cuda || return
  for precision in bf16 fp16; do
    run "$torch_build/launcher/hvdrun" -np 2 "$torch_build/examples/mnist" --data "$data" --epochs 1 --device cuda --precision "$precision"
  done
  # Two ranks of NCCL share a GPU if each has its own host id.
  # shellcheck disable=SC2016
  run "$torch_build/launcher/hvdrun" -np 2 -x HVD_BACKEND=nccl -x NCCL_NVLS_ENABLE=0 -x NCCL_MNNVL_ENABLE=0 -x NCCL_MAX_CTAS=8 \
    sh -c 'NCCL_HOSTID=hvd-$RANK exec "$@"' sh "$torch_build/examples/mnist" --data "$data" --epochs 1 --device cuda --precision bf16
}
