#pragma once

#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <concepts>

namespace hvd::libtorch {

// each_option(visit, a, b, ...) calls visit(name, a's, b's, ...) for each option of one of
// LibTorch's types.

template <class Visit, std::same_as<torch::optim::SGDOptions>... O>
void each_option(const Visit& visit, O&... o) {
  visit("lr", o.lr()...);
  visit("momentum", o.momentum()...);
  visit("dampening", o.dampening()...);
  visit("weight_decay", o.weight_decay()...);
  visit("nesterov", o.nesterov()...);
}

template <class Visit, class... O>
  requires((std::same_as<O, torch::optim::AdamOptions> ||
            std::same_as<O, torch::optim::AdamWOptions>) &&
           ...)
void each_option(const Visit& visit, O&... o) {
  visit("lr", o.lr()...);
  visit("betas", o.betas()...);
  visit("eps", o.eps()...);
  visit("weight_decay", o.weight_decay()...);
  visit("amsgrad", o.amsgrad()...);
}

template <class Visit, std::same_as<torch::optim::AdagradOptions>... O>
void each_option(const Visit& visit, O&... o) {
  visit("lr", o.lr()...);
  visit("lr_decay", o.lr_decay()...);
  visit("weight_decay", o.weight_decay()...);
  visit("initial_accumulator_value", o.initial_accumulator_value()...);
  visit("eps", o.eps()...);
}

template <class Visit, std::same_as<torch::optim::RMSpropOptions>... O>
void each_option(const Visit& visit, O&... o) {
  visit("lr", o.lr()...);
  visit("alpha", o.alpha()...);
  visit("eps", o.eps()...);
  visit("weight_decay", o.weight_decay()...);
  visit("momentum", o.momentum()...);
  visit("centered", o.centered()...);
}

template <class Visit, std::same_as<torch::optim::LBFGSOptions>... O>
void each_option(const Visit& visit, O&... o) {
  visit("lr", o.lr()...);
  visit("max_iter", o.max_iter()...);
  visit("max_eval", o.max_eval()...);
  visit("tolerance_grad", o.tolerance_grad()...);
  visit("tolerance_change", o.tolerance_change()...);
  visit("history_size", o.history_size()...);
  visit("line_search_fn", o.line_search_fn()...);
}

}  // namespace hvd::libtorch
