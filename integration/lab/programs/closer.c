/* A stream whose sender ends it in one of several ways, right behind its last byte.
 *
 *   closer send|receive address=A port=N [total=BYTES] [size=BYTES] [how=WAY] [linger=SECONDS] [stop=1]
 *
 * `receive` listens, reads and checks; `send` connects, warms up with small messages that are echoed, says `warm`, waits for
 * SIGUSR1, sends `total` bytes and ends:
 *   close        closes, and says how long that took
 *   full         the same in a process that has no descriptor left
 *   lowered      the same, and the limit is below what is open already
 *   last_thread  the first thread has gone by pthread_exit, and the sending one returns without a close
 * stop=1: the receiver stops reading after the warm-up until SIGUSR1. Ends with `sent N` or `received N: END`.
 */
#include <pthread.h>
#include <sys/resource.h>

#include "lab_net.h"

enum { kWarm = 64, kRounds = 2000 };

static volatile sig_atomic_t told;
static int stream = -1;
static long total, size, linger_seconds;
static const char* how;

static void on_told(int number) {
  (void)number;
  told = 1;
}

static void wait_until_told(void) {
  while (!told) pause_ms(20);
}

static bool all(bool sends, void* buffer, size_t n) {
  for (size_t done = 0; done < n;) {
    ssize_t r = sends ? send(stream, (char*)buffer + done, n - done, MSG_NOSIGNAL)
                      : recv(stream, (char*)buffer + done, n - done, 0);
    if (r <= 0) return false;
    done += (size_t)r;
  }
  return true;
}

/* So that the stream is lifted when the end comes. */
static void warm_up(bool first) {
  char buffer[kWarm];
  memset(buffer, 'w', sizeof(buffer));
  for (int i = 0; i < kRounds; ++i) {
    for (int turn = 0; turn < 2; ++turn) {
      if (!all((turn == 0) == first, buffer, sizeof(buffer))) give_up("warm-up", -1);
    }
    pause_ms(2);
  }
}

static void allow_few_descriptors(void) {
  struct rlimit few = {256, 256};
  if (setrlimit(RLIMIT_NOFILE, &few) != 0) give_up("setrlimit", -1);
}

static void use_up_descriptors(void) {
  while (dup(2) >= 0) {
  }
  if (errno != EMFILE) give_up("dup", -1);
}

static void send_total(void) {
  uint8_t* buffer = malloc((size_t)size);
  for (long done = 0; done < total;) {
    size_t n = (size_t)(total - done < size ? total - done : size);
    fill_known(buffer, n, (uint64_t)done);
    if (!all(true, buffer, n)) give_up("send", -1);
    done += (long)n;
  }
  printf("sent %ld\n", total);
  fflush(stdout);
}

static void* send_and_return(void* unused) {
  (void)unused;
  pause_ms(300); /* the first thread is gone by now */
  send_total();
  return NULL;
}

static void send_and_end(void) {
  warm_up(true);
  announce("warm");
  wait_until_told();
  if (strcmp(how, "last_thread") == 0) {
    pthread_t thread;
    pthread_create(&thread, NULL, send_and_return, NULL);
    pthread_exit(NULL);
  }
  if (strcmp(how, "lowered") == 0) allow_few_descriptors();
  if (strcmp(how, "lowered") == 0 || strcmp(how, "full") == 0) use_up_descriptors();
  if (linger_seconds >= 0) {
    struct linger l = {1, (int)linger_seconds};
    if (setsockopt(stream, SOL_SOCKET, SO_LINGER, &l, sizeof(l)) != 0) give_up("linger", -1);
  }
  send_total();
  long began = now_ms();
  int r = close(stream);
  printf("close %d after %ld ms\n", r, now_ms() - began);
  fflush(stdout);
  pause_ms(1000);
}

static void receive_to_the_end(bool stop) {
  enum { kBuffer = 64 << 10 };
  static uint8_t buffer[kBuffer];
  uint64_t got = 0;
  ssize_t n;
  warm_up(false);
  announce("warm");
  if (stop) wait_until_told();
  while ((n = recv(stream, buffer, kBuffer, 0)) > 0) {
    if (differs_at(buffer, (size_t)n, got) != (size_t)n) give_up("wrong byte", (long)got);
    got += (uint64_t)n;
  }
  printf("received %llu: %s\n", (unsigned long long)got, n < 0 ? strerrorname_np(errno) : "eof");
}

int main(int argc, char** argv) {
  const char* address = text_of(argc, argv, "address");
  int port = (int)number_of(argc, argv, "port", 0);
  if (argc < 4 || address == NULL || port == 0) give_up("usage", 0);
  total = number_of(argc, argv, "total", 1 << 20);
  size = number_of(argc, argv, "size", 16384);
  linger_seconds = number_of(argc, argv, "linger", -1);
  how = text_of(argc, argv, "how");
  if (how == NULL) how = "close";
  sigaction(SIGUSR1, &(struct sigaction){.sa_handler = on_told, .sa_flags = SA_RESTART}, NULL);
  if (strcmp(argv[1], "receive") == 0) {
    int listener = listen_at(address, port, false);
    announce("listening");
    stream = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
    receive_to_the_end(number_of(argc, argv, "stop", 0) != 0);
  } else {
    if (strcmp(how, "full") == 0) allow_few_descriptors();
    stream = connect_to(address, port);
    if (stream < 0) give_up("connect", -1);
    send_and_end();
  }
  return 0;
}
