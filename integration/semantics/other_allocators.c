/* Another malloc is preloaded as well, before the library or behind it: both start, neither waits for the
 * other, threads and streams come and go. */
#include "pair.h"

enum { kThreads = 6, kLaps = 4 };

static const char kJemalloc[] = "libjemalloc.so.2";
static const char kTcmalloc[] = "libtcmalloc_minimal.so.4";

/* The dynamic linker finds them by their names, as for anybody who preloads them. */
static void preload_too(const char* variant, char** argv) {
  if (getenv("PAIR_ALLOCATOR") != NULL) return;
  const char* allocator = strstr(variant, "jemalloc") != NULL ? kJemalloc : kTcmalloc;
  const char* before = getenv("LD_PRELOAD");
  char list[4096];
  if (before == NULL) {
    snprintf(list, sizeof(list), "%s", allocator);
  } else if (strstr(variant, "behind") != NULL) {
    snprintf(list, sizeof(list), "%s:%s", before, allocator);
  } else {
    snprintf(list, sizeof(list), "%s:%s", allocator, before);
  }
  setenv("LD_PRELOAD", list, 1);
  setenv("PAIR_ALLOCATOR", allocator, 1);
  execv("/proc/self/exe", argv);
  fail("exec");
}

static void show_loaded(void) {
  bool loaded = false;
  char line[512];
  FILE* maps = fopen("/proc/self/maps", "r");
  while (fgets(line, sizeof(line), maps) != NULL) loaded = loaded || strstr(line, getenv("PAIR_ALLOCATOR")) != NULL;
  fclose(maps);
  say("%s is loaded: %d", getenv("PAIR_ALLOCATOR"), loaded);
}

static void exercise(void) {
  void* blocks[200];
  for (int i = 0; i < 200; ++i) memset(blocks[i] = malloc((size_t)i * 97 + 1), i, (size_t)i * 97 + 1);
  for (int i = 0; i < 200; ++i) free(blocks[i]);
}

static void* client_thread(void* argument) {
  for (int lap = 0; lap < kLaps; ++lap) {
    exercise();
    int fd = connect_to_server(argument);
    ping_as_client(fd, 100);
    CHECKED(close(fd));
  }
  return NULL;
}

static void* server_thread(void* fd) {
  exercise();
  pong_as_server((int)(intptr_t)fd, 100);
  drain("drained", (int)(intptr_t)fd);
  CHECKED(close((int)(intptr_t)fd));
  return NULL;
}

static void server(struct Pair* pair) {
  show_loaded();
  open_stream(pair);
  pthread_t threads[kThreads * kLaps];
  for (int i = 0; i < kThreads * kLaps; ++i) {
    int fd = (int)CHECKED(accept(pair->listener, NULL, NULL));
    start_thread(&threads[i], server_thread, (void*)(intptr_t)fd);
  }
  for (int i = 0; i < kThreads * kLaps; ++i) join_thread(threads[i]);
  pid_t child = (pid_t)CHECKED(fork());
  if (child == 0) {
    exercise();
    send_pattern(pair->stream, 100000, 0);
    exit(0);
  }
  int status = -1;
  CHECKED(waitpid(child, &status, 0));
  say("child: %d", status);
}

static void client(struct Pair* pair) {
  show_loaded();
  open_stream(pair);
  pthread_t threads[kThreads];
  for (int i = 0; i < kThreads; ++i) start_thread(&threads[i], client_thread, pair);
  for (int i = 0; i < kThreads; ++i) join_thread(threads[i]);
  drain("drained", pair->stream);
}

static const struct PairCase kCases[] = {
    {"jemalloc", server, client, true},
    {"jemalloc_behind", server, client, true},
    {"tcmalloc", server, client, true},
    {"tcmalloc_behind", server, client, true},
};

int main(int argc, char** argv) {
  if (argc == 3) preload_too(argv[2], argv);
  return pair_main(argc, argv, kCases, sizeof(kCases) / sizeof(*kCases));
}
