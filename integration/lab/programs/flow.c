/* One flow of known bytes, one way, to its end, whatever that is.
 *
 *   flow send|receive listen|connect address=A port=N [total=BYTES] [size=BYTES] [pause=MS] [hold=1]
 *        [progress=FILE] [user_timeout=MS] [keepalive=1]
 *
 * `send` sends messages of `size` bytes with `pause` between them until `total` or SIGUSR1, then (hold=1) waits for the
 * other end, else shuts. `receive` reads and checks. Ends with `sent N: END` or `received N: END`, END being ok, eof or an errno.
 * `progress` is a file of eight bytes that always holds N, also after a SIGKILL. keepalive=1 finds a dead peer in
 * some 5 s.
 */
#include <fcntl.h>
#include <sys/mman.h>

#include "lab_net.h"

static uint64_t nowhere;
static volatile sig_atomic_t enough;
static volatile uint64_t* progress = &nowhere;

static void keep_progress(const char* path) {
  int fd = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (fd < 0 || ftruncate(fd, 8) != 0) give_up("progress", -1);
  void* at = mmap(NULL, 8, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (at == MAP_FAILED) give_up("mmap", -1);
  progress = at;
  close(fd);
}

static void on_enough(int number) {
  (void)number;
  enough = 1;
}

static const char* end_of(ssize_t n) { return n < 0 ? strerrorname_np(errno) : "eof"; }

static const char* wait_for_end(int fd) {
  char byte;
  ssize_t n = recv(fd, &byte, 1, 0);
  return n > 0 ? "bytes" : end_of(n);
}

static void send_flow(int fd, uint64_t total, size_t size, long pause_between, bool hold) {
  uint8_t* buffer = malloc(size);
  const char* end = "ok";
  while (*progress < total && !enough && strcmp(end, "ok") == 0) {
    size_t left = total - *progress < size ? (size_t)(total - *progress) : size;
    fill_known(buffer, left, *progress);
    for (size_t done = 0; done < left;) {
      ssize_t n = send(fd, buffer + done, left - done, MSG_NOSIGNAL);
      if (n <= 0) {
        end = end_of(n);
        break;
      }
      done += (size_t)n;
      *progress += (uint64_t)n;
    }
    pause_ms(pause_between);
  }
  if (strcmp(end, "ok") == 0 && hold) {
    announce("holding");
    end = wait_for_end(fd);
  } else if (strcmp(end, "ok") == 0) {
    shutdown(fd, SHUT_WR);
    const char* seen = wait_for_end(fd); /* the receiver closes when it has everything */
    if (strcmp(seen, "eof") != 0) end = seen;
  }
  printf("sent %llu: %s\n", (unsigned long long)*progress, end);
}

static void receive_flow(int fd, long pause_between) {
  enum { kBuffer = 256 << 10 };
  uint8_t* buffer = malloc(kBuffer);
  ssize_t n;
  while ((n = recv(fd, buffer, kBuffer, 0)) > 0) {
    size_t wrong = differs_at(buffer, (size_t)n, *progress);
    if (wrong != (size_t)n) {
      printf("FAILED wrong byte at offset %llu\n", (unsigned long long)(*progress + wrong));
      exit(99);
    }
    *progress += (uint64_t)n;
    pause_ms(pause_between);
  }
  printf("received %llu: %s\n", (unsigned long long)*progress, end_of(n));
}

int main(int argc, char** argv) {
  const char* address = text_of(argc, argv, "address");
  const char* file = text_of(argc, argv, "progress");
  int port = (int)number_of(argc, argv, "port", 0), one = 1, idle = 2, tries = 3, fd;
  long pause_between = number_of(argc, argv, "pause", 0), limit = number_of(argc, argv, "user_timeout", 0);
  if (argc < 5 || address == NULL || port == 0) give_up("usage", 0);
  if (file != NULL) keep_progress(file);
  sigaction(SIGUSR1, &(struct sigaction){.sa_handler = on_enough, .sa_flags = SA_RESTART}, NULL);
  if (strcmp(argv[2], "listen") == 0) {
    int listener = listen_at(address, port, false);
    announce("listening");
    fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
    close(listener);
  } else {
    fd = connect_to(address, port);
  }
  if (fd < 0) give_up("connect", fd);
  announce("connected");
  if (limit > 0) setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &limit, sizeof(int));
  if (number_of(argc, argv, "keepalive", 0)) {
    setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &one, sizeof(one));
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof(idle));
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &one, sizeof(one));
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &tries, sizeof(tries));
  }
  if (strcmp(argv[1], "send") == 0) {
    send_flow(fd, (uint64_t)number_of(argc, argv, "total", 1 << 30), (size_t)number_of(argc, argv, "size", 65536),
              pause_between, number_of(argc, argv, "hold", 0) != 0);
  } else {
    receive_flow(fd, pause_between);
  }
  close(fd);
  return 0;
}
