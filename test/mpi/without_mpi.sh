#!/usr/bin/env bash
# Builds hvd on a machine without an MPI and runs jobs under an MPI with the ABI of MPI 5. The machine's own MPI is hidden in a mount
# namespace, so this needs root. It builds the core and hvdrun anew in BUILD.
# Usage: bash test/mpi/without_mpi.sh BUILD MPIEXEC...
#   BUILD     a build folder of its own, such as build/without-mpi
#   MPIEXEC   of MPICH 5 or Intel MPI, with libmpi_abi.so.1 in ../lib
set -euo pipefail
(($# >= 2)) || {
  sed -n '2,6s/^# //p' "${BASH_SOURCE[0]}" >&2
  exit 2
}
if [[ -z ${HVD_TEST_MPI_HIDDEN:-} ]]; then
  HVD_TEST_MPI_HIDDEN=1 exec unshare --mount bash "${BASH_SOURCE[0]}" "$@"
fi
fail() {
  printf 'without_mpi: %s\n' "$*" >&2
  exit 1
}
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
build=$1
shift
shopt -s nullglob
for folder in /usr/lib/*/openmpi /usr/lib/*/mpich /usr/include/*/openmpi /usr/include/*/mpich; do
  [[ ! -d $folder ]] || mount -t tmpfs none "$folder"
done
for file in /usr/lib/*/libmpi*.so* /usr/lib/*/libmpich*.so* /usr/lib/*/pkgconfig/{mpi,ompi,orte}*.pc /usr/bin/{mpi,orte,ompi}*; do
  file=$(readlink -f "$file") || continue  # a link into a folder that is hidden
  [[ ! -f $file ]] || mount --bind /dev/null "$file"
done
! mpirun --version >/dev/null 2>&1 || fail "mpirun still runs"

cmake --preset dev -B "$build" -DHVD_WITH_TORCH=OFF | grep -i 'mpi' || true
cmake --build "$build" --target hvdrun start_program | tail -n 1
[[ -e $build/core/libhvd_mpi_abi.so ]] || fail "no libhvd_mpi_abi.so"
[[ ! -e $build/core/libhvd_mpi.so ]] || fail "libhvd_mpi.so was built too"
sha256sum "$build/core/libhvd_mpi_abi.so"
start=$(realpath "$build/test/start/start_program")
for mpiexec in "$@"; do
  HVD_TEST_MPIEXEC=$mpiexec bash test/start/mpi_abi_module_test.sh "$start" "$build/core/libhvd_core.so" "$build/core/libhvd_mpi_abi.so"
  for command in "$mpiexec -n 3" "env HVD_MPIRUN=$mpiexec $build/launcher/hvdrun --controller mpi -np 3"; do
    # shellcheck disable=SC2086
    text=$($command "$start" work </dev/null 2>&1) || fail "$command failed: $text"
    [[ $(grep -cE 'OK [0-2] 3 [0-2] 3 mpi mpi://' <<<"$text") == 6 ]] || fail "$command printed: $text"
  done
  printf 'without_mpi: passed under %s\n' "$mpiexec"
done
