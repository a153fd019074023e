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
  // Copies the message that a cell announces. Returns false if it is not in a segment, or the
  // segment cannot be mapped.
  bool read_segment(const Cell& cell, char* to);
  // Returns whether this rank may read the private memory of another one.
  bool may_read(int source);
  // Copies private memory of another rank. Throws CommError if that fails: it has died.
  void read(int source, uint64_t address, char* to, uint64_t bytes);

 private:
  [[noreturn]] void throw_unread(int source);
  enum class Access : uint8_t { unknown, allowed, refused };

  Group& group_;
  std::vector<Access> access_;  // to the private memory of each rank
};

}  // namespace lockstep
