/* fdopen on a lifted stream: stdio reads and writes inside libc, where no hook sees it. */
#include "pair.h"

static FILE* opened(int fd, const char* mode) {
  FILE* file = fdopen(fd, mode);
  if (file == NULL) fail("fdopen: %s", strerrorname_np(errno));
  return file;
}

static void talk_by_lines(struct Pair* pair) {
  open_stream(pair);
  await(pair); /* the greeting lies unread in the stream */
  FILE* in = opened(pair->stream, "r");
  FILE* out = opened((int)CHECKED(dup(pair->stream)), "w");
  char line[256];
  if (fgets(line, sizeof(line), in) == NULL) fail("no greeting");
  say("greeting: %s", strtok(line, "\n"));
  for (int i = 0; i < 50; ++i) {
    fprintf(out, "line %d of stdio\n", i);
    fflush(out);
    if (fgets(line, sizeof(line), in) == NULL) fail("no answer");
    int back = -1;
    if (sscanf(line, "answer to line %d of stdio", &back) != 1 || back != i) fail("got %s", line);
  }
  say("50 lines answered");
  for (int i = 0; i < 30000; ++i) fputc(pattern_at((uint64_t)i), out);
  say("fclose: %d", fclose(out));
  CHECKED(shutdown(fileno(in), SHUT_WR));
  int count = 0, byte;
  bool intact = true;
  while ((byte = fgetc(in)) != EOF) intact = intact && byte == pattern_at((uint64_t)count++);
  say("read %d bytes, %s, eof %d error %d", count, intact ? "intact" : "DAMAGED", !!feof(in),
      !!ferror(in));
  say("fclose: %d", fclose(in));
}

static void answer_50_lines(int fd) {
  char line[256];
  for (int i = 0; i < 50; ++i) {
    size_t size = 0;
    do {
      CHECKED(recv(fd, line + size, 1, MSG_WAITALL));
    } while (line[size++] != '\n');
    line[size] = '\0';
    CHECKED(dprintf(fd, "answer to %s", line));
  }
}

static void answer_by_calls(struct Pair* pair) {
  open_stream(pair);
  CHECKED(dprintf(pair->stream, "welcome\n"));
  tell(pair);
  answer_50_lines(pair->stream);
  drain("drained", pair->stream);
  send_pattern(pair->stream, 90000, 0);
}

/* One FILE for both directions, as older programs have it. */
static void one_file(struct Pair* pair) {
  open_stream(pair);
  FILE* file = opened(pair->stream, "r+");
  setvbuf(file, NULL, _IOLBF, 512);
  for (int i = 0; i < 50; ++i) {
    fprintf(file, "line %d of stdio\n", i);
    fflush(file);
    char* line = NULL;
    size_t size = 0;
    if (i == 0) {
      if (getline(&line, &size, file) < 0) fail("no greeting");
      say("greeting: %s", strtok(line, "\n"));
    }
    if (getline(&line, &size, file) < 0) fail("no answer");
    free(line);
  }
  say("50 lines answered");
  fwrite("x", 1, 1, file);
  say("fclose: %d", fclose(file));
}

static void answer_one_file(struct Pair* pair) {
  open_stream(pair);
  CHECKED(dprintf(pair->stream, "welcome\n"));
  answer_50_lines(pair->stream);
  char byte;
  show("last byte", recv(pair->stream, &byte, 1, 0));
  show("end", recv(pair->stream, &byte, 1, 0));
}

static const struct PairCase kCases[] = {
    {"server_uses_stdio", talk_by_lines, answer_by_calls, true},
    {"client_uses_stdio", answer_by_calls, talk_by_lines, true},
    {"one_file", answer_one_file, one_file, true},
};
PAIR_MAIN(kCases)
