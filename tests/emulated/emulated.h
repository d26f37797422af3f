// What the parts of the emulated accelerator know of each other.
#pragma once
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <string>

namespace emulated {

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr int kMostDevices = 16;

// Devices and memory (memory.cpp). A context is made where CUDA makes one: by the first call that needs the driver.
int device_count();
bool has_context(int device);
void make_context(int device); // raises where the device has no room for it
c10::DeviceIndex current_device();
void set_device(c10::DeviceIndex device);        // makes a context, as cudaSetDevice does since CUDA 12
void set_device_lazily(c10::DeviceIndex device); // as a guard that leaves
c10::StreamId current_stream(int device);
c10::StreamId set_stream(int device, c10::StreamId stream); // returns the one before
bool initialized();
void initialize();
c10::DeviceAllocator* allocator();
int device_of(const void* pointer);

// Copies to the host that nobody waits for (operators.cpp): they are there once their device has been waited for.
void arrive(int device = -1); // all of a device's; without one, of all devices

// Faults to order (memory.cpp): each call that reaches a device asks first.
void check();            // raises what sticks after a failed kernel
void launch(int device); // a kernel begins: it may fail or hang by order
void fail(const std::string& reason);
struct OneKernel { // what is launched while it lives is part of a kernel that was launched before
  OneKernel();
  ~OneKernel();
};
bool within_kernel();
bool copies_arrive_as_zeros();
void use_workspace(int device, const std::string& shapes, size_t bytes); // what a convolution borrows while it runs

} // namespace emulated
