"""What check_code_blocks.py finds, on small trees with headers of their own."""

import pathlib
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "style"))

import check_code_blocks
from written_tree import WrittenTreeTest

HEADER = """#pragma once
namespace hvd {
struct Options { int ranks = 1; int grace = 5; };
[[nodiscard]] int rank();
void init(const Options& = {});
template <class T> struct Traits;
}
"""
PRELUDE = """#pragma once
#include "hvd/hvd.h"
namespace docs {
struct Words {};
extern int batch;
template <class Test>
constexpr bool fits_options(Test test) { return test.template operator()<hvd::Options>(); }
}
"""
TREE = {"core/include/hvd/hvd.h": HEADER, "core/include/hvd/c/hvd.h": "int hvd_rank(int* rank);\n", "test/docs/prelude.h": PRELUDE,
        "test/docs/prelude_c.h": "#include <hvd/c/hvd.h>\n"}


def block(code, language="cpp", comment=""):
    return f"{f'<!-- code: {comment} -->' if comment else ''}\n```{language}\n{code}\n```\n"


class CheckCodeBlocksTest(WrittenTreeTest):
    def violations_in(self, root):
        return check_code_blocks.check(root, ("c++", ["-std=c++20", "-Icore/include"]))[0]

    def assert_page(self, page, text=None, path="docs/a.md"):
        if text is None:
            self.assert_clean({**TREE, path: page})
        else:
            self.assert_one({**TREE, path: page}, text)

    def test_blocks_that_compile_pass(self):
        self.assert_page(block("int mine = hvd::rank() + batch;"))
        self.assert_page(block('#include <hvd/hvd.h>\n#include <vector>\nint main() {\n  std::vector<int> v;\n  hvd::init();\n}'))
        self.assert_page(block("int twice(int n) { return 2 * n; }", comment="definitions"))
        self.assert_page(block("template <>\nstruct hvd::Traits<Words> {};", comment="global"))
        self.assert_page(block("int mine = 1;") + block("++mine;", comment="continues"))
        self.assert_page(block("int mine = 1;") + block("float mine = 1;"))

    def test_an_error_names_page_and_line(self):
        self.assert_page(block("int mine = 1;\nhvd::no_such();"), "docs/a.md:4:")
        self.assert_page(block("#include <hvd/hvd.h>\n\nint main() {\n  hvd::no_such();\n}"), "docs/a.md:6:")
        self.assert_page(block("hvd::init({.rank = 2});"), "docs/a.md:3:")
        self.assert_page(block("++mine;") + block("int mine = 1;"), "docs/a.md:3:")

    def test_every_kind_of_page_is_read(self):
        for path in ("README.md", "examples/README.md", "docs/guides/a.md", "docs/howto/a.md", "CONTRIBUTING.md"):
            self.assert_page(block("hvd::no_such();"), f"{path}:3:", path)

    def test_a_discarded_result_is_an_error(self):
        self.assert_page(block("hvd::rank();"), "unused-result")

    def test_an_unknown_header_is_an_error(self):
        self.assert_page(block("#include <hvd/none.h>\nint main() {}"), "hvd/none.h")

    def test_a_block_that_is_not_compiled_needs_a_reason(self):
        self.assert_page(block("int x;") + block("...", comment="not compiled: the text of another library's macro"))
        self.assert_page(block("int x;") + block("...", comment="not compiled: why"), "with a reason")
        many = block("...", comment="not compiled: the text of another library's macro") * (check_code_blocks.MAX_NOT_COMPILED + 1)
        self.assertEqual(len(self.violations({**TREE, "docs/a.md": many})), check_code_blocks.MAX_NOT_COMPILED + 1)

    def test_comments_that_have_no_effect_are_errors(self):
        self.assert_page(block("++mine;", comment="continues"), "no block of the page is before it")
        self.assert_page(block("int x;", comment="definition"), "expected 'definitions'")
        self.assert_page("<!-- code: definitions -->\n\nText.\n", "is before no block")

    def test_fences(self):
        self.assert_page("```\ntext\n```\n", "without a language")
        self.assert_page(block("x", "cxx"), "unknown language 'cxx'")
        self.assert_page("Text.\n\n    ./train\n", "an indented block")
        self.assert_page("```cpp\nint x;\n", "without an end")

    def test_other_languages(self):
        self.assert_page(block("for i in 1; do\n  echo\n", "sh"), "docs/a.md:")
        self.assert_page(block("hvdrun -np 2 ./train", "sh"))
        self.assert_page(block("x = 1\ny = = 2", "python"), "docs/a.md:4:")
        self.assert_page(block("int r = hvd_rank(&rank);", "c"))
        self.assert_page(block("int r = hvd_no_such(&rank);", "c"), "docs/a.md:3:")
        self.assert_page(block("#include <hvd/c/hvd.h>\nint main(void) { return hvd_rank(0) }", "c"), "docs/a.md:4:")

    def test_tables_of_guides(self):
        head = "<!-- code: the last column of tables -->\n\n| Python | hvd |\n| --- | --- |\n"
        self.assert_page(head + "| `dist.no_such()` | `hvd::init({.ranks = 2});` and `{.grace = 1}`, `grace`, `hvdrun -np 2` |\n")
        self.assert_page(head + "| x | `auto mine = hvd::rank();`, then `mine + 1` |\n")
        self.assert_page(head + "| x | `hvd::init(1, 2)` |\n", "docs/a.md:5:")
        self.assert_page(head + "| x | `{.rank = 1}` |\n", "docs/a.md:5:")
        self.assert_page(head + "| x | `no_such` |\n", "docs/a.md:5:")
        self.assert_page(head.split("\n", 2)[2] + "| x | `hvd.no_such(1)` |\n")

    def test_names_in_the_text(self):
        self.assert_page("Call `hvd::init()`, then link `hvd::core`; see `hvd::Options::grace`.\n")
        self.assertTrue(self.violations({**TREE, "docs/a.md": "Call `hvd::no_such()`.\n"}))
        self.assert_page("Set `hvd::Options::no_such`.\n", "is in no public header")
        self.assert_page("The class `hvd::Inner`.\n", path="docs/architecture.md")


if __name__ == "__main__":
    unittest.main()
