// A collective back end of the emulated devices: their memory is the host's, so gloo works on it where it lies.
#include "emulated.h"

#include <ATen/ops/from_blob.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/library.h>

#include <mutex>

namespace emulated {
namespace {

using Tensors = std::vector<at::Tensor>;
using Lists = std::vector<Tensors>;
using WorkPointer = c10::intrusive_ptr<c10d::Work>;

at::Tensor held_on_host(const at::Tensor& tensor) { // keeps the device's tensor alive: gloo works on in the background
  TORCH_CHECK(tensor.device().type() == kType, "expected a tensor of an emulated device, not of ", tensor.device());
  launch(tensor.device().index());
  return at::from_blob(tensor.mutable_data_ptr(), tensor.sizes(), tensor.strides(), [tensor](void*) {},
                       at::TensorOptions().device(at::kCPU).dtype(tensor.dtype()));
}

Tensors held_on_host(const Tensors& tensors) {
  Tensors found;
  for (const auto& tensor : tensors) {
    found.push_back(held_on_host(tensor));
  }
  return found;
}

Lists held_on_host(const Lists& lists) {
  Lists found;
  for (const auto& tensors : lists) {
    found.push_back(held_on_host(tensors));
  }
  return found;
}

Tensors all_of(const Lists& lists) {
  Tensors found;
  for (const auto& tensors : lists) {
    found.insert(found.end(), tensors.begin(), tensors.end());
  }
  return found;
}

using FuturePointer = c10::intrusive_ptr<c10::ivalue::Future>;

// The futures of a group's collectives. `abort` ends them with an error, as NCCL's does. gloo's does nothing. DDP waits
// for futures.
struct Pending {
  void abort() {
    std::lock_guard<std::recursive_mutex> guard(mutex); // a callback of a future may ask for another one
    for (const auto& future : std::exchange(futures, {})) {
      future->setErrorIfNeeded(std::make_exception_ptr(std::runtime_error("NCCL communicator was aborted")));
    }
  }
  void add(const FuturePointer& future) {
    std::lock_guard<std::recursive_mutex> guard(mutex);
    futures.erase(std::remove_if(futures.begin(), futures.end(), [](const auto& one) { return one->completed(); }),
                  futures.end());
    futures.push_back(future);
  }
  std::recursive_mutex mutex;
  std::vector<FuturePointer> futures;
};

// What gloo does, with the device's own tensors for its result.
struct Work final : c10d::Work {
  Work(WorkPointer host, Tensors outputs, std::shared_ptr<Pending> pending)
      : host(std::move(host)), outputs(std::move(outputs)), pending(std::move(pending)) {}
  bool isCompleted() override {
    return host->isCompleted();
  }
  bool isSuccess() const override {
    return host->isSuccess();
  }
  std::exception_ptr exception() const override {
    return host->exception();
  }
  int sourceRank() const override {
    return host->sourceRank();
  }
  bool wait(std::chrono::milliseconds timeout) override {
    return host->wait(timeout);
  }
  void synchronize() override {
    host->synchronize();
  }
  void abort() override {
    host->abort();
  }
  Tensors result() override {
    return outputs;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    std::vector<at::Device> devices;
    for (const auto& tensor : outputs) {
      if (std::find(devices.begin(), devices.end(), tensor.device()) == devices.end()) {
        devices.push_back(tensor.device());
      }
    }
    auto ours = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors(), devices);
    pending->add(ours);
    host->getFuture()->addCallback([ours, outputs = outputs, pending = pending](c10::ivalue::Future& theirs) {
      std::lock_guard<std::recursive_mutex> guard(pending->mutex);
      if (ours->completed()) {
        return; // aborted
      }
      if (theirs.hasError()) {
        ours->setError(theirs.exception_ptr());
      } else {
        ours->markCompleted(at::IValue(outputs));
      }
    });
    return ours;
  }
  WorkPointer host;
  Tensors outputs;
  std::shared_ptr<Pending> pending;
};

struct Backend final : c10d::Backend {
  explicit Backend(c10::intrusive_ptr<c10d::Backend> host)
      : c10d::Backend(host->getRank(), host->getSize()), host(std::move(host)) {}

  const std::string getBackendName() const override {
    return "eccl";
  }
  c10::intrusive_ptr<Options> getBackendOptions() override {
    return host->getBackendOptions();
  }
  void setTimeout(std::chrono::milliseconds timeout) override {
    host->setTimeout(timeout);
  }
  void setSequenceNumberForGroup() override {
    host->setSequenceNumberForGroup();
  }
  uint64_t getSequenceNumberForGroup() override {
    return host->getSequenceNumberForGroup();
  }
  void abort() override {
    pending->abort();
  }
  void shutdown() override {
    host->shutdown();
  }

  WorkPointer made(WorkPointer work, Tensors outputs) {
    return c10::make_intrusive<Work>(std::move(work), std::move(outputs), pending);
  }
  WorkPointer broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    auto ours = held_on_host(tensors);
    return made(host->broadcast(ours, options), tensors);
  }
  WorkPointer allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    auto ours = held_on_host(tensors);
    if (options.reduceOp == c10d::ReduceOp::AVG && at::isIntegralType(ours.at(0).scalar_type(), false)) {
      auto summing = options; // gloo refuses what NCCL rounds
      summing.reduceOp = c10d::ReduceOp::SUM;
      auto work = host->allreduce(ours, summing);
      work->wait(kNoTimeout);
      ours[0].div_(getSize(), "trunc");
      return made(std::move(work), tensors);
    }
    return made(host->allreduce(ours, options), tensors);
  }
  WorkPointer allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    auto ours = held_on_host(tensors);
    return made(host->allreduce_coalesced(ours, options), tensors);
  }
  WorkPointer reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    auto ours = held_on_host(tensors);
    return made(host->reduce(ours, options), tensors);
  }
  WorkPointer allgather(Lists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    auto out = held_on_host(outputs);
    auto in = held_on_host(inputs);
    return made(host->allgather(out, in, options), all_of(outputs));
  }
  WorkPointer _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    auto out = held_on_host(output), in = held_on_host(input);
    return made(host->_allgather_base(out, in, options), {output});
  }
  WorkPointer allgather_coalesced(Lists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    auto out = held_on_host(outputs);
    auto in = held_on_host(inputs);
    return made(host->allgather_coalesced(out, in, options), all_of(outputs));
  }
  WorkPointer allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                              const c10d::AllgatherOptions& options) override {
    auto out = held_on_host(outputs), in = held_on_host(inputs);
    return made(host->allgather_into_tensor_coalesced(out, in, options), outputs);
  }
  WorkPointer gather(Lists& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    auto out = held_on_host(outputs);
    auto in = held_on_host(inputs);
    return made(host->gather(out, in, options), all_of(outputs));
  }
  WorkPointer scatter(Tensors& outputs, Lists& inputs, const c10d::ScatterOptions& options) override {
    auto out = held_on_host(outputs);
    auto in = held_on_host(inputs);
    return made(host->scatter(out, in, options), outputs);
  }
  WorkPointer reduce_scatter(Tensors& outputs, Lists& inputs, const c10d::ReduceScatterOptions& options) override {
    auto out = held_on_host(outputs);
    auto in = held_on_host(inputs);
    return made(host->reduce_scatter(out, in, options), outputs);
  }
  WorkPointer _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                   const c10d::ReduceScatterOptions& options) override {
    auto out = held_on_host(output), in = held_on_host(input);
    return made(host->_reduce_scatter_base(out, in, options), {output});
  }
  WorkPointer reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                              const c10d::ReduceScatterOptions& options) override {
    auto out = held_on_host(outputs), in = held_on_host(inputs);
    return made(host->reduce_scatter_tensor_coalesced(out, in, options), outputs);
  }
  WorkPointer alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                            std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions& options) override {
    auto out = held_on_host(output), in = held_on_host(input);
    return made(host->alltoall_base(out, in, output_sizes, input_sizes, options), {output});
  }
  WorkPointer alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    auto out = held_on_host(outputs), in = held_on_host(inputs);
    return made(host->alltoall(out, in, options), outputs);
  }
  WorkPointer send(Tensors& tensors, int rank, int tag) override {
    auto ours = held_on_host(tensors);
    return made(host->send(ours, rank, tag), tensors);
  }
  WorkPointer recv(Tensors& tensors, int rank, int tag) override {
    auto ours = held_on_host(tensors);
    return made(host->recv(ours, rank, tag), tensors);
  }
  WorkPointer recvAnysource(Tensors& tensors, int tag) override {
    auto ours = held_on_host(tensors);
    return made(host->recvAnysource(ours, tag), tensors);
  }
  WorkPointer barrier(const c10d::BarrierOptions& options) override {
    launch(current_device());
    return host->barrier(options);
  }

  c10::intrusive_ptr<c10d::Backend> host;
  std::shared_ptr<Pending> pending = std::make_shared<Pending>();
};

// Boxed on both ways, which needs no Python header: a group with gloo for the host, and one with it for the devices.
c10::intrusive_ptr<c10d::ProcessGroup> group(const c10::intrusive_ptr<c10d::ProcessGroup>& held_on_host) {
  auto made = c10::make_intrusive<c10d::ProcessGroup>(held_on_host->getRank(), held_on_host->getSize());
  c10::intrusive_ptr<c10d::Backend> ours = c10::make_intrusive<Backend>(held_on_host->getBackend(c10::kCPU));
  made->setBackend(kType, c10d::ProcessGroup::BackendType::CUSTOM, ours);
  return made;
}

} // namespace

TORCH_LIBRARY(emu, m) {
  m.def("group", &group);
}

} // namespace emulated
