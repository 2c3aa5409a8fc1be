#pragma once

#if __cplusplus < 202002L
#error "hvd needs C++20: compile with -std=c++20, or link hvd::torch with CMake, which adds it"
#endif

/// The LibTorch interface of hvd: everything in `<hvd/hvd.h>`, collectives on tensors, broadcasts
/// of state, init() with a c10d::Store, DistributedOptimizer, ShardedOptimizer, LocalSgd,
/// SyncBatchNorm, GradScaler, DistributedSampler, checkpoints, safetensors files and the state of
/// elastic jobs. Link `hvd::torch`. docs/torch.md is the guide.

#include <torch/torch.h>

#include "hvd/hvd.h"
#include "hvd/torch/autocast.h"
#include "hvd/torch/checkpoint.h"
#include "hvd/torch/checkpointer.h"
#include "hvd/torch/data_loader.h"
#include "hvd/torch/distributed_optimizer.h"
#include "hvd/torch/elastic.h"
#include "hvd/torch/grad_scaler.h"
#include "hvd/torch/gradient_synchronizer.h"
#include "hvd/torch/handle.h"
#include "hvd/torch/join.h"
#include "hvd/torch/local_sgd.h"
#include "hvd/torch/metric.h"
#include "hvd/torch/object.h"
#include "hvd/torch/operations.h"
#include "hvd/torch/parameters.h"
#include "hvd/torch/progress_bar.h"
#include "hvd/torch/random_streams.h"
#include "hvd/torch/safetensors.h"
#include "hvd/torch/sample_generator.h"
#include "hvd/torch/sampler.h"
#include "hvd/torch/sharded_optimizer.h"
#include "hvd/torch/store.h"
#include "hvd/torch/sync_batch_norm.h"
#include "hvd/torch/training_state.h"
