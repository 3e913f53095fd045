// The program's signal handlers: see handlers.cc.
#pragma once

namespace rsock::preload {

/// Stands before every handler that the program has set so far. On the rungs of startup.def.
void adopt_handlers() noexcept;

void handlers_in_forked_child() noexcept;

/// Signals that the program ignores are so in the new one; a handler in their place would be none.
void handlers_before_exec() noexcept;

}  // namespace rsock::preload
