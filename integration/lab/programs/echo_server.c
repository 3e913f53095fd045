/* A server that sends back what it gets, in the shapes that servers have.
 *
 *   echo_server fork|prefork|threads|reuseport address=A port=N [workers=N]
 *
 * fork: a child for each connection, after accept. prefork: workers that accept on one inherited socket. reuseport:
 * workers with a listening socket each. threads: one process, a thread for each connection. Prints `listening` when
 * all workers do, and `ended PORT: eof` or an errno for each connection, by the client's port. SIGTERM ends it with 0.
 */
#include <pthread.h>

#include "lab_net.h"

enum { kBuffer = 64 << 10, kMostWorkers = 16 };

static pid_t workers[kMostWorkers];
static int worker_count;

static int port_of_peer(int fd) {
  struct sockaddr_in6 name = {0};
  socklen_t size = sizeof(name);
  getpeername(fd, (struct sockaddr*)&name, &size);
  return ntohs(name.sin6_port); /* the port is at the same place in both families */
}

static void echo(int fd) {
  uint8_t* buffer = malloc(kBuffer);
  int one = 1, port = port_of_peer(fd);
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
  ssize_t got = 0, sent = 0;
  while (sent >= 0 && (got = recv(fd, buffer, kBuffer, 0)) > 0) {
    for (ssize_t done = 0; done < got && sent >= 0; done += sent) {
      sent = send(fd, buffer + done, (size_t)(got - done), MSG_NOSIGNAL);
    }
  }
  char end[64];
  snprintf(end, sizeof(end), "ended %d: %s", port, got == 0 ? "eof" : strerrorname_np(errno));
  announce(end);
  close(fd);
  free(buffer);
}

static void* echo_in_thread(void* fd) {
  echo((int)(intptr_t)fd);
  return NULL;
}

static int next_client(int listener) {
  for (;;) {
    int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
    if (fd >= 0) return fd;
    if (errno != EINTR && errno != ECONNABORTED) give_up("accept", fd);
  }
}

static _Noreturn void serve_in_threads(int listener) {
  for (;;) {
    pthread_t thread;
    pthread_attr_t small;
    pthread_attr_init(&small);
    pthread_attr_setstacksize(&small, 128 << 10);
    pthread_attr_setdetachstate(&small, PTHREAD_CREATE_DETACHED);
    int failed = pthread_create(&thread, &small, echo_in_thread, (void*)(intptr_t)next_client(listener));
    if (failed != 0) give_up("pthread_create", failed);
    pthread_attr_destroy(&small);
  }
}

static _Noreturn void serve_in_children(int listener) {
  signal(SIGCHLD, SIG_IGN);
  for (;;) {
    int fd = next_client(listener);
    pid_t child = fork();
    if (child < 0) give_up("fork", child);
    if (child == 0) {
      close(listener);
      echo(fd);
      exit(0);
    }
    close(fd);
  }
}

static void stop(int signal_number) {
  (void)signal_number;
  for (int i = 0; i < worker_count; ++i) kill(workers[i], SIGTERM);
  for (int i = 0; i < worker_count; ++i) waitpid(workers[i], NULL, 0);
  _exit(0);
}

int main(int argc, char** argv) {
  const char* mode = argc > 1 ? argv[1] : "";
  const char* address = text_of(argc, argv, "address");
  int port = (int)number_of(argc, argv, "port", 0), count = (int)number_of(argc, argv, "workers", 4);
  if (address == NULL || port == 0 || count < 1 || count > kMostWorkers) give_up("usage", 0);
  bool reuse = strcmp(mode, "reuseport") == 0;
  sigaction(SIGTERM, &(struct sigaction){.sa_handler = stop}, NULL);
  int listener = reuse ? -1 : listen_at(address, port, false), ready[2];
  if (!reuse && strcmp(mode, "prefork") != 0) {
    announce("listening");
    if (strcmp(mode, "fork") == 0) serve_in_children(listener);
    serve_in_threads(listener);
  }
  if (pipe(ready) != 0) give_up("pipe", -1);
  for (int i = 0; i < count; ++i) {
    pid_t child = fork();
    if (child == 0) {
      worker_count = 0;
      if (reuse) listener = listen_at(address, port, true);
      if (write(ready[1], "r", 1) != 1) give_up("write", -1);
      serve_in_threads(listener);
    }
    workers[worker_count++] = child;
  }
  char byte;
  for (int i = 0; i < count; ++i) {
    if (read(ready[0], &byte, 1) != 1) give_up("a worker", -1);
  }
  announce("listening");
  for (;;) pause();
}
