// stdio at 0, 1 and 2: libc reads and writes there by itself, past us.
//
// A program that inetd has started may use calls, or the FILEs that libc has for these numbers, or
// both (git does). A stream there is lifted when it has shown that it uses calls
// (core/stream/stream_lift.cc), and is on TCP while one of these is inside (core/stream/stdio.cc).
// What a FILE still has at exit, and at fclose, meets before_exit() and files.cc. (fdopen is there,
// too: its numbers are let go of.)
//
// For any other FILE it costs two loads.

#include <cstdarg>

#include "preload/entry.h"

namespace rsock::preload {
namespace {

class Visit {
 public:
  explicit Visit(const FILE* file) noexcept {
    if (file == nullptr) return;
    const int fd = file->_fileno;
    if (static_cast<unsigned>(fd) <= 2 && FdTable::word(fd) != 0) [[unlikely]]
      begin(fd);
  }
  ~Visit() {
    if (stream_ != nullptr) [[unlikely]]
      end();
  }
  Visit(const Visit&) = delete;
  Visit& operator=(const Visit&) = delete;

 private:
  [[gnu::noinline]] void begin(int fd) noexcept {
    const int before = errno;
    stream_ = stream::begin_stdio(fd);
    errno = before;
  }
  [[gnu::noinline]] void end() noexcept {
    const int before = errno;
    stream::end_stdio(*stream_);
    errno = before;
  }

  Stream* stream_ = nullptr;
};

}  // namespace
}  // namespace rsock::preload

using namespace rsock;
using namespace rsock::preload;

/// The name does it, once the stream below `file` is on TCP.
#define RSOCK_STDIO(type, name, parameters, file, arguments) \
  RSOCK_EXPORT type name parameters {                        \
    const Visit visit(file);                                 \
    return real.name arguments;                              \
  }

// libc declares these variadic: each has a sibling that takes a list.
#define RSOCK_STDIO_LIST(name, parameters, last, file, call) \
  RSOCK_EXPORT int name parameters {                         \
    const Visit visit(file);                                 \
    va_list list;                                            \
    va_start(list, last);                                    \
    const int result = real.call;                            \
    va_end(list);                                            \
    return result;                                           \
  }

// --- writing ---------------------------------------------------------------------------------

RSOCK_STDIO(int, vfprintf, (FILE * file, const char* format, va_list list), file,
            (file, format, list))
RSOCK_STDIO(int, __vfprintf_chk, (FILE * file, int flag, const char* format, va_list list), file,
            (file, flag, format, list))
RSOCK_STDIO_LIST(fprintf, (FILE * file, const char* format, ...), format, file,
                 vfprintf(file, format, list))
RSOCK_STDIO_LIST(printf, (const char* format, ...), format, stdout, vfprintf(stdout, format, list))
RSOCK_STDIO_LIST(__fprintf_chk, (FILE * file, int flag, const char* format, ...), format, file,
                 __vfprintf_chk(file, flag, format, list))
RSOCK_STDIO_LIST(__printf_chk, (int flag, const char* format, ...), format, stdout,
                 __vfprintf_chk(stdout, flag, format, list))

RSOCK_EXPORT int vprintf(const char* format, va_list list) {
  return ::vfprintf(stdout, format, list);
}

RSOCK_EXPORT int __vprintf_chk(int flag, const char* format, va_list list) {
  return ::__vfprintf_chk(stdout, flag, format, list);
}

RSOCK_STDIO(int, puts, (const char* text), stdout, (text))
RSOCK_STDIO(int, fputs, (const char* text, FILE* file), file, (text, file))
RSOCK_STDIO(int, fputs_unlocked, (const char* text, FILE* file), file, (text, file))
RSOCK_STDIO(int, fputc, (int c, FILE* file), file, (c, file))
RSOCK_STDIO(int, putc, (int c, FILE* file), file, (c, file))
RSOCK_STDIO(int, fputc_unlocked, (int c, FILE* file), file, (c, file))
RSOCK_STDIO(int, putc_unlocked, (int c, FILE* file), file, (c, file))
RSOCK_STDIO(int, putchar, (int c), stdout, (c))
RSOCK_STDIO(int, putchar_unlocked, (int c), stdout, (c))
RSOCK_STDIO(size_t, fwrite, (const void* from, size_t size, size_t n, FILE* file), file,
            (from, size, n, file))
RSOCK_STDIO(size_t, fwrite_unlocked, (const void* from, size_t size, size_t n, FILE* file), file,
            (from, size, n, file))
RSOCK_STDIO(int, __overflow, (FILE * file, int c), file, (file, c))

RSOCK_STDIO(int, vfwprintf, (FILE * file, const wchar_t* format, va_list list), file,
            (file, format, list))
RSOCK_STDIO(int, __vfwprintf_chk, (FILE * file, int flag, const wchar_t* format, va_list list),
            file, (file, flag, format, list))
RSOCK_STDIO_LIST(fwprintf, (FILE * file, const wchar_t* format, ...), format, file,
                 vfwprintf(file, format, list))
RSOCK_STDIO_LIST(wprintf, (const wchar_t* format, ...), format, stdout,
                 vfwprintf(stdout, format, list))
RSOCK_STDIO_LIST(__fwprintf_chk, (FILE * file, int flag, const wchar_t* format, ...), format, file,
                 __vfwprintf_chk(file, flag, format, list))
RSOCK_STDIO_LIST(__wprintf_chk, (int flag, const wchar_t* format, ...), format, stdout,
                 __vfwprintf_chk(stdout, flag, format, list))

RSOCK_EXPORT int vwprintf(const wchar_t* format, va_list list) {
  return ::vfwprintf(stdout, format, list);
}

RSOCK_EXPORT int __vwprintf_chk(int flag, const wchar_t* format, va_list list) {
  return ::__vfwprintf_chk(stdout, flag, format, list);
}

RSOCK_STDIO(int, fputws, (const wchar_t* text, FILE* file), file, (text, file))
RSOCK_STDIO(int, fputws_unlocked, (const wchar_t* text, FILE* file), file, (text, file))
RSOCK_STDIO(wint_t, fputwc, (wchar_t c, FILE* file), file, (c, file))
RSOCK_STDIO(wint_t, putwc, (wchar_t c, FILE* file), file, (c, file))
RSOCK_STDIO(wint_t, fputwc_unlocked, (wchar_t c, FILE* file), file, (c, file))
RSOCK_STDIO(wint_t, putwc_unlocked, (wchar_t c, FILE* file), file, (c, file))
RSOCK_STDIO(wint_t, putwchar, (wchar_t c), stdout, (c))
RSOCK_STDIO(wint_t, putwchar_unlocked, (wchar_t c), stdout, (c))
RSOCK_STDIO(wint_t, __woverflow, (FILE * file, wint_t c), file, (file, c))

/// Null: of all.
#define RSOCK_FLUSH(name)                                    \
  RSOCK_EXPORT int name(FILE* file) {                        \
    const Visit visit(file != nullptr ? file : stdout);      \
    const Visit another(file != nullptr ? nullptr : stderr); \
    return real.name(file);                                  \
  }
RSOCK_FLUSH(fflush)
RSOCK_FLUSH(fflush_unlocked)

// --- what went wrong: on stderr --------------------------------------------------------------

RSOCK_STDIO(void, perror, (const char* text), stderr, (text))
RSOCK_STDIO(void, psignal, (int number, const char* text), stderr, (number, text))
RSOCK_STDIO(void, psiginfo, (const siginfo_t* info, const char* text), stderr, (info, text))
RSOCK_STDIO(void, vwarn, (const char* format, va_list list), stderr, (format, list))
RSOCK_STDIO(void, vwarnx, (const char* format, va_list list), stderr, (format, list))

RSOCK_EXPORT void verr(int status, const char* format, va_list list) {
  const Visit visit(stderr);
  real.verr(status, format, list);
  __builtin_unreachable();
}

RSOCK_EXPORT void verrx(int status, const char* format, va_list list) {
  const Visit visit(stderr);
  real.verrx(status, format, list);
  __builtin_unreachable();
}

RSOCK_EXPORT void err(int status, const char* format, ...) {
  va_list list;
  va_start(list, format);
  ::verr(status, format, list);
}

RSOCK_EXPORT void errx(int status, const char* format, ...) {
  va_list list;
  va_start(list, format);
  ::verrx(status, format, list);
}

RSOCK_EXPORT void warn(const char* format, ...) {
  va_list list;
  va_start(list, format);
  ::vwarn(format, list);
  va_end(list);
}

RSOCK_EXPORT void warnx(const char* format, ...) {
  va_list list;
  va_start(list, format);
  ::vwarnx(format, list);
  va_end(list);
}

// --- reading ---------------------------------------------------------------------------------

RSOCK_STDIO(char*, fgets, (char* to, int n, FILE* file), file, (to, n, file))
RSOCK_STDIO(char*, fgets_unlocked, (char* to, int n, FILE* file), file, (to, n, file))
RSOCK_STDIO(char*, __fgets_chk, (char* to, size_t size, int n, FILE* file), file,
            (to, size, n, file))
RSOCK_STDIO(char*, __fgets_unlocked_chk, (char* to, size_t size, int n, FILE* file), file,
            (to, size, n, file))
RSOCK_STDIO(int, fgetc, (FILE * file), file, (file))
RSOCK_STDIO(int, getc, (FILE * file), file, (file))
RSOCK_STDIO(int, fgetc_unlocked, (FILE * file), file, (file))
RSOCK_STDIO(int, getc_unlocked, (FILE * file), file, (file))
RSOCK_STDIO(int, __uflow, (FILE * file), file, (file))
RSOCK_STDIO(int, __underflow, (FILE * file), file, (file))
RSOCK_STDIO(int, getchar, (), stdin, ())
RSOCK_STDIO(int, getchar_unlocked, (), stdin, ())
RSOCK_STDIO(size_t, fread, (void* to, size_t size, size_t n, FILE* file), file, (to, size, n, file))
RSOCK_STDIO(size_t, fread_unlocked, (void* to, size_t size, size_t n, FILE* file), file,
            (to, size, n, file))
RSOCK_STDIO(size_t, __fread_chk, (void* to, size_t room, size_t size, size_t n, FILE* file), file,
            (to, room, size, n, file))
RSOCK_STDIO(size_t, __fread_unlocked_chk,
            (void* to, size_t room, size_t size, size_t n, FILE* file), file,
            (to, room, size, n, file))
RSOCK_STDIO(ssize_t, getline, (char** to, size_t* room, FILE* file), file, (to, room, file))
RSOCK_STDIO(ssize_t, getdelim, (char** to, size_t* room, int end, FILE* file), file,
            (to, room, end, file))
RSOCK_STDIO(ssize_t, __getdelim, (char** to, size_t* room, int end, FILE* file), file,
            (to, room, end, file))

RSOCK_STDIO(wchar_t*, fgetws, (wchar_t * to, int n, FILE* file), file, (to, n, file))
RSOCK_STDIO(wchar_t*, fgetws_unlocked, (wchar_t * to, int n, FILE* file), file, (to, n, file))
RSOCK_STDIO(wint_t, fgetwc, (FILE * file), file, (file))
RSOCK_STDIO(wint_t, getwc, (FILE * file), file, (file))
RSOCK_STDIO(wint_t, fgetwc_unlocked, (FILE * file), file, (file))
RSOCK_STDIO(wint_t, getwc_unlocked, (FILE * file), file, (file))
RSOCK_STDIO(wint_t, __wuflow, (FILE * file), file, (file))
RSOCK_STDIO(wint_t, __wunderflow, (FILE * file), file, (file))
RSOCK_STDIO(wint_t, getwchar, (), stdin, ())
RSOCK_STDIO(wint_t, getwchar_unlocked, (), stdin, ())
RSOCK_STDIO(int, __isoc99_vfscanf, (FILE * file, const char* format, va_list list), file,
            (file, format, list))

// Headers give scanf and its kin other names, according to the language.
RSOCK_EXPORT int rsock_vfscanf(FILE* file, const char* format, va_list list) asm("vfscanf");
RSOCK_EXPORT int rsock_vfscanf(FILE* file, const char* format, va_list list) {
  const Visit visit(file);
  return real.vfscanf(file, format, list);
}

RSOCK_EXPORT int rsock_fscanf(FILE* file, const char* format, ...) asm("fscanf");
RSOCK_STDIO_LIST(rsock_fscanf, (FILE * file, const char* format, ...), format, file,
                 vfscanf(file, format, list))
RSOCK_EXPORT int rsock_scanf(const char* format, ...) asm("scanf");
RSOCK_STDIO_LIST(rsock_scanf, (const char* format, ...), format, stdin,
                 vfscanf(stdin, format, list))
RSOCK_EXPORT int rsock_vscanf(const char* format, va_list list) asm("vscanf");
RSOCK_EXPORT int rsock_vscanf(const char* format, va_list list) {
  const Visit visit(stdin);
  return real.vfscanf(stdin, format, list);
}

RSOCK_EXPORT int rsock_isoc99_fscanf(FILE* file, const char* format, ...) asm("__isoc99_fscanf");
RSOCK_STDIO_LIST(rsock_isoc99_fscanf, (FILE * file, const char* format, ...), format, file,
                 __isoc99_vfscanf(file, format, list))
RSOCK_EXPORT int rsock_isoc99_scanf(const char* format, ...) asm("__isoc99_scanf");
RSOCK_STDIO_LIST(rsock_isoc99_scanf, (const char* format, ...), format, stdin,
                 __isoc99_vfscanf(stdin, format, list))
RSOCK_EXPORT int rsock_isoc99_vscanf(const char* format, va_list list) asm("__isoc99_vscanf");
RSOCK_EXPORT int rsock_isoc99_vscanf(const char* format, va_list list) {
  const Visit visit(stdin);
  return real.__isoc99_vfscanf(stdin, format, list);
}
