// Options by name, the mixes, and what a life carries.

#include <stdlib.h>
#include <string.h>

#include "stress.h"

namespace stress {

Options options;
Counts counts;

namespace {

constexpr Mix kMixes[] = {
    // name     moves forks spawns signals ctls pokes | pooled by_fork rude urgent quiet
    {"waits", 0, 0, 0, 0, 20, 20, 30, 0, 5, 0, 70},
    {"moves", 300, 0, 0, 0, 50, 20, 30, 0, 5, 5, 40},
    {"signals", 50, 0, 0, 400, 50, 20, 30, 0, 5, 2, 30},
    {"forks", 100, 20, 0, 0, 20, 20, 15, 20, 5, 2, 50},
    {"spawns", 100, 2, 2, 0, 20, 20, 25, 5, 5, 2, 50},
    {"all", 200, 8, 1, 200, 50, 20, 25, 10, 10, 5, 40},
};

}  // namespace

void parse_options(int argc, char** argv, int first) {
  options.mix = kMixes[0];
  for (int i = first; i < argc; ++i) {
    const std::string text = argv[i];
    const size_t equals = text.find('=');
    const std::string key = text.substr(0, equals),
                      value = equals == text.npos ? "" : text.substr(equals + 1);
    if (key == "seed") {
      options.seed = strtoull(value.c_str(), nullptr, 0);
    } else if (key == "slots") {
      options.slots = atoi(value.c_str());
    } else if (key == "seconds") {
      options.seconds = atof(value.c_str());
    } else if (key == "stall") {
      options.stall = atof(value.c_str());
    } else if (key == "mix") {
      const Mix* found = nullptr;
      for (const Mix& mix : kMixes) {
        if (value == mix.name) found = &mix;
      }
      if (found == nullptr) fail("no mix %s", value.c_str());
      options.mix = *found;
    } else {
      fail("unknown option %s", text.c_str());
    }
  }
}

Plan make_plan(int slot, int life) {
  Random random(options.seed, static_cast<uint64_t>(slot), static_cast<uint64_t>(life));
  Plan plan;
  plan.slot = slot;
  plan.life = life;
  plan.lazy = static_cast<int>(random.below(4));
  if (plan.lazy == 3) plan.lazy = 0;
  const size_t kind = random.below(10);
  if (kind < 6) {
    // Turns: what bulk hides (the next byte wakes whom the last one should have woken) stops
    // everything here.
    plan.shape = Shape::kExchange;
    const size_t turns = random.size(400);
    const size_t largest = random.percent(80) ? 4000 : 1 << 19;
    uint64_t client = 0, server = 0;
    for (size_t i = 0; i < turns && client + server < (8u << 20); ++i) {
      client += random.percent(3) ? 0 : random.size(largest);
      server += random.percent(3) ? 0 : random.size(largest);
      plan.from_client.push_back(client);
      plan.from_server.push_back(server);
    }
    plan.client_total = client;
    plan.server_total = server;
    if (random.percent(options.mix.urgent))
      plan.urgent_turn = static_cast<int>(random.below(turns));
  } else {
    plan.shape = kind < 9 ? Shape::kBoth : Shape::kOneWay;
    plan.client_total = random.percent(3) ? 0 : random.size(8 << 20);
    plan.server_total =
        plan.shape == Shape::kOneWay || random.percent(3) ? 0 : random.size(8 << 20);
    if (plan.shape == Shape::kOneWay && random.percent(50))
      std::swap(plan.client_total, plan.server_total);
  }
  if (random.percent(options.mix.rude) && plan.client_total + plan.server_total > 0) {
    plan.rude = 1 + static_cast<int>(random.below(2));
    plan.rude_at = random.below(plan.client_total + plan.server_total);
  }
  return plan;
}

}  // namespace stress
