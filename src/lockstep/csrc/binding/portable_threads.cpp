// Operators of torch whose bits depend on the number of threads: with one, or in pieces.
//
// torch divides a range evenly among its threads. An elementwise kernel computes the last elements
// of each part without vector instructions, which round otherwise; a reduction adds the results of
// the parts; some kernels keep one sum per thread. And the compiler has made two copies of each
// loop, for one thread and for several, which may use fused multiply-adds in other places.
// dev/thread_operators.py finds the operators. The original kernels compute here, by their copy
// for one thread, so all bits are those that torch computes with one thread.
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "element_functions.h"
#include "portable_kernels.h"

namespace lockstep {

OneThread::OneThread(bool applies)
    : threads_(!applies || at::in_parallel_region() ? 1 : at::get_num_threads()) {
  if (threads_ > 1) at::set_num_threads(1);
}

OneThread::~OneThread() {
  if (threads_ > 1) at::set_num_threads(threads_);
}

namespace threads {

using at::Tensor;
using c10::DispatchKey;
using c10::OperatorHandle;
using c10::SafeKernelFunction;
using Stack = std::vector<c10::IValue>;

// Elements of a piece: below the 32,768 at which torch divides work, and a multiple of the elements
// that a vectorized loop takes at once, so no element is computed otherwise than in the whole.
constexpr int64_t kPiece = 1 << 14;

// The arguments of a call, by their names in the schema.
class Arguments {
 public:
  Arguments(const OperatorHandle& op, const Stack& stack)
      : schema_(op.schema()), first_(stack.end() - std::ssize(schema_.arguments())) {}
  size_t count() const { return schema_.arguments().size(); }
  const c10::IValue& operator[](size_t i) const { return first_[static_cast<std::ptrdiff_t>(i)]; }
  Stack copy() const { return {first_, first_ + std::ssize(schema_.arguments())}; }
  c10::ArrayRef<c10::IValue> list() const { return c10::ArrayRef<c10::IValue>(&*first_, count()); }
  std::optional<size_t> find(const std::string& name) const {
    const std::optional<int> index = schema_.argumentIndexWithName(name);
    if (!index) return std::nullopt;
    return static_cast<size_t>(*index);
  }
  bool is_written(size_t i) const {
    const c10::AliasInfo* alias = schema_.arguments()[i].alias_info();
    return alias && alias->isWrite();
  }
  size_t results() const { return schema_.returns().size(); }

 private:
  const c10::FunctionSchema& schema_;
  Stack::const_iterator first_;
};

// ---- with one thread ----

enum class When {
  always,
  one_result,    // if all dimensions are reduced: otherwise a thread computes whole results
  sum,           // as before, and if a thread could get fewer columns than fill a vector
  parameters,    // for gradients of weight or bias, which are sums of the threads' rows
  channels_last  // if a tensor is not contiguous, or has one number per channel, which is both
};

// The dimensions that are reduced; none if all are, or if torch has a message for them.
static std::vector<int64_t> list_reduced(const Arguments& arguments, const Tensor& input) {
  const auto index = arguments.find("dim");
  if (!index) return {};
  const c10::IValue& dim = arguments[*index];
  if (!dim.isInt() && !dim.isIntList()) return {};  // none, or names
  std::vector<int64_t> reduced =
      dim.isInt() ? std::vector<int64_t>{dim.toInt()} : dim.toIntVector();
  for (int64_t& number : reduced) {
    if (number < 0) number += input.dim();
    if (number < 0 || number >= input.dim()) return {};
  }
  return reduced;
}

static bool reduces_all(const std::vector<int64_t>& reduced, const Tensor& input) {
  if (reduced.empty()) return true;
  int64_t kept = input.numel();
  for (const int64_t number : reduced) kept /= std::max<int64_t>(1, input.size(number));
  return kept <= 1;
}

// Returns whether the division among threads may decide how a column is added.
//
// torch gives each thread columns that lie side by side, in multiples of 128 bytes, and the last
// one the rest. Columns that do not fill a vector are added four at a time, in another order than
// the last columns of a wider part. Up to three are added one by one in both cases. Tensors of
// other layouts are divided in other ways.
static bool divides_columns(const std::vector<int64_t>& reduced, const Tensor& input) {
  if (reduces_all(reduced, input) || !input.is_contiguous()) return true;
  int64_t last = 0;
  for (const int64_t number : reduced)
    if (input.size(number) > 1) last = std::max(last, number);
  int64_t columns = 1;
  for (int64_t i = last + 1; i < input.dim(); ++i) columns *= input.size(i);
  constexpr int64_t kPart = 128, kVector = 32, kTogether = 4;
  const auto size = static_cast<int64_t>(input.element_size());
  const int64_t rest = columns % (kPart / size);
  return rest >= kTogether && rest < kVector / size;
}

template <When when>
struct WithOneThread : c10::OperatorKernel {
  explicit WithOneThread(SafeKernelFunction kernel) : original(std::move(kernel)) {}

  void operator()(const OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) const {
    if (!is_divided(Arguments(op, *stack))) return original.callBoxed(op, keys, stack);
    const OneThread guard;
    original.callBoxed(op, keys, stack);
  }

  static bool is_divided(const Arguments& arguments) {
    if constexpr (when == When::always) return true;
    if constexpr (when == When::parameters) {
      const auto mask = arguments.find("output_mask");
      return !mask || arguments[*mask].toBoolList()[1] || arguments[*mask].toBoolList()[2];
    }
    if (!arguments.count() || !arguments[0].isTensor()) return true;
    const Tensor& input = arguments[0].toTensor();
    if constexpr (when == When::one_result)
      return reduces_all(list_reduced(arguments, input), input);
    if constexpr (when == When::sum) return divides_columns(list_reduced(arguments, input), input);
    if (input.dim() <= 2 || input.numel() == input.size(0) * input.size(1)) return true;
    for (size_t i = 0; i < arguments.count(); ++i)
      if (arguments[i].isTensor() && arguments[i].toTensor().defined() &&
          !arguments[i].toTensor().is_contiguous())
        return true;
    return false;
  }

  SafeKernelFunction original;
};

// A kernel of MKL or oneDNN, which chooses its code by the processor.
struct OfMkl : WithOneThread<When::always> {
  using WithOneThread::WithOneThread;
  void operator()(const OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) const {
    const std::string name = op.schema().name().substr(op.schema().name().find("::") + 2);
    note_unportable(name);
    WithOneThread::operator()(op, keys, stack);
  }
};

// ---- in pieces ----

// Tensors of one dense layout, which are divided. Tensors without dimensions, as numbers, stay.
struct DenseTensors {
  explicit DenseTensors(const Arguments& arguments) {
    for (size_t i = 0; i < arguments.count(); ++i) {
      if (arguments[i].isTensorList() || arguments[i].isOptionalTensorList()) return;
      if (!arguments[i].isTensor()) continue;
      const Tensor& tensor = arguments[i].toTensor();
      if (!tensor.defined() || (!tensor.dim() && !arguments.is_written(i))) continue;
      if (!tensor.device().is_cpu() || tensor.layout() != at::kStrided || tensor.is_neg() ||
          tensor.is_conj() || tensor._is_zerotensor())
        return;
      if (tensors.empty()
              ? !tensor.is_non_overlapping_and_dense()
              : tensor.sizes() != first().sizes() || tensor.strides() != first().strides())
        return;
      tensors.emplace_back(i, tensor);
      if (arguments.is_written(i)) written.push_back(tensor);
    }
    // torch has an error for tensors that share a part of their memory.
    for (const Tensor& to : written)
      for (const auto& [i, from] : tensors)
        if (to.is_alias_of(from) && (to.const_data_ptr() != from.const_data_ptr() ||
                                     to.scalar_type() != from.scalar_type()))
          return;
    are_divisible = !tensors.empty() && (written.empty() || written.size() == arguments.results());
  }
  const Tensor& first() const { return tensors.front().second; }

  std::vector<std::pair<size_t, Tensor>> tensors;  // by the number of the argument
  std::vector<Tensor> written;
  bool are_divisible = false;
};

// A result as TensorIterator allocates it.
static Tensor allocate(const Tensor& like, at::ScalarType type) {
  const auto format = like.is_contiguous() ? at::MemoryFormat::Contiguous
                      : like.is_contiguous(at::MemoryFormat::ChannelsLast)
                          ? at::MemoryFormat::ChannelsLast
                          : at::MemoryFormat::Preserve;
  return at::empty_like(like, like.options().dtype(type), format);
}

// A call that is divided.
class Pieces {
 public:
  // `row` is the number of elements that stay together; `dim` the argument with their dimension.
  Pieces(const SafeKernelFunction& original, const OperatorHandle& op, c10::DispatchKeySet keys,
         Stack values, const DenseTensors& dense, int64_t row, std::optional<size_t> dim)
      : original_(original),
        op_(op),
        keys_(keys),
        values_(std::move(values)),
        dense_(dense),
        has_rows_(dim.has_value()),
        row_(row),
        step_(std::max<int64_t>(1, kPiece / row) * row),
        results_(dense.written) {
    if (dim) values_[*dim] = int64_t{1};
  }

  // Returns false if an operator returns something else than one number for each element.
  bool compute() {
    const int64_t count = dense_.first().numel();
    const int64_t end = std::min(step_, count);
    const Stack first = call_first(end);
    if (is_functional()) {
      for (const c10::IValue& part : first) {
        if (!part.isTensor() || part.toTensor().sizes() != take(dense_.first(), 0, end).sizes())
          return false;
        results_.push_back(allocate(dense_.first(), part.toTensor().scalar_type()));
      }
      store(first, 0);
    }
    run_parallel((count - 1) / step_, 1, [&](int64_t number) {
      const at::AutoDispatchBelowADInplaceOrView guard;  // as on the thread that calls
      const int64_t begin = (number + 1) * step_;
      const Stack parts = call(begin, std::min(begin + step_, count));
      if (is_functional()) store(parts, begin);
    });
    return true;
  }
  const std::vector<Tensor>& results() const { return results_; }

 private:
  bool is_functional() const { return dense_.written.empty(); }

  Tensor take(const Tensor& tensor, int64_t begin, int64_t end) const {
    const int64_t place = tensor.storage_offset() + begin;
    if (!has_rows_) return tensor.as_strided({end - begin}, {1}, place);
    return tensor.as_strided({(end - begin) / row_, row_}, {row_, 1}, place);
  }

  Stack call(int64_t begin, int64_t end) const {
    Stack stack = values_;
    for (const auto& [i, tensor] : dense_.tensors) stack[i] = take(tensor, begin, end);
    original_.callBoxed(op_, keys_, &stack);
    return stack;
  }

  Stack call_first(int64_t end) const {
    const OneThread guard;  // long rows exceed what torch computes in one anyway
    return call(0, end);
  }

  void store(const Stack& parts, int64_t begin) const {
    for (size_t i = 0; i < parts.size(); ++i) {
      const Tensor& part = parts[i].toTensor();
      take(results_[i], begin, begin + part.numel()).copy_(part);
    }
  }

  const SafeKernelFunction& original_;
  const OperatorHandle& op_;
  const c10::DispatchKeySet keys_;
  Stack values_;
  const DenseTensors& dense_;
  const bool has_rows_;
  const int64_t row_, step_;
  std::vector<Tensor> results_;
};

enum class Of {
  all,
  contiguous,  // tensors that are, as pieces are: oneDNN computes no others
  scaled,      // those whose argument `alpha` is not 1
  rows         // along the last dimension, which is the argument `dim`
};

template <Of of>
struct InPieces : c10::OperatorKernel {
  explicit InPieces(SafeKernelFunction kernel) : original(std::move(kernel)) {}

  void operator()(const OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) const {
    if (at::get_num_threads() == 1 || at::in_parallel_region())
      return original.callBoxed(op, keys, stack);
    if constexpr (of == Of::scaled)
      if (!is_scaled(Arguments(op, *stack))) return original.callBoxed(op, keys, stack);
    if (divide(op, keys, stack)) return;
    const OneThread guard;
    original.callBoxed(op, keys, stack);
  }

  static bool is_scaled(const Arguments& arguments) {
    const auto index = arguments.find("alpha");
    return index && !arguments[*index].toScalar().equal(1);
  }

  // Returns false if the call cannot be divided, or is too small.
  bool divide(const OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) const {
    const Arguments arguments(op, *stack);
    const DenseTensors dense(arguments);
    if (!dense.are_divisible || dense.first().numel() <= 2 * kPiece) return false;
    if constexpr (of == Of::contiguous)
      if (!dense.first().is_contiguous()) return false;
    std::optional<size_t> dim;
    int64_t row = 1;
    if constexpr (of == Of::rows) {
      dim = arguments.find("dim");
      const Tensor& first = dense.first();
      const int64_t last = first.dim() - 1;
      if (!dim || !first.is_contiguous()) return false;
      if (const int64_t given = arguments[*dim].toInt(); given != last && given != -1) return false;
      row = first.size(last);
    }
    // Below autograd, as this kernel: otherwise the pieces would be nodes of a graph.
    const at::AutoDispatchBelowADInplaceOrView guard;
    Pieces pieces(original, op, keys, arguments.copy(), dense, row, dim);
    if (!pieces.compute()) return false;
    stack->resize(stack->size() - arguments.count());
    for (const Tensor& result : pieces.results()) stack->emplace_back(result);
    return true;
  }

  SafeKernelFunction original;
};

// ---- functions of float32 ----

struct Original : c10::OperatorKernel {
  explicit Original(SafeKernelFunction kernel) : original(std::move(kernel)) {}
  void operator()(const OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) const {
    original.callBoxed(op, keys, stack);
  }
  SafeKernelFunction original;
};

// `Others` computes what is not in float32.
template <typename Others>
struct OfFloats : Others {
  OfFloats(SafeKernelFunction kernel, ElementFunction function_)
      : Others(std::move(kernel)), function(function_) {}

  void operator()(const OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) const {
    const Arguments arguments(op, *stack);
    Tensor out;
    for (size_t i = 0; i < arguments.count(); ++i)
      if (arguments.is_written(i)) out = arguments[i].toTensor();
    const Tensor result = call_element_function(function, arguments.list(), out);
    if (!result.defined()) return Others::operator()(op, keys, stack);
    stack->resize(stack->size() - arguments.count());
    stack->emplace_back(result);
  }

  ElementFunction function;
};

// ---- the operators ----

using Names = std::unordered_set<std::string>;

// Dense tensors are divided, others are computed with one thread.
static const Names kElementwise = {
    "acosh",
    "addcdiv",
    "addcmul",
    "asinh",
    "atan2",
    "atanh",
    "cosh",
    "digamma",
    "elu",
    "elu_backward",
    "erfinv",
    "exp2",
    "hardsigmoid",
    "hardsigmoid_backward",
    "hardswish",
    "hardswish_backward",
    "hypot",
    "lerp",
    "lgamma",
    "log1p",
    "log_sigmoid_backward",
    "log_sigmoid_forward",
    "logaddexp",
    "logaddexp2",
    "logit",
    "logit_backward",
    "mish",
    "mish_backward",
    "pow",
    "rsqrt",
    "sigmoid",
    "sigmoid_backward",
    "silu",
    "silu_backward",
    "sinc",
    "sinh",
    "softplus",
    "softshrink",
    "softshrink_backward",
    "softplus_backward",
    "special_erfcx",
    "special_i0e",
    "special_log_ndtr",
    "special_ndtri",
    "tanh_backward",
    "xlogy",
};

static const Names kOfOneDnn = {"gelu", "gelu_backward"};

// a + alpha * b, with one rounding or two.
static const Names kScaled = {"add", "rsub", "sub"};

static const Names kInRows = {
    "_log_softmax",
    "_log_softmax_backward_data",
    "_softmax",
    "_softmax_backward_data",
};

static const Names kReductions = {
    "linalg_vector_norm", "norm", "prod", "std", "std_mean", "var", "var_mean",
};
static const Names kSums = {"mean", "nansum", "sum"};

static const Names kNormalizations = {
    "_batch_norm_with_update", "_native_batch_norm_legit",   "batch_norm_backward",
    "native_batch_norm",       "native_batch_norm_backward", "native_group_norm",
};

// Losses divide by the number of elements, which is not that of a piece.
static const Names kOthers = {
    "binary_cross_entropy",
    "binary_cross_entropy_backward",
    "huber_loss",
    "huber_loss_backward",
    "smooth_l1_loss",
    "smooth_l1_loss_backward",
    "_ctc_loss",
    "_ctc_loss_backward",
    "dot",
    "glu",
    "glu_backward",
    "glu_jvp",
    "histc",
    "native_group_norm_backward",
    "vdot",
    // Of complex numbers; of others they are rare.
    "angle",
    "sgn",
};

// LAPACK and FFT divide sums among threads, if the library decides so.
static bool is_of_mkl(const std::string& name) {
  static const Names whole = {"cholesky_inverse", "cholesky", "geqrf", "ormqr", "triangular_solve"};
  static const Names others = {"linalg_vector_norm", "linalg_cross", "linalg__powsum"};
  if (whole.contains(name)) return true;
  if (others.contains(name)) return false;
  for (const char* prefix : {"linalg_", "_linalg_", "_fft_", "_cholesky_"})
    if (name.rfind(prefix, 0) == 0) return true;
  return false;
}

// The name without the namespace, and without the "_" of a form in place.
static std::string base_of(const c10::OperatorName& name) {
  const std::string whole = name.name.substr(name.name.find("::") + 2);
  return whole.back() == '_' ? whole.substr(0, whole.size() - 1) : whole;
}

// Registers a kernel, and before it the function that computes float32, if there is one.
template <typename Kernel>
static void wrap(torch::Library& library, const OperatorHandle& op, ElementFunction function) {
  SafeKernelFunction original = op.getComputedKernelForDispatchKey(DispatchKey::CPU);
  const c10::OperatorName& name = op.operator_name();
  const std::string overload = name.overload_name.empty() ? "" : "." + name.overload_name;
  auto kernel = [&] {
    if (!function)
      return torch::CppFunction::makeFromBoxedFunctor(
          std::make_unique<Kernel>(std::move(original)));
    return torch::CppFunction::makeFromBoxedFunctor(
        std::make_unique<OfFloats<Kernel>>(std::move(original), function));
  };
  library.impl((name.name + overload).c_str(), kernel());
}

using Wrap = void (*)(torch::Library&, const OperatorHandle&, ElementFunction);

static Wrap find_wrap(const std::string& name) {
  if (kElementwise.contains(name)) return &wrap<InPieces<Of::all>>;
  if (kOfOneDnn.contains(name)) return &wrap<InPieces<Of::contiguous>>;
  if (kScaled.contains(name)) return &wrap<InPieces<Of::scaled>>;
  if (kInRows.contains(name)) return &wrap<InPieces<Of::rows>>;
  if (kReductions.contains(name)) return &wrap<WithOneThread<When::one_result>>;
  if (kSums.contains(name)) return &wrap<WithOneThread<When::sum>>;
  if (kNormalizations.contains(name)) return &wrap<WithOneThread<When::channels_last>>;
  if (name == "native_layer_norm_backward") return &wrap<WithOneThread<When::parameters>>;
  if (kOthers.contains(name)) return &wrap<WithOneThread<When::always>>;
  if (is_of_mkl(name)) return &wrap<OfMkl>;
  return nullptr;
}

// All forms of an operator: functional, in place, and with `out`.
void register_threads(torch::Library& library) {
  c10::Dispatcher& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    const ElementFunction function = find_element_function(base_of(name));
    const Wrap listed = find_wrap(base_of(name));
    if (!function && !listed) continue;
    const auto op = dispatcher.findSchema(name);
    if (!op || !op->hasComputedKernelForDispatchKey(DispatchKey::CPU)) continue;
    // What autograd decomposes on CPUs must not get a kernel of its own.
    if (op->hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd) &&
        !op->hasKernelForDispatchKey(DispatchKey::CPU))
      continue;
    const Wrap wrap_operator = listed ? listed : &wrap<Original>;
    wrap_operator(library, *op, function);
  }
}

}  // namespace threads

void register_threads(torch::Library& library) { threads::register_threads(library); }

}  // namespace lockstep
