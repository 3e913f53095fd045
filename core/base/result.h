// Result<T>: a value or the errno that explains its absence.
//
// errno itself is read only where a foreign call returns (core/os, transport/verbs) and set only in
// preload/entry.h; everything between carries it as a value. Thread safety: a plain value.
#pragma once

#include <cerrno>
#include <tl/expected.hpp>

namespace rsock {

/// An errno value, always > 0. Strong, so that a byte count is never taken for an error.
enum class Errno : int {};

constexpr int value(Errno e) { return static_cast<int>(e); }
constexpr bool operator==(Errno a, int b) { return static_cast<int>(a) == b; }

template <typename T>
using Result = tl::expected<T, Errno>;

/// The failing half of a Result: `return fail(EAGAIN);`
inline tl::unexpected<Errno> fail(int error) { return tl::unexpected<Errno>(Errno{error}); }
inline tl::unexpected<Errno> fail(Errno error) { return tl::unexpected<Errno>(error); }

}  // namespace rsock
