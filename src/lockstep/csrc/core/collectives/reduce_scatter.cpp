#include "reduce_scatter.h"

#include <algorithm>

#include "all_reduce.h"

namespace lockstep {

void reduce_scatter(CollectiveCall& call, const std::vector<Block>& send, char* result,
                    size_t count, DataType type, Reduction reduction) {
  const size_t bytes = count * element_size(type);
  ExchangeBlocks blocks{send, std::vector<Block>(send.size(), Block{nullptr, bytes}), false};
  BlockExchange steps(call, blocks);
  steps.publish();
  steps.arrive();
  const TreeReducer reducer = make_rank_reducer(call, type, reduction);
  const size_t rounds = std::max<size_t>(steps.rounds(), 1);
  const size_t width = steps.rounds() ? steps.piece_bytes() : bytes;
  for (size_t k = 0; k < rounds; ++k) {
    if (steps.rounds()) steps.stage_round(k);
    const size_t begin = std::min(bytes, k * width), end = std::min(bytes, (k + 1) * width);
    std::vector<const char*> inputs;
    for (int s = 0; s < call.size(); ++s)
      inputs.push_back(steps.incoming(s, k) + (steps.is_staged(s) ? 0 : begin));
    reducer.run(inputs, {result + begin}, (end - begin) / element_size(type));
  }
  steps.finish();
}

}  // namespace lockstep
