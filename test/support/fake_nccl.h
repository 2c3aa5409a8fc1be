#pragma once

#include <chrono>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "backend/nccl/library.h"
#include "support/fake_gpu.h"

/// A simulated NCCL between the ranks of a test, on their simulated GPU. Like the real one, it
/// - has room for one kernel per device, which stays until all ranks of its communicator have
///   launched theirs;
/// - completes a collective only if all ranks of the communicator launch the same one in the same
///   order;
/// - answers "busy" for a while after each call on a communicator that does not block, and counts
///   the thread that the real NCCL would start for the call; calls on other communicators return
///   when they are complete, which for begin_init() is when all ranks have joined;
/// - returns from destroy() and abort() only when the queues of the rank's device are empty,
///   because both free device memory; abort() first ends the kernels of its communicators, and
///   revoke() ends kernels and calls but frees no memory.
/// It reports as a fault of the GPU: a collective on registered memory on some ranks only or on
/// different buffers, kernels of communicators that wait for each other, registrations that outlive
/// their buffer or destroy(), and an abort that frees a communicator while a call on it is running
/// although revoke() could have ended the call.
namespace hvd::testing {

/// A key-value store that the ranks share when they are processes.
class FakeNcclStore {
 public:
  virtual ~FakeNcclStore() = default;
  virtual void put(const std::string& key, std::span<const std::byte>) = 0;
  virtual std::optional<std::vector<std::byte>> find(const std::string& key) = 0;
  virtual void remove(const std::string& key) = 0;
};

struct FakeNcclOptions {
  int version = 23203;
  /// How often health() answers "busy" after a call.
  int busy_answers = 1;
  /// The rank whose launches, on a communicator that blocks, return only when it is aborted or
  /// revoked; or -1.
  int launch_hangs_at = -1;
  /// Duration of launches on communicators that block.
  std::chrono::milliseconds launch_takes{0};
  /// How long a call that is aborted or revoked takes to return.
  std::chrono::milliseconds return_takes{0};
  /// The rank whose begin_init() throws; or -1.
  int init_throws_at = -1;
  /// The rank whose communicator fails while it is created; or -1.
  int init_fails_at = -1;
  /// The rank that cannot allocate, and the rank that cannot register; or -1.
  int allocate_throws_at = -1;
  int allocate_throws_times = -1;  ///< of its calls; -1: all
  int register_throws_at = -1;
  /// Set if each rank is a process with its own FakeNccl and FakeGpu. The ranks exchange their
  /// launches here; registered memory is not compared.
  std::shared_ptr<FakeNcclStore> store = nullptr;
};

struct FakeNcclCounts {
  int inits = 0;
  int launches = 0;  ///< groups count as one
  int calls = 0;     ///< of collectives, and sends and receives
  int threads = 0;   ///< threads that NCCL would have started for a call
  int finalized = 0;
  int destroyed = 0;
  int aborted = 0;
  int revoked = 0;
  int allocated = 0;  ///< buffers that are allocated now
  /// Calls that allocate or free, by the thread that created the FakeNccl, which drives the engines
  /// of a stepped job.
  int memory_calls_by_maker = 0;
  int registered = 0;       ///< buffers that are registered now
  int registrations = 0;    ///< registrations so far
  int from_registered = 0;  ///< collectives from and to registered memory
  std::vector<nccl::Reduction> reductions = {};
};

/// Shared by the ranks of a test. Thread-safe.
class FakeNccl {
 public:
  explicit FakeNccl(FakeGpu& gpu, const FakeNcclOptions& options = {})
      : gpu_(gpu), options_(options), refusals_left_(options.allocate_throws_times) {}

  /// Ends the calls that would not return otherwise.
  ~FakeNccl();

  std::shared_ptr<nccl::Library> library(int rank);
  FakeNcclCounts counts(int rank) const;
  /// Waits until that many communicators of the rank have been aborted. @return false after 20 s
  bool wait_for_aborts(int rank, int communicators);
  /// From now on health() reports all communicators of this rank as failed.
  void break_rank(int rank, bool remote, const std::string& text);

 private:
  friend class FakeNcclLibrary;
  using Call = nccl::Call;
  struct Launch {
    std::vector<Call> calls;
    bool at_head = false;
    bool done = false;
    std::vector<std::vector<std::byte>> memory = {};  ///< buffers for the calls of another process
  };
  struct World {
    std::string name;
    int size = 0;
    int joined = 0;
    int local_rank = 0;       ///< with a store: the only one in this process
    std::vector<int> owners;  // by rank: which rank of the test
    std::vector<std::vector<std::shared_ptr<Launch>>> launches;  // by rank
    std::vector<std::size_t> executed;                           // by rank: launches that are done
  };
  struct Member {
    std::shared_ptr<World> world;
    int rank = 0;   // in the communicator
    int owner = 0;  // rank of the test
    int busy = 0;
    bool blocks = false;
    bool alive = true;
    bool broken = false;
    std::map<const std::byte*, std::pair<std::size_t, int>> registered =
        {};  // by address: the size and the number of the registration
    int registrations = 0;
    int calls_inside = 0;  // of threads that wait in a call
  };

  struct Resident {
    std::shared_ptr<World> world;
    std::size_t position = 0;
  };

  Member& member_of(nccl::Comm comm) {
    return members_[reinterpret_cast<std::uintptr_t>(comm.handle) - 1];
  }
  void end_kernels(Member&);
  void free_member(nccl::Comm);
  bool wait_for_device(int rank, std::unique_lock<std::recursive_mutex>&);
  bool wait_in_call(nccl::Comm, std::unique_lock<std::recursive_mutex>&,
                    const std::function<bool()>& over);
  bool all_joined(World&);
  static std::string key_of(const World&, const char* what, int rank, std::size_t position);
  /// Bytes of its input and of its output.
  static std::pair<std::size_t, std::size_t> sizes_of(const Call&, int rank, int ranks);
  void publish(World&, std::size_t position);
  bool fetch(World&, std::size_t position);
  void forget(World&, std::size_t position);
  bool occupy_device(int owner, const std::shared_ptr<World>&, std::size_t position);
  void report_cycle(int owner);
  bool try_execute(World&, std::size_t position);
  void execute(World&, std::size_t position);
  void execute_collective(World&, const std::vector<const Call*>&);
  void check_registered(const World&, const std::vector<const Call*>&);

  FakeGpu& gpu_;
  const FakeNcclOptions options_;
  int refusals_left_;
  const std::thread::id maker_ = std::this_thread::get_id();
  std::recursive_mutex& mutex_ = gpu_.mutex();  // one for both: each calls the other
  std::map<nccl::UniqueId, std::shared_ptr<World>> worlds_;
  std::vector<Member> members_;
  std::map<int, FakeNcclCounts> counts_;
  std::map<int, nccl::Health> broken_;
  std::map<int, Resident> residents_;  // by rank of the test: the kernel that its device runs
  int ids_ = 0;
  std::condition_variable_any changed_;
  int calls_under_way_ = 0;  // blocking calls
  bool closing_ = false;
};

}  // namespace hvd::testing
