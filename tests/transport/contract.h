// The fixture of the contract tests: one pair of ends, for every backend that runs here.
// transport.h is the contract; contract_test.cc tests what moves, contract_waiting_test.cc what
// sleeps and wakes.
#pragma once

#include <gtest/gtest.h>

#include <string>

#ifdef RSOCK_TEST_VERBS
#include "tests/transport/verbs_pair.h"
#else
#include "tests/transport/pairs.h"
#endif

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
  /// n bytes are on the way: until they can be read.
  static void arrive(Channel& c, size_t n) {
    EXPECT_TRUE(eventually(c, [&] { return c.rx_available() >= n; }))
        << n << " bytes did not arrive";
  }
  /// The answer to an end or a recall, which may come later.
  static Turn answered(Channel& c, Turn turn) {
    EXPECT_TRUE(eventually(c, [&] {
      return (turn = turn.kind == TurnKind::kOpen ? c.tx_turn() : turn).kind != TurnKind::kOpen;
    }));
    return turn;
  }
};

#ifdef RSOCK_TEST_VERBS
inline auto every_backend() {
  return testing::Values(Backend{"Verbs", make_verbs_pair},
                         Backend{"VerbsWithoutImmediate", make_verbs_pair_without_immediate});
}
#else
inline auto every_backend() {
  return testing::Values(Backend{"Shm", [] { return make_shm_pair(); }},
                         Backend{"Fake", [] { return make_fake(); }});
}
#endif
inline std::string backend_name(const testing::TestParamInfo<Backend>& info) {
  return info.param.name;
}

}  // namespace rsock::transport
