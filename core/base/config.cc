#include "core/base/config.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <cstring>

#include "core/base/raw_syscall.h"
#include "core/base/text.h"

namespace rsock {
namespace {

using namespace text;

constexpr char kPrefix[] = "RSOCK_";
constexpr char kDefaultFile[] = "/etc/rsock.conf";
constexpr size_t kMaxFile = 64 * 1024;
constexpr size_t kMaxComplaints = 32;
constexpr size_t kMaxComplaint = 240;

// Static storage throughout: we may run inside the program's malloc, or before it works.
constinit Config g_config;
constinit char g_complaints[kMaxComplaints][kMaxComplaint] = {};
constinit size_t g_complaint_count = 0;
constinit char g_file[kMaxFile] = {};  // BSS: costs memory only where a file is read
constinit char g_log_file[4096] = {};
constinit char g_summary_file[4096] = {};
constinit char g_key_file[4096] = {};

__attribute__((format(printf, 1, 2))) void complain(const char* format, ...) noexcept {
  if (g_complaint_count == kMaxComplaints) return;
  va_list args;
  va_start(args, format);
  vsnprintf(g_complaints[g_complaint_count], kMaxComplaint, format, args);
  va_end(args);
  for (size_t i = 0; i < g_complaint_count; ++i) {
    if (strcmp(g_complaints[i], g_complaints[g_complaint_count]) == 0) return;  // once is enough
  }
  ++g_complaint_count;
}

// --- one setter per kind of value; each leaves the default in place when the value is bad ----

struct Source {
  const char* name;  // "RSOCK_PATH", however it was spelt
  Span value;
};

void bad_word(const Source& s, Span word, const char* const* known, size_t n,
              const char* kept) noexcept {
  complain("%s: unknown value '%.*s'; did you mean '%s'? Using %s", s.name, shown(word), word.data,
           nearest(word, known, n), kept);
}

/// What may be used is worked out at the end, when RSOCK_STRICT is known too.
struct Paths {
  bool automatic = true;
  bool tcp = false, shm = false, rdma = false;
};
constinit Paths g_paths;

void set_path(const Source& s) noexcept {
  static constexpr const char* kKnown[] = {"auto", "tcp", "shm", "rdma"};
  Paths paths{.automatic = false};
  for (Span rest = s.value; rest.size > 0;) {
    const Span word = trim(next_piece(rest, ','));
    if (same_word(word, "auto")) {
      paths.automatic = true;
    } else if (same_word(word, "tcp")) {
      paths.tcp = true;
    } else if (same_word(word, "shm")) {
      paths.shm = true;
    } else if (same_word(word, "rdma")) {
      paths.rdma = true;
    } else {
      bad_word(s, word, kKnown, 4, "auto");
      paths.automatic = true;
    }
  }
  g_paths = paths;
}

void set_strict(const Source& s) noexcept {
  static constexpr const char* kKnown[] = {"0", "1", "no", "yes", "off", "on", "false", "true"};
  for (size_t i = 0; i < 8; ++i) {
    if (same_word(s.value, kKnown[i])) {
      g_config.strict = i % 2 != 0;
      return;
    }
  }
  bad_word(s, s.value, kKnown, 8, "0");
}

void set_log(const Source& s) noexcept {
  static constexpr const char* kKnown[] = {"error", "warn", "info", "debug"};
  g_config.log_stderr = true;
  for (uint8_t i = 0; i < 4; ++i) {
    if (same_word(s.value, kKnown[i])) {
      g_config.log_level = static_cast<LogLevel>(i);
      return;
    }
  }
  bad_word(s, s.value, kKnown, 4, "warn");
}

/// A relative name is taken from where the program is now: it may go elsewhere before we write.
void set_file(const Source& s, char (&out)[4096], const char*& field) noexcept {
  size_t at = 0;
  if (s.value.data[0] != '/') {
    const long n = raw_syscall(SYS_getcwd, reinterpret_cast<long>(out), sizeof(out));
    // The kernel counts the terminator; a directory that is out of reach does not start with '/'.
    at = n > 1 && out[0] == '/' ? static_cast<size_t>(n) - 1 : 0;
    if (at > 1) out[at++] = '/';
  }
  if (at + s.value.size >= sizeof(out)) {
    complain("%s: the name is longer than %zu bytes; ignored", s.name, sizeof(out) - 1);
    return;
  }
  memcpy(out + at, s.value.data, s.value.size);
  out[at + s.value.size] = '\0';
  field = out;
}

void set_log_file(const Source& s) noexcept { set_file(s, g_log_file, g_config.log_file); }
void set_summary(const Source& s) noexcept { set_file(s, g_summary_file, g_config.summary_file); }
void set_key_file(const Source& s) noexcept { set_file(s, g_key_file, g_config.key_file); }

void set_count(const Source& s, uint64_t least, uint64_t most, uint32_t& field) noexcept {
  uint64_t v = 0;
  if (!parse_count(s.value, v) || v < least || v > most) {
    char instead[24] = "the default";  // 0 where the default depends on more than a number
    if (field != 0) snprintf(instead, sizeof(instead), "%u", field);
    complain("%s: '%.*s' is not a number from %llu to %llu; using %s", s.name, shown(s.value),
             s.value.data, static_cast<unsigned long long>(least),
             static_cast<unsigned long long>(most), instead);
    return;
  }
  field = static_cast<uint32_t>(v);
}

void set_lift_bytes(const Source& s) noexcept { set_count(s, 0, UINT32_MAX, g_config.lift_bytes); }
void set_lift_calls(const Source& s) noexcept { set_count(s, 0, UINT32_MAX, g_config.lift_calls); }
void set_spin_us(const Source& s) noexcept { set_count(s, 0, 1'000'000, g_config.spin_us); }

void set_ring_bytes(const Source& s) noexcept {
  uint32_t v = g_config.ring_bytes;
  set_count(s, 64 * 1024, uint64_t{64} << 20, v);
  if ((v & (v - 1)) != 0) {
    complain("%s: %u is not a power of two; using the default", s.name, v);
    return;
  }
  g_config.ring_bytes = v;
}

void set_shm_idle_s(const Source& s) noexcept { set_count(s, 0, 1'000'000, g_config.shm_idle_s); }

void set_rdma_streams(const Source& s) noexcept {
  set_count(s, 0, 1'000'000, g_config.rdma_streams);
}
void set_rdma_idle_s(const Source& s) noexcept { set_count(s, 0, 1'000'000, g_config.rdma_idle_s); }

void set_rdma_immediate(const Source& s) noexcept {
  static constexpr const char* kKnown[] = {"auto", "no"};
  for (size_t i = 0; i < 2; ++i) {
    if (same_word(s.value, kKnown[i])) {
      g_config.rdma_immediate = i == 0;
      return;
    }
  }
  bad_word(s, s.value, kKnown, 2, "auto");
}

struct Key {
  const char* name;
  void (*set)(const Source&) noexcept;  // null: read elsewhere (RSOCK_CONFIG)
};
constexpr Key kKeys[] = {
    {"RSOCK_PATH", set_path},
    {"RSOCK_STRICT", set_strict},
    {"RSOCK_LOG", set_log},
    {"RSOCK_LOG_FILE", set_log_file},
    {"RSOCK_SUMMARY", set_summary},
    {"RSOCK_CONFIG", nullptr},
    {"RSOCK_LIFT_BYTES", set_lift_bytes},
    {"RSOCK_LIFT_CALLS", set_lift_calls},
    {"RSOCK_SPIN_US", set_spin_us},
    {"RSOCK_RING_BYTES", set_ring_bytes},
    {"RSOCK_KEY_FILE", set_key_file},
    {"RSOCK_SHM_IDLE_S", set_shm_idle_s},
    {"RSOCK_RDMA_STREAMS", set_rdma_streams},
    {"RSOCK_RDMA_IDLE_S", set_rdma_idle_s},
    {"RSOCK_RDMA_IMMEDIATE", set_rdma_immediate},
};
constexpr size_t kKeyCount = sizeof(kKeys) / sizeof(kKeys[0]);

const char* nearest_key(Span name) noexcept {
  const char* names[kKeyCount];
  for (size_t i = 0; i < kKeyCount; ++i) names[i] = kKeys[i].name;
  return nearest(name, names, kKeyCount);
}

const Key* find_key(Span name) noexcept {
  for (const Key& key : kKeys) {
    if (name.is(key.name)) return &key;
  }
  return nullptr;
}

// --- the file --------------------------------------------------------------------------------

/// In the file a key may leave out the prefix and the capitals: `lift_bytes` is RSOCK_LIFT_BYTES.
const Key* find_file_key(Span name, char (&full)[40]) noexcept {
  const size_t prefix = sizeof(kPrefix) - 1;
  const bool has_prefix = name.size > prefix && same_word({name.data, prefix}, kPrefix);
  const size_t at = has_prefix ? 0 : prefix;
  if (at + name.size >= sizeof(full)) return nullptr;
  memcpy(full, kPrefix, prefix);
  for (size_t i = 0; i < name.size; ++i) full[at + i] = upper(name.data[i]);
  full[at + name.size] = '\0';
  return find_key(span(full));
}

void apply_file_line(const char* file, int number, Span line) noexcept {
  Span rest = line;
  const Span name = trim(next_piece(rest, '='));
  const Span value = trim(rest);
  if (name.size == line.size || name.size == 0) {
    complain("%s:%d: expected 'key = value', found '%.*s'", file, number, shown(line), line.data);
    return;
  }
  char full[40] = "";
  const Key* key = find_file_key(name, full);
  if (key == nullptr) {
    const char* known = nearest_key(full[0] != '\0' ? span(full) : name);
    complain("%s:%d: unknown key '%.*s'; did you mean %s?", file, number, shown(name), name.data,
             known);
  } else if (key->set == nullptr) {
    complain("%s:%d: %s has a meaning in the environment only", file, number, key->name);
  } else if (value.size > 0) {
    key->set({key->name, value});
  }
}

/// What a `[program NAME]` section compares with: the file name of the executable, or the name it
/// was called by (they differ for scripts' interpreters and multi-call binaries).
bool is_this_program(Span name) noexcept {
  if (name.is(program_invocation_short_name)) return true;
  char exe[1024];
  const long n = raw_syscall(SYS_readlink, reinterpret_cast<long>("/proc/self/exe"),
                             reinterpret_cast<long>(exe), sizeof(exe));
  if (n <= 0 || n == static_cast<long>(sizeof(exe))) return false;
  exe[n] = '\0';
  const char* slash = strrchr(exe, '/');
  return name.is(slash != nullptr ? slash + 1 : exe);
}

/// Whether the lines after this header concern us.
bool enter_section(const char* file, int number, Span line) noexcept {
  if (line.data[line.size - 1] == ']') {
    Span rest = trim({line.data + 1, line.size - 2});
    const Span kind = next_piece(rest, ' ');
    if (same_word(kind, "program") && trim(rest).size > 0) return is_this_program(trim(rest));
  }
  complain("%s:%d: unknown section '%.*s'; did you mean [program NAME]? Its lines are ignored",
           file, number, shown(line), line.data);
  return false;
}

void apply_file(const char* file, Span text) noexcept {
  bool ours = true;
  int number = 0;
  while (text.size > 0) {
    Span line = next_piece(text, '\n');
    ++number;
    line = trim(line);
    if (line.size == 0 || line.data[0] == '#') continue;
    if (line.data[0] == '[') {
      ours = enter_section(file, number, line);
    } else if (ours) {
      apply_file_line(file, number, line);
    }
  }
}

/// Reads up to kMaxFile bytes. Returns how many, or -errno.
long read_file(const char* name) noexcept {
  const long fd = raw_syscall(SYS_openat, AT_FDCWD, reinterpret_cast<long>(name),
                              O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
  if (fd < 0) return fd;
  long size = 0;
  while (size < static_cast<long>(kMaxFile)) {
    const long n = raw_syscall(SYS_read, fd, reinterpret_cast<long>(g_file + size),
                               static_cast<long>(kMaxFile) - size);
    if (n == -EINTR) continue;
    if (n < 0) size = n;
    if (n <= 0) break;
    size += n;
  }
  raw_syscall(SYS_close, fd);
  return size;
}

void load_file(const char* name, bool asked_for) noexcept {
  const long n = read_file(name);
  if (n < 0) {
    const bool plainly_absent = n == -ENOENT || n == -ENOTDIR;
    if (asked_for || !plainly_absent) {
      complain("%s: cannot be read (errno %ld); defaults are used", name, -n);
    }
    return;
  }
  if (n == static_cast<long>(kMaxFile)) {
    complain("%s: longer than %zu bytes; the rest is ignored", name, kMaxFile - 1);
  }
  apply_file(name, {g_file, static_cast<size_t>(n)});
}

// --- the environment -------------------------------------------------------------------------

const char* find_variable(const char* const* environment, const char* name) noexcept {
  const size_t n = strlen(name);
  for (const char* const* e = environment; *e != nullptr; ++e) {
    if (strncmp(*e, name, n) == 0 && (*e)[n] == '=') return *e + n + 1;
  }
  return nullptr;
}

void apply_environment(const char* const* environment) noexcept {
  for (const char* const* e = environment; *e != nullptr; ++e) {
    if (strncmp(*e, kPrefix, sizeof(kPrefix) - 1) != 0) continue;
    Span rest = span(*e);
    const Span name = next_piece(rest, '=');
    const Key* key = find_key(name);
    if (key == nullptr) {
      complain("unknown variable %.*s; did you mean %s?", shown(name), name.data,
               nearest_key(name));
    } else if (key->set != nullptr && trim(rest).size > 0) {
      key->set({key->name, trim(rest)});
    }
  }
}

void work_out_paths() noexcept {
  const Paths& p = g_paths;
  g_config.allow_shm = p.automatic || p.shm;
  g_config.allow_rdma = p.automatic || p.rdma;
  // Strict with "auto" asks for acceleration: staying on TCP is then a failure.
  g_config.allow_tcp = p.tcp || (p.automatic && !g_config.strict);
  g_config.enabled = g_config.allow_shm || g_config.allow_rdma;
}

}  // namespace

void load_config(const char* const* environment) noexcept {
  static constexpr const char* kNothing[] = {nullptr};
  if (environment == nullptr) environment = kNothing;
  g_config = Config{};
  g_paths = Paths{};
  g_complaint_count = 0;
  const char* file = find_variable(environment, "RSOCK_CONFIG");
  const bool asked_for = file != nullptr && *file != '\0';
  load_file(asked_for ? file : kDefaultFile, asked_for);
  apply_environment(environment);
  work_out_paths();
}

const Config& config() noexcept { return g_config; }
size_t config_complaints() noexcept { return g_complaint_count; }
const char* config_complaint(size_t index) noexcept { return g_complaints[index]; }

}  // namespace rsock
