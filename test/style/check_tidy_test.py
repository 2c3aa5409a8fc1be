"""check_tidy.py finds what it is there for. Usage: check_tidy_test.py ROOT BUILD"""

import sys
import unittest

import check_tidy
from clang_test import ClangTest

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


class CheckTidy(ClangTest):
    check = check_tidy

    def test_what_was_moved_from_is_not_used(self):
        self.assert_found(USE % "keep(std::move(text));", "[bugprone-use-after-move")
        self.assert_clean(USE % "keep(text);")


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
