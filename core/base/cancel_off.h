// No pthread_cancel while it lives: around calls that are cancellation points to libc, and must not
// be one where they stand.
// Thread safety: for the thread that makes it.
#pragma once

#include <pthread.h>

namespace rsock {

class CancelOff {
 public:
  CancelOff() noexcept { pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &before_); }
  ~CancelOff() { pthread_setcancelstate(before_, nullptr); }
  CancelOff(const CancelOff&) = delete;
  CancelOff& operator=(const CancelOff&) = delete;

 private:
  int before_ = PTHREAD_CANCEL_ENABLE;
};

}  // namespace rsock
