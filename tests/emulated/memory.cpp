// The memory of the emulated devices: a caching allocator like CUDA's over a limit that processes share.
//
// Sizes, pools, best fit, splitting, coalescing and retries follow c10/cuda/CUDACachingAllocator.cpp as it behaves
// with its default settings. What the "driver" knows (each device's size, what each process holds, contexts) lies in
// a file named by EMULATED_MEMORY, so that processes see each other; without it, in memory of this process alone.
#include "emulated.h"

#include <c10/core/AllocatorConfig.h>
#include <c10/util/Exception.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <set>
#include <sstream>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace emulated {
namespace {

constexpr size_t kMiB = 1 << 20;
constexpr size_t kBlock = 512;             // every size is a multiple of it
constexpr size_t kSmall = kMiB;            // up to here: out of segments of 2 MiB
constexpr size_t kSmallSegment = 2 * kMiB;
constexpr size_t kLargeSegment = 20 * kMiB; // for sizes below 10 MiB; larger ones have their own, rounded to 2 MiB
constexpr size_t kOwnSegment = 10 * kMiB;
constexpr size_t kRound = 2 * kMiB;

size_t rounded(size_t bytes, size_t to) {
  return (bytes + to - 1) / to * to;
}

std::string size_text(size_t bytes) {
  char text[32];
  const double value = static_cast<double>(bytes);
  if (bytes < 1024) {
    snprintf(text, sizeof text, "%zu bytes", bytes);
  } else if (bytes < kMiB) {
    snprintf(text, sizeof text, "%.2f KiB", value / 1024);
  } else if (bytes < 1024 * kMiB) {
    snprintf(text, sizeof text, "%.2f MiB", value / kMiB);
  } else {
    snprintf(text, sizeof text, "%.2f GiB", value / kMiB / 1024);
  }
  return text;
}

// ---- what the driver knows, shared by processes ----

constexpr int kProcesses = 64;

struct Process {
  std::atomic<int32_t> pid;
  std::atomic<uint64_t> reserved[kMostDevices];
  std::atomic<uint8_t> context[kMostDevices];
};

struct Driver { // all zeros at first, as a new file is
  std::atomic<uint64_t> total[kMostDevices]; // 0: not set yet
  std::atomic<uint64_t> context_bytes;       // plus one, so that 0 is: not set yet
  Process processes[kProcesses];
};

uint64_t from_environment(const char* name, uint64_t otherwise) {
  const char* text = getenv(name);
  return text && *text ? strtoull(text, nullptr, 10) : otherwise;
}

struct Lock { // over processes, held for a few sums
  explicit Lock(int file) : file(file) {
    if (file >= 0) {
      flock(file, LOCK_EX);
    }
  }
  ~Lock() {
    if (file >= 0) {
      flock(file, LOCK_UN);
    }
  }
  int file;
};

bool alive(int pid) { // a zombie has given its memory back
  char path[64], text[512];
  snprintf(path, sizeof path, "/proc/%d/stat", pid);
  FILE* stat = fopen(path, "r");
  if (!stat) {
    return kill(pid, 0) == 0;
  }
  const size_t length = fread(text, 1, sizeof text - 1, stat);
  fclose(stat);
  text[length] = 0;
  const char* state = strrchr(text, ')');
  return state && state[2] != 'Z' && state[2] != 'X';
}

struct Block {
  char* pointer;
  size_t size;
  size_t requested = 0;
  int device;
  c10::StreamId stream;
  bool small;
  bool allocated = false;
  Block* before = nullptr; // its neighbours within the segment
  Block* after = nullptr;
};

struct Smaller {
  bool operator()(const Block* one, const Block* other) const {
    return std::tie(one->stream, one->size, one->pointer) < std::tie(other->stream, other->size, other->pointer);
  }
};

struct Memory {
  std::set<Block*, Smaller> free_small, free_large;
  c10::CachingDeviceAllocator::DeviceStats stats;
  double fraction = 1;
  int64_t fails_at = 0; // the n-th allocation from now fails; 0: none
  std::unordered_set<std::string> shapes; // convolutions that have been tried out
};

struct State {
  std::mutex mutex;
  std::vector<int> physical; // number of each visible device among all
  Memory memory[kMostDevices];
  std::unordered_map<const void*, Block*> blocks;
  Driver* driver = nullptr;
  int file = -1;
  Process* own = nullptr;
  std::atomic<bool> initialized{false};
  bool bad_fork = false;
  std::string broken; // what a kernel died of; sticks
  int64_t kernel_fails_at = 0, kernel_hangs_at = 0;
  int fault_device = -1;
  bool zeros = false;
  double workspace = 0;
  bool benchmark = false;
};

State& state();

Process* own_process() { // with the lock held
  auto& it = state();
  if (!it.own) {
    for (auto& process : it.driver->processes) {
      const int pid = process.pid;
      if (pid != getpid() && pid != 0 && alive(pid)) {
        continue;
      }
      for (int device = 0; device < kMostDevices; ++device) {
        process.reserved[device] = 0;
        process.context[device] = 0;
      }
      process.pid = getpid();
      it.own = &process;
      break;
    }
    TORCH_CHECK(it.own, "more than ", kProcesses, " processes use the emulated devices");
  }
  return it.own;
}

uint64_t used(int physical) { // with the lock held
  auto& driver = *state().driver;
  uint64_t sum = 0;
  for (auto& process : driver.processes) {
    const int pid = process.pid;
    if (pid && (pid == getpid() || alive(pid))) {
      sum += process.reserved[physical] + (process.context[physical] ? driver.context_bytes - 1 : 0);
    }
  }
  return sum;
}

void leave() {
  auto& it = state();
  if (it.own && it.own->pid == getpid()) {
    it.own->pid = 0;
  }
}

State* made_state() {
  auto* it = new State; // never destroyed: tensors may outlive every static object
  const auto count = static_cast<int>(std::min<uint64_t>(from_environment("EMULATED_DEVICES", 0), kMostDevices));
  if (const char* visible = getenv("EMU_VISIBLE_DEVICES")) { // as CUDA's: up to the first that is no device
    std::stringstream text(visible);
    for (std::string number; std::getline(text, number, ',');) {
      char* end = nullptr;
      const long device = strtol(number.c_str(), &end, 10);
      if (end == number.c_str() || device < 0 || device >= count) {
        break;
      }
      it->physical.push_back(static_cast<int>(device));
    }
  } else {
    for (int device = 0; device < count; ++device) {
      it->physical.push_back(device);
    }
  }
  void* pages = MAP_FAILED;
  if (const char* path = getenv("EMULATED_MEMORY"); path && *path) {
    it->file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    TORCH_CHECK(it->file >= 0 && ftruncate(it->file, sizeof(Driver)) == 0, "EMULATED_MEMORY=", path, ": can't be opened");
    pages = mmap(nullptr, sizeof(Driver), PROT_READ | PROT_WRITE, MAP_SHARED, it->file, 0);
  } else {
    pages = mmap(nullptr, sizeof(Driver), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  }
  TORCH_CHECK(pages != MAP_FAILED, "the emulated devices' counters can't be mapped");
  it->driver = static_cast<Driver*>(pages);
  Lock lock(it->file);
  for (auto& total : it->driver->total) {
    if (!total) {
      total = from_environment("EMULATED_BYTES", 2048 * kMiB);
    }
  }
  if (!it->driver->context_bytes) {
    it->driver->context_bytes = 1 + from_environment("EMULATED_CONTEXT_BYTES", 32 * kMiB);
  }
  return it;
}

State& state() {
  static State* it = [] {
    auto* made = made_state();
    atexit(leave);
    pthread_atfork(nullptr, nullptr, [] {
      auto& forked = state();
      forked.bad_fork = forked.initialized;
      forked.own = nullptr;
    });
    return made;
  }();
  return *it;
}

void check_index(int device) {
  TORCH_CHECK(device >= 0 && device < device_count(), "EMU error: invalid device ordinal ", device, " of ", device_count());
}

// ---- the caching allocator ----

c10::CachingAllocator::StatTypes pools(bool small) {
  return {true, small, !small};
}

template <typename Change>
void each(c10::CachingAllocator::StatArray& stat, bool small, Change change) {
  c10::CachingAllocator::for_each_selected_stat_type(pools(small), [&](size_t pool) { change(stat[pool]); });
}

void gain(c10::CachingAllocator::StatArray& stat, bool small, size_t amount) {
  each(stat, small, [&](auto& one) { one.increase(amount); });
}

void lose(c10::CachingAllocator::StatArray& stat, bool small, size_t amount) {
  each(stat, small, [&](auto& one) { one.decrease(amount); });
}

auto& free_blocks(const Block& block) {
  auto& memory = state().memory[block.device];
  return block.small ? memory.free_small : memory.free_large;
}

Block* found(int device, size_t size, c10::StreamId stream) { // the smallest that is large enough
  Block key{nullptr, size, 0, device, stream, size <= kSmall};
  auto& blocks = free_blocks(key);
  const auto at = blocks.lower_bound(&key);
  if (at == blocks.end() || (*at)->stream != stream) {
    return nullptr;
  }
  Block* block = *at;
  blocks.erase(at);
  return block;
}

bool caches = true; // else memory goes back at once, as with PYTORCH_NO_CUDA_MEMORY_CACHING: it is what is allocated

size_t segment_size(size_t size) {
  if (!caches) {
    return size;
  }
  if (size <= kSmall) {
    return kSmallSegment;
  }
  return size < kOwnSegment ? kLargeSegment : rounded(size, kRound);
}

Block* new_segment(int device, size_t size, c10::StreamId stream) { // null where the device is full
  auto& it = state();
  auto& memory = it.memory[device];
  const int physical = it.physical[device];
  const size_t bytes = segment_size(size);
  const auto reserved = static_cast<uint64_t>(memory.stats.reserved_bytes[0].current);
  if (memory.fraction < 1 && reserved + bytes > memory.fraction * it.driver->total[physical]) {
    return nullptr;
  }
  {
    Lock lock(it.file);
    if (used(physical) + bytes > it.driver->total[physical]) {
      return nullptr;
    }
    own_process()->reserved[physical] += bytes;
  }
  void* pages = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  TORCH_CHECK(pages != MAP_FAILED, "the host has no ", size_text(bytes), " for an emulated device");
  const bool small = size <= kSmall;
  memory.stats.num_device_alloc += 1;
  gain(memory.stats.segment, small, 1);
  gain(memory.stats.reserved_bytes, small, bytes);
  return new Block{static_cast<char*>(pages), bytes, 0, device, stream, small};
}

void release_segments(int device) { // those of which no byte is in use
  auto& it = state();
  auto& memory = it.memory[device];
  for (auto* blocks : {&memory.free_small, &memory.free_large}) {
    for (auto at = blocks->begin(); at != blocks->end();) {
      Block* block = *at;
      if (block->before || block->after) {
        ++at;
        continue;
      }
      at = blocks->erase(at);
      munmap(block->pointer, block->size);
      memory.stats.num_device_free += 1;
      lose(memory.stats.segment, block->small, 1);
      lose(memory.stats.reserved_bytes, block->small, block->size);
      Lock lock(it.file);
      if (it.own) {
        it.own->reserved[it.physical[device]] -= block->size;
      }
      delete block;
    }
  }
}

bool should_split(const Block& block, size_t size) {
  const size_t rest = block.size - size;
  return block.small ? rest >= kBlock : rest > kSmall;
}

void split(Block* block, size_t size) {
  auto* rest = new Block{block->pointer + size, block->size - size, 0, block->device, block->stream, block->small};
  rest->before = block;
  rest->after = block->after;
  if (rest->after) {
    rest->after->before = rest;
  }
  block->after = rest;
  block->size = size;
  free_blocks(*rest).insert(rest);
}

void merge(Block* block, Block* neighbour) { // takes a free neighbour into a block that becomes free
  if (!neighbour || neighbour->allocated) {
    return;
  }
  free_blocks(*neighbour).erase(neighbour);
  if (neighbour == block->before) {
    block->pointer = neighbour->pointer;
    block->before = neighbour->before;
    if (block->before) {
      block->before->after = block;
    }
  } else {
    block->after = neighbour->after;
    if (block->after) {
      block->after->before = block;
    }
  }
  block->size += neighbour->size;
  delete neighbour;
}

[[noreturn]] void out_of_memory(int device, size_t bytes) {
  auto& it = state();
  auto& memory = it.memory[device];
  const int physical = it.physical[device];
  memory.stats.num_ooms += 1;
  const uint64_t total = it.driver->total[physical];
  uint64_t taken = 0;
  {
    Lock lock(it.file);
    taken = used(physical);
  }
  const auto allocated = memory.stats.allocated_bytes[0].current;
  const auto reserved = memory.stats.reserved_bytes[0].current;
  std::string allowed;
  if (memory.fraction < 1) {
    allowed = " " + size_text(static_cast<size_t>(memory.fraction * total)) + " allowed;";
  }
  TORCH_CHECK_WITH(
      OutOfMemoryError, false, "EMU out of memory. Tried to allocate ", size_text(bytes), ". GPU ", device,
      " has a total capacity of ", size_text(total), " of which ", size_text(total - std::min(total, taken)),
      " is free.", allowed, " ", size_text(allocated), " is allocated by PyTorch, and ",
      size_text(reserved - allocated), " is reserved by PyTorch but unallocated.");
}

Block* allocated(int device, size_t bytes) { // with the mutex held
  auto& it = state();
  auto& memory = it.memory[device];
  if (memory.fails_at > 0 && --memory.fails_at == 0) {
    out_of_memory(device, bytes);
  }
  const auto stream = current_stream(device);
  const size_t size = bytes < kBlock ? kBlock : rounded(bytes, kBlock);
  Block* block = found(device, size, stream);
  if (!block) {
    block = new_segment(device, size, stream);
  }
  if (!block) {
    release_segments(device);
    memory.stats.num_alloc_retries += 1;
    block = new_segment(device, size, stream);
  }
  if (!block) {
    out_of_memory(device, bytes);
  }
  if (should_split(*block, size)) {
    split(block, size);
  }
  block->allocated = true;
  block->requested = bytes;
  it.blocks[block->pointer] = block;
  gain(memory.stats.allocation, block->small, 1);
  gain(memory.stats.active, block->small, 1);
  gain(memory.stats.allocated_bytes, block->small, block->size);
  gain(memory.stats.active_bytes, block->small, block->size);
  gain(memory.stats.requested_bytes, block->small, bytes);
  return block;
}

void freed(void* pointer) {
  auto& it = state();
  std::lock_guard<std::mutex> guard(it.mutex);
  const auto at = it.blocks.find(pointer);
  if (at == it.blocks.end()) {
    return;
  }
  Block* block = at->second;
  it.blocks.erase(at);
  auto& stats = it.memory[block->device].stats;
  lose(stats.allocation, block->small, 1);
  lose(stats.active, block->small, 1);
  lose(stats.allocated_bytes, block->small, block->size);
  lose(stats.active_bytes, block->small, block->size);
  lose(stats.requested_bytes, block->small, block->requested);
  block->allocated = false;
  merge(block, block->before);
  merge(block, block->after);
  free_blocks(*block).insert(block);
  if (!caches) {
    release_segments(block->device);
  }
}

struct CachingAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    const int device = current_device();
    const c10::Device where(kType, static_cast<c10::DeviceIndex>(device));
    if (bytes == 0) {
      return {nullptr, nullptr, &freed, where};
    }
    check();
    make_context(device);
    auto& it = state();
    std::lock_guard<std::mutex> guard(it.mutex);
    void* pointer = allocated(device, bytes)->pointer;
    return {pointer, pointer, &freed, where};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &freed;
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    memcpy(to, from, bytes);
  }
  bool initialized() override {
    return true;
  }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {
    check();
    std::lock_guard<std::mutex> guard(state().mutex);
    for (int device = 0; device < device_count(); ++device) {
      release_segments(device);
    }
  }
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    check_index(device);
    std::lock_guard<std::mutex> guard(state().mutex);
    return state().memory[device].stats;
  }
  template <typename Change>
  void each_stat(c10::DeviceIndex device, Change change) {
    check_index(device);
    std::lock_guard<std::mutex> guard(state().mutex);
    auto& stats = state().memory[device].stats;
    for (auto* stat : {&stats.allocation, &stats.segment, &stats.active, &stats.inactive_split, &stats.allocated_bytes,
                       &stats.reserved_bytes, &stats.active_bytes, &stats.inactive_split_bytes, &stats.requested_bytes}) {
      for (auto& pool : *stat) {
        change(pool);
      }
    }
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    each_stat(device, [](auto& stat) { stat.reset_accumulated(); });
    auto& stats = state().memory[device].stats;
    stats.num_alloc_retries = stats.num_ooms = 0;
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    each_stat(device, [](auto& stat) { stat.reset_peak(); });
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    check_index(device);
    check();
    make_context(device);
    auto& it = state();
    Lock lock(it.file);
    const uint64_t total = it.driver->total[it.physical[device]], taken = used(it.physical[device]);
    return {total - std::min(total, taken), total};
  }
};

CachingAllocator g_allocator;

thread_local c10::DeviceIndex t_device = 0;
thread_local c10::StreamId t_streams[kMostDevices] = {};

} // namespace

int device_count() {
  return static_cast<int>(state().physical.size());
}

bool has_context(int device) {
  check_index(device);
  auto& it = state();
  return it.own && it.own->context[it.physical[device]];
}

bool initialized() {
  return state().initialized;
}

void initialize() {
  auto& it = state();
  TORCH_CHECK(!it.bad_fork,
      "Cannot re-initialize EMU in forked subprocess. To use EMU with multiprocessing, you must use the 'spawn' start method");
  TORCH_CHECK(device_count() > 0, "No EMU GPUs are available");
  it.initialized = true;
}

void make_context(int device) {
  check_index(device);
  initialize();
  if (has_context(device)) {
    return;
  }
  auto& it = state();
  std::lock_guard<std::mutex> guard(it.mutex);
  Lock lock(it.file);
  const int physical = it.physical[device];
  auto* own = own_process();
  if (own->context[physical]) {
    return;
  }
  if (used(physical) + it.driver->context_bytes - 1 > it.driver->total[physical]) {
    throw c10::AcceleratorError({__func__, __FILE__, __LINE__}, 2, "EMU error: out of memory");
  }
  own->context[physical] = 1;
}

c10::DeviceIndex current_device() {
  return t_device;
}

void set_device(c10::DeviceIndex device) {
  check_index(device);
  t_device = device;
  make_context(device);
}

void set_device_lazily(c10::DeviceIndex device) {
  t_device = device < 0 ? 0 : device;
}

c10::StreamId current_stream(int device) {
  return t_streams[device];
}

c10::StreamId set_stream(int device, c10::StreamId stream) {
  return std::exchange(t_streams[device], stream);
}

c10::DeviceAllocator* allocator() {
  return &g_allocator;
}

int device_of(const void* pointer) {
  std::lock_guard<std::mutex> guard(state().mutex);
  for (const auto& [start, block] : state().blocks) {
    if (pointer >= start && pointer < block->pointer + block->size) {
      return block->device;
    }
  }
  return -1;
}

// ---- faults ----

void check() {
  auto& it = state();
  if (!it.broken.empty()) {
    throw c10::AcceleratorError({__func__, __FILE__, __LINE__}, 700, it.broken);
  }
}

void fail(const std::string& reason) {
  state().broken = "EMU error: " + reason;
  check();
}

static thread_local int t_kernels = 0;

OneKernel::OneKernel() {
  ++t_kernels;
}

OneKernel::~OneKernel() {
  --t_kernels;
}

bool within_kernel() {
  return t_kernels > 0;
}

void launch(int device) {
  check();
  auto& it = state();
  if (t_kernels > 0 || (it.fault_device >= 0 && it.fault_device != device)) {
    return;
  }
  if (it.kernel_fails_at > 0 && --it.kernel_fails_at == 0) {
    fail("an illegal memory access was encountered");
  }
  if (it.kernel_hangs_at > 0 && --it.kernel_hangs_at == 0) {
    for (;;) {
      sleep(1);
    }
  }
}

bool copies_arrive_as_zeros() {
  return state().zeros;
}

void use_workspace(int device, const std::string& shapes, size_t bytes) {
  auto& it = state();
  if (it.workspace <= 0) {
    return;
  }
  const auto size = static_cast<size_t>(bytes * it.workspace);
  bool is_new = false;
  {
    std::lock_guard<std::mutex> guard(it.mutex);
    is_new = it.benchmark && it.memory[device].shapes.insert(shapes).second;
  }
  if (is_new) { // as cuDNN tries every engine, and leaves out those that get no workspace
    for (const size_t tried : {4 * size, 2 * size}) {
      try {
        g_allocator.allocate(tried);
      } catch (const c10::OutOfMemoryError&) {
      }
    }
  }
  g_allocator.allocate(size);
}

} // namespace emulated

// ---- for Python, by ctypes: no Python headers are needed, and no dispatch mode sees these calls ----

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT void emu_cache(int on) {
  emulated::caches = on;
}
EXPORT int emu_count() {
  return emulated::device_count();
}
EXPORT int emu_physical(int device) {
  return emulated::state().physical.at(device);
}
EXPORT int emu_current() {
  return emulated::current_device();
}
EXPORT void emu_set_lazily(int device) {
  emulated::set_device_lazily(static_cast<c10::DeviceIndex>(device));
}
EXPORT int emu_initialized() {
  return emulated::initialized();
}
EXPORT int emu_bad_fork() {
  return emulated::state().bad_fork;
}
EXPORT uint64_t emu_total(int physical) {
  return emulated::state().driver->total[physical];
}
EXPORT void emu_set_total(int physical, uint64_t bytes) {
  emulated::state().driver->total[physical] = bytes;
}
EXPORT uint64_t emu_context_bytes() {
  return emulated::state().driver->context_bytes - 1;
}
EXPORT void emu_set_context_bytes(uint64_t bytes) {
  emulated::state().driver->context_bytes = bytes + 1;
}
EXPORT double emu_fraction(int device) {
  return emulated::state().memory[device].fraction;
}
EXPORT void emu_set_fraction(int device, double fraction) {
  emulated::state().memory[device].fraction = fraction;
}
// Of the n-th process that uses the devices: its id (0: no more, -1: gone), a bit for each device with a context.
EXPORT int emu_process(int number, uint32_t* contexts, uint64_t* reserved) {
  if (number >= emulated::kProcesses) {
    return 0;
  }
  auto& process = emulated::state().driver->processes[number];
  *contexts = 0;
  for (int device = 0; device < emulated::kMostDevices; ++device) {
    *contexts |= static_cast<uint32_t>(process.context[device]) << device;
    reserved[device] = process.reserved[device];
  }
  const int pid = process.pid;
  return pid && emulated::alive(pid) ? pid : -1;
}
EXPORT void emu_fail_allocation(int device, int64_t number) {
  emulated::state().memory[device].fails_at = number;
}
EXPORT void emu_fail_kernel(int device, int64_t number) {
  emulated::state().fault_device = device;
  emulated::state().kernel_fails_at = number;
}
EXPORT void emu_hang_kernel(int device, int64_t number) {
  emulated::state().fault_device = device;
  emulated::state().kernel_hangs_at = number;
}
EXPORT void emu_zeros(int on) {
  emulated::state().zeros = on;
}
EXPORT void emu_workspaces(double factor, int benchmark) {
  emulated::state().workspace = factor;
  emulated::state().benchmark = benchmark;
}
EXPORT void emu_mend() {
  auto& it = emulated::state();
  it.broken.clear();
  it.kernel_fails_at = it.kernel_hangs_at = 0;
  it.fault_device = -1;
  it.zeros = false;
  for (auto& memory : it.memory) {
    memory.fails_at = 0;
  }
}
// Each returns 0, or 1 with the reason in `text`.
template <typename Call>
static int said(char* text, size_t size, Call call) {
  try {
    call();
    return 0;
  } catch (const c10::Error& error) {
    snprintf(text, size, "%s", error.what_without_backtrace());
    return 1;
  }
}
EXPORT int emu_initialize(char* text, size_t size) {
  return said(text, size, [] { emulated::initialize(); });
}
EXPORT int emu_set(int device, char* text, size_t size) {
  return said(text, size, [&] {
    emulated::check();
    emulated::set_device(static_cast<c10::DeviceIndex>(device));
  });
}
EXPORT int emu_synchronize(int device, char* text, size_t size) {
  return said(text, size, [&] {
    emulated::check();
    emulated::make_context(device);
    emulated::arrive(device);
  });
}
EXPORT int emu_memory_info(int device, uint64_t* free, uint64_t* total, char* text, size_t size) {
  return said(text, size, [&] {
    std::tie(*free, *total) = emulated::allocator()->getMemoryInfo(static_cast<c10::DeviceIndex>(device));
  });
}
