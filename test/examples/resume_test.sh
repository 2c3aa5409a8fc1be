#!/usr/bin/env bash
# The example resume: stopped in mid-epoch and started again, it prints the lines of an uninterrupted run.
# Usage: resume_test.sh RESUME HVDRUN [OPTIONS...]
set -euo pipefail
resume=$1
hvdrun=("${@:2}")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

"${hvdrun[@]}" -np 2 "$resume" "$folder/whole" | grep -o 'epoch .*' >"$folder/whole.txt"
for stop in 5 11 0; do
  "${hvdrun[@]}" -np 2 "$resume" "$folder/parts" "$stop" | grep -o 'epoch .*' >>"$folder/parts.txt"
done
diff "$folder/whole.txt" "$folder/parts.txt"
test "$(wc -l <"$folder/whole.txt")" -eq 24  # 3 epochs of 125 samples on each rank in batches of 16

# Another number of ranks shares the rest of the third epoch's samples.
"${hvdrun[@]}" -np 2 "$resume" "$folder/wider" 20 >/dev/null
"${hvdrun[@]}" -np 3 "$resume" "$folder/wider" | grep -o 'epoch .*' >"$folder/wider.txt"
grep -q '^epoch 2 step 21 ' "$folder/wider.txt"
test "$(wc -l <"$folder/wider.txt")" -eq 3  # 122 samples are left, 41 on each rank
echo "resumed runs repeat the one that was not stopped"
