#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>

namespace hvd::launcher::doctor {

/// A value that the doctor has looked for, or the reason why it is unknown. In JSON it is the value
/// itself, or {"unknown": "the reason"}.
template <class Value>
struct Fact {
  Fact() = default;
  Fact(Value known) : value(std::move(known)) {}  // NOLINT(google-explicit-constructor)

  std::optional<Value> value = {};
  std::string unknown = "not looked for";

  explicit operator bool() const { return value.has_value(); }
  const Value& operator*() const { return *value; }
  const Value* operator->() const { return &*value; }
};

template <class Value>
Fact<Value> unknown(std::string reason) {
  Fact<Value> fact;
  fact.unknown = std::move(reason);
  return fact;
}

template <class Value>
void to_json(nlohmann::json& json, const Fact<Value>& fact) {
  if (fact) {
    json = *fact;
  } else {
    json = {{"unknown", fact.unknown}};
  }
}

template <class Value>
void from_json(const nlohmann::json& json, Fact<Value>& fact) {
  if (json.is_object() && json.size() == 1 && json.contains("unknown")) {
    fact = unknown<Value>(json.at("unknown").get<std::string>());
  } else {
    fact = Fact<Value>(json.get<Value>());
  }
}

}  // namespace hvd::launcher::doctor

/// An empty optional is null in JSON. (nlohmann-json converts std::optional from version 3.12 on.)
template <class Value>
struct nlohmann::adl_serializer<std::optional<Value>> {
  static void to_json(nlohmann::json& json, const std::optional<Value>& value) {
    if (value) {
      json = *value;
    } else {
      json = nullptr;
    }
  }
  static void from_json(const nlohmann::json& json, std::optional<Value>& value) {
    if (json.is_null()) {
      value.reset();
    } else {
      value = json.get<Value>();
    }
  }
};
