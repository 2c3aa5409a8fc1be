#pragma once

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

/// NCCL between the ranks of a test, on their simulated GPU. A rank's device has room for one
/// kernel of NCCL, which stays until all ranks have theirs: the real one promises no more. As the
/// real one it does nothing unless all ranks of a communicator come, with the same collective, and
/// in the same order; communicators that do not block say "busy" for a while after each call, and
/// start a thread for it (which is counted, not started); calls on the others return when they are
/// over, which making one is when all ranks have come. It
/// reports, as a fault of the GPU, a collective that has registered memory, or a window, on some
/// ranks only or another buffer on each, kernels of communicators that wait for each other, and
/// registrations and windows that outlive their buffer or their communicator's destroy(). Making a
/// window ends when all ranks have come, with the same size. destroy() and abort() free memory of
/// the device, so they return only when nothing of their rank is left in its queues, which for one
/// that hangs is never; abort() first ends the kernels of the communicators that it is given.
namespace hvd::testing {

/// Where ranks are processes: what one has put under a key, all find there.
class FakeNcclStore {
 public:
  virtual ~FakeNcclStore() = default;
  virtual void put(const std::string& key, std::span<const std::byte>) = 0;
  virtual std::optional<std::vector<std::byte>> find(const std::string& key) = 0;
  virtual void remove(const std::string& key) = 0;
};

struct FakeNcclOptions {
  int version = 23203;
  /// How often health() says "busy" after a call.
  int busy_answers = 1;
  /// The rank whose launches, on a communicator that blocks, return only when it is aborted; -1:
  /// none.
  int launch_hangs_at = -1;
  /// The rank whose begin_init() throws; -1: none.
  int init_throws_at = -1;
  /// The rank whose communicator fails while it is being made; -1: none.
  int init_fails_at = -1;
  /// The ranks that cannot allocate, or not register; -1: none.
  int allocate_throws_at = -1;
  int allocate_throws_times = -1;  ///< of its calls; -1: all
  int register_throws_at = -1;
  /// The rank whose library has no windows; the one where making a window throws at once, and where
  /// it fails later; -1: none.
  int no_windows_at = -1;
  int window_throws_at = -1;
  int window_fails_at = -1;
  /// The first rank that gets no window though nothing failed; -1: none. NCCL itself says so to
  /// all, which is 0.
  int null_windows_from = -1;
  /// Each rank has a FakeNccl, and a FakeGpu, of its own, and the others are found here. Then
  /// registered memory is not compared, and there are no windows.
  std::shared_ptr<FakeNcclStore> store = nullptr;
};

struct FakeNcclCounts {
  int inits = 0;
  int launches = 0;  ///< groups count as one
  int calls = 0;     ///< of collectives, and sends and receives
  int threads = 0;   ///< that NCCL has started for a call
  int finalized = 0;
  int destroyed = 0;
  int aborted = 0;
  int allocated = 0;  ///< buffers that are not freed yet
  /// Calls that allocate and free by the thread that made the FakeNccl, which in a stepped job
  /// drives the engines.
  int memory_calls_by_maker = 0;
  int registered = 0;       ///< buffers that are registered now
  int registrations = 0;    ///< ever
  int from_registered = 0;  ///< collectives from and to registered memory
  int windows = 0;          ///< that there are now
  int windows_begun = 0;    ///< ever
  int from_windows = 0;     ///< collectives from and to windows
  std::vector<nccl::Reduction> reductions = {};
};

/// Shared by the ranks of a test. Thread-safe.
class FakeNccl {
 public:
  explicit FakeNccl(FakeGpu& gpu, const FakeNcclOptions& options = {})
      : gpu_(gpu), options_(options), refusals_left_(options.allocate_throws_times) {}

  /// Ends the calls that would never return.
  ~FakeNccl();

  std::shared_ptr<nccl::Library> library(int rank);
  FakeNcclCounts counts(int rank) const;
  /// Waits until that many communicators of the rank have been aborted; false: not in 20 s.
  bool wait_for_aborts(int rank, int communicators);
  /// From now on health() of all communicators of this rank says that they have failed.
  void break_rank(int rank, bool remote, const std::string& text);

 private:
  friend class FakeNcclLibrary;
  struct Call {
    enum class Kind {
      kAllReduce,
      kBroadcast,
      kReduce,
      kAllGather,
      kReduceScatter,
      kSend,
      kReceive
    };
    Kind kind;
    const std::byte* in;
    std::byte* out;
    std::size_t count;
    DataType type;
    nccl::Reduction reduction;
    int peer;  ///< or root
  };
  struct Launch {
    std::vector<Call> calls;
    bool at_head = false;
    bool done = false;
    std::vector<std::vector<std::byte>> memory = {};  ///< another process's, for what it calls
  };
  struct World {
    std::string name;
    int size = 0;
    int joined = 0;
    int local_rank = 0;       ///< with a store: the only one in this process
    std::vector<int> owners;  // by rank: which rank of the test
    std::vector<std::vector<std::shared_ptr<Launch>>> launches;  // by rank
    std::vector<std::size_t> executed;                           // by rank: launches that are done
    std::vector<std::vector<std::size_t>> windows;  // by rank: the sizes of those that were begun
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
        {};  // how many bytes, and as which it was
    int registrations = 0;
    std::map<const std::byte*, std::size_t> windows = {};  // how many bytes
    void** window_to_be = nullptr;  // where the one that is being made will be written
    std::byte* window_memory = nullptr;
    bool changes() const { return busy > 0 || window_to_be != nullptr; }
  };

  struct Resident {
    std::shared_ptr<World> world;
    std::size_t position = 0;
  };

  Member& member_of(nccl::Comm comm) {
    return members_[reinterpret_cast<std::uintptr_t>(comm.handle) - 1];
  }
  nccl::Health make_window(Member&);
  void end_kernels(Member&);
  void free_member(Member&);
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
  bool take_room(int owner, const std::shared_ptr<World>&, std::size_t position);
  void report_circle(int owner);
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
  int calls_under_way_ = 0;  // that block
  bool closing_ = false;
};

}  // namespace hvd::testing
