#include "portable_kernels.h"

#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/TensorIterator.h>
#include <torch/library.h>

#include <atomic>
#include <mutex>
#include <numeric>
#include <set>

#include "torch_errors.h"

namespace lockstep {

static const Gemm* chosen_gemm = nullptr;

const Gemm& portable_gemm() { return *chosen_gemm; }

// at::parallel_for would need a compiler with OpenMP, and a second OpenMP runtime in the process.
// An iterator loops on the same threads.
void run_parallel(int64_t count, int64_t grain, const std::function<void(int64_t)>& body) {
  if (count <= grain || at::get_num_threads() == 1 || at::in_parallel_region()) {
    for (int64_t i = 0; i < count; ++i) body(i);
    return;
  }
  const at::Tensor numbers = at::detail::empty_cpu({count}, at::TensorOptions(at::kLong));
  auto* first = numbers.mutable_data_ptr<int64_t>();
  std::iota(first, first + count, 0);
  at::TensorIterator iterator = at::TensorIteratorConfig().add_input(numbers).build();
  iterator.for_each(
      [&](char** data, const int64_t* strides, int64_t size) {
        for (int64_t i = 0; i < size; ++i)
          body(*reinterpret_cast<const int64_t*>(data[0] + i * strides[0]));
      },
      grain);
}

static std::mutex noted_mutex;
static std::set<std::string> noted;

void note_unportable(const std::string& name) {
  const std::scoped_lock lock(noted_mutex);
  noted.insert(name);
}

std::vector<std::string> take_unportable() {
  const std::scoped_lock lock(noted_mutex);
  std::vector<std::string> names(noted.begin(), noted.end());
  noted.clear();
  return names;
}

static std::atomic<bool> multiplied_bfloat16 = false;

void note_bfloat16() { multiplied_bfloat16.store(true, std::memory_order_relaxed); }

bool take_bfloat16() { return multiplied_bfloat16.exchange(false, std::memory_order_relaxed); }

// torch warns of every operator whose kernel is replaced.
struct IgnoreWarnings : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

void use_portable_kernels(bool enabled, const std::string& kernels) {
  static torch::Library* library = nullptr;  // never freed: threads may compute until the end
  static torch::Library* composite = nullptr;
  delete library;
  delete composite;
  library = composite = nullptr;
  if (!enabled) return;
  chosen_gemm = kernels.empty() ? &gemm() : find_gemm(kernels.c_str());
  CHECK_ARGUMENT(chosen_gemm, "there are no kernels ", kernels, " for this processor");
  IgnoreWarnings ignore;
  const c10::WarningUtils::WarningHandlerGuard guard(&ignore);
  library =
      new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::CPU, __FILE__, __LINE__);
  register_products(*library);
  register_convolutions(*library);
  register_attention(*library);
  register_functions(*library);
  register_pooling(*library);
  register_threads(*library);
  composite = new torch::Library(torch::Library::IMPL, "aten",
                                 c10::DispatchKey::CompositeImplicitAutograd, __FILE__, __LINE__);
  register_recurrent(*library, *composite);
}

}  // namespace lockstep
