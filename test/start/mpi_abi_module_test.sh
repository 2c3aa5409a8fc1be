#!/usr/bin/env bash
# How hvd finds the MPI that has started a process, and its errors where that MPI and the loaded one differ: Note [MPI is loaded].
# mpi_abi_module_test.sh START_PROGRAM LIBHVD_CORE LIBHVD_MPI_ABI [LIBHVD_MPI MPIRUN]     under test/mpi/any_mpi.sh
#   LIBHVD_MPI, MPIRUN   of the MPI that hvd was built with
set -euo pipefail
program=$1 core=$2 abi=$3 native=${4:-} mpirun=${5:-}
library=$(dirname "$(dirname "$HVD_TEST_MPIEXEC")")/lib/libmpi_abi.so.1
source "$(dirname "$0")/module_test.sh"
# alone NAME=VALUE... : start_program as one process, with the libhvd_core.so in $work.
alone() { env LD_LIBRARY_PATH="$work" "$@" "$program" init </dev/null 2>&1; }
# start NAME=VALUE... : the same as two ranks.
start() { LD_LIBRARY_PATH=$work "$HVD_TEST_MPIEXEC" -n 2 env "$@" "$program" init </dev/null 2>&1; }
# refuse WORD... -- COMMAND... : COMMAND must fail with a UsageError that has these words in this order.
refuse() {
  local pattern='*UsageError*' text
  while [[ $1 != -- ]]; do
    pattern+="$1*"
    shift
  done
  shift
  ! text=$("$@") || fail "no error from: $* ($text)"
  # shellcheck disable=SC2053
  [[ $text == $pattern ]] || fail "expected $pattern from: $*, got: $text"
}

cp "$core" "$work/libhvd_core.so.0"
cp "$abi" "$work/"
text=$(start A=b) || fail "two ranks failed: $text"
[[ $text == *"OK 0 2 0 2 mpi mpi://"* && $text == *"OK 1 2 1 2 mpi mpi://"* ]] || fail "two ranks printed: $text"
text=$(start HVD_MPI_LIBRARY="$library" LD_PRELOAD="$library") || fail "a program with the same library failed: $text"

refuse PMI_RANK=0 libmpi_abi.so.1 -- alone PMI_RANK=0 PMI_SIZE=2 MPI_LOCALRANKID=0
refuse /no/such/mpi -- start HVD_MPI_LIBRARY=/no/such/mpi
other=${library%/*}/libmpi.so.12
if [[ -e $other ]]; then
  refuse "$other" libhvd_mpi_abi.so libmpi_abi.so.1 -- start LD_PRELOAD="$other"
  refuse "$other" "expected a libmpi_abi.so.1" -- start HVD_MPI_LIBRARY="$other"
  refuse "several MPI libraries" "$other" "$library" -- start LD_PRELOAD="$other $library"
fi

[[ -n $native ]] || exit 0
cp "$native" "$work/"
other=$(ldd "$native" | sed -n 's/.*=> \(.*\/libmpi\.so[^ ]*\).*/\1/p')
[[ -n $other ]] || fail "no libmpi in $native"
text=$(start A=b) || fail "two ranks beside libhvd_mpi.so failed: $text"
[[ $text == *"OK 1 2 1 2 mpi mpi://"* ]] || fail "two ranks beside libhvd_mpi.so printed: $text"
refuse "${other##*/}" libmpi_abi.so.1 -- alone PMI_RANK=0 PMI_SIZE=2 MPI_LOCALRANKID=0
refuse "$other" HVD_MPI_LIBRARY "$library" -- start LD_PRELOAD="$other" HVD_MPI_LIBRARY="$library"
refuse "MPICH's or Intel MPI's launcher" PMI_SIZE=2 "Open MPI" -- start LD_PRELOAD="$other"
under_open_mpi() { LD_LIBRARY_PATH=$work "$mpirun" --oversubscribe -np 2 env LD_PRELOAD="$library" "$program" init </dev/null 2>&1; }
refuse "Open MPI's launcher" OMPI_COMM_WORLD_SIZE=2 "MPI" -- under_open_mpi
