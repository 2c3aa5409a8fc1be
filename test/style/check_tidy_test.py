"""check_tidy.py finds what it is there for. Usage: check_tidy_test.py ROOT BUILD"""

import pathlib
import subprocess
import sys
import tempfile
import unittest

import check_tidy

ROOT, BUILD = (pathlib.Path(path).resolve() for path in sys.argv[1:3])

USE = """
#include <cstddef>
#include <string>
#include <utility>
std::string keep(std::string);
std::size_t use(std::string text) {
  %s
  return text.size();
}
"""


class CheckTidy(unittest.TestCase):
    def check(self, text):
        """The exit code of the check, and what it prints, for a file with this text."""
        if check_tidy.find_tools()[0] is None:
            self.skipTest("clang-tidy was not found")
        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder) / "file.cpp"
            file.write_text(text, encoding="utf-8")
            words = [sys.executable, "-B", check_tidy.__file__, ROOT, BUILD, file]
            done = subprocess.run(words, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout

    def test_what_was_moved_from_is_not_used(self):
        code, said = self.check(USE % "keep(std::move(text));")
        self.assertEqual(code, 1, said)
        self.assertIn("[bugprone-use-after-move", said)
        code, said = self.check(USE % "keep(text);")
        self.assertEqual(code, 0, said)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
