"""What the tests of the checks that read a tree have in common."""

import pathlib
import tempfile
import unittest


class WrittenTreeTest(unittest.TestCase):
    def violations_in(self, root):
        raise NotImplementedError

    def violations(self, files):
        """Runs the check on a tree of these files, given as texts by path, and returns its output."""
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            for name, text in files.items():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_text(text, encoding="utf-8")
            return list(self.violations_in(root))

    def assert_clean(self, files):
        self.assertEqual(self.violations(files), [])

    def assert_one(self, files, text):
        found = self.violations(files)
        self.assertEqual(len(found), 1, found)
        self.assertIn(text, found[0])
