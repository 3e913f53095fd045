#include "core/transport/verbs/rdma_library.h"

#include <dlfcn.h>
#include <fcntl.h>

#include <atomic>

#include "core/base/inside.h"
#include "core/base/log.h"
#include "core/os/os.h"
#include "core/os/owned_fd.h"

namespace rsock::transport::verbs {
namespace {

constexpr char kNoDevice[] = "no RDMA device";

RdmaLibrary g_library;
std::atomic<const RdmaLibrary*> g_loaded{nullptr};
std::atomic<const char*> g_why_not{kNoDevice};
std::atomic<bool> g_tried{false};
std::atomic<bool> g_spent{false};

const RdmaLibrary* refuse(const char* reason) noexcept {
  g_why_not.store(reason, std::memory_order_relaxed);  // a literal: nothing to order
  return nullptr;
}

template <typename F>
bool find(void* library, const char* name, F*& out) noexcept {
  out = reinterpret_cast<F*>(dlsym(library, name));
  return out != nullptr;
}

bool find_all(void* rdmacm, void* ibverbs) noexcept {
  RdmaLibrary& l = g_library;
  bool all = true;
#define RSOCK_FIND(name) all = find(rdmacm, #name, l.name) && all;
  RSOCK_RDMA_FUNCTIONS(RSOCK_FIND)
#undef RSOCK_FIND
#define RSOCK_FIND(name) all = find(ibverbs, #name, l.name) && all;
  RSOCK_VERBS_FUNCTIONS(RSOCK_FIND)
#undef RSOCK_FIND
  return find(ibverbs, "ibv_reg_mr", l.reg_mr) && all;
}

/// ib_core makes the class when it comes: where it is not there, neither is a device, and a process
/// is spared five libraries.
bool kernel_knows_rdma() noexcept {
  const auto fd = os::make_internal(
      [] { return os::open("/sys/class/infiniband", O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0); });
  return fd.has_value();
}

}  // namespace

bool prepare_for_forks(int (*status)(), int (*init)()) noexcept {
  constexpr int kUnneeded = 2;  // IBV_FORK_UNNEEDED: the kernel copies at fork
  if (status != nullptr && status() == kUnneeded) return true;
  return init != nullptr && init() == 0;
}

const RdmaLibrary* RdmaLibrary::load() noexcept {
  if (g_spent.load(std::memory_order_relaxed)) return nullptr;
  if (const RdmaLibrary* l = get()) return l;
  if (!kernel_knows_rdma()) return refuse(kNoDevice);
  if (g_tried.exchange(true, std::memory_order_relaxed)) return nullptr;  // keeper only: a flag
  const InsideLibrary guard;
  // Never unloaded: pointers into it are kept.
  constexpr int kFlags = RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE;
  void* const ibverbs = dlopen("libibverbs.so.1", kFlags);
  void* const rdmacm = ibverbs != nullptr ? dlopen("librdmacm.so.1", kFlags) : nullptr;
  if (rdmacm == nullptr) return refuse("rdma-core is not installed");
  if (!find_all(rdmacm, ibverbs)) return refuse("rdma-core is too old");
  // Not in the table: an rdma-core that lacks the first of them will do.
  int (*status)() = nullptr;
  int (*init)() = nullptr;
  (void)find(ibverbs, "ibv_is_fork_initialized", status);
  (void)find(ibverbs, "ibv_fork_init", init);
  if (!prepare_for_forks(status, init)) {
    RSOCK_LOG(kWarn, "ibv_fork_init failed: a fork may disturb streams on RDMA");
  }
  // release pairs with the acquire in get(): the pointers are whole.
  g_loaded.store(&g_library, std::memory_order_release);
  return &g_library;
}

const RdmaLibrary* RdmaLibrary::get() noexcept {
  return g_loaded.load(std::memory_order_acquire);  // pairs with load()
}

const char* RdmaLibrary::why_not() noexcept { return g_why_not.load(std::memory_order_relaxed); }

bool RdmaLibrary::any_device() noexcept {
  const RdmaLibrary* l = get();
  if (l == nullptr) return false;
  const InsideLibrary guard;
  int n = 0;
  ibv_device** list = l->ibv_get_device_list(&n);
  if (list != nullptr) l->ibv_free_device_list(list);
  if (list == nullptr || n == 0) (void)refuse(kNoDevice);
  return list != nullptr && n > 0;
}

void RdmaLibrary::spent_in_child() noexcept {
  g_spent.store(true, std::memory_order_relaxed);
  (void)refuse("forked from a process that uses RDMA");
}

}  // namespace rsock::transport::verbs
