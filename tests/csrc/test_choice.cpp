// Choosing between two ways, with times that the test makes up.
#include "check.h"
#include "choice.h"

using lockstep::Choice;

namespace {

// Lets `calls` calls take times[way], and returns how many went each way.
std::array<int, 2> go(Choice& choice, int calls, std::array<double, 2> times) {
  std::array<int, 2> gone{};
  for (int call = 0; call < calls; ++call) {
    const int way = choice.way();
    ++gone[static_cast<size_t>(way)];
    choice.took(times[static_cast<size_t>(way)]);
  }
  return gone;
}

}  // namespace

TEST(both_ways_are_tried_before_one_is_chosen) {
  Choice choice;
  CHECK((go(choice, 8, {5, 3}) == std::array<int, 2>{4, 4}));
  CHECK(choice.better() == 1);
  CHECK((go(choice, 24, {5, 3}) == std::array<int, 2>{0, 24}));
}

TEST(the_worse_way_costs_two_calls_of_64) {
  for (int worse : {0, 1}) {
    Choice choice;
    const std::array<double, 2> times{worse == 0 ? 9.0 : 1.0, worse == 1 ? 9.0 : 1.0};
    go(choice, 64, times);
    CHECK(go(choice, 6400, times)[static_cast<size_t>(worse)] == 200);
  }
}

TEST(a_change_is_followed_after_two_trials) {
  Choice choice;
  go(choice, 1024, {1, 2});
  CHECK(choice.better() == 0);
  go(choice, 3 * 64, {4, 2});  // the chosen way became slow
  CHECK(choice.better() == 1);
  go(choice, 3 * 64, {1, 2});
  CHECK(choice.better() == 0);
  go(choice, 3 * 64, {1, 0.5});  // the other became fast
  CHECK(choice.better() == 1);
}

TEST(a_way_that_becomes_much_slower_is_left_after_three_calls) {
  Choice choice;
  go(choice, 1024 + 6, {2, 1});
  CHECK((go(choice, 2, {2, 5}) == std::array<int, 2>{0, 2}));
  go(choice, 1, {2, 5});
  CHECK((go(choice, 10, {2, 5}) == std::array<int, 2>{10, 0}));
  go(choice, 3 * 64, {2, 1});  // taken again when its trials show that it may be
  CHECK(choice.better() == 1);
}

TEST(a_way_that_becomes_a_little_slower_is_kept_until_its_trials) {
  Choice choice;
  go(choice, 1024 + 6, {2, 1});
  CHECK((go(choice, 20, {2, 2.9}) == std::array<int, 2>{0, 20}));
}

TEST(every_third_call_may_be_interrupted) {
  Choice choice;
  go(choice, 1024 + 6, {2, 1});
  for (int call = 0; call < 18; ++call) {
    CHECK(choice.way() == 1);
    choice.took(call % 3 == 0 ? 500 : 1);
  }
}

TEST(one_call_that_was_interrupted_changes_nothing) {
  Choice choice;
  go(choice, 1024, {1, 2});
  for (int call = 0; call < 640; ++call)  // every third trial of the better way
    choice.took(choice.way() == 1 ? 2 : call % 32 < 2 && call / 64 % 3 == 0 ? 500 : 1);
  CHECK(choice.better() == 0);
}

TEST(one_lucky_call_of_the_worse_way_changes_nothing) {
  Choice choice;
  go(choice, 1024, {1, 2});
  for (int call = 0; call < 640; ++call) {
    choice.took(choice.way() == 0 ? 1 : call / 64 % 3 == 0 ? 0.1 : 2);
    CHECK(choice.better() == 0);
  }
}

TEST(the_first_call_of_a_trial_is_not_counted) {
  Choice choice;
  int before = -1;
  for (int call = 0; call < 1000; ++call) {
    const int way = choice.way();
    choice.took(way != before ? 100 : way == 0 ? 1 : 2);
    before = way;
  }
  CHECK(choice.better() == 0);
}

TEST(all_ranks_try_the_same_way_in_the_same_call) {
  Choice a, b;  // they see the opposite
  int tried = 0;
  for (int call = 0; call < 1000; ++call) {
    if (call < 8 || call % 32 < 2) {
      CHECK(a.way() == b.way());
      ++tried;
    }
    a.took(a.way() == 0 ? 1 : 2);
    b.took(b.way() == 0 ? 2 : 1);
  }
  CHECK(tried == 70 && a.better() == 0 && b.better() == 1);
}
