#include "element_functions.h"

#include <ATen/TensorIterator.h>

#include <algorithm>
#include <map>

#include "portable_kernels.h"

namespace lockstep {
namespace element_functions {

using Arguments = c10::ArrayRef<c10::IValue>;

constexpr int64_t kGathered = 512;  // numbers that do not lie side by side, and are copied

static bool is_float(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kFloat && tensor.device().is_cpu() &&
         tensor.layout() == at::kStrided;
}

// The numbers of an argument, side by side.
static const float* gather(const char* data, int64_t stride, int64_t count, float* place) {
  if (stride == sizeof(float)) return reinterpret_cast<const float*>(data);
  for (int64_t i = 0; i < count; ++i) place[i] = *reinterpret_cast<const float*>(data + i * stride);
  return place;
}

// Calls body(inputs, to, count) for numbers that lie side by side.
template <int inputs, typename Body>
static at::Tensor compute(at::TensorIterator iterator, const Body& body) {
  iterator.for_each([&](char** data, const int64_t* strides, int64_t count) {
    const bool is_dense = std::all_of(strides, strides + 1 + inputs,
                                      [](int64_t stride) { return stride == sizeof(float); });
    const int64_t part = is_dense ? count : std::min(count, kGathered);
    for (int64_t begin = 0; begin < count; begin += part) {
      const int64_t size = std::min(part, count - begin);
      float places[1 + inputs][kGathered];
      const float* from[inputs];
      for (int i = 0; i < inputs; ++i)
        from[i] = gather(data[1 + i] + begin * strides[1 + i], strides[1 + i], size, places[i]);
      char* const first = data[0] + begin * strides[0];
      float* const to = is_dense ? reinterpret_cast<float*>(first) : places[inputs];
      body(from, to, size);
      if (!is_dense)
        for (int64_t i = 0; i < size; ++i)
          *reinterpret_cast<float*>(first + i * strides[0]) = to[i];
    }
  });
  return iterator.output();
}

static at::Tensor compute(Functions::Of function, const Arguments& arguments, at::Tensor& out) {
  const at::Tensor& x = arguments[0].toTensor();
  if (!is_float(x)) return {};
  return compute<1>(
      at::TensorIterator::unary_float_op(out, x),
      [&](const float* const* from, float* to, int64_t count) { function(from[0], to, count); });
}

static at::Tensor compute(Functions::GradientOf function, const Arguments& arguments,
                          at::Tensor& out) {
  const at::Tensor &of_result = arguments[0].toTensor(), &x = arguments[1].toTensor();
  if (!is_float(of_result) || !is_float(x)) return {};
  return compute<2>(at::TensorIterator::binary_op(out, of_result, x),
                    [&](const float* const* from, float* to, int64_t count) {
                      function(from[0], from[1], to, count);
                    });
}

template <auto Functions::* function>
static at::Tensor call(const Arguments& arguments, at::Tensor& out) {
  return compute(portable_gemm().functions.*function, arguments, out);
}

// `place`: that of the argument `approximate`.
template <auto Functions::* exact, auto Functions::* approximate, int place>
static at::Tensor call_gelu(const Arguments& arguments, at::Tensor& out) {
  const std::string& name = arguments[place].toStringRef();
  if (name == "none") return call<exact>(arguments, out);
  return name == "tanh" ? call<approximate>(arguments, out) : at::Tensor();
}

}  // namespace element_functions

ElementFunction find_element_function(const std::string& name) {
  using namespace element_functions;
  static const std::map<std::string, ElementFunction> functions{
      {"exp", call<&Functions::exp>},
      {"log", call<&Functions::log>},
      {"tanh", call<&Functions::tanh>},
      {"erf", call<&Functions::erf>},
      {"tanh_backward", call<&Functions::tanh_gradient>},
      {"sigmoid", call<&Functions::sigmoid>},
      {"sigmoid_backward", call<&Functions::sigmoid_gradient>},
      {"silu", call<&Functions::silu>},
      {"silu_backward", call<&Functions::silu_gradient>},
      {"gelu", call_gelu<&Functions::gelu, &Functions::gelu_tanh, 1>},
      {"gelu_backward", call_gelu<&Functions::gelu_gradient, &Functions::gelu_tanh_gradient, 2>},
  };
  const auto found = functions.find(name);
  return found == functions.end() ? nullptr : found->second;
}

at::Tensor call_element_function(ElementFunction function,
                                 const c10::ArrayRef<c10::IValue>& arguments, at::Tensor out) {
  if (out.defined() && !element_functions::is_float(out)) return {};
  return function(arguments, out);
}

}  // namespace lockstep
