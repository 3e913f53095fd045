// Which streams are worth a queue pair, or the memory of a ring: idle ones are set down, and of
// queue pairs the coldest makes room for a hotter one (D4).
//
// Devices serve some hundreds of queue pairs well and thousands badly, and each pins memory. So at
// most so many streams are on them at once (Device::max_streams()); who comes later waits on TCP
// and is compared. Keeper only, under its mutex.
#pragma once

#include "core/stream/stream.h"

namespace rsock::stream {

/// s would be lifted over RDMA, but one of the two ends has no queue pair left: it stays on TCP,
/// and is looked at again every second while it is busier than what is lifted.
void wait_for_room(Stream& s, uint32_t generation) noexcept;
/// Compares, sets down, tries again. Returns when it wants to be called next (monotonic ns), or
/// UINT64_MAX.
uint64_t run_heat_timer(uint64_t now) noexcept;
/// Sets down what is idle on shared memory. Returns as run_heat_timer().
uint64_t run_idle_timer(uint64_t now) noexcept;
/// In a forked child: the lists are the parent's.
void forget_heat() noexcept;

}  // namespace rsock::stream
