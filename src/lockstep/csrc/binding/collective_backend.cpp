// torch's collective calls: each checks its arguments, then hands the call to the core.
#include "collective_backend.h"

#include <pthread.h>
#include <pybind11/pybind11.h>

#include "arguments.h"
#include "collectives/all_reduce.h"
#include "collectives/barrier.h"
#include "collectives/reduce_scatter.h"
#include "errors.h"
#include "torch_errors.h"

namespace lockstep {

CollectiveBackend::CollectiveBackend(int rank, int size, std::chrono::milliseconds timeout,
                                     const std::string& name, const std::vector<int>& ranks)
    : Backend(rank, size),
      options_(c10::make_intrusive<Options>("lockstep", timeout)),
      name_(shown_name(name)) {
  CHECK_ARGUMENT(rank >= 0 && rank < size && (ranks.empty() || ranks.size() == size_t(size)),
                 "a group of ", size, " can't have a rank ", rank, " and ", ranks.size(),
                 " global ranks");
  for (int global : ranks) options_->global_ranks_in_group.push_back(static_cast<uint64_t>(global));
  options_->group_name = name;
}

std::string CollectiveBackend::shown_name(const std::string& name) {
  return name.empty() || name == "0" ? "default" : name;
}

bool CollectiveBackend::shut_down_unless_forked() {
  if (owner_pid_ != current_pid()) {
    leak(queue_);
    leak(runner_);
    return false;
  }
  // The threads that are joined here may need the interpreter's lock before they end.
  if (Py_IsInitialized() && PyGILState_Check()) {
    pybind11::gil_scoped_release release;
    shutdown();
  } else {
    shutdown();
  }
  return true;
}

void CollectiveBackend::check_process() const {
  if (owner_pid_ == current_pid()) return;
  const auto& ranks = options_->global_ranks_in_group;
  const auto rank = static_cast<uint64_t>(rank_);
  const std::string owner = "process " + std::to_string(owner_pid_);
  throw TorchError(
      CommError("rank " + std::to_string(ranks.empty() ? rank : ranks[rank]) + ": process " +
                std::to_string(current_pid()) + " is a fork of " + owner + ", which joined group " +
                name_ + ", and cannot use the group: make this call in " + owner +
                ", or start the new process by spawning it and let it join a group of its own"));
}

void CollectiveBackend::check_usable() {
  if (!queue_) throw TorchError(CommError("the group was destroyed"));
  check_process();
  note_caller(static_cast<unsigned long>(pthread_self()));
  // torch sets the name that the user gave only after the group was created.
  const std::string& given = getGroupDesc();
  if (calls_ == 0 && !given.empty() && given != "undefined" && given != "default_pg") {
    name_ = given;
    set_name(given);
  }
}

at::Tensor CollectiveBackend::allocate(int64_t size, at::ScalarType dtype) {
  try {
    return shared_empty({size}, dtype);
  } catch (...) {
    std::rethrow_exception(to_torch_error());
  }
}

at::Tensor CollectiveBackend::allocateTensor(long size, at::TensorOptions options) {
  const at::ScalarType dtype = c10::typeMetaToScalarType(options.dtype());
  // torch's reducer (2.11 to 2.13) makes views of real numbers of a complex bucket. It converts a
  // bucket that it has allocated by itself, but not one from here.
  if (c10::isComplexType(dtype)) return allocate(2 * size, c10::toRealValueType(dtype));
  return allocate(size, dtype);
}

// ---- starting calls ----

WorkPtr CollectiveBackend::start(c10d::OpType type, Tensors outputs,
                                 std::vector<PreparedCall> calls, std::chrono::milliseconds timeout,
                                 bool is_async, std::vector<OutputTensor> copied_back,
                                 const Tensors* inputs) {
  check_usable();
  if (!calls.empty()) check_permitted(calls.front().info.op);
  calls_ += calls.size();
  if (timeout <= std::chrono::milliseconds(0)) timeout = options_->timeout;
  auto body = [runner = runner_, calls = std::move(calls), copied_back = std::move(copied_back),
               timeout](bool is_background) {
    for (const PreparedCall& prepared : calls) runner->run(prepared, timeout, is_background);
    for (const OutputTensor& tensor : copied_back) tensor.copy_back();
  };
  auto work = c10::make_intrusive<CollectiveWork>(type, std::move(outputs), inputs, queue_,
                                                  std::move(body));
  if (is_coalescing_) is_async = true;
  work->start(is_async);
  if (is_coalescing_) add_to_coalesced(work);
  return work;
}

WorkPtr CollectiveBackend::start_in_steps(Op op, Tensors outputs, std::function<void(bool)> body,
                                          std::function<Progress()> advance) {
  check_usable();
  check_permitted(op);
  ++calls_;
  auto work =
      c10::make_intrusive<CollectiveWork>(c10d::OpType::UNKNOWN, std::move(outputs), nullptr,
                                          queue_, std::move(body), std::move(advance));
  work->start(true);
  return work;
}

void CollectiveBackend::check_root(const char* op, int root) const {
  CHECK_ARGUMENT(root >= 0 && root < size_, op, ": invalid root rank: there is no rank ", root,
                 " in a group of ", size_);
}

void CollectiveBackend::startCoalescing() {
  check_usable();
  is_coalescing_ = true;
  coalesced_.clear();
}

void CollectiveBackend::add_to_coalesced(const WorkPtr& work) {
  // Completed works need not be waited for. If an exception left the coalescing manager,
  // endCoalescing is never called, and this list must not grow with every later call.
  std::erase_if(coalesced_,
                [](const WorkPtr& each) { return each->isCompleted() && each->isSuccess(); });
  coalesced_.push_back(work);
}

WorkPtr CollectiveBackend::endCoalescing() {
  check_usable();
  is_coalescing_ = false;
  return c10::make_intrusive<CompositeWork>(std::exchange(coalesced_, {}), std::vector<Tensors>());
}

static CallInfo make_call_info(Op op, const at::Tensor& tensor, int root = -1) {
  CallInfo info;
  info.op = op;
  info.dtype = static_cast<uint8_t>(tensor.scalar_type());
  info.root = root;
  info.count = static_cast<uint64_t>(tensor.numel());
  return info;
}

static void set_reduction(CallInfo& info, const char* op, const at::Tensor& tensor,
                          const c10d::ReduceOp& reduce) {
  const auto number = static_cast<int>(reduce.op_);
  CHECK_ARGUMENT(number >= 0 && number < kReductions, op, ": unknown reduction");
  const DataType type = data_type_of(tensor.scalar_type());
  const auto reduction = static_cast<Reduction>(number);
  CHECK_ARGUMENT(is_supported(reduction, type), op, ": ", reduction_name(number),
                 " is not defined for ", dtype_name(static_cast<int>(tensor.scalar_type())));
  info.reduction = static_cast<uint8_t>(number);
  if (reduction != Reduction::premul_sum) return;
  const auto* factor = dynamic_cast<c10d::NCCLPreMulSumSupplement*>(reduce.supplement_.get());
  CHECK_ARGUMENT(factor, op, ": PREMUL_SUM has no factor");
  info.factor = factor->tensor_factor.defined() ? factor->tensor_factor.item<double>()
                                                : factor->double_factor;
}

// Returns what is reduced of a plain tensor: the real numbers of complex ones of 16 bits each, for
// which there are no kernels.
static at::Tensor numbers_of(const at::Tensor& tensor, const c10d::ReduceOp& op) {
  const bool is_by_part = op.op_ == c10d::ReduceOp::SUM || op.op_ == c10d::ReduceOp::AVG ||
                          op.op_ == c10d::ReduceOp::PREMUL_SUM;
  return tensor.scalar_type() == at::kComplexHalf && is_by_part ? at::view_as_real(tensor) : tensor;
}

static std::vector<Block> empty_blocks(int n) { return std::vector<Block>(static_cast<size_t>(n)); }

static void copy_bytes(const at::Tensor& to, const at::Tensor& from) {
  lockstep::copy_bytes(to.data_ptr(), from.data_ptr(), from.nbytes());
}

// Returns a body that keeps tensors alive for as long as it exists.
template <typename F>
auto keep_alive(Tensors tensors, F body) {
  return
      [tensors = std::move(tensors), body = std::move(body)](CollectiveCall& call) { body(call); };
}

CollectiveBackend::PreparedCall CollectiveBackend::prepare_exchange(CallInfo info,
                                                                    ExchangeBlocks blocks) {
  info.uneven = 1;
  return {info, [blocks = std::move(blocks)](CollectiveCall& call) { exchange(call, blocks); }};
}

// ---- all-reduce, reduce, barrier ----

CollectiveBackend::PreparedCall CollectiveBackend::prepare_all_reduce(const at::Tensor& given,
                                                                      const c10d::ReduceOp& op,
                                                                      int root) {
  const at::Tensor tensor = numbers_of(given, op);
  CallInfo info = make_call_info(root < 0 ? Op::all_reduce : Op::reduce, tensor, root);
  set_reduction(info, op_name(info.op), tensor, op);
  const DataType type = data_type_of(tensor.scalar_type());
  const auto reduction = static_cast<Reduction>(info.reduction);
  return {info, [tensor, type, reduction, root](CollectiveCall& call) {
            all_reduce(call, tensor.data_ptr(), static_cast<size_t>(tensor.numel()), type,
                       reduction, root);
          }};
}

WorkPtr CollectiveBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  const char* op = "all_reduce";
  check_alike(op, tensors);
  if (tensors.size() > 1) return allreduce_list(tensors, opts);
  OutputTensor tensor(op, tensors[0], true);
  return start(c10d::OpType::ALLREDUCE, tensors,
               {prepare_all_reduce(tensor.plain(), opts.reduceOp, -1)}, opts.timeout, opts.asyncOp,
               {tensor});
}

// Reduces several tensors per rank to one result, which all of them receive.
WorkPtr CollectiveBackend::allreduce_list(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  const char* op = "all_reduce";
  OutputList written(op);
  Tensors plain;
  for (const at::Tensor& tensor : tensors)
    plain.push_back(numbers_of(written.add(tensor, true), opts.reduceOp));
  PreparedCall call = prepare_all_reduce(plain[0], opts.reduceOp, -1);
  ReductionSpec spec{data_type_of(plain[0].scalar_type()),
                     static_cast<Reduction>(call.info.reduction)};
  CHECK_ARGUMENT(spec.reduction != Reduction::avg && spec.reduction != Reduction::premul_sum, op,
                 ": ", reduction_name(call.info.reduction),
                 " is not defined for several tensors per rank; use SUM");
  TreeReducer local(tree_steps(static_cast<int>(plain.size())), std::move(spec));
  call.body = [plain, local, reduce = std::move(call.body)](CollectiveCall& call) {
    std::vector<const char*> inputs;
    for (const at::Tensor& tensor : plain)
      inputs.push_back(static_cast<const char*>(tensor.data_ptr()));
    local.run(inputs, {static_cast<char*>(plain[0].data_ptr())},
              static_cast<size_t>(plain[0].numel()));
    reduce(call);
    for (size_t i = 1; i < plain.size(); ++i) copy_bytes(plain[i], plain[0]);
  };
  return start(c10d::OpType::ALLREDUCE, tensors, {std::move(call)}, opts.timeout, opts.asyncOp,
               written.take());
}

WorkPtr CollectiveBackend::allreduce_coalesced(Tensors& tensors,
                                               const c10d::AllreduceCoalescedOptions& opts) {
  CHECK_ARGUMENT(!tensors.empty(), "all_reduce_coalesced requires non-empty tensor lists");
  std::vector<PreparedCall> calls;
  OutputList outputs("all_reduce_coalesced");
  for (const at::Tensor& tensor : tensors)
    calls.push_back(prepare_all_reduce(outputs.add(tensor, true), opts.reduceOp, -1));
  return start(c10d::OpType::ALLREDUCE_COALESCED, tensors, std::move(calls), opts.timeout,
               opts.asyncOp, outputs.take());
}

WorkPtr CollectiveBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  const int root = static_cast<int>(opts.rootRank);
  check_root("reduce", root);
  check_root_tensor("reduce", opts.rootTensor, tensors);
  const at::Tensor& given = single("reduce", tensors);
  if (root != rank_)
    return start(c10d::OpType::REDUCE, tensors,
                 {prepare_all_reduce(as_input("reduce", given), opts.reduceOp, root)}, opts.timeout,
                 opts.asyncOp, {});
  OutputTensor tensor("reduce", given, true);
  return start(c10d::OpType::REDUCE, tensors,
               {prepare_all_reduce(tensor.plain(), opts.reduceOp, root)}, opts.timeout,
               opts.asyncOp, {tensor});
}

WorkPtr CollectiveBackend::barrier(const c10d::BarrierOptions& opts) {
  CallInfo info;
  info.op = Op::barrier;
  Body body = [](CollectiveCall& call) { lockstep::barrier(call); };
  return start(c10d::OpType::BARRIER, {}, {{info, std::move(body)}}, opts.timeout, opts.asyncOp,
               {});
}

void CollectiveBackend::monitoredBarrier(const c10d::BarrierOptions& opts, bool) {
  // Every barrier of this backend names the missing ranks.
  c10d::BarrierOptions synchronous = opts;
  synchronous.asyncOp = false;
  barrier(synchronous)->wait();
}

// ---- broadcast, gather, scatter ----

WorkPtr CollectiveBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
  const char* op = "broadcast";
  const int root = static_cast<int>(opts.rootRank);
  check_root(op, root);
  check_root_tensor(op, opts.rootTensor, tensors);
  check_alike(op, tensors);
  const at::Tensor& given = tensors[static_cast<size_t>(opts.rootTensor)];
  ExchangeBlocks blocks{empty_blocks(size_), empty_blocks(size_), true};
  OutputList written(op);
  at::Tensor tensor;
  if (rank_ != root) blocks.receive[root] = block_of(tensor = written.add(given, false));
  Tensors copies;  // the other tensors of the list
  for (const at::Tensor& each : tensors)
    if (&each != &given) copies.push_back(written.add(each, false));
  if (rank_ == root) {
    tensor = written.as_input(given);
    for (int d = 0; d < size_; ++d)
      if (d != root) blocks.send[d] = block_of(tensor);
  }
  PreparedCall call =
      prepare_exchange(make_call_info(Op::broadcast, given, root), std::move(blocks));
  call.body = [tensor, copies, move = std::move(call.body)](CollectiveCall& call) {
    move(call);
    for (const at::Tensor& copy : copies) copy_bytes(copy, tensor);
  };
  return start(c10d::OpType::BROADCAST, tensors, {std::move(call)}, opts.timeout, opts.asyncOp,
               written.take());
}

WorkPtr CollectiveBackend::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                                  const c10d::GatherOptions& opts) {
  const int root = static_cast<int>(opts.rootRank);
  check_root("gather", root);
  const at::Tensor& given = single("gather", inputs, "input ");
  ExchangeBlocks blocks{empty_blocks(size_), empty_blocks(size_), true};
  OutputList written("gather");
  if (rank_ == root) {
    const Tensors& list = single("gather", outputs, "output", size_);
    check_list("gather", "output", list, given, size_);
    for (int s = 0; s < size_; ++s) blocks.receive[s] = block_of(written.add(list[s], false));
  } else {
    CHECK_ARGUMENT(outputs.empty(), "gather requires empty output on non-root ranks");
  }
  const at::Tensor input = written.as_input(given, blocks.receive[root]);
  blocks.send[root] = block_of(input);
  PreparedCall call = prepare_exchange(make_call_info(Op::gather, input, root), std::move(blocks));
  call.body = keep_alive({input}, std::move(call.body));
  return start(c10d::OpType::GATHER, rank_ == root ? outputs[0] : Tensors{}, {std::move(call)},
               opts.timeout, opts.asyncOp, written.take(), &inputs);
}

WorkPtr CollectiveBackend::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                   const c10d::ScatterOptions& opts) {
  const int root = static_cast<int>(opts.rootRank);
  check_root("scatter", root);
  OutputTensor output("scatter", single("scatter", outputs, "output "), false);
  ExchangeBlocks blocks{empty_blocks(size_), empty_blocks(size_), false};
  blocks.receive[root] = block_of(output.plain());
  Tensors plain;
  if (rank_ == root) {
    const Tensors& list = single("scatter", inputs, "input", size_);
    check_list("scatter", "input", list, output.plain(), size_);
    for (int d = 0; d < size_; ++d) {
      plain.push_back(as_input("scatter", list[d]));
      blocks.send[d] = block_of(plain.back());
    }
  } else {
    CHECK_ARGUMENT(inputs.empty(), "scatter requires empty input on non-root ranks");
  }
  PreparedCall call =
      prepare_exchange(make_call_info(Op::scatter, output.plain(), root), std::move(blocks));
  call.body = keep_alive(std::move(plain), std::move(call.body));
  return start(c10d::OpType::SCATTER, outputs, {std::move(call)}, opts.timeout, opts.asyncOp,
               {output}, inputs.empty() ? nullptr : &inputs[0]);
}

// ---- all-gather ----

// `receive` lists the blocks to receive into, by rank: parts of one output, or a list of them.
CollectiveBackend::PreparedCall CollectiveBackend::prepare_all_gather(const OutputList& outputs,
                                                                      const at::Tensor& input,
                                                                      std::vector<Block> receive) {
  const at::Tensor plain = outputs.as_input(input, receive[rank_]);
  ExchangeBlocks blocks{std::vector<Block>(size_, block_of(plain)), std::move(receive), true};
  PreparedCall call = prepare_exchange(make_call_info(Op::all_gather, plain), std::move(blocks));
  call.body = keep_alive({plain}, std::move(call.body));
  return call;
}

WorkPtr CollectiveBackend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                     const c10d::AllgatherOptions& opts) {
  const char* op = "all_gather";
  const size_t count = inputs.size();  // of tensors per rank
  CHECK_ARGUMENT(count > 0, op, " requires non-empty input tensor lists");
  CHECK_ARGUMENT(outputs.size() == count, op,
                 " requires input/output tensor lists to have the same length, not ", count,
                 " inputs and ", outputs.size(), " lists of outputs");
  check_alike(op, inputs);
  for (const Tensors& list : outputs) {
    CHECK_ARGUMENT(list.size() == count * static_cast<size_t>(size_), op,
                   ": invalid output tensor list: ", list.size(), " tensors for ", size_,
                   " ranks with ", count, " each");
    for (const at::Tensor& output : list) check_dtypes(op, output, inputs[0]);
  }
  // outputs[...][rank * count + i] is input i of that rank; all lists of outputs are the same.
  OutputList written(op);
  std::vector<Tensors> lists;
  for (const Tensors& list : outputs) {
    lists.emplace_back();
    for (const at::Tensor& output : list) lists.back().push_back(written.add(output, false));
  }
  std::vector<PreparedCall> calls;
  for (size_t i = 0; i < count; ++i) {
    std::vector<Block> receive;
    for (size_t r = 0; r < static_cast<size_t>(size_); ++r)
      receive.push_back(block_of(lists[0][r * count + i]));
    calls.push_back(prepare_all_gather(written, inputs[i], std::move(receive)));
  }
  if (count > 1)
    calls.back().body = [lists, gather = std::move(calls.back().body)](CollectiveCall& call) {
      gather(call);
      for (size_t j = 1; j < lists.size(); ++j)
        for (size_t k = 0; k < lists[j].size(); ++k) copy_bytes(lists[j][k], lists[0][k]);
    };
  WorkPtr work = start(c10d::OpType::ALLGATHER, count == 1 ? outputs[0] : Tensors{},
                       std::move(calls), opts.timeout, opts.asyncOp, written.take(), &inputs);
  if (count == 1) return work;
  return c10::make_intrusive<CompositeWork>(std::vector{std::move(work)}, outputs);
}

WorkPtr CollectiveBackend::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                               const c10d::AllgatherOptions& opts) {
  const char* op = "all_gather_coalesced";
  CHECK_ARGUMENT(!inputs.empty(), op, " requires non-empty input tensor lists");
  CHECK_ARGUMENT(static_cast<int>(outputs.size()) == size_, op,
                 ": output lists should be equal to world size: ", outputs.size(), " lists for ",
                 size_, " ranks");
  OutputList written(op);
  // outputs[rank][i] is the i-th tensor of that rank.
  std::vector<std::vector<Block>> receive(inputs.size());
  for (const Tensors& list : outputs) {
    CHECK_ARGUMENT(list.size() == inputs.size(), op, ": a list of ", list.size(), " outputs for ",
                   inputs.size(), " inputs");
    for (size_t i = 0; i < list.size(); ++i)
      receive[i].push_back(block_of(written.add(list[i], false)));
  }
  std::vector<PreparedCall> calls;
  for (size_t i = 0; i < inputs.size(); ++i) {
    for (const Tensors& list : outputs) {
      CHECK_ARGUMENT(list[i].scalar_type() == inputs[i].scalar_type(), op,
                     ": invalid tensor type at index ", i, ": an output and its input differ");
      CHECK_ARGUMENT(list[i].sizes() == inputs[i].sizes(), op,
                     ": invalid size of output tensor at index ", i, ": ", list[i].sizes(),
                     ", and the input has ", inputs[i].sizes());
    }
    calls.push_back(prepare_all_gather(written, inputs[i], std::move(receive[i])));
  }
  WorkPtr work = start(c10d::OpType::ALLGATHER_COALESCED, {}, std::move(calls), opts.timeout,
                       opts.asyncOp, written.take(), &inputs);
  return c10::make_intrusive<CompositeWork>(std::vector{std::move(work)}, outputs);
}

// Splits the output of an all-gather into one block for each of `n` ranks.
static std::vector<Block> split_output(const char* op, const at::Tensor& output,
                                       const at::Tensor& input, int n) {
  check_dtypes(op, output, input);
  CHECK_ARGUMENT(output.numel() == input.numel() * n, op, ": the output has ", output.numel(),
                 " elements, but the inputs of ", n, " ranks have ", input.numel(), " each");
  std::vector<Block> blocks;
  char* to = static_cast<char*>(output.data_ptr());
  for (int r = 0; r < n; ++r) blocks.push_back({to + r * input.nbytes(), input.nbytes()});
  return blocks;
}

WorkPtr CollectiveBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                           const c10d::AllgatherOptions& opts) {
  const char* op = "all_gather_into_tensor";
  check_tensor(op, input);
  OutputList written(op);
  const at::Tensor into = written.add(output, false);
  PreparedCall call = prepare_all_gather(written, input, split_output(op, into, input, size_));
  Tensors inputs{input};
  return start(c10d::OpType::_ALLGATHER_BASE, {output}, {std::move(call)}, opts.timeout,
               opts.asyncOp, written.take(), &inputs);
}

WorkPtr CollectiveBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                           const c10d::AllgatherOptions& opts) {
  const char* op = "all_gather_into_tensor_coalesced";
  CHECK_ARGUMENT(outputs.size() == inputs.size(), op, ": ", outputs.size(), " outputs for ",
                 inputs.size(), " inputs");
  OutputList written(op);
  Tensors into;
  for (const at::Tensor& output : outputs) into.push_back(written.add(output, false));
  std::vector<PreparedCall> calls;
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_tensor(op, inputs[i]);
    calls.push_back(
        prepare_all_gather(written, inputs[i], split_output(op, into[i], inputs[i], size_)));
  }
  return start(c10d::OpType::COALESCED, outputs, std::move(calls), opts.timeout, opts.asyncOp,
               written.take());
}

// ---- reduce-scatter ----

CollectiveBackend::PreparedCall CollectiveBackend::prepare_reduce_scatter(
    const char* op, Tensors inputs, const at::Tensor& given, const c10d::ReduceOp& reduce_op,
    bool uneven) {
  const at::Tensor output = numbers_of(given, reduce_op);
  CallInfo info = make_call_info(Op::reduce_scatter, output);
  info.uneven = uneven;
  set_reduction(info, op, output, reduce_op);
  CHECK_ARGUMENT(inputs[rank_].numel() == given.numel(), op, ": the output has ", given.numel(),
                 " elements, but the input for this rank has ", inputs[rank_].numel());
  for (at::Tensor& input : inputs) {
    check_dtypes(op, input, given);
    input = numbers_of(input, reduce_op);
    const bool is_in_place = &input == &inputs[rank_] && input.data_ptr() == output.data_ptr();
    if (!is_in_place && do_overlap(input, output)) input = input.clone();
  }
  std::vector<Block> send;
  for (const at::Tensor& input : inputs) send.push_back(block_of(input));
  const DataType type = data_type_of(output.scalar_type());
  const auto reduction = static_cast<Reduction>(info.reduction);
  Body body = [output, send, type, reduction](CollectiveCall& call) {
    lockstep::reduce_scatter(call, send, static_cast<char*>(output.data_ptr()),
                             static_cast<size_t>(output.numel()), type, reduction);
  };
  return {info, keep_alive(std::move(inputs), std::move(body))};
}

static Tensors split_input(const char* op, const at::Tensor& input, const at::Tensor& output,
                           int n) {
  CHECK_ARGUMENT(input.numel() == output.numel() * n, op, ": the input has ", input.numel(),
                 " elements, but the outputs of ", n, " ranks have ", output.numel(), " each");
  const at::Tensor flat = input.view({-1});
  Tensors parts;
  for (int r = 0; r < n; ++r) parts.push_back(flat.narrow(0, r * output.numel(), output.numel()));
  return parts;
}

WorkPtr CollectiveBackend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                          const c10d::ReduceScatterOptions& opts) {
  const char* op = "reduce_scatter";
  OutputTensor output(op, single(op, outputs, "output "), false);
  const Tensors& list = single(op, inputs, "input", size_);
  check_list(op, "input", list, output.plain(), size_);
  Tensors parts;
  for (const at::Tensor& tensor : list) parts.push_back(as_input(op, tensor));
  PreparedCall call =
      prepare_reduce_scatter(op, std::move(parts), output.plain(), opts.reduceOp, true);
  return start(c10d::OpType::REDUCE_SCATTER, outputs, {std::move(call)}, opts.timeout, opts.asyncOp,
               {output}, &list);
}

WorkPtr CollectiveBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                const c10d::ReduceScatterOptions& opts) {
  const char* op = "reduce_scatter_tensor";
  OutputTensor written(op, output, false);
  PreparedCall call =
      prepare_reduce_scatter(op, split_input(op, as_input(op, input), written.plain(), size_),
                             written.plain(), opts.reduceOp, true);
  Tensors inputs{input};
  return start(c10d::OpType::_REDUCE_SCATTER_BASE, {output}, {std::move(call)}, opts.timeout,
               opts.asyncOp, {written}, &inputs);
}

WorkPtr CollectiveBackend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                           const c10d::ReduceScatterOptions& opts) {
  const char* op = "reduce_scatter_tensor_coalesced";
  CHECK_ARGUMENT(outputs.size() == inputs.size(), op, ": ", outputs.size(), " outputs for ",
                 inputs.size(), " inputs");
  OutputList written(op);
  Tensors plain;
  for (const at::Tensor& output : outputs) plain.push_back(written.add(output, false));
  std::vector<PreparedCall> calls;
  for (size_t i = 0; i < inputs.size(); ++i) {
    const at::Tensor input = written.as_input(inputs[i], block_of(plain[i]));
    calls.push_back(prepare_reduce_scatter(op, split_input(op, input, plain[i], size_), plain[i],
                                           opts.reduceOp, true));
  }
  // torch 2.11 has no type for the coalesced call.
  return start(c10d::OpType::_REDUCE_SCATTER_BASE, outputs, std::move(calls), opts.timeout,
               opts.asyncOp, written.take());
}

// ---- all-to-all ----

// Splits the rows of a tensor into one block per rank; evenly if `sizes` is empty.
static std::vector<Block> split_rows(const char* what, const at::Tensor& tensor,
                                     const std::vector<int64_t>& sizes, int n) {
  const int64_t rows = tensor.dim() == 0 ? 1 : tensor.size(0);
  const size_t row = rows == 0 ? 0 : tensor.nbytes() / static_cast<size_t>(rows);
  std::vector<Block> blocks;
  char* data = static_cast<char*>(tensor.data_ptr());
  if (sizes.empty()) {
    CHECK_ARGUMENT(rows % n == 0, "all_to_all_single: ", rows, " rows of the ", what,
                   " can't be split evenly among ", n, " ranks");
    for (int r = 0; r < n; ++r, data += row * (rows / n))
      blocks.push_back({data, row * static_cast<size_t>(rows / n)});
    return blocks;
  }
  CHECK_ARGUMENT(static_cast<int>(sizes.size()) == n, "all_to_all_single: ", sizes.size(),
                 " sizes for ", n, " ranks");
  int64_t total = 0;
  for (int64_t size : sizes) {
    CHECK_ARGUMENT(size >= 0, "all_to_all_single: negative size ", size);
    blocks.push_back({data, row * static_cast<size_t>(size)});
    data += blocks.back().bytes;
    total += size;
  }
  CHECK_ARGUMENT(total == rows, "all_to_all_single: the sizes of the ", what, " add up to ", total,
                 ", but it has ", rows, " rows");
  return blocks;
}

WorkPtr CollectiveBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                         std::vector<int64_t>& output_sizes,
                                         std::vector<int64_t>& input_sizes,
                                         const c10d::AllToAllOptions& opts) {
  const char* op = "all_to_all_single";
  OutputTensor written(op, output, false);
  at::Tensor plain = as_input(op, input);
  check_dtypes(op, output, input);
  if (do_overlap(plain, written.plain())) plain = plain.clone();
  ExchangeBlocks blocks{split_rows("input", plain, input_sizes, size_),
                        split_rows("output", written.plain(), output_sizes, size_), false};
  PreparedCall call = prepare_exchange(make_call_info(Op::all_to_all, plain), std::move(blocks));
  call.body = keep_alive({plain}, std::move(call.body));
  Tensors inputs{input};
  return start(c10d::OpType::ALLTOALL_BASE, {output}, {std::move(call)}, opts.timeout, opts.asyncOp,
               {written}, &inputs);
}

WorkPtr CollectiveBackend::alltoall(Tensors& outputs, Tensors& inputs,
                                    const c10d::AllToAllOptions& opts) {
  const char* op = "all_to_all";
  CHECK_ARGUMENT(!inputs.empty(), op, " takes a list of tensors for each rank");
  check_list(op, "input", inputs, inputs[0], size_);
  check_list(op, "output", outputs, inputs[0], size_);
  ExchangeBlocks blocks{empty_blocks(size_), empty_blocks(size_), false};
  Tensors plain;
  OutputList written(op);
  for (int r = 0; r < size_; ++r) blocks.receive[r] = block_of(written.add(outputs[r], false));
  for (int r = 0; r < size_; ++r) {
    plain.push_back(written.as_input(inputs[r]));
    blocks.send[r] = block_of(plain.back());
  }
  // The sizes are compared for each pair of ranks; the count of the first input is not.
  CallInfo info = make_call_info(Op::all_to_all, inputs[0]);
  PreparedCall call = prepare_exchange(info, std::move(blocks));
  call.body = keep_alive(std::move(plain), std::move(call.body));
  return start(c10d::OpType::ALLTOALL, outputs, {std::move(call)}, opts.timeout, opts.asyncOp,
               written.take(), &inputs);
}

// ---- messages ----

WorkPtr CollectiveBackend::post_message(c10d::OpType type, Tensors& tensors, int peer, int tag) {
  check_usable();
  const bool is_send = type == c10d::OpType::SEND;
  const char* op = is_send ? "send" : "recv";
  check_permitted(is_send ? Op::send : Op::recv);
  CHECK_ARGUMENT(tensors.size() == 1, op, " takes one tensor");
  check_tensor(op, tensors[0]);
  CHECK_ARGUMENT((peer >= 0 || type == c10d::OpType::RECVANYSOURCE) && peer < size_, op,
                 ": there is no rank ", peer, " in a group of ", size_);
  ++calls_;
  return start_message(type, tensors, peer, tag);
}

WorkPtr CollectiveBackend::send(Tensors& tensors, int target, int tag) {
  return post_message(c10d::OpType::SEND, tensors, target, tag);
}

WorkPtr CollectiveBackend::recv(Tensors& tensors, int source, int tag) {
  return post_message(c10d::OpType::RECV, tensors, source, tag);
}

WorkPtr CollectiveBackend::recvAnysource(Tensors& tensors, int tag) {
  return post_message(c10d::OpType::RECVANYSOURCE, tensors, -1, tag);
}

}  // namespace lockstep
