"""Each rule of check_format.py is broken once: a check that lets everything pass proves nothing."""

import pathlib
import subprocess
import sys
import tempfile
import unittest

import check_format

ROOT = pathlib.Path(__file__).resolve().parents[2]


class Prose(unittest.TestCase):
    def found(self, text):
        return list(check_format.check_prose("a.md", text))

    def test_a_long_line_is_found(self):
        self.assertEqual(self.found("word " * 24 + "\n"), [])
        self.assertIn("a.md:3: has 124 columns", self.found("# Title\n\n" + "word " * 24 + "word\n")[0])
        self.assertEqual(len(self.found("- " + "word " * 30 + "\n")), 1)

    def test_tables_code_and_links_are_free(self):
        long = "word " * 40
        for text in ("| " + long + "|\n", "    " + long + "\n", "```\n" + long + "\n```\n", "# " + long + "\n", "[a](" + "x" * 150 + ")\n"):
            self.assertEqual(self.found(text), [], text)

    def test_wrapping_keeps_words_and_lists(self):
        text = "First.\n\n- " + "word " * 60 + "end\n- next\n\n```\n" + "code " * 40 + "\n```\nlast\n"
        result = check_format.wrap_prose(text)
        self.assertEqual(result.split(), text.split())
        self.assertEqual(self.found(result), [])
        self.assertIn("\n  word", result)
        self.assertIn("\n- next\n", result)
        self.assertEqual(check_format.wrap_prose(result), result)


class Code(unittest.TestCase):
    def test_a_long_line_is_found(self):
        self.assertEqual(list(check_format.long_lines("a.h", "x" * 100)), [])
        self.assertEqual(len(list(check_format.long_lines("a.h", "x" * 101))), 1)

    def test_another_format_is_found_and_mended(self):
        program = check_format.find_clang_format(ROOT)
        if program is None:
            self.skipTest("no clang-format of the wanted version")
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            (root / ".clang-format").write_text((ROOT / ".clang-format").read_text(encoding="utf-8"), encoding="utf-8")
            (root / "a.h").write_text("int  a ;\n", encoding="utf-8")
            (root / "b.h").write_text("///   1  -->   2\nint b;\n", encoding="utf-8")
            self.assertEqual(list(check_format.format_code(program, root, ["a.h", "b.h"], False)), ["a.h:1: is not formatted"])
            self.assertEqual(list(check_format.format_code(program, root, ["a.h"], True)), [])
            self.assertEqual((root / "a.h").read_text(encoding="utf-8"), "int a;\n")


class CommandLine(unittest.TestCase):
    def test_files_may_stand_behind_options(self):
        result = subprocess.run([sys.executable, ROOT / "test/style/check_format.py", ROOT, "--fix", "docs/README.md"],
                                stdout=subprocess.PIPE, text=True, check=False)
        self.assertIn(result.returncode, (0, check_format.SKIPPED), result.stdout)


if __name__ == "__main__":
    unittest.main()
