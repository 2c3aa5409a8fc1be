/* The C interface in a real job, from a program in C; run at several numbers of ranks. */
#define _POSIX_C_SOURCE 200809L

#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>

#include "capi/check.h"
#include "capi/job.h"

int failures = 0;
int rank = 0;
int size = 1;

hvd_submission_t submission(const char* name, hvd_kind_t kind, hvd_dtype_t dtype, void* data,
                            const int64_t* count, size_t bytes) {
  hvd_submission_t result = HVD_SUBMISSION_INIT;
  result.name = name;
  result.kind = kind;
  result.dtype = dtype;
  result.ndim = 1;
  result.shape = count;
  result.input = data;
  result.output = data;
  result.output_bytes = bytes;
  return result;
}

float sum_of(float value, const char* name) {
  const int64_t count = 1;
  hvd_submission_t sum =
      submission(name, HVD_KIND_ALLREDUCE, HVD_DTYPE_FLOAT32, &value, &count, sizeof value);
  EXPECT_OK(hvd_run(&sum, NULL));
  return value;
}

float sum_of_ranks(void) { return (float)(size * (size - 1) / 2); }

static void test_not_initialised(void) {
  int value = -7;
  size_t needed = 0;
  float data = 1;
  const int64_t count = 1;
  hvd_operation_t* operation = NULL;
  hvd_metrics_t metrics = HVD_METRICS_INIT;
  hvd_submission_t sum =
      submission("x", HVD_KIND_ALLREDUCE, HVD_DTYPE_FLOAT32, &data, &count, sizeof data);
  EXPECT_EQ(hvd_is_initialized(), 0);
  EXPECT_STATUS(hvd_rank(&value), HVD_ERROR_NOT_INITIALIZED);
  EXPECT_EQ(value, -7);
  EXPECT(strstr(hvd_last_error(), "not initialised") != NULL);
  EXPECT_EQ(hvd_last_error_rank(), -1);
  EXPECT_STATUS(hvd_submit(&sum, &operation), HVD_ERROR_NOT_INITIALIZED);
  EXPECT(operation == NULL);
  EXPECT_STATUS(hvd_run(&sum, NULL), HVD_ERROR_NOT_INITIALIZED);
  EXPECT_STATUS(hvd_barrier(NULL), HVD_ERROR_NOT_INITIALIZED);
  EXPECT_STATUS(hvd_join(NULL), HVD_ERROR_NOT_INITIALIZED);
  EXPECT_STATUS(hvd_get_metrics(&metrics), HVD_ERROR_NOT_INITIALIZED);
  EXPECT_STATUS(hvd_init_method(NULL, 0, &needed), HVD_ERROR_NOT_INITIALIZED);
  EXPECT_STATUS(hvd_controller(NULL, 0, &needed), HVD_ERROR_NOT_INITIALIZED);
  EXPECT_STATUS(hvd_process_set_size(NULL, &value), HVD_ERROR_NOT_INITIALIZED);
  EXPECT_OK(hvd_shutdown());
}

static void test_build(void) {
  char small[4] = "abc";
  char* text = NULL;
  size_t needed = 0;
  EXPECT(!hvd_nccl_built() || hvd_cuda_built());
  EXPECT(hvd_mpi_built() || size == 1);
  EXPECT(!hvd_nccl_available() || hvd_nccl_built());
  EXPECT(hvd_shm_built() == 0 || hvd_shm_built() == 1);
  EXPECT_OK(hvd_build_info(NULL, 0, &needed));
  EXPECT_USAGE(hvd_build_info(small, sizeof small, NULL), "the buffer has 4");
  EXPECT(strcmp(small, "abc") == 0);
  EXPECT_USAGE(hvd_build_info(NULL, 0, NULL), "both NULL");
  EXPECT_USAGE(hvd_build_info(NULL, 10, &needed), "buffer is NULL");
  text = malloc(needed);
  EXPECT_OK(hvd_build_info(text, needed, NULL));
  EXPECT_EQ(strlen(text) + 1, needed);
  EXPECT(strstr(text, "hvd: ") != NULL);
  EXPECT_USAGE(hvd_build_info(text, needed - 1, NULL), "takes");
  free(text);
}

static void test_wrong_options(void) {
  hvd_options_t options = HVD_OPTIONS_INIT;

  options.struct_size = 0;
  EXPECT_USAGE(hvd_init(&options), "_INIT");
  options.struct_size = offsetof(hvd_options_t, init_method) - 1;
  EXPECT_USAGE(hvd_init(&options), "struct_size");
  options.struct_size = (size_t)-1;
  EXPECT_USAGE(hvd_init(&options), "struct_size");
  options.struct_size = sizeof options;
  options.backend = "carrier pigeon";
  EXPECT_USAGE(hvd_init(&options), "carrier pigeon");
  options.backend = NULL;
  options.stall_warning_ms = -2;
  EXPECT_USAGE(hvd_init(&options), "stall_warning_ms");
  options.stall_warning_ms = INT64_MAX;
  EXPECT_USAGE(hvd_init(&options), "stall_warning_ms");
  options.stall_warning_ms = HVD_UNSET;
  options.rank = 1;
  EXPECT_USAGE(hvd_init(&options), "world_size is not set");
  options.world_size = -2;
  EXPECT_USAGE(hvd_init(&options), "world_size");
  options.world_size = INT64_MAX;
  EXPECT_USAGE(hvd_init(&options), "world_size");
  options.world_size = 1;
  options.init_timeout_ms = -2;
  EXPECT_USAGE(hvd_init(&options), "init_timeout_ms");
  options.init_timeout_ms = 0;
  options.init_method = "smoke://x";
  EXPECT_USAGE(hvd_init(&options), "smoke://x");
}

static void test_start(void) {
  int value = -1;
  int local = 0, cross = 0;
  size_t needed = 0;
  char variable[16];
  int has_mpi_launcher;
  struct {
    hvd_options_t known;
    int64_t newer;
  } newer = {HVD_OPTIONS_INIT, 0};

  newer.known.struct_size = sizeof newer;
  newer.newer = 1;
  EXPECT_USAGE(hvd_init(&newer.known), "newer hvd");
  EXPECT_EQ(hvd_is_initialized(), 0);

  newer.newer = 0;
  newer.known.fusion_threshold_bytes = 1 << 20;
  EXPECT_OK(hvd_init(&newer.known));
  EXPECT_EQ(hvd_is_initialized(), 1);
  EXPECT_USAGE(hvd_init(NULL), "already initialised");
  EXPECT_OK(hvd_rank(&rank));
  EXPECT_OK(hvd_size(&size));
  EXPECT(rank >= 0 && rank < size && size <= kMaxRanks);
  EXPECT_OK(hvd_local_size(&local));
  EXPECT_OK(hvd_cross_size(&cross));
  EXPECT_EQ(local * cross, size);
  EXPECT_OK(hvd_local_rank(&value));
  EXPECT(value >= 0 && value < local);
  EXPECT_OK(hvd_cross_rank(&value));
  EXPECT(value >= 0 && value < cross);
  EXPECT_OK(hvd_is_homogeneous(&value));
  EXPECT_EQ(value, 1);
  EXPECT_OK(hvd_mpi_threads_supported(&value));
  EXPECT(value == 0 || value == 1);
  snprintf(variable, sizeof variable, "%d", size);
  EXPECT(getenv("HVD_TEST_EXPECTED_SIZE") == NULL ||
         strcmp(getenv("HVD_TEST_EXPECTED_SIZE"), variable) == 0);
  EXPECT_USAGE(hvd_rank(NULL), "hvd_rank: rank is NULL");
  EXPECT_OK(hvd_controller(variable, sizeof variable, NULL));
  has_mpi_launcher = getenv("OMPI_COMM_WORLD_SIZE") != NULL || getenv("PMI_SIZE") != NULL;
  EXPECT(strcmp(variable, has_mpi_launcher ? "mpi" : "local") == 0);
  EXPECT_OK(hvd_init_method(variable, sizeof variable, &needed));
  EXPECT_EQ(needed, strlen(variable) + 1);
  EXPECT(strstr(variable, "://") != NULL);
  EXPECT_USAGE(hvd_init_method(variable, 3, NULL), "hvd_init_method");
}

static void test_process_sets(void) {
  const int last_first[2] = {size - 1, 0};
  const int twice[2] = {0, 0};
  const size_t members = size == 1 ? 1 : 2;
  const int included = rank == 0 || rank == size - 1;
  int value = -7;
  int ranks[kMaxRanks] = {0};
  float data = (float)(rank + 1);
  const int64_t count = 1;
  hvd_process_set_t* set = NULL;
  EXPECT_OK(hvd_process_set_size(NULL, &value));
  EXPECT_EQ(value, size);
  EXPECT_OK(hvd_process_set_ranks(NULL, ranks, kMaxRanks));
  EXPECT_EQ(ranks[size - 1], size - 1);
  EXPECT_USAGE(hvd_process_set_add(twice, 2, &set), "twice");
  EXPECT_USAGE(hvd_process_set_add(NULL, 2, &set), "NULL");
  EXPECT_USAGE(hvd_process_set_add(NULL, 0, &set), "at least one rank");
  EXPECT_USAGE(hvd_process_set_add(twice, 1, NULL), "NULL");
  EXPECT_USAGE(hvd_process_set_remove(NULL), "all ranks");

  EXPECT_OK(hvd_process_set_add(last_first, members, &set));
  EXPECT_OK(hvd_process_set_id(set, &value));
  EXPECT(value > 0);
  EXPECT_OK(hvd_process_set_size(set, &value));
  EXPECT_EQ(value, members);
  EXPECT_OK(hvd_process_set_rank(set, &value));
  EXPECT_EQ(value, rank == 0 ? 0 : rank == size - 1 ? 1 : -1);
  EXPECT_USAGE(hvd_process_set_ranks(set, ranks, members - 1), "room");
  EXPECT_OK(hvd_process_set_ranks(set, ranks, members));
  EXPECT_EQ(ranks[0], 0);
  EXPECT_EQ(ranks[members - 1], size - 1);

  hvd_submission_t sum =
      submission("in the set", HVD_KIND_ALLREDUCE, HVD_DTYPE_FLOAT32, &data, &count, sizeof data);
  sum.process_set = set;
  EXPECT_STATUS(hvd_run(&sum, NULL), included ? HVD_OK : HVD_ERROR_USAGE);
  if (included) EXPECT_EQ(data, size == 1 ? 1 : size + 1);
  if (included) EXPECT_OK(hvd_barrier(set));
  EXPECT_OK(hvd_process_set_remove(set));
  EXPECT_STATUS(hvd_run(&sum, NULL), HVD_ERROR_USAGE);
  hvd_process_set_free(set);

  hvd_process_set_t* own = NULL;
  const int other = (rank + 1) % size;
  EXPECT_OK(hvd_process_set_add_by_members(&rank, 1, rank % 2 == 0 ? NULL : "own", &own));
  sum.process_set = own;
  data = 5;
  EXPECT_OK(hvd_run(&sum, NULL));
  EXPECT_EQ(data, 5);
  if (size > 1) {
    EXPECT_USAGE(hvd_process_set_add_by_members(&other, 1, NULL, &set), "not in the list");
  }
  EXPECT_OK(hvd_process_set_remove(own));
  EXPECT_STATUS(hvd_run(&sum, NULL), HVD_ERROR_USAGE);
  hvd_process_set_free(own);
}

static void test_join(void) {
  int last = -1;
  hvd_operation_t* operation = NULL;
  hvd_result_t result = HVD_RESULT_INIT;
  hvd_submission_t join = HVD_SUBMISSION_INIT;
  /* Rank r has r + 1 batches. */
  for (int batch = 0; batch <= rank; ++batch) EXPECT_EQ(sum_of(1, "batch"), size - batch);
  EXPECT_OK(hvd_join(&last));
  EXPECT_EQ(last, size - 1);

  join.kind = HVD_KIND_JOIN;
  EXPECT_OK(hvd_submit(&join, &operation));
  EXPECT_OK(hvd_wait(operation));
  EXPECT_OK(hvd_operation_result(operation, &result));
  EXPECT(result.value >= 0 && result.value < size);
  EXPECT(result.data == NULL && result.bytes == 0);
  hvd_operation_free(operation);
  EXPECT_EQ(sum_of((float)rank, "after the join"), sum_of_ranks());
}

static void test_observation(void) {
  struct {
    hvd_metrics_t known;
    uint64_t newer;
  } metrics = {HVD_METRICS_INIT, 17};
  char json[4096] = "";
  size_t needed = 0;
  metrics.known.struct_size = sizeof metrics;
  EXPECT_OK(hvd_get_metrics(&metrics.known));
  EXPECT(metrics.known.completed_operations > 20);
  EXPECT(metrics.known.negotiated_operations > 20);
  EXPECT(metrics.known.bytes > 0);
  EXPECT_EQ(metrics.known.failed_operations, size == 1 ? 0 : 1);
  EXPECT_EQ(metrics.known.struct_size, sizeof metrics.known);
  EXPECT_EQ(metrics.newer, 0);
  metrics.known.struct_size = 8;
  EXPECT_USAGE(hvd_get_metrics(&metrics.known), "struct_size");
  EXPECT_OK(hvd_metrics_json(json, sizeof json, &needed));
  EXPECT_EQ(strlen(json) + 1, needed);
  EXPECT(json[0] == '{' && strstr(json, "\"completed_operations\": ") != NULL);

  EXPECT_OK(hvd_start_timeline("c_api_test.{rank}.json"));
  EXPECT_USAGE(hvd_start_timeline("c_api_test.{rank}.json"), "already");
  EXPECT_OK(hvd_stop_timeline());
  EXPECT_OK(hvd_stop_timeline());
  snprintf(json, sizeof json, "c_api_test.%d.json", rank);
  EXPECT(remove(json) == 0);
}

static void* fail_on_another_thread(void* unused) {
  (void)unused;
  EXPECT(hvd_last_error()[0] == '\0');
  EXPECT_USAGE(hvd_wait(NULL), "hvd_wait");
  return NULL;
}

static void test_errors_are_per_thread(void) {
  pthread_t thread;
  EXPECT_USAGE(hvd_size(NULL), "hvd_size");
  EXPECT(pthread_create(&thread, NULL, fail_on_another_thread, NULL) == 0);
  EXPECT(pthread_join(thread, NULL) == 0);
  EXPECT(strstr(hvd_last_error(), "hvd_size") != NULL);
  EXPECT(strcmp(hvd_status_name((hvd_status_t)99), "unknown") == 0);
}

/* A handle outlives the runtime, and what was outstanding has an end. */
static void test_shutdown(void) {
  float data = 1;
  const int64_t count = 1;
  hvd_operation_t* operation = NULL;
  hvd_submission_t sum =
      submission("left alone", HVD_KIND_ALLREDUCE, HVD_DTYPE_FLOAT32, &data, &count, sizeof data);
  if (rank == 0 && size > 1) EXPECT_OK(hvd_submit(&sum, &operation));
  EXPECT_OK(hvd_shutdown());
  EXPECT_OK(hvd_shutdown());
  EXPECT_EQ(hvd_is_initialized(), 0);
  hvd_fail("no effect outside a job");
  if (operation != NULL) EXPECT_STATUS(hvd_wait(operation), HVD_ERROR_SHUTDOWN);
  hvd_operation_free(operation);

  EXPECT_OK(hvd_init(NULL));
  EXPECT_EQ(sum_of((float)rank, "again"), sum_of_ranks());
  EXPECT_OK(hvd_shutdown());
}

int main(void) {
  alarm(100); /* below ctest's limit, so that mpirun reports which rank hangs */
  test_not_initialised();
  test_wrong_options();
  test_start();
  test_build();
  test_operations();
  test_process_sets();
  test_join();
  test_observation();
  test_errors_are_per_thread();
  test_shutdown();
  if (failures > 0) fprintf(stderr, "rank %d: %d checks failed\n", rank, failures);
  return failures > 0;
}
