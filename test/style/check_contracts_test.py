"""check_contracts.py finds a precondition that nothing checks, wherever the function is."""

import unittest

import check_contracts
from written_tree import WrittenTreeTest

DECLARED = """
namespace hvd {
class Table {
 public:
  /// The entry. @pre holds(slot)%s
  int at(int slot) const;
  void other();
};
}
"""
INLINE = """
class Table {
 public:
  /// The entry. @pre holds(slot)
  int at(int slot) const noexcept {
    %s
    return slots_[slot];
  }
};
"""
INTERFACE = """
class Device {
 public:
  /// @pre `to` is aligned
  virtual void fill(char* to, int count) = 0;
};
"""
CHECK = 'HVD_EXPECT(holds(slot), "the slot is in use");'


class CheckContracts(WrittenTreeTest):
    def violations_in(self, root):
        return check_contracts.violations(root)

    def test_a_source_file_has_to_check(self):
        source = "int Table::at(int slot) const {\n  %s\n  return slots_[slot];\n}\nvoid Table::other() { %s }\n"
        header = {"core/a/table.h": DECLARED % ""}
        self.assert_clean({**header, "core/a/table.cpp": source % (CHECK, "")})
        self.assert_one({**header, "core/a/table.cpp": source % ("", CHECK)}, "core/a/table.h:5: at() does not check its @pre")
        self.assert_one(header, "at()")

    def test_another_class_does_not_check_for_this_one(self):
        self.assert_one({"core/a/table.h": DECLARED % "", "core/a/table.cpp": "int Table::at(int slot) const { return 0; }\n",
                         "core/a/map.cpp": "int Map::at(int slot) const {\n  " + CHECK + "\n}\n"}, "at()")

    def test_a_header_has_to_check(self):
        self.assert_clean({"launcher/table.h": INLINE % CHECK})
        self.assert_one({"launcher/table.h": INLINE % ""}, "launcher/table.h:4: at()")

    def test_an_implementation_checks_for_its_interface(self):
        source = "class Cuda : public Device {\n  void fill(char* to, int count) override {\n    %s\n  }\n};\n"
        self.assert_clean({"core/public.h": INTERFACE, "core/cuda.cpp": source % CHECK})
        self.assert_one({"core/public.h": INTERFACE, "core/cuda.cpp": source % ""}, "fill()")

    def test_the_adapter_uses_libtorchs_assertion(self):
        self.assert_clean({"frameworks/torch/table.h": INLINE % "TORCH_INTERNAL_ASSERT_DEBUG_ONLY(slot < size());"})

    def test_a_comment_may_lead_elsewhere(self):
        find = "int Table::find(int slot) const { %s }\n"
        header = {"core/a/table.h": DECLARED % " (checked by\n  /// find())"}
        self.assert_clean({**header, "core/a/table.cpp": find % CHECK})
        self.assert_one({**header, "core/a/table.cpp": find % ""}, "find()")

    def test_a_comment_may_say_why_nothing_checks(self):
        self.assert_clean({"core/a/table.h": DECLARED % " (unchecked: it would take a search)"})


if __name__ == "__main__":
    unittest.main()
