#include "pass_calls.h"

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <optional>
#include <string>
#include <unordered_set>

#include "torch_errors.h"

namespace py = pybind11;

namespace lockstep {
namespace {

// torch has this key for operators that are seen before any other key, also before autograd.
constexpr auto kKey = c10::DispatchKey::TESTING_ONLY_GenericMode;

thread_local PassCalls* watching = nullptr;
thread_local std::shared_ptr<PassCalls> begun;  // which sees until its end

void end_begun() {
  watching = nullptr;
  begun.reset();
  c10::impl::tls_set_dispatch_key_included(kKey, false);
}

// Operators that call others, which are seen instead: they draw, add up samples, normalize them, or
// compute losses.
const std::unordered_set<std::string> kDivided = {
    "aten::alpha_dropout",
    "aten::alpha_dropout_",
    "aten::batch_norm",
    "aten::cross_entropy_loss",
    "aten::dropout",
    "aten::dropout_",
    "aten::feature_alpha_dropout",
    "aten::feature_alpha_dropout_",
    "aten::feature_dropout",
    "aten::feature_dropout_",
    "aten::kl_div",
    "aten::l1_loss",
    "aten::lstm",
    "aten::nll_loss",
    "aten::nll_loss2d",
    "aten::nll_loss_nd",
    "aten::rand",
    "aten::rand_like",
    "aten::randint",
    "aten::randint_like",
    "aten::randn",
    "aten::randn_like",
    "aten::scaled_dot_product_attention",
    "aten::_batch_norm_impl_index",
    "aten::_scaled_dot_product_attention_math",
};

// Their overloads: every operator is looked up, and a handle is found sooner than a name.
std::unordered_set<c10::OperatorHandle> find_divided() {
  c10::Dispatcher& dispatcher = c10::Dispatcher::singleton();
  std::unordered_set<c10::OperatorHandle> found;
  for (const c10::OperatorName& name : dispatcher.getAllOpNames())
    if (kDivided.contains(name.name))
      if (const auto op = dispatcher.findSchema(name)) found.insert(*op);
  return found;
}

bool is_divided(const c10::OperatorHandle& op, const Stack& stack) {
  static const std::unordered_set<c10::OperatorHandle> divided = find_divided();
  if (!divided.contains(op)) return false;
  const c10::FunctionSchema& schema = op.schema();
  const c10::IValue* const given = stack.data() + stack.size() - schema.arguments().size();
  if (const auto probability = schema.argumentIndexWithName("dropout_p"))
    return given[*probability].toDouble() != 0;
  if (const auto reduction = schema.argumentIndexWithName("reduction"))
    return watching->joins_losses() && given[*reduction].toInt() != 0;
  const bool is_norm = schema.name().find("batch_norm") != std::string::npos;
  return !is_norm || given[*schema.argumentIndexWithName("training")].toBool();
}

void call_watched(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  if (begun && begun->has_ended()) end_begun();
  if (watching && is_divided(op, *stack)) {
    const c10::DispatchKeySet lower(c10::DispatchKeySet::FULL_AFTER, kKey);
    op.redispatchBoxed(keys & lower, stack);  // what it calls is seen
    return;
  }
  const c10::impl::ExcludeDispatchKeyGuard below(kKey);
  if (watching)
    watching->call(op, stack);
  else
    op.callBoxed(stack);
}

void register_key() {
  static const torch::Library* const library = [] {
    auto* made = new torch::Library(torch::Library::IMPL, "_", kKey, __FILE__, __LINE__);
    made->fallback(torch::CppFunction::makeFromBoxedFunction<&call_watched>());
    return made;
  }();
  (void)library;
}

class Watching {
 public:
  explicit Watching(PassCalls* calls) : before_(watching), include_(kKey) { watching = calls; }
  ~Watching() { watching = before_; }
  Watching(const Watching&) = delete;
  Watching& operator=(const Watching&) = delete;

 private:
  PassCalls* before_;
  c10::impl::IncludeDispatchKeyGuard include_;
};

}  // namespace

py::object PassCalls::run(const py::function& body) {
  register_key();
  const Watching guard(this);
  return body();
}

void PassCalls::begin() {
  if (begun && begun->has_ended()) end_begun();
  CHECK_ARGUMENT(!watching, "another pass is seen in this thread");
  register_key();
  has_ended_ = false;
  begun = shared_from_this();
  watching = this;
  c10::impl::tls_set_dispatch_key_included(kKey, true);
}

void PassCalls::end() {
  has_ended_ = true;
  if (begun.get() == this) end_begun();
}

}  // namespace lockstep
