#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "hvd/backend.h"
#include "message/message_buffer.h"
#include "message/request_table.h"

namespace hvd::message {

/// The messages of one channel, which its Works share: who takes part, under which tags, whom to
/// ring, and a buffer that outlives a Work.
///
/// Not thread-safe: the thread that drives the engine. Peers are set ranks.
class ChannelMessages {
 public:
  /// @throws hvd::Error when the carrier has no tags for the channel
  ChannelMessages(std::shared_ptr<Carrier>, const ChannelSpec&, Peers&);
  ChannelMessages(const ChannelMessages&) = delete;
  ChannelMessages& operator=(const ChannelMessages&) = delete;
  ~ChannelMessages() { settle(); }

  int size() const noexcept { return static_cast<int>(spec_.ranks.size()); }
  int rank() const noexcept { return spec_.set_rank; }
  /// The memory is a device's: only the carrier may touch it.
  bool on_device() const noexcept { return spec_.device.type != DeviceType::kCpu; }
  /// Its peers are world ranks. What is started here is started by send() and receive() below.
  RequestTable& requests() noexcept { return requests_; }
  const RequestTable& requests() const noexcept { return requests_; }
  MessageBuffer& buffer() noexcept { return buffer_; }

  /// @param kind see message/tag.h
  void send(std::size_t slot, std::span<const std::byte> bytes, int peer, int kind);
  void receive(std::size_t slot, std::span<std::byte> bytes, int peer, int kind);
  std::span<const int> test();
  /// There is more to do at once, without any message.
  void keep_going() noexcept { moved_ = true; }
  /// Whether something was started or completed since the last call.
  bool take_moved() noexcept { return std::exchange(moved_, false); }
  /// Rings every peer with which something has moved since the last call, and this rank if there is
  /// `more` to do here.
  void ring_touched(bool more) noexcept;

  /// A Work was dropped before it completed. Nothing can be launched any more, and what is under
  /// way is taken back. The answer: whether its memory may be freed now, later (once settle() is
  /// true), or never; the tensors stay in any case, as Channel::launch() says.
  TakenBack abandon() noexcept;
  bool abandoned() const noexcept { return abandoned_; }
  /// Waits for the carrier to let go of what was abandoned, at most until kTakeBackTime after
  /// abandon(). False: memory that messages were given has to be kept. True where no message is
  /// under way.
  bool settle() noexcept;

 private:
  void touch(int world_rank) noexcept;
  int world_rank_of(int peer) const noexcept { return spec_.ranks[static_cast<std::size_t>(peer)]; }

  const std::shared_ptr<Carrier> carrier_;  // before what uses it
  RequestTable requests_;
  MessageBuffer buffer_;
  const ChannelSpec spec_;
  Peers& peers_;
  const Tag tag_;              ///< of what this rank sends, but for the kind
  std::vector<char> touched_;  ///< per world rank
  std::vector<int> touched_ranks_;
  bool moved_ = false;
  bool abandoned_ = false;
  Deadline keep_at_;  ///< when memory that was not given back is kept
};

/// Base of the Works that are made of messages. One that is destroyed before step() has returned
/// true abandons the messages of its channel.
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

 protected:
  /// One pass over what can be done now; true when all is done. Called again when something has
  /// moved.
  virtual bool step() = 0;
  ChannelMessages& messages() noexcept { return *messages_; }

 private:
  const std::shared_ptr<ChannelMessages> messages_;
  bool complete_ = false;
};

}  // namespace hvd::message
