#pragma once

#include <gtest/gtest.h>

#include <csignal>

/// Expects that the statement breaks a precondition, so that the program aborts with a message
/// (core/base/expect.h). `what` is a regular expression.
#define EXPECT_BROKEN_CONTRACT(statement, what)                                 \
  do {                                                                          \
    /* The watchdog is a thread, which a fork would not have. */                \
    GTEST_FLAG_SET(death_test_style, "threadsafe");                             \
    EXPECT_EXIT(statement, ::testing::KilledBySignal(SIGABRT),                  \
                "[a-z_]+\\.(h|cpp):[0-9]+: expected that " what ", but not: "); \
  } while (false)
