// All-gather of short messages, whose lengths only their senders know.
//
//     slot r     | length | message ... |        one barrier
//
// For messages that do not fit in a slot, send the lengths with it, then call torch's all-gather.
#pragma once

#include <string_view>
#include <vector>

#include "../collective_call.h"

namespace lockstep {

// Returns the bytes of the longest message.
size_t longest_message(const Layout& layout);

// Returns the messages in rank order, which are valid until the group's call after the next one.
// Throws UsageError, before this rank arrives, if its message is too long.
std::vector<std::string_view> all_gather_bytes(CollectiveCall& call, std::string_view message);

}  // namespace lockstep
