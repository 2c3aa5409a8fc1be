# What a build can leave out. Every optional part is its own target; nothing below changes a public header.
include(GNUInstallDirs)

set(HVD_WITH_MPI AUTO CACHE STRING "Build jobs over MPI: ON (needs mpi.h), OFF, or AUTO (where mpi.h is found for that MPI; always for MPIs with the ABI of MPI 5)")
set(HVD_WITH_UCX AUTO CACHE STRING "Build the carrier of messages over UCX: ON, OFF, or AUTO (where ucp.h is found)")
option(HVD_WITH_TORCH "Build the LibTorch adapter, hvd::torch" ON)
set(HVD_WITH_CUDA AUTO CACHE STRING "Build the CUDA device: ON, OFF, or AUTO (where nvcc is found)")
set(HVD_WITH_NCCL AUTO CACHE STRING "Build the NCCL backend, which needs HVD_WITH_CUDA: ON, OFF, or AUTO (where nccl.h is found)")
set_property(CACHE HVD_WITH_MPI HVD_WITH_UCX HVD_WITH_CUDA HVD_WITH_NCCL PROPERTY STRINGS AUTO ON OFF)
set(HVD_CUDA_ARCHITECTURES "80-real;90-real;90-virtual" CACHE STRING
    "GPUs to compile for, as CMAKE_CUDA_ARCHITECTURES takes them: sm_80, sm_90, and PTX for newer ones")
option(HVD_TORCH_NEEDS_TOOLKIT "Let a LibTorch with CUDA look for all of the toolkit that it was built with; OFF where that is not installed" ON)
option(HVD_BUILD_LAUNCHER "Build hvdrun" ON)
option(HVD_BUILD_EXAMPLES "Build the examples (without HVD_WITH_TORCH only two of them)" ON)
option(HVD_BUILD_TESTS "Build the tests" ON)
option(HVD_BUNDLE_DEPENDENCIES "Link spdlog and hwloc statically and install yaml-cpp beside hvd, so that other hosts need none of them" OFF)
set(HVD_BUILD_PYTHON AUTO CACHE STRING "Build the Python package hvd: ON, OFF, or AUTO (with the tests, where the headers of LibTorch's Python are found)")
set(HVD_PYTHON_TORCH 2.13)  # as pyproject.toml requires it
option(HVD_BUILD_BENCH "Build hvd-bench and the benchmarks on a GPU (they need MPI)" ${HVD_BUILD_TESTS})
option(HVD_BUILD_FUZZERS "Build the libFuzzer targets (Clang only)" OFF)
option(HVD_WARNINGS_AS_ERRORS "Treat compiler warnings as errors" OFF)
set(HVD_CORE_OPTIONS "" CACHE STRING "Further compiler options of core/ and of the tests' simulations")
set(HVD_TEST_OPTIONS "" CACHE STRING "Further compiler options of the other tests")
set(HVD_SANITIZE "" CACHE STRING "Sanitizers, as -fsanitize= takes them: address,undefined or thread; empty for none")

if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "Release, Debug or RelWithDebInfo" FORCE)
endif()

set(hvd_contracts OFF)
if(CMAKE_BUILD_TYPE STREQUAL "Debug" OR HVD_SANITIZE)
  set(hvd_contracts ON)
endif()
option(HVD_CONTRACTS "Check what functions expect of their callers (core/base/expect.h); on in debug and sanitizer builds" ${hvd_contracts})
