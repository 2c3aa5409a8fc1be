# What a build can leave out. Every optional part is its own target; nothing below changes a public header.
include(GNUInstallDirs)

option(HVD_WITH_MPI "Build the MPI control plane and backend" ON)
option(HVD_WITH_TORCH "Build the LibTorch adapter, hvd::torch" ON)
option(HVD_BUILD_LAUNCHER "Build hvdrun" ON)
option(HVD_BUILD_EXAMPLES "Build the examples (they need HVD_WITH_TORCH)" ON)
option(HVD_BUILD_TESTS "Build the tests" ON)
option(HVD_BUILD_FUZZERS "Build the libFuzzer targets (Clang only)" OFF)
option(HVD_WARNINGS_AS_ERRORS "Treat compiler warnings as errors" OFF)
set(HVD_SANITIZE "" CACHE STRING "Sanitizers, as -fsanitize= takes them: address,undefined or thread; empty for none")

if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "Release, Debug or RelWithDebInfo" FORCE)
endif()
