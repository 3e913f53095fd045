#include "core/transport/verbs/descriptors.h"

#include "core/os/owned_fd.h"

namespace rsock::transport::verbs {

bool raise_fd(int& field) noexcept {
  auto raised = os::raise(field);
  field = raised ? raised->release() : -1;
  return field >= 0;
}

void abandon_fd(int& field) noexcept {
  os::OwnedFd(field).reset();
  field = -1;
}

}  // namespace rsock::transport::verbs
