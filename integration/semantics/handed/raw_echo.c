/* Echoes descriptor 0 to descriptor 1 until the end, by system calls of its own (as Go programs make them),
 * or through io_uring. Built statically as well: then nothing can be preloaded into it. */
#include <linux/io_uring.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "raw_call.h"

static char buffer[65536];

static int by_calls(void) {
  long got;
  while ((got = raw_call(SYS_read, 0, (long)buffer, sizeof(buffer), 0, 0, 0)) > 0) {
    for (long done = 0; done < got;) {
      long n = raw_call(SYS_write, 1, (long)buffer + done, got - done, 0, 0, 0);
      if (n <= 0) return 3;
      done += n;
    }
  }
  return got == 0 ? 0 : 4;
}

/* --- the smallest ring that works: one request at a time ---------------------------------------- */

static struct io_uring_params params;
static char *sq, *cq;
static struct io_uring_sqe* entries;
static long ring;

static int set_up(void) {
  ring = raw_call(SYS_io_uring_setup, 4, (long)&params, 0, 0, 0, 0);
  if (ring < 0) return (int)-ring;
  size_t sq_size = params.sq_off.array + params.sq_entries * sizeof(uint32_t);
  size_t cq_size = params.cq_off.cqes + params.cq_entries * sizeof(struct io_uring_cqe);
  sq = mmap(NULL, sq_size, PROT_READ | PROT_WRITE, MAP_SHARED, (int)ring, IORING_OFF_SQ_RING);
  cq = mmap(NULL, cq_size, PROT_READ | PROT_WRITE, MAP_SHARED, (int)ring, IORING_OFF_CQ_RING);
  entries = mmap(NULL, params.sq_entries * sizeof(*entries), PROT_READ | PROT_WRITE, MAP_SHARED, (int)ring,
                 IORING_OFF_SQES);
  return sq == MAP_FAILED || cq == MAP_FAILED || (void*)entries == MAP_FAILED ? 5 : 0;
}

static uint32_t* word(char* base, uint32_t offset) { return (uint32_t*)(base + offset); }

static long request(int operation, int fd, char* at, size_t size) {
  uint32_t tail = *word(sq, params.sq_off.tail), slot = tail & *word(sq, params.sq_off.ring_mask);
  memset(&entries[slot], 0, sizeof(entries[slot]));
  entries[slot].opcode = (uint8_t)operation;
  entries[slot].fd = fd;
  entries[slot].addr = (uint64_t)(uintptr_t)at;
  entries[slot].len = (uint32_t)size;
  word(sq, params.sq_off.array)[slot] = slot;
  __atomic_store_n(word(sq, params.sq_off.tail), tail + 1, __ATOMIC_RELEASE);
  long r = raw_call(SYS_io_uring_enter, ring, 1, 1, IORING_ENTER_GETEVENTS, 0, 0);
  if (r < 0) return r;
  uint32_t head = *word(cq, params.cq_off.head);
  if (head == __atomic_load_n(word(cq, params.cq_off.tail), __ATOMIC_ACQUIRE)) return -1;
  struct io_uring_cqe* answers = (struct io_uring_cqe*)(cq + params.cq_off.cqes);
  long result = answers[head & *word(cq, params.cq_off.ring_mask)].res;
  __atomic_store_n(word(cq, params.cq_off.head), head + 1, __ATOMIC_RELEASE);
  return result;
}

static int by_uring(void) {
  int error = set_up();
  if (error != 0) return error;
  long got;
  while ((got = request(IORING_OP_RECV, 0, buffer, sizeof(buffer))) > 0) {
    for (long done = 0; done < got;) {
      long n = request(IORING_OP_SEND, 1, buffer + done, (size_t)(got - done));
      if (n <= 0) return 3;
      done += n;
    }
  }
  return got == 0 ? 0 : 4;
}

int main(int argc, char** argv) { return argc > 1 && strcmp(argv[1], "uring") == 0 ? by_uring() : by_calls(); }
