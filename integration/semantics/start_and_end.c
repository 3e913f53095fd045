/* Sockets before main and after it: in a function that runs before the constructors of all libraries, in the
 * destructors of threads, of C++ objects and of the program, in atexit handlers. */
#include "pair.h"

/* What g++ makes of a thread_local or static object with a destructor. */
extern int __cxa_thread_atexit_impl(void (*)(void*), void*, void*);
extern int __cxa_atexit(void (*)(void*), void*, void*);
extern void* __dso_handle;

static struct Pair* shared;
static int early_streams[2] = {-1, -1};

/* Both ends in one process, before any library of the process was told to begin. */
static void connect_early(void) {
  struct sockaddr_in here = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  socklen_t size = sizeof(here);
  int listener = socket(AF_INET, SOCK_STREAM, 0);
  if (bind(listener, (struct sockaddr*)&here, size) != 0 || listen(listener, 1) != 0 ||
      getsockname(listener, (struct sockaddr*)&here, &size) != 0) {
    return;
  }
  early_streams[0] = socket(AF_INET, SOCK_STREAM, 0);
  if (connect(early_streams[0], (struct sockaddr*)&here, size) != 0) return;
  early_streams[1] = accept(listener, NULL, NULL);
  char byte = 'e';
  struct pollfd one = {early_streams[1], POLLIN, 0};
  if (send(early_streams[0], &byte, 1, 0) != 1 || poll(&one, 1, 1000) != 1 || recv(early_streams[1], &byte, 1, 0) != 1) {
    early_streams[1] = -2;
  }
  close(listener);
}

static void before_everything(int argc, char** argv, char** environment) {
  (void)argc;
  (void)environment;
  if (argc == 3 && strncmp(argv[2], "early", 5) == 0) connect_early();
}
__attribute__((section(".preinit_array"), used)) static void (*const kBefore)(int, char**, char**) = before_everything;

static void* pong_in_thread(void* fd) {
  warm_up_as_server((int)(intptr_t)fd);
  drain("drained", (int)(intptr_t)fd);
  return NULL;
}

static void use_early(struct Pair* pair) {
  listen_on_loopback(pair, AF_INET, 5);
  say("connected early: %d", early_streams[0] >= 0 && early_streams[1] >= 0);
  pthread_t thread;
  start_thread(&thread, pong_in_thread, (void*)(intptr_t)early_streams[1]);
  warm_up_as_client(early_streams[0]);
  CHECKED(close(early_streams[0]));
  join_thread(thread);
}

static void only_meet(struct Pair* pair) { learn_address(pair); }

/* Each says its name and sends a piece; the last words come from the very end of the process. */
static void speak(void* name) {
  static int said;
  uint64_t at = 1000u * (unsigned)said++;
  say("%s", (const char*)name);
  send_pattern(shared->stream, 1000, at);
}

static void at_exit(void) { speak("atexit handler"); }
static void of_key(void* name) { speak(name); }

__attribute__((destructor)) static void of_program(void) {
  if (shared == NULL) return;
  speak("destructor of the program");
  shutdown(shared->stream, SHUT_WR);
  drain("drained", shared->stream);
  int fd = connect_to_server(shared); /* and a new connection, at that */
  ping_as_client(fd, 40);
  close(fd);
}

static void* thread_body(void* argument) {
  (void)argument;
  static pthread_key_t key;
  pthread_key_create(&key, of_key);
  pthread_setspecific(key, "destructor of a key");
  __cxa_thread_atexit_impl(speak, "destructor of a thread_local", &__dso_handle);
  speak("thread");
  return NULL;
}

static void ends(struct Pair* pair) {
  static struct Pair kept;
  open_stream(pair);
  kept = *pair;
  shared = &kept;
  __cxa_atexit(speak, "destructor of a static object", &__dso_handle);
  atexit(at_exit);
  __cxa_thread_atexit_impl(speak, "thread_local of main", &__dso_handle);
  pthread_t thread;
  start_thread(&thread, thread_body, NULL);
  join_thread(thread);
}

static void hears(struct Pair* pair) {
  open_stream(pair);
  drain("drained", pair->stream);
  send_pattern(pair->stream, 100000, 0);
  CHECKED(close(pair->stream));
  int fd = (int)CHECKED(accept(pair->listener, NULL, NULL));
  pong_as_server(fd, 40);
  drain("drained", fd);
}

static const struct PairCase kCases[] = {
    {"early", use_early, only_meet, false, false, true},
    {"ends", hears, ends, true},
};
PAIR_MAIN(kCases)
