#include "c10d/group.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <numeric>
#include <utility>

#include "base/text.h"
#include "hvd/collectives.h"
#include "hvd/error.h"
#include "hvd/hvd.h"
#include "hvd/reconfigure.h"
#include "hvd/torch/store.h"

namespace hvd::libtorch {
namespace {

/// The groups' shared state about this process's membership in the job. Never destroyed, because
/// groups may outlive static objects.
struct Membership {
  std::mutex mutex;  // held while the process joins or leaves
  int groups = 0;
  bool joined_by_group = false;
  // Whether a group has used the process set of all ranks. Ranks destroy their groups at different
  // times, so the current number of groups must not determine which group uses it.
  bool world_set_used = false;
  // Counts the jobs that reconfigure() has formed, from 1.
  std::atomic<std::uint64_t> job = 1;
};

Membership& membership() {
  static Membership* const instance = new Membership;
  return *instance;
}

/// The members as ranks of the job. @param ranks empty: all ranks
std::vector<int> members_of(const std::vector<std::int64_t>& ranks, int size) {
  std::vector<int> members(ranks.begin(), ranks.end());
  if (members.empty()) {
    members.resize(static_cast<std::size_t>(size));
    std::iota(members.begin(), members.end(), 0);
  }
  if (static_cast<int>(members.size()) == size && std::ranges::is_sorted(members)) return members;
  throw UsageError(text("C10dBackend: a group of size ", size, " with the ranks ",
                        shape_to_string(ranks), "; expected as many ranks, in ascending order"));
}

bool has_all_ranks(const std::vector<int>& members, int job_size) {
  return static_cast<int>(members.size()) == job_size && members.front() == 0 &&
         members.back() == job_size - 1;
}

Options options_of(std::chrono::milliseconds timeout, std::chrono::milliseconds stall_timeout) {
  Options options{.init_timeout = timeout};
  if (std::getenv("HVD_STALL_SHUTDOWN") == nullptr) options.stall_shutdown = stall_timeout;
  return options;
}

void check_job(const std::vector<int>& members, int rank) {
  if (members.back() < hvd::size() && members[static_cast<std::size_t>(rank)] == hvd::rank())
    return;
  throw UsageError(text("C10dBackend: rank ", rank, " of a group of the ranks ",
                        shape_to_string(std::vector<std::int64_t>(members.begin(), members.end())),
                        ", but this process is rank ", hvd::rank(), " of ", hvd::size(),
                        " of the job that it has joined; expected the same numbers; see the "
                        "arguments of init_process_group and hvd::init"));
}

}  // namespace

Group::Group(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
             const std::vector<std::int64_t>& ranks, std::chrono::milliseconds timeout)
    : ranks_(members_of(ranks, size)), rank_(rank), size_(size) {
  Membership& job = membership();
  const std::lock_guard lock(job.mutex);
  if (!is_initialized()) {
    if (!has_all_ranks(ranks_, size))
      throw UsageError(text("C10dBackend: the first group has the ranks ", shape_to_string(ranks),
                            "; expected all ranks of the job, from 0 on; make the default group "
                            "with the backend hvd, or call hvd::init() before"));
    init(store, rank, size, options_of(timeout, timeout));
    job.joined_by_group = true;
    job.world_set_used = false;
  }
  check_job(ranks_, rank);
  job_ = job.job;
  if (!has_all_ranks(ranks_, hvd::size()) || std::exchange(job.world_set_used, true))
    set_ = add_process_set(ranks_, {.by_members = true});
  ++job.groups;
}

Group::Group(std::vector<int> ranks, int rank, std::uint64_t job)
    : ranks_(std::move(ranks)), rank_(rank), size_(static_cast<int>(ranks_.size())), job_(job) {}

std::shared_ptr<Group> Group::reconfigured(Group& former, std::int64_t uuid,
                                           const std::vector<std::string>& handles,
                                           std::chrono::milliseconds timeout,
                                           std::chrono::milliseconds stall_timeout) {
  Membership& job = membership();
  const std::lock_guard lock(job.mutex);
  if (former.is_current() && is_initialized() && !has_all_ranks(former.ranks_, hvd::size()))
    throw UsageError(text("C10dBackend: reconfigure: the group has ", former.size_, " of the ",
                          hvd::size(),
                          " ranks of the job, which is formed anew as a whole; call "
                          "it for the default group"));
  hvd::reconfigure(uuid, handles, options_of(timeout, stall_timeout));
  job.joined_by_group = true;
  job.world_set_used = true;
  ++job.job;
  ++job.groups;
  std::vector<int> ranks(handles.size());
  std::iota(ranks.begin(), ranks.end(), 0);
  std::shared_ptr<Group> group(new Group(std::move(ranks), hvd::rank(), job.job));
  group->instance_ = text(uuid, "/");
  return group;
}

bool Group::is_current() const noexcept { return job_ == membership().job; }

const ProcessSet& Group::set() const {
  if (is_current()) return set_;
  if (job_ == 0)
    throw UsageError(
        "C10dBackend: the group has no members before reconfigure(), because it was made with "
        "enable_reconfigure; call reconfigure() first");
  throw UsageError(
      "C10dBackend: the job of the group has ended in reconfigure() of another group; make the "
      "group again");
}

int Group::world_rank(std::int64_t group_rank) const {
  const auto size = static_cast<std::int64_t>(ranks_.size());
  if (group_rank >= 0 && group_rank < size) return ranks_[static_cast<std::size_t>(group_rank)];
  throw UsageError(text("C10dBackend: rank ", group_rank, " in a group of ", size,
                        " ranks; expected 0 to ", size - 1));
}

int Group::group_rank(int world_rank) const {
  const auto found = std::ranges::lower_bound(ranks_, world_rank);
  TORCH_INTERNAL_ASSERT_DEBUG_ONLY(found != ranks_.end() && *found == world_rank);
  return static_cast<int>(found - ranks_.begin());
}

bool Group::release() noexcept {
  if (left_.exchange(true)) return false;
  Membership& job = membership();
  const std::lock_guard lock(job.mutex);
  if (job_ != 0) --job.groups;
  return true;
}

void Group::remove_set() noexcept {
  if (set_.id() == 0 || !is_current()) return;
  try {
    submit({.parameters = RemoveProcessSet{set_.id()}});
  } catch (const std::exception&) {  // the job has failed, or this process has left it
  }
}

void Group::leave() noexcept {
  if (!release()) return;
  remove_set();
  Membership& job = membership();
  const std::lock_guard lock(job.mutex);
  if (job.groups > 0 || !job.joined_by_group) return;
  job.joined_by_group = false;
  try {
    hvd::shutdown();
  } catch (const std::exception& error) {
    TORCH_WARN("hvd: leaving the job with the last group failed: ", error.what());
  }
}

}  // namespace hvd::libtorch
