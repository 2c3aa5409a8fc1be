#include "support/watchdog.h"

// The main() of plain tests. It is weak and alone in this file, so that another test library can
// define its own. The linker takes a library's file only for a symbol that is still undefined. So a
// strong main() in a library listed earlier (hvd_add_test and hvd_add_mpi_test put LIBRARIES before
// hvd_test_support) keeps this one out, and one in the test's own sources or in an object library
// replaces it. Such a main() should call hvd::testing::run_all_tests().
[[gnu::weak]] int main(int argc, char** argv) { return hvd::testing::run_all_tests(&argc, argv); }
