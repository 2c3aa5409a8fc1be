#!/usr/bin/env python3
"""Runs PyTorch's own tests of torch.distributed, which its wheel contains, on hvd.

Usage: distributed_suite.py [--backend hvd] [--ranks 2] [--timeout SECONDS] [NAME ...]    NAME: a test, or a part of its name

Prints one line per test and the numbers, and exits 1 when a test failed. The tests are DistributedTest of
torch/testing/_internal/distributed/distributed_test.py. Its conditions name the backends that a test is for; those of gloo and
MPI are extended to hvd, as far as the text of the file allows (CONDITIONS).
"""

import argparse
import importlib.util
import os
import re
import sys
import tempfile
import time
import unittest

import torch

MODULE = "torch.testing._internal.distributed.distributed_test"
CONDITIONS = (
    (r'BACKEND != "gloo"', 'BACKEND not in ("gloo", "hvd")'),
    (r'BACKEND != "mpi"', 'BACKEND not in ("mpi", "hvd")'),
    (r'BACKEND == "gloo"', 'BACKEND in ("gloo", "hvd")'),
    # torch calls every backend that is not its own "custom" there.
    (r'(ddp_logging_data.get\("backend_name"\),\s+)dist.get_backend\(group_id\)', r'\1"custom" if BACKEND == "hvd" else BACKEND'),
    (r"if BACKEND not in backends:", 'if BACKEND not in {*backends, "hvd"}:'),
)
# torch.distributed.monitored_barrier() refuses every backend but gloo; backend_test.py tests hvd.torch.monitored_barrier().
EXCLUDED = ("test_monitored_barrier_gloo", "test_monitored_barrier_gloo_rank_0_timeout", "test_monitored_barrier_gloo_subgroup")


def prepare(backend, ranks, folder):
    """Sets what the tests expect in the environment."""
    for name in ("barrier", "test_dir", "init_dir"):
        os.makedirs(os.path.join(folder, name), exist_ok=True)
    os.environ.update(BACKEND=backend, WORLD_SIZE=str(ranks), TEMP_DIR=folder, OMP_NUM_THREADS="1",
                      INIT_METHOD=f"file://{folder}/init_dir/shared_init_file")


def load_tests_of_torch():
    """Imports the module with the conditions extended."""
    from torch.testing._internal.common_distributed import DistTestCases

    for feature in ("ddp", "subgroup", "plugin"):
        DistTestCases.backend_feature[feature].add("hvd")
    spec = importlib.util.find_spec(MODULE)
    text = spec.loader.get_source(MODULE)
    for pattern, replacement in CONDITIONS:
        text, count = re.subn(pattern, replacement, text)
        if count == 0:
            raise SystemExit(f"distributed_suite: the installed {MODULE} does not contain {pattern!r}; adapt CONDITIONS")
    module = importlib.util.module_from_spec(spec)
    sys.modules[MODULE] = module
    exec(compile(text, spec.origin, "exec"), module.__dict__)
    return module


parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--backend", default="hvd")
parser.add_argument("--ranks", type=int, default=2)
parser.add_argument("--timeout", type=int, default=60)
parser.add_argument("names", nargs="*")
arguments = parser.parse_args()
temporary = tempfile.TemporaryDirectory(prefix="hvd-distributed-suite-")
prepare(arguments.backend, arguments.ranks, temporary.name)
tests = load_tests_of_torch()


class TorchDistributed(tests.TestDistBackend, tests.DistributedTest._DistTestBase):
    def setUp(self):
        super().setUp()
        # Not spawned, as PyTorch's own driver does it: a rank would import torch for 3 s. This process has neither joined a job nor
        # started threads of torch.
        self._start_processes(torch.multiprocessing.get_context("fork").Process)


class Report(unittest.TextTestResult):
    """Prints a line for each test when it ends."""

    def startTest(self, test):
        self.began = time.monotonic()
        super().startTest(test)

    def line(self, test, outcome):
        print(f"{outcome:6} {time.monotonic() - self.began:6.1f} s  {test._testMethodName}", flush=True)

    def addSuccess(self, test):
        super().addSuccess(test)
        self.passed = getattr(self, "passed", 0) + 1
        self.line(test, "passed")

    def addFailure(self, test, error):
        super().addFailure(test, error)
        self.line(test, "failed")

    def addError(self, test, error):
        super().addError(test, error)
        self.line(test, "failed")


def main():
    import torch.testing._internal.common_distributed as common

    common.TIMEOUT_OVERRIDE.clear()
    common.TIMEOUT_DEFAULT = arguments.timeout
    suite = unittest.TestSuite()
    for name in unittest.TestLoader().getTestCaseNames(TorchDistributed):
        chosen = not arguments.names or any(part == name or part in name for part in arguments.names)
        if chosen and not (arguments.backend == "hvd" and name in EXCLUDED):
            suite.addTest(TorchDistributed(name))
    result = unittest.TextTestRunner(resultclass=Report, verbosity=0, stream=sys.stdout).run(suite)
    failed = len(result.failures) + len(result.errors)
    print(f"{getattr(result, 'passed', 0)} passed, {len(result.skipped)} skipped, {failed} failed")
    return 1 if failed or result.unexpectedSuccesses else 0


if __name__ == "__main__":
    sys.exit(main())
