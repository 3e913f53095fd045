/* Two processes, one TCP stream between them, and a control channel beside it.
 *
 * Purpose: every program of integration/semantics shows one symptom.  A driver starts the program
 * twice, as `PROGRAM server VARIANT` and `PROGRAM client VARIANT`, each with or without the shim,
 * and compares what the two print with what they print over plain TCP.
 *
 * Ownership: the driver creates a SOCK_SEQPACKET Unix socket pair and names each end in
 * PAIR_CONTROL_FD.  The control channel is no TCP socket, so the shim leaves it alone; the roles
 * use it to take turns without putting a byte into the stream under test.
 *
 * The listening port is the kernel's choice, or PAIR_PORT where a driver has to know it beforehand; the address
 * is loopback's, or PAIR_HOST (PAIR_HOST6), where the path is on a device. With both, roles on two hosts need no control
 * channel (hash_pair only). PAIR_LIFT_MS: both ends have the shim, and a lift may take so long.
 *
 * Output, one line each, written at once so that a killed process loses nothing:
 *   label: value          compared byte for byte
 *   ~ label VALUE SLACK   measured; may exceed the value over TCP by SLACK, no more
 *   FAILED ...            the program could not do its own work; never right, not even over TCP
 *
 * Thread safety: say(), show() and measure() may be called by any thread; the rest by one at a
 * time.
 */
#pragma once

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

enum { kWarmUpRounds = 64, kAfterLiftRounds = 16, kWarmUpBytes = 1024, kSettleMs = 100 };

struct Pair {
  const char* variant; /* the name in the program's table */
  int control;
  pid_t peer;   /* process id of the other role */
  int listener; /* server only, else -1 */
  int stream;   /* -1 before open_stream() */
  struct sockaddr_in6 address;
  socklen_t address_size;
};

/* A row of a program's table.  `lifts` is false where no stream of the case sees enough traffic;
 * `execs` is true where a role replaces itself by exec, so that nobody may be left to write a
 * summary. */
struct PairCase {
  const char* variant;
  void (*server)(struct Pair*);
  void (*client)(struct Pair*);
  bool lifts;
  bool execs;
  bool alone; /* both ends are in one process: it lifts though nobody else is preloaded */
};

int pair_main(int argc, char** argv, const struct PairCase* cases, size_t count);
#define PAIR_MAIN(cases)                                                   \
  int main(int argc, char** argv) {                                        \
    return pair_main(argc, argv, (cases), sizeof(cases) / sizeof(*cases)); \
  }

/* Output. */
void say(const char* format, ...) __attribute__((format(printf, 1, 2)));
void show(const char* label, long result); /* the number, or -1 and the name of errno */
void show_events(const char* label, short revents);
void show_epoll(const char* label, uint32_t events);
void measure(const char* label, double value, double slack);
_Noreturn void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));
long checked(long result, const char* what, int line);
#define CHECKED(call) checked((long)(call), #call, __LINE__)

/* Turns.  A turn that the dead cannot take any more is a failure of the program. */
void tell(struct Pair*);
void await(struct Pair*);

/* The stream.  Both roles call these together. */
int listen_on_loopback(struct Pair*, int family, int backlog); /* server; PAIR_HOST overrides */
void learn_address(struct Pair*); /* client, after listen_on_loopback */
int connect_to_server(struct Pair*);
void open_stream(struct Pair*);      /* connected and warm: lifted where that is possible */
void open_cold_stream(struct Pair*); /* connected only */
void warm_up_as_client(int fd);
void warm_up_as_server(int fd);
/* One end sends until its bytes go another way than TCP, where a lift is due; else a block. The other
 * end takes them, or (in the middle of the warm-up) sends them back. */
void send_until_lifted(int fd);
void ping_until_lifted(int fd);
void receive_until_lifted(int fd);
void pong_until_lifted(int fd);
/* What TCP has carried so far, and, printed, whether it has stood still since. Where no lift is due that is
 * "yes" as well: everything is where it belongs. */
uint64_t tcp_carried(int fd);
void show_lifted(const char* label, int fd, uint64_t carried);
/* In a program that a role has become by exec: as pair_main does for the roles. */
void learn_lift_limit(void);
/* How long a lift may take; 0: none is due. */
int lift_limit_ms(void);
/* Between rounds of a traffic that both roles make: whether another is due, because one of them still uses TCP. */
bool not_lifted_yet(struct Pair*);

/* Data: byte i of every transfer is a fixed function of i, so that any loss is named by offset. */
uint8_t pattern_at(uint64_t offset);
void fill_pattern(void* to, size_t size, uint64_t offset);
bool pattern_holds(const void* from, size_t size, uint64_t offset);
void send_pattern(int fd, size_t size, uint64_t offset);
void receive_pattern(int fd, size_t size, uint64_t offset);
void drain(const char* label, int fd); /* to EOF or error; prints count, integrity and the end */
void fill_until_full(int fd);          /* non-blocking sends until EAGAIN */
void ping_as_client(int fd, int rounds);
void pong_as_server(int fd, int rounds);
/* The peer of somebody who echoes and has read 1,000 bytes: 20,000 come before its turn, the rest behind it, from a
 * thread, and all of it back. */
void be_echoed(struct Pair*);
void* echo_in_thread(void* fd); /* a thread's body: until the end, then closes it */

/* One descriptor in a message of a Unix socket (SCM_RIGHTS); what comes has FD_CLOEXEC. */
void send_fd(int channel, int fd);
int receive_fd(int channel);

/* Time and threads. */
int64_t now_ns(void);
double ms_since(int64_t start_ns);
void sleep_ms(int ms);
/* Long enough for a small send to arrive: Nagle may hold it until the peer's delayed acknowledgement,
 * 40 ms (TCP_DELACK_MIN), and busy machines are slower still. */
void settle(void);
void start_thread(pthread_t* thread, void* (*body)(void*), void* argument);
void join_thread(pthread_t thread);
void wait_until_asleep(
    pid_t thread_id); /* of this process: it has reached its wait in the kernel */

/* Signals. */
extern volatile sig_atomic_t signals_seen;
void count_signal(int signal_number, int flags); /* a handler that counts */
