#include "all_reduce.h"

#include <algorithm>
#include <cstring>

namespace lockstep {
namespace {

struct Job {
  Turn& turn;
  char* data;
  size_t count;
  Type type;
  Reduction reduction;
  int root;

  size_t item() const { return bytes_of(type); }
  bool gets() const { return root < 0 || root == turn.rank(); }

  Fold fold() const {
    Arithmetic arithmetic{type, reduction, false, 1, {}};
    if (reduction == Reduction::avg) arithmetic.divisor = turn.size();
    if (reduction == Reduction::premul_sum)
      for (int rank = 0; rank < turn.size(); ++rank)
        arithmetic.factors.push_back(turn.call(rank).factor);
    return Fold(tree_steps(turn.size()), std::move(arithmetic));
  }

  void small() {
    stream_bytes(turn.my_slot(), data, count * item());
    turn.arrive();
    if (!gets()) return;
    std::vector<const char*> inputs;
    for (int rank = 0; rank < turn.size(); ++rank) inputs.push_back(turn.slot(rank));
    fold().run(inputs, {data}, count);
  }

  void direct() {
    const Slice slice = slice_of(count, turn.size(), turn.rank(), item());
    std::vector<const char*> inputs;
    std::vector<char*> outputs;
    for (int rank = 0; rank < turn.size(); ++rank) {
      char* start = rank == turn.rank()
                        ? data
                        : turn.group().neighbours().at(turn.call(rank).place, count * item());
      inputs.push_back(start + slice.begin * item());
      if (root >= 0 && root != rank) continue;
      // My own first: it stays in this core's cache.
      outputs.insert(rank == turn.rank() ? outputs.begin() : outputs.end(),
                     start + slice.begin * item());
    }
    if (slice.size()) fold().run(inputs, outputs, slice.size());
    turn.sync();
  }

  // -- staged: piece k is elements [k * width, (k + 1) * width) --

  size_t width = 0;
  uint32_t first = 0;  // round of piece 0
  bool past_caches = true;  // how stages are written

  Slice piece(size_t k) const { return {k * width, std::min(count, (k + 1) * width)}; }

  void copy_in(size_t k) {
    const Slice whole = piece(k);
    char* stage = turn.stage(turn.rank(), first + static_cast<uint32_t>(k));
    for (int rank = 0; rank < turn.size(); ++rank) {
      if (rank == turn.rank()) continue;
      const Slice slice = slice_of(whole.size(), turn.size(), rank, item());
      (past_caches ? stream_bytes : copy_bytes)(stage + slice.begin * item(),
                                                data + (whole.begin + slice.begin) * item(),
                                                slice.size() * item());
    }
  }

  void combine(size_t k, const Fold& fold) {
    const Slice whole = piece(k);
    const Slice slice = slice_of(whole.size(), turn.size(), turn.rank(), item());
    if (!slice.size()) return;
    std::vector<const char*> inputs;
    char* own = data + (whole.begin + slice.begin) * item();
    char* shared = nullptr;
    for (int rank = 0; rank < turn.size(); ++rank) {
      char* stage = turn.stage(rank, first + static_cast<uint32_t>(k)) + slice.begin * item();
      if (rank == turn.rank()) shared = stage;
      inputs.push_back(rank == turn.rank() ? own : stage);
    }
    std::vector<char*> outputs;
    if (gets()) outputs.push_back(own);
    if (root < 0 ? turn.size() > 1 : !gets()) outputs.push_back(shared);
    fold.run(inputs, outputs, slice.size(), past_caches);
  }

  void copy_out(size_t k) {
    if (!gets()) return;
    const Slice whole = piece(k);
    for (int ahead = 1; ahead < turn.size(); ++ahead) {
      const int rank = (turn.rank() + ahead) % turn.size();
      const Slice slice = slice_of(whole.size(), turn.size(), rank, item());
      const char* stage = turn.stage(rank, first + static_cast<uint32_t>(k));
      copy_bytes(data + (whole.begin + slice.begin) * item(), stage + slice.begin * item(),
                  slice.size() * item());
    }
  }

  void staged(bool copied) {
    const size_t pieces = (count + width - 1) / width;
    turn.use_rounds(static_cast<uint32_t>(pieces));
    const Fold sum = fold();
    if (!copied) copy_in(0);
    // Barrier A of piece 0 was the arrival, where everybody had copied before it.
    if (!all_copied()) turn.sync();
    for (size_t k = 0; k < pieces; ++k) {
      combine(k, sum);
      const uint32_t b = turn.post(), next = b + 1;
      if (k + 1 < pieces) {
        copy_in(k + 1);
        turn.post();  // A of piece k + 1
      }
      turn.wait_step(b);
      copy_out(k);
      if (k + 1 < pieces) turn.wait_step(next);
    }
  }

  bool all_copied() {
    for (int rank = 0; rank < turn.size(); ++rank)
      if (turn.call(rank).route != Route::staged) return false;
    return true;
  }

  bool all_shared() {
    for (int rank = 0; rank < turn.size(); ++rank)
      if (turn.call(rank).route != Route::direct) return false;
    return true;
  }

  void large() {
    // As few pieces as the stages allow, and alike: each is two waits, and a line that
    // the other core just wrote costs more than one that has left its cache since.
    const size_t line = kLine / item(), stage = turn.group().layout().stage_bytes;
    const size_t pieces = (count * item() + stage - 1) / stage;
    width = ((count + pieces - 1) / pieces + line - 1) / line * line;
    first = turn.round();
    Call& mine = turn.mine();
    mine.place = Heap::here().find(data, count * item());
    mine.route = mine.place.shared() ? Route::direct : Route::staged;
    const bool copied = mine.route == Route::staged;
    Choice& stores = turn.group().stores(mine.op, count * item());
    past_caches = stores.way() == 0;
    const auto begun = Clock::now();
    if (copied) copy_in(0);
    const auto copying = Clock::now() - begun;
    turn.arrive();
    if (all_shared()) return direct();
    const auto arrived = Clock::now();
    staged(copied);
    // Without the wait for those who came late, which says nothing about the stores.
    stores.took(std::chrono::duration<double>(copying + (Clock::now() - arrived)).count());
  }
};

// One barrier costs less than the additions that it repeats on every rank.
size_t small_limit(const Group& group) {
  return std::min<size_t>(group.layout().slot_bytes, (size_t{64} << 10) / group.size());
}

}  // namespace

void all_reduce(Turn& turn, void* data, size_t count, Type type, Reduction reduction, int root) {
  Job job{turn, static_cast<char*>(data), count, type, reduction, root};
  if (count * job.item() <= small_limit(turn.group()))
    job.small();
  else
    job.large();
}

}  // namespace lockstep
