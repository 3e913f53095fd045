// Connections that lead from one host to another, and those that can't, for every message that
// carries one.
#pragma once

#include <functional>
#include <utility>
#include <vector>

#include "core/wire/four_tuple.h"

namespace rsock::wire {

inline Endpoint v4_end(uint8_t a, uint8_t b, uint8_t c, uint8_t d, uint16_t port) {
  return Endpoint{{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, a, b, c, d}, port};
}
inline FourTuple across_hosts() {
  return {v4_end(10, 0, 0, 2, 43210), v4_end(10, 0, 0, 1, 5201), 0};
}
inline FourTuple across_hosts_v6() {
  FourTuple t{{{0x20, 1, 0xd, 0xb8}, 65535}, {{0x20, 1, 0xd, 0xb8}, 1}, 0};
  t.local.address[15] = 7;
  t.remote.address[15] = 9;
  return t;
}
inline FourTuple over_loopback() {
  return {v4_end(127, 0, 0, 1, 40000), v4_end(127, 0, 0, 1, 80), 0};
}

/// Why it is refused, and the connection.
inline std::vector<std::pair<const char*, FourTuple>> impossible_tuples() {
  std::vector<std::pair<const char*, FourTuple>> all;
  const auto add = [&](const char* why, FourTuple t, const std::function<void(FourTuple&)>& f) {
    f(t);
    all.emplace_back(why, t);
    all.emplace_back(why, t.reverse());
  };
  const FourTuple four = across_hosts(), six = across_hosts_v6();
  add("port 0", four, [](FourTuple& t) { t.local.port = 0; });
  add("port 0", six, [](FourTuple& t) { t.remote.port = 0; });
  add("ends of two families", four, [](FourTuple& t) { t.local.address[3] = 1; });
  add("a connection to itself", four, [](FourTuple& t) { t.local = t.remote; });
  add("unspecified address", four, [](FourTuple& t) { t.local = v4_end(0, 0, 0, 0, 1); });
  add("unspecified address", six, [](FourTuple& t) { t.local.address = {}; });
  add("multicast address", four, [](FourTuple& t) { t.local = v4_end(224, 0, 0, 1, 1); });
  add("multicast address", four, [](FourTuple& t) { t.local = v4_end(255, 255, 255, 255, 1); });
  add("multicast address", six, [](FourTuple& t) { t.local.address[0] = 0xff; });
  add("link-local address", six, [](FourTuple& t) { t.local.address = {0xfe, 0xbf, 1}; });
  add("loopback at one end only", four, [](FourTuple& t) { t.local = v4_end(127, 9, 9, 9, 1); });
  add("loopback at one end only", six, [](FourTuple& t) {
    t.local.address = {};
    t.local.address[15] = 1;
  });
  return all;
}

}  // namespace rsock::wire
