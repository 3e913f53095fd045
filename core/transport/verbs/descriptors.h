// Descriptors that rdma-core opens, made internal: above the program's numbers, CLOEXEC, out of its
// close loops.
//
// rdma-core keeps each in a plain field of a public struct (rdma_event_channel::fd,
// ibv_context::cmd_fd and async_fd, ibv_comp_channel::fd) and reads it at every use, so the field
// may be given a higher number. Its own close() of it comes back through the interposer, which lets
// an InsideLibrary close internal numbers. Thread safety: the keeper's thread; the opening call and
// raise_fd() under one os::MakingInternal.
#pragma once

namespace rsock::transport::verbs {

/// Moves the descriptor up and notes it as internal. False: no number left; the old one is closed
/// and the field is -1.
bool raise_fd(int& field) noexcept;
/// Closes this process's copy and leaves -1: a forked child's.
void abandon_fd(int& field) noexcept;

}  // namespace rsock::transport::verbs
