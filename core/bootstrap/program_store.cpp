#include "bootstrap/program_store.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <future>
#include <utility>

#include "base/text.h"
#include "base/thread.h"
#include "hvd/error.h"

namespace hvd::rendezvous {
namespace {

class ProgramStore final : public Store {
 public:
  ProgramStore(const std::function<KeyValueStore()>& open, const std::string& name,
               Deadline deadline)
      : url_(name), call_deadline_(deadline) {
    call("has not been opened", deadline, [open, store = store_](auto&) { *store = open(); });
    opened_ = true;
    if (!store_->name.empty()) url_ = store_->name;
  }

  const std::string& url() const noexcept override { return url_; }
  void set(const std::string& key, std::span<const std::byte> value, Deadline deadline) override {
    call("has not replied", deadline,
         [store = store_, key, copy = Bytes(value.begin(), value.end())](auto&) {
           store->set(key, copy);
         });
  }
  std::optional<Bytes> get(const std::string& key, Deadline deadline) override {
    return call("has not replied", deadline,
                [store = store_, key](Result& result) { result.value = store->get(key); })
        .value;
  }
  std::int64_t add(const std::string& key, std::int64_t amount, Deadline deadline) override {
    return call("has not replied", deadline,
                [store = store_, key, amount](Result& result) {
                  result.sum = store->add(key, amount);
                })
        .sum;
  }
  /// A program's store has no "set if absent", so the first caller of add() on a counter sets the
  /// key.
  bool create(const std::string& key, std::span<const std::byte> value,
              Deadline deadline) override {
    if (add(key + "/claims", 1, deadline) != 1) return false;
    set(key, value, deadline);
    return true;
  }
  std::optional<Found> wait(std::span<const std::string> keys, Deadline deadline) override {
    return poll(keys, deadline, std::max(deadline, call_deadline_));
  }
  /// A program's store can neither list nor remove keys, so the value is replaced by an empty one.
  void remove_all_if(const std::string& key, std::span<const std::byte> value,
                     Deadline deadline) override {
    const auto found = get(key, deadline);
    if (found && std::equal(found->begin(), found->end(), value.begin(), value.end()))
      set(key, {}, deadline);
  }

 private:
  struct Result {
    std::optional<Bytes> value = {};
    std::int64_t sum = 0;
  };
  /// Runs a function on a separate thread, which is left behind if the function does not return in
  /// time.
  /// @param function owns everything that it uses
  Result call(const char* overdue, Deadline deadline, std::function<void(Result&)> function) {
    const auto begin = std::chrono::steady_clock::now();
    try {
      if (!stuck_) {
        std::promise<Result> promise;
        auto coming = promise.get_future();
        auto thread = start_thread("hvd-store-call", [function = std::move(function),
                                                      promise = std::move(promise)]() mutable {
          try {
            Result result;
            function(result);
            promise.set_value(std::move(result));
          } catch (...) {
            promise.set_exception(std::current_exception());
          }
        });
        const auto until = std::max<Deadline>(deadline, begin + kMinCallTimeout);
        stuck_ = coming.wait_until(until) != std::future_status::ready;
        if (!stuck_) return coming.get();
        thread.detach();
      }
    } catch (const std::exception& error) {
      const bool explains_itself = dynamic_cast<const Error*>(&error) != nullptr && !opened_;
      if (explains_itself) throw;
      throw Error(text("hvd::init: the store ", url_, " has failed: ", error.what()));
    } catch (...) {
      throw Error(text("hvd::init: the store ", url_, " has failed"));
    }
    throw Error(text("hvd::init: the store ", url_, " ", overdue, " within ",
                     std::chrono::steady_clock::now() - begin,
                     "; see whether the process that serves it (torchrun's agent) has ended or is "
                     "stopped"));
  }

  const std::shared_ptr<KeyValueStore> store_ = std::make_shared<KeyValueStore>();
  std::string url_;
  const Deadline call_deadline_;
  bool opened_ = false;
  bool stuck_ = false;  ///< a call has not returned, so no other call may begin
};

}  // namespace

std::unique_ptr<Store> open_program_store(std::function<KeyValueStore()> open,
                                          const std::string& name, Deadline deadline) {
  return std::make_unique<ProgramStore>(open, name, deadline);
}

}  // namespace hvd::rendezvous
