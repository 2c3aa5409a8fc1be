#!/usr/bin/env python3
"""Runs run.sh on a build of stand-ins: a part that fails, hangs, skips or is missing does not end the others, and the table shows it."""
import os
import pathlib
import re
import stat
import subprocess
import tempfile
import time
import unittest

HERE = pathlib.Path(__file__).resolve().parent

TESTS = """
add_test(gpu_kernels_test true)
add_test(gpu_nccl_conformance_test false)
add_test(gpu_job_test.one sleep 100)
set_tests_properties(gpu_job_test.one PROPERTIES TIMEOUT 1)
add_test(gpu_job_test.staged.np2 echo "skipped: why not")
set_tests_properties(gpu_job_test.staged.np2 PROPERTIES SKIP_REGULAR_EXPRESSION skipped)
add_test(gpu_job_test.hostid.np2 true)
add_test(gpu_job_test.shared.np2 echo "skipped: no way (NCCL lets ranks share a GPU from 2.30 on)")
set_tests_properties(gpu_job_test.shared.np2 PROPERTIES SKIP_REGULAR_EXPRESSION skipped)
add_test(gpu_elastic_test sh -c "echo 'skipped: no GPU'; exit 77")
set_tests_properties(gpu_elastic_test PROPERTIES SKIP_RETURN_CODE 77)
add_test(device_test true)
"""


class RunTest(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.root = pathlib.Path(self.folder.name)
        self.build = self.root / "build"
        (self.build / "test/gpu").mkdir(parents=True)
        (self.build / "PREBUILT").write_text("abcdef\n")
        (self.build / "CTestTestfile.cmake").write_text(TESTS)
        (self.build / "launcher").mkdir()
        self.program(self.build / "launcher/hvd-build-info", "echo what it is")
        for name in ("test/gpu/gpu_kernels_test", "test/gpu/gpu_nccl_conformance_test", "test/gpu/gpu_job_test",
                     "test/gpu/gpu_elastic_program", "launcher/hvdrun"):
            self.program(self.build / name, "exit 0")
        self.tools = self.root / "tools"
        self.tools.mkdir()

    def program(self, path, body):
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def start(self, *arguments, gpu=True, seconds=60):
        self.program(self.tools / "nvidia-smi",
                     'test "$1" = -L && echo "GPU 0: stand-in" || echo "stand-in, driver 1.2"' if gpu else "exit 9")
        environment = dict(os.environ, PATH=f"{self.tools}:{os.environ['PATH']}", HVD_GPU_BUILD=str(self.build),
                           HVD_GPU_SECONDS=str(seconds))
        return subprocess.Popen(["bash", str(HERE / "run.sh"), *arguments, str(self.root / "results.txt")], env=environment,
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def outcome(self, run):
        printed, _ = run.communicate(timeout=100)
        table = (self.root / "results.txt.d/table").read_text()
        parts = dict(re.findall(r"^(\S+) +\S+ [ s]  \S+ +(.*)$", table, re.M))
        results = (self.root / "results.txt").read_text()
        self.assertIn(table, results, "the table is in the results")
        self.assertIn(table, printed)
        return run.returncode, parts, results

    def run_parts(self, *arguments, **options):
        return self.outcome(self.start(*arguments, **options))

    def running(self, program):
        """Returns the processes whose command line contains this path."""
        found = []
        for command in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = command.read_bytes().split(b"\0")
            except OSError:  # it has ended
                continue
            if str(program).encode() in words:
                found.append(command.parent.name)
        return found

    def test_no_part_ends_another(self):
        code, parts, results = self.run_parts("--only", "machine,kernels,pack,conformance,one,staged,elastic,simulated")
        self.assertEqual(code, 1)
        self.assertEqual(parts["machine"], "ok")
        self.assertEqual(parts["kernels"], "ok")
        self.assertRegex(parts["pack"], r"not run: .*gpu_pack_bench is missing")
        self.assertRegex(parts["conformance"], "failed: code 8")
        self.assertRegex(parts["one"], "failed: code 8")
        self.assertRegex(parts["staged"], "failed: skipped tests")
        self.assertEqual(parts["elastic"], "failed: skipped tests: ^gpu_elastic_test$")
        self.assertEqual(parts["simulated"], "ok")
        self.assertIn("commit abcdef, binaries built elsewhere", results)
        self.assertIn("stand-in, driver 1.2", results)
        self.assertIn("skipped: why not", results)
        self.assertIn("\nfailed (4 of 8): conformance one staged elastic\nnot run (1 of 8): pack\n", results)

    def test_what_hangs_is_stopped_and_the_rest_is_named(self):
        self.program(self.build / "test/gpu/gpu_pack_bench", "echo before; sleep 100")
        code, parts, results = self.run_parts("--only", "kernels,pack,simulated", seconds=8)
        self.assertEqual(code, 1)
        self.assertEqual(parts["kernels"], "ok")
        self.assertRegex(parts["pack"], r"failed: stopped after \d s: .*gpu_pack_bench resnet50")
        self.assertEqual(parts["simulated"], "not run: HVD_GPU_SECONDS are over")
        self.assertIn("before\n", results)
        self.assertIn("before\n", (self.root / "results.txt.d/pack.txt").read_text())

    def test_what_a_part_leaves_behind_is_ended_and_holds_nobody_up(self):
        """As the ranks of an mpirun that was killed: in a group of their own, with the output still open."""
        lingering = self.root / "lingering-rank"
        self.program(lingering, "trap '' TERM HUP; while true; do sleep 1; done")
        self.program(self.build / "test/gpu/gpu_pack_bench", f"bash -c 'set -m; {lingering} & sleep 0.2'; echo in front")
        begin = time.monotonic()
        code, parts, results = self.run_parts("--only", "pack,simulated")
        self.assertEqual(self.running(lingering), [])
        self.assertEqual((code, parts["pack"], parts["simulated"]), (0, "ok", "ok"))
        self.assertIn("in front", results)
        self.assertLess(time.monotonic() - begin, 60, "it waited for the limit of the part")

    def test_a_signal_ends_the_run_with_its_table_and_what_runs(self):
        sleeping = self.root / "sleeping-bench"
        self.program(sleeping, "echo begun; while true; do sleep 1; done")
        (self.build / "test/gpu/gpu_pack_bench").symlink_to(sleeping)
        run = self.start("--only", "kernels,pack,simulated")
        output = self.root / "results.txt.d/pack.txt"
        while not (output.exists() and "begun" in output.read_text()):
            self.assertIsNone(run.poll(), "it ended before")
            time.sleep(0.05)
        run.terminate()
        run.wait(timeout=60)
        self.assertEqual(self.running(self.build / "test/gpu/gpu_pack_bench"), [])
        code, parts, _ = self.outcome(run)
        self.assertEqual(code, 1)
        self.assertEqual(parts["kernels"], "ok")
        self.assertEqual(parts["simulated"], "not run: the run was ended before")

    def test_a_later_slice_adds_to_the_results_of_an_earlier_one(self):
        code, parts, _ = self.run_parts("--only", "conformance,simulated")
        self.assertEqual((code, parts["conformance"][:6], parts["simulated"]), (1, "failed", "ok"))
        self.assertEqual(parts["kernels"], "not asked for")
        code, parts, results = self.run_parts("--only", "kernels,simulated")
        self.assertEqual(code, 0, "what an earlier slice found does not count in this one")
        self.assertEqual((parts["conformance"][:6], parts["kernels"], parts["simulated"]), ("failed", "ok", "ok"))
        self.assertEqual(results.count("=== run of "), 2)
        self.assertIn("gpu_nccl_conformance_test", (self.root / "results.txt.d/conformance.txt").read_text())
        _, parts, results = self.run_parts(gpu=False)
        self.assertEqual(results.count("=== run of "), 1, "all parts begin anew")

    def test_what_cannot_be_configured_ends_nothing_and_is_said_by_the_parts_that_need_it(self):
        (self.build / "PREBUILT").unlink()
        for name in ("gpu_kernels_test", "gpu_job_test"):
            (self.build / "test/gpu" / name).unlink()
        self.program(self.tools / "cmake", "echo no compiler; exit 1")
        code, parts, results = self.run_parts("--only", "build,kernels,conformance,one,simulated")
        self.assertEqual(code, 1)
        self.assertIn("no compiler", results)
        self.assertRegex(parts["build"], "failed: code 1: cmake ")
        for part in ("kernels", "one"):
            self.assertRegex(parts[part], "not run: .* is missing; it could not be configured")
        self.assertEqual(parts["simulated"], "ok")

    def test_what_nccl_is_too_old_for_is_said_and_is_no_failure(self):
        code, parts, results = self.run_parts("--only", "nccl")
        self.assertEqual(code, 0)
        self.assertRegex(parts["nccl"], "ok, but skipped: .*shared.*from 2.30 on")
        self.assertIn("skipped: no way", results)

    def test_a_benchmark_that_measured_nothing_has_failed(self):
        self.program(self.build / "test/gpu/gpu_pack_bench", "echo skipped: no GPU")
        code, parts, _ = self.run_parts("--only", "pack")
        self.assertEqual(code, 1)
        self.assertRegex(parts["pack"], "failed: skipped: .*gpu_pack_bench resnet50")

    def test_without_a_gpu_what_could_not_run_is_listed(self):
        code, parts, results = self.run_parts(gpu=False)
        self.assertEqual(code, 2)
        can = {"build", "simulated"}
        cannot = [name for name in parts if name not in can]
        self.assertIn(f"\nnot run ({len(cannot)} of {len(parts)}): {' '.join(cannot)}\n", results)
        self.assertEqual({name for name, verdict in parts.items() if verdict == "ok"}, can)
        self.assertEqual({verdict for name, verdict in parts.items() if name not in can}, {"not run: no GPU"})
        listed = subprocess.run(["bash", str(HERE / "run.sh"), "--list"], capture_output=True, text=True, check=True).stdout
        self.assertEqual(list(parts), [line.split()[0] for line in listed.splitlines()[1:]])

    def test_each_test_that_needs_a_gpu_is_in_a_part(self):
        lists = (HERE / "CMakeLists.txt").read_text()
        named = set(re.findall(r"\b(?!gpu_add_|gpu_run_)gpu_\w+_test\b", lists))
        self.assertIn("gpu_elastic_test", named)
        run = " ".join(re.findall(r"\btests '(.*?)'", (HERE / "parts.sh").read_text()))
        self.assertEqual({name for name in named if name not in run}, set())

    def test_an_unknown_part_is_refused_with_those_there_are(self):
        ended = subprocess.run(["bash", str(HERE / "run.sh"), "--only", "kernel"], capture_output=True, text=True)
        self.assertEqual(ended.returncode, 64)
        self.assertRegex(ended.stderr, "there is no part 'kernel' .*kernels")


class BundleTest(unittest.TestCase):
    """third_party/bundle.sh: the programs of one checkout work in another."""

    def shell(self, root, command):
        setup = f'set -eu; say() {{ :; }}; die() {{ echo "$1"; exit 1; }}; root={root}; . {HERE}/../../third_party/bundle.sh; {command}'
        subprocess.run(["bash", "-c", setup], check=True)

    def test_libraries_are_found_by_their_names_and_lists_name_what_is_there(self):
        with tempfile.TemporaryDirectory() as folder:
            here, there, bundle = (pathlib.Path(folder) / name for name in ("here", "there", "bundle"))
            built = here / "build/gpu"
            (built / "test/gpu").mkdir(parents=True)
            there.mkdir()
            bundle.mkdir()
            for name in ("libhvd_core.so.0.1.0", "test/gpu/gpu_kernels_test"):
                (built / name).write_text("")
                (built / name).chmod(0o755)
            (built / "libhvd_core.so.0").symlink_to("libhvd_core.so.0.1.0")
            (built / "test/gpu/kernels_test.cpp.o").write_text("")
            (built / "CTestTestfile.cmake").write_text(
                f'add_test(a "/usr/bin/mpiexec" "-np" "2" "{built}/test/gpu/a")\nset(b "HVD_TEST_MPIEXEC=/usr/bin/mpirun")\n')
            self.shell(here, f"bundle_gpu_programs {bundle}")
            self.shell(there, f"unpack_gpu_programs {bundle} /deps")
            arrived = there / "build/gpu"
            self.assertTrue((arrived / "libhvd_core.so.0").is_file())
            self.assertTrue(os.access(arrived / "test/gpu/gpu_kernels_test", os.X_OK))
            self.assertFalse((arrived / "test/gpu/kernels_test.cpp.o").exists())
            self.assertEqual((arrived / "CTestTestfile.cmake").read_text(),
                             f'add_test(a "/deps/bin/mpirun" "-np" "2" "{arrived}/test/gpu/a")\nset(b "HVD_TEST_MPIEXEC=/deps/bin/mpirun")\n')
            self.assertTrue((arrived / "PREBUILT").read_text().strip())


if __name__ == "__main__":
    unittest.main()
