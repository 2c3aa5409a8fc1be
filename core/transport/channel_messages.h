#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "backend/backend.h"
#include "transport/request_table.h"

namespace hvd::message {

/// Scratch memory for messages whose data is in no tensor, for example data received before it is
/// reduced. Kept from one collective to the next. Not thread-safe.
class MessageBuffer {
 public:
  /// Returns at least `bytes` bytes, aligned to a page. The previous contents are lost.
  std::byte* reserve(std::size_t bytes);
  /// Keeps the memory allocated until the process ends. See Note [Memory after a failure].
  void keep_until_exit();
  /// Null before reserve() and after keep_until_exit().
  const std::shared_ptr<std::byte>& memory() const noexcept { return memory_; }

 private:
  std::shared_ptr<std::byte> memory_;
  std::size_t bytes_ = 0;
};

/// The messages of one channel: its members, its tags, the doorbells to ring, and a buffer that
/// outlives a Work. The Works of the channel share it.
///
/// Not thread-safe: only the thread that drives the engine calls it. Peers are set ranks.
class ChannelMessages {
 public:
  /// @throws hvd::Error when the carrier has no tags for the channel
  ChannelMessages(std::shared_ptr<Carrier>, const ChannelSpec&, Peers&);
  ChannelMessages(const ChannelMessages&) = delete;
  ChannelMessages& operator=(const ChannelMessages&) = delete;
  ~ChannelMessages() { settle(); }

  int size() const noexcept { return static_cast<int>(spec_.ranks.size()); }
  int rank() const noexcept { return spec_.set_rank; }
  /// Peers in the table are world ranks. Start messages with send() and receive() below.
  RequestTable& requests() noexcept { return requests_; }
  const RequestTable& requests() const noexcept { return requests_; }
  MessageBuffer& buffer() noexcept { return buffer_; }

  /// @param kind see transport/carrier.h
  void send(std::size_t slot, std::span<const std::byte> bytes, int peer, int kind);
  void receive(std::size_t slot, std::span<std::byte> bytes, int peer, int kind);
  /// See message::Requests::receive_parts().
  bool receive_parts(std::size_t slot, PartReader&, std::size_t bytes, int peer, int kind);
  std::span<const int> test();
  /// Requests another pass of step() at once, even if no message has moved.
  void keep_going() noexcept { moved_ = true; }
  /// Requests another call of progress() instead of another pass, because this one has moved as
  /// many bytes as a call may.
  void give_way() noexcept { moved_ = gives_way_ = true; }
  /// Whether a message was started or completed since the last call.
  bool moved_since_last_call() noexcept { return std::exchange(moved_, false); }
  bool gave_way_since_last_call() noexcept { return std::exchange(gives_way_, false); }
  /// Rings every peer with which a message was started or completed since the last call.
  void ring_touched() noexcept;

  /// Ends the channel because a Work was dropped before it completed: no Work can be launched any
  /// more, and messages under way are cancelled. The result shows whether their memory may be freed
  /// now, later (once settle() returns true) or never. The caller keeps the tensors in any case
  /// (see Channel::launch()).
  MemoryRelease abandon() noexcept;
  bool abandoned() const noexcept { return abandoned_; }
  /// Waits until the carrier has released the abandoned messages, at most until kCancelTime after
  /// abandon(). Returns false if their memory must be kept, and true if no message is under way.
  bool settle() noexcept;

 private:
  void touch(int world_rank) noexcept;
  int world_rank_of(int peer) const noexcept { return spec_.ranks[static_cast<std::size_t>(peer)]; }

  const std::shared_ptr<Carrier> carrier_;  // before the members that use it
  RequestTable requests_;
  MessageBuffer buffer_;
  const ChannelSpec spec_;
  Peers& peers_;
  const Tag tag_;              ///< of messages that this rank sends, without the kind
  std::vector<char> touched_;  ///< per world rank
  std::vector<int> touched_ranks_;
  bool moved_ = false;
  bool gives_way_ = false;
  bool abandoned_ = false;
  Deadline keep_at_;  ///< after this, memory that has not been released is kept
};

/// Base of Works made of messages. Destroying one before step() has returned true abandons the
/// messages of its channel.
class MessageWork : public Work {
 public:
  explicit MessageWork(std::shared_ptr<ChannelMessages> messages)
      : messages_(std::move(messages)) {}
  MessageWork(const MessageWork&) = delete;
  MessageWork& operator=(const MessageWork&) = delete;
  ~MessageWork() override {
    if (!complete_) messages_->abandon();
  }
  bool progress() final;
  bool moved() const noexcept final { return moved_; }
  std::optional<ProgressCount> progress_count() const noexcept final {
    return ProgressCount{moves_, messages_->requests().awaited()};
  }

 protected:
  /// One pass over the work that can be done now; true when the Work is complete. Called again
  /// after a message has moved.
  virtual bool step() = 0;
  ChannelMessages& messages() noexcept { return *messages_; }

 private:
  const std::shared_ptr<ChannelMessages> messages_;
  std::uint64_t moves_ = 0;  ///< passes in which a message was started or completed
  bool complete_ = false;
  bool moved_ = false;  ///< by the last pass
};

}  // namespace hvd::message
