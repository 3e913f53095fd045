// No pthread_cancel while it lives.
//
// The doorbells of software devices are write(2) (post_send_db() in rdma-core's
// providers/rxe/rxe.c), which libc makes a cancellation point. A program's thread comes there with
// locks of ours, in functions that must not be left.
#pragma once

#include <pthread.h>

namespace rsock::transport::verbs {

class CancelOff {
 public:
  CancelOff() noexcept { pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &before_); }
  ~CancelOff() { pthread_setcancelstate(before_, nullptr); }
  CancelOff(const CancelOff&) = delete;
  CancelOff& operator=(const CancelOff&) = delete;

 private:
  int before_ = PTHREAD_CANCEL_ENABLE;
};

}  // namespace rsock::transport::verbs
