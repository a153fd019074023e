#include "exchange.h"

#include <algorithm>
#include <cstring>

#include "../errors.h"
#include "../kernels.h"

namespace lockstep {

constexpr int kShownDifferences = 3;

void BlockExchange::publish() {
  for (int d = 0; d < size_; ++d) {
    sends(rank_)[d] = blocks_.send[d].bytes;
    receives(rank_)[d] = blocks_.receive[d].bytes;
  }
  call_.own_info().route = choose_route();
  if (call_.own_info().route == Route::slot) fill_slot();
}

void BlockExchange::arrive() {
  call_.arrive();
  int differences = 0;
  std::string text;
  for (int s = 0; s < size_; ++s)
    for (int d = 0; d < size_; ++d)
      if (sends(s)[d] != receives(d)[s] && ++differences <= kShownDifferences)
        text += (differences > 1 ? "; " : "") + describe_difference(s, d);
  if (differences > kShownDifferences)
    text += "; and " + std::to_string(differences - kShownDifferences) + " more";
  if (differences) call_.throw_mismatch(text);
  first_round_ = call_.round();
  uint64_t staged_bytes = 0;
  for (int s = 0; s < size_; ++s)
    if (call_.info(s).route == Route::staged) {
      for (int d = 0; d < size_; ++d) {
        if (d == s) continue;
        staged_bytes += sends(s)[d];
        rounds_ = std::max(rounds_, (sends(s)[d] + piece_bytes() - 1) / piece_bytes());
      }
    } else if (call_.info(s).route == Route::direct) {
      is_any_direct_ = true;
    }
  call_.advance_rounds(static_cast<uint32_t>(rounds_));
  if (staged_bytes) store_tuner_ = &call_.group().store_tuner(call_.own_info().op, staged_bytes);
  begun_ = Clock::now();
}

std::string BlockExchange::describe_difference(int source, int target) {
  const Group& group = call_.group();
  const auto& dtype_bytes = group.info().dtype_bytes;
  const uint64_t unit = dtype_bytes ? dtype_bytes(call_.own_info().dtype) : 1;
  const uint64_t sent = sends(source)[target] / unit;
  return group.format_rank(source) + " sends " + std::to_string(sent) +
         (dtype_bytes ? " element" : " byte") + (sent == 1 ? "" : "s") + " to " +
         group.format_rank(target) + ", which expects " +
         std::to_string(receives(target)[source] / unit);
}

size_t BlockExchange::piece_bytes() const {
  const size_t staging = call_.group().layout().staging_bytes;
  return blocks_.is_same_to_all
             ? staging / kCacheLine * kCacheLine
             : std::max<size_t>(staging / std::max(size_ - 1, 1) / kCacheLine * kCacheLine,
                                kCacheLine);
}

void BlockExchange::stage_round(size_t k) {
  if (call_.info(rank_).route == Route::staged) {
    char* staging = call_.staging_buffer(rank_, first_round_ + static_cast<uint32_t>(k));
    const auto copy = store_tuner_->choose() == 0 ? stream_bytes : copy_bytes;
    for (int d = 0; d < size_; ++d) {
      const Block& block = blocks_.send[d];
      if (d == rank_ || block.bytes <= k * piece_bytes()) continue;
      copy(staging + staging_offset(rank_, d), block.data + k * piece_bytes(),
           std::min(piece_bytes(), block.bytes - k * piece_bytes()));
      if (blocks_.is_same_to_all) break;
    }
  }
  call_.sync();
}

const char* BlockExchange::incoming(int source, size_t k) {
  // A block without bytes has no published address.
  if (source == rank_ || !expected_bytes(source)) return blocks_.send[rank_].data;
  switch (call_.info(source).route) {
    case Route::slot: {
      const size_t offset = slot_offset(source), slot = call_.group().layout().slot_bytes;
      if (offset > slot || expected_bytes(source) > slot - offset)
        throw CommError(call_.group().format_rank(source) +
                        " wrote invalid sizes into shared memory");
      return call_.slot(source) + offset;
    }
    case Route::direct: return call_.map(source, handles(source)[rank_], expected_bytes(source));
    default:
      return call_.staging_buffer(source, first_round_ + static_cast<uint32_t>(k)) +
             staging_offset(source, rank_);
  }
}

void BlockExchange::finish() {
  if (is_any_direct_) call_.sync();  // after this the owners may change their blocks
  if (store_tuner_)
    store_tuner_->record(std::chrono::duration<double>(Clock::now() - begun_).count());
}

bool BlockExchange::is_staged(int source) {
  return source != rank_ && call_.info(source).route == Route::staged;
}

size_t BlockExchange::table_bytes() const {
  return round_to_lines(size_ * (2 * sizeof(uint64_t) + sizeof(BufferHandle)));
}

Route BlockExchange::choose_route() {
  size_t bytes = 0;
  for (int d = 0; d < size_; ++d)
    if (d != rank_ && blocks_.send[d].bytes)
      bytes = round_to_lines(blocks_.send[d].bytes) + (blocks_.is_same_to_all ? 0 : bytes);
  if (table_bytes() + bytes <= call_.group().layout().slot_bytes) return Route::slot;
  for (int d = 0; d < size_; ++d) {
    if (d == rank_ || !blocks_.send[d].bytes) continue;
    handles(rank_)[d] = Heap::instance().find(blocks_.send[d].data, blocks_.send[d].bytes);
    if (!handles(rank_)[d].is_shared()) return Route::staged;
  }
  return Route::direct;
}

void BlockExchange::fill_slot() {
  char* to = call_.own_slot() + table_bytes();
  for (int d = 0; d < size_; ++d) {
    const Block& block = blocks_.send[d];
    if (d == rank_ || !block.bytes) continue;
    stream_bytes(to, block.data, block.bytes);
    if (blocks_.is_same_to_all) break;
    to += round_to_lines(block.bytes);
  }
}

// Where the block source -> this rank is in the slot of the source.
size_t BlockExchange::slot_offset(int source) {
  size_t offset = table_bytes();
  if (blocks_.is_same_to_all) return offset;
  for (int d = 0; d < rank_; ++d)
    if (d != source) offset += round_to_lines(sends(source)[d]);
  return offset;
}

// Where the block source -> target is in the staging buffer of the source, which has no
// block for itself.
size_t BlockExchange::staging_offset(int source, int target) const {
  return blocks_.is_same_to_all ? 0 : (target < source ? target : target - 1) * piece_bytes();
}

// Of the blocks that this rank sends and receives.
static size_t total_bytes(const ExchangeBlocks& blocks) {
  size_t bytes = 0, largest = 0, sent = 0;
  for (const Block& block : blocks.receive) bytes += block.bytes;
  for (const Block& block : blocks.send) {
    sent += block.bytes;
    largest = std::max(largest, block.bytes);
  }
  return bytes + (blocks.is_same_to_all ? largest : sent);
}

void exchange(CollectiveCall& call, const ExchangeBlocks& blocks) {
  BlockExchange steps(call, blocks);
  steps.publish();
  steps.arrive();
  const bool bypass_caches =
      call.group().fills_cache(static_cast<uint64_t>(call.size()) * total_bytes(blocks));
  for (int ahead = 1; ahead < call.size(); ++ahead) {
    const int s = (call.rank() + ahead) % call.size();
    if (steps.is_staged(s) || !steps.expected_bytes(s)) continue;
    const char* from = steps.incoming(s, 0);
    if (from != blocks.receive[s].data)
      copy_result(blocks.receive[s].data, from, steps.expected_bytes(s), bypass_caches);
  }
  const size_t piece = steps.piece_bytes();
  for (size_t k = 0; k < steps.rounds(); ++k) {
    steps.stage_round(k);
    for (int ahead = 1; ahead < call.size(); ++ahead) {
      const int s = (call.rank() + ahead) % call.size();
      if (!steps.is_staged(s) || steps.expected_bytes(s) <= k * piece) continue;
      copy_result(blocks.receive[s].data + k * piece, steps.incoming(s, k),
                  std::min(piece, steps.expected_bytes(s) - k * piece), bypass_caches);
    }
  }
  steps.finish();
  // This rank's own block comes last: it may go to where a block for another rank was.
  const Block &from = blocks.send[call.rank()], &to = blocks.receive[call.rank()];
  if (!to.bytes || from.data == to.data) return;
  if (from.data + to.bytes <= to.data || to.data + to.bytes <= from.data)
    copy_result(to.data, from.data, to.bytes, bypass_caches);
  else
    std::memmove(to.data, from.data, to.bytes);
}

}  // namespace lockstep
