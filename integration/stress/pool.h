// Epoll instances that several threads wait on for many ends at a time.
#pragma once

#include <memory>

#include "end.h"

namespace stress {

/// Starts the pools of this process and their threads.
void start_pools();
/// Serves an end by a random pool, and returns when it is over.
void serve_by_pool(const std::shared_ptr<End>& end, Random& random);

}  // namespace stress
