#!/usr/bin/env bash
# Runs the tests over MPI under an MPI with the ABI of MPI 5, all with the same libhvd_mpi_abi.so: the suites, a C program, whole jobs, hvdrun,
# the tests of faults with their campaign, and hvd-bench. Ends with a table of the results, for docs/testing.md. Exit code 1: a part has failed.
# Usage: bash test/mpi/abi.sh BUILD MPIEXEC [CTEST_ARGUMENTS...]
#   BUILD     a build folder with tests, such as build/dev
#   MPIEXEC   that of MPICH 5 or Intel MPI 2021.17 and newer, with libmpi_abi.so.1 in ../lib
# To try the packages of PyPI:
#   pip install --prefix DIR mpich==5.0.2               13 MB; then MPIEXEC is DIR/bin/mpiexec
#   pip install --no-deps --prefix DIR impi-rt==2021.19.*   120 MB; libfabric is Debian's (libfabric1)
set -euo pipefail
(($# >= 2)) || {
  sed -n '2,11s/^# //p' "${BASH_SOURCE[0]}" >&2
  exit 2
}
build=$(cd "$1" && pwd) mpiexec=$(realpath -s "$2")
shift 2
prefix=$(dirname "$(dirname "$mpiexec")")
module=$build/core/libhvd_mpi_abi.so
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
[[ -x $mpiexec && -e $prefix/lib/libmpi_abi.so.1 ]] || {
  printf 'abi: expected an mpiexec with ../lib/libmpi_abi.so.1, got %s\n' "$mpiexec" >&2
  exit 2
}
# check_header HEADER : every constant and prototype of third_party/mpi_abi/mpi.h is in the complete header of this MPI.
check_header() {
  python3 - "$1" third_party/mpi_abi/mpi.h <<'EOF'
import re, sys
def facts(path):
    text = re.sub(r"/\*.*?\*/", " ", open(path).read(), flags=re.DOTALL)
    squeeze = lambda words: re.sub(r"\s+", "", words)
    for name, value in re.findall(r"#define (MPI_\w+)[ \t]+(\S+)", text):
        yield name + "=" + squeeze(value)
    for name, value in re.findall(r"(MPI_\w+)\s*=\s*(-?\w+)", text):
        yield name + "=" + value
    for prototype in re.findall(r"^int P?MPI_\w+\(.*?\);", text, flags=re.MULTILINE | re.DOTALL):
        yield squeeze(prototype)
missing = sorted(set(facts(sys.argv[2])) - set(facts(sys.argv[1])))
sys.exit("\n".join(["abi: third_party/mpi_abi/mpi.h differs from " + sys.argv[1] + ":"] + missing) if missing else 0)
EOF
}
# summarise JUNIT BENCH : the table. JUNIT: ctest's report. BENCH: lines "RANKS CODE ROWS", of which ROWS have the result "ok".
summarise() {
  python3 - "$@" <<'EOF'
import re, sys
import xml.etree.ElementTree as tree
groups = {}
for case in tree.parse(sys.argv[1]).iter("testcase"):
    name = re.sub(r"[._]abi\b", "", case.get("name"))
    ranks = re.search(r"\.np(\d+)$", name)
    group = groups.setdefault(name[:ranks.start()] if ranks else name, {"ranks": [], "run": 0, "fail": 0, "notrun": 0, "seconds": 0.0})
    group["ranks"] += [ranks[1]] if ranks else []
    group[case.get("status")] += 1
    group["seconds"] += float(case.get("time"))
print("| test | ranks | passed | failed | skipped | seconds |\n| --- | --- | --- | --- | --- | --- |")
for name, group in groups.items():
    print("|", " | ".join([f"`{name}`", ", ".join(group["ranks"]) or "its own", str(group["run"]), str(group["fail"]), str(group["notrun"]),
                           f"{group['seconds']:.0f}"]), "|")
for ranks, code, rows in (line.split() for line in open(sys.argv[2])):
    print(f"| `hvd-bench collectives`, {rows} rows right | {ranks} | {int(code == '0')} | {int(code != '0')} | 0 | |")
EOF
}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cmake --build "$build" --target hvd-bench-abi | tail -n 1
failed=0
version=$("$mpiexec" --version | grep -iE 'version' | head -n 1 | tr -s ' ')
before=$(sha256sum "$module")
printf 'abi: %s\n%s\n' "$version" "$before"
[[ ! -e $prefix/include/mpi_abi.h ]] || check_header "$prefix/include/mpi_abi.h" || failed=1
export HVD_TEST_MPIEXEC=$mpiexec
ctest --test-dir "$build" -L '^abi$' --no-tests=error --output-on-failure --output-junit "$work/tests.xml" "$@" || failed=1
for ranks in 2 3 4; do
  code=0
  timeout 120 bash test/mpi/any_mpi.sh -l -n "$ranks" "$build/bench/hvd-bench-abi" collectives --min 4 --max 600000 --factor 387 --budget 0.02 \
    --least 3 --most 10 | tee "$work/bench" || code=$?
  printf '%s %s %s\n' "$ranks" "$code" "$(grep -cE '  ok$' "$work/bench")" >>"$work/benches"
  ((code == 0)) || failed=1
done
printf '\nabi: %s\n' "$version"
summarise "$work/tests.xml" "$work/benches"
sha256sum "$module"
[[ $(sha256sum "$module") == "$before" ]] || {
  printf 'abi: %s has changed meanwhile\n' "$module" >&2
  failed=1
}
exit "$failed"
