// Matching: which receive gets which message.
//
// Messages match by (source, tag) in the order of sending, and receives in the order of posting;
// a receive from any rank matches every source. A message without a receive is set aside, and a
// receive looks there first. So at any time no message that was set aside matches a posted
// receive, and each is found by its tag, however many others wait.
//
//     message of (source, tag)  ──>  PostedReceives::take      ──> delivered
//                                    UnexpectedMessages::add   ──> set aside
//     receive of (source, tag)  ──>  UnexpectedMessages::take  ──> delivered
//                                    PostedReceives::add       ──> posted
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "channel.h"

namespace lockstep {

struct Message;

class PostedReceives {
 public:
  // `source` is -1 for a receive from any rank.
  void add(int source, int64_t tag, std::shared_ptr<Message> receive);
  // Removes and returns the first receive that a message matches, or nullptr.
  std::shared_ptr<Message> take(int source, int64_t tag);
  // Removes a receive; returns whether it was there.
  bool remove(int source, int64_t tag, const std::shared_ptr<Message>& receive);
  // Removes and returns all, in the order of posting.
  std::vector<std::shared_ptr<Message>> take_all();

 private:
  struct Posted {
    uint64_t number;
    std::shared_ptr<Message> receive;
  };
  using Queue = std::deque<Posted>;
  uint64_t posted_ = 0;
  std::map<std::pair<int64_t, int>, Queue> queues_;  // by tag and source, none of them empty
};

struct UnexpectedMessage {  // has arrived before its receive was posted
  Cell cell;
  std::vector<char> payload;
};

// Those of one source.
class UnexpectedMessages {
 public:
  void add(UnexpectedMessage message);
  // Removes and returns the first message with a tag.
  std::optional<UnexpectedMessage> take(int64_t tag);
  // Returns different tags, in the order in which their first messages arrived.
  std::vector<int64_t> first_tags(size_t limit) const;

 private:
  struct Arrived {
    uint64_t number;
    UnexpectedMessage message;
  };
  uint64_t arrived_ = 0;
  std::unordered_map<int64_t, std::deque<Arrived>> queues_;  // by tag, none of them empty
};

}  // namespace lockstep
