#!/usr/bin/env bash
# hvd beside its module for MPI, without it, and beside one of another version: Note [MPI is loaded].
# mpi_module_test.sh START_PROGRAM LIBHVD_CORE OTHER_MODULE
set -euo pipefail
program=$1 core=$2 other=$3
source "$(dirname "$0")/module_test.sh"
# run NAME=VALUE... : start_program as one rank, with the libhvd_core.so in $work.
run() { env LD_LIBRARY_PATH="$work${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" "$@" "$program" init </dev/null 2>&1; }

needed=$(readelf -d "$core" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p')
[[ $needed == *libstdc++* ]] || fail "readelf shows no needed libraries of $core: $needed"
[[ $needed != *libmpi* ]] || fail "libhvd_core.so needs MPI: $needed"

cp "$core" "$work/libhvd_core.so.0"
text=$(run A=b) || fail "a rank alone failed: $text"
[[ $text == "OK 0 1 0 1 local local://" ]] || fail "a rank alone said: $text"
! text=$(run OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=0) || fail "began a job over MPI without it: $text"
[[ $text == *UsageError*OMPI_COMM_WORLD_SIZE*libhvd_mpi.so*"hvdrun --controller ucx"* ]] || fail "without the module: $text"

# Two ranks, without MPI.
run HVD_INIT_METHOD="file://$work/place" RANK=1 WORLD_SIZE=2 >"$work/rank1" &
text=$(run HVD_INIT_METHOD="file://$work/place" RANK=0 WORLD_SIZE=2) || fail "rank 0: $text"
wait $! || fail "rank 1: $(cat "$work/rank1")"
[[ $text == "OK 0 2 0 2 ucx file://"* ]] || fail "rank 0 said: $text"

cp "$other" "$work/libhvd_mpi.so"
! text=$(run OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=0) || fail "used another version's module: $text"
[[ $text == *"of version 0.0.other"* ]] || fail "another version's module: $text"
