/* Every kind of operation, alone, asynchronous and grouped, and the wrong calls of it. */
#include <math.h>
#include <stddef.h>
#include <stdlib.h>

#include "capi/check.h"
#include "capi/job.h"

static void test_allreduce(void) {
  float data[5];
  int64_t whole[3];
  const int64_t five = 5, three = 3;
  hvd_result_t result = HVD_RESULT_INIT;
  hvd_operation_t* operation = NULL;
  hvd_submission_t sum =
      submission("sum", HVD_KIND_ALLREDUCE, HVD_DTYPE_FLOAT32, data, &five, sizeof data);
  hvd_submission_t extreme =
      submission("extreme", HVD_KIND_ALLREDUCE, HVD_DTYPE_INT64, whole, &three, sizeof whole);
  for (int i = 0; i < 5; ++i) data[i] = (float)(rank + 10 * i);
  sum.prescale = 2;
  EXPECT_OK(hvd_run(&sum, &operation));
  for (int i = 0; i < 5; ++i) EXPECT_EQ(data[i], 2 * (sum_of_ranks() + (float)(10 * i * size)));
  EXPECT_OK(hvd_operation_result(operation, &result));
  EXPECT(result.data == data && result.first_dims == NULL);
  EXPECT_EQ(result.bytes, sizeof data);
  EXPECT_EQ(result.value, -1);
  hvd_operation_free(operation);

  for (int i = 0; i < 3; ++i) whole[i] = rank * (i - 1);
  extreme.op = HVD_OP_MAX;
  EXPECT_OK(hvd_run(&extreme, NULL));
  EXPECT_EQ(whole[0], 0);
  EXPECT_EQ(whole[2], size - 1);
}

/* The input stays. */
static void test_allreduce_out_of_place(void) {
  float data[5];
  float out[5] = {0};
  const int64_t five = 5;
  hvd_submission_t sum =
      submission(NULL, HVD_KIND_ALLREDUCE, HVD_DTYPE_FLOAT32, data, &five, sizeof data);
  for (int i = 0; i < 5; ++i) data[i] = (float)(2 * rank + i);
  sum.op = HVD_OP_AVERAGE;
  sum.output = out;
  EXPECT_OK(hvd_run(&sum, NULL));
  for (int i = 0; i < 5; ++i) {
    EXPECT_EQ(out[i], (float)(size - 1 + i));
    EXPECT_EQ(data[i], (float)(2 * rank + i));
  }

  /* The structure's size in a program that was built before hvd had compression. */
  sum.struct_size = offsetof(hvd_submission_t, compression);
  sum.compression = 3;
  EXPECT_OK(hvd_run(&sum, NULL));
  for (int i = 0; i < 5; ++i) EXPECT_EQ(out[i], (float)(size - 1 + i));
  sum.struct_size = sizeof sum;

  /* In 16 bits: 1 + 2^-11 is not one of them. */
  sum.op = HVD_OP_SUM;
  sum.compression = HVD_COMPRESSION_FLOAT16;
  for (int i = 0; i < 5; ++i) data[i] = 1.0F + 1.0F / 2048;
  EXPECT_OK(hvd_run(&sum, NULL));
  for (int i = 0; i < 5; ++i) EXPECT_EQ(out[i], (float)size);
  sum.compression = HVD_COMPRESSION_NONE;
  for (int i = 0; i < 5; ++i) data[i] = (float)(2 * rank + i);

  sum.ndim = 0;
  sum.shape = NULL;
  sum.op = HVD_OP_SUM;
  EXPECT_OK(hvd_run(&sum, NULL));
  EXPECT_EQ(out[0], 2 * sum_of_ranks());
  EXPECT_EQ(out[1], (float)size);
}

static void test_broadcast(void) {
  double data[2] = {rank + 0.5, -rank};
  const int64_t two = 2;
  const int root = size - 1;
  hvd_submission_t broadcast =
      submission("broadcast", HVD_KIND_BROADCAST, HVD_DTYPE_FLOAT64, data, &two, sizeof data);
  broadcast.root = root;
  broadcast.input = NULL;
  EXPECT_OK(hvd_run(&broadcast, NULL));
  EXPECT_EQ(data[0], root + 0.5);
  EXPECT_EQ(data[1], -root);
}

/* Rank r contributes r + 1 rows of two numbers, the row's number and r. */
static void fill_rows(int32_t* rows, int count, int of) {
  for (int row = 0; row < count; ++row) {
    rows[2 * row] = row;
    rows[2 * row + 1] = of;
  }
}

static void expect_rows(const hvd_result_t* result) {
  int32_t expected[2 * kMaxRanks];
  const int32_t* next = result->data;
  EXPECT_EQ(result->first_dims_count, size);
  EXPECT_EQ(result->bytes, (size_t)(size * (size + 1) / 2) * 2 * sizeof(int32_t));
  for (int r = 0; r < size && result->first_dims_count == size; ++r) {
    EXPECT_EQ(result->first_dims[r], r + 1);
    fill_rows(expected, r + 1, r);
    EXPECT(memcmp(next, expected, (size_t)(r + 1) * 2 * sizeof *next) == 0);
    next += 2 * (r + 1);
  }
}

struct Memory {
  int calls;
  int refuse;
  size_t bytes;
  int32_t members;
  int64_t last_dim;
  void* data;
};

static void* allocate(size_t bytes, const int64_t* first_dims, int32_t count, void* user_data) {
  struct Memory* memory = user_data;
  ++memory->calls;
  memory->bytes = bytes;
  memory->members = count;
  memory->last_dim = first_dims[count - 1];
  if (!memory->refuse) memory->data = malloc(bytes);
  return memory->data;
}

static void test_allgather_and_gather(void) {
  int32_t rows[2 * kMaxRanks];
  const int64_t shape[2] = {rank + 1, 2};
  const int destination = size / 2;
  struct Memory memory = {0};
  hvd_result_t result = HVD_RESULT_INIT;
  hvd_operation_t* operation = NULL;
  hvd_submission_t gather = submission("rows", HVD_KIND_ALLGATHER, HVD_DTYPE_INT32, rows, shape, 0);
  fill_rows(rows, rank + 1, rank);
  gather.ndim = 2;
  EXPECT_USAGE(hvd_run(&gather, NULL), "leave output NULL");
  gather.output = NULL;
  EXPECT_OK(hvd_run(&gather, &operation));
  EXPECT_OK(hvd_operation_result(operation, &result));
  expect_rows(&result);
  hvd_operation_free(operation);

  gather.allocate = allocate;
  gather.user_data = &memory;
  EXPECT_OK(hvd_run(&gather, &operation));
  EXPECT_OK(hvd_operation_result(operation, &result));
  EXPECT(result.data == memory.data);
  expect_rows(&result);
  EXPECT_EQ(memory.calls, 1);
  EXPECT_EQ(memory.bytes, result.bytes);
  EXPECT_EQ(memory.members, size);
  EXPECT_EQ(memory.last_dim, size);
  hvd_operation_free(operation);
  free(memory.data);

  /* One rank without memory fails alone. */
  memset(&memory, 0, sizeof memory);
  memory.refuse = rank == 0;
  EXPECT_STATUS(hvd_run(&gather, &operation), rank == 0 ? HVD_ERROR_USAGE : HVD_OK);
  EXPECT((operation == NULL) == (rank == 0));
  hvd_operation_free(operation);
  free(memory.data);

  memset(&memory, 0, sizeof memory);
  gather.kind = HVD_KIND_GATHER;
  gather.root = destination;
  EXPECT_OK(hvd_run(&gather, &operation));
  EXPECT_OK(hvd_operation_result(operation, &result));
  if (rank == destination) {
    expect_rows(&result);
  } else {
    EXPECT(result.data == NULL && result.bytes == 0 && result.first_dims == NULL &&
           result.first_dims_count == 0);
  }
  EXPECT_EQ(memory.calls, rank == destination);
  hvd_operation_free(operation);
  free(memory.data);
}

static void test_reducescatter(void) {
  int16_t in[2 * (2 * kMaxRanks + 1)];
  int16_t out[6] = {0};
  const int64_t shape[2] = {2 * size + 1, 2};
  const int own = rank == 0 ? 3 : 2;
  const int first = rank == 0 ? 0 : 2 * rank + 1;
  hvd_submission_t scatter =
      submission("scatter", HVD_KIND_REDUCESCATTER, HVD_DTYPE_INT16, in, shape, 0);
  hvd_result_t result = HVD_RESULT_INIT;
  hvd_operation_t* operation = NULL;
  for (int i = 0; i < 2 * (2 * size + 1); ++i) in[i] = (int16_t)(i + 100 * rank);
  scatter.ndim = 2;
  scatter.output = out;
  scatter.output_bytes = (size_t)own * 4 - 1;
  EXPECT_USAGE(hvd_run(&scatter, NULL), "output_bytes");
  scatter.output_bytes = sizeof out; /* more than it takes on most ranks */
  EXPECT_OK(hvd_run(&scatter, &operation));
  EXPECT_OK(hvd_operation_result(operation, &result));
  EXPECT_EQ(result.bytes, own * 4);
  for (int i = 0; i < 2 * own; ++i)
    EXPECT_EQ(out[i], (2 * first + i) * size + 100 * (size * (size - 1) / 2));
  hvd_operation_free(operation);
}

/* Rank r sends d + 1 rows that say 10 r + d to rank d. */
static void test_alltoall(void) {
  uint8_t in[kMaxRanks * (kMaxRanks + 1) / 2];
  int64_t splits[kMaxRanks];
  int64_t rows = 0;
  hvd_result_t result = HVD_RESULT_INIT;
  hvd_operation_t* operation = NULL;
  for (int d = 0; d < size; ++d) {
    splits[d] = d + 1;
    for (int i = 0; i <= d; ++i) in[rows++] = (uint8_t)(10 * rank + d);
  }
  hvd_submission_t exchange =
      submission("exchange", HVD_KIND_ALLTOALL, HVD_DTYPE_UINT8, in, &rows, 0);
  exchange.output = NULL;
  EXPECT_USAGE(hvd_run(&exchange, NULL), "splits");
  exchange.splits_count = size;
  EXPECT_USAGE(hvd_run(&exchange, NULL), "splits is NULL");
  exchange.splits = splits;
  EXPECT_OK(hvd_submit(&exchange, &operation));
  EXPECT_OK(hvd_wait(operation));
  EXPECT_OK(hvd_operation_result(operation, &result));
  EXPECT_EQ(result.bytes, size * (rank + 1));
  EXPECT_EQ(result.first_dims_count, size);
  for (int i = 0; i < (int)result.bytes; ++i)
    EXPECT_EQ(((const uint8_t*)result.data)[i], 10 * (i / (rank + 1)) + rank);
  for (int r = 0; r < (int)result.first_dims_count; ++r) EXPECT_EQ(result.first_dims[r], rank + 1);
  hvd_operation_free(operation);
}

static void test_async(void) {
  enum { kOperations = 20 };
  float data[kOperations];
  char names[kOperations][16];
  hvd_operation_t* operations[kOperations];
  hvd_operation_t* barrier = NULL;
  hvd_submission_t ready = HVD_SUBMISSION_INIT;
  const int64_t count = 1;
  int done = 0;
  for (int i = 0; i < kOperations; ++i) {
    const int index = (i + 7 * rank) % kOperations; /* every rank in another order */
    data[index] = (float)(rank + index);
    snprintf(names[index], sizeof names[index], "async%d", index);
    hvd_submission_t sum = submission(names[index], HVD_KIND_ALLREDUCE, HVD_DTYPE_FLOAT32,
                                      &data[index], &count, sizeof(float));
    EXPECT_OK(hvd_submit(&sum, &operations[index]));
  }
  EXPECT_OK(hvd_wait_all(operations, kOperations));
  for (int i = 0; i < kOperations; ++i) {
    EXPECT_OK(hvd_done(operations[i], &done));
    EXPECT_EQ(done, 1);
    EXPECT_OK(hvd_wait(operations[i]));
    EXPECT_EQ(data[i], sum_of_ranks() + (float)(i * size));
    hvd_operation_free(operations[i]);
  }

  ready.kind = HVD_KIND_BARRIER;
  EXPECT_OK(hvd_submit(&ready, &barrier));
  for (done = 0; !done;) EXPECT_OK(hvd_done(barrier, &done));
  EXPECT_OK(hvd_wait(barrier));
  hvd_operation_free(barrier);
}

static void test_grouped(void) {
  struct {
    hvd_submission_t known;
    int64_t newer;
  } members[3];
  float data[3];
  const int64_t count = 1;
  const char* names[3] = {"a", "b", "c"};
  hvd_operation_t* operations[3] = {NULL, NULL, NULL};
  for (int i = 0; i < 3; ++i) {
    data[i] = (float)(rank * (i + 1));
    members[i].known = submission(names[i], HVD_KIND_ALLREDUCE, HVD_DTYPE_FLOAT32, &data[i], &count,
                                  sizeof(float));
    members[i].known.struct_size = sizeof members[0];
    members[i].newer = 0;
  }
  EXPECT_OK(hvd_submit_group("group", &members[0].known, 3, operations));
  EXPECT_OK(hvd_wait_all(operations, 3));
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(data[i], sum_of_ranks() * (float)(i + 1));
    hvd_operation_free(operations[i]);
  }

  EXPECT_USAGE(hvd_submit_group(NULL, &members[0].known, 3, operations),
               "all named or all unnamed");
  EXPECT(operations[0] == NULL && operations[1] == NULL && operations[2] == NULL);
  members[2].newer = 1;
  EXPECT_USAGE(hvd_submit_group("group", &members[0].known, 3, operations), "newer hvd");
  members[1].known.struct_size = sizeof(hvd_submission_t);
  EXPECT_USAGE(hvd_submit_group("group", &members[0].known, 3, operations), "element 1");
  EXPECT_USAGE(hvd_submit_group("group", &members[0].known, 0, operations), "count");
  EXPECT_USAGE(hvd_submit_group("group", NULL, 3, operations), "NULL");
  EXPECT_USAGE(hvd_submit_group("group", &members[0].known, 3, NULL), "NULL");
  EXPECT_EQ(sum_of(1, "after the group"), size);
}

static void test_reduce(void) {
  double data[2] = {rank + 1.0, -rank};
  double out[2] = {0};
  const int64_t two = 2;
  const int root = size - 1;
  hvd_result_t result = HVD_RESULT_INIT;
  hvd_operation_t* operation = NULL;
  hvd_submission_t reduce =
      submission("reduce", HVD_KIND_REDUCE, HVD_DTYPE_FLOAT64, data, &two, sizeof data);
  reduce.root = root;
  reduce.output = rank == root ? out : NULL; /* elsewhere the library's */
  for (int again = 0; again < 2; ++again) {
    EXPECT_OK(hvd_run(&reduce, &operation));
    EXPECT_OK(hvd_operation_result(operation, &result));
    EXPECT(rank == root ? result.data == out && result.bytes == sizeof out
                        : result.data == NULL && result.bytes == 0);
    EXPECT_EQ(data[0], rank + 1.0);
    if (rank == root) {
      EXPECT_EQ(out[0], sum_of_ranks() + (float)size);
      EXPECT_EQ(out[1], -sum_of_ranks());
    }
    hvd_operation_free(operation);
  }
  if (rank == root) {
    reduce.output = NULL;
    EXPECT_USAGE(hvd_run(&reduce, NULL), "no memory");
  }
  reduce.root = size;
  reduce.output = out;
  EXPECT_USAGE(hvd_run(&reduce, NULL), "root");
}

static void test_scatter(void) {
  int32_t rows[2 * (2 * kMaxRanks + 1)];
  const int root = size / 2;
  const int count = rank == root ? 2 * size + 1 : 0;
  const int own = rank == 0 ? 3 : 2;
  const int first = rank == 0 ? 0 : 2 * rank + 1;
  const int64_t shape[2] = {count, 2};
  hvd_result_t result = HVD_RESULT_INIT;
  hvd_operation_t* operation = NULL;
  hvd_submission_t scatter =
      submission("scatter rows", HVD_KIND_SCATTER, HVD_DTYPE_INT32, rows, shape, 0);
  fill_rows(rows, count, root);
  scatter.ndim = 2;
  scatter.root = root;
  scatter.output = NULL;
  if (rank != root) scatter.input = NULL;
  EXPECT_OK(hvd_run(&scatter, &operation));
  EXPECT_OK(hvd_operation_result(operation, &result));
  EXPECT_EQ(result.bytes, (size_t)own * 2 * sizeof(int32_t));
  EXPECT_EQ(result.first_dims_count, 1);
  EXPECT(result.first_dims != NULL && result.first_dims[0] == own);
  for (int row = 0; row < own; ++row) {
    EXPECT_EQ(((const int32_t*)result.data)[2 * row], first + row);
    EXPECT_EQ(((const int32_t*)result.data)[2 * row + 1], root);
  }
  hvd_operation_free(operation);
}

static void test_bitwise(void) {
  uint8_t bits[2] = {(uint8_t)(1 << rank), 0xff};
  float data = 1;
  const int64_t two = 2, one = 1;
  hvd_submission_t combine =
      submission("bits", HVD_KIND_ALLREDUCE, HVD_DTYPE_UINT8, bits, &two, sizeof bits);
  combine.op = HVD_OP_BIT_OR;
  EXPECT_OK(hvd_run(&combine, NULL));
  EXPECT_EQ(bits[0], (1 << size) - 1);
  combine.op = HVD_OP_BIT_AND;
  bits[0] = (uint8_t)(rank == 0 ? 0x6 : 0xc);
  EXPECT_OK(hvd_run(&combine, NULL));
  EXPECT_EQ(bits[0], size == 1 ? 0x6 : 0x4);
  EXPECT_EQ(bits[1], 0xff);
  combine.op = HVD_OP_BIT_XOR;
  EXPECT_OK(hvd_run(&combine, NULL));
  EXPECT_EQ(bits[1], size % 2 == 1 ? 0xff : 0);
  combine = submission("bits", HVD_KIND_ALLREDUCE, HVD_DTYPE_FLOAT32, &data, &one, sizeof data);
  combine.op = HVD_OP_BIT_XOR;
  EXPECT_USAGE(hvd_run(&combine, NULL), "bit_xor is for integers and bool, got float32");
}

static void test_wait_for(void) {
  float data = (float)rank;
  const int64_t one = 1;
  int done = -1;
  hvd_operation_t* operation = NULL;
  hvd_submission_t sum =
      submission("awaited", HVD_KIND_ALLREDUCE, HVD_DTYPE_FLOAT32, &data, &one, sizeof data);
  if (rank == 0) {
    EXPECT_OK(hvd_submit(&sum, &operation));
    EXPECT_OK(hvd_wait_for(operation, 20, &done));
    EXPECT_EQ(done, size == 1); /* the others wait at the barrier */
    char waits[4096];
    size_t needed = 0;
    EXPECT_OK(hvd_describe_wait(operation, 20000, waits, sizeof waits, &needed));
    EXPECT_EQ(needed, strlen(waits) + 1);
    EXPECT_EQ(strstr(waits, "ranks: rank 1 (") != NULL, size > 1);
    EXPECT_OK(hvd_describe_wait(operation, 20000, waits, 10, NULL));
    EXPECT_EQ(strlen(waits), (size_t)(size > 1 ? 9 : 0)); /* cut */
    EXPECT_USAGE(hvd_describe_wait(operation, 1, waits, 0, NULL), "no bytes");
  }
  EXPECT_OK(hvd_barrier(NULL));
  if (rank != 0) EXPECT_OK(hvd_submit(&sum, &operation));
  EXPECT_OK(hvd_wait_for(operation, INT64_MAX, &done));
  EXPECT_EQ(done, 1);
  EXPECT_OK(hvd_wait_for(operation, -1, &done));
  EXPECT_EQ(done, 1);
  EXPECT_OK(hvd_wait(operation));
  EXPECT_EQ(data, sum_of_ranks());
  EXPECT_USAGE(hvd_wait_for(operation, 1, NULL), "NULL");
  EXPECT_USAGE(hvd_describe_wait(operation, 1, NULL, 1, NULL), "NULL");
  hvd_operation_free(operation);
  EXPECT_USAGE(hvd_wait_for(NULL, 1, &done), "NULL");
}

static void test_mismatch(void) {
  float data[kMaxRanks] = {0};
  const int64_t count = rank == 0 ? 2 : 3;
  hvd_operation_t* operation = NULL;
  hvd_result_t result = HVD_RESULT_INIT;
  hvd_submission_t sum =
      submission("disputed", HVD_KIND_ALLREDUCE, HVD_DTYPE_FLOAT32, data, &count, sizeof data);
  const hvd_status_t expected = size == 1 ? HVD_OK : HVD_ERROR_MISMATCH;
  EXPECT_OK(hvd_submit(&sum, &operation));
  EXPECT_STATUS(hvd_wait(operation), expected);
  EXPECT_STATUS(hvd_wait(operation), expected);
  EXPECT_STATUS(hvd_operation_result(operation, &result), expected);
  EXPECT(size == 1 || strstr(hvd_last_error(), "disputed") != NULL);
  EXPECT_EQ(hvd_last_error_rank(), -1);
  hvd_operation_free(operation);
  EXPECT_EQ(sum_of((float)rank, "disputed"), sum_of_ranks());
}

static void test_bad_submissions(void) {
  float data[2] = {0};
  const int64_t two = 2, negative = -1;
  const int64_t huge[2] = {INT64_MAX, 3};
  hvd_operation_t* operation = (hvd_operation_t*)data;
  const hvd_submission_t good =
      submission("bad", HVD_KIND_ALLREDUCE, HVD_DTYPE_FLOAT32, data, &two, sizeof data);
  hvd_submission_t bad = good;
#define EXPECT_REFUSED(field, value, words)            \
  do {                                                 \
    bad = good;                                        \
    bad.field = value;                                 \
    operation = (hvd_operation_t*)data;                \
    EXPECT_USAGE(hvd_submit(&bad, &operation), words); \
    EXPECT(operation == NULL);                         \
  } while (0)
  EXPECT_REFUSED(struct_size, 0, "struct_size");
  EXPECT_REFUSED(struct_size, offsetof(hvd_submission_t, compression) - 8, "struct_size");
  EXPECT_REFUSED(kind, 8, "kind is 8");
  EXPECT_REFUSED(kind, -1, "kind is -1");
  EXPECT_REFUSED(kind, 12, "kind is 12");
  EXPECT_REFUSED(op, 10, "op is 10");
  EXPECT_REFUSED(dtype, 10, "dtype is 10");
  EXPECT_REFUSED(dtype, -1, "dtype is -1");
  EXPECT_REFUSED(compression, 3, "compression is 3");
  EXPECT_REFUSED(reserved, 1, "reserved is 1");
  EXPECT_REFUSED(ndim, -1, "ndim");
  EXPECT_REFUSED(shape, NULL, "shape is NULL");
  EXPECT_REFUSED(shape, &negative, "bad shape");
  EXPECT_REFUSED(prescale, 0, "HVD_SUBMISSION_INIT");
  EXPECT_REFUSED(prescale, NAN, "expected finite scale factors, got prescale nan");
  EXPECT_REFUSED(postscale, 0, "HVD_SUBMISSION_INIT");
  EXPECT_REFUSED(output_bytes, sizeof data - 1, "output_bytes");
  EXPECT_REFUSED(input, NULL, "no memory");
  /* The struct has the fields of all kinds, but only an allreduce is compressed. */
  bad = good;
  bad.kind = HVD_KIND_REDUCESCATTER;
  bad.compression = HVD_COMPRESSION_FLOAT16;
  EXPECT_USAGE(hvd_submit(&bad, &operation), "compression (float16) is for allreduce");
  EXPECT_REFUSED(output, NULL, "no memory");
  bad = good;
  bad.ndim = 2;
  bad.shape = huge;
  EXPECT_USAGE(hvd_run(&bad, NULL), "bad shape");
  bad = good;
  bad.kind = HVD_KIND_BROADCAST;
  bad.root = size;
  EXPECT_USAGE(hvd_run(&bad, NULL), "root");
#undef EXPECT_REFUSED
}

static void test_messages(void) {
  int32_t sent[4] = {rank, rank + 1, rank + 2, rank + 3}, received[4] = {0};
  hvd_operation_t* operation = NULL;
  hvd_result_t result = HVD_RESULT_INIT;
  hvd_message_t out = HVD_MESSAGE_INIT, in = HVD_MESSAGE_INIT;
  const int previous = (rank + size - 1) % size;
  out.dtype = in.dtype = HVD_DTYPE_INT32;
  out.count = in.count = 4;
  out.tag = in.tag = -3;
  out.data = sent;
  in.data = received;
  out.peer = (rank + 1) % size;
  in.peer = previous;
  EXPECT_USAGE(hvd_send(NULL), "NULL");
  EXPECT_USAGE(hvd_isend(&out, NULL), "NULL");
  if (size == 1) {
    EXPECT_USAGE(hvd_send(&out), "to itself");
    in.peer = HVD_ANY_SOURCE;
    EXPECT_USAGE(hvd_recv(&in, NULL), "no other rank");
    return;
  }
  EXPECT_OK(hvd_irecv(&in, &operation));
  EXPECT_OK(hvd_send(&out));
  EXPECT_OK(hvd_wait(operation));
  EXPECT_OK(hvd_operation_result(operation, &result));
  EXPECT_EQ(result.value, previous);
  EXPECT(result.data == received);
  EXPECT_EQ(result.bytes, sizeof received);
  EXPECT_EQ(received[3], previous + 3);
  hvd_operation_free(operation);

  /* From any source, by name. */
  int source = -1;
  out.name = in.name = "four";
  in.peer = HVD_ANY_SOURCE;
  EXPECT_OK(hvd_isend(&out, &operation));
  EXPECT_OK(hvd_recv(&in, &source));
  EXPECT_EQ(source, previous);
  EXPECT_OK(hvd_wait(operation));
  hvd_operation_free(operation);

  out.dtype = 99;
  EXPECT_USAGE(hvd_send(&out), "dtype is 99");
  out.dtype = HVD_DTYPE_INT32;
  out.count = -1;
  EXPECT_USAGE(hvd_send(&out), "count: expected at least 0, got -1");
  out.count = 4;
  out.peer = size;
  EXPECT_USAGE(hvd_send(&out), "expected a world rank");
  out.struct_size = 8;
  EXPECT_USAGE(hvd_send(&out), "struct_size");
}

static void test_null_arguments(void) {
  float data = 0;
  const int64_t one = 1;
  int done = 0;
  hvd_operation_t* operation = NULL;
  hvd_result_t result = HVD_RESULT_INIT;
  hvd_submission_t sum =
      submission("null", HVD_KIND_ALLREDUCE, HVD_DTYPE_FLOAT32, &data, &one, sizeof data);
  EXPECT_USAGE(hvd_submit(NULL, &operation), "NULL");
  EXPECT_USAGE(hvd_submit(&sum, NULL), "NULL");
  EXPECT_USAGE(hvd_run(NULL, NULL), "NULL");
  EXPECT_USAGE(hvd_wait(NULL), "NULL");
  EXPECT_USAGE(hvd_wait_all(&operation, 1), "NULL");
  EXPECT_USAGE(hvd_wait_all(NULL, 1), "NULL");
  EXPECT_OK(hvd_wait_all(NULL, 0));
  EXPECT_USAGE(hvd_done(NULL, &done), "NULL");
  EXPECT_USAGE(hvd_operation_result(NULL, &result), "NULL");
  EXPECT_OK(hvd_run(&sum, &operation));
  EXPECT_USAGE(hvd_done(operation, NULL), "NULL");
  EXPECT_USAGE(hvd_operation_result(operation, NULL), "NULL");
  result.struct_size = 0;
  EXPECT_USAGE(hvd_operation_result(operation, &result), "struct_size");
  hvd_operation_free(operation);
  hvd_operation_free(NULL);
  hvd_process_set_free(NULL);
  EXPECT_USAGE(hvd_start_timeline(NULL), "NULL");
  EXPECT_USAGE(hvd_get_metrics(NULL), "NULL");
}

void test_operations(void) {
  test_allreduce();
  test_allreduce_out_of_place();
  test_broadcast();
  test_allgather_and_gather();
  test_reducescatter();
  test_alltoall();
  test_async();
  test_grouped();
  test_reduce();
  test_scatter();
  test_bitwise();
  test_wait_for();
  test_messages();
  test_mismatch();
  test_bad_submissions();
  test_null_arguments();
}
