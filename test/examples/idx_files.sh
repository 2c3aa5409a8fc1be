# Makes small data sets for the tests of the examples. To be sourced.

# be32 N: four bytes, big-endian.
be32() { printf '%b' "$(printf '\\x%02x' $(($1 >> 24 & 255)) $(($1 >> 16 & 255)) $(($1 >> 8 & 255)) $(($1 & 255)))"; }

# idx_files FOLDER PREFIX N: a data set of N images in the idx format. Image i has a white band at the position of its label, i mod 10.
idx_files() {
  local folder=$1 images=$1/$2-images-idx3-ubyte labels=$1/$2-labels-idx1-ubyte label i
  for label in {0..9}; do
    {
      head -c $((label * 56 + 56)) /dev/zero
      head -c 112 /dev/zero | tr '\0' '\377'
      head -c $((784 - label * 56 - 168)) /dev/zero
    } >"$folder/.image$label"
    printf '%b' "\\x0$label" >"$folder/.label$label"
  done
  { printf '\0\0\10\3' && be32 "$3" && be32 28 && be32 28; } >"$images"
  { printf '\0\0\10\1' && be32 "$3"; } >"$labels"
  for ((i = 0; i < $3; ++i)); do
    cat "$folder/.image$((i % 10))" >&3
    cat "$folder/.label$((i % 10))" >&4
  done 3>>"$images" 4>>"$labels"
}
