// The next definition of a name behind ours, found without dlsym.
//
// Purpose: what dlsym(RTLD_NEXT) answers for a preloaded library, from any context. dlsym takes the
// loader's lock (a thread that another one's constructor waits for would never come back), throws
// away the program's pending dlerror() message, may allocate, and walks lists that a dlopen in the
// same thread, under the signal handler that calls us, has half built. This reads tables that were
// complete before the program's first instruction: the objects between ours and libc, which are
// never unloaded and which dlopen does not touch; it only appends. Thread safety: any thread,
// signal handlers, children of vfork; no lock, no allocation, no errno.
#pragma once

namespace rsock::preload {

/// The default version of `name` in the first object behind ours that has one; where we were not
/// preloaded but opened later, in the first object that is not ours. Null: neither libc nor anybody
/// in front of it defines the name.
void* next_symbol(const char* name) noexcept;

}  // namespace rsock::preload
