#include "core/transport/transport.h"

#include <poll.h>

#include "core/os/os.h"

namespace rsock::transport {

bool Channel::peer_let_go() noexcept { return os::poll_now(wait_fd(), POLLRDHUP) != 0; }

}  // namespace rsock::transport
