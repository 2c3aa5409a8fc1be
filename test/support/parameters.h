#pragma once

#include <variant>

#include "hvd/collectives.h"

namespace hvd::testing {

/// The parameters of any kind of operation, for tests that take the kind as an argument.
struct AnyParameters {
  OpKind kind = OpKind::kAllreduce;
  ReduceOp op = ReduceOp::kSum;
  double prescale = 1.0;
  double postscale = 1.0;
  Compression compression = Compression::kNone;
  int root = 0;  ///< world rank; gather: the destination
  std::vector<std::int64_t> splits = {};

  OperationParameters of_kind() const {
    switch (kind) {
      case OpKind::kAllreduce:
        return Allreduce{op, prescale, postscale, compression};
      case OpKind::kAllgather:
        return Allgather{};
      case OpKind::kBroadcast:
        return Broadcast{root};
      case OpKind::kReducescatter:
        return Reducescatter{op, prescale, postscale};
      case OpKind::kAlltoall:
        return Alltoall{splits};
      case OpKind::kBarrier:
        return Barrier{};
      case OpKind::kJoin:
        return Join{};
      case OpKind::kGather:
        return Gather{root};
      case OpKind::kAddProcessSet:
        return AddProcessSet{};
      case OpKind::kRemoveProcessSet:
        return RemoveProcessSet{};
      case OpKind::kReduce:
        return Reduce{op, prescale, postscale, root};
      case OpKind::kScatter:
        return Scatter{root};
    }
    return {};
  }
};

inline OperationParameters parameters_of(OpKind kind) {
  return AnyParameters{.kind = kind}.of_kind();
}
/// @pre it is an allreduce
inline Allreduce& allreduce_of(Submission& submission) {
  return std::get<Allreduce>(submission.parameters);
}

}  // namespace hvd::testing
