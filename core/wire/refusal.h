// Why something that came from a peer was refused.
//
// Purpose: decoders and validators of untrusted input return the value or a Refusal. Whoever
// decides what follows counts it and logs `reason` once. Thread safety: a plain value; `reason` is
// a literal.
#pragma once

#include <tl/expected.hpp>

#include "core/base/result.h"

namespace rsock::wire {

struct Refusal {
  Errno error{};
  const char* reason = "";
};

template <typename T>
using Checked = tl::expected<T, Refusal>;

/// The failing half of a Checked: `return refuse(EPROTO, "unknown magic");`
inline tl::unexpected<Refusal> refuse(int error, const char* reason) {
  return tl::unexpected<Refusal>(Refusal{Errno{error}, reason});
}
inline tl::unexpected<Refusal> refuse(Errno error, const char* reason) {
  return tl::unexpected<Refusal>(Refusal{error, reason});
}

}  // namespace rsock::wire
