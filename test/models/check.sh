#!/usr/bin/env bash
# Checks one configuration of a model with spin, exhaustively.
# Usage: check.sh MODEL.pml pass|deadlock|assertion [-DOPTION=VALUE ...]
# `deadlock` and `assertion` are for mutants: the check succeeds when spin finds just that.
# CC is the compiler; HVD_MODEL_MEMORY_MB (2000) and HVD_MODEL_DEPTH (100000) bound the search.
set -euo pipefail

(($# >= 2)) || { sed -n '2,5s/^# //p' "$0" >&2; exit 2; }
model=$(realpath "$1")
expected=$2
shift 2
memory=${HVD_MODEL_MEMORY_MB:-2000}

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
# spin ends with 0 when a model does not parse, hence the look at what it wrote.
spin "$@" -a "$model" >generate.txt 2>&1 && [[ -s pan.c ]] || { cat generate.txt; exit 1; }
# Not optimised: compiling costs more than it saves.
"${CC:-cc}" -O0 -w -DSAFETY -DCOLLAPSE -DVECTORSZ=2048 "-DMEMLIM=$memory" -o pan pan.c
./pan "-m${HVD_MODEL_DEPTH:-100000}" >result.txt 2>&1 || true

found=unfinished
if grep -q '^pan:.*assertion violated' result.txt; then
  found=assertion
elif grep -q '^pan:.*invalid end state' result.txt; then
  found=deadlock
elif grep -q 'errors: 0' result.txt && ! grep -qE 'Search not completed|max search depth too small|out of memory' result.txt; then
  found=pass
fi
printf '%s %s: expected %s, found %s; %s\n' "$(basename "$model")" "$*" "$expected" "$found" \
  "$(sed -n 's/^ *\([0-9.e+]*\) states, stored.*/\1 states/p' result.txt)"
if [[ $found != "$expected" ]]; then
  cat result.txt
  if compgen -G '*.trail' >/dev/null; then
    cp "$model" .
    spin "$@" -t -p "$(basename "$model")" | tail -n 200
  fi
  exit 1
fi
