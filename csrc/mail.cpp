// What callers do, and what becomes of a message that is over: see mail.h.
#include "mail.h"

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "failure.h"

namespace lockstep {

Mail::Mail(Group& group) : group_(group), me_(group.rank()), n_(group.size()) {
  const auto n = static_cast<size_t>(n_);
  arrived_.resize(n);
  streams_.resize(n);
  waiting_.resize(n);
  announced_.resize(n);
  const char* staged = std::getenv("LOCKSTEP_NO_READ");  // for tests: take the lanes
  readable_.assign(n, staged && *staged ? 2 : 0);
  group_.meanwhile = [this] {
    if (unfinished_.load(std::memory_order_relaxed) != 0) move();
  };
  group_.resting = [this](bool resting) { rest(resting); };
}

void Mail::stop() {
  Posts over;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!stopping_) {
      stopping_ = true;
      attempt(over, [&] { progress(over); });  // the last that has come
      fail_all(group_.name_of(me_) + " left the group first", over);
    }
  }
  changed_.notify_all();
  group_.record(me_).bell.ring();
  settle(over);
  if (thread_.joinable()) thread_.join();
  callbacks_.stop();
  group_.meanwhile = nullptr;
  group_.resting = nullptr;
}

std::string Mail::described(const Message& message) const {
  std::string text = op_name(message.op);
  text += message.op == Op::send ? " to " : " from ";
  text += message.peer < 0 ? "any rank" : group_.name_of(message.peer);
  return text + " (tag " + std::to_string(message.tag) + ")";
}

std::string Mail::titled(const Message& message) const {
  return group_.name_of(me_) + ": " + described(message) + " on group " + group_.naming().group;
}

void Mail::post(const Post& message) {
  Posts over;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const bool sending = message->op == Op::send;
    ++unfinished_;
    if (sending)
      waiting_[static_cast<size_t>(message->peer)].push_back(message);
    else
      wanted_.push_back(message);
    attempt(over, [&] {
      if (sending) send_to(message->peer, over);
      else progress(over);
    });
    if (stopping_) fail_all(group_.name_of(me_) + " has left the group", over);
    if (!message->over && (sending || resting_ > 0)) start_thread();
  }
  settle(over);
}

bool Mail::test(const Post& message) {
  if (!message->done) move();
  return message->done;
}

void Mail::listen(const Post& message) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (message->over || message->heard) return;
  message->heard = true;
  message->heard_since = Clock::now();
  heard_.push_back(message);
  start_thread();
}

// ---- what is over ----

void Mail::move() {
  Posts over;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    attempt(over, [&] { progress(over); });
  }
  settle(over);
}

// What cannot be moved ends the group: the other side would wait for it in vain.
template <typename Step>
void Mail::attempt(Posts& over, Step step) {
  if (!group_.aborted()) try {
      step();
    } catch (const std::exception& error) {
      group_.check_deaths();  // a dead rank is the better reason
      group_.abort(group_.name_of(me_) + " cannot move its messages: " + error.what());
    }
  if (group_.aborted()) fail_all(group_.reason(), over);
}

void Mail::finish(const Post& message, Posts& over, const std::string& why) {
  if (message->over) return;  // it stood in two places when moving broke off
  over.push_back(message);
  message->over = true;
  if (!why.empty()) message->error = titled(*message) + " failed: " + why;
  if (message->heard) std::erase(heard_, message);
  --unfinished_;
}

void Mail::fail_all(const std::string& why, Posts& over) {
  for (const Post& message : wanted_) finish(message, over, why);
  wanted_.clear();
  for (int rank = 0; rank < n_; ++rank) {
    const auto r = static_cast<size_t>(rank);
    for (const Stream& stream : streams_[r]) finish(stream.message, over, why);
    for (const Post& message : waiting_[r]) finish(message, over, why);
    for (const Post& message : announced_[r]) {
      take_back(rank, *message);
      finish(message, over, why);
    }
    streams_[r].clear();
    waiting_[r].clear();
    announced_[r].clear();
  }
}

void Mail::settle(Posts& over) {
  if (over.empty()) return;
  for (const Post& message : over) {
    const bool listened = message->settle();
    message->done.store(true, std::memory_order_seq_cst);
    if (listened) callbacks_.run([message] { message->announce(); });
  }
  over.clear();
  // Another thread may sleep until one of these is done, or until nothing is left to do.
  if (waiters_.load(std::memory_order_seq_cst) > 0 || awake_.load(std::memory_order_seq_cst))
    group_.record(me_).bell.ring();
}

}  // namespace lockstep
