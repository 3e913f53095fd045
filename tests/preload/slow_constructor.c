/* A library whose constructor waits, under the loader's lock, for a thread that opens a TCP socket. For loader_calls. */
#define _GNU_SOURCE
#include <netinet/in.h>
#include <pthread.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

int slow_constructor_outcome = 0; /* 1: the thread came back with a socket */

static void* open_socket(void* arg) {
  (void)arg;
  int fd = socket(AF_INET, SOCK_STREAM, 0);
  if (fd < 0 || close(fd) != 0) return NULL;
  return &slow_constructor_outcome;
}

__attribute__((constructor)) static void wait_for_thread(void) {
  pthread_t thread;
  void* came_back = NULL;
  struct timespec limit;
  clock_gettime(CLOCK_REALTIME, &limit);
  limit.tv_sec += 10;
  if (pthread_create(&thread, NULL, open_socket, NULL) != 0) return;
  if (pthread_timedjoin_np(thread, &came_back, &limit) == 0 && came_back != NULL) slow_constructor_outcome = 1;
}
