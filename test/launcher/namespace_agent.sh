#!/bin/sh
# A remote shell for mpirun, with ssh's semantics: agent [-options] HOST COMMAND...
# HOST is a network namespace. The environment is clean, as ssh's is, or a test of forwarded variables would pass wrongly.
while [ "${1#-}" != "$1" ]; do shift; done
host=$1
shift
exec env -i HOME="${HOME:-/}" SHELL=/bin/sh PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin \
  ip netns exec "$host" unshare --uts sh -c 'hostname "$0"; cd; exec sh -c "$1"' "$host" "$*"
