#pragma once

/// The C interface of hvd: the torch-free part of the C++ one, for C programs (C99 or later) and
/// for bindings of other languages. docs/c_api.md is the guide; docs/errors.md describes the state
/// that each kind of error leaves.
///
/// Errors. A function that can fail returns hvd_status_t. After an error its output arguments are
/// unchanged or NULL, and hvd_last_error() returns the text. A required pointer that is NULL gives
/// HVD_ERROR_USAGE.
///
/// Threads. Every function may be called from any thread unless its comment restricts it. A handle
/// may be used by several threads at once, but the call that frees it must be the last.
///
/// Versions. Structs begin with their size, which the ..._INIT macros fill in. Fields are only ever
/// appended, and zero in an appended one means "as before", so that a program built against an
/// older header works with a newer library. A newer program works with an older library as long as
/// it leaves the fields that the older library lacks at zero; other values there give
/// HVD_ERROR_USAGE.

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/// @addtogroup c
/// @{

// ---- Errors

/// These numbers, and those of the enumerations below, are part of the ABI: append only.
typedef enum hvd_status {
  HVD_OK = 0,
  HVD_ERROR_USAGE = 1,     ///< the call was wrong; it sent no message and had no effect
  HVD_ERROR_MISMATCH = 2,  ///< ranks disagree about an operation; every rank of the set fails it,
                           ///< and the runtime continues
  HVD_ERROR_STALLED = 3,   ///< some ranks never submitted the operation; the runtime continues
  HVD_ERROR_PEER_LOST =
      4,  ///< a peer died, stopped or left: the runtime has failed; see hvd_last_error_rank()
  HVD_ERROR_SHUTDOWN = 5,         ///< the operation was cut off by a shutdown
  HVD_ERROR_INTERNAL = 6,         ///< out of memory, a broken message or transport, a bug
  HVD_ERROR_NOT_INITIALIZED = 7,  ///< before hvd_init() or after hvd_shutdown()
  HVD_ERROR_GENERATION_OVER = 8   ///< hvd_elastic_commit(): return it from the function of
                                  ///< hvd_elastic_run()
} hvd_status_t;

/// The error text of this thread's last failed call; empty if no call has failed. Valid until the
/// next call that fails on this thread; owned by the library.
const char* hvd_last_error(void);
/// The lost rank if that call returned HVD_ERROR_PEER_LOST, or the missing rank if it returned
/// HVD_ERROR_STALLED; -1 if it is not known to be one rank, and after any other error.
int hvd_last_error_rank(void);
/// "ok", "usage", "mismatch", ...; "unknown" for any other number. A constant.
const char* hvd_status_name(hvd_status_t status);

// ---- Start and stop

/// Marks a number of hvd_options_t that the caller does not set.
#define HVD_UNSET (-1)

/// The options of hvd_init(). A field left at HVD_UNSET or NULL takes its value from the
/// environment, or else the default, see docs/configuration.md. Initialise the struct with
/// HVD_OPTIONS_INIT, because zero does not mean "unset" in the first five numbers.
typedef struct hvd_options {
  size_t struct_size;
  int64_t fusion_threshold_bytes;
  int64_t cache_capacity;
  int64_t stall_warning_ms;
  int64_t stall_shutdown_ms;
  int64_t peer_timeout_ms;
  const char* backend;
  const char* timeline_path;
  /// How the ranks find each other: "tcp://HOST:PORT", "file:///path", "env://" or "mpi://";
  /// docs/launching.md has more.
  const char* init_method;
  /// The number of ranks, and the rank of this process, 0 to world_size - 1. If `world_size` is
  /// zero, neither is set, and `rank` has to be zero too.
  int64_t world_size;
  int64_t rank;
  /// How long hvd_init() waits for the other ranks. Zero: not set.
  int64_t init_timeout_ms;
} hvd_options_t;

#define HVD_OPTIONS_INIT  \
  {sizeof(hvd_options_t), \
   HVD_UNSET,             \
   HVD_UNSET,             \
   HVD_UNSET,             \
   HVD_UNSET,             \
   HVD_UNSET,             \
   NULL,                  \
   NULL,                  \
   NULL,                  \
   0,                     \
   0,                     \
   0}

/// Joins the job this process was launched into: under hvdrun, mpirun, srun or torchrun, as
/// `init_method` selects, or alone (size 1). Collective over all ranks. May follow hvd_shutdown().
/// `options` may be NULL: all unset. It is copied. HVD_ERROR_USAGE when called twice or when an
/// option or variable is malformed, HVD_ERROR_PEER_LOST when a rank does not arrive.
hvd_status_t hvd_init(const hvd_options_t* options);

/// Leaves the job. Collective; idempotent. Returns at once when the runtime has failed. Operations
/// still outstanding end with HVD_ERROR_SHUTDOWN; handles stay valid until they are freed.
hvd_status_t hvd_shutdown(void);

/// Reports to hvdrun and to the other ranks that this rank is about to end because of an error: see
/// hvd::fail(). `cause` may be NULL: unknown. Takes at most 0.5 s. No effect outside a job.
void hvd_fail(const char* cause);

/// 1 between hvd_init() and hvd_shutdown(), otherwise 0.
int hvd_is_initialized(void);

// ---- Rank and size. HVD_ERROR_NOT_INITIALIZED before hvd_init().

hvd_status_t hvd_rank(int* rank);
hvd_status_t hvd_size(int* size);
/// This rank's number among the ranks of this host, and their number.
hvd_status_t hvd_local_rank(int* local_rank);
hvd_status_t hvd_local_size(int* local_size);
/// This host's number among the hosts that have a rank of this local rank, and their number.
hvd_status_t hvd_cross_rank(int* cross_rank);
hvd_status_t hvd_cross_size(int* cross_size);
/// 1 when every host runs the same number of ranks, otherwise 0.
hvd_status_t hvd_is_homogeneous(int* homogeneous);
/// How the ranks found each other: "mpi://", "hvdrun://", "tcp://HOST:PORT", "file:///path",
/// "local://" (one rank alone). Buffers as in hvd_build_info(), here and below.
hvd_status_t hvd_init_method(char* buffer, size_t capacity, size_t* needed);
/// The carrier of the job's messages: "mpi", "ucx", or "local" (one rank alone).
hvd_status_t hvd_controller(char* buffer, size_t capacity, size_t* needed);

// ---- What this build contains: 1 or 0; usable before hvd_init().

int hvd_mpi_built(void);
int hvd_cuda_built(void);
int hvd_nccl_built(void);
int hvd_shm_built(void);
/// NCCL is built in and a usable GPU is present.
int hvd_nccl_available(void);
/// MPI runs with MPI_THREAD_MULTIPLE (or is not used by this job).
hvd_status_t hvd_mpi_threads_supported(int* supported);

/// One "name: value" line per component: its version, or the reason why it was not
/// built in.
///
/// Like every function that returns a text, it sets `needed` (may be NULL) to the text's size in
/// bytes with the terminating zero. `buffer` may be NULL when `capacity` is 0, to find out the
/// size. A capacity that is too small gives HVD_ERROR_USAGE; then `needed` is set and the buffer
/// unchanged.
hvd_status_t hvd_build_info(char* buffer, size_t capacity, size_t* needed);

// ---- Process sets

/// A group of ranks that communicate among themselves. As an argument, NULL means all
/// ranks.
typedef struct hvd_process_set hvd_process_set_t;

/// Makes a set of these world ranks, in any order. Collective over all ranks of the job, members or
/// not, with equal arguments. The caller frees the handle with hvd_process_set_free().
/// HVD_ERROR_USAGE for an empty list, a repeated rank or one that does not exist;
/// HVD_ERROR_MISMATCH when the ranks pass different sets.
hvd_status_t hvd_process_set_add(const int* ranks, size_t count, hvd_process_set_t** process_set);
/// Like hvd_process_set_add(), but collective over the members only. Members match their calls by
/// the ranks and `name`, which may be NULL. Sets that a rank makes at the same time, in several
/// threads, need different names. HVD_ERROR_USAGE also outside of the list and while this rank
/// makes another set of this name; HVD_ERROR_MISMATCH when members that pass different ranks, or
/// make sets of one name in different orders, wait for each other.
hvd_status_t hvd_process_set_add_by_members(const int* ranks, size_t count, const char* name,
                                            hvd_process_set_t** process_set);
/// Removes a set. Collective over all ranks of the job, or over the members if they made it alone
/// with hvd_process_set_add_by_members(). The handle still has to be freed;
/// operations with it give HVD_ERROR_USAGE.
hvd_status_t hvd_process_set_remove(const hvd_process_set_t* process_set);
/// Frees this process's handle, not the set. Not collective. Operations of the set may be in
/// flight. NULL: no effect.
void hvd_process_set_free(hvd_process_set_t* process_set);

/// 0 for all ranks; otherwise a number that is the same on every rank.
hvd_status_t hvd_process_set_id(const hvd_process_set_t* process_set, int* id);
/// This process's position in the set, -1 outside it.
hvd_status_t hvd_process_set_rank(const hvd_process_set_t* process_set, int* rank);
hvd_status_t hvd_process_set_size(const hvd_process_set_t* process_set, int* size);
/// World ranks, ascending, into the caller's `ranks`. HVD_ERROR_USAGE when `capacity` is below the
/// size of the set.
hvd_status_t hvd_process_set_ranks(const hvd_process_set_t* process_set, int* ranks,
                                   size_t capacity);

// ---- Collective operations

/// Element types.
typedef enum hvd_dtype {
  HVD_DTYPE_UINT8 = 0,
  HVD_DTYPE_INT8 = 1,
  HVD_DTYPE_INT16 = 2,
  HVD_DTYPE_INT32 = 3,
  HVD_DTYPE_INT64 = 4,
  HVD_DTYPE_BOOL = 5,  ///< one byte, 0 or 1
  HVD_DTYPE_FLOAT16 = 6,
  HVD_DTYPE_BFLOAT16 = 7,
  HVD_DTYPE_FLOAT32 = 8,
  HVD_DTYPE_FLOAT64 = 9
} hvd_dtype_t;

/// An average divides by the number of ranks that contribute, and an average of the set by the size
/// of the process set; on integers both truncate toward zero. On bool a sum or maximum is a logical
/// or, a product or minimum a logical and, and an average is HVD_ERROR_USAGE. Adasum: allreduce and
/// reduce of floating types. The bitwise operations are for integers and bool, without factors.
typedef enum hvd_reduce_op {
  HVD_OP_AVERAGE = 0,
  HVD_OP_SUM = 1,
  HVD_OP_MIN = 2,
  HVD_OP_MAX = 3,
  HVD_OP_PRODUCT = 4,
  HVD_OP_ADASUM = 5,
  HVD_OP_BIT_AND = 6,
  HVD_OP_BIT_OR = 7,
  HVD_OP_BIT_XOR = 8,
  HVD_OP_AVERAGE_OF_SET = 9
} hvd_reduce_op_t;

/// The 16-bit type to which float32 elements are cast for the transfer.
typedef enum hvd_compression {
  HVD_COMPRESSION_NONE = 0,
  HVD_COMPRESSION_FLOAT16 = 1,
  HVD_COMPRESSION_BFLOAT16 = 2
} hvd_compression_t;

/// The numbers 8 and 9 belong to changes of process sets, which have their own functions.
typedef enum hvd_kind {
  HVD_KIND_ALLREDUCE = 0,
  HVD_KIND_ALLGATHER =
      1,  ///< concatenates along the first dimension, which may differ between ranks
  HVD_KIND_BROADCAST = 2,  ///< from `root`
  HVD_KIND_REDUCESCATTER =
      3,  ///< member p of n gets rows / n rows of the result, and one more if p < rows % n
  HVD_KIND_ALLTOALL = 4,  ///< `splits` is the number of rows for each member
  HVD_KIND_BARRIER = 5,
  HVD_KIND_JOIN = 6,
  HVD_KIND_GATHER = 7,   ///< an allgather whose result only `root` gets
  HVD_KIND_REDUCE = 10,  ///< an allreduce whose result only `root` gets
  /// Member p gets its share of the rows of `root`'s input, with the division of a reducescatter.
  /// On the other ranks `input` may be NULL, and the first dimension of the shape does not matter.
  HVD_KIND_SCATTER = 11
} hvd_kind_t;

/// Provides the memory of a result whose size is known after negotiation: at least `bytes` (0 when
/// there are no rows; then the return value does not matter), aligned for the dtype. `first_dims`
/// has `count` elements, as in hvd_result_t, and is valid during the call. Called at most once, on
/// any thread. It must not block, call into hvd, or exit by longjmp() or an exception. If it
/// returns NULL, hvd_wait() returns HVD_ERROR_USAGE on this rank; other ranks are not affected.
typedef void* (*hvd_allocate_t)(size_t bytes, const int64_t* first_dims, int32_t count,
                                void* user_data);

/// One operation of one rank; one struct for all kinds. Initialise it with HVD_SUBMISSION_INIT and
/// set the fields that the kind needs. The call copies what the pointers refer to, except for
/// `input`, `output` and `user_data`: see hvd_submit().
typedef struct hvd_submission {
  size_t struct_size;
  /// Identifies the operation across ranks, within its process set. NULL or empty: numbered per set
  /// and kind, so all ranks must make unnamed calls in the same order.
  const char* name;
  int32_t kind;   ///< hvd_kind_t. Barrier and join use only name and process_set.
  int32_t op;     ///< hvd_reduce_op_t: allreduce, reducescatter, reduce
  int32_t dtype;  ///< hvd_dtype_t
  /// The input's shape, row-major and dense. No dimensions: one element, which has no rows to
  /// gather, scatter or exchange.
  int32_t ndim;
  const int64_t* shape;
  /// Broadcast: NULL means that the input is in output's memory.
  const void* input;
  /// The memory for the result of an allreduce, broadcast, reducescatter or reduce, and its size,
  /// which may exceed the result's. It may be the input's memory (reducescatter: the rows that this
  /// rank gets). Reduce on ranks other than `root`: working memory as large as the result; NULL:
  /// the library allocates it. NULL for the other kinds: see `allocate`.
  void* output;
  size_t output_bytes;
  /// Reductions: the result is postscale * op(prescale * x). 0 gives HVD_ERROR_USAGE, because it is
  /// a sign that HVD_SUBMISSION_INIT was forgotten.
  double prescale;
  double postscale;
  int32_t root;  ///< world rank of the source (broadcast, scatter) or the destination (gather,
                 ///< reduce), also within a process set
  int32_t splits_count;  ///< alltoall: the size of the process set
  const int64_t* splits;
  const hvd_process_set_t*
      process_set;  ///< NULL: all ranks. The handle may be freed after the call.
  /// Allgather, alltoall, scatter, and gather at its root: provides the caller's memory for the
  /// result. NULL: the library's memory, which is valid until the operation is freed.
  hvd_allocate_t allocate;
  void* user_data;  ///< for `allocate`
  /// hvd_compression_t: an allreduce of float32 is reduced in 16 bits. Each rank contributes
  /// prescale * x, rounded once, and the result is rounded once more.
  int32_t compression;
  int32_t reserved;  ///< 0
} hvd_submission_t;

#define HVD_SUBMISSION_INIT  \
  {sizeof(hvd_submission_t), \
   NULL,                     \
   HVD_KIND_ALLREDUCE,       \
   HVD_OP_SUM,               \
   HVD_DTYPE_FLOAT32,        \
   0,                        \
   NULL,                     \
   NULL,                     \
   NULL,                     \
   0,                        \
   1.0,                      \
   1.0,                      \
   0,                        \
   0,                        \
   NULL,                     \
   NULL,                     \
   NULL,                     \
   NULL,                     \
   HVD_COMPRESSION_NONE,     \
   0}

/// A submitted operation.
typedef struct hvd_operation hvd_operation_t;

/// Starts an operation; never blocks on other ranks. The caller frees the handle with
/// hvd_operation_free().
///
/// `input` and `output` must stay valid until the operation is done; until then the program must
/// not write to `input` or access `output`. When the operation ends with HVD_ERROR_PEER_LOST,
/// HVD_ERROR_SHUTDOWN or HVD_ERROR_INTERNAL, they must stay valid until the process ends, because
/// the transport cannot cancel messages that are in flight. HVD_ERROR_USAGE when the submission is
/// wrong in a way that this rank can detect alone (a name in flight twice, a bad shape, root or
/// set), or the cause of failure when the runtime has failed.
hvd_status_t hvd_submit(const hvd_submission_t* submission, hvd_operation_t** operation);

/// Starts operations that become ready together and fail together, and are fused where possible.
/// Either all are accepted or all are refused.
/// @param name identifies the group across ranks; NULL or empty for a group without name, whose
/// members then have no names either.
/// @param submissions an array of `count` (more than 0) structs of equal struct_size, which is also
/// the array's stride.
/// @param operations room for `count` handles; all become NULL on an error.
hvd_status_t hvd_submit_group(const char* name, const hvd_submission_t* submissions, size_t count,
                              hvd_operation_t** operations);

/// Submits and waits: quicker than hvd_submit() and hvd_wait(), which wake another thread.
/// `operation` may be NULL when only the status matters; otherwise it becomes a handle for
/// hvd_operation_result(), which the caller frees, or NULL on an error.
hvd_status_t hvd_run(const hvd_submission_t* submission, hvd_operation_t** operation);

/// Blocks until the operation is done and returns how it ended; may be called again, with the same
/// result. Ends in bounded time when a peer is lost.
hvd_status_t hvd_wait(hvd_operation_t* operation);
/// Waits for all of them, even after an error; returns the first error in the order of the array.
hvd_status_t hvd_wait_all(hvd_operation_t* const* operations, size_t count);
/// Blocks until the operation is done, for `timeout_ms` at most. `done` becomes 1 when it is done,
/// and 0 when the timeout expires first; the operation then continues, and the caller can wait for
/// it again. hvd_wait() returns how it ended.
hvd_status_t hvd_wait_for(hvd_operation_t* operation, int64_t timeout_ms, int* done);
/// Writes a text about what the operation waits for: the ranks that have not submitted it, and the
/// calls that they are in; for a send or recv, the calls of both sides. Asks these ranks and waits
/// for their replies, for `limit_ms` at most. Meant for error texts after hvd_wait_for(). The text
/// is empty if the operation is done. It may change between two calls, so a text that is longer
/// than `capacity` is cut; `needed` (may be NULL) becomes its whole size with the terminating zero.
hvd_status_t hvd_describe_wait(const hvd_operation_t* operation, int64_t limit_ms, char* buffer,
                               size_t capacity, size_t* needed);
/// 1 when hvd_wait() would not block, otherwise 0. Never blocks.
hvd_status_t hvd_done(const hvd_operation_t* operation, int* done);
/// Frees the handle and the library's memory of the result. It does not cancel the operation: one
/// that is not done continues, and still uses `input` and `output`. NULL: no effect.
void hvd_operation_free(hvd_operation_t* operation);

/// The result of an operation.
typedef struct hvd_result {
  size_t struct_size;
  /// The submission's output, what `allocate` returned, or memory that the operation owns; NULL and
  /// 0 where the kind has no result for this rank.
  void* data;
  size_t bytes;
  /// Allgather, and gather at its root: the first dimension of every member's input, in set order.
  /// Alltoall: the rows received from each member. Scatter: one number, the rows received.
  /// Otherwise NULL. Owned by the operation.
  const int64_t* first_dims;
  int64_t first_dims_count;
  int64_t value;  ///< join: the last rank to join; hvd_irecv(): the source; otherwise -1
} hvd_result_t;

#define HVD_RESULT_INIT {sizeof(hvd_result_t), NULL, 0, NULL, 0, -1}

/// Fills in `result`, whose struct_size the caller has set, for an operation that is done. Returns
/// HVD_ERROR_USAGE while it is not done, and the operation's error if it failed. If the library's
/// struct is smaller than the caller's, struct_size becomes the library's size.
hvd_status_t hvd_operation_result(const hvd_operation_t* operation, hvd_result_t* result);

// ---- Messages between two ranks

/// As the peer of a recv: any rank of the process set.
#define HVD_ANY_SOURCE (-1)

/// One side of a message. The call copies what the pointers refer to, except for `data`.
typedef struct hvd_message {
  size_t struct_size;
  int32_t peer;   ///< world rank of the other side; recv: or HVD_ANY_SOURCE
  int32_t dtype;  ///< hvd_dtype_t
  /// `count` elements, which a send reads and a recv writes. Valid until the operation is done.
  void* data;
  int64_t count;
  /// A send and a recv match when they have the same process set and the same name or, without a
  /// name (NULL or empty), the same tag.
  int64_t tag;
  const char* name;
  const hvd_process_set_t* process_set;  ///< NULL: all ranks
} hvd_message_t;

#define HVD_MESSAGE_INIT {sizeof(hvd_message_t), 0, HVD_DTYPE_FLOAT32, NULL, 0, 0, NULL, NULL}

/// Starts to send or receive; never blocks. Any number of operations may be outstanding, in any
/// order; those of the same two ranks, process set and tag or name match in the order of the calls.
/// A send is done when the receiver has the message. The caller frees the handle with
/// hvd_operation_free(). HVD_ERROR_USAGE for a rank outside the set or this rank itself. hvd_wait()
/// returns HVD_ERROR_MISMATCH on both ranks if dtype or count differ, HVD_ERROR_SHUTDOWN if the
/// other rank has left, and HVD_ERROR_PEER_LOST if it is lost. It returns HVD_ERROR_STALLED if no
/// other side has appeared for stall_shutdown_ms.
hvd_status_t hvd_isend(const hvd_message_t* message, hvd_operation_t** operation);
hvd_status_t hvd_irecv(const hvd_message_t* message, hvd_operation_t** operation);
/// The same, and waits. `source` (may be NULL) becomes the sender's rank.
hvd_status_t hvd_send(const hvd_message_t* message);
hvd_status_t hvd_recv(const hvd_message_t* message, int* source);

// ---- Barrier and join

/// Returns when every rank of the set has called it.
hvd_status_t hvd_barrier(const hvd_process_set_t* process_set);

/// Declares that this rank has no more data. Blocks until every rank of the job has called it.
/// Until then this rank takes part in the operations of the others with a neutral contribution, and
/// an average divides by the number of ranks that contribute. `last_rank` (may be NULL) becomes the
/// last rank to join.
hvd_status_t hvd_join(int* last_rank);

// ---- Elastic jobs: docs/elastic.md

/// The replicated state of a program, as hvd::elastic::State.
typedef struct hvd_elastic_state hvd_elastic_state_t;

/// The changes since the function of hvd_elastic_run() was last called.
typedef struct hvd_elastic_change {
  size_t struct_size;
  int32_t old_size;  ///< 0: this process was in no generation
  int32_t new_size;
  int32_t old_rank;  ///< -1: this process was in no generation
  int32_t new_rank;
  uint64_t generation;  ///< 0 outside an elastic job
  const char* cause;    ///< why the former generation has ended; valid during the call
} hvd_elastic_change_t;

/// Must return normally, not by longjmp() or an exception. The same applies to every callback.
typedef void (*hvd_elastic_on_change_t)(const hvd_elastic_change_t* change, void* user_data);
/// Returns HVD_OK when its work is complete. If a call of hvd fails, the function must return the
/// status of that call at once, without another call of hvd; hvd_elastic_run() then decides whether
/// to call the function again.
typedef hvd_status_t (*hvd_elastic_function_t)(void* user_data);

/// The caller frees the state with hvd_elastic_state_free().
hvd_status_t hvd_elastic_state_create(hvd_elastic_state_t** state);
/// NULL: no effect.
void hvd_elastic_state_free(hvd_elastic_state_t* state);
/// Makes memory part of the state, before hvd_elastic_run(), in the same order on all ranks. It
/// must outlive the state. HVD_ERROR_USAGE for a name that is tracked already.
hvd_status_t hvd_elastic_track(hvd_elastic_state_t* state, const char* name, void* memory,
                               size_t bytes);
/// Adds a callback that hvd_elastic_run() calls each time before it calls its function.
hvd_status_t hvd_elastic_on_change(hvd_elastic_state_t* state, hvd_elastic_on_change_t callback,
                                   void* user_data);
/// Marks a point at which the state is complete and equal on all ranks. HVD_ERROR_GENERATION_OVER
/// when the ranks change: return it from the function of hvd_elastic_run(). HVD_ERROR_USAGE outside
/// that function.
hvd_status_t hvd_elastic_commit(hvd_elastic_state_t* state);

/// Calls the function on all ranks of the job, and again after each change of the ranks: see
/// hvd::elastic::run(). `load` (may be NULL) makes a first state on rank 0. Both get `user_data`.
/// @return the status of the function, if no change of the ranks has caused it
hvd_status_t hvd_elastic_run(hvd_elastic_state_t* state, hvd_elastic_function_t function,
                             hvd_elastic_function_t load, void* user_data);

/// 1 if a launcher of elastic jobs has started this process, otherwise 0.
int hvd_elastic_launched(void);
/// How many workers hvdrun had replaced when it started this process, or how often torchrun has
/// restarted the job. 0 if TORCHELASTIC_RESTART_COUNT is not set.
int hvd_elastic_restart_count(void);
/// The number of the current generation. 0 outside an elastic job.
uint64_t hvd_elastic_generation(void);

// ---- Observation

/// Counters of one rank since hvd_init(). `hvd::Metrics` in <hvd/hvd.h> describes each.
typedef struct hvd_metrics {
  size_t struct_size;
  uint64_t control_messages_sent;
  uint64_t control_messages_received;
  uint64_t control_bytes_sent;
  uint64_t negotiated_operations;
  uint64_t cached_operations;
  uint64_t locked_operations;
  uint64_t completed_operations;
  uint64_t failed_operations;
  uint64_t backend_calls;
  uint64_t bytes;
  uint64_t stalls;
  uint64_t plans_applied;
} hvd_metrics_t;

#define HVD_METRICS_INIT {sizeof(hvd_metrics_t), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}

/// Fills in `metrics`, whose struct_size the caller has set. struct_size changes as in
/// hvd_operation_result().
hvd_status_t hvd_get_metrics(hvd_metrics_t* metrics);
/// The same as a JSON object; buffers as in hvd_build_info(). The text may be longer in the next
/// call, because the numbers grow.
hvd_status_t hvd_metrics_json(char* buffer, size_t capacity, size_t* needed);

/// Starts a Chrome trace of this rank's operations. "{rank}" in the path is replaced by the rank;
/// without it ".rankN" goes before the extension. HVD_ERROR_USAGE when one is running already or
/// the file cannot be written.
hvd_status_t hvd_start_timeline(const char* path);
/// Completes the file. No effect when no timeline is running.
hvd_status_t hvd_stop_timeline(void);

/// @}

#ifdef __cplusplus
}  // extern "C"
#endif
