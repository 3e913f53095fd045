// The program's signal handlers: see handlers.cc.
#pragma once

namespace rsock::preload {

/// Stands before every handler that the program has set so far. On the rungs of startup.def.
void adopt_handlers() noexcept;

void handlers_in_forked_child() noexcept;

}  // namespace rsock::preload
