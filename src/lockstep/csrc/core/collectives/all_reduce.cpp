#include "all_reduce.h"

#include <algorithm>
#include <cstring>

namespace lockstep {
namespace {

class AllReduce {
 public:
  AllReduce(CollectiveCall& call, char* data, size_t count, DataType type, Reduction reduction,
            int root)
      : call_(call),
        data_(data),
        count_(count),
        item_(element_size(type)),
        type_(type),
        reduction_(reduction),
        root_(root) {}

  void run() {
    // One barrier costs less than the additions that it repeats on every rank.
    const size_t small_limit =
        std::min<size_t>(call_.group().layout().slot_bytes, (size_t{64} << 10) / call_.size());
    if (count_ * item_ <= small_limit) return run_small();
    CallInfo& own = call_.own_info();
    own.buffer = Heap::instance().find(data_, count_ * item_);
    own.route = own.buffer.is_shared() ? Route::direct : Route::staged;
    choose_piece_size();
    AutoTuner& tuner = call_.group().store_tuner(own.op, count_ * item_);
    bypass_caches_ = tuner.choose() == 0;
    const bool is_staged = own.route == Route::staged;
    const auto begun = Clock::now();
    if (is_staged) copy_in(0);
    const auto copying = Clock::now() - begun;
    call_.arrive();
    if (have_all_route(Route::direct)) return run_direct();
    const auto arrived = Clock::now();
    run_staged(is_staged);
    // Without the wait for late ranks, which says nothing about the stores.
    tuner.record(std::chrono::duration<double>(copying + (Clock::now() - arrived)).count());
  }

 private:
  bool gets_result() const { return root_ < 0 || root_ == call_.rank(); }

  bool have_all_route(Route route) {
    for (int rank = 0; rank < call_.size(); ++rank)
      if (call_.info(rank).route != route) return false;
    return true;
  }

  void run_small() {
    stream_bytes(call_.own_slot(), data_, count_ * item_);
    call_.arrive();
    if (!gets_result()) return;
    std::vector<const char*> inputs;
    for (int rank = 0; rank < call_.size(); ++rank) inputs.push_back(call_.slot(rank));
    make_rank_reducer(call_, type_, reduction_).run(inputs, {data_}, count_);
  }

  void run_direct() {
    const Slice slice = slice_of(count_, call_.size(), call_.rank(), item_);
    std::vector<const char*> inputs;
    std::vector<char*> outputs;
    for (int rank = 0; rank < call_.size(); ++rank) {
      char* start =
          rank == call_.rank() ? data_ : call_.map(rank, call_.info(rank).buffer, count_ * item_);
      inputs.push_back(start + slice.begin * item_);
      if (root_ >= 0 && root_ != rank) continue;
      // This rank's own tensor first: it stays in this core's cache.
      outputs.insert(rank == call_.rank() ? outputs.begin() : outputs.end(),
                     start + slice.begin * item_);
    }
    if (slice.size())
      make_rank_reducer(call_, type_, reduction_).run(inputs, outputs, slice.size());
    call_.sync();
  }

  // ---- staged: piece k is elements [k * piece_, (k + 1) * piece_) ----

  // As few pieces as the staging buffers allow, all of one size: each piece costs two waits,
  // and a cache line that another core has just written is slower to read than one that has
  // left that core's cache since.
  void choose_piece_size() {
    const size_t line = kCacheLine / item_;
    const size_t staging = call_.group().layout().staging_bytes;
    const size_t pieces = (count_ * item_ + staging - 1) / staging;
    piece_ = ((count_ + pieces - 1) / pieces + line - 1) / line * line;
    first_round_ = call_.round();
  }

  Slice piece(size_t k) const { return {k * piece_, std::min(count_, (k + 1) * piece_)}; }

  char* staging_buffer(int rank, size_t k) {
    return call_.staging_buffer(rank, first_round_ + static_cast<uint32_t>(k));
  }

  void copy_in(size_t k) {
    const Slice whole = piece(k);
    char* staging = staging_buffer(call_.rank(), k);
    for (int rank = 0; rank < call_.size(); ++rank) {
      if (rank == call_.rank()) continue;
      const Slice slice = slice_of(whole.size(), call_.size(), rank, item_);
      (bypass_caches_ ? stream_bytes : copy_bytes)(staging + slice.begin * item_,
                                                   data_ + (whole.begin + slice.begin) * item_,
                                                   slice.size() * item_);
    }
  }

  void combine(size_t k, const TreeReducer& reducer) {
    const Slice whole = piece(k);
    const Slice slice = slice_of(whole.size(), call_.size(), call_.rank(), item_);
    if (!slice.size()) return;
    std::vector<const char*> inputs;
    char* own = data_ + (whole.begin + slice.begin) * item_;
    char* shared = nullptr;
    for (int rank = 0; rank < call_.size(); ++rank) {
      char* staging = staging_buffer(rank, k) + slice.begin * item_;
      if (rank == call_.rank()) shared = staging;
      inputs.push_back(rank == call_.rank() ? own : staging);
    }
    std::vector<char*> outputs;
    if (gets_result()) outputs.push_back(own);
    if (root_ < 0 ? call_.size() > 1 : !gets_result()) outputs.push_back(shared);
    reducer.run(inputs, outputs, slice.size(), bypass_caches_);
  }

  void copy_out(size_t k) {
    if (!gets_result()) return;
    const Slice whole = piece(k);
    for (int ahead = 1; ahead < call_.size(); ++ahead) {
      const int rank = (call_.rank() + ahead) % call_.size();
      const Slice slice = slice_of(whole.size(), call_.size(), rank, item_);
      copy_bytes(data_ + (whole.begin + slice.begin) * item_,
                 staging_buffer(rank, k) + slice.begin * item_, slice.size() * item_);
    }
  }

  void run_staged(bool is_first_piece_copied) {
    const size_t pieces = (count_ + piece_ - 1) / piece_;
    call_.advance_rounds(static_cast<uint32_t>(pieces));
    const TreeReducer reducer = make_rank_reducer(call_, type_, reduction_);
    if (!is_first_piece_copied) copy_in(0);
    // If all ranks had copied piece 0 before they arrived, the arrival was its barrier A.
    if (!have_all_route(Route::staged)) call_.sync();
    for (size_t k = 0; k < pieces; ++k) {
      combine(k, reducer);
      const uint32_t barrier_b = call_.advance(), next_barrier_a = barrier_b + 1;
      if (k + 1 < pieces) {
        copy_in(k + 1);
        call_.advance();
      }
      call_.wait_phase(barrier_b);
      copy_out(k);
      if (k + 1 < pieces) call_.wait_phase(next_barrier_a);
    }
  }

  CollectiveCall& call_;
  char* const data_;
  const size_t count_, item_;
  const DataType type_;
  const Reduction reduction_;
  const int root_;
  size_t piece_ = 0;           // elements
  uint32_t first_round_ = 0;   // of piece 0
  bool bypass_caches_ = true;  // when writing staging buffers
};

}  // namespace

TreeReducer make_rank_reducer(CollectiveCall& call, DataType type, Reduction reduction) {
  ReductionSpec spec{type, reduction, false, 1, {}};
  if (reduction == Reduction::avg) spec.divisor = call.size();
  if (reduction == Reduction::premul_sum)
    for (int rank = 0; rank < call.size(); ++rank) spec.factors.push_back(call.info(rank).factor);
  return TreeReducer(tree_steps(call.size()), std::move(spec));
}

void all_reduce(CollectiveCall& call, void* data, size_t count, DataType type, Reduction reduction,
                int root) {
  AllReduce(call, static_cast<char*>(data), count, type, reduction, root).run();
}

}  // namespace lockstep
