#!/bin/sh
# A remote shell whose hosts are all this machine: agent [-options] HOST COMMAND... What a host does is in its name.
while [ "${1#-}" != "$1" ]; do shift; done
host=$1
shift
case $host in
  dead*) echo "ssh: connect to host $host port 22: No route to host" >&2; exit 255 ;;
  bare*) echo "sh: 1: hvdrun: not found" >&2; exit 127 ;;
  empty*) exec unshare --mount sh -c 'mount -t tmpfs none "$0" && exec sh -c "$1"' "$LAUNCHER_TEST_HIDDEN" "$*" ;; # a host without that folder
  few*) ulimit -n 64 ;; # its agent has descriptors for five slots
  frail*) exec 3<&0; sh -c "cd; exec sh -c '$*'" <&3 3<&- & wait $!; exit ;; # stays beside what it runs, so that it can be killed
  late*) until [ -e "$TMPDIR/go" ]; do sleep 0.05; done ;;
  mute*) exec sleep 600 "0.${host#mute}" ;; # the number shows whose it is
esac
# As ssh does: a clean environment, and the home folder.
exec env -i HOME=/ SHELL=/bin/sh PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin sh -c "cd; exec sh -c '$*'"
