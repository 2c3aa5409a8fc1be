/* Two processes of a program in C, which meet in a file without MPI. */
#define _POSIX_C_SOURCE 200809L

#include <stddef.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "capi/check.h"

int failures = 0;

/* hvd_options_t as it was in its first version, with what happens to lie behind it. */
static void test_first_version(void) {
  struct {
    hvd_options_t options;
    char behind[64];
  } memory = {HVD_OPTIONS_INIT, ""};
  const size_t first = offsetof(hvd_options_t, init_method);
  char controller[16] = "";
  memset((char*)&memory + first, 'x', sizeof memory - first);
  memory.options.struct_size = first;
  EXPECT_EQ(first, 64);
  EXPECT_OK(hvd_init(&memory.options));
  EXPECT_OK(hvd_controller(controller, sizeof controller, NULL));
  EXPECT(strcmp(controller, "local") == 0);
  EXPECT_OK(hvd_shutdown());
}

static void run(int rank, const char* method) {
  int value = -1;
  float data = (float)(rank + 1);
  const int64_t count = 1;
  char text[256] = "";
  hvd_options_t options = HVD_OPTIONS_INIT;
  hvd_submission_t sum = HVD_SUBMISSION_INIT;
  options.init_method = method;
  options.world_size = 2;
  options.rank = rank;
  options.init_timeout_ms = 60000;
  EXPECT_OK(hvd_init(&options));
  EXPECT_OK(hvd_rank(&value));
  EXPECT_EQ(value, rank);
  EXPECT_OK(hvd_size(&value));
  EXPECT_EQ(value, 2);
  EXPECT_OK(hvd_controller(text, sizeof text, NULL));
  EXPECT(strcmp(text, "ucx") == 0);
  EXPECT_OK(hvd_init_method(text, sizeof text, NULL));
  EXPECT(strcmp(text, method) == 0);
  sum.name = "sum";
  sum.ndim = 1;
  sum.shape = &count;
  sum.input = sum.output = &data;
  sum.output_bytes = sizeof data;
  EXPECT_OK(hvd_run(&sum, NULL));
  EXPECT_EQ(data, 3);
  EXPECT_OK(hvd_shutdown());
}

static void test_wrong_place(const char* method) {
  hvd_options_t options = HVD_OPTIONS_INIT;
  options.init_method = method;
  options.world_size = 2;
  options.rank = 2;
  EXPECT_USAGE(hvd_init(&options), "0 to 1");
  options.rank = 1;
  options.init_timeout_ms = 100;
  EXPECT_STATUS(hvd_init(&options), HVD_ERROR_PEER_LOST);
  EXPECT_EQ(hvd_last_error_rank(), 0);
}

int main(void) {
  char folder[] = "/tmp/hvd-c-api-XXXXXX";
  char method[64];
  int status = -1;
  pid_t child = 0;
  if (mkdtemp(folder) == NULL) return 1;
  snprintf(method, sizeof method, "file://%s/job", folder);
  child = fork();
  run(child == 0 ? 1 : 0, method);
  if (child == 0) return failures == 0 ? 0 : 1;
  EXPECT(waitpid(child, &status, 0) == child);
  EXPECT_EQ(status, 0);
  test_wrong_place(method);
  test_first_version();
  EXPECT(rmdir(folder) == 0); /* the folder must be empty */
  return failures == 0 ? 0 : 1;
}
