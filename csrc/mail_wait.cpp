// Waiting for a message, and the thread that moves messages where nobody waits.
#include <pthread.h>

#include <algorithm>

#include "failure.h"
#include "mail.h"

namespace lockstep {

using std::chrono::milliseconds;

static milliseconds since(Clock::time_point begun) {
  return std::chrono::duration_cast<milliseconds>(Clock::now() - begun);
}

struct Over {};  // a wait has ended, one way or the other

// What a waiter for a message looks at.
class Mail::Waiting : public Watch {
 public:
  Waiting(Mail& mail, const Message& message, milliseconds patience)
      : mail_(mail), message_(message), patience_(patience), begun_(Clock::now()) {}

  bool impatient() const { return patience_ > milliseconds(0) && since(begun_) > patience_; }
  bool stopped() const override { return mail_.group_.aborted(); }
  void rest(bool resting) override {
    const std::string in = mail_.described(message_);
    resting ? mail_.group_.fall_asleep(in) : mail_.group_.wake_up(in);
  }
  void check() override {
    Group& group = mail_.group_;
    group.hear();
    group.check_deaths();
    if (group.aborted() || message_.done || impatient()) throw Over{};
    if (mail_.all_left(message_)) {
      // What was sent before they left may still be there.
      mail_.move();
      if (!message_.done)
        group.abort((message_.peer < 0 ? "all other ranks have"
                                       : group.name_of(message_.peer) + " has") +
                    std::string(" left the group"));
      throw Over{};
    }
    if (patience_ > milliseconds(0) || since(begun_) <= message_.timeout) return;
    mail_.give_up(message_, since(begun_));
    throw Over{};
  }

 private:
  Mail& mail_;
  const Message& message_;
  const milliseconds patience_;
  const Clock::time_point begun_;
};

// As long as somebody waits, the thread stands back.
class Mail::Attendance {
 public:
  explicit Attendance(Mail& mail) : mail_(mail) { ++mail_.waiters_; }
  ~Attendance() {
    std::lock_guard<std::mutex> lock(mail_.mutex_);
    --mail_.waiters_;
    mail_.changed_.notify_all();
  }

 private:
  Mail& mail_;
};

bool Mail::wait(const Post& message, milliseconds patience) {
  if (test(message)) return true;
  Waiting watch(*this, *message, patience);
  const Patience turns = Patience::of(group_.crowded(), false);
  Flag& bell = group_.record(me_).bell;
  Attendance attendance(*this);
  while (true) {
    const uint32_t seen = bell.value.load(std::memory_order_acquire);
    if (test(message)) return true;
    if (watch.impatient()) return false;
    try {
      wait_for(bell, [&](uint32_t value) { return value != seen || message->done; }, turns, watch);
    } catch (const Over&) {
      // The next turn of the loop finds out why.
    }
  }
}

bool Mail::all_left(const Message& message) {
  const auto left = [&](int rank) { return health(group_.record(rank)) == Health::left; };
  if (message.peer >= 0) return message.peer != me_ && left(message.peer);
  for (int rank = 0; rank < n_; ++rank)
    if (rank != me_ && !left(rank)) return false;
  return n_ > 1;
}

void Mail::give_up(const Message& message, milliseconds waited) {
  std::string text = group_.name_of(me_) + " waited " + seconds(waited) + " (limit " +
                     seconds(message.timeout) + ") in " + described(message);
  if (message.peer >= 0) text += " for " + group_.whereabouts(message.peer);
  if (message.op == Op::recv) text += unasked(message.peer);
  group_.abort(text);
}

// What has come under tags that nobody asked for: often a slip in a tag.
std::string Mail::unasked(int source) {
  std::vector<int64_t> tags;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (int rank = 0; rank < n_; ++rank)
      if (source < 0 || source == rank)
        for (const Arrived& early : arrived_[static_cast<size_t>(rank)])
          if (std::find(tags.begin(), tags.end(), early.cell.tag) == tags.end() && tags.size() < 3)
            tags.push_back(early.cell.tag);
  }
  if (tags.empty()) return "";
  std::string text = tags.size() == 1 ? "; a message with tag " : "; messages with tags ";
  for (size_t i = 0; i < tags.size(); ++i) text += (i ? ", " : "") + std::to_string(tags[i]);
  return text + (source < 0 ? " came" : " came from it") + " and nobody asked for " +
         (tags.size() == 1 ? "it" : "them");
}

// ---- the thread ----

void Mail::check_heard() {
  Post late;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const Post& message : heard_)
      if (since(message->heard_since) > message->timeout) late = message;
  }
  if (late) give_up(*late, since(late->heard_since));
}

// Whether others see to all that can move.
bool Mail::attended() const {
  if (waiters_ > 0) return true;
  if (!heard_.empty() || (resting_ > 0 && unfinished_ > 0)) return false;
  for (size_t rank = 0; rank < waiting_.size(); ++rank)
    if (!waiting_[rank].empty() || !announced_[rank].empty()) return false;
  return true;
}

void Mail::rest(bool resting) {
  std::lock_guard<std::mutex> lock(mutex_);
  resting_ += resting ? 1 : -1;
  if (resting && unfinished_ > 0) start_thread();
}

void Mail::start_thread() {
  if (!thread_.joinable() && !stopping_) thread_ = std::thread([this] { run(); });
  else changed_.notify_all();
}

void Mail::run() {
  pthread_setname_np(pthread_self(), "lockstep-mail");
  Flag& bell = group_.record(me_).bell;
  const Patience patience = Patience::of(group_.crowded(), true);
  struct Quiet : Watch {
    Mail& mail;
    explicit Quiet(Mail& m) : mail(m) {}
    bool stopped() const override { return mail.group_.aborted(); }
    void check() override {
      mail.group_.check_deaths();
      if (!mail.group_.aborted()) mail.check_heard();
      if (mail.group_.aborted()) throw Over{};  // the next turn of the loop fails everything
    }
  } watch(*this);
  while (true) {
    {
      std::unique_lock<std::mutex> lock(mutex_);
      awake_ = false;
      changed_.wait(lock, [&] { return stopping_ || !attended(); });
      if (stopping_) return;
      awake_ = true;
    }
    const uint32_t seen = bell.value.load(std::memory_order_acquire);
    move();
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (attended()) continue;
    }
    try {
      wait_for(bell, [&](uint32_t value) { return value != seen; }, patience, watch);
      if (!group_.aborted()) check_heard();  // also where the bell rings all the time
    } catch (const Over&) {
    }
  }
}

}  // namespace lockstep
