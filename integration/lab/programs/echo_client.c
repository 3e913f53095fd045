/* Clients of echo_server, in one process: a thread for each connection; every byte that comes back is checked.
 *
 *   echo_client address=A port=N [conns=N] [rounds=N] [size=BYTES] [pause=MS] [turns=N] [seconds=N] [again=N]
 *
 * A round sends `size` bytes and awaits them. All connections are open before the first round begins. With turns=N
 * the connections are active in N groups, one after another, and once more all together at the end. With seconds=N
 * rounds go on for so long, or until SIGUSR1, and a connection that breaks is made anew, as reconnecting clients do: what was
 * answered was answered right. With again=N each connection is followed by N others, one after another. Last line: `ok bytes=N sessions=N broken=N`.
 */
#include <pthread.h>

#include "lab_net.h"

static const char* address;
static int port, conns, turns;
static long rounds, size, pause_between, seconds, again;
static volatile long deadline;
static pthread_barrier_t all_open, *turn_over;
static _Atomic long total_bytes, sessions, broken;

struct Client {
  int number, fd;
  uint64_t sent;
  uint8_t* out;
  uint8_t* in;
};

/* 0, or -1 with errno when the connection broke (0: it ended). Wrong bytes end the program. */
static int round_trip(struct Client* c) {
  uint64_t offset = c->sent + (uint64_t)c->number * kFlowDistance;
  fill_known(c->out, (size_t)size, offset);
  long sent = 0, received = 0;
  while (received < size) {
    /* Never more than 32 KiB under way: an echo that is not read must not stop the server. */
    long room = 32 << 10, want = size - sent < room ? size - sent : room;
    if (sent < size && sent - received <= 0) {
      ssize_t n = send(c->fd, c->out + sent, (size_t)want, MSG_NOSIGNAL);
      if (n < 0) return -1;
      sent += n;
    }
    ssize_t n = recv(c->fd, c->in, (size_t)(size - received), 0);
    if (n == 0) errno = 0;
    if (n <= 0) return -1;
    size_t wrong = differs_at(c->in, (size_t)n, offset + (uint64_t)received);
    if (wrong != (size_t)n) {
      printf("FAILED connection %d: wrong byte at offset %llu\n", c->number,
             (unsigned long long)(c->sent + (uint64_t)received + wrong));
      fflush(stdout);
      _exit(99);
    }
    received += n;
  }
  c->sent += (uint64_t)size;
  total_bytes += size;
  pause_ms(pause_between);
  return 0;
}

static void demand(struct Client* c, long count) {
  for (long i = 0; i < count; ++i) {
    if (round_trip(c) != 0) {
      printf("FAILED connection %d: %s after %llu bytes\n", c->number, errno ? strerrorname_np(errno) : "EOF",
             (unsigned long long)c->sent);
      fflush(stdout);
      _exit(99);
    }
  }
}

static void end(struct Client* c) {
  shutdown(c->fd, SHUT_WR);
  ssize_t n = recv(c->fd, c->in, 1, 0);
  if (n != 0) give_up("instead of the end", n);
  close(c->fd);
}

static void open_again(struct Client* c) {
  while ((c->fd = connect_to(address, port)) < 0 && now_ms() < deadline) pause_ms(100);
  c->sent = 0;
  if (c->fd >= 0) ++sessions;
}

static void go_on(struct Client* c) {
  while (now_ms() < deadline) {
    if (round_trip(c) == 0) continue;
    ++broken;
    close(c->fd);
    open_again(c);
  }
  if (c->fd >= 0) end(c);
}

static void* run(void* argument) {
  struct Client* c = argument;
  c->out = malloc((size_t)size);
  c->in = malloc((size_t)size);
  c->fd = connect_to(address, port);
  if (c->fd < 0) give_up("connect", c->fd);
  ++sessions;
  pthread_barrier_wait(&all_open);
  if (seconds > 0) {
    go_on(c);
    return NULL;
  }
  for (int turn = 0; turn < turns; ++turn) {
    if (c->number % turns == turn) demand(c, rounds);
    if (turns > 1) pthread_barrier_wait(turn_over);
  }
  if (turns > 1) demand(c, rounds);
  end(c);
  for (long i = 0; i < again; ++i) {
    open_again(c);
    if (c->fd < 0) give_up("connect again", c->fd);
    demand(c, rounds);
    end(c);
  }
  return NULL;
}

static void on_enough(int number) {
  (void)number;
  deadline = 0;
}

int main(int argc, char** argv) {
  address = text_of(argc, argv, "address");
  port = (int)number_of(argc, argv, "port", 0);
  conns = (int)number_of(argc, argv, "conns", 1);
  rounds = number_of(argc, argv, "rounds", 32);
  size = number_of(argc, argv, "size", 8192);
  pause_between = number_of(argc, argv, "pause", 0);
  turns = (int)number_of(argc, argv, "turns", 1);
  seconds = number_of(argc, argv, "seconds", 0);
  again = number_of(argc, argv, "again", 0);
  deadline = now_ms() + seconds * 1000;
  sigaction(SIGUSR1, &(struct sigaction){.sa_handler = on_enough, .sa_flags = SA_RESTART}, NULL);
  if (address == NULL || port == 0) give_up("usage", 0);
  pthread_barrier_t second;
  pthread_barrier_init(&all_open, NULL, (unsigned)conns);
  pthread_barrier_init(&second, NULL, (unsigned)conns);
  turn_over = &second;
  struct Client* clients = calloc((size_t)conns, sizeof(*clients));
  pthread_t* threads = calloc((size_t)conns, sizeof(*threads));
  pthread_attr_t small;
  pthread_attr_init(&small);
  pthread_attr_setstacksize(&small, 128 << 10);
  for (int i = 0; i < conns; ++i) {
    clients[i].number = i;
    int failed = pthread_create(&threads[i], &small, run, &clients[i]);
    if (failed != 0) give_up("pthread_create", failed);
  }
  for (int i = 0; i < conns; ++i) pthread_join(threads[i], NULL);
  printf("ok bytes=%ld sessions=%ld broken=%ld\n", total_bytes, sessions, broken);
  return 0;
}
