"""What check_words.py measures and what it leaves out."""

import unittest

import check_words
from written_tree import WrittenTreeTest

PLAIN = "// " + "The channel copies the tensor to the buffer. " * 200 + "\n"


class CheckWordsTest(WrittenTreeTest):
    def violations_in(self, root):
        words, uses = check_words.measure(root)
        return [f"{kind}: {name}" for kind in words for name, _, limit in check_words.LIMITS
                if 1000 * len(uses[kind, name]) / max(words[kind], 1) > limit]

    def test_plain_comments_pass(self):
        self.assert_clean({"core/a.h": PLAIN, "docs/a.md": PLAIN[3:]})

    def test_each_word_has_a_limit(self):
        for sentence, name in (("Nobody reads it.", "nobody"), ("It keeps what is there and what is not.", "what is"),
                               ("It counts nothing, nothing, nothing and nothing.", "nothing"), ("He who waits, who waits, who waits.", "who"),
                               ("It says so, and says why.", "says"), ("There is none, none, none.", "none")):
            self.assert_one({"core/a.h": PLAIN + f"// {sentence}\n"}, name)
            self.assert_one({"README.md": PLAIN[3:] + f"\n{sentence}\n"}, name)

    def test_a_clause_is_no_subject(self):
        for sentence in ("Of these the last wins.", "What waits is dropped.", "Whose turn it is decides."):
            self.assert_one({"core/a.h": PLAIN + f"// It ends. {sentence}\n"}, "clause")
        self.assert_clean({"core/a.h": PLAIN + "// What does a rank do when it is late?\n"})

    def test_names_messages_and_code_are_no_prose(self):
        self.assert_clean({"core/a.h": PLAIN + '// Returns `nobody`; the text is "nobody is here".\nconst char* a = "nobody";\n//   nobody\n',
                           "docs/a.md": PLAIN[3:] + "\n    nobody\n\n`nobody`\n\n```\nnobody\n```\n"})

    def test_rates_are_of_all_files_together(self):
        self.assert_clean({"core/a.h": "// It does nothing.\n", **{f"core/b{i}.h": PLAIN for i in range(2)}})


if __name__ == "__main__":
    unittest.main()
