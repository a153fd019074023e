#include "collective_call.h"

#include "activity.h"
#include "errors.h"

namespace lockstep {

CollectiveCall::CollectiveCall(Group& group, const CallInfo& info,
                               std::chrono::milliseconds timeout, bool is_background)
    : group_(group),
      number_(++group.calls_),
      parity_(static_cast<int>(number_ & 1)),
      spin_policy_(SpinPolicy::choose(group.is_oversubscribed(), is_background)),
      timeout_(timeout),
      begun_(Clock::now()) {
  target_phase_ = group_.phase_;
  RankState& own = group_.rank_state(rank());
  own.calls[parity_] = info;
  own.last_op.store(static_cast<uint32_t>(info.op), std::memory_order_relaxed);
  own.calls_begun.store(number_, std::memory_order_relaxed);
  publish_call(op_name(info.op), -1, number_, info.count, group_.info_.name, begun_);
  if (is_stopped()) check();
}

void CollectiveCall::arrive() {
  sync();
  compare();
}

void CollectiveCall::compare() {
  const CallInfo& own = own_info();
  for (int rank = 0; rank < size(); ++rank)
    if (!own.matches(info(rank))) throw_mismatch();
}

uint32_t CollectiveCall::advance() {
  group_.rank_state(rank()).phase.post(++group_.phase_);
  return group_.phase_;
}

bool CollectiveCall::has_reached(uint32_t phase) {
  for (int rank = 0; rank < size(); ++rank)
    if (!reached(group_.rank_state(rank).phase.value.load(std::memory_order_acquire), phase))
      return false;
  return true;
}

void CollectiveCall::begin_waiting(bool is_background) {
  spin_policy_ = SpinPolicy::choose(group_.is_oversubscribed(), is_background);
  begun_ = Clock::now();
}

void CollectiveCall::wait_phase(uint32_t phase) {
  target_phase_ = phase;
  // Begin with the next rank, so that not all ranks read the flag of rank 0 first.
  for (int ahead = 1; ahead < size(); ++ahead) {
    Flag& flag = group_.rank_state((rank() + ahead) % size()).phase;
    if (reached(flag.value.load(std::memory_order_acquire), phase)) continue;
    wait_for(flag, [phase](uint32_t value) { return reached(value, phase); }, spin_policy_, *this);
  }
}

void CollectiveCall::check() {
  if (group_.is_aborted()) fail(group_.failure());
  group_.poll_signals();
  group_.abort_if_rank_died();
  if (group_.is_aborted()) fail(group_.failure());
  for (int rank = 0; rank < size(); ++rank) {
    RankState& state = group_.rank_state(rank);
    if (check_health(state) == Health::left &&
        !reached(state.phase.value.load(std::memory_order_acquire), target_phase_))
      fail(group_.abort({group_.format_rank(rank) + " has left the group", Loss::left,
                         group_.global_rank(rank)}));
  }
  if (Clock::now() - begun_ > timeout_) fail_if_late();
}

void CollectiveCall::on_sleep(bool is_sleeping) {
  const std::string what = title();
  if (is_sleeping) {
    group_.begin_sleep(what);
    begin_wait(group_.describe(own_info()) + ", call " + std::to_string(number_) + " of group " +
                   group_.info_.name,
               begun_, kNotSaid, CallKind::collective);
  }
  if (group_.on_sleep) group_.on_sleep(is_sleeping);
  if (!is_sleeping) {
    end_wait();
    group_.end_sleep(what);
  }
}

void CollectiveCall::fail_if_late() {
  std::vector<int> late;
  for (int rank = 0; rank < size(); ++rank)
    if (!reached(group_.rank_state(rank).phase.value.load(std::memory_order_acquire),
                 target_phase_))
      late.push_back(rank);
  if (late.empty()) return;  // they have arrived in the meantime
  const auto waited = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - begun_);
  std::string text = group_.format_rank(rank()) + " timed out after " + format_seconds(waited) +
                     " with a timeout of " + format_seconds(timeout_) + " in " + title() +
                     ", waiting for " + group_.describe_peer(late[0]);
  late.erase(late.begin());
  if (!late.empty()) text += "; also for " + group_.format_ranks(late);
  fail(group_.abort(text));
}

std::string CollectiveCall::title() {
  return std::string(op_name(own_info().op)) + " #" + std::to_string(number_);
}

char* CollectiveCall::map(int rank, BufferHandle buffer, uint64_t bytes) {
  try {
    return group_.peer_mappings().map(buffer, bytes);
  } catch (const UnopenedError& error) {
    fail_unopened(rank, error);
  }
}

void CollectiveCall::fail_unopened(int rank, const UnopenedError& error) {
  group_.abort_if_rank_died();  // the better reason, if it applies
  fail(group_.abort({group_.format_rank(rank) + " is gone: " + error.what(), Loss::unopened,
                     group_.global_rank(rank)}));
}

std::string CollectiveCall::describe_failure(const std::string& reason) {
  return group_.format_rank(rank()) + ": " + title() + " on group " + group_.info_.name +
         " failed: " + reason;
}

void CollectiveCall::fail(const Failure& failure) {
  throw CommError(describe_failure(failure.text()), failure, title());
}

void CollectiveCall::refuse(const std::string& reason) {
  throw CallError(describe_failure(reason));
}

void CollectiveCall::throw_mismatch(const std::string& difference) {
  // All ranks have arrived and compare the same calls, so all of them get here.
  const std::string location = group_.info_.locate ? group_.info_.locate() : "";
  group_.liveness_thread_->publish_text(group_.describe(own_info()) +
                                        (location.empty() ? "" : " " + location));
  sync();
  std::vector<std::pair<std::string, std::vector<int>>> calls;  // and the ranks that made it
  for (int rank = 0; rank < size(); ++rank) {
    const std::string text = read_text(group_.rank_state(rank).text);
    bool is_known = false;
    for (auto& [call, ranks] : calls)
      if (call == text) {
        ranks.push_back(rank);
        is_known = true;
      }
    if (!is_known) calls.push_back({text, {rank}});
  }
  sync();  // before any rank overwrites its text
  std::string text = group_.format_rank(rank()) + ": the ranks of group " + group_.info_.name +
                     " disagree in call #" + std::to_string(number_) + ": " + difference;
  if (!difference.empty()) text += "; ";
  for (size_t i = 0; i < calls.size(); ++i)
    text += (i ? "; " : "") + group_.format_ranks(calls[i].second) + " called " + calls[i].first;
  throw MismatchError(text);
}

}  // namespace lockstep
