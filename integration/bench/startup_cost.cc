// What a preloaded library adds to the start and end of a program.
//
//   startup_cost [--preload FILE] [--program /bin/true] [--runs 300]
//
// Starts the program without and with LD_PRELOAD, in turn, and waits for it each time. Without
// --preload both halves are plain, which shows how far two equal things differ on this machine.

#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <vector>

#include "bench_util.h"

extern char** environ;

namespace {

// Our own environment without LD_PRELOAD and the library's variables, and one entry more.
std::vector<std::string> environment_with(const std::string& entry) {
  std::vector<std::string> result;
  for (char** each = environ; *each != nullptr; ++each) {
    if (std::strncmp(*each, "LD_PRELOAD=", 11) != 0 && std::strncmp(*each, "RSOCK_", 6) != 0)
      result.emplace_back(*each);
  }
  if (!entry.empty()) result.push_back(entry);
  return result;
}

double run_once_us(const std::string& program, std::vector<std::string>& environment) {
  std::vector<char*> pointers;
  for (std::string& each : environment) pointers.push_back(each.data());
  pointers.push_back(nullptr);
  char* arguments[] = {const_cast<char*>(program.c_str()), nullptr};

  uint64_t start = bench::now_ns();
  pid_t pid;
  int error = posix_spawn(&pid, program.c_str(), nullptr, nullptr, arguments, pointers.data());
  if (error != 0) bench::die_plain(program + ": " + std::strerror(error));
  int status = 0;
  while (waitpid(pid, &status, 0) < 0) {
    if (errno != EINTR) bench::die("waitpid");
  }
  if (!WIFEXITED(status) || WEXITSTATUS(status) != 0)
    bench::die_plain(program + " did not end with status 0");
  return static_cast<double>(bench::now_ns() - start) / 1e3;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

}  // namespace

int main(int argc, char** argv) {
  bench::Args args(argc, argv, 1);
  std::string preload = args.text("--preload", "");
  std::string program = args.text("--program", "/bin/true");
  uint64_t runs = args.size("--runs", 300);
  args.finish();
  if (runs == 0) bench::die_usage("startup_cost: --runs?");

  std::vector<std::string> plain = environment_with("");
  std::vector<std::string> shim = environment_with(preload.empty() ? "" : "LD_PRELOAD=" + preload);
  std::vector<double> plain_us, shim_us, added_us;
  for (uint64_t i = 0; i < runs + 5; ++i) {
    double without = run_once_us(program, plain);
    double with = run_once_us(program, shim);
    if (i < 5) continue;  // the first ones fill the page cache
    plain_us.push_back(without);
    shim_us.push_back(with);
    added_us.push_back(with - without);
  }
  bench::JsonLine("startup_cost")
      .add("program", program)
      .add("runs", runs)
      .add("plain_us_median", median(plain_us))
      .add("shim_us_median", median(shim_us))
      .add("plain_us_min", *std::min_element(plain_us.begin(), plain_us.end()))
      .add("shim_us_min", *std::min_element(shim_us.begin(), shim_us.end()))
      .add("added_us_median", median(added_us))
      .print();
  return 0;
}
