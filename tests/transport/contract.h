// The fixture of the contract tests: one pair of ends, for every backend that runs here.
// transport.h is the contract; contract_test.cc tests what moves, contract_waiting_test.cc what
// sleeps and wakes.
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "tests/transport/pairs.h"

namespace rsock::transport {

class Contract : public testing::TestWithParam<Backend> {
 protected:
  Pair pair_ = GetParam().make();
  Channel& a_ = *pair_.a;
  Channel& b_ = *pair_.b;

  std::string read_string(Channel& c, size_t n, bool peek = false) {
    std::string s(n, '\0');
    s.resize(read(c, s.data(), n, peek));
    return s;
  }
};

inline auto every_backend() {
  return testing::Values(Backend{"Shm", [] { return make_shm_pair(); }},
                         Backend{"Fake", [] { return make_fake(); }});
}
inline std::string backend_name(const testing::TestParamInfo<Backend>& info) {
  return info.param.name;
}

}  // namespace rsock::transport
