#!/usr/bin/env python3
"""run.sh against a build of stand-ins: a part that fails, hangs, skips or is missing ends no other, and the table says which did."""
import os
import pathlib
import re
import stat
import subprocess
import tempfile
import unittest

HERE = pathlib.Path(__file__).resolve().parent

TESTS = """
add_test(gpu_kernels_test true)
add_test(gpu_nccl_conformance_test false)
add_test(gpu_job_test.one sleep 100)
set_tests_properties(gpu_job_test.one PROPERTIES TIMEOUT 1)
add_test(gpu_job_test.staged.np2 echo "skipped: why not")
set_tests_properties(gpu_job_test.staged.np2 PROPERTIES SKIP_REGULAR_EXPRESSION skipped)
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
        for name in ("gpu_kernels_test", "gpu_nccl_conformance_test", "gpu_job_test"):
            self.program(self.build / "test/gpu" / name, "exit 0")
        self.tools = self.root / "tools"
        self.tools.mkdir()

    def program(self, path, body):
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def run_parts(self, *arguments, gpu=True, seconds=60):
        self.program(self.tools / "nvidia-smi",
                     'test "$1" = -L && echo "GPU 0: stand-in" || echo stand-in' if gpu else "exit 9")
        environment = dict(os.environ, PATH=f"{self.tools}:{os.environ['PATH']}", HVD_GPU_BUILD=str(self.build),
                           HVD_GPU_SECONDS=str(seconds))
        results = self.root / "results.txt"
        ended = subprocess.run(["bash", str(HERE / "run.sh"), *arguments, str(results)], env=environment,
                               capture_output=True, text=True, timeout=100)
        table = (self.root / "results.txt.d/table").read_text()
        parts = dict(re.findall(r"^(\S+) +\d+ s  (.*)$", table, re.M))
        self.assertIn(table, results.read_text(), "the table is in the results")
        return ended.returncode, parts, results.read_text()

    def test_no_part_ends_another(self):
        code, parts, results = self.run_parts("--only", "machine,kernels,pack,conformance,one,staged,simulated")
        self.assertEqual(code, 1)
        self.assertEqual(parts["machine"], "ok")
        self.assertEqual(parts["kernels"], "ok")
        self.assertRegex(parts["pack"], r"not run: .*gpu_pack_bench is missing")
        self.assertRegex(parts["conformance"], "failed: code 8")
        self.assertRegex(parts["one"], "failed: code 8")
        self.assertRegex(parts["staged"], "failed: skipped tests")
        self.assertEqual(parts["simulated"], "ok")
        self.assertIn("binaries built elsewhere, from abcdef", results)
        self.assertRegex(results, r"commit [0-9a-f]{7}|commit unknown")

    def test_what_hangs_is_stopped_and_the_rest_is_named(self):
        self.program(self.build / "test/gpu/gpu_pack_bench", "echo before; sleep 100")
        code, parts, results = self.run_parts("--only", "kernels,pack,conformance", seconds=8)
        self.assertEqual(code, 1)
        self.assertEqual(parts["kernels"], "ok")
        self.assertRegex(parts["pack"], r"failed: stopped after \d s: .*gpu_pack_bench resnet50")
        self.assertEqual(parts["conformance"], "not run: HVD_GPU_SECONDS are over")
        self.assertIn("before\n", results)
        self.assertIn("before\n", (self.root / "results.txt.d/pack.txt").read_text())

    def test_without_a_gpu_what_could_not_run_is_listed(self):
        code, parts, _ = self.run_parts(gpu=False)
        self.assertEqual(code, 2)
        can = {"machine", "build", "simulated"}
        self.assertEqual({name for name, verdict in parts.items() if verdict == "ok"}, can)
        self.assertEqual({verdict for name, verdict in parts.items() if name not in can}, {"not run: no GPU"})
        listed = subprocess.run(["bash", str(HERE / "run.sh"), "--list"], capture_output=True, text=True, check=True).stdout
        self.assertEqual(list(parts), [line.split()[0] for line in listed.splitlines()[1:]])

    def test_an_unknown_part_is_refused_with_those_there_are(self):
        ended = subprocess.run(["bash", str(HERE / "run.sh"), "--only", "kernel"], capture_output=True, text=True)
        self.assertEqual(ended.returncode, 64)
        self.assertRegex(ended.stderr, "there is no part 'kernel' .*kernels")


if __name__ == "__main__":
    unittest.main()
