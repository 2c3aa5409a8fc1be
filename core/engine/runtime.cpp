#include "engine/runtime.h"

#include <sched.h>

#include <algorithm>
#include <exception>

#include "base/expect.h"
#include "base/log.h"
#include "base/spin.h"
#include "base/text.h"
#include "base/thread.h"
#include "hvd/background.h"
#include "hvd/error.h"
#include "negotiation/validator.h"

namespace hvd::runtime {
namespace {

// A round trip between engines that are awake takes a microsecond; yielding the core takes half of
// one, and sleeping and being woken fifty. So a driver that finds no work first spins for 10 to 20
// us, if it has a core for that, then yields the core for about as long as a wake-up takes, then
// sleeps.
constexpr int kSpinsBeforeYield = 150;
constexpr int kYieldsBeforeSleep = 64;
// A longer timeout counts as no limit, because its sum with the clock's time might overflow.
constexpr Duration kLongestTimeout = std::chrono::hours(24 * 365);
/// How much later than agreed the engine may write a description.
constexpr Duration kDescriptionSlack = std::chrono::milliseconds(100);

/// How long to sleep after this many idle rounds, not counting spins. Zero: yield the core instead.
Duration pause_after(int idle_rounds, const Engine& engine) HVD_REQUIRES(engine.progress()) {
  const bool polls = engine.needs_polling();  // once: another thread's message may change it
  if (idle_rounds < kYieldsBeforeSleep && (polls || engine.busy())) return Duration::zero();
  const Duration deadline = engine.time_to_deadline();
  if (!polls) return deadline;
  return std::min(poll_interval(engine.polls_for(), idle_rounds - kYieldsBeforeSleep), deadline);
}

}  // namespace

std::shared_ptr<Runtime> Runtime::create(const RuntimeOptions& options,
                                         std::unique_ptr<control::ControlPlane> control,
                                         std::vector<std::shared_ptr<Backend>> backends,
                                         const Clock& clock, std::shared_ptr<SharedArena> arena,
                                         std::shared_ptr<device::Context> device) {
  std::shared_ptr<Runtime> runtime(new Runtime(options, std::move(control), std::move(backends),
                                               clock, std::move(arena), std::move(device)));
  runtime->self_ = runtime;
  if (options.background_thread) {
    runtime->thread_ = start_thread(
        "hvd-engine", [self = runtime.get()](std::stop_token stop) { self->run(stop); });
  }
  return runtime;
}

Runtime::Runtime(const RuntimeOptions& options, std::unique_ptr<control::ControlPlane> control,
                 std::vector<std::shared_ptr<Backend>> backends, const Clock& clock,
                 std::shared_ptr<SharedArena> arena, std::shared_ptr<device::Context> device)
    : options_(options),
      progress_policy_(choose_progress_policy(options.progress, control->topology().local_size)),
      clock_(clock),
      device_(device),
      engine_(options_, {std::move(control), std::move(backends), clock_, counters_, timeline_,
                         std::move(arena), std::move(device)}) {
  if (options_.timeline_path) start_timeline(*options_.timeline_path);
}

Runtime::~Runtime() {
  stop_thread();
  engine_.end_outstanding(
      {StatusCode::kShutdown,
       "hvd was shut down while this operation was outstanding; wait for it before shutdown()",
       -1});
}

void Runtime::submit(std::span<const Submission> submissions, std::span<Operation> handles,
                     Progress progress) {
  const TimePoint now = timeline_.on() ? clock_.now() : clock_.about_now();
  engine_.operations().submit(submissions, handles, self_, now);
  if (progress == Progress::kBackground) progress_after_submit();
}

/// Call this after a submission. With inline progress the calling thread makes the progress that
/// is possible now. Otherwise, and if work is left, it rings the doorbell.
void Runtime::progress_after_submit() {
  Doorbell& doorbell = engine_.doorbell();
  if (!progress_policy_.inline_progress || !options_.background_thread ||
      engine_.operations().calls_back() || !try_acquire_progress())
    return doorbell.ring();
  // A callback must run outside of a call to hvd, with no lock held. Under progress ownership this
  // check covers the engine's operations, and the steps below accept no operation with a callback.
  if (engine_.operations().calls_back()) {
    release_progress();
    return doorbell.ring();
  }
  doorbell.add_driver();
  std::uint32_t ticket = doorbell.ticket();
  while (engine_.step(Engine::Callbacks::kNone)) {
    ticket = doorbell.ticket();
    notify_waiters(0);
  }
  const bool wants_polling = engine_.transferring();
  const bool work_left = engine_.busy() || engine_.needs_polling();
  const bool left_over = engine_.submission_queue().has_submissions();
  release_progress();
  doorbell.remove_driver(ticket);
  if (left_over || wants_polling || closing_.load() || (work_left && standby_yielded_.load()))
    doorbell.ring();
}

std::vector<Operation> Runtime::submit(const std::vector<Submission>& submissions,
                                       Progress progress) {
  std::vector<Operation> handles(submissions.size());
  submit(submissions, handles, progress);
  return handles;
}

std::vector<Operation> Runtime::submit(std::span<const Message> messages, Progress progress) {
  std::vector<Operation> handles(messages.size());
  engine_.operations().submit(messages, handles, self_, clock_.now());
  if (progress == Progress::kBackground) progress_after_submit();
  return handles;
}

std::optional<int> Runtime::pass_quickly(const Message& message) {
  if (!progress_policy_.spins || !options_.background_thread || has_waiters() ||
      !try_acquire_progress())
    return std::nullopt;
  const std::optional<int> peer =
      engine_.pass_quickly(message, [this] { return has_waiters() || closing_.load(); });
  const bool transferring = engine_.transferring();
  release_progress();
  // This thread did not count as a driver, so each ring in the meantime woke the engine thread,
  // which found progress owned and yielded.
  if (transferring || standby_yielded_.load()) engine_.doorbell().ring();
  return peer;
}

// Note [Progress without a lock]
// Progress mostly changes hands while no other thread waits for it. Then one write to claims_ does
// it. A thread that finds it owned locks progress_mutex_, counts itself as a waiter, reads claims_
// again, and sleeps. A thread that releases progress while another is counted also takes the lock
// before it notifies. So either it sees the waiter, or the waiter finds progress free.
//
// The engine thread sets standby_yielded_ before it looks at claims_, and a thread that releases
// progress looks at standby_yielded_ afterwards. All of these accesses are sequentially consistent,
// so either the engine thread finds progress free, or the other thread finds that it has yielded
// (MUT_YIELD in test/models/progress_ownership.pml).

/// Takes progress ownership, and makes the claim `own`, unless one of `in_the_way` is made.
bool Runtime::own_progress(Claims in_the_way, Claims own) noexcept {
  Claims claims = claims_.load();
  do {
    if ((claims & in_the_way) != 0) return false;
  } while (!claims_.compare_exchange_weak(claims, claims + kOwned + own));
  progress_owner_.store(std::this_thread::get_id(), std::memory_order_relaxed);
  return true;
}

bool Runtime::try_acquire_progress() { return own_progress(kOwned, 0); }

// Callbacks run on the thread that drives. A thread's id is stored and cleared only by that thread,
// so a relaxed load is enough.
bool Runtime::in_callback() const noexcept {
  return progress_owner_.load(std::memory_order_relaxed) == std::this_thread::get_id();
}

void Runtime::throw_in_callback(const std::string& call) const {
  throw UsageError(text(
      call, " on rank ", topology().rank,
      ": called in a callback of an operation, on the thread that drives all operations, so it "
      "would wait forever; a callback must not wait for hvd: let it wake another thread that "
      "does"));
}

void Runtime::acquire_progress() {
  const MutexLock lock(progress_mutex_);
  claims_.fetch_add(kWaiter);
  while (!own_progress(kOwned, 0)) progress_changed_.wait(progress_mutex_);
  claims_.fetch_sub(kWaiter);
  engine_.progress().acquired();
}

/// @param leaving the claim of this thread, which stops waiting with this call
void Runtime::release_progress(Claims leaving) {
  engine_.progress().released();
  progress_owner_.store({}, std::memory_order_relaxed);
  Claims claims = claims_.load();
  while (waiters_in(claims) == waiters_in(leaving)) {
    if (claims_.compare_exchange_weak(claims, claims - kOwned - leaving)) return;
  }
  {
    const MutexLock lock(progress_mutex_);
    claims_.fetch_sub(kOwned + leaving);
  }
  progress_changed_.notify_all();
}

/// @param driving kWaiter if this thread, which drives, counts as a waiter; else 0
void Runtime::notify_waiters(Claims driving) {
  // Adding 0 is a write, so it is ordered with a waiter's increment: either this thread sees the
  // waiter, or the waiter sees the progress.
  if (waiters_in(claims_.fetch_add(0)) <= driving) return;
  // The empty critical section orders this after a waiter's check of its condition, so that it
  // cannot miss the notification.
  { const MutexLock lock(progress_mutex_); }
  progress_changed_.notify_all();
}

// Note [Which thread a ring wakes]
// The engine thread sleeps in two ways. After a step of its own it sleeps for as long as that step
// allows, and any ring wakes it unless another thread drives. After it has yielded to another
// thread, it sleeps for a long time without driving. The other thread then has to wake it, and when
// it wakes it must not find a reason to yield again. Three rules follow. A waiter stops counting as
// a waiter before it rings. The last waiter that leaves without having driven rings too, because
// earlier rings relied on it. A thread that drove after its submission, which rings for transfers
// only, rings if the engine thread has yielded. In addition, a thread that is about to wait rings
// for the driver, because its submission may not have woken any thread. For each of these rules,
// test/models/progress_ownership.pml has a mutant that breaks it.
void Runtime::run(std::stop_token stop) {
  while (!stop.stop_requested()) {
    const std::uint32_t ticket = engine_.doorbell().ticket();
    if (!acquire_progress_as_standby()) {
      engine_.doorbell().sleep(ticket, Doorbell::Sleeper::kStandby, options_.peer_timeout / 8);
      continue;
    }
    drive_standby(stop);
  }
}

/// Acquires progress for the engine thread, unless another thread owns it or waits for an
/// operation. A waiter drives or is about to drive.
bool Runtime::acquire_progress_as_standby() {
  standby_yielded_.store(true);
  if (!own_progress(kOwned | kWaiters, 0)) return false;
  standby_yielded_.store(false);
  return true;
}

void Runtime::drive_standby(const std::stop_token& stop) {
  int idle_rounds = 0;  // no spinning: the program may need the core
  for (;;) {
    const std::uint32_t ticket = engine_.doorbell().ticket();
    const bool moved = engine_.step();
    if (moved) notify_waiters(0);
    idle_rounds = moved ? 0 : idle_rounds + 1;
    const Duration pause = moved ? Duration::zero() : pause_after(idle_rounds, engine_);
    const bool leave = has_waiters() || stop.stop_requested();
    if (!leave && moved) continue;
    if (!leave && pause == Duration::zero()) {
      sched_yield();
      continue;
    }
    release_progress();
    if (leave) return;
    engine_.doorbell().sleep(ticket, Doorbell::Sleeper::kStandby, pause);
    if (stop.stop_requested() || !acquire_progress_as_standby()) return;
  }
}

template <class Done>
void Runtime::drive_until(const Done& done, const WaitLimit& limit, Claims claim) {
  Doorbell& doorbell = engine_.doorbell();
  doorbell.add_driver();
  std::uint32_t ticket = doorbell.ticket();
  const int spins = progress_policy_.spins ? kSpinsBeforeYield : 0;
  const auto extent_after = [&](int idle_rounds) {
    return idle_rounds < spins && limit.waiting != Engine::Waiting::kForMessage
               ? Engine::Extent::kReplays
               : Engine::Extent::kEverything;
  };
  for (int idle_rounds = 0; !done() && !closing_.load();) {
    ticket = doorbell.ticket();
    if (engine_.step(Engine::Callbacks::kAll, extent_after(idle_rounds))) {
      idle_rounds = 0;
      if (!done()) notify_waiters(kWaiter);  // otherwise release_progress() does
      continue;
    }
    if (done()) break;
    if (++idle_rounds <= spins) {
      relax();
      continue;
    }
    Duration pause = pause_after(idle_rounds - spins, engine_);
    if (limit.until) pause = std::min(pause, std::max(*limit.until - clock_.now(), kShortestSleep));
    if (pause == Duration::zero()) {
      sched_yield();
    } else if (!engine_.stop_polling() && !engine_.prepare_to_block(kind_of_waiting())) {
      doorbell.sleep(ticket, Doorbell::Sleeper::kDriver, pause);
    }
  }
  // Most rings since the last step announced work that is already done. A few more steps cost less
  // than waking the engine thread.
  for (int polls = 0; polls < 4 && doorbell.ticket() != ticket; ++polls) {
    ticket = doorbell.ticket();
    if (engine_.step()) notify_waiters(kWaiter);
  }
  engine_.stop_polling();  // the engine thread is rung if work is left, and then steps once more
  const bool work_left = engine_.busy() || engine_.needs_polling();
  release_progress(claim);
  doorbell.remove_driver(ticket);
  if (work_left || closing_.load())
    doorbell.ring();  // the engine thread sleeps as long as an idle rank does
}

/// @param until deadline, checked by the waiter itself
/// @param claim of this thread while it waits
/// @return whether this thread owns progress, and counts as a waiter until it releases it;
/// otherwise it need not wait any more
template <class Done>
bool Runtime::acquire_progress_as_waiter(const Done& done, std::optional<TimePoint> until,
                                         Claims claim) {
  if (!closing_.load() && own_progress(kOwned | kWaiters, claim)) {
    // close() may have ended between the two reads of closing_.
    if (!closing_.load()) return true;
    engine_.progress().acquired();
    release_progress(claim);
  }
  Doorbell& doorbell = engine_.doorbell();
  {
    const MutexLock lock(progress_mutex_);
    // This thread's submission may not have rung, and the driver may be asleep.
    if ((claims_.fetch_add(claim) & kOwned) != 0) doorbell.ring();
    while (!(closed_ || done())) {
      if (!closing_.load() && own_progress(kOwned, 0)) return true;
      if (until) {
        progress_changed_.wait_for(progress_mutex_,
                                   std::max(*until - clock_.now(), kShortestSleep));
      } else {
        progress_changed_.wait(progress_mutex_);
      }
    }
    if (waiters_in(claims_.fetch_sub(claim)) > kWaiter) return false;
  }
  doorbell.ring();
  return false;
}

template <class Done>
void Runtime::wait_until(const Done& done, const WaitLimit& limit) {
  if (done()) return;
  const bool for_message = limit.waiting == Engine::Waiting::kForMessage;
  const bool counts = limit.waiting == Engine::Waiting::kWithoutLimit && !BackgroundThread::here();
  const Claims claim = kWaiter + (counts ? kProgramWaiter : 0) + (for_message ? kMessageWaiter : 0);
  while (!done() && acquire_progress_as_waiter(done, limit.until, claim))
    drive_until(done, limit, claim);
}

Engine::Waiting Runtime::kind_of_waiting() const noexcept {
  const Claims claims = claims_.load();
  if (claims >= kMessageWaiter) return Engine::Waiting::kForMessage;
  return claims >= kProgramWaiter ? Engine::Waiting::kWithoutLimit : Engine::Waiting::kForSomeTime;
}

void Runtime::wait(const OperationState& operation) {
  if (in_callback()) throw_in_callback("waiting for " + operation.title());
  wait_until([&operation] { return operation.done(); },
             {.waiting = operation.message ? Engine::Waiting::kForMessage
                                           : Engine::Waiting::kWithoutLimit});
}

void Runtime::wait(const OperationState& operation, Duration interval, void (*check)()) {
  if (in_callback()) throw_in_callback("waiting for " + operation.title());
  // The engine also counts this waiter between the parts of the wait. Otherwise it would not detect
  // that every rank waits for another.
  struct Counted {
    std::atomic<Claims>& claims;
    const Claims claim;
    Counted(std::atomic<Claims>& all, bool counts)
        : claims(all), claim(counts ? kProgramWaiter : 0) {
      claims.fetch_add(claim);
    }
    Counted(const Counted&) = delete;
    Counted& operator=(const Counted&) = delete;
    ~Counted() { claims.fetch_sub(claim); }
  };
  const Counted counted(claims_, !operation.message && !BackgroundThread::here());
  const auto part_of_wait =
      operation.message ? Engine::Waiting::kForMessage : Engine::Waiting::kForSomeTime;
  for (;;) {
    const TimePoint until = clock_.now() + std::max(interval, kShortestSleep);
    wait_until([&] { return operation.done() || clock_.now() >= until; }, {until, part_of_wait});
    if (operation.done() || clock_.now() < until) return;  // done, or the runtime has ended
    engine_.doorbell().ring();                             // see wait_for()
    check();
  }
}

bool Runtime::wait_for(const OperationState& operation, Duration timeout) {
  if (in_callback()) throw_in_callback("waiting for " + operation.title());
  if (timeout <= Duration::zero()) {
    progress_after_submit();
    return operation.done();
  }
  if (timeout > kLongestTimeout) {
    wait(operation);
    return operation.done();
  }
  const TimePoint until = clock_.now() + timeout;
  int checks_without_clock = 8;  // reading the clock takes as long as looking at the operation
  wait_until(
      [&] {
        if (operation.done()) return true;
        if (checks_without_clock == 0) return clock_.now() >= until;
        --checks_without_clock;
        return false;
      },
      {until, operation.message ? Engine::Waiting::kForMessage : Engine::Waiting::kForSomeTime});
  if (operation.done()) return true;
  // The engine thread has yielded to this one, and now has to continue with the operation.
  engine_.doorbell().ring();
  return false;
}

std::shared_ptr<const WaitDescription> Runtime::request_description(const Operation& operation,
                                                                    Duration limit) {
  HVD_EXPECT(operation.valid(), "the handle refers to an operation");
  const Duration bounded = std::clamp(limit, Duration::zero(), kLongestTimeout);
  const auto description = std::make_shared<WaitDescription>(OperationPtr(operation.state_.get()),
                                                             clock_.now() + bounded);
  engine_.submission_queue().request_description(description);
  engine_.doorbell().ring();
  return description;
}

std::string Runtime::describe_wait(const Operation& operation, Duration limit) {
  const OperationState& state = *operation.state_;
  if (in_callback()) throw_in_callback("describing the wait for " + state.title());
  const auto description = request_description(operation, limit);
  // The engine writes at the limit at the latest, unless its thread has no core or runs a callback
  // of the program.
  const TimePoint until = description->until() + kDescriptionSlack;
  wait_until([&] { return description->written() || state.done() || clock_.now() >= until; },
             {until, state.message ? Engine::Waiting::kForMessage : Engine::Waiting::kForSomeTime});
  engine_.doorbell().ring();  // see wait_for()
  if (state.done()) return {};
  if (description->written()) return description->text();
  return text(state.title(), " has waited ", clock_.now() - state.submitted,
              "; the thread of hvd on rank ", topology().rank, " has not replied for ",
              limit + kDescriptionSlack);
}

bool Runtime::step() {
  if (!try_acquire_progress()) return false;
  const bool moved = engine_.step();
  release_progress();
  return moved;
}

bool Runtime::shutdown(std::optional<Duration> timeout) {
  if (in_callback()) throw_in_callback("shutdown()");
  engine_.submission_queue().request_shutdown();
  const Duration limit = timeout.value_or(options_.stall_shutdown);
  const auto until = limit != Duration::zero() ? std::optional(clock_.now() + limit) : std::nullopt;
  wait_until(
      [&] {
        return engine_.submission_queue().shut_down() || engine_.submission_queue().failed() ||
               (until && clock_.now() >= *until);
      },
      {until});
  const bool in_order = engine_.submission_queue().shut_down();
  if (!in_order && !engine_.submission_queue().failed()) {
    HVD_LOG(kWarning)
        << "shutdown: not every rank has called shutdown() in time; leaving without them";
  }
  stop_thread();
  close();
  stop_timeline();
  return in_order;
}

void Runtime::stop_thread() {
  thread_.request_stop();
  closing_.store(true);
  engine_.doorbell().ring();  // wakes a driving thread, which then rings for the engine thread
  if (thread_.joinable()) thread_.join();
}

/// Ends the operations that are left, including those that other threads wait for.
void Runtime::close() {
  acquire_progress();
  // When this returns, every submit() that began before has queued its operations.
  engine_.operations().wait_for_submissions();
  const Status cause{
      StatusCode::kShutdown,
      "hvd was shut down while this operation was outstanding; wait for it before shutdown()", -1};
  // After an orderly shutdown no batch runs, and the channels are closed in a way that lets peers
  // finish. Otherwise a peer may still use this rank's memory.
  engine_.submission_queue().shut_down() ? engine_.end_outstanding(cause) : engine_.give_up(cause);
  if (!engine_.submission_queue().failed()) engine_.farewell();
  {
    const MutexLock lock(progress_mutex_);
    closed_ = true;
  }
  release_progress();
}

void Runtime::abort(const Status& cause) {
  engine_.submission_queue().fail_from_outside(cause);
  if (in_callback()) return;  // the engine fails in its next step, after the callback
  wait_until([this] { return engine_.submission_queue().failed(); }, {});
}

void Runtime::fail_soon(const Status& cause) {
  engine_.submission_queue().fail_from_outside(cause);
  engine_.doorbell().ring();
}

void Runtime::notify_before_exit(const Status& cause, Duration timeout) noexcept {
  try {
    const TimePoint limit = clock_.now() + timeout;
    engine_.submission_queue().fail_from_outside(cause);
    // This thread may already own progress, or another thread may be waiting for it, so it does not
    // drive the engine itself.
    while (!engine_.submission_queue().failed() && clock_.now() < limit) {
      engine_.doorbell().ring();
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    // The message must arrive before the other ranks detect the end of the process.
    std::this_thread::sleep_for(
        std::min(limit - clock_.now(), Duration(std::chrono::milliseconds(100))));
  } catch (const std::exception& error) {
    HVD_LOG(kDebug) << "the other ranks could not be notified: " << error.what();
  }
}

void Runtime::start_timeline(const std::string& path) {
  if (timeline_.on())
    throw UsageError("start_timeline('" + path +
                     "'): a timeline is being written already; stop it first");
  const std::string file = observe::timeline_path_of(path, topology().rank);
  timeline_.exchange(std::make_shared<observe::TimelineWriter>(
      file, topology().rank, topology().host_name(topology().rank)));
}

void Runtime::stop_timeline() { timeline_.exchange(nullptr); }

}  // namespace hvd::runtime
