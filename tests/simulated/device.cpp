// What torch asks of an accelerator in C++: devices, streams, events, generators, pinned memory.
//
// torch 2.13 lets Python define kernels of a private-use device, but not these: its Python device
// guard has one device, one stream and no events. The file needs torch's small headers only and
// compiles in seconds. Python loads it with ctypes and holds the queues of the streams
// (accelerator.py); events are handed to it by the functions in `Callbacks`.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <sys/mman.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <set>
#include <vector>

namespace {

constexpr auto TYPE = c10::DeviceType::PrivateUse1;
constexpr int MOST_DEVICES = 8;

struct Callbacks {
  void (*record)(int64_t event, int device, int64_t stream);
  void (*block)(int64_t event, int device, int64_t stream);
  int (*is_event_done)(int64_t event);
  void (*synchronize_event)(int64_t event);
  int (*is_stream_done)(int device, int64_t stream);
  void (*synchronize_stream)(int device, int64_t stream);
  void (*synchronize_device)(int device);
};

Callbacks python{};
int device_count = 1;
std::atomic<int64_t> last_event{0};
std::atomic<int64_t> last_stream{0};

thread_local int current_device = 0;
thread_local int64_t current_streams[MOST_DEVICES] = {};

int64_t event_number(void* event) {
  return reinterpret_cast<int64_t>(event);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return TYPE;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override {
    return c10::Device(TYPE, static_cast<c10::DeviceIndex>(current_device));
  }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(
        device.index() < device_count, "simulated: there is no device ", device, " here");
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) {
      current_device = device.index();
    }
  }
  c10::Stream getStream(c10::Device device) const override {
    const int index = device.index() < 0 ? current_device : device.index();
    return make_stream(current_streams[index], index);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return make_stream(0, device.index() < 0 ? current_device : device.index());
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return make_stream(++last_stream, device.index() < 0 ? current_device : device.index());
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const auto before = getStream(stream.device());
    current_streams[stream.device_index()] = stream.id();
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return static_cast<c10::DeviceIndex>(device_count);
  }
  void record(
      void** event,
      const c10::Stream& stream,
      const c10::DeviceIndex,
      const c10::EventFlag) const override {
    if (*event == nullptr) {
      *event = reinterpret_cast<void*>(++last_event);
    }
    python.record(event_number(*event), stream.device_index(), stream.id());
  }
  void block(void* event, const c10::Stream& stream) const override {
    python.block(event_number(event), stream.device_index(), stream.id());
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || python.is_event_done(event_number(event)) != 0;
  }
  void synchronizeEvent(void* event) const override {
    python.synchronize_event(event_number(event));
  }
  bool queryStream(const c10::Stream& stream) const override {
    return python.is_stream_done(stream.device_index(), stream.id()) != 0;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    python.synchronize_stream(stream.device_index(), stream.id());
  }
  void synchronizeDevice(const c10::DeviceIndex index) const override {
    python.synchronize_device(index);
  }

 private:
  static c10::Stream make_stream(int64_t id, int index) {
    const c10::Device device(TYPE, static_cast<c10::DeviceIndex>(index));
    return c10::Stream(c10::Stream::UNSAFE, device, id);
  }
};

// The numbers of the CPU's generator, from a generator of its own.
struct SimulatedGenerator final : at::CPUGeneratorImpl {
  explicit SimulatedGenerator(int index) {
    device_ = c10::Device(TYPE, static_cast<c10::DeviceIndex>(index));
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
};

std::mutex pinned_mutex;
std::set<const void*> pinned;

void free_pinned(void* memory) {
  {
    const std::lock_guard<std::mutex> lock(pinned_mutex);
    pinned.erase(memory);
  }
  std::free(memory);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* memory = std::aligned_alloc(64, (bytes + 64) / 64 * 64);
    {
      const std::lock_guard<std::mutex> lock(pinned_mutex);
      pinned.insert(memory);
    }
    return {memory, memory, &free_pinned, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &free_pinned;
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};

PinnedAllocator pinned_allocator;

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return device_count > 0;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return static_cast<c10::DeviceIndex>(device_count);
  }
  void setCurrentDevice(c10::DeviceIndex index) const override {
    current_device = index;
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return static_cast<c10::DeviceIndex>(current_device);
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    const int before = current_device;
    current_device = index;
    return static_cast<c10::DeviceIndex>(before);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return index < 0 ? getCurrentDevice() : exchangeDevice(index);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    static std::vector<at::Generator> generators = [] {
      std::vector<at::Generator> made;
      for (int each = 0; each < MOST_DEVICES; ++each) {
        made.push_back(at::make_generator<SimulatedGenerator>(each));
      }
      return made;
    }();
    return generators[index < 0 ? current_device : index];
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return at::make_generator<SimulatedGenerator>(index < 0 ? current_device : index);
  }
  bool isPinnedPtr(const void* memory) const override {
    const std::lock_guard<std::mutex> lock(pinned_mutex);
    return pinned.count(memory) != 0;
  }
  at::Allocator* getPinnedMemoryAllocator() const override {
    return &pinned_allocator;
  }
};

// Memory of the device, filled with ones: not a number, or -1.
void* allocate(size_t bytes) {
  void* memory = std::aligned_alloc(64, (bytes + 64) / 64 * 64);
  std::memset(memory, 0xFF, bytes);
  return memory;
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* memory = ::allocate(bytes);
    return {memory, memory, &std::free, guard_device()};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &std::free;
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }

 private:
  static c10::Device guard_device() {
    return c10::Device(TYPE, static_cast<c10::DeviceIndex>(current_device));
  }
};

DeviceAllocator device_allocator;

// The structures of DLPack, by which Python makes tensors of this memory.
struct DLManagedTensor {
  void* data;
  int32_t device_type;
  int32_t device_id;
  int32_t ndim;
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
  void* context;
  void (*deleter)(DLManagedTensor*);
  int64_t values[];
};

void free_tensor(DLManagedTensor* tensor) {
  std::free(tensor->data);
  std::free(tensor);
}

void unmap_tensor(DLManagedTensor* tensor) {
  munmap(tensor->data, static_cast<size_t>(tensor->shape[0]));
  std::free(tensor);
}

constexpr int32_t EXTENSION_DEVICE = 12;

Guard guard;
Hooks hooks;

} // namespace

extern "C" {

void simulated_register(int devices, const Callbacks* callbacks) {
  device_count = devices;
  python = *callbacks;
  c10::impl::registerDeviceGuard(TYPE, &guard);
  at::RegisterPrivateUse1HooksInterface(&hooks);
  c10::SetAllocator(TYPE, &device_allocator);
}

DLManagedTensor* simulated_tensor(
    int device,
    int code,
    int bits,
    int ndim,
    const int64_t* shape,
    const int64_t* strides,
    int64_t bytes) {
  auto* tensor = static_cast<DLManagedTensor*>(
      std::malloc(sizeof(DLManagedTensor) + 2 * ndim * sizeof(int64_t)));
  *tensor = {
      allocate(bytes), EXTENSION_DEVICE, device, ndim,
      static_cast<uint8_t>(code), static_cast<uint8_t>(bits), 1,
      tensor->values, tensor->values + ndim, 0, nullptr, &free_tensor};
  std::memcpy(tensor->shape, shape, ndim * sizeof(int64_t));
  std::memcpy(tensor->strides, strides, ndim * sizeof(int64_t));
  return tensor;
}

// Returns bytes in the memory of a file, which other processes can map too; null if that fails.
DLManagedTensor* simulated_mapped(int device, int file, int64_t bytes) {
  void* memory = mmap(
      nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (memory == MAP_FAILED) {
    return nullptr;
  }
  auto* tensor = static_cast<DLManagedTensor*>(
      std::malloc(sizeof(DLManagedTensor) + 2 * sizeof(int64_t)));
  *tensor = {
      memory, EXTENSION_DEVICE, device, 1, 1, 8, 1,
      tensor->values, tensor->values + 1, 0, nullptr, &unmap_tensor};
  tensor->shape[0] = bytes;
  tensor->strides[0] = 1;
  return tensor;
}
}
