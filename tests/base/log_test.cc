#include "core/base/log.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <string>
#include <vector>

namespace rsock {
namespace {

void load(std::vector<std::string> variables) {
  std::vector<const char*> environment{"RSOCK_CONFIG=/dev/null"};
  for (const std::string& v : variables) environment.push_back(v.c_str());
  environment.push_back(nullptr);
  load_config(environment.data());
}

/// What arrived at descriptor 2 while `work` ran, with `fd` standing in for it.
template <typename Work>
void with_stderr(int fd, Work work) {
  const int saved = ::dup(2);
  ::dup2(fd, 2);
  work();
  ::dup2(saved, 2);
  ::close(saved);
}

std::string drain(int fd) {
  ::fcntl(fd, F_SETFL, O_NONBLOCK);
  char buf[4096];
  const ssize_t n = ::read(fd, buf, sizeof(buf));
  return n > 0 ? std::string(buf, static_cast<size_t>(n)) : "";
}

std::string prefix(const char* level) {
  return "librsock[" + std::to_string(::getpid()) + "] " + level + ": ";
}

TEST(Log, WritesALineToStderrWhereItWasAskedFor) {
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  load({"RSOCK_LOG=info"});
  with_stderr(ends[1], [] {
    RSOCK_LOG(kInfo, "number %d", 7);
    RSOCK_LOG(kDebug, "too fine");
  });
  EXPECT_EQ(drain(ends[0]), prefix("info") + "number 7\n");
  ::close(ends[0]), ::close(ends[1]);
}

TEST(Log, SaysNothingOnAStderrThatIsNoTerminalAndWasNotAskedFor) {
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  load({});
  with_stderr(ends[1], [] { RSOCK_LOG(kError, "unheard"); });
  EXPECT_EQ(drain(ends[0]), "");
  ::close(ends[0]), ::close(ends[1]);
}

TEST(Log, CutsALongLineAndKeepsItsNewline) {
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  load({"RSOCK_LOG=warn"});
  const std::string text(2000, 'x');
  with_stderr(ends[1], [&] { RSOCK_LOG(kWarn, "%s", text.c_str()); });
  const std::string line = drain(ends[0]);
  EXPECT_EQ(line.size(), 512u);
  EXPECT_EQ(line.substr(line.size() - 2), "x\n");
  ::close(ends[0]), ::close(ends[1]);
}

TEST(Log, AReaderThatWentAwayDoesNotKillUs) {
  ::signal(SIGPIPE, SIG_DFL);
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  ::close(ends[0]);
  load({"RSOCK_LOG=warn"});
  with_stderr(ends[1], [] { RSOCK_LOG(kWarn, "into the void"); });
  sigset_t pending;
  ::sigpending(&pending);
  EXPECT_FALSE(::sigismember(&pending, SIGPIPE));
  ::close(ends[1]);
}

TEST(Log, AFullPipeDoesNotBlockUs) {
  int ends[2];
  ASSERT_EQ(::pipe2(ends, O_NONBLOCK), 0);
  const std::string block(4096, '.');
  while (::write(ends[1], block.data(), block.size()) > 0) {
  }
  ::fcntl(ends[1], F_SETFL, 0);
  load({"RSOCK_LOG=warn"});
  ::alarm(10);
  with_stderr(ends[1], [] { RSOCK_LOG(kWarn, "no room"); });
  ::alarm(0);
  ::close(ends[0]), ::close(ends[1]);
}

TEST(Log, ReachesAUnixSocketAsAServiceManagerGives) {
  int ends[2];
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
  load({"RSOCK_LOG=warn"});
  with_stderr(ends[1], [] { RSOCK_LOG(kWarn, "to the journal"); });
  EXPECT_EQ(drain(ends[0]), prefix("warn") + "to the journal\n");
  ::close(ends[0]), ::close(ends[1]);
}

TEST(Log, SaysNothingOnAFileThatTookTheNumberOfStderr) {
  int ends[2];
  int others[2];
  ASSERT_EQ(::pipe(ends), 0);
  ASSERT_EQ(::pipe(others), 0);
  load({"RSOCK_LOG=warn"});
  const pid_t child = ::fork();  // what is noted stays noted
  if (child == 0) {
    ::dup2(ends[1], 2);
    note_stderr();
    RSOCK_LOG(kWarn, "heard");
    ::dup2(others[1], 2);
    RSOCK_LOG(kWarn, "into the program's data");
    ::close(2);
    RSOCK_LOG(kWarn, "into nothing");
    ::dup2(ends[1], 2);
    RSOCK_LOG(kWarn, "heard again");
    ::_exit(0);
  }
  ASSERT_EQ(::waitpid(child, nullptr, 0), child);
  EXPECT_EQ(drain(others[0]), "");
  const std::string mark = "librsock[" + std::to_string(child) + "] warn: ";
  EXPECT_EQ(drain(ends[0]), mark + "heard\n" + mark + "heard again\n");
  for (int fd : {ends[0], ends[1], others[0], others[1]}) ::close(fd);
}

TEST(Log, AppendsToTheFileAlsoAfterAllDescriptorsAreClosed) {
  char name[] = "/tmp/rsock_log_XXXXXX";
  const int fd = ::mkstemp(name);
  ASSERT_GE(fd, 0);
  load({std::string("RSOCK_LOG_FILE=") + name});
  RSOCK_LOG(kWarn, "first");
  RSOCK_LOG(kError, "second");
  RSOCK_LOG(kInfo, "below the level");
  EXPECT_EQ(drain(fd), prefix("warn") + "first\n" + prefix("error") + "second\n");
  ::close(fd);
  ::unlink(name);
}

TEST(Log, LeavesErrnoAlone) {
  load({"RSOCK_LOG=warn", "RSOCK_LOG_FILE=/nonexistent/x"});
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  with_stderr(ends[1], [] {
    errno = 123;
    RSOCK_LOG(kWarn, "%s", "x");
    EXPECT_EQ(errno, 123);
  });
  EXPECT_EQ(drain(ends[0]), prefix("warn") + "x\n");  // the file could not be opened: stderr
  ::close(ends[0]), ::close(ends[1]);
}

}  // namespace
}  // namespace rsock
