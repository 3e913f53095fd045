// For tests of calls with bad addresses: what preload/handlers.cc does for programs.
#pragma once

#include <signal.h>

#include "core/base/try_copy.h"

namespace rsock::test {

/// Copies of ours fail while it lives; any other fault ends the test.
class FaultsRecovered {
 public:
  FaultsRecovered() {
    struct sigaction action {};
    action.sa_sigaction = [](int signal_number, siginfo_t*, void* context) {
      if (!recover_copy(context)) ::signal(signal_number, SIG_DFL);
    };
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    ::sigaction(SIGSEGV, &action, &segv_);
    ::sigaction(SIGBUS, &action, &bus_);
  }
  ~FaultsRecovered() {
    ::sigaction(SIGSEGV, &segv_, nullptr);
    ::sigaction(SIGBUS, &bus_, nullptr);
  }
  FaultsRecovered(const FaultsRecovered&) = delete;
  FaultsRecovered& operator=(const FaultsRecovered&) = delete;

 private:
  struct sigaction segv_ {};
  struct sigaction bus_ {};
};

}  // namespace rsock::test
