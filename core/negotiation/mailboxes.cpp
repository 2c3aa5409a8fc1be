#include "negotiation/mailboxes.h"

#include <algorithm>
#include <utility>

#include "base/expect.h"

namespace hvd::control {
namespace {

bool accepts(int wanted, int source) noexcept { return wanted == kAnyRank || wanted == source; }

}  // namespace

Mailboxes::Delivery Mailboxes::post(std::uint64_t recv, const wire::MessageKey& key, int source) {
  const auto box = boxes_.try_emplace(key).first;
  std::deque<Sent>& offers = box->second.offers;
  const auto found = std::find_if(offers.begin(), offers.end(), [source](const Sent& sent) {
    return accepts(source, sent.arrival.source);
  });
  if (found == offers.end()) {
    box->second.recvs.push_back({recv, source});
    return {};
  }
  Sent sent = std::move(*found);
  offers.erase(found);
  drop_if_empty(box);
  if (sent.recalled) return std::move(*sent.recalled);
  waiting_.erase({sent.arrival.source, sent.arrival.offer.send});
  subtract_payload(sent.arrival);
  return std::move(sent.arrival);
}

Mailboxes::Reception Mailboxes::arrive(Arrival&& arrival) {
  const auto box = boxes_.try_emplace(arrival.offer.key).first;
  std::deque<Recv>& recvs = box->second.recvs;
  const auto found = std::find_if(recvs.begin(), recvs.end(), [&](const Recv& recv) {
    return accepts(recv.source, arrival.source);
  });
  if (found == recvs.end()) {
    waiting_.emplace(std::pair(arrival.source, arrival.offer.send), arrival.offer.key);
    buffered_ += arrival.payload.size();
    box->second.offers.push_back({std::move(arrival)});
    return {};
  }
  const Recv recv = std::move(*found);
  recvs.erase(found);
  drop_if_empty(box);
  if (recv.stalled) return *recv.stalled;
  return recv.id;
}

bool Mailboxes::remove(std::uint64_t recv, const wire::MessageKey& key) {
  const auto box = boxes_.find(key);
  if (box == boxes_.end()) return false;
  const auto removed = std::erase_if(box->second.recvs,
                                     [recv](const Recv& r) { return r.id == recv && !r.stalled; });
  drop_if_empty(box);
  return removed > 0;
}

void Mailboxes::stall(std::uint64_t recv, const wire::MessageKey& key, const Status& error) {
  const auto box = boxes_.find(key);
  HVD_EXPECT(box != boxes_.end(), "the recv waits");
  for (Recv& waiting : box->second.recvs)
    if (waiting.id == recv) waiting.stalled = error;
}

std::deque<Mailboxes::Sent>::iterator Mailboxes::find_offer(Box& box, int source,
                                                            std::uint64_t send) {
  return std::find_if(box.offers.begin(), box.offers.end(), [&](const Sent& sent) {
    return sent.arrival.source == source && sent.arrival.offer.send == send;
  });
}

const wire::Offer* Mailboxes::find(int source, std::uint64_t send) const {
  const auto key = waiting_.find({source, send});
  if (key == waiting_.end()) return nullptr;
  for (const Sent& sent : boxes_.at(key->second).offers)
    if (sent.arrival.source == source && sent.arrival.offer.send == send)
      return &sent.arrival.offer;
  return nullptr;
}

bool Mailboxes::withdraw(int source, std::uint64_t send) {
  const auto key = waiting_.extract({source, send});
  if (key.empty()) return false;
  const auto box = boxes_.find(key.mapped());
  const auto offer = find_offer(box->second, source, send);
  subtract_payload(offer->arrival);
  box->second.offers.erase(offer);
  drop_if_empty(box);
  return true;
}

bool Mailboxes::recall(int source, std::uint64_t send, const Status& error) {
  const auto key = waiting_.extract({source, send});
  if (key.empty()) return false;
  const auto offer = find_offer(boxes_.at(key.mapped()), source, send);
  subtract_payload(offer->arrival);
  offer->arrival.payload.clear();
  offer->arrival.offer.payload = {};
  offer->recalled = error;
  return true;
}

void Mailboxes::for_each_offer(
    const std::function<void(int source, const wire::Offer&)>& visit) const {
  for (const auto& [key, box] : boxes_)
    for (const Sent& sent : box.offers)
      if (!sent.recalled) visit(sent.arrival.source, sent.arrival.offer);
}

void Mailboxes::drop_if_empty(Boxes::iterator box) {
  if (box->second.recvs.empty() && box->second.offers.empty()) boxes_.erase(box);
}

}  // namespace hvd::control
