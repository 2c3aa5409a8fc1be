#include "support/fake_nccl.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <deque>
#include <functional>
#include <iterator>
#include <set>
#include <string>
#include <utility>

#include "hvd/error.h"
#include "kernels/half.h"
#include "kernels/kernels.h"

namespace hvd::testing {
namespace {

std::size_t bytes_of(std::size_t count, DataType type) { return count * size_of(type); }

ReduceOp op_of(nccl::Reduction reduction) {
  switch (reduction) {
    case nccl::Reduction::kProduct:
      return ReduceOp::kProduct;
    case nccl::Reduction::kMin:
      return ReduceOp::kMin;
    case nccl::Reduction::kMax:
      return ReduceOp::kMax;
    default:
      return ReduceOp::kSum;
  }
}

/// NCCL rounds the factor of an average to the tensors' type.
ReduceScale scale_of_average(DataType type, int ranks) {
  const float factor = 1.0F / static_cast<float>(ranks);
  if (type == DataType::kBFloat16)
    return {.prescale = bfloat16_to_float(float_to_bfloat16(factor))};
  if (type == DataType::kFloat16) return {.prescale = half_to_float(float_to_half(factor))};
  return {.divisor = ranks};
}

}  // namespace

class FakeNcclLibrary final : public nccl::Library {
 public:
  using Call = FakeNccl::Call;
  FakeNcclLibrary(FakeNccl& nccl, int rank) : nccl_(nccl), rank_(rank) {}

  int version() const noexcept override { return nccl_.options_.version; }
  nccl::UniqueId make_id() override {
    const std::lock_guard lock(nccl_.mutex_);
    nccl::UniqueId id = {};
    const int number = ++nccl_.ids_;
    const pid_t process = ::getpid();
    std::memcpy(id.data() + 60, &number, sizeof number);
    std::memcpy(id.data() + 80, &process, sizeof process);
    return id;
  }

  nccl::Comm begin_init(const nccl::UniqueId& id, int size, int rank,
                        nccl::Blocking blocking) override {
    std::unique_lock lock(nccl_.mutex_);
    const bool blocks = blocking == nccl::Blocking::kYes;
    ++counts().inits;
    if (rank_ == nccl_.options_.init_throws_at) throw Error("fake NCCL: no socket interface found");
    if (std::all_of(id.begin(), id.end(), [](std::byte b) { return b == std::byte{0}; }))
      throw Error("fake NCCL: not an id");
    auto& world = nccl_.worlds_[id];
    if (!world) {
      world = std::make_shared<FakeNccl::World>();
      world->size = size;
      for (const std::byte byte : id) world->name += std::to_string(std::to_integer<int>(byte));
      world->launches.resize(static_cast<std::size_t>(size));
      world->executed.resize(static_cast<std::size_t>(size));
      world->owners.resize(static_cast<std::size_t>(size), -1);
    }
    if (world->size != size) throw Error("fake NCCL: ranks disagree about the number of ranks");
    if (nccl_.options_.store) {
      world->local_rank = rank;
      nccl_.options_.store->put(FakeNccl::key_of(*world, "joined", rank, 0), {});
    } else {
      ++world->joined;
    }
    world->owners[static_cast<std::size_t>(rank)] = rank_;
    const bool fails = rank_ == nccl_.options_.init_fails_at;
    nccl_.members_.push_back({world, rank, rank_, 0, blocks, true, fails});
    const nccl::Comm comm{reinterpret_cast<void*>(nccl_.members_.size())};
    begin_call(comm);
    if (!blocks) return comm;
    if (fails) throw Error("fake NCCL: out of device memory");
    const std::shared_ptr<FakeNccl::World> joined = world;
    if (nccl_.wait_in_call(comm, lock, [&] { return nccl_.all_joined(*joined); })) return comm;
    throw Error("fake NCCL: the communicator was aborted");
  }

  nccl::Health health(nccl::Comm comm) override {
    const std::lock_guard lock(nccl_.mutex_);
    FakeNccl::Member& member = member_of(comm);
    if (member.broken) return {nccl::CommState::kFailed, false, "out of device memory"};
    const auto broken = nccl_.broken_.find(rank_);
    if (broken != nccl_.broken_.end()) return broken->second;
    if (!nccl_.all_joined(*member.world)) return {nccl::CommState::kBusy};
    if (member.busy-- > 0) return {nccl::CommState::kBusy};
    return {};
  }

  void begin_finalize(nccl::Comm comm) override {
    const std::lock_guard lock(nccl_.mutex_);
    ++counts().finalized;
    begin_call(comm);
    nccl_.gpu_.run_all();
  }
  void destroy(nccl::Comm comm) noexcept override {
    std::unique_lock lock(nccl_.mutex_);
    if (!nccl_.wait_for_device(rank_, lock)) return;
    ++counts().destroyed;
    member_of(comm).alive = false;
    if (!member_of(comm).registered.empty())
      nccl_.gpu_.fault("NCCL: a communicator was destroyed that has registered buffers");
  }
  void abort(std::span<const nccl::Comm> comms) noexcept override {
    std::unique_lock lock(nccl_.mutex_);
    const bool grouped = nccl_.options_.version >= 22200;
    for (const nccl::Comm comm : comms) {
      if (grouped) nccl_.end_kernels(member_of(comm));
    }
    for (const nccl::Comm comm : comms) {
      if (!grouped) nccl_.end_kernels(member_of(comm));
      if (!nccl_.wait_for_device(rank_, lock)) return;
      nccl_.free_member(comm);
    }
  }

  bool revoke(nccl::Comm comm) noexcept override {
    const std::lock_guard lock(nccl_.mutex_);
    if (nccl_.options_.version < 22809) return false;
    ++counts().revoked;
    nccl_.end_kernels(member_of(comm));
    return true;
  }

  void begin_group() override {
    const std::lock_guard lock(nccl_.mutex_);
    ++depth_;
  }
  void end_group() override {
    std::unique_lock lock(nccl_.mutex_);
    if (--depth_ > 0 || group_.empty()) return;
    enqueue(std::exchange(group_, {}), group_comm_, group_stream_, lock);
  }

  void launch(const Call& call, nccl::Comm comm, device::Stream stream) override {
    std::unique_lock lock(nccl_.mutex_);
    ++counts().calls;
    counts().reductions.push_back(call.reduction);
    if (call.type == DataType::kInt16 || call.type == DataType::kBool)
      throw Error("fake NCCL: no such type");
    if (depth_ == 0) return enqueue({call}, comm, stream, lock);
    group_.push_back(call);
    group_comm_ = comm;
    group_stream_ = stream;
  }

  bool has_registration() const noexcept override { return nccl_.options_.version >= 21900; }
  std::byte* allocate(std::size_t bytes) override {
    const std::lock_guard lock(nccl_.mutex_);
    count_caller();
    if (rank_ == nccl_.options_.allocate_throws_at && nccl_.refusals_left_ != 0) {
      if (nccl_.refusals_left_ > 0) --nccl_.refusals_left_;
      throw Error("fake NCCL: out of device memory");
    }
    ++counts().allocated;
    return nccl_.gpu_.allocate(bytes);
  }
  void release(std::byte* memory) noexcept override {
    const std::lock_guard lock(nccl_.mutex_);
    count_caller();
    --counts().allocated;
    for (const FakeNccl::Member& member : nccl_.members_) {
      if (member.registered.contains(memory))
        nccl_.gpu_.fault("NCCL: a buffer was freed that is registered");
    }
    nccl_.gpu_.release(memory);
  }
  void* register_buffer(nccl::Comm comm, std::byte* memory, std::size_t bytes) override {
    const std::lock_guard lock(nccl_.mutex_);
    FakeNccl::Member& member = member_of(comm);
    if (!member.alive || member.busy > 0)
      throw Error("fake NCCL: the communicator is gone or busy");
    if (rank_ == nccl_.options_.register_throws_at) throw Error("fake NCCL: cannot register");
    if (member.registered.contains(memory)) nccl_.gpu_.fault("NCCL: a buffer was registered twice");
    ++counts().registered;
    ++counts().registrations;
    member.registered[memory] = {bytes, member.registrations++};
    return memory;
  }
  void deregister_buffer(nccl::Comm comm, void* registration) noexcept override {
    const std::lock_guard lock(nccl_.mutex_);
    FakeNccl::Member& member = member_of(comm);
    if (!member.alive)
      nccl_.gpu_.fault("NCCL: a buffer was deregistered after its communicator had ended");
    if (member.registered.erase(static_cast<std::byte*>(registration)) == 0)
      nccl_.gpu_.fault("NCCL: a buffer was deregistered that is not registered");
    --counts().registered;
  }

 private:
  FakeNcclCounts& counts() { return nccl_.counts_[rank_]; }
  void count_caller() {
    if (std::this_thread::get_id() == nccl_.maker_) ++counts().memory_calls_by_maker;
  }
  FakeNccl::Member& member_of(nccl::Comm comm) { return nccl_.member_of(comm); }

  void begin_call(nccl::Comm comm) {
    FakeNccl::Member& member = member_of(comm);
    if (member.blocks) return;
    member.busy = nccl_.options_.busy_answers;
    ++counts().threads;
  }

  void enqueue(std::vector<Call> calls, nccl::Comm comm, device::Stream stream,
               std::unique_lock<std::recursive_mutex>& lock) {
    if (!member_of(comm).alive) throw Error("fake NCCL: the communicator is gone");
    if (member_of(comm).busy > 0) throw Error("fake NCCL: a call while the last one is under way");
    begin_call(comm);
    if (member_of(comm).blocks && rank_ == nccl_.options_.launch_hangs_at) {
      nccl_.wait_in_call(comm, lock, [] { return false; });
      throw Error("fake NCCL: the communicator was aborted");
    }
    if (member_of(comm).blocks) {
      const auto end = std::chrono::steady_clock::now() + nccl_.options_.launch_takes;
      const auto over = [end] { return std::chrono::steady_clock::now() >= end; };
      if (!nccl_.wait_in_call(comm, lock, over))
        throw Error("fake NCCL: the communicator was aborted");
    }
    FakeNccl::Member& member = member_of(comm);
    ++counts().launches;
    auto& launches = member.world->launches[static_cast<std::size_t>(member.rank)];
    const auto launched = std::make_shared<FakeNccl::Launch>();
    launched->calls = std::move(calls);
    const std::size_t position = launches.size();
    launches.push_back(launched);
    FakeGpu::Item item;
    item.name = "NCCL";
    for (const Call& call : launched->calls) {
      const auto [in, out] = FakeNccl::sizes_of(call, member.rank, member.world->size);
      if (in > 0) item.ranges.push_back({call.in, in, false});
      if (out > 0) item.ranges.push_back({call.out, out, true});
    }
    item.ready = [&nccl = nccl_, rank = rank_, launched, world = member.world, position] {
      const std::lock_guard held(nccl.mutex_);
      if (launched->done) return true;
      if (!nccl.occupy_device(rank, world, position)) return false;
      if (!std::exchange(launched->at_head, true) && nccl.options_.store)
        nccl.publish(*world, position);
      if (nccl.try_execute(*world, position)) return true;
      nccl.report_cycle(rank);
      return false;
    };
    nccl_.gpu_.enqueue(stream, std::move(item));
  }

  FakeNccl& nccl_;
  const int rank_;
  int depth_ = 0;
  std::vector<Call> group_;
  nccl::Comm group_comm_;
  device::Stream group_stream_;
};

std::shared_ptr<nccl::Library> FakeNccl::library(int rank) {
  return std::make_shared<FakeNcclLibrary>(*this, rank);
}

FakeNccl::~FakeNccl() {
  std::unique_lock lock(mutex_);
  closing_ = true;
  changed_.notify_all();
  changed_.wait(lock, [this] { return calls_under_way_ == 0; });
}

// Ends the communicator's kernels on the device. The contents of their outputs are undefined.
void FakeNccl::end_kernels(Member& member) {
  member.alive = false;
  const auto resident = residents_.find(member.owner);
  if (resident != residents_.end() && resident->second.world == member.world)
    residents_.erase(resident);
  for (const auto& launch : member.world->launches[static_cast<std::size_t>(member.rank)])
    launch->done = true;
}

void FakeNccl::free_member(nccl::Comm comm) {
  Member& member = member_of(comm);
  FakeNcclCounts& counts = counts_[member.owner];
  if (member.calls_inside > 0 && options_.version >= 22809)
    gpu_.fault("NCCL: a communicator was freed while another thread was inside a call on it");
  counts.registered -= static_cast<int>(std::exchange(member.registered, {}).size());
  ++counts.aborted;
  changed_.notify_all();
}

// Runs the device itself, because no other thread of the test may be running it.
bool FakeNccl::wait_for_device(int rank, std::unique_lock<std::recursive_mutex>& lock) {
  ++calls_under_way_;
  while (!closing_ && !gpu_.run_until_idle(rank))
    changed_.wait_for(lock, std::chrono::milliseconds(1));
  --calls_under_way_;
  changed_.notify_all();
  return !closing_;
}

// Returns false if the communicator was aborted or revoked meanwhile.
bool FakeNccl::wait_in_call(nccl::Comm comm, std::unique_lock<std::recursive_mutex>& lock,
                            const std::function<bool()>& over) {
  ++calls_under_way_;
  ++member_of(comm).calls_inside;
  while (!closing_ && member_of(comm).alive && !over())
    changed_.wait_for(lock, std::chrono::milliseconds(1));
  if (!member_of(comm).alive && options_.return_takes > std::chrono::milliseconds(0))
    changed_.wait_for(lock, options_.return_takes, [this] { return closing_; });
  --member_of(comm).calls_inside;
  --calls_under_way_;
  changed_.notify_all();
  return !closing_ && member_of(comm).alive;
}

bool FakeNccl::wait_for_aborts(int rank, int communicators) {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, std::chrono::seconds(20),
                           [&] { return counts_[rank].aborted == communicators; });
}

FakeNcclCounts FakeNccl::counts(int rank) const {
  const std::lock_guard lock(mutex_);
  const auto found = counts_.find(rank);
  return found == counts_.end() ? FakeNcclCounts{} : found->second;
}

void FakeNccl::break_rank(int rank, bool remote, const std::string& text) {
  const std::lock_guard lock(mutex_);
  broken_[rank] = {nccl::CommState::kFailed, remote, text};
}

bool FakeNccl::occupy_device(int owner, const std::shared_ptr<World>& world, std::size_t position) {
  const auto [found, took] = residents_.try_emplace(owner, Resident{world, position});
  return took || (found->second.world == world && found->second.position == position);
}

/// Reports a cycle of ranks in which each rank's kernel waits for a rank that runs another kernel.
void FakeNccl::report_cycle(int owner) {
  std::set<int> seen;
  std::string path;
  int at = owner;
  while (seen.insert(at).second) {
    const auto waiting = residents_.find(at);
    if (waiting == residents_.end()) return;
    const auto& [world, position] = waiting->second;
    int next = -1;
    for (std::size_t rank = 0; rank < world->owners.size(); ++rank) {
      const int other = world->owners[rank];
      const auto its = residents_.find(other);
      if (its == residents_.end()) continue;
      if (its->second.world != world || its->second.position != position) next = other;
    }
    if (next < 0) return;
    path += "rank " + std::to_string(at) + " waits for ";
    at = next;
  }
  const std::string text = "NCCL: kernels of several communicators wait for each other: rank " +
                           path + "rank " + std::to_string(at);
  if (gpu_.faults().empty()) gpu_.fault(text);  // only once, although this is called repeatedly
}

bool FakeNccl::try_execute(World& world, std::size_t position) {
  if (options_.store && !fetch(world, position)) return false;
  for (const auto& launches : world.launches) {
    if (launches.size() <= position || !launches[position]->at_head) return false;
  }
  execute(world, position);
  if (options_.store) forget(world, position);
  return true;
}

void FakeNccl::execute(World& world, std::size_t position) {
  std::vector<std::vector<const Call*>> collectives(static_cast<std::size_t>(world.size));
  std::map<std::pair<int, int>, std::deque<const Call*>> sent;
  std::map<std::pair<int, int>, std::deque<const Call*>> received;
  for (int rank = 0; rank < world.size; ++rank) {
    for (const Call& call : world.launches[static_cast<std::size_t>(rank)][position]->calls) {
      if (call.kind == Call::Kind::kSend) {
        sent[{rank, call.peer}].push_back(&call);
      } else if (call.kind == Call::Kind::kReceive) {
        received[{call.peer, rank}].push_back(&call);
      } else {
        collectives[static_cast<std::size_t>(rank)].push_back(&call);
      }
    }
  }
  for (auto& [pair, calls] : sent) {
    for (const Call* call : calls) {
      auto& matching = received[pair];
      if (matching.empty() || matching.front()->count != call->count ||
          matching.front()->type != call->type) {
        throw Error("fake NCCL: a send without a receive that fits");
      }
      std::memcpy(matching.front()->out, call->in, bytes_of(call->count, call->type));
      matching.pop_front();
    }
  }
  for (std::size_t i = 0; i < collectives[0].size(); ++i) {
    std::vector<const Call*> members;
    for (const auto& calls : collectives) {
      if (calls.size() != collectives[0].size())
        throw Error("fake NCCL: ranks launched different groups");
      members.push_back(calls[i]);
    }
    execute_collective(world, members);
  }
  for (const auto& launches : world.launches) launches[position]->done = true;
  for (const int owner : world.owners) residents_.erase(owner);
}

void FakeNccl::check_registered(const World& world, const std::vector<const Call*>& calls) {
  constexpr int kPlain = -1;
  const auto buffer_of = [](const Member& member, const std::byte* memory) {
    const auto after = member.registered.upper_bound(memory);
    if (after == member.registered.begin()) return kPlain;
    const auto& [begin, entry] = *std::prev(after);
    return memory < begin + entry.first ? entry.second : kPlain;
  };
  std::vector<std::pair<int, int>> buffers;
  for (const Member& member : members_) {
    if (member.world.get() != &world) continue;
    const Call& call = *calls[static_cast<std::size_t>(member.rank)];
    buffers.emplace_back(buffer_of(member, call.in), buffer_of(member, call.out));
    if (buffers.back().second != kPlain) ++counts_[member.owner].from_registered;
  }
  if (std::adjacent_find(buffers.begin(), buffers.end(), std::not_equal_to<>()) == buffers.end())
    return;
  gpu_.fault("NCCL: a collective of registered memory on some ranks only, or of different buffers");
}

void FakeNccl::execute_collective(World& world, const std::vector<const Call*>& members) {
  const Call& first = *members.front();
  for (const Call* call : members) {
    if (call->kind != first.kind || call->count != first.count || call->type != first.type ||
        call->reduction != first.reduction || call->peer != first.peer) {
      throw Error("fake NCCL: ranks launched different collectives");
    }
  }
  if (!options_.store) check_registered(world, members);
  const std::size_t bytes = bytes_of(first.count, first.type);
  const auto ranks = static_cast<std::size_t>(world.size);
  const auto root = static_cast<std::size_t>(std::max(first.peer, 0));
  const auto reduced = [&](std::size_t offset) {
    std::vector<const std::byte*> sources;
    for (const Call* call : members) sources.push_back(call->in + offset);
    std::vector<std::byte> result(bytes);
    ReduceScale scale;
    if (first.reduction == nccl::Reduction::kAverage)
      scale = scale_of_average(first.type, world.size);
    reduce(sources, result.data(), static_cast<std::int64_t>(first.count), first.type,
           op_of(first.reduction), scale);
    return result;
  };
  std::vector<std::vector<std::byte>> outputs(ranks);
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    switch (first.kind) {
      case Call::Kind::kAllReduce:
        outputs[rank] = reduced(0);
        break;
      case Call::Kind::kReduceScatter:
        outputs[rank] = reduced(rank * bytes);
        break;
      case Call::Kind::kBroadcast:
        outputs[rank].assign(members[root]->in, members[root]->in + bytes);
        break;
      case Call::Kind::kReduce:
        if (rank == root) outputs[rank] = reduced(0);
        break;
      default:
        for (const Call* call : members)
          outputs[rank].insert(outputs[rank].end(), call->in, call->in + bytes);
    }
  }
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    if (!outputs[rank].empty())
      std::memcpy(members[rank]->out, outputs[rank].data(), outputs[rank].size());
  }
}

}  // namespace hvd::testing
