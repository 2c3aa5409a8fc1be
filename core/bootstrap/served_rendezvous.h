#pragma once

#include <string>

#include "bootstrap/meeting.h"

namespace hvd::rendezvous {

/// A rendezvous that somebody serves (Meeting), as a rank sees it: each call is a request and its
/// answer.
class ServedRendezvous : public Rendezvous {
 public:
  int rank() const noexcept override { return own_.introduction.rank; }
  int size() const noexcept override { return own_.introduction.size; }
  const std::string& place() const noexcept override { return place_; }

  void put(std::string_view key, std::span<const std::byte> value) override;
  std::optional<Bytes> get(std::string_view key) override;
  std::optional<Bytes> wait(std::string_view key, int from, Deadline) override;
  std::vector<Bytes> exchange(std::string_view what, std::span<const std::byte> mine,
                              Deadline) override;
  void fail(const Failure&) noexcept override;
  void leave(Deadline) noexcept override;

 protected:
  ServedRendezvous(std::string place, const Introduction& own)
      : place_(std::move(place)), own_(arrival_of(own)) {}

  /// @throws hvd::Error when whoever serves does not answer by the deadline, or is gone
  virtual Answer ask(const Request&, Deadline) = 0;
  /// As ask().
  Answer ask_to_come(Deadline);
  /// False: what has answered so is no meeting of hvd's. @throws hvd::Error when the rank is
  /// refused
  static bool is_welcome(const Answer&);
  /// "hvd::init: a value is larger than 64 MiB"
  static void check_size(const Bytes& frame);

 private:
  std::optional<Bytes> value_of(const Answer&) const;

  const std::string place_;
  const Arrival own_;
};

}  // namespace hvd::rendezvous
