/* Data-parallel training in C: fits a line to points that are divided among the ranks.
   without_torch.cpp is the same program in C++.
     hvdrun -np 2 build/release/examples/c_interface */

#include <hvd/c/hvd.h>
#include <stdio.h>

enum { kPoints = 1000 };

static int failed(const char* what) {
  fprintf(stderr, "c_interface: %s: %s\n", what, hvd_last_error());
  return 1;
}

/* Adds up the values of all ranks, in place. */
static hvd_status_t sum_over_ranks(const char* name, double* values, int64_t count) {
  hvd_submission_t sum = HVD_SUBMISSION_INIT; /* an allreduce of one float32, unless changed */
  sum.name = name;
  sum.op = HVD_OP_SUM;
  sum.dtype = HVD_DTYPE_FLOAT64;
  sum.ndim = 1;
  sum.shape = &count;
  sum.input = sum.output = values;
  sum.output_bytes = (size_t)count * sizeof *values;
  return hvd_run(&sum, NULL);
}

int main(void) {
  int rank = 0, size = 0, step, i;
  double slope = 0, offset = 0, loss = 0;
  if (hvd_init(NULL) != HVD_OK) return failed("hvd_init");
  if (hvd_rank(&rank) != HVD_OK || hvd_size(&size) != HVD_OK) return failed("hvd_rank");

  for (step = 0; step < 500; ++step) {
    double sums[3] = {0, 0, 0}; /* of the derivatives by slope and offset, and of the losses */
    for (i = rank; i < kPoints; i += size) {
      const double x = (double)i / kPoints;
      const double error = slope * x + offset - (3 * x - 1);
      sums[0] += 2 * error * x;
      sums[1] += 2 * error;
      sums[2] += error * error;
    }
    if (sum_over_ranks("gradient", sums, 3) != HVD_OK) return failed("sum_over_ranks");
    slope -= 0.5 * sums[0] / kPoints;
    offset -= 0.5 * sums[1] / kPoints;
    loss = sums[2] / kPoints;
  }
  if (rank == 0) {
    printf("y = %.4f x + %.4f, loss %.2e, on %d ranks\n", slope, offset, loss, size);
  }
  return hvd_shutdown() == HVD_OK ? 0 : failed("hvd_shutdown");
}
