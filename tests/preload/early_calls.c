/* A library in front of everybody: a malloc that reads a file while it allocates, as jemalloc does while
 * it starts, and a constructor that uses descriptors before the interposer's own constructor has run.
 * Preloaded beside librsock.so. Prints nothing; a fault shows as a crash, a hang or a wrong descriptor. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <netinet/in.h>
#include <stddef.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

static void must(int condition) {
  if (!condition) abort();
}

/* A bump allocator, an arena for each thread: enough for short programs, and every call of it calls
 * libc's names. */
static __thread char *arena, *arena_end;

static void read_something(void) {
  char byte;
  int fd = open("/dev/zero", O_RDONLY | O_CLOEXEC);
  must(fd >= 0 && read(fd, &byte, 1) == 1);
  must(fcntl(fd, F_GETFD) == FD_CLOEXEC);
  must(close(fd) == 0);
}

void* malloc(size_t n) {
  static __thread int busy;
  if (!busy) {
    busy = 1;
    read_something();
    busy = 0;
  }
  n = (n + 31) & ~(size_t)15;
  if (arena == NULL || (size_t)(arena_end - arena) < n) {
    size_t chunk = n > (64u << 20) ? n : (64u << 20);
    arena = mmap(NULL, chunk, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (arena == MAP_FAILED) return NULL;
    arena_end = arena + chunk;
  }
  size_t* block = (size_t*)arena;
  block[0] = n - 16;
  arena += n;
  return block + 2;
}
void free(void* p) { (void)p; }
void* calloc(size_t a, size_t b) { return malloc(a * b); }
void* realloc(void* p, size_t n) {
  char* fresh = malloc(n);
  size_t old = p != NULL ? ((size_t*)p)[-2] : 0;
  for (size_t i = 0; fresh != NULL && i < old && i < n; i++) fresh[i] = ((char*)p)[i];
  return fresh;
}

__attribute__((constructor(102))) static void before_the_others(void) {
  int pair[2];
  char byte = 'x';
  must(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
  must(send(pair[0], &byte, 1, 0) == 1 && recv(pair[1], &byte, 1, 0) == 1);
  must(dup2(pair[0], pair[1]) == pair[1]);
  must(close(pair[0]) == 0 && close(pair[1]) == 0);
  int fd = socket(AF_INET, SOCK_STREAM, 0);
  must(fd >= 0 && close(fd) == 0 && close(fd) == -1);
}
