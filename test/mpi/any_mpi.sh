#!/usr/bin/env bash
# Runs a command that needs an MPI with the ABI of MPI 5: MPICH, which setup.sh installs, or the one whose mpiexec HVD_TEST_MPIEXEC names.
# Usage: bash test/mpi/any_mpi.sh [-l] [-n RANKS] COMMAND [ARGUMENTS...]
#   -l         COMMAND is linked with libmpi_abi.so.1. hvd itself finds that library without help.
#   -n RANKS   starts COMMAND under that mpiexec. Otherwise COMMAND finds it in HVD_TEST_MPIEXEC and HVD_MPIRUN.
# Ends with 77, which ctest counts as skipped, where there is no such MPI.
set -euo pipefail
export HVD_TEST_MPIEXEC=${HVD_TEST_MPIEXEC:-$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)/.venv/mpich/bin/mpiexec}
if [[ ! -x $HVD_TEST_MPIEXEC ]]; then
  printf 'any_mpi: skipped: no %s; run third_party/setup.sh, or set HVD_TEST_MPIEXEC\n' "$HVD_TEST_MPIEXEC"
  exit 77
fi
if [[ $1 == -l ]]; then
  shift
  LD_LIBRARY_PATH=$(dirname "$(dirname "$HVD_TEST_MPIEXEC")")/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
  export LD_LIBRARY_PATH
fi
if [[ $1 == -n ]]; then
  exec "$HVD_TEST_MPIEXEC" "$@"
fi
export HVD_MPIRUN=$HVD_TEST_MPIEXEC
exec "$@"
