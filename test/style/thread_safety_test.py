"""The options of the build make Clang find a field without its lock and a function without its capability.

Usage: thread_safety_test.py ROOT BUILD. Skipped where the build has another compiler.
"""

import json
import pathlib
import shlex
import subprocess
import sys
import tempfile
import unittest

ROOT, BUILD = (pathlib.Path(path).resolve() for path in sys.argv[1:3])
COUNTER = """
#include "base/mutex.h"
class Counter {
 public:
  void add() {
    %s
    ++count_;
  }

 private:
  hvd::Mutex mutex_;
  int count_ HVD_GUARDED_BY(mutex_) = 0;
};
void use(Counter& counter) { counter.add(); }
"""
DRIVE = """
#include "engine/engine.h"
void drive(hvd::runtime::Engine& engine) %s { engine.step(); }
"""


def command_of(folder):
    """The compile command of a source file of this folder, up to the options that name its files."""
    for entry in json.loads((BUILD / "compile_commands.json").read_text(encoding="utf-8")):
        words = shlex.split(entry["command"])
        if f"/{folder}/" in entry["file"] and "-o" in words:
            return words[:words.index("-o")]
    raise LookupError(f"{BUILD} compiles no file of {folder}")


class ThreadSafety(unittest.TestCase):
    def setUp(self):
        version = subprocess.run([command_of("core/engine")[0], "--version"], capture_output=True, text=True, check=True).stdout
        if "clang" not in version:
            self.skipTest("the build's compiler is not Clang")

    def compile(self, folder, text):
        with tempfile.TemporaryDirectory() as scratch:
            file = pathlib.Path(scratch) / "file.cpp"
            file.write_text(text, encoding="utf-8")
            words = [*command_of(folder), f"-I{ROOT}/core", "-Werror", "-fsyntax-only", file]
            return subprocess.run(words, capture_output=True, text=True, check=False)

    def assert_clean(self, folder, text):
        done = self.compile(folder, text)
        self.assertEqual(done.returncode, 0, done.stderr)

    def assert_found(self, folder, text, fault):
        done = self.compile(folder, text)
        self.assertNotEqual(done.returncode, 0)
        self.assertIn(fault, done.stderr)

    def test_a_guarded_field_needs_its_lock(self):
        for folder in ("core/engine", "launcher"):
            self.assert_found(folder, COUNTER % "", "writing variable 'count_' requires holding mutex 'mutex_'")
            self.assert_clean(folder, COUNTER % "const hvd::MutexLock lock(mutex_);")

    def test_an_engine_needs_progress_ownership(self):
        self.assert_found("core/engine", DRIVE % "", "calling function 'step' requires holding progress ownership")
        self.assert_clean("core/engine", DRIVE % "HVD_REQUIRES(engine.progress())")


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
