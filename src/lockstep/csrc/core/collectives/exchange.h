// Exchange: ranks send blocks to other ranks.
//
// Broadcast, all-gather, gather, scatter and all-to-all (equal and unequal) are one pattern:
// blocks s -> d, which the receiver d copies. In reduce-scatter (reduce_scatter.h) it reduces
// them instead. Only what a rank publishes differs:
//
//     slot     | sends | receives | handles | blocks ... |    if it fits: one barrier
//     direct   the blocks are in a segment; receivers copy from there, then a barrier before
//              the owner may change them
//     staged   in pieces through the staging buffers, one barrier per round; the next piece
//              is copied in while slower receivers still copy the last one out
//
//              one block for all ranks   | a piece as large as the buffer |
//              a block for each rank     | for 0 | for 2 | for 3 | ...    |   of rank 1
//
//              written with ordinary stores or with stores that bypass the caches
//              (auto_tuner.h)
//
// If the blocks of all ranks fill the last-level cache, receivers copy with non-temporal stores.
//
// Each rank chooses its own route. Every rank compares the tables of sizes: s sends to d what
// d expects, or all ranks throw. Cost for S bytes read by n ranks: direct nS read and nS
// written; staged the same again in the caches.
#pragma once

#include <string>
#include <vector>

#include "../collective_call.h"

namespace lockstep {

struct Block {
  char* data = nullptr;
  size_t bytes = 0;
};

struct ExchangeBlocks {
  std::vector<Block> send;      // to each rank
  std::vector<Block> receive;   // from each rank; in a reduce-scatter only the sizes count
  bool is_same_to_all = false;  // all blocks sent are the same one, or empty
};

void exchange(CollectiveCall& call, const ExchangeBlocks& blocks);

// The steps of an exchange. To be called in this order by every rank: publish, arrive,
// stage_round for each round, finish.
class BlockExchange {
 public:
  BlockExchange(CollectiveCall& call, const ExchangeBlocks& blocks)
      : call_(call), blocks_(blocks), size_(call.size()), rank_(call.rank()) {}

  void publish();
  void arrive();
  // Makes round k of all staged blocks readable.
  void stage_round(size_t k);
  void finish();

  size_t rounds() const { return rounds_; }
  size_t piece_bytes() const;  // of a block, in one round
  bool is_staged(int source);
  size_t expected_bytes(int source) const { return blocks_.receive[source].bytes; }
  // Returns what `source` sends to this rank: the whole block, or the piece of round k if
  // it is staged.
  const char* incoming(int source, size_t k);

 private:
  // The tables at the start of a rank's slot, each indexed by rank.
  uint64_t* sends(int rank) { return reinterpret_cast<uint64_t*>(call_.slot(rank)); }
  uint64_t* receives(int rank) { return sends(rank) + size_; }
  BufferHandle* handles(int rank) {
    return reinterpret_cast<BufferHandle*>(receives(rank) + size_);
  }
  // "rank 1 sends 1 element to rank 0, which expects 2"
  std::string describe_difference(int source, int target);
  size_t table_bytes() const;
  Route choose_route();
  void fill_slot();
  size_t slot_offset(int source);
  size_t staging_offset(int source, int target) const;

  CollectiveCall& call_;
  const ExchangeBlocks& blocks_;
  const int size_, rank_;
  uint32_t first_round_ = 0;
  size_t rounds_ = 0;
  bool is_any_direct_ = false;
  AutoTuner* store_tuner_ = nullptr;  // if any block is staged
  Clock::time_point begun_;           // after the last rank has arrived
};

}  // namespace lockstep
