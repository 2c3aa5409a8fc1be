# Sourced by mpi_module_test.sh and mpi_abi_module_test.sh: $work, a folder that is removed at the end, and fail TEXT...
# shellcheck shell=bash
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fail() {
  printf '%s: %s\n' "$(basename "$0" .sh)" "$*" >&2
  exit 1
}
