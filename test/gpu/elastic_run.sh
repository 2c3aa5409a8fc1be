#!/bin/bash
# elastic_run.sh HVDRUN PROGRAM STEPS LOSSES MODE: an elastic job of three ranks on GPUs. Succeeds if it has done all steps, with all losses
# in between, and prints its output.
set -u
folder=$(mktemp -d) || exit 1
trap 'rm -rf "$folder"' EXIT
output=$(HVD_TEST_NCCL_FOLDER=$folder/nccl timeout 300 "$1" -np 3 --min-np 2 "$2" "$3" "$4" "$folder" "$5" 2>&1)
code=$?
printf '%s\n' "$output"
grep -q 'skipped: no GPU' <<< "$output" && exit 77
if [[ $code -ne 0 ]]; then
  echo "hvdrun has ended with code $code"
  exit 1
fi
grep -q "DONE $3 steps, $4 losses" <<< "$output"
