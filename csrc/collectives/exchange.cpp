#include "exchange.h"

#include <algorithm>
#include <cstring>

#include "../failure.h"

namespace lockstep {
namespace {

size_t lines(size_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }

class Passage {
 public:
  Passage(Turn& turn, const Exchange& blocks)
      : turn_(turn), blocks_(blocks), n_(turn.size()), me_(turn.rank()) {}

  void publish() {
    for (int d = 0; d < n_; ++d) {
      sends(me_)[d] = blocks_.send[d].bytes;
      receives(me_)[d] = blocks_.receive[d].bytes;
    }
    turn_.mine().route = route();
    if (turn_.mine().route == Route::slot) fill_slot();
  }

  void arrive() {
    turn_.arrive();
    for (int s = 0; s < n_; ++s)
      for (int d = 0; d < n_; ++d)
        if (sends(s)[d] != receives(d)[s]) turn_.disagree();
    first_ = turn_.round();
    uint64_t staged = 0;
    for (int s = 0; s < n_; ++s)
      if (turn_.call(s).route == Route::staged) {
        for (int d = 0; d < n_; ++d) {
          if (d == s) continue;
          staged += sends(s)[d];
          rounds_ = std::max(rounds_, (sends(s)[d] + piece() - 1) / piece());
        }
      } else if (turn_.call(s).route == Route::direct) {
        any_direct_ = true;
      }
    turn_.use_rounds(static_cast<uint32_t>(rounds_));
    if (staged) stores_ = &turn_.group().stores(turn_.mine().op, staged);
    begun_ = Clock::now();
  }

  // Bytes of a block that pass in one round.
  size_t piece() const {
    const size_t stage = turn_.group().layout().stage_bytes;
    return blocks_.same ? stage / kLine * kLine
                        : std::max<size_t>(stage / std::max(n_ - 1, 1) / kLine * kLine, kLine);
  }
  size_t rounds() const { return rounds_; }

  // Brings round k of everybody's blocks to where it can be read.
  void pass(size_t k) {
    if (turn_.call(me_).route == Route::staged) {
      char* stage = turn_.stage(me_, first_ + static_cast<uint32_t>(k));
      const auto put = stores_->way() == 0 ? stream_bytes : copy_bytes;
      for (int d = 0; d < n_; ++d) {
        const Block& block = blocks_.send[d];
        if (d == me_ || block.bytes <= k * piece()) continue;
        put(stage + lane(me_, d), block.data + k * piece(),
            std::min(piece(), block.bytes - k * piece()));
        if (blocks_.same) break;
      }
    }
    turn_.sync();
  }

  // What rank s sends me: all of it, or the part of round k where it is staged.
  const char* incoming(int s, size_t k) {
    // Nobody has said where a block without bytes lies.
    if (s == me_ || !expected(s)) return blocks_.send[me_].data;
    switch (turn_.call(s).route) {
      case Route::slot: {
        const size_t offset = slot_offset(s), slot = turn_.group().layout().slot_bytes;
        if (offset > slot || expected(s) > slot - offset)
          throw Failure(turn_.group().name_of(s) + " wrote impossible sizes into shared memory");
        return turn_.slot(s) + offset;
      }
      case Route::direct:
        return turn_.group().neighbours().at(places(s)[me_], expected(s));
      default: return turn_.stage(s, first_ + static_cast<uint32_t>(k)) + lane(s, me_);
    }
  }

  void finish() {
    if (any_direct_) turn_.sync();  // the owners may change their blocks from now on
    if (stores_) stores_->took(std::chrono::duration<double>(Clock::now() - begun_).count());
  }
  bool staged(int s) { return s != me_ && turn_.call(s).route == Route::staged; }
  size_t expected(int s) const { return blocks_.receive[s].bytes; }

 private:
  uint64_t* sends(int rank) { return reinterpret_cast<uint64_t*>(turn_.slot(rank)); }
  uint64_t* receives(int rank) { return sends(rank) + n_; }
  Place* places(int rank) { return reinterpret_cast<Place*>(receives(rank) + n_); }
  size_t tables() const { return lines(n_ * (2 * sizeof(uint64_t) + sizeof(Place))); }
  // Where the block s -> d lies in the stage of s, which has none for itself.
  size_t lane(int s, int d) const { return blocks_.same ? 0 : (d < s ? d : d - 1) * piece(); }

  Route route() {
    size_t bytes = 0;
    for (int d = 0; d < n_; ++d)
      if (d != me_ && blocks_.send[d].bytes)
        bytes = blocks_.same ? lines(blocks_.send[d].bytes) : bytes + lines(blocks_.send[d].bytes);
    if (tables() + bytes <= turn_.group().layout().slot_bytes) return Route::slot;
    for (int d = 0; d < n_; ++d) {
      if (d == me_ || !blocks_.send[d].bytes) continue;
      places(me_)[d] = Heap::here().find(blocks_.send[d].data, blocks_.send[d].bytes);
      if (!places(me_)[d].shared()) return Route::staged;
    }
    return Route::direct;
  }

  void fill_slot() {
    char* to = turn_.my_slot() + tables();
    for (int d = 0; d < n_; ++d) {
      const Block& block = blocks_.send[d];
      if (d == me_ || !block.bytes) continue;
      stream_bytes(to, block.data, block.bytes);
      if (blocks_.same) break;
      to += lines(block.bytes);
    }
  }

  size_t slot_offset(int s) {
    size_t offset = tables();
    if (blocks_.same) return offset;
    for (int d = 0; d < me_; ++d)
      if (d != s) offset += lines(sends(s)[d]);
    return offset;
  }

  Turn& turn_;
  const Exchange& blocks_;
  const int n_, me_;
  uint32_t first_ = 0;
  size_t rounds_ = 0;
  bool any_direct_ = false;
  Choice* stores_ = nullptr;  // how stages are written, where there are any
  Clock::time_point begun_;   // after the last rank had come
};

}  // namespace

void exchange(Turn& turn, const Exchange& blocks) {
  Passage passage(turn, blocks);
  passage.publish();
  passage.arrive();
  for (int ahead = 1; ahead < turn.size(); ++ahead) {
    const int s = (turn.rank() + ahead) % turn.size();
    if (passage.staged(s) || !passage.expected(s)) continue;
    const char* from = passage.incoming(s, 0);
    if (from != blocks.receive[s].data)
      copy_bytes(blocks.receive[s].data, from, passage.expected(s));
  }
  const size_t piece = passage.piece();
  for (size_t k = 0; k < passage.rounds(); ++k) {
    passage.pass(k);
    for (int ahead = 1; ahead < turn.size(); ++ahead) {
      const int s = (turn.rank() + ahead) % turn.size();
      if (!passage.staged(s) || passage.expected(s) <= k * piece) continue;
      copy_bytes(blocks.receive[s].data + k * piece, passage.incoming(s, k),
                  std::min(piece, passage.expected(s) - k * piece));
    }
  }
  passage.finish();
  // My own block comes last: it may go to where a block for another rank lay.
  const Block &from = blocks.send[turn.rank()], &to = blocks.receive[turn.rank()];
  if (to.bytes && from.data != to.data) std::memmove(to.data, from.data, to.bytes);
}

void reduce_scatter(Turn& turn, const std::vector<Block>& send, char* result, size_t count,
                    Type type, Reduction reduction) {
  const size_t bytes = count * bytes_of(type);
  Exchange blocks{send, std::vector<Block>(send.size(), Block{nullptr, bytes}), false};
  Passage passage(turn, blocks);
  passage.publish();
  passage.arrive();
  Arithmetic arithmetic{type, reduction, false, 1, {}};
  if (reduction == Reduction::avg) arithmetic.divisor = turn.size();
  if (reduction == Reduction::premul_sum)
    for (int rank = 0; rank < turn.size(); ++rank)
      arithmetic.factors.push_back(turn.call(rank).factor);
  const Fold fold(tree_steps(turn.size()), std::move(arithmetic));
  const size_t rounds = std::max<size_t>(passage.rounds(), 1);
  const size_t width = passage.rounds() ? passage.piece() : bytes;
  for (size_t k = 0; k < rounds; ++k) {
    if (passage.rounds()) passage.pass(k);
    const size_t begin = std::min(bytes, k * width), end = std::min(bytes, (k + 1) * width);
    std::vector<const char*> inputs;
    for (int s = 0; s < turn.size(); ++s)
      inputs.push_back(passage.incoming(s, k) + (passage.staged(s) ? 0 : begin));
    fold.run(inputs, {result + begin}, (end - begin) / bytes_of(type));
  }
  passage.finish();
}

}  // namespace lockstep
