#include "bench_util.h"

#include <unistd.h>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>

namespace bench {

void die(const char* what) {
  std::fprintf(stderr, "%s: %s\n", what, std::strerror(errno));
  std::exit(1);
}

void die_plain(const std::string& what) {
  std::fprintf(stderr, "%s\n", what.c_str());
  std::exit(1);
}

void die_usage(const std::string& what) {
  std::fprintf(stderr, "%s\n", what.c_str());
  std::exit(2);
}

uint64_t now_ns() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return static_cast<uint64_t>(time.tv_sec) * 1'000'000'000u + static_cast<uint64_t>(time.tv_nsec);
}

Args::Args(int argc, char** argv, int first) {
  for (int i = first; i < argc; i += 2) {
    if (std::strncmp(argv[i], "--", 2) != 0 || i + 1 >= argc)
      die_usage(std::string("expected --name value, got ") + argv[i]);
    given_[argv[i]] = argv[i + 1];
  }
}

std::string Args::text(const std::string& name, const std::string& fallback) {
  auto found = given_.find(name);
  if (found == given_.end()) return fallback;
  std::string value = found->second;
  given_.erase(found);
  return value;
}

uint64_t Args::size(const std::string& name, uint64_t fallback) {
  std::string value = text(name, "");
  if (value.empty()) return fallback;
  char* end = nullptr;
  uint64_t number = std::strtoull(value.c_str(), &end, 10);
  if (*end == 'K')
    number <<= 10, ++end;
  else if (*end == 'M')
    number <<= 20, ++end;
  else if (*end == 'G')
    number <<= 30, ++end;
  if (end == value.c_str() || *end != '\0') die_usage(name + ": not a size: " + value);
  return number;
}

double Args::real(const std::string& name, double fallback) {
  std::string value = text(name, "");
  if (value.empty()) return fallback;
  char* end = nullptr;
  double number = std::strtod(value.c_str(), &end);
  if (end == value.c_str() || *end != '\0') die_usage(name + ": not a number: " + value);
  return number;
}

void Args::finish() {
  alarm(static_cast<unsigned>(size("--timeout", 120)));
  if (!given_.empty()) die_usage("unknown argument " + given_.begin()->first);
}

void JsonLine::key(std::string_view name) {
  body_ += body_.empty() ? "{\"" : ", \"";
  body_.append(name).append("\": ");
}

JsonLine& JsonLine::add(std::string_view name, std::string_view value) {
  key(name);
  body_ += '"';
  body_.append(value);  // our own words only: nothing that needs escaping
  body_ += '"';
  return *this;
}

JsonLine& JsonLine::add(std::string_view name, double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.6g", std::isfinite(value) ? value : 0.0);
  key(name);
  body_ += text;
  return *this;
}

JsonLine& JsonLine::add(std::string_view name, uint64_t value) {
  key(name);
  body_ += std::to_string(value);
  return *this;
}

JsonLine& JsonLine::add(std::string_view name, bool value) {
  key(name);
  body_ += value ? "true" : "false";
  return *this;
}

void JsonLine::print() {
  std::printf("%s}\n", body_.c_str());
  std::fflush(stdout);
}

}  // namespace bench
