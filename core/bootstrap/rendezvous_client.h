#pragma once

#include <string>

#include "bootstrap/rendezvous_server.h"

namespace hvd::rendezvous {

/// A rendezvous that a RendezvousServer serves. Each call is a request and its reply.
class RendezvousClient : public Rendezvous {
 public:
  int rank() const noexcept override { return own_.info.rank; }
  int size() const noexcept override { return own_.info.size; }
  const std::string& place() const noexcept override { return place_; }

  void put(std::string_view key, std::span<const std::byte> value) override;
  std::optional<Bytes> get(std::string_view key) override;
  std::optional<Bytes> wait(std::string_view key, int from, Deadline) override;
  std::vector<Bytes> exchange(std::string_view what, std::span<const std::byte> mine,
                              Deadline) override;
  void fail(const Failure&) noexcept override;
  void leave(Deadline) noexcept override;

 protected:
  RendezvousClient(std::string place, const RankInfo& own)
      : place_(std::move(place)), own_(join_request_of(own)) {}

  /// Sends a request and waits for its reply.
  /// @throws hvd::Error when the server does not reply by the deadline, or has ended
  virtual ServerReply request(const ServerRequest&, Deadline) = 0;
  /// Sends the request to join. Waits and throws like request().
  ServerReply request_to_join(Deadline);
  /// Returns true if the server has accepted this rank, and false if no RendezvousServer sent the
  /// reply.
  /// @throws hvd::Error when the rank is refused
  static bool is_accepted(const ServerReply&);
  /// @throws hvd::Error for a frame larger than 64 MiB
  static void check_size(const Bytes& frame);

 private:
  std::optional<Bytes> value_of(const ServerReply&) const;

  const std::string place_;
  const JoinRequest own_;
};

}  // namespace hvd::rendezvous
