"""Each rule of check_tree.py is broken once, in a tree of its own: a check that lets everything pass proves nothing."""

import unittest

import check_tree
from written_tree import WrittenTreeTest


class CheckTree(WrittenTreeTest):
    def violations_in(self, root):
        return [line for path in check_tree.sources(root) for line in check_tree.check_file(root, path)]

    def test_libraries_stay_in_their_folders(self):
        for path, include in (("core/base/a.cpp", "torch/torch.h"), ("core/engine/a.h", "ATen/ATen.h"),
                              ("core/engine/a.cpp", "mpi.h"), ("core/transport/a.cpp", "mpi.h"),
                              ("core/backend/flat/a.cpp", "mpi.h"), ("frameworks/torch/state/a.cpp", "mpi.h"),
                              ("core/engine/a.cpp", "cuda_runtime.h"), ("core/backend/flat/a.cpp", "nccl.h"),
                              ("core/base/other.cpp", "spdlog/spdlog.h"), ("core/base/a.cpp", "gtest/gtest.h")):
            self.assert_one({path: f"#include <{include}>\n"}, f"{path}:1: includes <{include}>")
        self.assert_clean({"frameworks/torch/state/a.cpp": "#include <torch/torch.h>\n",
                           "core/transport/mpi/a.cpp": "#include <mpi.h>\n",
                           "core/base/log_spdlog.cpp": "#include <spdlog/spdlog.h>\n",
                           "test/mpi/a.cpp": "#include <gtest/gtest.h>\n#include <mpi.h>\n"})

    def test_dependencies_point_downward(self):
        tree = {"core/base/log.h": "", "core/base/text.h": "", "core/engine/engine.h": "", "core/bootstrap/store_server.h": "", "core/include/hvd/error.h": "",
                "frameworks/torch/state/a.h": "", "frameworks/torch/tensors/a.h": "", "launcher/command/a.h": ""}
        self.assert_one(tree | {"frameworks/torch/state/a.cpp": '\n#include "engine/engine.h"\n'}, "a.cpp:2")
        self.assert_one(tree | {"frameworks/torch/tensors/a.cpp": '#include "state/a.h"\n'}, "torch/tensors must not depend on torch/state")
        self.assert_one(tree | {"launcher/a.cpp": '#include "engine/engine.h"\n'}, "launcher must not depend on core")
        self.assert_one(tree | {"launcher/system/a.cpp": '#include "command/a.h"\n'}, "launcher/system must not")
        self.assert_one(tree | {"core/include/hvd/a.h": '#include "base/log.h"\n'}, "public must not depend on base")
        self.assert_one({"frameworks/elsewhere/a.cpp": ""}, "in no layer")
        self.assert_clean(tree | {"frameworks/torch/state/a.cpp": '#include "tensors/a.h"\n#include "base/text.h"\n',
                                  "launcher/processes/a.cpp": '#include "bootstrap/store_server.h"\n#include "command/a.h"\n',
                                  "test/unit/a.cpp": '#include "engine/engine.h"\n'})

    def test_locks_are_those_that_the_compiler_checks(self):
        for bare in ("std::mutex mutex_;", "const std::lock_guard lock(mutex_);", "std::condition_variable_any changed_;"):
            self.assert_one({"core/engine/a.h": f"\n{bare}\n"}, f"a.h:2: uses {bare.replace('const ', '').split(' ')[0]}")
            self.assert_one({"launcher/system/a.h": bare}, "core/base/mutex.h has Mutex")
            self.assert_clean({"core/base/mutex.h": bare, "test/unit/a.cpp": bare, "frameworks/torch/state/a.cpp": bare})
        self.assert_clean({"core/engine/a.h": "// not std::mutex\nMutex mutex_;\nstd::once_flag once_;\n"})

    def test_rooms_of_the_adapter_and_the_launcher(self):
        rooms = {"frameworks/torch/tensors/a.h": "", "frameworks/torch/optimizer/a.h": "", "launcher/system/text.h": "",
                 "launcher/processes/job.h": ""}
        self.assert_one(rooms | {"frameworks/torch/tensors/a.cpp": '#include "optimizer/a.h"\n'}, "must not depend")
        self.assert_one(rooms | {"frameworks/torch/layers/a.cpp": '#include "optimizer/a.h"\n'}, "must not depend")
        self.assert_one(rooms | {"launcher/command/a.cpp": '#include "processes/job.h"\n'}, "must not depend")
        self.assert_clean(rooms | {"frameworks/torch/optimizer/a.cpp": '#include "tensors/a.h"\n',
                                   "launcher/processes/a.cpp": '#include "system/text.h"\n'})

    def test_examples_use_the_installed_headers(self):
        torch = {"frameworks/torch/include/hvd/torch.h": "", "frameworks/torch/state/hooks.h": ""}
        self.assert_one(torch | {"examples/a.cpp": '#include "frameworks/torch/state/hooks.h"\n'}, "examples must not")
        self.assert_clean(torch | {"examples/a.cpp": "#include <hvd/torch.h>\n"})

    def test_a_comment_is_not_an_include(self):
        self.assert_clean({"core/base/a.cpp": "// #include <mpi.h>\n/*\n#include <mpi.h>\n*/\n"})

    def test_control_is_pure(self):
        self.assert_one({"core/negotiation/a.cpp": "#include <thread>\n"}, "no thread, clock or file")
        self.assert_one({"core/member/a.cpp": "#include <thread>\n"}, "no thread, clock or file")
        self.assert_one({"core/negotiation/a.cpp": "auto t = std::chrono::steady_clock::now();\n"}, "as arguments")
        self.assert_one({"core/negotiation/a.cpp": 'auto v = std::getenv("HVD_X");\n'}, "as arguments")

    def test_the_preprocessor_chooses_in_one_file(self):
        code = "#if HVD_HAVE_MPI\n#endif\n"
        self.assert_one({"core/public/process.cpp": "\n" + code}, "process.cpp:2")
        self.assert_one({"core/base/a.cpp": "#ifdef HVD_WITH_TORCH\n#endif\n"}, "preprocessor")
        self.assert_clean({"core/bootstrap/backends.cpp": code,
                           "core/base/kernels.cpp": "#if HVD_HAVE_AVX2_VARIANT\n#endif\n"})
        self.assert_one({"core/include/hvd/a.h": "#if defined(__linux__)\n#endif\n"}, "must not have #if")
        self.assert_one({"core/include/hvd/a.h": "#ifdef __cplusplus_cli\n#endif\n"}, "must not have #if")
        self.assert_clean({"core/include/hvd/a.h": "#if __cplusplus < 202002L\n#error\n#endif\n"})
        self.assert_clean({"core/include/hvd/c/a.h": '#ifdef __cplusplus\nextern "C" {\n#endif\n'})

    def test_lengths(self):
        statement = "  x = f({1, 2}, '}', \"{\");  // {\n"
        for opening in ("int f() {\n", "A::A(int x) : a_{x}, b_(x) {\n", "auto f() const noexcept -> int {\n",
                        "TEST(A, b) {\n", "class A {\n  void f(std::function<void()> g = {}) {\n"):
            closing = "}\n}" if "class" in opening else "}\n"
            self.assert_one({"core/base/a.cpp": opening + statement * 60 + closing}, "a function of 62 lines")
            self.assert_clean({"core/base/a.cpp": opening + statement * 58 + closing})
        self.assert_clean({"core/base/a.cpp": "namespace a {\nint f() {\n}\n" + "\n" * 90 + "int g() {\n}\n}\n"})
        self.assert_clean({"core/base/a.h": "struct A {\n" + "  int x = 0;\n" * 100 + "};\n"})
        self.assert_one({"core/base/a.cpp": "int x;\n" * 601}, "has 601 lines")


if __name__ == "__main__":
    unittest.main()
