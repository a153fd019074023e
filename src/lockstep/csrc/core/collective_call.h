// One collective call of one rank.
//
// Every rank counts the phases of all its calls in one flag. All ranks go through the same
// phases, so "every rank has reached this phase" is one comparison per rank:
//
//     arrive   publish the call and what fits in the slot; wait for all ranks; compare
//     sync     advance by one phase; wait for all ranks
//
// Slots come in two parities. Rank r writes the slot of call c+2 after all ranks have
// arrived at c+1, and so have finished c: no third slot and no extra barrier is needed.
// There are three staging buffers for the same reason, used in turn by the rounds of all
// calls.
#pragma once

#include "group.h"

namespace lockstep {

// The calls of a rank in a group must not overlap: the caller holds a lock. All methods
// throw CommError if the call fails.
class CollectiveCall : public WaitObserver {
 public:
  CollectiveCall(Group& group, const CallInfo& info, std::chrono::milliseconds timeout,
                 bool is_background);

  Group& group() { return group_; }
  int rank() const { return group_.rank_; }
  int size() const { return group_.size_; }
  char* slot(int rank) { return group_.at(group_.layout_.slot(rank, parity_)); }
  char* own_slot() { return slot(rank()); }
  char* staging_buffer(int rank, uint32_t round) {
    return group_.at(group_.layout_.staging_buffer(rank, static_cast<int>(round % 3)));
  }
  uint32_t round() const { return group_.round_; }
  void advance_rounds(uint32_t rounds) { group_.round_ = (group_.round_ + rounds) % 3; }
  CallInfo& own_info() { return group_.rank_state(rank()).calls[parity_]; }  // before `arrive`
  const CallInfo& info(int rank) { return group_.rank_state(rank).calls[parity_]; }

  void arrive();                     // throws MismatchError if the ranks' calls differ
  void compare();                    // the same, after all ranks have arrived
  uint32_t advance();                // enters the next phase and returns it
  bool has_reached(uint32_t phase);  // whether all ranks have
  void wait_phase(uint32_t phase);   // until all ranks have reached it
  // The timeout counts from now on, not from the beginning of the call, in which this rank has
  // computed.
  void begin_waiting(bool is_background);
  void sync() {
    advance();
    wait_phase(group_.phase_);
  }
  // Maps a buffer that another rank has published. If it cannot be opened, the rank is lost.
  char* map(int rank, BufferHandle buffer, uint64_t bytes);
  // Fails because memory that another rank has published cannot be opened.
  [[noreturn]] void fail_unopened(int rank, const UnopenedError& error);
  // Throws MismatchError on every rank. To be called by all of them, because they have
  // found the same difference in what they published. `difference` says what differs if the
  // calls do not show it.
  [[noreturn]] void throw_mismatch(const std::string& difference = "");
  // Throws because the call cannot succeed on any rank; the group stays usable.
  [[noreturn]] void refuse(const std::string& reason);
  // Aborts the group, and throws the reason that all ranks state: this one, if it is the first.
  [[noreturn]] void abort(const std::string& reason) { fail(group_.abort(reason)); }

  void check() override;
  // Another rank may need a message of this rank before it arrives.
  void on_idle() override {
    if (group_.make_progress) group_.make_progress();
  }
  void on_sleep(bool is_sleeping) override;
  bool is_stopped() const override {
    return group_.header_->aborted.load(std::memory_order_relaxed);
  }

 private:
  [[noreturn]] void fail(const Failure& failure);
  std::string describe_failure(const std::string& reason);
  void fail_if_late();
  std::string title();  // "barrier #3"

  Group& group_;
  uint32_t number_;  // of this call in the group, from 1
  int parity_;
  uint32_t target_phase_ = 0;  // of the current wait
  SpinPolicy spin_policy_;
  std::chrono::milliseconds timeout_;
  Clock::time_point begun_;
};

}  // namespace lockstep
