/* The example of docs/c_api.md. */
#include <hvd/c/hvd.h>
#include <stdio.h>

static int failed(const char* what) {
  fprintf(stderr, "%s: %s\n", what, hvd_last_error());
  return 1;
}

int main(void) {
  int rank = 0, size = 0;
  if (hvd_init(NULL) != HVD_OK) return failed("hvd_init");
  if (hvd_rank(&rank) != HVD_OK || hvd_size(&size) != HVD_OK) return failed("hvd_rank");

  /* The average of three gradients, in place. */
  float gradient[3] = {1.0f * (float)rank, 2.0f * (float)rank, 3.0f};
  const int64_t shape[1] = {3};
  hvd_submission_t average = HVD_SUBMISSION_INIT;
  average.name = "gradient";
  average.op = HVD_OP_AVERAGE;
  average.ndim = 1;
  average.shape = shape;
  average.input = average.output = gradient;
  average.output_bytes = sizeof gradient;
  if (hvd_run(&average, NULL) != HVD_OK) return failed("average");

  /* Rank r has r + 1 samples; everybody gets all of them, in rank order, in memory of the library.
   */
  double samples[64];
  const int64_t mine[1] = {rank % 64 + 1};
  for (int i = 0; i < (int)mine[0]; ++i) samples[i] = rank + 0.1 * i;
  hvd_submission_t gather = HVD_SUBMISSION_INIT;
  gather.name = "samples";
  gather.kind = HVD_KIND_ALLGATHER;
  gather.dtype = HVD_DTYPE_FLOAT64;
  gather.ndim = 1;
  gather.shape = mine;
  gather.input = samples;
  hvd_operation_t* operation = NULL;
  hvd_result_t all = HVD_RESULT_INIT;
  if (hvd_submit(&gather, &operation) != HVD_OK) return failed("submit samples");
  /* ... other work ... */
  if (hvd_wait(operation) != HVD_OK || hvd_operation_result(operation, &all) != HVD_OK)
    return failed("samples");

  if (rank == 0) {
    printf("%d ranks: average %.2f %.2f %.2f, %d samples\n", size, gradient[0], gradient[1],
           gradient[2], (int)(all.bytes / sizeof(double)));
  }
  hvd_operation_free(operation);
  return hvd_shutdown() == HVD_OK ? 0 : failed("hvd_shutdown");
}
