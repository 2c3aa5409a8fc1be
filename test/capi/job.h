#pragma once

#include "hvd/c/hvd.h"

enum { kMaxRanks = 8 };

/* The rank of this process and the job's size, valid from test_start() on. */
extern int rank;
extern int size;

/* Makes an in-place submission of `count` elements. For kinds that allocate their result later, the
 * caller clears output. */
hvd_submission_t submission(const char* name, hvd_kind_t kind, hvd_dtype_t dtype, void* data,
                            const int64_t* count, size_t bytes);

/* Sums a value over the ranks. Tests also use it to check that the runtime works after an error. */
float sum_of(float value, const char* name);
float sum_of_ranks(void);

void test_operations(void);
