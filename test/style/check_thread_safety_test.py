"""check_thread_safety.py finds what it is there for: a field without its lock, a function without its capability. Usage:
check_thread_safety_test.py ROOT BUILD"""

import pathlib
import subprocess
import sys
import tempfile
import unittest

import check_thread_safety

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

class CheckThreadSafety(unittest.TestCase):
    def check(self, text):
        """The exit code of the check, and what it prints, for a file with this text."""
        if check_thread_safety.find_clang() is None:
            self.skipTest("clang++ was not found")
        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder) / "file.cpp"
            file.write_text(text, encoding="utf-8")
            words = [sys.executable, "-B", check_thread_safety.__file__, ROOT, BUILD, file]
            done = subprocess.run(words, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout

    def test_a_guarded_field_needs_its_lock(self):
        code, said = self.check(COUNTER % "")
        self.assertEqual(code, 1, said)
        self.assertIn("writing variable 'count_' requires holding mutex 'mutex_'", said)
        code, said = self.check(COUNTER % "const hvd::MutexLock lock(mutex_);")
        self.assertEqual(code, 0, said)

    def test_an_engine_needs_progress_ownership(self):
        code, said = self.check(DRIVE % "")
        self.assertEqual(code, 1, said)
        self.assertIn("calling function 'step' requires holding progress ownership", said)
        code, said = self.check(DRIVE % "HVD_REQUIRES(engine.progress())")
        self.assertEqual(code, 0, said)

    def test_all_sources_are_looked_at(self):
        looked_at = set()
        for file, _ in check_thread_safety.units(ROOT, BUILD):
            looked_at.add(file)
            if file.startswith(f"{BUILD}/"):
                text = pathlib.Path(file).read_text(encoding="utf-8")
                looked_at |= {line.split('"')[1] for line in text.splitlines() if line.startswith("#include")}
        for name in ("core/base/shared_arena.cpp", "core/engine/runtime.cpp", "core/control/coordinator.cpp"):
            self.assertIn(str(ROOT / name), looked_at)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
