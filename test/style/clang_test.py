"""What the tests of the Clang checks have in common. Their usage: TEST ROOT BUILD"""

import pathlib
import subprocess
import sys
import tempfile
import unittest

ROOT, BUILD = (pathlib.Path(path).resolve() for path in sys.argv[1:3])


class ClangTest(unittest.TestCase):
    check = None  # the module of the check

    def run_on(self, text):
        """The exit code of the check, and what it prints, for a file with this text."""
        if self.check.find_tool() is None:
            self.skipTest("the tool was not found")
        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder) / "file.cpp"
            file.write_text(text, encoding="utf-8")
            words = [sys.executable, "-B", self.check.__file__, ROOT, BUILD, file]
            done = subprocess.run(words, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout

    def assert_clean(self, text):
        code, printed = self.run_on(text)
        self.assertEqual(code, 0, printed)

    def assert_found(self, text, fault):
        code, printed = self.run_on(text)
        self.assertEqual(code, 1, printed)
        self.assertIn(fault, printed)
