// A device's random numbers: a stream of its own, drawn by the processor's kernels.
#pragma once
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Generator.h>

#include "emulated.h"

namespace emulated {

struct Generator final : c10::GeneratorImpl {
  explicit Generator(c10::DeviceIndex device);
  void set_current_seed(uint64_t seed) override {
    host.set_current_seed(seed);
  }
  void set_offset(uint64_t) override {}
  uint64_t get_offset() const override {
    return 0;
  }
  uint64_t current_seed() const override {
    return host.current_seed();
  }
  uint64_t seed() override {
    return host.seed();
  }
  void set_state(const c10::TensorImpl& state) override {
    host.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return host.unsafeGetGeneratorImpl()->get_state();
  }
  static c10::DeviceType device_type() {
    return kType;
  }
  Generator* clone_impl() const override {
    auto* copy = new Generator(device().index());
    copy->host = host.clone();
    return copy;
  }
  at::Generator host;
};

const at::Generator& default_generator(int device);

} // namespace emulated
