// Matching, beside lists that are searched from the front.
#include <algorithm>
#include <list>
#include <random>

#include "check.h"
#include "message_matching.h"
#include "point_to_point.h"

using namespace lockstep;

namespace {

MessagePtr receive_from(int source, int64_t tag) {
  MessagePtr receive = std::make_shared<Message>();
  receive->peer = source;
  receive->tag = tag;
  return receive;
}

}  // namespace

TEST(a_receive_that_was_removed_matches_nothing) {
  PostedReceives posted;
  const MessagePtr first = receive_from(-1, 3), second = receive_from(-1, 3);
  posted.add(-1, 3, first);
  posted.add(-1, 3, second);
  CHECK(posted.remove(-1, 3, first));
  CHECK(!posted.remove(-1, 3, first));
  CHECK(!posted.remove(0, 3, second));
  CHECK(posted.take(1, 3) == second);
  CHECK(!posted.remove(-1, 3, second));
  CHECK(posted.take(1, 3) == nullptr);
}

TEST(a_message_matches_the_first_receive_that_was_posted) {
  std::mt19937 random(1);
  PostedReceives posted;
  std::list<MessagePtr> expected;
  int matches = 0;
  for (int i = 0; i < 20000; ++i) {
    const int source = static_cast<int>(random() % 3);
    const auto tag = static_cast<int64_t>(random() % 4);
    if (random() % 2) {
      expected.push_back(receive_from(random() % 3 ? source : -1, tag));
      posted.add(expected.back()->peer, tag, expected.back());
      continue;
    }
    const auto found = std::find_if(expected.begin(), expected.end(), [&](const MessagePtr& each) {
      return (each->peer < 0 || each->peer == source) && each->tag == tag;
    });
    const MessagePtr taken = posted.take(source, tag);
    CHECK(taken == (found == expected.end() ? nullptr : *found));
    if (found != expected.end()) expected.erase(found), ++matches;
  }
  CHECK(matches > 1000);
  const std::vector<MessagePtr> rest = posted.take_all();
  CHECK(std::equal(rest.begin(), rest.end(), expected.begin(), expected.end()));
  CHECK(posted.take_all().empty());
}

TEST(a_receive_matches_the_first_message_that_arrived) {
  std::mt19937 random(2);
  UnexpectedMessages unexpected;
  std::list<UnexpectedMessage> expected;
  int matches = 0;
  for (int i = 0; i < 20000; ++i) {
    const auto tag = static_cast<int64_t>(random() % 5);
    if (random() % 2) {
      Cell cell;
      cell.tag = tag;
      cell.count = static_cast<uint64_t>(i);
      expected.push_back({cell, {static_cast<char>(i)}});
      unexpected.add(expected.back());
    } else {
      const auto found =
          std::find_if(expected.begin(), expected.end(),
                       [&](const UnexpectedMessage& each) { return each.cell.tag == tag; });
      const auto taken = unexpected.take(tag);
      CHECK(taken.has_value() == (found != expected.end()));
      if (!taken) continue;
      CHECK(taken->cell.count == found->cell.count && taken->payload == found->payload);
      expected.erase(found), ++matches;
    }
    std::vector<int64_t> tags;
    for (const UnexpectedMessage& each : expected)
      if (std::find(tags.begin(), tags.end(), each.cell.tag) == tags.end() && tags.size() < 3)
        tags.push_back(each.cell.tag);
    CHECK(unexpected.first_tags(3) == tags);
  }
  CHECK(matches > 1000);
}
