// The cost of calls on a descriptor that is no socket: 1-byte write and read on a pipe.
//
//   syscall_cost [--batches 6000] [--calls 40]
//
// Two processes, one with LD_PRELOAD and one without, differ by more than the few nanoseconds that
// are of interest here, only because they ran at different moments and at different addresses. So
// each process makes the same calls in two ways, in neighbouring short batches: through the names
// that a program links against, which a preloaded library takes over, and through the C library's
// own functions, asked for by handle. `added_ns`, the median of the differences, is what the
// library adds to a call; without one it is 0, which shows how far the figure can be trusted.

#include <dlfcn.h>
#include <unistd.h>
#include <algorithm>
#include <vector>

#include "bench_util.h"

namespace {

struct Calls {
  decltype(&::write) write;
  decltype(&::read) read;
};

Calls linked_calls() { return {&::write, &::read}; }

Calls libc_calls() {
  void* libc = dlopen("libc.so.6", RTLD_NOW | RTLD_NOLOAD);
  if (libc == nullptr) bench::die_plain(dlerror());
  Calls calls{reinterpret_cast<decltype(&::write)>(dlsym(libc, "write")),
              reinterpret_cast<decltype(&::read)>(dlsym(libc, "read"))};
  if (calls.write == nullptr || calls.read == nullptr) bench::die_plain("no read or write in libc");
  return calls;
}

double ns_per_call(const Calls& calls, const int* ends, uint64_t pairs) {
  char byte = 'x';
  uint64_t start = bench::now_ns();
  for (uint64_t i = 0; i < pairs; ++i) {
    if (calls.write(ends[1], &byte, 1) != 1 || calls.read(ends[0], &byte, 1) != 1)
      bench::die("pipe");
  }
  return static_cast<double>(bench::now_ns() - start) / static_cast<double>(2 * pairs);
}

double quantile(std::vector<double> values, double part) {
  std::sort(values.begin(), values.end());
  return values[static_cast<size_t>(part * static_cast<double>(values.size() - 1))];
}

}  // namespace

int main(int argc, char** argv) {
  bench::Args args(argc, argv, 1);
  uint64_t batches = args.size("--batches", 6000);
  uint64_t calls = args.size("--calls", 40);
  args.finish();
  if (batches == 0 || calls < 2) bench::die_usage("syscall_cost: --batches, --calls?");

  int ends[2];
  if (pipe(ends) != 0) bench::die("pipe");
  const Calls linked = linked_calls();
  const Calls libc = libc_calls();
  const uint64_t pairs = calls / 2;
  const uint64_t warm_up = batches / 20 + 1;
  std::vector<double> linked_ns, libc_ns, added_ns;
  for (uint64_t i = 0; i < warm_up + batches; ++i) {
    // Each goes first as often as the other.
    double first = i % 2 == 0 ? ns_per_call(linked, ends, pairs) : 0;
    double libc_one = ns_per_call(libc, ends, pairs);
    double linked_one = i % 2 == 0 ? first : ns_per_call(linked, ends, pairs);
    if (i < warm_up) continue;
    linked_ns.push_back(linked_one);
    libc_ns.push_back(libc_one);
    added_ns.push_back(linked_one - libc_one);
  }
  bench::JsonLine("syscall_cost")
      .add("batches", batches)
      .add("calls", calls)
      .add("ns_per_call_min", quantile(linked_ns, 0))
      .add("ns_per_call_median", quantile(linked_ns, 0.5))
      .add("libc_ns_min", quantile(libc_ns, 0))
      .add("libc_ns_median", quantile(libc_ns, 0.5))
      .add("taken_over", linked.write != libc.write)
      .add("added_ns", quantile(added_ns, 0.5))
      .print();
  return 0;
}
