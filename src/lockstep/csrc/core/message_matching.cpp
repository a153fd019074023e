#include "message_matching.h"

#include <algorithm>
#include <iterator>

namespace lockstep {

void PostedReceives::add(int source, int64_t tag, std::shared_ptr<Message> receive) {
  queues_[{tag, source}].push_back({posted_++, std::move(receive)});
}

std::shared_ptr<Message> PostedReceives::take(int source, int64_t tag) {
  auto found = queues_.find({tag, source});
  const auto any = queues_.find({tag, -1});
  if (any != queues_.end() &&
      (found == queues_.end() || any->second.front().number < found->second.front().number))
    found = any;
  if (found == queues_.end()) return nullptr;
  std::shared_ptr<Message> receive = std::move(found->second.front().receive);
  found->second.pop_front();
  if (found->second.empty()) queues_.erase(found);
  return receive;
}

bool PostedReceives::remove(int source, int64_t tag, const std::shared_ptr<Message>& receive) {
  const auto found = queues_.find({tag, source});
  if (found == queues_.end()) return false;
  const size_t removed =
      std::erase_if(found->second, [&](const Posted& each) { return each.receive == receive; });
  if (found->second.empty()) queues_.erase(found);
  return removed > 0;
}

std::vector<std::shared_ptr<Message>> PostedReceives::take_all() {
  std::vector<Posted> all;
  for (auto& [place, queue] : queues_)
    std::move(queue.begin(), queue.end(), std::back_inserter(all));
  queues_.clear();
  std::sort(all.begin(), all.end(),
            [](const Posted& a, const Posted& b) { return a.number < b.number; });
  std::vector<std::shared_ptr<Message>> receives;
  for (Posted& each : all) receives.push_back(std::move(each.receive));
  return receives;
}

void UnexpectedMessages::add(UnexpectedMessage message) {
  queues_[message.cell.tag].push_back({arrived_++, std::move(message)});
}

std::optional<UnexpectedMessage> UnexpectedMessages::take(int64_t tag) {
  const auto found = queues_.find(tag);
  if (found == queues_.end()) return std::nullopt;
  std::optional<UnexpectedMessage> message = std::move(found->second.front().message);
  found->second.pop_front();
  if (found->second.empty()) queues_.erase(found);
  return message;
}

std::vector<int64_t> UnexpectedMessages::first_tags(size_t limit) const {
  std::vector<std::pair<uint64_t, int64_t>> order;
  for (const auto& [tag, queue] : queues_) order.emplace_back(queue.front().number, tag);
  std::sort(order.begin(), order.end());
  std::vector<int64_t> tags;
  for (size_t i = 0; i < std::min(limit, order.size()); ++i) tags.push_back(order[i].second);
  return tags;
}

}  // namespace lockstep
