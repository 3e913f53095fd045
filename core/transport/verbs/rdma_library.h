// librdmacm and libibverbs, loaded when the first stream could use them.
//
// Purpose: the library must work where rdma-core is not installed, and a program that opens no
// socket must not pay for it. So nothing is linked; the functions that are no inline functions of
// <infiniband/verbs.h> are looked up once. Thread safety: load() and any_device() by the keeper,
// without any lock of ours: they open libraries (any_device() the providers), and the loader's lock
// may be held by a thread whose constructor forks, which takes all of ours. get() and why_not() by
// any thread. What these libraries do with descriptors comes back through the interposer: callers
// hold an InsideLibrary.
#pragma once

#include <infiniband/verbs.h>
#include <rdma/rdma_cma.h>

namespace rsock::transport::verbs {

// libibverbs' inline wrappers call through the context; these are real functions.
#define RSOCK_RDMA_FUNCTIONS(F)                                                                \
  F(rdma_create_event_channel)                                                                 \
  F(rdma_destroy_event_channel) F(rdma_create_id) F(rdma_destroy_id) F(rdma_bind_addr)         \
      F(rdma_listen) F(rdma_resolve_addr) F(rdma_resolve_route) F(rdma_connect) F(rdma_accept) \
          F(rdma_reject) F(rdma_disconnect) F(rdma_get_cm_event) F(rdma_ack_cm_event)          \
              F(rdma_set_option) F(rdma_create_qp) F(rdma_destroy_qp) F(rdma_init_qp_attr)     \
                  F(rdma_get_src_port) F(rdma_establish)
#define RSOCK_VERBS_FUNCTIONS(F)                                                                 \
  F(ibv_alloc_pd)                                                                                \
  F(ibv_dealloc_pd) F(ibv_dereg_mr) F(ibv_create_comp_channel) F(ibv_destroy_comp_channel)       \
      F(ibv_create_cq) F(ibv_destroy_cq) F(ibv_get_cq_event) F(ibv_ack_cq_events)                \
          F(ibv_create_srq) F(ibv_destroy_srq) F(ibv_modify_qp) F(ibv_query_qp)                  \
              F(ibv_query_device) F(ibv_get_async_event) F(ibv_ack_async_event)                  \
                  F(ibv_get_device_list) F(ibv_free_device_list) F(ibv_event_type_str)           \
                      F(ibv_wc_status_str) F(ibv_create_qp) F(ibv_destroy_qp) F(ibv_open_device) \
                          F(ibv_close_device) F(ibv_query_gid) F(ibv_get_device_name)

/// Before the first registration: where a forked child's pages are not copies from the start
/// (before Linux 5.12), a write of either process to a page that the device uses could part the
/// two, and ibv_fork_init() keeps such pages out of children. `status`: ibv_is_fork_initialized(),
/// or null where rdma-core has none. False: it is needed, and the library refused (a program that
/// has registered memory by itself).
bool prepare_for_forks(int (*status)(), int (*init)()) noexcept;

struct RdmaLibrary {
  // NOLINTNEXTLINE(bugprone-macro-parentheses): a declaration
#define RSOCK_DECLARE(name) decltype(&::name) name = nullptr;
  RSOCK_RDMA_FUNCTIONS(RSOCK_DECLARE)
  RSOCK_VERBS_FUNCTIONS(RSOCK_DECLARE)
#undef RSOCK_DECLARE
  // A macro of verbs.h hides the function of that name.
  ibv_mr* (*reg_mr)(ibv_pd* pd, void* address, size_t size, int access) = nullptr;

  /// Loads both libraries, once. Null: a reason that a person can act on is in why_not().
  static const RdmaLibrary* load() noexcept;
  /// What load() found; null before, and where there is none. Any thread.
  static const RdmaLibrary* get() noexcept;
  static const char* why_not() noexcept;
  /// There is at least one RDMA device now. load() was called. Opens and closes files of /sys and
  /// /dev.
  static bool any_device() noexcept;
  /// In a forked child, if the parent used a device (or was in load()): never again here. The
  /// libraries keep a context per device for the life of the process, and the child's copies stand
  /// for the parent's memory and descriptors.
  static void spent_in_child() noexcept;
};

}  // namespace rsock::transport::verbs
