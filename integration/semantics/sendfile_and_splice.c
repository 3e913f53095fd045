/* sendfile and splice on a lifted stream move the bytes that the kernel would have moved. */
#include <sys/sendfile.h>

#include "pair.h"

enum { kFileBytes = 3 << 20 };

static int pattern_file(void) {
  FILE* file = tmpfile();
  if (file == NULL) fail("tmpfile");
  for (int i = 0; i < kFileBytes; ++i) fputc(pattern_at((uint64_t)i), file);
  fflush(file);
  lseek(fileno(file), 0, SEEK_SET);
  return fileno(file); /* open until exit */
}

static void sendfile_all(int fd, int file, off_t* offset, size_t total) {
  size_t sent = 0;
  while (sent < total) {
    ssize_t n = CHECKED(sendfile(fd, file, offset, total - sent));
    if (n == 0) fail("sendfile stops at %zu", sent);
    sent += (size_t)n;
  }
}

static void send_files(struct Pair* pair) {
  open_stream(pair);
  int fd = pair->stream, file = pattern_file();
  send_pattern(fd, 1000, 0); /* ordinary sends before and after keep their order */
  sendfile_all(fd, file, NULL, kFileBytes);
  say("file at: %ld", (long)lseek(file, 0, SEEK_CUR));
  show("at the end of the file", sendfile(fd, file, NULL, 10));
  send_pattern(fd, 1000, 0);
  off_t offset = 12345;
  sendfile_all(fd, file, &offset, 100000);
  say("offset: %ld, file at: %ld", (long)offset, (long)lseek(file, 0, SEEK_CUR));
  offset = kFileBytes - 100;
  show("more than there is", sendfile(fd, file, &offset, 1 << 20));
  say("offset: %ld", (long)offset);
  offset = -5;
  show("negative offset", sendfile(fd, file, &offset, 10));
  offset = -1;
  show("offset -1", sendfile(fd, file, &offset, 10));
  say("offset: %ld, file at: %ld", (long)offset, (long)lseek(file, 0, SEEK_CUR));
  show("count 0", sendfile(fd, file, NULL, 0));
  show("from a stream", sendfile(file, fd, NULL, 10));
  await(
      pair); /* pages in flight are the file's own: truncating them now would change what is sent */
  CHECKED(ftruncate(file, 5000));
  offset = 4000;
  show("file was truncated", sendfile(fd, file, &offset, 5000));
  tell(pair);
  await(pair);
  CHECKED(fcntl(fd, F_SETFL, O_NONBLOCK));
  fill_until_full(fd);
  offset = 0;
  show("sendfile when full", sendfile(fd, file, &offset, 5000));
  offset = 5000;
  show("nothing left, when full", sendfile(fd, file, &offset, 5000));
  offset = -1;
  show("offset -1, when full", sendfile(fd, file, &offset, 5000));
  offset = 0;
  int blind = (int)CHECKED(open("/dev/null", O_WRONLY));
  show("not readable, when full", sendfile(fd, blind, &offset, 5000));
  show("no file, when full", sendfile(fd, 999, &offset, 5000));
  CHECKED(fcntl(fd, F_SETFL, 0));
  offset = 5000;
  show("nothing left, waiting", sendfile(fd, file, &offset, 5000));
  tell(pair);
}

static void receive_files(struct Pair* pair) {
  open_stream(pair);
  int fd = pair->stream;
  receive_pattern(fd, 1000, 0);
  receive_pattern(fd, kFileBytes, 0);
  receive_pattern(fd, 1000, 0);
  receive_pattern(fd, 100000, 12345);
  receive_pattern(fd, 100, kFileBytes - 100);
  tell(pair);
  receive_pattern(fd, 1000, 4000);
  say("all intact");
  await(pair);
  show("nothing more", recv(fd, &(char){0}, 1, MSG_DONTWAIT));
  tell(pair);
  await(pair);
}

/* socket -> pipe -> file and back: what haproxy does. */
static void splice_through(struct Pair* pair) {
  open_stream(pair);
  int fd = pair->stream, ends[2];
  CHECKED(pipe(ends));
  static uint8_t buffer[65536];
  size_t total = 0;
  bool intact = true;
  while (total < 300000) {
    ssize_t in = splice(fd, NULL, ends[1], NULL, 300000 - total, SPLICE_F_MOVE);
    if (in <= 0) fail("splice: %zd %s", in, strerrorname_np(errno));
    for (ssize_t left = in; left > 0;) {
      ssize_t n = CHECKED(
          read(ends[0], buffer, sizeof(buffer) < (size_t)left ? sizeof(buffer) : (size_t)left));
      intact = intact && pattern_holds(buffer, (size_t)n, total);
      total += (size_t)n;
      left -= n;
    }
  }
  say("socket to pipe: %zu %s", total, intact ? "intact" : "DAMAGED");
  CHECKED(fcntl(fd, F_SETFL, O_NONBLOCK));
  show("nothing there", splice(fd, NULL, ends[1], NULL, 100, SPLICE_F_NONBLOCK));
  CHECKED(fcntl(fd, F_SETFL, 0));
  fill_pattern(buffer, 30000, 0);
  CHECKED(write(ends[1], buffer, 30000));
  size_t out = 0;
  while (out < 30000) out += (size_t)CHECKED(splice(ends[0], NULL, fd, NULL, 30000 - out, 0));
  say("pipe to socket: %zu", out);
  show("socket to socket", splice(fd, NULL, fd, NULL, 100, SPLICE_F_NONBLOCK));
  show("copy_file_range", copy_file_range(fd, NULL, ends[1], NULL, 10, 0));
  ping_as_client(fd, 8);
  tell(pair);
  show("at the end", splice(fd, NULL, ends[1], NULL, 100, 0));
}

static void feed_splice(struct Pair* pair) {
  open_stream(pair);
  send_pattern(pair->stream, 300000, 0);
  receive_pattern(pair->stream, 30000, 0);
  say("30000 intact");
  pong_as_server(pair->stream, 8);
  await(pair);
}

static const struct PairCase kCases[] = {
    {"sendfile_to_server", receive_files, send_files, true},
    {"sendfile_to_client", send_files, receive_files, true},
    {"splice_in_server", splice_through, feed_splice, true},
    {"splice_in_client", feed_splice, splice_through, true},
};
PAIR_MAIN(kCases)
