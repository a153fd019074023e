#include "gradient_places.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <mutex>

#include "torch_errors.h"

namespace lockstep {
namespace {

thread_local GradientPlaces* active = nullptr;

// The tensors that were created in places and still exist: their memory, by address. Tensors may
// be freed by any thread, and after the object that gave them their places.
class Occupants {
 public:
  void add(void* data, c10::Storage storage) {
    std::scoped_lock lock(mutex_);
    storages_.emplace(data, std::move(storage));
  }
  bool contains(const void* data) {
    std::scoped_lock lock(mutex_);
    return storages_.count(data);
  }
  // Returns whether there was one.
  bool remove(void* data) {
    std::unordered_map<const void*, c10::Storage>::node_type removed;
    std::scoped_lock lock(mutex_);  // released before the memory
    removed = storages_.extract(data);
    return !removed.empty();
  }

 private:
  std::mutex mutex_;
  std::unordered_map<const void*, c10::Storage> storages_;
};

Occupants& occupants() {
  static auto* const instance = new Occupants;  // tensors may be freed until the process ends
  return *instance;
}

}  // namespace

// Stays installed: storages refer to the allocator that made them.
class GradientPlaces::Allocator : public c10::Allocator {
 public:
  static void install() {
    static Allocator* const instance = [] {
      auto* const made = new Allocator;
      c10::SetAllocator(c10::DeviceType::CPU, made);
      return made;
    }();
    (void)instance;
  }
  c10::DataPtr allocate(size_t bytes) override {
    return active ? active->allocate(bytes, *usual()) : usual()->allocate(bytes);
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return usual()->raw_deleter() ? &release : nullptr;
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    usual()->copy_data(to, from, bytes);
  }
  static void release(void* data) {
    if (data && !occupants().remove(data)) usual()->raw_deleter()(data);
  }

 private:
  static c10::Allocator* usual() {
    static c10::Allocator* const before =
        c10::GetCPUAllocator();  // first called by the constructor
    return before;
  }
  Allocator() { usual(); }
};

GradientPlaces::GradientPlaces(std::vector<std::optional<at::Tensor>> places)
    : places_(std::move(places)), is_closed_(places_.size(), false) {
  for (auto& place : places_) {
    if (!place) continue;
    CHECK_ARGUMENT(place->is_contiguous() && place->device().is_cpu(),
                   "a place must be a contiguous tensor on the CPU");
  }
  Allocator::install();
}

GradientPlaces::~GradientPlaces() { end(); }

void GradientPlaces::begin() {
  counts_.clear();
  by_data_.clear();
  for (size_t i = 0; i < places_.size(); ++i) {
    is_closed_[i] = !places_[i];
    if (places_[i]) counts_[places_[i]->nbytes()] = 0;
  }
  active = this;
}

void GradientPlaces::end() {
  if (active == this) active = nullptr;
}

c10::DataPtr GradientPlaces::allocate(size_t bytes, c10::Allocator& usual) {
  const auto count = counts_.find(bytes);
  if (count == counts_.end()) return usual.allocate(bytes);
  const Allocation allocation{bytes, count->second++};
  c10::DataPtr data;
  if (const auto found = learned_.find(allocation);
      found != learned_.end() && !is_closed_[found->second]) {
    const at::Tensor& place = *places_[found->second];
    is_closed_[found->second] = true;
    if (!occupants().contains(place.data_ptr())) {
      occupants().add(place.data_ptr(), place.storage());
      data = {place.data_ptr(), place.data_ptr(), &Allocator::release, at::kCPU};
    }
  }
  if (!data) data = usual.allocate(bytes);
  by_data_[data.get()] = allocation;
  return data;
}

void GradientPlaces::note(size_t parameter, const at::Tensor& gradient) {
  if (parameter >= places_.size() || !places_[parameter]) return;
  is_closed_[parameter] = true;
  if (!gradient.device().is_cpu() || gradient.layout() != at::kStrided) return;
  const auto found = by_data_.find(gradient.data_ptr());
  if (found == by_data_.end() || found->second.first != places_[parameter]->nbytes()) return;
  if (const auto known = allocations_.find(parameter); known != allocations_.end()) {
    const auto of_known = learned_.find(known->second);
    if (of_known != learned_.end() && of_known->second == parameter) learned_.erase(of_known);
  }
  learned_[found->second] = parameter;
  allocations_[parameter] = found->second;
}

bool GradientPlaces::is_taken(size_t parameter, const std::optional<at::Tensor>& value) const {
  if (parameter >= places_.size() || !places_[parameter]) return false;
  const void* data = places_[parameter]->data_ptr();
  if (!occupants().contains(data)) return false;
  return !value || value->data_ptr() != data || value->storage().use_count() > 1;
}

}  // namespace lockstep
