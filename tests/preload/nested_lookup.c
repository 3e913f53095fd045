/* A dlsym that uses descriptors while it looks a name up, as one whose malloc starts up inside it does.
 * Preloaded behind librsock.so: the calls below come back to the interposer in the middle of a lookup. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

void* dlsym(void* handle, const char* name) {
  static void* (*next)(void*, const char*);
  char byte;
  int fd = open("/dev/zero", O_RDONLY | O_CLOEXEC);
  if (fd < 0 || read(fd, &byte, 1) != 1 || fcntl(fd, F_GETFD) != FD_CLOEXEC || close(fd) != 0) abort();
  if (next == NULL) next = (void* (*)(void*, const char*))dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.34");
  /* RTLD_NEXT is counted from here: the library behind this one, which is what the caller wants. */
  return next(handle, name);
}
