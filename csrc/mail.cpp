#include "mail.h"

#include <unistd.h>

#include <cstdlib>
#include <utility>

#include "failure.h"

namespace lockstep {

// What a waiter for a message looks at. The thread in the background fails what is late.
class Mail::Waiting : public Watch {
 public:
  struct Over {};
  Waiting(Mail& mail, const Post& message, std::chrono::milliseconds timeout)
      : mail_(mail), message_(message), timeout_(timeout) {}

  bool stopped() const override { return mail_.group_.aborted(); }
  void check() override {
    Group& group = mail_.group_;
    group.hear();
    group.check_deaths();
    if (group.aborted()) throw Over{};
    if (message_->done) return;
    if (left()) {
      // What it sent before it left may still be there.
      if (mail_.test(message_)) return;
      group.abort(group.name_of(message_->peer) + " has left the group");
      throw Over{};
    }
    const auto waited =
        std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - message_->begun);
    if (waited <= timeout_) return;
    group.abort(group.name_of(group.rank()) + " waited " + seconds(waited) + " (limit " +
                seconds(timeout_) + ") in " + mail_.described(*message_) +
                (message_->peer < 0 ? "" : " for " + group.whereabouts(message_->peer)));
    throw Over{};
  }

 private:
  bool left() const {
    return message_->peer >= 0 && message_->peer != mail_.me_ &&
           health(mail_.group_.record(message_->peer)) == Health::left;
  }
  Mail& mail_;
  const Post& message_;
  const std::chrono::milliseconds timeout_;
};

Mail::Mail(Group& group)
    : group_(group), me_(group.rank()), n_(group.size()), owner_(getpid()) {
  const auto n = static_cast<size_t>(n_);
  arrived_.resize(n);
  streams_.resize(n);
  waiting_.resize(n);
  announced_.resize(n);
  const char* staged = std::getenv("LOCKSTEP_NO_READ");  // for tests: take the lanes
  readable_.assign(n, staged && *staged ? 2 : 0);
  group_.meanwhile = [this] {
    if (unfinished_.load(std::memory_order_relaxed) == 0) return;
    std::vector<Post> done;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      progress(done);
    }
    settle(done);
  };
}

void Mail::stop() {
  if (owner_ != getpid()) {
    if (thread_.joinable()) thread_.detach();
    return;
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  group_.record(me_).bell.ring();
  if (thread_.joinable()) thread_.join();
  group_.meanwhile = nullptr;
}

std::string Mail::described(const Message& message) const {
  std::string text = op_name(message.op);
  text += message.op == Op::send ? " to " : " from ";
  text += message.peer < 0 ? "any rank" : group_.name_of(message.peer);
  return text + " (tag " + std::to_string(message.tag) + ")";
}

// ---- what callers do ----

void Mail::post(const Post& message) {
  std::vector<Post> done;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    message->begun = Clock::now();
    ++unfinished_;
    if (group_.aborted()) {
      finish(message, done, group_.reason());
    } else if (message->op == Op::recv) {
      wanted_.push_back(message);
      progress(done);
    } else {
      auto& queue = waiting_[static_cast<size_t>(message->peer)];
      queue.push_back(message);
      send_to(message->peer, done);
      if (!message->done) start_thread();
    }
  }
  settle(done);
}

bool Mail::test(const Post& message) {
  if (message->done) return true;
  std::vector<Post> done;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    progress(done);
  }
  settle(done);
  return message->done;
}

void Mail::wait(const Post& message, std::chrono::milliseconds timeout) {
  Waiting watch(*this, message, timeout);
  const Patience patience = Patience::of(group_.crowded(), false);
  Flag& bell = group_.record(me_).bell;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    ++waiters_;
  }
  struct Leave {
    Mail& mail;
    ~Leave() {
      std::lock_guard<std::mutex> lock(mail.mutex_);
      --mail.waiters_;
      mail.changed_.notify_all();
    }
  } leave{*this};
  try {
    while (true) {
      const uint32_t seen = bell.value.load(std::memory_order_acquire);
      if (test(message)) break;
      wait_for(bell, [&](uint32_t value) { return value != seen || message->done; }, patience,
               watch);
    }
  } catch (const Waiting::Over&) {
    std::vector<Post> done;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      fail_all(group_.reason(), done);
    }
    settle(done);
  }
  if (!message->error.empty())
    throw Failure(group_.name_of(me_) + ": " + described(*message) + " on group " +
                  group_.naming().group + " failed: " + message->error);
}

void Mail::notify(const Post& message, std::function<void()> then) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!message->done) {
      message->then = std::move(then);
      ++notified_;
      start_thread();
      changed_.notify_all();
      return;
    }
  }
  then();
}

void Mail::settle(std::vector<Post>& done) {
  for (const Post& message : done)
    if (message->then) std::exchange(message->then, nullptr)();
  done.clear();
}

void Mail::finish(const Post& message, std::vector<Post>& done, std::string error) {
  --unfinished_;
  message->error = std::move(error);
  message->done.store(true, std::memory_order_release);
  if (message->then) --notified_;
  done.push_back(message);
  if (waiters_ > 0 || thread_.joinable()) group_.record(me_).bell.ring();
}

void Mail::fail_all(const std::string& reason, std::vector<Post>& done) {
  for (const Post& message : wanted_) finish(message, done, reason);
  wanted_.clear();
  for (int rank = 0; rank < n_; ++rank) {
    const auto r = static_cast<size_t>(rank);
    for (const Stream& stream : streams_[r]) finish(stream.message, done, reason);
    for (const Post& message : waiting_[r]) finish(message, done, reason);
    for (const Post& message : announced_[r]) finish(message, done, reason);
    streams_[r].clear();
    waiting_[r].clear();
    announced_[r].clear();
  }
}

// ---- the thread ----

bool Mail::busy() const {
  if (notified_ > 0) return true;
  for (size_t rank = 0; rank < waiting_.size(); ++rank)
    if (!waiting_[rank].empty() || !announced_[rank].empty()) return true;
  return false;
}

void Mail::start_thread() {
  if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
  else changed_.notify_all();
}

void Mail::run() {
  pthread_setname_np(pthread_self(), "lockstep-mail");
  Flag& bell = group_.record(me_).bell;
  const Patience patience = Patience::of(group_.crowded(), true);
  // Looks for death and lateness of anything that is under way.
  struct Quiet : Watch {
    Mail& mail;
    explicit Quiet(Mail& m) : mail(m) {}
    bool stopped() const override { return mail.group_.aborted(); }
    void check() override {
      mail.group_.check_deaths();
      if (mail.group_.aborted()) throw Waiting::Over{};
    }
  } watch(*this);
  while (true) {
    std::vector<Post> done;
    uint32_t seen;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [&] { return stopping_ || (waiters_ == 0 && busy()); });
      if (stopping_) return;
      seen = bell.value.load(std::memory_order_acquire);
      try {
        progress(done);
      } catch (const std::exception& error) {
        group_.abort(error.what());
      }
      if (group_.aborted()) fail_all(group_.reason(), done);
      const auto now = Clock::now();
      for (const Post& message : wanted_)
        if (message->then && now - message->begun > message->timeout)
          group_.abort(group_.name_of(me_) + " waited " + seconds(message->timeout) + " in " +
                       described(*message));
      if (!busy()) seen = bell.value.load() - 1;  // do not wait for news
    }
    settle(done);
    try {
      wait_for(bell, [&](uint32_t value) { return value != seen; }, patience, watch);
    } catch (const Waiting::Over&) {
      // The next turn of the loop fails everything.
    }
  }
}

}  // namespace lockstep
