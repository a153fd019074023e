// A group as one of its ranks holds it, and a turn: one call of it.
//
// Every rank counts the phases of all calls in one flag. Because each phase is
// the same for all ranks, "everybody has come so far" is one comparison a rank:
//
//     arrive   publish the call and what fits in the slot; wait for all; compare
//     sync     one phase further; wait for all
//
// A slot has two parities. Rank r writes the slot of call c+2 after everybody
// arrived at c+1, and so after everybody left c: no third slot, no extra barrier.
// The stages are three for the same reason, counted through all calls (`round`).
#pragma once

#include <bit>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "choice.h"
#include "heap.h"
#include "layout.h"
#include "liveness.h"
#include "neighbours.h"
#include "segment.h"

namespace lockstep {

struct Naming {
  std::string group = "default";
  std::vector<int> ranks;  // of the world, in the group's order; empty: 0, 1, ...
  std::function<std::string(int dtype)> dtype;   // for messages
  std::function<std::string()> where;            // this rank's place in its own code
  std::function<void()> hear;                    // throws what a signal's handler raised
};

const char* op_name(Op op);
const char* reduction_name(int reduction);

class Group {
 public:
  // Rank 0 creates the segment, the others attach it. A segment that is given is
  // shared with other ranks of this process.
  static std::unique_ptr<Group> create(int size, Naming naming);
  static std::unique_ptr<Group> attach(int rank, int size, const Address& address, Naming naming);
  static std::unique_ptr<Group> attach(int rank, int size, std::shared_ptr<Segment> segment,
                                       Naming naming);
  ~Group();
  // Tells the others that this rank has gone; the memory stays until the end.
  void leave();

  int rank() const { return rank_; }
  int size() const { return size_; }
  const Layout& layout() const { return layout_; }
  const std::shared_ptr<Segment>& segment() const { return segment_; }
  Header& header() { return *header_; }
  Record& record(int rank) { return *reinterpret_cast<Record*>(at(layout_.record(rank))); }
  char* at(uint64_t offset) { return segment_->data() + offset; }
  Neighbours& neighbours() { return neighbours_; }

  // What a rank does while it waits in a collective: it moves its messages.
  std::function<void()> meanwhile;
  // Called when it falls asleep there, and when it is awake again.
  std::function<void(bool)> resting;

  // Ordinary stores into the stages, or past the caches? For an operation on `bytes`, by
  // powers of two. Each rank chooses for itself: no bit depends on it.
  Choice& stores(Op op, uint64_t bytes) { return stores_[{op, std::bit_width(bytes)}]; }

  // Whether the ranks are more than the cores that they may run on, all together. Looks
  // now and then: ranks can be bound to cores at any time.
  bool crowded();

  // Ranks that have not attached yet.
  std::vector<int> missing();
  bool aborted() { return header_->aborted.load(std::memory_order_acquire) != 0; }
  // Ends the group for all; the first reason stays. Returns the reason that stays.
  std::string abort(const std::string& reason);
  std::string reason();
  // Lets signals be handled, which a wait would otherwise keep out; where a handler
  // raises (Ctrl-C) it aborts and throws that.
  void hear();
  // Aborts and throws if a rank has died.
  void check_deaths();

  std::string name_of(int rank) const;               // "rank 3"
  std::string names_of(const std::vector<int>& ranks) const;
  std::string described(const Call& call) const;     // "all_reduce(SUM, float32, 4 elements)"
  const Naming& naming() const { return naming_; }
  void rename(std::string name) { naming_.group = std::move(name); }
  // What a thread of this rank sleeps in, "barrier #3": told to those who ask.
  void fall_asleep(const std::string& in);
  void wake_up(const std::string& in);
  // What keeps `rank` from coming, for the person who waits for it.
  std::string whereabouts(int rank);

 private:
  friend class Turn;
  void publish_cores();
  std::string site();  // where this rank is, and what it waits in
  Group(int rank, int size, std::shared_ptr<Segment> segment, Naming naming);

  int rank_, size_;
  std::shared_ptr<Segment> segment_;
  Header* header_;
  Layout layout_;
  Naming naming_;
  Neighbours neighbours_;
  std::mutex sleeping_;
  std::multiset<std::string> asleep_;
  std::unique_ptr<Keeper> keeper_;
  uint32_t step_ = 0;    // phases passed
  uint32_t calls_ = 0;   // collectives begun
  uint32_t round_ = 0;   // the stage to use next, 0 to 2
  std::atomic<uint32_t> looks_{0};  // at the cores
  std::atomic<bool> crowded_{false};
  std::map<std::pair<Op, int>, Choice> stores_;
  Nonce proof_;  // in private memory: who reads it there may read this process's tensors
};

// One collective call. Calls of a group must not overlap in a rank: the caller
// holds a lock. Throws Failure.
class Turn : public Watch {
 public:
  Turn(Group& group, const Call& call, std::chrono::milliseconds timeout, bool background);

  Group& group() { return group_; }
  int rank() const { return group_.rank_; }
  int size() const { return group_.size_; }
  char* slot(int rank) { return group_.at(group_.layout_.slot(rank, parity_)); }
  char* my_slot() { return slot(rank()); }
  char* stage(int rank, uint32_t round) {
    return group_.at(group_.layout_.stage(rank, static_cast<int>(round % 3)));
  }
  uint32_t round() const { return group_.round_; }
  void use_rounds(uint32_t rounds) { group_.round_ = (group_.round_ + rounds) % 3; }
  // What this rank says; to be filled before `arrive`.
  Call& mine() { return group_.record(rank()).calls[parity_]; }
  const Call& call(int rank) { return group_.record(rank).calls[parity_]; }

  void arrive();  // throws also where the ranks disagree
  uint32_t post();  // this rank has come one phase further; which it is
  void wait_step(uint32_t step);  // for all to have come so far
  void wait() { wait_step(group_.step_); }
  void sync() {
    post();
    wait();
  }
  // All ranks found the same fault in what they published: all throw, the group stays.
  [[noreturn]] void disagree();

  void check() override;
  // Others may wait for a message of this rank before they come.
  void idle() override {
    if (group_.meanwhile) group_.meanwhile();
  }
  void rest(bool resting) override;
  bool stopped() const override { return group_.header_->aborted.load(std::memory_order_relaxed); }

 private:
  [[noreturn]] void fail(const std::string& reason);
  void late();  // throws, unless the missing ranks have come meanwhile

  Group& group_;
  uint32_t number_;
  int parity_;
  uint32_t target_ = 0;  // of the wait that is going on
  Patience patience_;
  std::chrono::milliseconds timeout_;
  Clock::time_point begun_;
};

std::string seconds(std::chrono::milliseconds time);

}  // namespace lockstep
