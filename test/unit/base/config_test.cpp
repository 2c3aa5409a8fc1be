#include "base/config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <iterator>
#include <map>
#include <set>

#include "base/log.h"
#include "hvd/error.h"

namespace hvd {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class ConfigTest : public ::testing::Test {
 protected:
  ~ConfigTest() override {
    for (const std::string& name : set_) ::unsetenv(name.c_str());
  }
  void set(const std::string& name, const std::string& value) {
    set_.insert(name);
    ::setenv(name.c_str(), value.c_str(), 1);
  }
  template <class Call>
  static std::string refusal(const Call& call) {
    try {
      call();
    } catch (const UsageError& error) {
      return error.what();
    }
    return "accepted";
  }

 private:
  std::set<std::string> set_;
};

TEST_F(ConfigTest, SwitchesTakeTheUsualWordsInAnyCase) {
  EXPECT_EQ(env_switch("SHM_ALLOCATOR"), std::nullopt);
  for (const char* const yes : {"1", "yes", "TRUE", "On"}) {
    set("HVD_SHM_ALLOCATOR", yes);
    EXPECT_EQ(env_switch("SHM_ALLOCATOR"), true) << yes;
  }
  for (const char* const no : {"0", "NO", "false", "off"}) {
    set("HVD_SHM_ALLOCATOR", no);
    EXPECT_EQ(env_switch("SHM_ALLOCATOR"), false) << no;
  }
  set("HVD_SHM_ALLOCATOR", "banana");
  EXPECT_EQ(refusal([] { env_switch("SHM_ALLOCATOR"); }),
            "environment variable HVD_SHM_ALLOCATOR: expected 1, yes, true or on, or 0, no, false "
            "or off, got 'banana'");
}

TEST_F(ConfigTest, HorovodsNamesAreReadAndComeSecond) {
  set("HOROVOD_SHM_ALLOCATOR", "1");
  EXPECT_EQ(env_switch("SHM_ALLOCATOR"), true);
  set("HVD_SHM_ALLOCATOR", "0");
  EXPECT_EQ(env_switch("SHM_ALLOCATOR"), false);
}

TEST_F(ConfigTest, ChoicesAreTakenInAnyCase) {
  set("HVD_LOG_LEVEL", "INFO");
  EXPECT_EQ(env_choice("LOG_LEVEL"), "info");
  configure_log_from_environment();
  EXPECT_EQ(log_level(), LogLevel::kInfo);
  set("HVD_LOG_LEVEL", "foo");
  EXPECT_THAT(refusal([] { env_choice("LOG_LEVEL"); }),
              AllOf(HasSubstr("HVD_LOG_LEVEL"), HasSubstr("'fatal' or 'off'"), HasSubstr("'foo'")));
  configure_log_from_environment();
  EXPECT_EQ(log_level(), LogLevel::kWarning) << "until init() refuses it";
}

TEST_F(ConfigTest, NumbersAndTimesHaveARange) {
  set("HVD_DEVICE", "1025");
  EXPECT_THAT(refusal([] { env_int("DEVICE"); }),
              HasSubstr("a whole number from 0 to 1024, got '1025'"));
  set("HVD_PEER_TIMEOUT", "0");
  EXPECT_THAT(refusal([] { env_seconds("PEER_TIMEOUT"); }), HasSubstr("seconds, more than 0"));
  set("HVD_PEER_TIMEOUT", "0.5");
  EXPECT_EQ(env_seconds("PEER_TIMEOUT"), std::chrono::milliseconds(500));
  set("HVD_STALL_WARNING", "0");
  EXPECT_EQ(env_seconds("STALL_WARNING"), std::chrono::milliseconds(0));
}

TEST_F(ConfigTest, OneCheckFindsABadValueThatWasNotReadYet) {
  EXPECT_NO_THROW(check_environment());
  set("HOROVOD_CACHE_CAPACITY", "many");
  EXPECT_THAT(refusal([] { check_environment(); }),
              AllOf(HasSubstr("HOROVOD_CACHE_CAPACITY"), HasSubstr("'many'")));
}

TEST_F(ConfigTest, ListsTheVariablesInForce) {
  set("HVD_PEER_TIMEOUT", "3");
  set("HVD_PROGRESS", "AUTO");  // the default
  set("HOROVOD_CACHE_CAPACITY", "7");
  EXPECT_THAT(variables_in_force(VariableUse::kRuntime),
              ElementsAre("HOROVOD_CACHE_CAPACITY=7", "HVD_PEER_TIMEOUT=3"));
}

TEST_F(ConfigTest, NamesTheVariableThatAnUnknownOneIsLike) {
  set("HVD_FUSION_TRESHOLD", "1");
  set("HVD_COMPLETELY_DIFFERENT", "1");
  set("HVD_RANK", "0");
  set("HVD_LAUNCHER_PORT", "1");
  set("HVD_TEST_SOMETHING", "1");
  EXPECT_THAT(unknown_variables(),
              ElementsAre("HVD_COMPLETELY_DIFFERENT is no variable of hvd and has no effect",
                          "HVD_FUSION_TRESHOLD is no variable of hvd and has no effect; did you "
                          "mean HVD_FUSION_THRESHOLD?"));
}

TEST_F(ConfigTest, ANameThatIsNotInTheTableIsADefect) {
  EXPECT_THROW(env_string("NO_SUCH"), Error);
}

/// A row of docs/configuration.md.
std::string row(const Variable& variable) {
  const std::string name = "| `HVD_" + std::string(variable.name) + "` | ";
  if (variable.use != VariableUse::kRuntime) return name + std::string(variable.meaning) + " |";
  const std::string option =
      variable.option.empty() ? "" : "`" + std::string(variable.option) + "` ";
  const std::string values = expected_values(variable, '`');
  const std::string fallback = variable.fallback.empty()
                                   ? std::string(variable.otherwise)
                                   : "`" + std::string(variable.fallback) + "`";
  return name + option + "| " + (values.empty() ? "" : values + " ") + "| " + fallback + " | " +
         std::string(variable.meaning) + " |";
}

// The document has the table's rows, in the table's order, and no other variable of hvd.
TEST(ConfigDoc, HasTheRowsOfTheTable) {
  std::ifstream in(HVD_CONFIGURATION_DOC);
  ASSERT_TRUE(in.is_open()) << HVD_CONFIGURATION_DOC;
  std::string found;
  for (std::string line; std::getline(in, line);) {
    if (line == "## The build") break;  // its options are CMake's
    if (line.starts_with("| `HVD_")) found += line + "\n";
  }
  std::string expected;
  for (const Variable& variable : variables()) expected += row(variable) + "\n";
  EXPECT_EQ(found, expected) << "what docs/configuration.md should have:\n" << expected;
}

}  // namespace
}  // namespace hvd
