// What happens to streams beside their own threads: descriptors are copied and passed on, options
// set, children forked and spawned, signals sent, epoll entries changed by others.
#pragma once

namespace stress {

void start_movers(bool server);

}  // namespace stress
