// The memory of other ranks: what a long message is copied from, without a word from the sender.
//
//     in a segment        mapped into this process, where it stays mapped
//     private             process_vm_readv, if the kernel allows it; tried once per rank, on a
//                         number that only the right process has
#pragma once

#include <vector>

#include "channel.h"
#include "group.h"

namespace lockstep {

class PeerMemory {
 public:
  explicit PeerMemory(Group& group);
  // Copies the message that a cell announces. Returns false if this rank cannot read it.
  bool read(int source, const Cell& cell, char* to);

 private:
  enum class Access : uint8_t { unknown, allowed, refused };

  bool read_segment(const Cell& cell, char* to);
  bool read_process(int source, const Cell& cell, char* to);

  Group& group_;
  std::vector<Access> access_;  // to the private memory of each rank
};

}  // namespace lockstep
