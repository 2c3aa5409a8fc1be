/* The worker of elastic_campaign in C: elastic_program.cpp has the meaning of the arguments. */
#define _POSIX_C_SOURCE 200809L

#include <hvd/c/hvd.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

/* The layout of Board (board.h). */
enum { kFinish, kSteps, kUndone, kWrong, kLastStep, kFirstStep };
enum { kMaxGenerations = 1 << 16, kMaxWorkers = 1 << 14, kUsageFields = 3 };

struct program {
  _Atomic int64_t* board;
  hvd_elastic_state_t* state;
  size_t elements;
  long computing_us;
  long id;
  int64_t* sums;
  int64_t changes;
  int64_t seen; /* committed by this process */
  /* The tracked state. */
  int64_t step;
  int64_t finished;
  uint64_t trace;
};

static int64_t now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

static int64_t element(int64_t step, int64_t index, int64_t rank) {
  return (step + 1) * 1000003 + index + rank * 7;
}

static uint64_t next_trace(uint64_t trace, int64_t step) {
  return trace * 6364136223846793005u + (uint64_t)step;
}

static void record_step(struct program* own, uint64_t generation) {
  const int64_t time = now();
  int64_t none = 0;
  atomic_compare_exchange_strong(&own->board[kFirstStep + generation % kMaxGenerations], &none,
                                 time);
  atomic_store(&own->board[kLastStep], time);
  atomic_fetch_add(&own->board[kSteps], 1);
}

static hvd_status_t do_step(struct program* own, uint64_t generation) {
  int rank = 0, size = 0;
  hvd_status_t status = hvd_rank(&rank);
  if (status == HVD_OK) status = hvd_size(&size);
  if (status != HVD_OK) return status;
  for (size_t i = 1; i < own->elements; ++i) own->sums[i] = element(own->step, (int64_t)i, rank);
  own->sums[0] = atomic_load(&own->board[kFinish]);
  const int64_t shape = (int64_t)own->elements;
  hvd_submission_t sum = HVD_SUBMISSION_INIT;
  sum.name = "sum";
  sum.dtype = HVD_DTYPE_INT64;
  sum.ndim = 1;
  sum.shape = &shape;
  sum.input = sum.output = own->sums;
  sum.output_bytes = own->elements * sizeof *own->sums;
  status = hvd_run(&sum, NULL);
  if (status != HVD_OK) return status;
  for (size_t i = 1; i < own->elements; ++i) {
    if (own->sums[i] == size * element(own->step, (int64_t)i, 0) + 7 * size * (size - 1) / 2)
      continue;
    atomic_fetch_add(&own->board[kWrong], 1);
    _Exit(9);
  }
  const struct timespec pause = {0, own->computing_us * 1000};
  nanosleep(&pause, NULL);
  own->finished = own->sums[0] > 0;
  own->trace = next_trace(own->trace, own->step);
  ++own->step;
  status = hvd_elastic_commit(own->state);
  own->seen = own->step;
  if (status == HVD_OK) record_step(own, generation);
  return status;
}

static hvd_status_t function(void* user_data) {
  struct program* own = user_data;
  const uint64_t generation = hvd_elastic_generation();
  atomic_store(&own->board[kFirstStep + kMaxGenerations + kUsageFields * (own->id % kMaxWorkers) +
                           kUsageFields - 1],
               (int64_t)generation);
  uint64_t expected = 1;
  for (int64_t done = 0; done < own->step; ++done) expected = next_trace(expected, done);
  if (own->step < own->seen || expected != own->trace || own->changes == 0) {
    atomic_fetch_add(&own->board[kUndone], 1);
    _Exit(8);
  }
  while (!own->finished) {
    const hvd_status_t status = do_step(own, generation);
    if (status != HVD_OK) return status;
  }
  return HVD_OK;
}

static void on_change(const hvd_elastic_change_t* change, void* user_data) {
  struct program* own = user_data;
  if (change->struct_size == sizeof *change && change->new_rank < change->new_size) ++own->changes;
}

static hvd_status_t load(void* user_data) {
  struct program* own = user_data;
  own->trace = 1;
  return HVD_OK;
}

int main(int argc, char** argv) {
  if (argc < 4) return 2;
  struct program own = {0};
  own.elements = (size_t)atol(argv[1]);
  own.computing_us = atol(argv[2]);
  own.id = getenv("HVD_WORKER_ID") != NULL ? atol(getenv("HVD_WORKER_ID")) : 0;
  own.sums = calloc(own.elements, sizeof *own.sums);
  const size_t fields = kFirstStep + kMaxGenerations + kUsageFields * kMaxWorkers;
  own.board =
      mmap(NULL, fields * sizeof *own.board, PROT_READ | PROT_WRITE, MAP_SHARED, atoi(argv[3]), 0);
  if (own.sums == NULL || own.board == MAP_FAILED) return 2;
  if (hvd_init(NULL) != HVD_OK || hvd_elastic_state_create(&own.state) != HVD_OK ||
      hvd_elastic_track(own.state, "step", &own.step, sizeof own.step) != HVD_OK ||
      hvd_elastic_track(own.state, "finished", &own.finished, sizeof own.finished) != HVD_OK ||
      hvd_elastic_track(own.state, "trace", &own.trace, sizeof own.trace) != HVD_OK ||
      hvd_elastic_on_change(own.state, on_change, &own) != HVD_OK ||
      hvd_elastic_run(own.state, function, load, &own) != HVD_OK || hvd_shutdown() != HVD_OK) {
    fprintf(stderr, "worker %ld: %s\n", own.id, hvd_last_error());
    return 1;
  }
  hvd_elastic_state_free(own.state);
  free(own.sums);
  return 0;
}
