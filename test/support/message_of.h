#pragma once

#include <gtest/gtest.h>

#include <exception>
#include <functional>
#include <string>
#include <typeinfo>

namespace hvd::testing {

/// The text of the exception, which must be an E; otherwise the test fails.
template <class E>
std::string message_of(const std::function<void()>& act) {
  try {
    act();
  } catch (const E& error) {
    return error.what();
  } catch (const std::exception& error) {
    ADD_FAILURE() << "expected " << typeid(E).name() << ", got another error: " << error.what();
    return {};
  }
  ADD_FAILURE() << "expected " << typeid(E).name() << ", got no error";
  return {};
}

}  // namespace hvd::testing
