"""What check_words.py finds and lets pass."""

import pathlib
import tempfile
import unittest

import check_words

RULES = r"""# a comment
\b[Ll]ane\b	^core/	ChannelContext	SIMD
\bthawed\b	.	unfrozen	-
"""


def violations(files):
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        for path, text in files.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text, encoding="utf-8")
        return list(check_words.violations(root, list(check_words.read_rules(RULES))))


class CheckWordsTest(unittest.TestCase):
    def test_an_old_word_is_found_with_its_place_and_what_to_write(self):
        self.assertEqual(violations({"core/a.h": "int x;\n// its lane\n"}),
                         ['core/a.h:2: "lane": write ChannelContext (docs/glossary.md)'])
        self.assertEqual(len(violations({"README.md": "until it is thawed\n", "docs/a.md": "thawed\n"})), 2)

    def test_a_rule_holds_in_its_paths(self):
        self.assertEqual(violations({"launcher/a.h": "// lane\n"}), [])

    def test_another_meaning_is_let_pass(self):
        self.assertEqual(violations({"core/a.h": "// a SIMD lane\n", "core/b.h": "int airplane, lanes;\n"}), [])

    def test_history_keeps_its_words(self):
        self.assertEqual(violations({"CHANGELOG.md": "thawed\n", "docs/decisions/1.md": "thawed\n"}), [])

    def test_a_broken_rule_is_refused(self):
        with self.assertRaises(SystemExit):
            list(check_words.read_rules("a\tb\n"))


if __name__ == "__main__":
    unittest.main()
