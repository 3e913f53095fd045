// Small operations on text that is not ours and not terminated: what reading a configuration needs.
//
// Purpose: no allocation, no locale, no libc I/O, because the configuration is read inside programs
// whose malloc may not work yet. Ownership: a Span points into memory of somebody else. Thread
// safety: pure functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace rsock::text {

/// A piece of a text that lives elsewhere.
struct Span {
  const char* data = "";
  size_t size = 0;
  bool is(const char* text) const noexcept {
    return strlen(text) == size && memcmp(text, data, size) == 0;
  }
};

inline Span span(const char* text) noexcept { return {text, strlen(text)}; }
inline int shown(Span s) noexcept { return s.size > 80 ? 80 : static_cast<int>(s.size); }
inline bool blank(char c) noexcept { return c == ' ' || c == '\t' || c == '\r'; }
inline char lower(char c) noexcept {
  return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
}
inline char upper(char c) noexcept {
  return c >= 'a' && c <= 'z' ? static_cast<char>(c - 'a' + 'A') : c;
}

inline Span trim(Span s) noexcept {
  while (s.size > 0 && blank(s.data[0])) ++s.data, --s.size;
  while (s.size > 0 && blank(s.data[s.size - 1])) --s.size;
  return s;
}

inline bool same_word(Span a, const char* b) noexcept {
  size_t i = 0;
  for (; i < a.size && b[i] != '\0'; ++i) {
    if (lower(a.data[i]) != lower(b[i])) return false;
  }
  return i == a.size && b[i] == '\0';
}

/// Cuts the next piece before `separator` off the front of `rest`.
inline Span next_piece(Span& rest, char separator) noexcept {
  const void* found = memchr(rest.data, separator, rest.size);
  const size_t n = found != nullptr
                       ? static_cast<size_t>(static_cast<const char*>(found) - rest.data)
                       : rest.size;
  const Span piece{rest.data, n};
  const size_t skip = n < rest.size ? n + 1 : n;
  rest = {rest.data + skip, rest.size - skip};
  return piece;
}

/// Levenshtein's distance, letters compared without case; names longer than 31 count as far away.
inline size_t edit_distance(Span a, const char* b) noexcept {
  constexpr size_t kMost = 32;
  const size_t n = strlen(b);
  if (a.size >= kMost || n >= kMost) return kMost;
  size_t row[kMost];
  for (size_t j = 0; j <= n; ++j) row[j] = j;
  for (size_t i = 1; i <= a.size; ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= n; ++j) {
      const size_t substitute = diagonal + (lower(a.data[i - 1]) == lower(b[j - 1]) ? 0 : 1);
      diagonal = row[j];
      const size_t insert_or_delete = (row[j] < row[j - 1] ? row[j] : row[j - 1]) + 1;
      row[j] = substitute < insert_or_delete ? substitute : insert_or_delete;
    }
  }
  return row[n];
}

inline const char* nearest(Span word, const char* const* known, size_t n) noexcept {
  const char* best = known[0];
  size_t least = ~size_t{0};
  for (size_t i = 0; i < n; ++i) {
    const size_t d = edit_distance(word, known[i]);
    if (d < least) {
      least = d;
      best = known[i];
    }
  }
  return best;
}

/// A count with an optional K, M or G (powers of 1,024).
inline bool parse_count(Span text, uint64_t& out) noexcept {
  uint64_t v = 0;
  size_t i = 0;
  for (; i < text.size && text.data[i] >= '0' && text.data[i] <= '9'; ++i) {
    v = v * 10 + static_cast<uint64_t>(text.data[i] - '0');
    if (v > (uint64_t{1} << 40)) return false;
  }
  if (i == 0 || i + 1 < text.size) return false;
  if (i < text.size) {
    switch (lower(text.data[i])) {
      case 'g':
        v <<= 10;
        [[fallthrough]];
      case 'm':
        v <<= 10;
        [[fallthrough]];
      case 'k':
        v <<= 10;
        break;
      default:
        return false;
    }
  }
  out = v;
  return true;
}

}  // namespace rsock::text
