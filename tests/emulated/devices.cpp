// What torch asks of a kind of device: guards, streams, events, generators, pinned memory.
#include "emulated.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <mutex>
#include <set>

#include "generators.h"

namespace emulated {
namespace {

using Clock = std::chrono::steady_clock;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return kType;
  }
  at::Device exchangeDevice(at::Device device) const override {
    const at::Device before(kType, current_device());
    if (device.index() != before.index()) { // CUDA's guard leaves the driver alone, too, where nothing changes
      set_device(device.index());
    }
    return before;
  }
  at::Device getDevice() const override {
    return {kType, current_device()};
  }
  void setDevice(at::Device device) const override {
    exchangeDevice(device);
  }
  void uncheckedSetDevice(at::Device device) const noexcept override {
    set_device_lazily(device.index());
  }
  c10::Stream getStream(at::Device device) const override {
    return c10::Stream(c10::Stream::UNSAFE, device, current_stream(device.index()));
  }
  c10::Stream getDefaultStream(at::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, device);
  }
  c10::Stream getNewStream(at::Device device, int = 0) const override {
    static std::atomic<c10::StreamId> made{0};
    make_context(device.index());
    return c10::Stream(c10::Stream::UNSAFE, device, ++made);
  }
  c10::Stream getStreamFromGlobalPool(at::Device device, bool = false) const override {
    return getNewStream(device);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return c10::Stream(c10::Stream::UNSAFE, stream.device(), set_stream(stream.device_index(), stream.id()));
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return static_cast<c10::DeviceIndex>(device_count());
  }
  // Work is done by the time that its call returns, but for copies to the host; so an event is a moment.
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    check();
    make_context(stream.device_index());
    if (!*event) {
      *event = new Clock::time_point;
    }
    *static_cast<Clock::time_point*>(*event) = Clock::now();
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override {
    check();
    arrive();
    return true;
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Clock::time_point*>(event);
  }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    const auto passed = *static_cast<Clock::time_point*>(to) - *static_cast<Clock::time_point*>(from);
    return std::chrono::duration<double, std::milli>(passed).count();
  }
  bool queryStream(const c10::Stream& stream) const override {
    check();
    arrive(stream.device_index());
    return true;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    synchronizeDevice(stream.device_index());
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    check();
    const int waited_for = device < 0 ? current_device() : device;
    make_context(waited_for);
    arrive(waited_for);
  }
  void synchronizeEvent(void*) const override {
    check();
    arrive();
  }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct PinnedAllocator final : at::Allocator {
  static std::set<const void*>& pinned() {
    static auto* pointers = new std::set<const void*>;
    return *pointers;
  }
  static std::mutex& mutex() {
    static auto* made = new std::mutex;
    return *made;
  }
  static void freed(void* pointer) {
    {
      std::lock_guard<std::mutex> guard(mutex());
      pinned().erase(pointer);
    }
    std::free(pointer);
  }
  c10::DataPtr allocate(size_t bytes) override {
    check();
    initialize();
    void* pointer = bytes ? std::aligned_alloc(64, (bytes + 63) / 64 * 64) : nullptr;
    if (pointer) {
      std::lock_guard<std::mutex> guard(mutex());
      pinned().insert(pointer);
    }
    return {pointer, pointer, &freed, at::Device(at::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &freed;
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    memcpy(to, from, bytes);
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  void init() const override {
    initialize();
  }
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return device_count() > 0;
  }
  bool hasPrimaryContext(c10::DeviceIndex device) const override {
    return has_context(device);
  }
  c10::DeviceIndex deviceCount() const override {
    return static_cast<c10::DeviceIndex>(device_count());
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return current_device();
  }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    set_device(device);
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const auto before = current_device();
    if (device >= 0 && device != before) {
      set_device(device);
    }
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    const auto before = current_device();
    if (device >= 0) {
      set_device_lazily(device);
    }
    return before;
  }
  bool isPinnedPtr(const void* pointer) const override {
    std::lock_guard<std::mutex> guard(PinnedAllocator::mutex());
    return PinnedAllocator::pinned().count(pointer) > 0;
  }
  at::Allocator* getPinnedMemoryAllocator() const override {
    static PinnedAllocator allocator;
    return &allocator;
  }
  at::Device getDeviceFromPtr(void* pointer) const override {
    const int device = device_of(pointer);
    TORCH_CHECK(device >= 0, "no emulated device has memory at this address");
    return {kType, static_cast<c10::DeviceIndex>(device)};
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device < 0 ? current_device() : device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<Generator>(device < 0 ? current_device() : device);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    const c10::DeviceGuard guard(storage.device());
    at::native::resize_bytes_cpu(storage.unsafeGetStorageImpl(), bytes);
  }
};

const bool registered = [] {
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  c10::SetAllocator(kType, allocator());
  return true;
}();

} // namespace

Generator::Generator(c10::DeviceIndex device)
    : GeneratorImpl(at::Device(kType, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
      host(at::detail::createCPUGenerator()) {}

const at::Generator& default_generator(int device) {
  static auto* generators = [] {
    auto* made = new std::vector<at::Generator>;
    for (int index = 0; index < device_count(); ++index) {
      made->push_back(at::make_generator<Generator>(static_cast<c10::DeviceIndex>(index)));
    }
    return made;
  }();
  return generators->at(device);
}

} // namespace emulated

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT void emu_seed(int device, uint64_t seed) {
  emulated::default_generator(device).unsafeGetGeneratorImpl()->set_current_seed(seed);
}
EXPORT uint64_t emu_current_seed(int device) {
  return emulated::default_generator(device).current_seed();
}
// Reads or writes the state of a device's generator; returns its size.
EXPORT int64_t emu_random_state(int device, char* bytes, int write) {
  auto* generator = emulated::default_generator(device).unsafeGetGeneratorImpl();
  auto state = at::Tensor::wrap_tensor_impl(generator->get_state());
  if (!bytes) {
    return state.numel();
  }
  auto* data = static_cast<char*>(state.mutable_data_ptr());
  if (write) {
    memcpy(data, bytes, state.numel());
    generator->set_state(*state.unsafeGetTensorImpl());
  } else {
    memcpy(bytes, data, state.numel());
  }
  return state.numel();
}
