/* What the lab's programs share: addresses, KEY=VALUE arguments, bytes that both ends know.
 *
 * They are ordinary programs: they know nothing of the shim, and run with and without it. Byte i of a flow is a fixed
 * function of i and of the flow's number, so that a loss, a doubling or a mix-up is named by its offset.
 */
#pragma once

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { kFlowDistance = 7919 };

static inline __attribute__((noreturn)) void give_up(const char* what, long seen) {
  printf("FAILED %s: %ld %s\n", what, seen, seen < 0 ? strerrorname_np(errno) : "");
  fflush(stdout);
  _exit(99);
}

static inline void announce(const char* text) { /* at once: a killed process loses nothing */
  printf("%s\n", text);
  fflush(stdout);
}

/* The number behind `key=` among the arguments. */
static inline long number_of(int argc, char** argv, const char* key, long otherwise) {
  size_t n = strlen(key);
  for (int i = 1; i < argc; ++i) {
    if (strncmp(argv[i], key, n) == 0 && argv[i][n] == '=') return atol(argv[i] + n + 1);
  }
  return otherwise;
}

static inline const char* text_of(int argc, char** argv, const char* key) {
  size_t n = strlen(key);
  for (int i = 1; i < argc; ++i) {
    if (strncmp(argv[i], key, n) == 0 && argv[i][n] == '=') return argv[i] + n + 1;
  }
  return NULL;
}

static inline socklen_t address_of(const char* text, int port, struct sockaddr_storage* out) {
  memset(out, 0, sizeof(*out));
  struct sockaddr_in* v4 = (struct sockaddr_in*)out;
  struct sockaddr_in6* v6 = (struct sockaddr_in6*)out;
  if (inet_pton(AF_INET, text, &v4->sin_addr) == 1) {
    v4->sin_family = AF_INET;
    v4->sin_port = htons((uint16_t)port);
    return sizeof(*v4);
  }
  if (inet_pton(AF_INET6, text, &v6->sin6_addr) != 1) give_up("address", 0);
  v6->sin6_family = AF_INET6;
  v6->sin6_port = htons((uint16_t)port);
  return sizeof(*v6);
}

static inline int listen_at(const char* address, int port, bool reuse_port) {
  struct sockaddr_storage name;
  socklen_t size = address_of(address, port, &name);
  int one = 1, fd = socket(name.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
  if (reuse_port) setsockopt(fd, SOL_SOCKET, SO_REUSEPORT, &one, sizeof(one));
  if (bind(fd, (struct sockaddr*)&name, size) != 0) give_up("bind", -1);
  if (listen(fd, 512) != 0) give_up("listen", -1);
  return fd;
}

/* -1 and errno when nobody answers. */
static inline int connect_to(const char* address, int port) {
  struct sockaddr_storage name;
  socklen_t size = address_of(address, port, &name);
  int one = 1, fd = socket(name.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (connect(fd, (struct sockaddr*)&name, size) != 0) {
    int why = errno;
    close(fd);
    errno = why;
    return -1;
  }
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
  return fd;
}

static inline uint8_t known_at(uint64_t offset) {
  uint64_t z = (offset / 8 + 1) * 0x9e3779b97f4a7c15ull;
  return (uint8_t)((z ^ (z >> 29)) >> (8 * (offset % 8)));
}

static inline void fill_known(uint8_t* to, size_t size, uint64_t offset) {
  for (size_t i = 0; i < size; ++i) to[i] = known_at(offset + i);
}

/* The first place that differs, or `size`. */
static inline size_t differs_at(const uint8_t* from, size_t size, uint64_t offset) {
  for (size_t i = 0; i < size; ++i) {
    if (from[i] != known_at(offset + i)) return i;
  }
  return size;
}

static inline void pause_ms(long ms) {
  struct timespec t = {ms / 1000, ms % 1000 * 1000000};
  if (ms > 0) nanosleep(&t, NULL);
}

static inline long now_ms(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000 + t.tv_nsec / 1000000;
}
