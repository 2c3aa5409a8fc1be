#include "sim/member_sets_program.h"

#include <algorithm>
#include <numeric>

#include "support/job_helpers.h"

namespace hvd::testing {

MemberSetsProgram::MemberSetsProgram(std::uint64_t seed, int ranks) : ranks_(ranks) {
  Random random(seed, 47);
  const int count = 4 + random.below(10);
  for (int i = 0; i < count; ++i) add_life(random);
}

void MemberSetsProgram::add_life(Random& random) {
  constexpr const char* kNames[] = {"", "a", "b"};
  SetLife life;
  life.name = kNames[random.below(3)];
  life.uses = random.chance(60) ? random.below(4) : 8 + random.below(30);  // many are replayed
  life.in_sequence = random.chance(50);
  life.removed = random.chance(70);
  for (int rank = 0; rank < ranks_; ++rank) {
    if (random.chance(50)) life.members.push_back(rank);
  }
  if (life.members.empty()) life.members.push_back(random.below(ranks_));
  if (life.members.size() > 1 && ranks_ > 2 && random.chance(25)) deviate(life, random);
  lives_.push_back(std::move(life));
}

// The other list has another member in common with the right one, which waits for the deviating
// rank, so that both wait for each other.
void MemberSetsProgram::deviate(SetLife& life, Random& random) const {
  life.name = "disputed" + std::to_string(lives_.size());
  const auto count = static_cast<int>(life.members.size());
  const int deviating = random.below(count);
  life.deviates = life.members[static_cast<std::size_t>(deviating)];
  life.list_of_deviating = life.members;
  const bool all = count == ranks_;
  if (all || (count > 2 && random.chance(50))) {
    life.list_of_deviating.erase(life.list_of_deviating.begin() + (deviating + 1) % count);
    return;
  }
  int other = 0;
  while (std::ranges::binary_search(life.members, other)) ++other;
  life.list_of_deviating.insert(std::ranges::upper_bound(life.list_of_deviating, other), other);
}

MemberSetsRun::MemberSetsRun(const MemberSetsProgram& program, runtime::Runtime& runtime, int rank,
                             std::uint64_t seed, std::map<std::size_t, std::int64_t>& numbers)
    : program_(program),
      runtime_(runtime),
      rank_(rank),
      random_(seed, 1000 + static_cast<std::uint64_t>(rank)),
      numbers_(numbers) {
  std::map<std::string, Thread> by_name;
  for (std::size_t i = 0; i < program_.lives().size(); ++i) {
    const SetLife& life = program_.lives()[i];
    if (std::ranges::binary_search(life.members, rank)) by_name[life.name].lives.push_back(i);
  }
  for (auto& [name, thread] : by_name) threads_.push_back(std::move(thread));
}

bool MemberSetsRun::finished() const noexcept {
  return step_ == program_.steps() && step_operations_.empty() &&
         std::ranges::all_of(
             threads_, [](const Thread& thread) { return thread.life == thread.lives.size(); });
}

void MemberSetsRun::go_on() {
  for (Thread& thread : threads_) {
    if (random_.chance(50)) continue;
    if (!thread.operations.empty()) {
      if (!std::ranges::all_of(thread.operations, [](const Operation& one) { return one.done(); }))
        continue;
      check(thread);
      thread.operations.clear();
    }
    if (thread.life < thread.lives.size()) begin(thread);
  }
  if (random_.chance(70)) go_on_with_steps();
}

void MemberSetsRun::begin(Thread& thread) {
  const std::size_t index = thread.lives[thread.life];
  const SetLife& life = program_.lives()[index];
  if (thread.phase == 0) {
    const auto& ranks = life.deviates == rank_ ? life.list_of_deviating : life.members;
    thread.operations = {submit_one(
        runtime_, {.name = life.name, .parameters = AddProcessSet{ranks, /*by_members=*/true}})};
    return;
  }
  const auto number = static_cast<int>(numbers_.at(index));
  if (thread.phase > life.uses) {
    thread.operations = {submit_one(runtime_, {.parameters = RemoveProcessSet{number}})};
    return;
  }
  begin_use(thread, life, number);
}

void MemberSetsRun::begin_use(Thread& thread, const SetLife& life, int process_set) {
  const std::size_t count = life.in_sequence ? 1 + static_cast<std::size_t>(thread.phase % 4) : 1;
  thread.data.resize(count);
  for (std::size_t i = 0; i < count; ++i) {
    thread.data[i].assign(life.in_sequence && i == 2 ? 9 : 7,
                          static_cast<float>((rank_ + 1) * thread.phase));
    const bool named = !life.in_sequence && thread.phase % 2 != 0;
    Submission sum = float_operation(thread.data[i], named ? "use" : "");
    sum.process_set = process_set;
    sum.in_sequence = life.in_sequence;
    thread.operations.push_back(submit_one(runtime_, std::move(sum)));
  }
}

void MemberSetsRun::check(Thread& thread) {
  const std::size_t index = thread.lives[thread.life];
  const SetLife& life = program_.lives()[index];
  Status status = thread.operations.front().status();
  for (const Operation& one : thread.operations) {
    if (!one.status().ok()) status = one.status();
  }
  const bool disputed = life.deviates.has_value();
  if (disputed ? status.code != StatusCode::kMismatch : !status.ok())
    complain("set " + std::to_string(index) + ": " + status.message);
  if (!status.ok()) {
    ++thread.life;
    return;
  }
  if (thread.phase == 0) {
    const std::int64_t number = thread.operations.front().result();
    for (const auto& [other, known] : numbers_) {
      if ((other == index) != (known == number)) complain("sets share a number, or one has two");
    }
    numbers_.emplace(index, number);
  } else if (thread.phase <= life.uses) {
    int sum = 0;
    for (const int member : life.members) sum += (member + 1) * thread.phase;
    for (const auto& data : thread.data) {
      if (data.back() != static_cast<float>(sum)) complain("a wrong sum");
    }
  }
  if (++thread.phase <= life.uses + (life.removed ? 1 : 0)) return;
  thread.phase = 0;
  ++thread.life;
}

void MemberSetsRun::go_on_with_steps() {
  if (!std::ranges::all_of(step_operations_, [](const Operation& one) { return one.done(); }))
    return;
  const int all = program_.ranks() * (program_.ranks() + 1) / 2;
  for (std::size_t i = 0; i < step_operations_.size(); ++i) {
    if (!step_operations_[i].status().ok()) complain(step_operations_[i].status().message);
    if (step_data_[i].back() != static_cast<float>(all * step_)) complain("a wrong sum of a step");
  }
  step_operations_.clear();
  if (step_ == program_.steps()) return;
  ++step_;
  step_data_.assign(2, std::vector<float>(5, static_cast<float>((rank_ + 1) * step_)));
  for (std::size_t i = 0; i < step_data_.size(); ++i) {
    step_operations_.push_back(
        submit_one(runtime_, float_operation(step_data_[i], "step" + std::to_string(i))));
  }
}

void MemberSetsRun::complain(const std::string& what) {
  if (problem_.empty()) problem_ = "rank " + std::to_string(rank_) + ": " + what;
}

}  // namespace hvd::testing
