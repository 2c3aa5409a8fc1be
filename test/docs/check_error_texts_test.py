"""What check_error_texts.py finds in small trees."""

import pathlib
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "style"))

import check_error_texts
import error_texts
from written_tree import WrittenTreeTest

PAGE = check_error_texts.PAGE
HEAD = "# Texts\n\n| text | cause | what to do |\n| --- | --- | --- |\n"
ROW = "| `the loader has … batches` | a cause | a remedy |\n"
THROW = 'void f(int n) {\n  throw Error(text("the loader has ", n, " batches"));\n}\n'


class CheckErrorTextsTest(WrittenTreeTest):
    def violations_in(self, root):
        page = root / check_error_texts.CLASSES_PAGE
        page.parent.mkdir(exist_ok=True)
        page.touch()
        return check_error_texts.check(root)[0]

    def test_a_class_needs_a_row(self):
        header = "class LoaderError : public Error {};\n"
        tree = {"core/a.cpp": THROW, "core/include/hvd/error.h": header, PAGE: HEAD + ROW}
        self.assert_one(tree, "LoaderError has no row in docs/errors.md")
        self.assert_clean({**tree, "docs/errors.md": "| class | when |\n| --- | --- |\n| `LoaderError` | always |\n"})

    def test_a_text_needs_a_row(self):
        self.assert_clean({"core/a.cpp": THROW, PAGE: HEAD + ROW})
        self.assert_one({"core/a.cpp": THROW + 'void g() { throw Error("no such loader"); }\n', PAGE: HEAD + ROW},
                        "core/a.cpp:4: no such loader")

    def test_a_row_needs_a_text(self):
        self.assert_one({"core/a.cpp": THROW, PAGE: HEAD + ROW + "| `an old text` | a cause | a remedy |\n"}, "in no text of the sources")

    def test_a_row_is_complete(self):
        self.assert_one({"core/a.cpp": THROW, PAGE: HEAD + "| `the loader has … batches` | a cause | |\n"}, "expected a text, its cause")
        self.assert_one({"core/a.cpp": THROW, PAGE: HEAD + ROW + "| `batch` | a cause | a remedy |\n"}, "too few letters")

    def test_the_parts_of_a_pattern_have_an_order(self):
        self.assertEqual(len(self.violations({"core/a.cpp": THROW, PAGE: HEAD + "| `batches … the loader has` | a | b |\n"})), 2)

    def test_warnings_and_parts_of_texts_need_a_row(self):
        for code in ('void f() { HVD_LOG(kWarning) << "no loader is left"; }', 'void f() { TORCH_WARN("no loader is left"); }',
                     'auto f() { return std::string("this loader has no batch of that size"); }'):
            self.assert_one({"frameworks/a.h": THROW + code, PAGE: HEAD + ROW}, "has no row")

    def test_other_literals_need_none(self):
        for code in ('void f() { HVD_LOG(kDebug) << "no loader is left in this process"; }',
                     'void f() { HVD_EXPECT(n > 0, "a loader has at least one batch"); }', 'auto f() { return "three short words"; }',
                     'auto f() { return open("/proc/sys/kernel/random/boot_id"); }', '// throw Error("no such loader");\n'):
            self.assert_clean({"core/a.cpp": THROW + code, PAGE: HEAD + ROW})

    def test_neighbouring_literals_are_one(self):
        self.assert_clean({"core/a.cpp": 'void f() {\n  throw Error("the loader "\n              "has two batches");\n}\n',
                           PAGE: HEAD + "| `the loader has two batches` | a | b |\n"})

    def test_words(self):
        self.assertEqual(error_texts.words_in("no loader, or the last one's"), 6)
        self.assertEqual(error_texts.words_in("%s HVD_RANK /proc/self/exe a_name"), 0)


if __name__ == "__main__":
    unittest.main()
