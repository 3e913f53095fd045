#include "core/base/check.h"

#include <cstdlib>
#include <cstring>

#include "core/base/raw_syscall.h"

namespace rsock {
namespace {

void put(const char* text) noexcept {
  raw_syscall(SYS_write, 2, reinterpret_cast<long>(text), static_cast<long>(strlen(text)));
}

}  // namespace

void check_failed(const char* file, int line, const char* text) noexcept {
  char digits[16];
  char* p = digits + sizeof(digits) - 1;
  *p = '\0';
  for (int v = line; v > 0; v /= 10) *--p = static_cast<char>('0' + v % 10);
  put("librsock: ");
  put(file);
  put(":");
  put(p);
  put(": check failed: ");
  put(text);
  put("\n");
  abort();
}

}  // namespace rsock
