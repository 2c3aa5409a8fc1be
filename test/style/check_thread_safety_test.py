"""check_thread_safety.py finds what it is there for: a field without its lock, a function without its capability. Usage:
check_thread_safety_test.py ROOT BUILD"""

import pathlib
import sys
import unittest

import check_thread_safety
import clang_pass
from clang_test import BUILD, ROOT, ClangTest

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


class CheckThreadSafety(ClangTest):
    check = check_thread_safety

    def test_a_guarded_field_needs_its_lock(self):
        self.assert_found(COUNTER % "", "writing variable 'count_' requires holding mutex 'mutex_'")
        self.assert_clean(COUNTER % "const hvd::MutexLock lock(mutex_);")

    def test_an_engine_needs_progress_ownership(self):
        self.assert_found(DRIVE % "", "calling function 'step' requires holding progress ownership")
        self.assert_clean(DRIVE % "HVD_REQUIRES(engine.progress())")

    def test_all_sources_are_looked_at(self):
        looked_at = set()
        for file, _ in clang_pass.units(ROOT, BUILD):
            looked_at.add(file)
            if file.startswith(f"{BUILD}/"):
                text = pathlib.Path(file).read_text(encoding="utf-8")
                looked_at |= {line.split('"')[1] for line in text.splitlines() if line.startswith("#include")}
        for name in ("core/base/shared_arena.cpp", "core/engine/runtime.cpp", "core/negotiation/coordinator.cpp"):
            self.assertIn(str(ROOT / name), looked_at)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
