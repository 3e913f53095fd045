/* vfork, clone, exec, threads that fork, pthread_cancel, descriptors at their limits: prints what
 * happened. Plain Linux is the judge: under the interposer it must print the same. An argument leaves
 * pthread_cancel out: AddressSanitizer takes the unwinding of its own frames for an overflow (its hint
 * says so). */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/close_range.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

static int client, served;

static int status_of(pid_t pid) {
  int status = -1;
  if (pid < 0 || waitpid(pid, &status, 0) != pid) return -1;
  return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}

static void connect_pair(void) {
  struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  socklen_t len = sizeof(address);
  int listener = socket(AF_INET, SOCK_STREAM, 0);
  bind(listener, (struct sockaddr*)&address, len);
  listen(listener, 5);
  getsockname(listener, (struct sockaddr*)&address, &len);
  client = socket(AF_INET, SOCK_STREAM, 0);
  int r = connect(client, (struct sockaddr*)&address, len);
  served = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
  printf("connect %d accept %d\n", r, served >= 0);
  close(listener);
}

static void echo(const char* label) {
  char buf[64] = "";
  ssize_t out = write(client, label, strlen(label));
  ssize_t in = recv(served, buf, sizeof(buf) - 1, 0);
  printf("echo %s %zd %zd %s\n", label, out, in, buf);
}

static void use_vfork(void) {
  for (int i = 0; i < 3; i++) {
    pid_t pid = vfork();
    if (pid == 0) {
      close(served);
      dup2(client, 1);
      execl("/bin/sh", "sh", "-c", i == 1 ? "exit 7" : "printf hello", NULL);
      _exit(127);
    }
    printf("vfork %d\n", status_of(pid));
    if (i != 1) {
      char buf[8] = "";
      printf("from the child %zd %s\n", read(served, buf, 5), buf);
    }
  }
  pid_t pid = vfork();
  if (pid == 0) _exit(9);
  printf("vfork and _exit %d\n", status_of(pid));
}

static int child_body(void* arg) {
  char buf[8] = "";
  return write(client, arg, 5) == 5 && read(served, buf, 5) == 5 && strcmp(buf, arg) == 0 ? 3 : 4;
}

static void use_clone(void) {
  static char stack[256 * 1024] __attribute__((aligned(16)));
  char word[] = "abcde";
  int pid = clone(child_body, stack + sizeof(stack), SIGCHLD, word);
  printf("clone %d\n", status_of(pid));
  pid = clone(child_body, stack + sizeof(stack), CLONE_VM | CLONE_VFORK | SIGCHLD, word);
  printf("clone in our memory %d\n", status_of(pid));
  pid = (int)syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
  if (pid == 0) _exit(child_body(word));
  printf("clone by number %d\n", status_of(pid));
}

static int cleaned;
static void clean(void* arg) { cleaned += (int)(long)arg; }

static void* wait_for_ever(void* arg) {
  char buf[8];
  pthread_cleanup_push(clean, (void*)1);
  switch ((long)arg) {
    case 0: recv(served, buf, sizeof(buf), 0); break;
    case 1: {
      struct pollfd p = {served, POLLIN, 0};
      poll(&p, 1, -1);
      break;
    }
    case 2: {
      struct iovec iov = {buf, sizeof(buf)};
      struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1};
      recvmsg(served, &msg, 0);
      break;
    }
  }
  pthread_cleanup_pop(0);
  return NULL;
}

static void use_cancel(void) {
  for (long i = 0; i < 3; i++) {
    pthread_t thread;
    void* result = NULL;
    pthread_create(&thread, NULL, wait_for_ever, (void*)i);
    usleep(30000);
    pthread_cancel(thread);
    pthread_join(thread, &result);
    printf("cancelled %d cleaned %d\n", result == PTHREAD_CANCELED, cleaned);
  }
}

static void* fork_often(void* arg) {
  (void)arg;
  long good = 0;
  for (int i = 0; i < 30; i++) {
    pid_t pid = fork();
    if (pid == 0) {
      int fd = socket(AF_INET, SOCK_STREAM, 0);
      _exit(fd >= 0 && close(fd) == 0 ? 0 : 1);
    }
    good += status_of(pid) == 0;
  }
  return (void*)good;
}

static void use_threads_that_fork(void) {
  pthread_t threads[4];
  long good = 0;
  for (int i = 0; i < 4; i++) pthread_create(&threads[i], NULL, fork_often, NULL);
  for (int i = 0; i < 4; i++) {
    void* result;
    pthread_join(threads[i], &result);
    good += (long)result;
  }
  printf("children of threads %ld\n", good);
}

static void show(long result) {
  printf("%ld %s\n", result, result < 0 ? strerror(errno) : "-");
  errno = 0;
}

static void use_odd_arguments(void) {
  char c;
  struct iovec iov = {&c, 1};
  volatile int minus = -1;
  show(readv(client, &iov, minus));
  show(readv(client, NULL, 1));
  show(preadv2(client, &iov, 1, 0, 0));
  show(preadv2(client, &iov, 1, -1, RWF_NOWAIT));
  show(dup2(client, minus));
  show(dup3(client, client, 0));
  show(sendmsg(client, NULL, 0));
  show(recvmsg(client, NULL, 0));
  show(sendmmsg(client, NULL, 1, 0));
  show(recvmmsg(client, NULL, 1, MSG_DONTWAIT, NULL));
  show(close_range(9, 3, 0));
  show(send(client, "x", 1, MSG_OOB));
  show(recv(served, &c, 1, MSG_OOB));
  show(tee(client, served, 1, 0));
  show(syscall(SYS_sendto, client, "ab", 2, 0, 0, 0));
  char buf[4] = "";
  show(syscall(SYS_recvfrom, served, buf, 2, MSG_WAITALL, 0, 0));
  show(syscall(SYS_close, minus));
  puts(buf);
}

static void use_copies(void) {
  int copy = fcntl(client, F_DUPFD_CLOEXEC, 300);
  printf("copy %d\n", copy);
  write(copy, "c1", 2);
  close(copy);
  int file = memfd_create("x", 0);
  write(file, "file", 4);
  off_t at = 0;
  printf("sendfile %zd %ld\n", sendfile(client, file, &at, 4), (long)at);
  dup2(file, 301);
  dup2(client, 301);
  write(301, "c2", 2);
  close_range(300, ~0u, 0);
  char buf[16] = "";
  printf("received %zd %s\n", recv(served, buf, 8, MSG_WAITALL), buf);
  FILE* stream = fdopen(dup(client), "w");
  fputs("stdio", stream);
  fclose(stream);
  memset(buf, 0, sizeof(buf));
  printf("received %zd %s\n", recv(served, buf, 5, MSG_WAITALL), buf);
}

int main(int argc, char** argv) {
  (void)argv;
  setvbuf(stdout, NULL, _IONBF, 0);
  signal(SIGPIPE, SIG_IGN);
  connect_pair();
  echo("first");
  use_vfork();
  use_clone();
  echo("after clone");
  if (argc == 1) use_cancel();
  echo("after cancel");
  use_threads_that_fork();
  use_odd_arguments();
  use_copies();
  shutdown(client, SHUT_WR);
  char c;
  printf("end %zd\n", read(served, &c, 1));
  return 0;
}
