/* dprintf, vdprintf and aio on a lifted stream: libc makes the calls, where no hook sees them. */
#include <aio.h>
#include <stdarg.h>

#include "pair.h"

int __dprintf_chk(int fd, int flag, const char* format, ...); /* what FORTIFY makes of dprintf */

static void formatted(int fd, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  show("vdprintf", vdprintf(fd, format, arguments));
  va_end(arguments);
}

static void print(struct Pair* pair) {
  open_stream(pair);
  show("dprintf", dprintf(pair->stream, "%d words, %s\n", 3, "formatted"));
  show("fortified", __dprintf_chk(pair->stream, 1, "and %c more\n", 'x'));
  formatted(pair->stream, "%08lx\n", 0xbeefUL);
  send_pattern(pair->stream, 300000, 0);
  CHECKED(shutdown(pair->stream, SHUT_WR));
  drain("drained", pair->stream);
}

static void read_lines(struct Pair* pair) {
  open_stream(pair);
  for (int i = 0; i < 3; ++i) {
    char line[64] = "";
    size_t size = 0;
    do {
      CHECKED(recv(pair->stream, line + size, 1, MSG_WAITALL));
    } while (line[size++] != '\n');
    line[size - 1] = '\0';
    say("line: %s", line);
  }
  drain("drained", pair->stream);
  send_pattern(pair->stream, 5000, 0);
}

static long wait_for(struct aiocb* request) {
  const struct aiocb* const list[] = {request};
  while (aio_error(request) == EINPROGRESS) aio_suspend(list, 1, NULL);
  errno = aio_error(request);
  return aio_return(request);
}

static void aio_both(struct Pair* pair) {
  open_stream(pair);
  static uint8_t out[4][1000], in[1000];
  struct aiocb request = {.aio_fildes = pair->stream, .aio_buf = out[0], .aio_nbytes = 1000};
  for (uint64_t i = 0; i < 4; ++i) fill_pattern(out[i], 1000, i * 1000);
  show("aio_write", aio_write(&request));
  show("written", wait_for(&request));
  struct aiocb more[3];
  struct aiocb* list[3];
  for (int i = 0; i < 3; ++i) {
    more[i] = (struct aiocb){.aio_fildes = pair->stream, .aio_buf = out[i + 1], .aio_nbytes = 1000,
                             .aio_lio_opcode = LIO_WRITE};
    list[i] = &more[i];
  }
  show("lio_listio", lio_listio(LIO_WAIT, list, 1, NULL)); /* one at a time: their order is not given */
  show("lio_listio", lio_listio(LIO_WAIT, list + 1, 1, NULL));
  show("lio_listio", lio_listio(LIO_WAIT, list + 2, 1, NULL));
  struct aiocb read = {.aio_fildes = pair->stream, .aio_buf = in, .aio_nbytes = sizeof(in)};
  show("aio_read", aio_read(&read));
  tell(pair);
  show("read", wait_for(&read));
  say("%s", pattern_holds(in, sizeof(in), 0) ? "intact" : "DAMAGED");
  send_pattern(pair->stream, 100000, 4000);
  CHECKED(shutdown(pair->stream, SHUT_WR));
  drain("drained", pair->stream);
}

static void aio_peer(struct Pair* pair) {
  open_stream(pair);
  receive_pattern(pair->stream, 4000, 0);
  await(pair);
  send_pattern(pair->stream, 1000, 0);
  receive_pattern(pair->stream, 100000, 4000);
  drain("drained", pair->stream);
}

static const struct PairCase kCases[] = {
    {"server_prints", print, read_lines, true},
    {"client_prints", read_lines, print, true},
    {"server_aio", aio_both, aio_peer, true},
    {"client_aio", aio_peer, aio_both, true},
};
PAIR_MAIN(kCases)
