// Choosing between two variants, with made-up times.
#include "auto_tuner.h"
#include "check.h"

using lockstep::AutoTuner;

namespace {

// Records `calls` calls that take times[variant] and returns how many used each variant.
std::array<int, 2> time_calls(AutoTuner& tuner, int calls, std::array<double, 2> times) {
  std::array<int, 2> counts{};
  for (int call = 0; call < calls; ++call) {
    const int variant = tuner.choose();
    ++counts[static_cast<size_t>(variant)];
    tuner.record(times[static_cast<size_t>(variant)]);
  }
  return counts;
}

}  // namespace

TEST(both_variants_are_tried_before_one_is_chosen) {
  AutoTuner tuner;
  CHECK((time_calls(tuner, 8, {5, 3}) == std::array<int, 2>{4, 4}));
  CHECK(tuner.faster() == 1);
  CHECK((time_calls(tuner, 24, {5, 3}) == std::array<int, 2>{0, 24}));
}

TEST(the_slower_variant_costs_two_calls_of_64) {
  for (int worse : {0, 1}) {
    AutoTuner tuner;
    const std::array<double, 2> times{worse == 0 ? 9.0 : 1.0, worse == 1 ? 9.0 : 1.0};
    time_calls(tuner, 64, times);
    CHECK(time_calls(tuner, 6400, times)[static_cast<size_t>(worse)] == 200);
  }
}

TEST(a_change_is_followed_after_two_trials) {
  AutoTuner tuner;
  time_calls(tuner, 1024, {1, 2});
  CHECK(tuner.faster() == 0);
  time_calls(tuner, 3 * 64, {4, 2});  // the chosen variant becomes slow
  CHECK(tuner.faster() == 1);
  time_calls(tuner, 3 * 64, {1, 2});
  CHECK(tuner.faster() == 0);
  time_calls(tuner, 3 * 64, {1, 0.5});  // the other one becomes fast
  CHECK(tuner.faster() == 1);
}

TEST(a_variant_that_becomes_much_slower_is_dropped_after_three_calls) {
  AutoTuner tuner;
  time_calls(tuner, 1024 + 6, {2, 1});
  CHECK((time_calls(tuner, 2, {2, 5}) == std::array<int, 2>{0, 2}));
  time_calls(tuner, 1, {2, 5});
  CHECK((time_calls(tuner, 10, {2, 5}) == std::array<int, 2>{10, 0}));
  time_calls(tuner, 3 * 64, {2, 1});  // chosen again after its next trials
  CHECK(tuner.faster() == 1);
}

TEST(a_variant_that_becomes_a_little_slower_is_kept_until_its_trials) {
  AutoTuner tuner;
  time_calls(tuner, 1024 + 6, {2, 1});
  CHECK((time_calls(tuner, 20, {2, 2.9}) == std::array<int, 2>{0, 20}));
}

TEST(one_slow_call_in_three_changes_nothing) {
  AutoTuner tuner;
  time_calls(tuner, 1024 + 6, {2, 1});
  for (int call = 0; call < 18; ++call) {
    CHECK(tuner.choose() == 1);
    tuner.record(call % 3 == 0 ? 500 : 1);
  }
}

TEST(one_slow_trial_in_three_changes_nothing) {
  AutoTuner tuner;
  time_calls(tuner, 1024, {1, 2});
  for (int call = 0; call < 640; ++call)  // every third trial of the faster variant
    tuner.record(tuner.choose() == 1 ? 2 : call % 32 < 2 && call / 64 % 3 == 0 ? 500 : 1);
  CHECK(tuner.faster() == 0);
}

TEST(one_fast_call_of_the_slower_variant_changes_nothing) {
  AutoTuner tuner;
  time_calls(tuner, 1024, {1, 2});
  for (int call = 0; call < 640; ++call) {
    tuner.record(tuner.choose() == 0 ? 1 : call / 64 % 3 == 0 ? 0.1 : 2);
    CHECK(tuner.faster() == 0);
  }
}

TEST(the_first_call_of_a_trial_is_not_timed) {
  AutoTuner tuner;
  int before = -1;
  for (int call = 0; call < 1000; ++call) {
    const int variant = tuner.choose();
    tuner.record(variant != before ? 100 : variant == 0 ? 1 : 2);
    before = variant;
  }
  CHECK(tuner.faster() == 0);
}

TEST(all_ranks_try_the_same_variant_in_the_same_call) {
  AutoTuner a, b;  // they measure opposite times
  int tried = 0;
  for (int call = 0; call < 1000; ++call) {
    if (call < 8 || call % 32 < 2) {
      CHECK(a.choose() == b.choose());
      ++tried;
    }
    a.record(a.choose() == 0 ? 1 : 2);
    b.record(b.choose() == 0 ? 2 : 1);
  }
  CHECK(tried == 70 && a.faster() == 0 && b.faster() == 1);
}
