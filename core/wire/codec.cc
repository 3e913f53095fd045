#include "core/wire/codec.h"

namespace rsock::wire::codec {
namespace {

struct Kind {
  bool unspecified, loopback, link_local, multicast;
};

Kind kind_of(const Endpoint& e, bool v4) {
  const auto& a = e.address;
  if (v4) {
    return {.unspecified = all_zero(&a[12], 4),
            .loopback = a[12] == 127,
            .link_local = false,  // 169.254/16 needs no scope
            .multicast = a[12] >= 224};
  }
  return {.unspecified = all_zero(a.data(), 16),
          .loopback = all_zero(a.data(), 15) && a[15] == 1,
          .link_local = a[0] == 0xfe && (a[1] & 0xc0) == 0x80,
          .multicast = a[0] == 0xff};
}

}  // namespace

const char* impossible_across_hosts(const FourTuple& t) {
  if (const char* why = impossible(t)) return why;
  if (t.is_to_itself()) return "a connection to itself";
  const Kind a = kind_of(t.local, t.is_v4()), b = kind_of(t.remote, t.is_v4());
  if (a.unspecified || b.unspecified) return "unspecified address";
  if (a.multicast || b.multicast) return "multicast address";
  if (a.link_local || b.link_local) return "link-local address";
  // Linux connects the two on one host; then shared memory is the path.
  if (a.loopback != b.loopback) return "loopback at one end only";
  return nullptr;
}

}  // namespace rsock::wire::codec
