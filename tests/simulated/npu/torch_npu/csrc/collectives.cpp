// Collectives of the pretend accelerator: as strict as NCCL's, done by gloo, arriving later.
#include "runtime.h"

#include <c10/core/DeviceGuard.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

#include <unistd.h>

#include <set>

namespace pretend {

namespace {

using at::Tensor;
using c10d::ReduceOp;
using Tensors = std::vector<Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// The host does not wait for it: a stream does.
struct LaterWork final : c10d::Work {
  explicit LaterWork(std::set<c10::DeviceIndex> devices, Tensors results) : results_(std::move(results)) {
    for (auto device : devices) {
      auto stream = collective_stream(device);
      until_.emplace_back(stream, last_task(stream));
    }
  }
  bool isCompleted() override {
    for (auto& [stream, task] : until_)
      if (!is_done(stream, task)) return false;
    return true;
  }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    return true;
  }
  void synchronize() override {
    for (auto& [stream, task] : until_) wait_in_stream(current_stream(stream.device_index()), stream, task);
  }
  void blockCurrentStream() override { synchronize(); }
  Tensors result() override { return results_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    std::vector<c10::Device> devices;
    for (auto& one : until_) {
      devices.push_back(one.first.device());
      run_until(one.first, one.second);
    }
    auto made = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), devices);
    made->markCompleted(c10::IValue(results_));
    return made;
  }
  std::vector<std::pair<c10::Stream, uint64_t>> until_;
  Tensors results_;
};

struct Pretend final : c10d::Backend {
  Pretend(c10::intrusive_ptr<c10d::Backend> gloo, int rank, int size, std::string name)
      : Backend(rank, size), gloo_(std::move(gloo)), name_(std::move(name)) {}

  const std::string getBackendName() const override { return name_; }
  bool supportsCoalescing() const override { return true; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_; }

  // ---- what NCCL refuses
  void check(const Tensor& tensor, bool point_to_point = false) {
    TORCH_CHECK(tensor.device().type() == kKind, "No backend type associated with device type ", tensor.device().type(),
                ": Tensors must be on an accelerator and dense");
    TORCH_CHECK(tensor.is_contiguous(tensor.suggest_memory_format()), "Tensors must be contiguous");
    switch (tensor.scalar_type()) {
      case at::kFloat: case at::kDouble: case at::kHalf: case at::kBFloat16: case at::kChar: case at::kByte:
      case at::kInt: case at::kLong: case at::kBool: case at::kFloat8_e4m3fn: case at::kFloat8_e5m2: break;
      default: TORCH_CHECK(false, "Input tensor data type is not supported for NCCL process group: ", tensor.scalar_type());
    }
    devices_.insert(tensor.device().index());
    if (!point_to_point && met_.insert(tensor.device().index()).second) meet(tensor.device().index());
  }

  // Ranks of a communicator are on devices of their own.
  void meet(int device) {
    char host[65] = {};
    gethostname(host, 64);
    Tensor own = at::zeros({72}, at::kByte);
    std::memcpy(own.data_ptr(), host, 64);
    own[64] = device;
    std::vector<Tensors> all(1);
    for (int r = 0; r < size_; ++r) all[0].push_back(at::empty_like(own));
    Tensors mine{own};
    gloo_->allgather(all, mine)->wait();
    for (int r = 0; r < size_; ++r)
      for (int other = 0; other < r; ++other)
        TORCH_CHECK(!at::equal(all[0][r], all[0][other]), "Duplicate GPU detected : rank ", other, " and rank ", r,
                    " both on ", name_, " device ", int(all[0][r][64].item<uint8_t>()));
  }

  // ---- to the host and back
  Tensor taken(const Tensor& tensor, bool point_to_point = false) {
    check(tensor, point_to_point);
    finish(current_stream(tensor.device().index()));
    return host_view(tensor).clone();
  }
  Tensors taken(const Tensors& tensors) {
    Tensors made;
    for (auto& tensor : tensors) made.push_back(taken(tensor));
    return made;
  }
  void give(const Tensor& to, const Tensor& from) {
    auto stream = collective_stream(to.device().index());
    used_on(to.storage().data(), stream);
    auto current = current_stream(to.device().index());
    wait_in_stream(stream, current, last_task(current)); // whoever had this memory before has done with it
    Tensor view = host_view(to);
    enqueue(stream, [view, from]() mutable { view.copy_(from.view(view.sizes())); });
    results_.push_back(to);
  }
  // On the host, for what comes into ``outputs``.
  std::vector<Tensors> rooms(const std::vector<Tensors>& outputs) {
    std::vector<Tensors> made;
    for (auto& list : outputs) {
      made.emplace_back();
      for (auto& tensor : list) {
        check(tensor);
        made.back().push_back(at::empty(tensor.sizes(), tensor.scalar_type()));
      }
    }
    return made;
  }
  void give(const std::vector<Tensors>& to, const std::vector<Tensors>& from) {
    for (size_t i = 0; i < to.size(); ++i)
      for (size_t j = 0; j < to[i].size(); ++j) give(to[i][j], from[i][j]);
  }
  WorkPtr work() {
    ++sequence_;
    if (coalescing_) return nullptr;
    auto made = c10::make_intrusive<LaterWork>(std::move(devices_), std::move(results_));
    devices_.clear();
    results_.clear();
    return made;
  }
  void startCoalescing() override { coalescing_ = true; }
  WorkPtr endCoalescing() override {
    coalescing_ = false;
    return work();
  }

  static bool averaged(ReduceOp& op) {
    if (op != ReduceOp::AVG) return false;
    op = ReduceOp::SUM;
    return true;
  }
  void mean(Tensor& tensor, bool averaged) {
    if (averaged) tensor.div_(size_);
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override {
    auto own = taken(tensors);
    gloo_->broadcast(own, opts)->wait();
    for (size_t i = 0; i < own.size(); ++i) give(tensors[i], own[i]);
    return work();
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& given) override {
    auto own = taken(tensors);
    auto opts = given;
    bool average = averaged(opts.reduceOp);
    for (size_t i = 0; i < own.size(); ++i) {
      Tensors one{own[i]};
      gloo_->allreduce(one, opts)->wait();
      mean(own[i], average);
      give(tensors[i], own[i]);
    }
    return work();
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) override {
    return allreduce(tensors, opts);
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& given) override {
    auto own = taken(tensors);
    auto opts = given;
    bool average = averaged(opts.reduceOp);
    gloo_->reduce(own, opts)->wait();
    mean(own[0], average);
    if (rank_ == opts.rootRank) give(tensors[0], own[0]);
    return work();
  }
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override {
    auto own = taken(inputs);
    auto made = rooms(outputs);
    gloo_->allgather(made, own, opts)->wait();
    give(outputs, made);
    return work();
  }
  void gather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& opts) {
    TORCH_CHECK(input.scalar_type() == output.scalar_type(), "output tensor must have the same type as input tensor");
    TORCH_CHECK(input.numel() * size_ == output.numel(), "output tensor size must be equal to world_size times input tensor size");
    Tensor own = taken(input);
    check(output);
    Tensor made = at::empty(output.sizes(), output.scalar_type());
    Tensor flat = made.view({-1}), flat_own = own.view({-1});
    gloo_->_allgather_base(flat, flat_own, opts)->wait();
    give(output, made);
  }
  WorkPtr _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& opts) override {
    gather_base(output, input, opts);
    return work();
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override {
    for (size_t i = 0; i < outputs.size(); ++i) gather_base(outputs[i], inputs[i], opts);
    return work();
  }
  void scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& given) {
    TORCH_CHECK(input.scalar_type() == output.scalar_type(), "input tensor must be the same type as the output tensor.");
    TORCH_CHECK(output.numel() * size_ == input.numel(), "input tensor must be the same size as output size times world size");
    Tensor own = taken(input).view({-1});
    check(output);
    auto opts = given;
    bool average = averaged(opts.reduceOp);
    Tensor made = at::empty({output.numel()}, output.scalar_type());
    gloo_->_reduce_scatter_base(made, own, opts)->wait();
    mean(made, average);
    give(output, made);
  }
  WorkPtr _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& opts) override {
    scatter_base(output, input, opts);
    return work();
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& opts) override {
    for (size_t i = 0; i < outputs.size(); ++i) scatter_base(outputs[i], inputs[i], opts);
    return work();
  }
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& opts) override {
    for (size_t i = 0; i < outputs.size(); ++i) {
      for (auto& tensor : inputs[i]) check(tensor);
      Tensors flat;
      for (auto& tensor : inputs[i]) flat.push_back(tensor.view({-1}));
      Tensor input = at::cat(flat);
      scatter_base(outputs[i], input, opts);
    }
    return work();
  }
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& opts) override {
    auto own = taken(inputs);
    auto made = rooms(outputs);
    gloo_->gather(made, own, opts)->wait();
    give(outputs, made);
    return work();
  }
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& opts) override {
    std::vector<Tensors> own;
    for (auto& list : inputs) own.push_back(taken(list));
    Tensors made;
    for (auto& tensor : outputs) {
      check(tensor);
      made.push_back(at::empty(tensor.sizes(), tensor.scalar_type()));
    }
    gloo_->scatter(made, own, opts)->wait();
    for (size_t i = 0; i < made.size(); ++i) give(outputs[i], made[i]);
    return work();
  }
  WorkPtr alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& outputs, std::vector<int64_t>& inputs,
                        const c10d::AllToAllOptions& opts) override {
    Tensor own = taken(input);
    check(output);
    Tensor made = at::empty(output.sizes(), output.scalar_type());
    gloo_->alltoall_base(made, own, outputs, inputs, opts)->wait();
    give(output, made);
    return work();
  }
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions&) override {
    auto own = taken(inputs);
    std::vector<WorkPtr> sent;
    for (int r = 0; r < size_; ++r) {
      check(outputs[r]);
      Tensors one{own[r]};
      if (r != rank_) sent.push_back(gloo_->send(one, r, 77));
    }
    for (int r = 0; r < size_; ++r) {
      Tensors one{r == rank_ ? own[r] : at::empty(outputs[r].sizes(), outputs[r].scalar_type())};
      if (r != rank_) gloo_->recv(one, r, 77)->wait();
      give(outputs[r], one[0]);
    }
    for (auto& one : sent) one->wait();
    return work();
  }
  WorkPtr send(Tensors& tensors, int to, int tag) override {
    std::unique_lock<std::mutex> one_at_a_time(messages_); // threads send and receive beside each other
    Tensors own{taken(tensors[0], true)};
    kept_.push_back({gloo_->send(own, to, tag), own[0]}); // NCCL's does not wait for the other side
    auto made = work();
    if (kept_.size() > 64) {
      auto oldest = kept_.front();
      kept_.erase(kept_.begin());
      one_at_a_time.unlock();
      oldest.first->wait();
    }
    return made;
  }
  WorkPtr recv(Tensors& tensors, int from, int tag) override {
    Tensors own{at::empty(tensors[0].sizes(), tensors[0].scalar_type())};
    gloo_->recv(own, from, tag)->wait();
    std::lock_guard<std::mutex> one_at_a_time(messages_);
    check(tensors[0], true);
    give(tensors[0], own[0]);
    return work();
  }
  WorkPtr barrier(const c10d::BarrierOptions&) override {
    finish_device(current_device());
    gloo_->barrier()->wait();
    return work();
  }

  c10::intrusive_ptr<c10d::Backend> gloo_;
  std::string name_;
  std::set<int> met_;
  std::set<c10::DeviceIndex> devices_;
  Tensors results_;
  std::vector<std::pair<WorkPtr, Tensor>> kept_;
  std::mutex messages_;
  bool coalescing_ = false;
  uint64_t sequence_ = 0;
};

} // namespace

void bind_collectives(py::module& m) {
  m.def("collectives", [](c10::intrusive_ptr<c10d::Backend> gloo, int rank, int size, std::string name) {
    return c10::intrusive_ptr<c10d::Backend>(c10::make_intrusive<Pretend>(std::move(gloo), rank, size, std::move(name)));
  });
}

} // namespace pretend
