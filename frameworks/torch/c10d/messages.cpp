#include <memory>
#include <utility>

#include "c10d/calls.h"
#include "c10d/group.h"
#include "c10d/pieces.h"
#include "c10d/work.h"
#include "hvd/point_to_point.h"
#include "hvd/torch/c10d_backend.h"
#include "tensors/device_order.h"
#include "tensors/tensor_adapter.h"

// send and recv of C10dBackend.

namespace hvd {
namespace {

using c10d::OpType;

const char* title_of(OpType type) {
  return type == OpType::SEND ? "hvd:send" : type == OpType::RECV ? "hvd:recv" : "hvd:recv_any";
}

}  // namespace

c10::intrusive_ptr<c10d::Work> C10dBackend::send_or_receive(OpType type,
                                                            std::vector<at::Tensor>& tensors,
                                                            int peer, int tag) {
  const bool sends = type == OpType::SEND;
  const char* const call = sends ? "send" : "recv";
  const auto pieces = std::make_shared<const libtorch::Pieces>(
      std::vector{libtorch::only_one(tensors, call)}, sends, libtorch::Label{call, {}});
  const Message message{
      .direction = sends ? Direction::kSend : Direction::kReceive,
      .tensor = libtorch::view_of(pieces->whole()),
      .peer = type == OpType::RECVANYSOURCE ? kAnySource : group_->world_rank(peer),
      .tag = tag,
      .process_set = group_->set().id(),
      .input_ready = pieces->whole().is_cuda() ? libtorch::record_current_stream() : nullptr,
      .keep_alive = libtorch::keep_alive(pieces->whole())};
  const std::vector<Operation> operations =
      libtorch::with_torch_errors([&] { return start_messages({&message, 1}); });
  return start(
      {.type = type,
       .title = title_of(type),
       .handle = Handle(std::make_shared<libtorch::PendingResult>(
           operations, std::vector<std::function<torch::Tensor()>>{[tensor = tensors.front()] {
             return tensor;
           }})),
       .outputs = tensors,
       .copies = !sends && pieces->apart(),
       .source =
           [own = getRank(), sends, group = group_, operation = operations.front()] {
             return sends ? own : group->group_rank(static_cast<int>(operation.result()));
           },
       .peer = peer,
       .finish =
           [sends, pieces](const std::vector<at::Tensor>&) {
             if (sends) return;
             libtorch::used_by_current_stream(pieces->whole());
             pieces->copy_back();
           }});
}

c10::intrusive_ptr<c10d::Work> C10dBackend::send(std::vector<at::Tensor>& tensors, int destination,
                                                 int tag) {
  return send_or_receive(OpType::SEND, tensors, destination, tag);
}

c10::intrusive_ptr<c10d::Work> C10dBackend::recv(std::vector<at::Tensor>& tensors, int source,
                                                 int tag) {
  return send_or_receive(OpType::RECV, tensors, source, tag);
}

c10::intrusive_ptr<c10d::Work> C10dBackend::recvAnysource(std::vector<at::Tensor>& tensors,
                                                          int tag) {
  return send_or_receive(OpType::RECVANYSOURCE, tensors, kAnySource, tag);
}

}  // namespace hvd
