// The entries of sockets, data, messages and waiting, over a core that only remembers.
//
// The entries are linked into this program, so that every call below is an intercepted one.
#include <aio.h>
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/select.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "core/base/inside.h"
#include "tests/base/faults.h"
#include "tests/preload/fake_core.h"

namespace rsock {
namespace {

using fake::behaviour;
using fake::calls;
using stream::FdKind;
using stream::FdTable;
using testing::ElementsAre;
using testing::IsEmpty;

/// A connected pair, the first of which the library takes for a stream.
class Entries : public testing::Test {
 protected:
  void SetUp() override {
    fake::reset();
    ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, ends_), 0);
    FdTable::set(ends_[0], FdKind::kStream, fake::fake_stream());
  }
  void TearDown() override {
    fake::reset();
    ::close(ends_[0]);
    ::close(ends_[1]);
  }
  int ours() const { return ends_[0]; }
  int other() const { return ends_[1]; }
  std::string with_fd(const char* call, const char* rest) const {
    return fake::line("%s %d%s", call, ours(), rest);
  }

  int ends_[2];
};

TEST_F(Entries, ADescriptorThatIsNotOursNeverReachesTheCore) {
  char c = 'x';
  EXPECT_EQ(::write(other(), &c, 1), 1);
  EXPECT_EQ(::send(other(), &c, 1, 0), 1);
  int n = 0;
  EXPECT_EQ(::ioctl(other(), FIONREAD, &n), 0);
  EXPECT_EQ(::fcntl(other(), F_GETFD), 0);
  EXPECT_THAT(calls(), IsEmpty());
}

TEST_F(Entries, EveryReadingCallReachesRecv) {
  behaviour().recv = [](const iovec* iov, size_t n, int) -> long {
    for (size_t i = 0; i < n; ++i) memset(iov[i].iov_base, 'r', iov[i].iov_len);
    return 4;
  };
  char buf[8] = "";
  iovec iov[2] = {{buf, 2}, {buf + 2, 2}};
  EXPECT_EQ(::read(ours(), buf, 4), 4);
  EXPECT_EQ(::readv(ours(), iov, 2), 4);
  EXPECT_EQ(::recv(ours(), buf, 4, MSG_PEEK), 4);
  EXPECT_EQ(::recvfrom(ours(), buf, 4, MSG_WAITALL, nullptr, nullptr), 4);
  EXPECT_EQ(::preadv2(ours(), iov, 2, -1, RWF_NOWAIT), 4);
  EXPECT_EQ(::syscall(SYS_read, ours(), buf, 4L), 4);
  EXPECT_STREQ(buf, "rrrr");
  EXPECT_THAT(calls(), ElementsAre(with_fd("recv", " 1 0"), with_fd("recv", " 2 0"),
                                   with_fd("recv", " 1 2"), with_fd("recv", " 1 256"),
                                   with_fd("recv", " 2 64"), with_fd("recv", " 1 0")));
}

TEST_F(Entries, EveryWritingCallReachesSend) {
  behaviour().send = [](const iovec* iov, size_t n, int) -> long { return 4; };
  char buf[8] = "abcd";
  iovec iov[2] = {{buf, 2}, {buf + 2, 2}};
  sockaddr_in address{};
  EXPECT_EQ(::write(ours(), buf, 4), 4);
  EXPECT_EQ(::writev(ours(), iov, 2), 4);
  EXPECT_EQ(::send(ours(), buf, 4, MSG_MORE), 4);
  // Linux does not look at the address on a connected TCP socket.
  EXPECT_EQ(::sendto(ours(), buf, 4, 0, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 4);
  EXPECT_EQ(::pwritev2(ours(), iov, 2, -1, 0), 4);
  EXPECT_EQ(::syscall(SYS_sendto, ours(), buf, 4L, 0L, 0L, 0L), 4);
  EXPECT_THAT(calls(), ElementsAre(with_fd("send", " 1 0"), with_fd("send", " 2 0"),
                                   with_fd("send", " 1 32768"), with_fd("send", " 1 0"),
                                   with_fd("send", " 2 0"), with_fd("send", " 1 0")));
}

TEST_F(Entries, ANegativeResultBecomesMinusOneAndErrno) {
  behaviour().recv = [](const iovec*, size_t, int) -> long { return -ECONNRESET; };
  char c;
  errno = 0;
  EXPECT_EQ(::read(ours(), &c, 1), -1);
  EXPECT_EQ(errno, ECONNRESET);
}

TEST_F(Entries, ArgumentsThatTheKernelRefusesAreRefusedByTheKernel) {
  char c = 0;
  iovec iov{&c, 1};
  iovec endless[2] = {{&c, SSIZE_MAX}, {&c, 1}};
  const volatile int negative = -1;
  EXPECT_EQ(::readv(ours(), &iov, negative), -1);
  EXPECT_EQ(errno, EINVAL);
  EXPECT_EQ(::writev(ours(), endless, 2), -1);
  EXPECT_EQ(::preadv2(ours(), &iov, 1, 0, 0), -1);
  EXPECT_EQ(errno, ESPIPE);
  msghdr msg{};
  msg.msg_iov = &iov;
  msg.msg_iovlen = 1025;
  EXPECT_EQ(::sendmsg(ours(), &msg, 0), -1);
  EXPECT_EQ(errno, EMSGSIZE);
  EXPECT_THAT(calls(), IsEmpty());
}

TEST_F(Entries, FlagsThatOnlyTheKernelKnowsKeepTheStreamOnTcp) {
  char c = 'x';
  iovec iov{&c, 1};
  EXPECT_EQ(::pwritev2(ours(), &iov, 1, -1, RWF_DSYNC), 1);
  // As a send: what the stream still owes on TCP comes first.
  EXPECT_THAT(calls(), ElementsAre(with_fd("pin_to_tcp", " preadv2 or pwritev2 with flags"),
                                   with_fd("send", " 1 0")));
}

TEST_F(Entries, WhatTheStreamStillHasComesBeforeTheKernelsCall) {
  behaviour().pins = false;
  behaviour().send = [](const iovec*, size_t, int) -> long { return -EAGAIN; };
  behaviour().recv = [](const iovec*, size_t, int) -> long { return 1; };
  char c = 'x';
  iovec iov{&c, 1};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = "";
  const msghdr msg{nullptr, 0, &iov, 1, control, sizeof(control), 0};
  EXPECT_EQ(::pwritev2(ours(), &iov, 1, -1, RWF_DSYNC), -1);
  EXPECT_EQ(errno, EAGAIN);
  EXPECT_EQ(::preadv2(ours(), &iov, 1, -1, RWF_HIPRI), 1);
  errno = 0;
  EXPECT_EQ(::sendmsg(ours(), &msg, 0), -1);
  EXPECT_EQ(errno, EAGAIN);
}

/// stdio and aio would write past us, in front of what is still to come.
TEST_F(Entries, LibcGetsNoStreamThatStillHasToSend) {
  behaviour().pins = false;
  errno = 0;
  EXPECT_EQ(::fdopen(ours(), "r+"), nullptr);
  EXPECT_EQ(errno, EAGAIN);
  errno = 0;
  EXPECT_EQ(::dprintf(ours(), "x"), -1);
  EXPECT_EQ(errno, EAGAIN);
  aiocb request{};
  request.aio_fildes = ours();
  errno = 0;
  EXPECT_EQ(::aio_write(&request), -1);
  EXPECT_EQ(errno, EAGAIN);
  request.aio_lio_opcode = LIO_WRITE;
  aiocb* const list[] = {&request};
  EXPECT_EQ(::lio_listio(LIO_WAIT, list, 1, nullptr), -1);
  EXPECT_EQ(errno, EAGAIN);
}

TEST_F(Entries, ReceivingTellsNoAddressAsTcpDoes) {
  behaviour().recv = [](const iovec*, size_t, int) -> long { return 1; };
  char c;
  sockaddr_storage address;
  socklen_t len = sizeof(address);
  EXPECT_EQ(::recvfrom(ours(), &c, 1, 0, reinterpret_cast<sockaddr*>(&address), &len), 1);
  EXPECT_EQ(len, 0u);

  iovec iov{&c, 1};
  char control[64];
  msghdr msg{&address, sizeof(address), &iov, 1, control, sizeof(control), 77};
  EXPECT_EQ(::recvmsg(ours(), &msg, MSG_CMSG_CLOEXEC), 1);
  EXPECT_EQ(msg.msg_namelen, 0u);
  EXPECT_EQ(msg.msg_controllen, 0u);
  EXPECT_EQ(msg.msg_flags, MSG_CMSG_CLOEXEC);
}

TEST_F(Entries, WhatTheKernelWroteIntoTheHeaderStays) {
  ASSERT_EQ(::write(other(), "x", 1), 1);
  int on = 1;
  ASSERT_EQ(::setsockopt(ours(), SOL_SOCKET, SO_PASSCRED, &on, sizeof(on)), 0);
  char c;
  iovec iov{&c, 1};
  char control[64];
  msghdr msg{nullptr, 0, &iov, 1, control, sizeof(control), 0};
  EXPECT_EQ(::recvmsg(ours(), &msg, 0), 1);
  EXPECT_GT(msg.msg_controllen, 0u);
}

TEST_F(Entries, TheErrorQueueIsTheKernels) {
  char c;
  iovec iov{&c, 1};
  msghdr msg{};
  msg.msg_iov = &iov;
  msg.msg_iovlen = 1;
  EXPECT_EQ(::recvmsg(ours(), &msg, MSG_ERRQUEUE | MSG_DONTWAIT), -1);
  EXPECT_THAT(calls(), IsEmpty());
}

struct Messages {
  explicit Messages(int n) : count(n) {
    for (int i = 0; i < n; ++i) {
      iov[i] = {bytes + 4 * i, 4};
      list[i] = {};
      list[i].msg_hdr.msg_iov = &iov[i];
      list[i].msg_hdr.msg_iovlen = 1;
    }
  }
  int count;
  char bytes[64];
  iovec iov[16];
  mmsghdr list[16];
};

TEST_F(Entries, RecvmmsgWaitsForOneOnlyWhereToldSo) {
  int left = 2;
  behaviour().recv = [&](const iovec*, size_t, int) -> long { return left-- > 0 ? 3 : -EAGAIN; };
  Messages m(4);
  EXPECT_EQ(::recvmmsg(ours(), m.list, 4, MSG_WAITFORONE, nullptr), 2);
  EXPECT_EQ(m.list[1].msg_len, 3u);
  EXPECT_THAT(calls(), ElementsAre(with_fd("recv", " 1 0"), with_fd("recv", " 1 64"),
                                   with_fd("recv", " 1 64")));
}

TEST_F(Entries, RecvmmsgLooksAtItsLimitAfterEachMessage) {
  behaviour().recv = [](const iovec*, size_t, int) -> long { return 1; };
  Messages m(4);
  timespec none{0, 0};
  EXPECT_EQ(::recvmmsg(ours(), m.list, 4, 0, &none), 1);
  timespec plenty{100, 0};
  EXPECT_EQ(::recvmmsg(ours(), m.list, 4, 0, &plenty), 4);
  EXPECT_LT(plenty.tv_sec, 100);
  EXPECT_GE(plenty.tv_sec, 90);
  timespec bad{0, 1'000'000'000};
  EXPECT_EQ(::recvmmsg(ours(), m.list, 4, 0, &bad), -1);
  EXPECT_EQ(errno, EINVAL);
}

TEST_F(Entries, RecvmmsgAnswersAnErrorOnlyBeforeTheFirstMessage) {
  behaviour().recv = [](const iovec*, size_t, int) -> long { return -EAGAIN; };
  Messages m(2);
  EXPECT_EQ(::recvmmsg(ours(), m.list, 2, 0, nullptr), -1);
  EXPECT_EQ(errno, EAGAIN);
}

TEST_F(Entries, SendmmsgStopsAfterAMessageThatWentInPart) {
  int sent = 0;
  behaviour().send = [&](const iovec*, size_t, int) -> long { return ++sent == 2 ? 1 : 4; };
  Messages m(4);
  EXPECT_EQ(::sendmmsg(ours(), m.list, 4, 0), 2);
  EXPECT_EQ(m.list[0].msg_len, 4u);
  EXPECT_EQ(m.list[1].msg_len, 1u);
}

TEST_F(Entries, ControlDataKeepsTheStreamOnTcp) {
  char c = 'x';
  iovec iov{&c, 1};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = "";
  msghdr msg{nullptr, 0, &iov, 1, control, sizeof(control), 0};
  cmsghdr* cmsg = CMSG_FIRSTHDR(&msg);
  *cmsg = {};
  cmsg->cmsg_level = SOL_SOCKET;
  cmsg->cmsg_type = SCM_RIGHTS;
  cmsg->cmsg_len = CMSG_LEN(sizeof(int));
  const int fd = other();
  memcpy(CMSG_DATA(cmsg), &fd, sizeof(fd));
  EXPECT_EQ(::sendmsg(ours(), &msg, 0), 1);
  EXPECT_THAT(calls(), ElementsAre(with_fd("pin_to_tcp", " sendmsg with control data"),
                                   with_fd("send", " 1 0")));

  fake::reset();  // now nobody's stream
  EXPECT_EQ(::sendmsg(ours(), &msg, 0), 1);
  EXPECT_THAT(calls(), IsEmpty());
  behaviour().may_matter = true;
  EXPECT_EQ(::sendmsg(ours(), &msg, 0), 1);
  EXPECT_THAT(calls(), ElementsAre("before_passing", "after_passing 5 1"));
}

TEST_F(Entries, ABadHeaderPointerIsForTheKernelToFind) {
  const test::FaultsRecovered faults;  // where there are streams the entries' own handler stands
  behaviour().may_matter = true;
  EXPECT_EQ(::sendmsg(other(), nullptr, 0), -1);
  EXPECT_EQ(errno, EFAULT);
}

TEST(Sockets, OnlyWhatMayBeTcpIsNoted) {
  fake::reset();
  const int tcp = ::socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  const int tcp6 = ::socket(AF_INET6, SOCK_STREAM, 0);
  const int udp = ::socket(AF_INET, SOCK_DGRAM, 0);
  const int local = ::socket(AF_UNIX, SOCK_STREAM, 0);
  EXPECT_EQ(calls().size(), tcp6 >= 0 ? 2u : 1u);
  fake::reset();
  {
    const InsideLibrary guard;
    ::close(::socket(AF_INET, SOCK_STREAM, 0));
  }
  EXPECT_THAT(calls(), IsEmpty());
  for (int fd : {tcp, tcp6, udp, local}) ::close(fd);
}

TEST(Sockets, ConnectAndAcceptReportWhatTheKernelSaid) {
  fake::reset();
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t len = sizeof(address);
  auto* addr = reinterpret_cast<sockaddr*>(&address);
  const int listener = ::socket(AF_INET, SOCK_STREAM, 0);
  ASSERT_EQ(::bind(listener, addr, len), 0);
  ASSERT_EQ(::getsockname(listener, addr, &len), 0);
  const int client = ::socket(AF_INET, SOCK_STREAM, 0);
  EXPECT_EQ(::connect(client, addr, len), -1);  // nobody listens yet
  EXPECT_EQ(errno, ECONNREFUSED);
  ASSERT_EQ(::listen(listener, 1), 0);
  const int fast = ::socket(AF_INET, SOCK_STREAM, 0);
  const long sent = ::sendto(fast, "hi", 2, MSG_FASTOPEN, addr, len);
  EXPECT_GE(sent, 0);
  const int served = ::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
  EXPECT_GE(served, 0);
  EXPECT_THAT(
      calls(),
      ElementsAre("on_socket", "on_socket", fake::line("on_connect %d %d", client, -ECONNREFUSED),
                  "on_socket", fake::line("on_connect %d %ld", fast, sent),
                  fake::line("on_accept %d %d %d", listener, served, SOCK_CLOEXEC)));
  fake::reset();
  for (int fd : {listener, client, fast, served}) ::close(fd);
}

TEST_F(Entries, OptionsAndShutdownReachTheCore) {
  int value = 1;
  socklen_t len = sizeof(value);
  EXPECT_EQ(::setsockopt(ours(), SOL_SOCKET, SO_KEEPALIVE, &value, len), 0);
  EXPECT_EQ(::getsockopt(ours(), SOL_SOCKET, SO_KEEPALIVE, &value, &len), 0);
  EXPECT_EQ(::ioctl(ours(), FIONREAD, &value), 0);
  EXPECT_EQ(::shutdown(ours(), SHUT_WR), 0);
  EXPECT_THAT(calls(), ElementsAre(with_fd("setsockopt", " 9"), with_fd("getsockopt", " 9"),
                                   with_fd("ioctl", " 21531"), with_fd("shutdown", " 1")));
}

// --- waiting ---------------------------------------------------------------------------------

TEST_F(Entries, WaitsReachTheCoreOnlyWhileAStreamExists) {
  pollfd p{other(), POLLOUT, 0};
  EXPECT_EQ(::poll(&p, 1, 0), 1);
  EXPECT_THAT(calls(), IsEmpty());
  behaviour().may_matter = true;
  const timespec soon{0, 5};
  sigset_t mask;
  sigemptyset(&mask);
  EXPECT_EQ(::poll(&p, 1, 7), 1);
  EXPECT_EQ(::poll(&p, 1, -1), 1);
  EXPECT_EQ(::ppoll(&p, 1, &soon, &mask), 1);
  EXPECT_EQ(::syscall(SYS_ppoll, &p, 1L, &soon, &mask, 8L), 1);
  EXPECT_THAT(calls(), ElementsAre("poll 1 7000000 0", "poll 1 -1 0", "poll 1 5 1", "poll 1 5 1"));
  const timespec bad{0, -1};
  EXPECT_EQ(::ppoll(&p, 1, &bad, nullptr), -1);
  EXPECT_EQ(errno, EINVAL);
}

TEST_F(Entries, SelectTellsWhatIsLeftOfItsLimit) {
  behaviour().may_matter = true;
  behaviour().wait = [] { return 0L; };
  timeval limit{3, 2'500'000};  // more than a second's worth of microseconds, as select allows
  EXPECT_EQ(::select(0, nullptr, nullptr, nullptr, &limit), 0);
  EXPECT_EQ(limit.tv_sec, 1);
  EXPECT_EQ(limit.tv_usec, 2);
  behaviour().wait = nullptr;  // the kernel waits and tells
  limit = {0, 1000};
  EXPECT_EQ(::select(0, nullptr, nullptr, nullptr, &limit), 0);
  EXPECT_EQ(limit.tv_usec, 0);
  EXPECT_THAT(calls(), ElementsAre("select 0 5 0", "select 0 0 0"));
}

TEST_F(Entries, EpollInstancesAreNotedAndThoseFromElsewhereKeepTheStreamOnTcp) {
  const int ep = ::epoll_create1(EPOLL_CLOEXEC);
  epoll_event event{EPOLLIN, {}};
  EXPECT_EQ(::epoll_ctl(ep, EPOLL_CTL_ADD, ours(), &event), 0);
  EXPECT_THAT(calls(),
              ElementsAre("on_epoll_create",
                          with_fd("pin_to_tcp", " watched by an epoll instance from elsewhere")));
  FdTable::set(ep, FdKind::kEpoll, fake::fake_stream());
  EXPECT_EQ(::epoll_ctl(ep, EPOLL_CTL_DEL, ours(), nullptr), 0);
  behaviour().may_matter = true;
  EXPECT_EQ(::epoll_wait(ep, &event, 1, 0), 0);
  EXPECT_EQ(::epoll_pwait(ep, &event, 1, 0, nullptr), 0);
  const timespec none{0, 0};
  EXPECT_EQ(::epoll_pwait2(ep, &event, 1, &none, nullptr), 0);
  EXPECT_EQ(calls().size(), 6u);
  FdTable::clear(ep);
  ::close(ep);
}

TEST_F(Entries, SyscallHandsOnWhatIsNotOurs) {
  EXPECT_EQ(::syscall(SYS_getpid), ::getpid());
  EXPECT_EQ(::syscall(SYS_close, -1), -1);
  EXPECT_EQ(errno, EBADF);
  const int copy = static_cast<int>(::syscall(SYS_dup, ours()));
  EXPECT_EQ(::syscall(SYS_close, copy), 0);
  EXPECT_THAT(calls(), ElementsAre(fake::line("on_dup %d %d", ours(), copy),
                                   fake::line("before_close %d", copy)));
}

}  // namespace
}  // namespace rsock
