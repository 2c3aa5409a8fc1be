#!/usr/bin/env bash
# hvd over UCX and over MPI between two hosts, beside plain messages of both. bench/README.md.
#   bash bench/two_hosts.sh [BUILD [RESULTS]]        default: build/bench, BUILD/bench-results
# The "hosts" are network namespaces of this machine, so it has to run as root. If it may not make them, it exits with 77.
# ROUNDS (20) and OPTIONS (for `hvd-bench carriers`) change what is measured:
#   ROUNDS=5 OPTIONS="--sizes 8,1MiB" bash bench/two_hosts.sh
# With COMMAND it runs this command of hvd-bench instead, with hvd over MPI and then over UCX, beside the MPI peers:
#   COMMAND="collectives --kinds allreduce --min 1MiB --max 64MiB" bash bench/two_hosts.sh
# With JOBS it measures instead the first negotiation of this number of jobs over each (first_negotiation.cpp):
#   JOBS=40 bash bench/two_hosts.sh
set -euo pipefail
cd "$(dirname "$0")/.."
build=${1:-build/bench}
results=${2:-$build/bench-results}
read -ra options <<<"${OPTIONS:-}"
mkdir -p "$results"
bench=$(realpath "$build")/bench/hvd-bench
json=$(realpath "$results")/carriers.json

id=hvdb$$
cleanup() {
  for host in ${id}a ${id}b; do
    ip netns pids $host 2>/dev/null | xargs -r kill -9 2>/dev/null || true
    ip netns del $host 2>/dev/null || true
    rm -rf /etc/netns/$host /tmp/ompi.$host.*
  done
  ip netns del ${id}s 2>/dev/null || true
}
trap cleanup EXIT
make_hosts() {
  ip netns add ${id}s && ip -n ${id}s link add br0 type bridge && ip -n ${id}s link set br0 up || return 1
  local i
  for i in 1 2; do
    local host=${id}a
    [ $i = 1 ] || host=${id}b
    ip netns add $host && ip -n $host link set lo up && ip link add eth0 netns $host type veth peer name p$i netns ${id}s &&
      ip -n $host addr add 10.79.0.$i/24 dev eth0 && ip -n $host link set eth0 up && ip -n ${id}s link set p$i master br0 up &&
      mkdir -p /etc/netns/$host && printf '127.0.0.1 localhost\n10.79.0.1 %sa\n10.79.0.2 %sb\n' $id $id >/etc/netns/$host/hosts || return 1
  done
}
if ! make_hosts; then
  echo "two_hosts.sh: network namespaces cannot be made here" >&2
  exit 77
fi

export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
on() {
  local host=$1
  shift
  ip netns exec $host unshare --uts sh -c 'hostname "$0"; exec "$@"' $host "$@"
}
# The agent begins with a clean environment: mpirun passes on the variables that begin with OMPI_ and those that -x names.
over_mpi() {
  on ${id}a mpirun --mca plm_rsh_agent "$PWD/test/launcher/namespace_agent.sh" --mca btl_tcp_if_include eth0 \
    --mca oob_tcp_if_include eth0 --bind-to none -H ${id}a:1,${id}b:1 -np 2 "$@"
}
over_ucx() {
  on ${id}b env HVD_INIT_METHOD=tcp://10.79.0.1:29400 RANK=1 WORLD_SIZE=2 "$@" &
  on ${id}a env HVD_INIT_METHOD=tcp://10.79.0.1:29400 RANK=0 WORLD_SIZE=2 "$@"
  wait $!
}

if [ -n "${COMMAND:-}" ]; then
  read -ra command <<<"$COMMAND"
  over_mpi "$bench" --retain-heap "${command[@]}"
  over_mpi "$bench" --retain-heap --init-method tcp://10.79.0.1:29400 "${command[@]}"
  exit
fi
if [ -z "${JOBS:-}" ]; then
  over_mpi "$bench" --init-method tcp://10.79.0.1:29400 carriers --rounds "${ROUNDS:-20}" "${options[@]}" --json "$json"
  exit
fi
first=$(dirname "$bench")/first_negotiation
for _ in $(seq "$JOBS"); do
  over_mpi "$first" $(($(date +%s%N) + 1500000000))
  over_ucx "$first" $(($(date +%s%N) + 1500000000))
done | sort -k2 -g | awk -v jobs="$JOBS" '{ n = ++count[$1]; us[$1, n] = $2 }
  END {
    for (carrier in count) print carrier ": median of " count[carrier] " jobs " us[carrier, int((count[carrier] + 1) / 2)] " us"
    exit !(count["mpi"] == jobs && count["ucx"] == jobs)
  }'
