/* The loader's state is the program's own: a first call of each name leaves a pending dlerror() message and the text
 * of a former one alone, and a thread that opens the first socket does not wait for the loader's lock, which a
 * constructor that waits for that thread holds. Prints what happened; plain Linux is the judge.
 *     loader_calls SLOW_CONSTRUCTOR.so */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

static void report(const char* call, long result) {
  printf("%s %ld %d\n", call, result, errno);
  errno = 0;
}

int main(int argc, char** argv) {
  setvbuf(stdout, NULL, _IOFBF, 1 << 16); /* nothing is written, hence nothing looked up, before it is meant to be */
  if (argc < 2) return 2;
  printf("missing library %d\n", dlopen("/nonexistent/library.so", RTLD_NOW) != NULL);
  errno = 0;
  report("tee", tee(-1, -1, 1, 0));
  const char* message = dlerror();
  printf("still pending: %s\n", message != NULL ? message : "nothing");
  char before[512] = "";
  if (message != NULL) strncpy(before, message, sizeof(before) - 1);
  report("readv", readv(-1, NULL, 0));
  report("listen", listen(-1, 1));
  printf("text unchanged %d\n", message != NULL && strcmp(before, message) == 0);
  const int* calls = dlsym(RTLD_DEFAULT, "next_definition_calls"); /* next_definition.c */
  if (calls != NULL && *calls != 1) printf("the next definition was called %d times\n", *calls);
  (void)dlerror();
  void* handle = dlopen(argv[1], RTLD_NOW);
  printf("constructor returned %d\n", handle != NULL);
  const int* outcome = handle != NULL ? dlsym(handle, "slow_constructor_outcome") : NULL;
  printf("its thread opened a socket: %d\n", outcome != NULL ? *outcome : -1);
  printf("no error left over: %d\n", dlerror() == NULL);
  printf("epoll %d\n", close(epoll_create1(0)));
  printf("no error left over: %d\n", dlerror() == NULL);
  fflush(stdout);
  _exit(0);
}
