#include "all_gather_bytes.h"

#include <cstring>

#include "../errors.h"

namespace lockstep {

using Length = uint64_t;

size_t longest_message(const Layout& layout) { return layout.slot_bytes - sizeof(Length); }

std::vector<std::string_view> all_gather_bytes(CollectiveCall& call, std::string_view message) {
  const size_t longest = longest_message(call.group().layout());
  Length length = message.size();
  if (length > longest)
    throw UsageError("all_gather_bytes: a message of " + std::to_string(length) +
                     " bytes is longer than " + std::to_string(longest));
  std::memcpy(call.own_slot(), &length, sizeof length);
  std::memcpy(call.own_slot() + sizeof length, message.data(), message.size());
  call.arrive();
  std::vector<std::string_view> messages;
  for (int rank = 0; rank < call.size(); ++rank) {
    std::memcpy(&length, call.slot(rank), sizeof length);
    if (length > longest)
      throw CommError(call.group().format_rank(rank) +
                      " wrote an invalid length into shared memory");
    messages.emplace_back(call.slot(rank) + sizeof length, length);
  }
  return messages;
}

}  // namespace lockstep
