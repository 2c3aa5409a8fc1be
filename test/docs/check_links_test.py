"""What check_links.py finds in small trees."""

import pathlib
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "style"))

import check_links
from written_tree import WrittenTreeTest

INDEX = "# Index\n\n[A](a.md)\n"


class CheckLinksTest(WrittenTreeTest):
    def violations_in(self, root):
        return check_links.check(root)

    def test_files_and_headings_that_exist_pass(self):
        self.assert_clean({"docs/README.md": INDEX + "[B](a.md#its-call-of-step), [web](https://example.org/x#y)\n",
                           "docs/a.md": "# A\n\n## Its call of `step()`\n\n[up](README.md) and [here](#a)\n"})

    def test_a_missing_file(self):
        self.assert_one({"docs/README.md": INDEX, "docs/a.md": "[x](b.md)\n"}, "docs/a.md:1: there is no docs/b.md")

    def test_a_missing_heading(self):
        self.assert_one({"docs/README.md": INDEX, "docs/a.md": "# A\n\n[x](#b)\n"}, "has no heading '#b'")

    def test_code_is_not_read(self):
        self.assert_clean({"docs/README.md": INDEX, "docs/a.md": "`[](hvd::Args args)`\n\n```cpp\nauto f = [](int n) {};\n```\n"})

    def test_every_page_is_in_the_index(self):
        self.assert_one({"docs/README.md": INDEX, "docs/a.md": "# A\n", "docs/guides/b.md": "# B\n"}, "docs/guides/b.md:1: is not linked")


if __name__ == "__main__":
    unittest.main()
