#include "core/base/config.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

namespace rsock {
namespace {

/// A configuration file that goes away with the test.
class File {
 public:
  explicit File(const std::string& text) {
    char name[] = "/tmp/rsock_config_XXXXXX";
    const int fd = mkstemp(name);
    EXPECT_GE(fd, 0);
    EXPECT_EQ(::write(fd, text.data(), text.size()), static_cast<ssize_t>(text.size()));
    ::close(fd);
    name_ = name;
  }
  ~File() { ::unlink(name_.c_str()); }
  const std::string& name() const { return name_; }

 private:
  std::string name_;
};

/// Loads these variables with no file, so that the machine's own /etc/rsock.conf does not matter.
void load(std::vector<std::string> variables, const std::string& file = "/dev/null") {
  variables.push_back("RSOCK_CONFIG=" + file);
  std::vector<const char*> environment{"PATH=/bin"};
  for (const std::string& v : variables) environment.push_back(v.c_str());
  environment.push_back(nullptr);
  load_config(environment.data());
}

std::vector<std::string> complaints() {
  std::vector<std::string> all;
  for (size_t i = 0; i < config_complaints(); ++i) all.emplace_back(config_complaint(i));
  return all;
}

std::string only_complaint() {
  EXPECT_EQ(config_complaints(), 1u);
  return config_complaints() > 0 ? config_complaint(0) : "";
}

TEST(Config, HasItsDefaultsWhereNothingIsSaid) {
  load({});
  EXPECT_TRUE(config().enabled);
  EXPECT_TRUE(config().allow_shm && config().allow_rdma && config().allow_tcp);
  EXPECT_FALSE(config().strict);
  EXPECT_EQ(config().log_level, LogLevel::kWarn);
  EXPECT_FALSE(config().log_stderr);
  EXPECT_EQ(config().log_file, nullptr);
  EXPECT_EQ(config().lift_bytes, 64u * 1024);
  EXPECT_EQ(config().ring_bytes, 0u);
  EXPECT_EQ(config().key_file, nullptr);
  EXPECT_EQ(config().rdma_streams, 0u);
  EXPECT_EQ(config().rdma_idle_s, 60u);
  EXPECT_TRUE(config().rdma_immediate);
  EXPECT_EQ(complaints(), std::vector<std::string>{});
}

struct PathCase {
  const char* path;
  const char* strict;
  bool shm, rdma, tcp, enabled;
};

TEST(Config, PathAndStrictTogetherSayWhatMayBeUsed) {
  const PathCase cases[] = {
      {"auto", "0", true, true, true, true},
      {"auto", "1", true, true, false, true},  // strict: must be accelerated
      {"", "1", true, true, false, true},
      {"tcp", "0", false, false, true, false},
      {"tcp", "1", false, false, true, false},
      {"shm", "0", true, false, false, true},
      {"rdma", "0", false, true, false, true},
      {"shm,rdma", "1", true, true, false, true},
      {"shm, TCP", "1", true, false, true, true},
      {"auto,tcp", "1", true, true, true, true},
  };
  for (const PathCase& c : cases) {
    SCOPED_TRACE(std::string(c.path) + " strict=" + c.strict);
    load({std::string("RSOCK_PATH=") + c.path, std::string("RSOCK_STRICT=") + c.strict});
    EXPECT_EQ(config().allow_shm, c.shm);
    EXPECT_EQ(config().allow_rdma, c.rdma);
    EXPECT_EQ(config().allow_tcp, c.tcp);
    EXPECT_EQ(config().enabled, c.enabled);
    EXPECT_EQ(complaints(), std::vector<std::string>{});
  }
}

TEST(Config, NamesTheNearestVariableForAnUnknownOne) {
  load({"RSOCK_PAHT=shm"});
  EXPECT_EQ(only_complaint(), "unknown variable RSOCK_PAHT; did you mean RSOCK_PATH?");
  EXPECT_TRUE(config().allow_rdma);
  load({"RSOCK_LIFT_BYTE=1"});
  EXPECT_EQ(only_complaint(), "unknown variable RSOCK_LIFT_BYTE; did you mean RSOCK_LIFT_BYTES?");
  load({"RSOCK_RDMA_STREAM=1"});
  EXPECT_EQ(only_complaint(),
            "unknown variable RSOCK_RDMA_STREAM; did you mean RSOCK_RDMA_STREAMS?");
  load({"RSOCK_RDMA_IDLE=1"});
  EXPECT_EQ(only_complaint(), "unknown variable RSOCK_RDMA_IDLE; did you mean RSOCK_RDMA_IDLE_S?");
  load({"RSOCK_KEYFILE=k"});
  EXPECT_EQ(only_complaint(), "unknown variable RSOCK_KEYFILE; did you mean RSOCK_KEY_FILE?");
  load({"RSOCK_A_NAME_THAT_IS_LONGER_THAN_ANY_KNOWN_ONE=1"});
  EXPECT_EQ(config_complaints(), 1u);
}

TEST(Config, NamesTheNearestValueForAnUnknownOneAndKeepsTheDefault) {
  load({"RSOCK_PATH=smh"});
  EXPECT_EQ(only_complaint(), "RSOCK_PATH: unknown value 'smh'; did you mean 'shm'? Using auto");
  EXPECT_TRUE(config().allow_shm && config().allow_rdma && config().allow_tcp);
  load({"RSOCK_LOG=inof"});
  EXPECT_EQ(only_complaint(), "RSOCK_LOG: unknown value 'inof'; did you mean 'info'? Using warn");
  EXPECT_EQ(config().log_level, LogLevel::kWarn);
  load({"RSOCK_RDMA_IMMEDIATE=on"});
  EXPECT_EQ(only_complaint(),
            "RSOCK_RDMA_IMMEDIATE: unknown value 'on'; did you mean 'no'? Using auto");
  EXPECT_TRUE(config().rdma_immediate);
  load({"RSOCK_STRICT=maybe"});
  EXPECT_EQ(config_complaints(), 1u);
  EXPECT_FALSE(config().strict);
}

struct NumberCase {
  const char* variable;
  uint32_t Config::*field;
  uint32_t value;
  size_t complaints;
};

TEST(Config, TakesNumbersWithinTheirLimitsOnly) {
  const NumberCase cases[] = {
      {"RSOCK_LIFT_BYTES=0", &Config::lift_bytes, 0, 0},
      {"RSOCK_LIFT_BYTES=4096", &Config::lift_bytes, 4096, 0},
      {"RSOCK_LIFT_BYTES=2m", &Config::lift_bytes, 2u << 20, 0},
      {"RSOCK_LIFT_BYTES=4G", &Config::lift_bytes, 64 * 1024, 1},
      {"RSOCK_LIFT_BYTES=-1", &Config::lift_bytes, 64 * 1024, 1},
      {"RSOCK_LIFT_BYTES=1x", &Config::lift_bytes, 64 * 1024, 1},
      {"RSOCK_LIFT_BYTES=K", &Config::lift_bytes, 64 * 1024, 1},
      {"RSOCK_LIFT_BYTES=99999999999999999999999", &Config::lift_bytes, 64 * 1024, 1},
      {"RSOCK_LIFT_CALLS=1", &Config::lift_calls, 1, 0},
      {"RSOCK_SPIN_US=0", &Config::spin_us, 0, 0},
      {"RSOCK_SPIN_US=1000001", &Config::spin_us, 50, 1},
      {"RSOCK_RDMA_STREAMS=0", &Config::rdma_streams, 0, 0},
      {"RSOCK_RDMA_STREAMS=1000000", &Config::rdma_streams, 1'000'000, 0},
      {"RSOCK_RDMA_STREAMS=1000001", &Config::rdma_streams, 0, 1},
      {"RSOCK_RDMA_STREAMS=all", &Config::rdma_streams, 0, 1},
      {"RSOCK_SHM_IDLE_S=0", &Config::shm_idle_s, 0, 0},
      {"RSOCK_SHM_IDLE_S=7", &Config::shm_idle_s, 7, 0},
      {"RSOCK_SHM_IDLE_S=-1", &Config::shm_idle_s, 60, 1},
      {"RSOCK_RDMA_IDLE_S=0", &Config::rdma_idle_s, 0, 0},
      {"RSOCK_RDMA_IDLE_S=3600", &Config::rdma_idle_s, 3600, 0},
      {"RSOCK_RDMA_IDLE_S=1000001", &Config::rdma_idle_s, 60, 1},
      {"RSOCK_RDMA_IDLE_S=-1", &Config::rdma_idle_s, 60, 1},
      {"RSOCK_RING_BYTES=64K", &Config::ring_bytes, 64 * 1024, 0},
      {"RSOCK_RING_BYTES=64M", &Config::ring_bytes, 64u << 20, 0},
      {"RSOCK_RING_BYTES=128M", &Config::ring_bytes, 0, 1},
      {"RSOCK_RING_BYTES=32K", &Config::ring_bytes, 0, 1},
      {"RSOCK_RING_BYTES=100000", &Config::ring_bytes, 0, 1},
  };
  for (const NumberCase& c : cases) {
    SCOPED_TRACE(c.variable);
    load({c.variable});
    EXPECT_EQ(config().*c.field, c.value);
    EXPECT_EQ(config_complaints(), c.complaints);
  }
}

TEST(Config, ImmediateValuesAreLeftOutOnRequest) {
  load({"RSOCK_RDMA_IMMEDIATE=No"});
  EXPECT_FALSE(config().rdma_immediate);
  load({"RSOCK_RDMA_IMMEDIATE=auto"});
  EXPECT_TRUE(config().rdma_immediate);
  EXPECT_EQ(complaints(), std::vector<std::string>{});
}

TEST(Config, ReadsKeysFromTheFileInBothSpellings) {
  const File file(
      "# a comment\n\n  path = shm \nRSOCK_SPIN_US=7\r\nLift_Calls = 3\n"
      "key_file = /k\nRDMA_Streams = 9\nrsock_rdma_idle_s = 5\nrdma_immediate = no");
  load({}, file.name());
  EXPECT_EQ(complaints(), std::vector<std::string>{});
  EXPECT_FALSE(config().allow_rdma);
  EXPECT_EQ(config().spin_us, 7u);
  EXPECT_EQ(config().lift_calls, 3u);
  EXPECT_STREQ(config().key_file, "/k");
  EXPECT_EQ(config().rdma_streams, 9u);
  EXPECT_EQ(config().rdma_idle_s, 5u);
  EXPECT_FALSE(config().rdma_immediate);
}

TEST(Config, EnvironmentBeatsTheFile) {
  const File file("spin_us = 7\nlift_calls = 9\n");
  load({"RSOCK_SPIN_US=8"}, file.name());
  EXPECT_EQ(config().spin_us, 8u);
  EXPECT_EQ(config().lift_calls, 9u);
}

TEST(Config, SectionsOfOtherProgramsDoNotConcernUs) {
  const std::string name = program_invocation_short_name;
  const File file("spin_us = 1\n[program no-such-program]\nspin_us = 2\nlift_calls = 2\n[program " +
                  name + "]\nspin_us = 3\n");
  load({}, file.name());
  EXPECT_EQ(complaints(), std::vector<std::string>{});
  EXPECT_EQ(config().spin_us, 3u);
  EXPECT_EQ(config().lift_calls, 16u);
}

TEST(Config, EveryBadLineOfTheFileIsNamedWithItsNumber) {
  const File file("nonsense\nspin_su = 4\nconfig = x\n[port 80]\nspin_us = 9\n");
  load({}, file.name());
  const std::vector<std::string> wanted{
      file.name() + ":1: expected 'key = value', found 'nonsense'",
      file.name() + ":2: unknown key 'spin_su'; did you mean RSOCK_SPIN_US?",
      file.name() + ":3: RSOCK_CONFIG has a meaning in the environment only",
      file.name() +
          ":4: unknown section '[port 80]'; did you mean [program NAME]? Its lines are ignored"};
  EXPECT_EQ(complaints(), wanted);
  EXPECT_EQ(config().spin_us, 50u);
}

TEST(Config, AFileThatWasAskedForAndIsAbsentIsNamed) {
  load({}, "/nonexistent/rsock.conf");
  EXPECT_NE(only_complaint().find("/nonexistent/rsock.conf"), std::string::npos);
}

TEST(Config, SurvivesAFileOfAnyBytes) {
  std::string text;
  uint32_t x = 12345;
  for (int i = 0; i < 100'000; ++i) {
    x = x * 1664525 + 1013904223;
    text += i % 7 == 0 ? "\n=[]# "[x >> 29 & 5] : static_cast<char>(x >> 24);
  }
  const File file(text);
  load({}, file.name());
  EXPECT_GT(config_complaints(), 0u);
  EXPECT_LE(config_complaints(), 32u);
}

TEST(Config, FileNamesBecomeAbsolute) {
  char directory[4096];
  ASSERT_NE(::getcwd(directory, sizeof(directory)), nullptr);
  load({"RSOCK_LOG_FILE=a.log", "RSOCK_SUMMARY=/x/b.json", "RSOCK_KEY_FILE=a.key"});
  const std::string here = directory;
  EXPECT_EQ(std::string(config().log_file), (here == "/" ? here : here + "/") + "a.log");
  EXPECT_STREQ(config().summary_file, "/x/b.json");
  EXPECT_EQ(std::string(config().key_file), (here == "/" ? here : here + "/") + "a.key");
}

TEST(Config, ValuesOutliveTheEnvironmentTheyCameFrom) {
  std::string variable = "RSOCK_SUMMARY=/tmp/s.json";
  const char* environment[] = {"RSOCK_CONFIG=/dev/null", variable.c_str(), nullptr};
  load_config(environment);
  memset(variable.data(), 'x', variable.size());
  EXPECT_STREQ(config().summary_file, "/tmp/s.json");
}

TEST(Config, NoEnvironmentAtAllIsFine) {
  load_config(nullptr);
  EXPECT_TRUE(config().enabled);
}

}  // namespace
}  // namespace rsock
