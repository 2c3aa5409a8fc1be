#pragma once

/* Checks for tests in C. A failed check is printed and counted, and the test goes on, because a
 * rank that left would make the others wait. */
#include <stdio.h>
#include <string.h>

#include "hvd/c/hvd.h"

extern int failures;

#define EXPECT(condition)                                                      \
  do {                                                                         \
    if (!(condition)) {                                                        \
      fprintf(stderr, "%s:%d: expected %s\n", __FILE__, __LINE__, #condition); \
      ++failures;                                                              \
    }                                                                          \
  } while (0)

#define EXPECT_EQ(actual, expected)                                                           \
  do {                                                                                        \
    const double actual_ = (double)(actual), expected_ = (double)(expected);                  \
    if (actual_ != expected_) {                                                               \
      fprintf(stderr, "%s:%d: %s is %g, expected %g\n", __FILE__, __LINE__, #actual, actual_, \
              expected_);                                                                     \
      ++failures;                                                                             \
    }                                                                                         \
  } while (0)

#define EXPECT_STATUS(call, expected)                                                        \
  do {                                                                                       \
    const hvd_status_t status_ = (call);                                                     \
    if (status_ != (expected)) {                                                             \
      fprintf(stderr, "%s:%d: %s gave '%s', expected '%s': %s\n", __FILE__, __LINE__, #call, \
              hvd_status_name(status_), hvd_status_name(expected), hvd_last_error());        \
      ++failures;                                                                            \
    }                                                                                        \
  } while (0)

#define EXPECT_OK(call) EXPECT_STATUS(call, HVD_OK)

/* Expects a usage error whose text contains the words. */
#define EXPECT_USAGE(call, words)                                                                  \
  do {                                                                                             \
    EXPECT_STATUS(call, HVD_ERROR_USAGE);                                                          \
    if (strstr(hvd_last_error(), words) == NULL) {                                                 \
      fprintf(stderr, "%s:%d: '%s' does not contain '%s'\n", __FILE__, __LINE__, hvd_last_error(), \
              words);                                                                              \
      ++failures;                                                                                  \
    }                                                                                              \
  } while (0)
