/* Whoever looks from outside (ss, lsof, /proc) sees the socket of a lifted stream as a connected one, at its
 * number, with its two names. */
#include <arpa/inet.h>

#include "pair.h"

/* A child that was there before the stream looks, so that nobody's fork disturbs it. */
static int ask_end, answer_end;

static void start_onlooker(struct Pair* pair) {
  int ask[2], answer[2];
  CHECKED(pipe2(ask, O_CLOEXEC));
  CHECKED(pipe2(answer, O_CLOEXEC));
  if ((pid_t)CHECKED(fork()) == 0) {
    char command[512];
    close(ask[1]);
    close(pair->control);
    unsetenv("LD_PRELOAD");
    ssize_t size = read(ask[0], command, sizeof(command) - 1);
    if (size <= 0) _exit(0);
    command[size] = '\0';
    dup2(answer[1], 1);
    execl("/bin/sh", "sh", "-c", command, NULL);
    _exit(127);
  }
  close(ask[0]);
  close(answer[1]);
  ask_end = ask[1];
  answer_end = answer[0];
}

static void look(struct Pair* pair, int mine, int theirs) {
  char command[512], text[4096];
  int fd = pair->stream;
  if (strstr(pair->variant, "lsof") != NULL) {
    snprintf(command, sizeof(command),
             "lsof -nP -a -p %d -d %d -Ftn 2>/dev/null | sed -n 's/:%d->/:MINE->/;s/:%d$/:THEIRS/;/^[tn]/p'",
             getpid(), fd, mine, theirs);
  } else if (strstr(pair->variant, "proc") != NULL) {
    snprintf(command, sizeof(command),
             "readlink /proc/%d/fd/%d | sed 's/[0-9]*//g'; grep -c . /proc/%d/fdinfo/%d | sed 's/.*/fdinfo/'; "
             "i=$(readlink /proc/%d/fd/%d | tr -dc 0-9); awk -v i=$i '$10 == i {print \"state \" $4}' /proc/net/tcp",
             getpid(), fd, getpid(), fd, getpid(), fd);
  } else {
    snprintf(command, sizeof(command),
             "ss -Htnp 'sport = :%d and dport = :%d' | "
             "sed 's/:%d /:MINE /;s/:%d /:THEIRS /;s/  */ /g;s/pid=%d,fd=%d/at its number/' | cut -d' ' -f1-6",
             mine, theirs, mine, theirs, getpid(), fd);
  }
  CHECKED(write(ask_end, command, strlen(command)));
  size_t size = 0;
  ssize_t n;
  while ((n = read(answer_end, text + size, sizeof(text) - 1 - size)) > 0) size += (size_t)n;
  text[size] = '\0';
  for (char* line = strtok(text, "\n"); line != NULL; line = strtok(NULL, "\n")) say("%s", line);
}

static void seen(struct Pair* pair) {
  start_onlooker(pair);
  open_stream(pair);
  struct sockaddr_in name;
  socklen_t size = sizeof(name);
  CHECKED(getsockname(pair->stream, (struct sockaddr*)&name, &size));
  int mine = ntohs(name.sin_port);
  CHECKED(getpeername(pair->stream, (struct sockaddr*)&name, &size));
  uint64_t carried = tcp_carried(pair->stream);
  look(pair, mine, ntohs(name.sin_port));
  ping_as_client(pair->stream, 8);
  show_lifted("afterwards", pair->stream, carried);
}

static void other(struct Pair* pair) {
  open_stream(pair);
  pong_as_server(pair->stream, 8);
  drain("drained", pair->stream);
}

static const struct PairCase kCases[] = {
    {"ss", other, seen, true},
    {"lsof", seen, other, true},
    {"proc", other, seen, true},
};
PAIR_MAIN(kCases)
