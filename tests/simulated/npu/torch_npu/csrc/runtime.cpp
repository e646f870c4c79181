#include "runtime.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <map>
#include <thread>
#include <unordered_map>
#include <vector>

namespace pretend {

using Clock = std::chrono::steady_clock;
using c10::Device;
using c10::DeviceIndex;
using c10::Stream;
using c10::StreamId;

namespace {

constexpr int kMost = 16; // devices
constexpr size_t kPage = 4096;
constexpr size_t kRegion = size_t(1) << 35; // of addresses, for each device

int number_from(const char* name, int otherwise) {
  const char* value = std::getenv(name);
  return value && *value ? std::atoi(value) : otherwise;
}

struct Task {
  std::function<void()> run;
  Clock::time_point due;
};

struct Line { // what one stream is to do
  std::deque<Task> waiting;
  uint64_t sent = 0, done = 0;
};

struct Block {
  size_t bytes = 0, asked = 0; // rounded to pages; as counted
  Stream stream = Stream(Stream::UNSAFE, Device(kKind, 0), 0);
  std::vector<std::pair<Stream, uint64_t>> users; // other streams, and how far they have to get
};

struct Parts { // one device
  char* guarded = nullptr; // where the host may not look
  char* open = nullptr; // the same pages
  int file = -1;
  size_t end = 0;
  std::map<size_t, Block> blocks; // in use, by offset
  std::map<std::pair<StreamId, size_t>, std::vector<size_t>> free_blocks;
  std::vector<std::pair<size_t, Block>> leaving; // freed, while other streams still use them
  c10::CachingDeviceAllocator::DeviceStats stats;
  std::vector<Line> lines;
};

struct Pinned {
  size_t bytes;
  bool in_use;
  std::vector<std::pair<Stream, uint64_t>> users;
};

struct World {
  std::recursive_mutex mutex;
  std::vector<Parts> devices;
  std::map<char*, Pinned> pinned;
  std::map<char*, size_t> registered;
  size_t pinned_bytes = 0, pinned_peak = 0;
  std::string failure; // of a task that ran later; told to the next who waits
  std::atomic<bool> begun{false}, stopping{false};
  std::thread* drain = nullptr;
  int64_t delay = number_from("ZEROSTART_TEST_NPU_DELAY", 20);
  size_t total = size_t(number_from("ZEROSTART_TEST_NPU_MEMORY", 16384)) << 20;
};

World& world() {
  static World* made = new World(); // never deleted: threads may outlive what is static
  return *made;
}

thread_local DeviceIndex device_of_thread = 0;
thread_local StreamId stream_of_thread[kMost] = {};

Line& line_of(Stream stream) {
  return world().devices.at(stream.device_index()).lines.at(stream.id());
}

void run_first(Line& line) {
  Task task = std::move(line.waiting.front());
  line.waiting.pop_front();
  try {
    at::AutoDispatchBelowADInplaceOrView below;
    task.run();
  } catch (const std::exception& error) {
    if (world().failure.empty()) world().failure = error.what();
  }
  ++line.done;
}

void drain() { // what nobody waits for is done all the same, late
  auto& w = world();
  while (!w.stopping) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    for (bool more = true; more && !w.stopping;) {
      more = false;
      std::lock_guard<std::recursive_mutex> guard(w.mutex);
      Line* first = nullptr;
      for (auto& device : w.devices)
        for (auto& line : device.lines)
          if (!line.waiting.empty() && (!first || line.waiting.front().due < first->waiting.front().due))
            first = &line;
      if (first && first->waiting.front().due <= Clock::now()) {
        run_first(*first);
        more = true;
      }
    }
  }
}

void begin() {
  auto& w = world();
  std::lock_guard<std::recursive_mutex> guard(w.mutex);
  if (w.begun) return;
  w.devices.resize(device_count());
  for (auto& device : w.devices) {
    // Pages of a file, so that they are no anonymous memory of the host.
    device.file = memfd_create("pretend-accelerator", MFD_CLOEXEC);
    TORCH_CHECK(device.file >= 0 && ftruncate(device.file, kRegion) == 0, "no memory for a pretend device");
    auto map = [&](int access) {
      void* at = mmap(nullptr, kRegion, access, MAP_SHARED | MAP_NORESERVE, device.file, 0);
      TORCH_CHECK(at != MAP_FAILED, "no addresses for a pretend device");
      return static_cast<char*>(at);
    };
    device.guarded = map(PROT_NONE);
    device.open = map(PROT_READ | PROT_WRITE);
    device.lines.resize(2); // the default stream, and that of collectives
  }
  w.begun = true;
  w.drain = new std::thread(drain);
}

void check_failure() {
  auto& w = world();
  if (w.failure.empty()) return;
  std::string text;
  std::swap(text, w.failure);
  TORCH_CHECK(false, "a kernel that was queued failed: ", text);
}

Parts* device_at(const void* address) {
  auto& w = world();
  if (!w.begun) return nullptr;
  auto* at = static_cast<const char*>(address);
  for (auto& device : w.devices)
    if (at >= device.guarded && at < device.guarded + kRegion) return &device;
  return nullptr;
}

size_t rounded(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

void count(c10::CachingAllocator::StatArray& stats, int64_t amount) {
  auto& one = stats[0];
  if (amount >= 0) one.increase(amount); else one.decrease(-amount);
}

void free_block(void* address) {
  if (!address) return;
  auto& w = world();
  std::lock_guard<std::recursive_mutex> guard(w.mutex);
  Parts& device = *device_at(address);
  size_t offset = static_cast<char*>(address) - device.guarded;
  Block block = device.blocks.at(offset);
  device.blocks.erase(offset);
  count(device.stats.allocated_bytes, -int64_t(block.asked));
  count(device.stats.requested_bytes, -int64_t(block.asked));
  count(device.stats.active_bytes, -int64_t(block.asked));
  count(device.stats.allocation, -1);
  for (auto& user : block.users) user.second = line_of(user.first).sent;
  device.leaving.emplace_back(offset, std::move(block));
}

void settle(Parts& device) { // what other streams no longer use can be had again
  auto& list = device.leaving;
  for (size_t i = 0; i < list.size();) {
    bool free = true;
    for (auto& user : list[i].second.users) free = free && line_of(user.first).done >= user.second;
    if (free) {
      auto& block = list[i].second;
      device.free_blocks[{block.stream.id(), block.bytes}].push_back(list[i].first);
      list[i] = std::move(list.back());
      list.pop_back();
    } else {
      ++i;
    }
  }
}

struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t asked) override {
    begin();
    auto& w = world();
    std::lock_guard<std::recursive_mutex> guard(w.mutex);
    DeviceIndex index = current_device();
    Device where(kKind, index);
    if (!asked) return {nullptr, nullptr, &free_block, where};
    Parts& device = w.devices[index];
    Stream stream = current_stream(index);
    size_t bytes = rounded(asked, kPage);
    settle(device);
    auto& ready = device.free_blocks[{stream.id(), bytes}];
    size_t offset;
    if (!ready.empty()) {
      offset = ready.back();
      ready.pop_back();
    } else {
      if (device.stats.reserved_bytes[0].current + bytes > w.total) emptyCache();
      TORCH_CHECK_WITH(
          OutOfMemoryError, device.stats.reserved_bytes[0].current + bytes <= w.total && device.end + bytes <= kRegion,
          "NPU out of memory. Tried to allocate ", asked, " bytes on device ", int(index));
      offset = device.end;
      device.end += bytes;
      count(device.stats.reserved_bytes, bytes);
      count(device.stats.segment, 1);
    }
    Block block;
    block.bytes = bytes;
    block.asked = rounded(asked, 512); // as CUDA's allocator counts
    block.stream = stream;
    count(device.stats.allocated_bytes, block.asked);
    count(device.stats.requested_bytes, block.asked);
    count(device.stats.active_bytes, block.asked);
    count(device.stats.allocation, 1);
    device.blocks[offset] = block;
    void* at = device.guarded + offset;
    return {at, at, &free_block, where};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    finish_device(current_device());
    default_copy_data(opened(to), opened(from), bytes);
  }
  bool initialized() override { return world().begun; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {
    auto& w = world();
    std::lock_guard<std::recursive_mutex> guard(w.mutex);
    for (size_t index = 0; index < w.devices.size(); ++index) {
      finish_device(index);
      Parts& device = w.devices[index];
      settle(device);
      for (auto& entry : device.free_blocks)
        for (size_t offset : entry.second) {
          // Its addresses are not used again: who still has one gets zeros.
          madvise(device.open + offset, entry.first.second, MADV_REMOVE);
          count(device.stats.reserved_bytes, -int64_t(entry.first.second));
          count(device.stats.segment, -1);
        }
      device.free_blocks.clear();
    }
  }
  void recordStream(const c10::DataPtr& pointer, Stream stream) override { used_on(pointer.get(), stream); }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
    begin();
    std::lock_guard<std::recursive_mutex> guard(lock());
    return world().devices.at(device).stats;
  }
  template <typename Change>
  void each(DeviceIndex device, Change change) {
    begin();
    std::lock_guard<std::recursive_mutex> guard(lock());
    auto& s = world().devices.at(device).stats;
    for (auto* a : {&s.allocation, &s.segment, &s.allocated_bytes, &s.reserved_bytes, &s.active_bytes, &s.requested_bytes})
      change((*a)[0]);
  }
  void resetAccumulatedStats(DeviceIndex device) override {
    each(device, [](c10::CachingAllocator::Stat& s) { s.reset_accumulated(); });
  }
  void resetPeakStats(DeviceIndex device) override {
    each(device, [](c10::CachingAllocator::Stat& s) { s.reset_peak(); });
  }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex device) override {
    begin();
    std::lock_guard<std::recursive_mutex> guard(lock());
    size_t used = world().devices.at(device).stats.reserved_bytes[0].current;
    return {world().total - used, world().total};
  }
};

// Page-locked memory: in powers of two, and for life unless the cache is emptied.
void free_pinned(void* address) {
  auto& w = world();
  std::lock_guard<std::recursive_mutex> guard(w.mutex);
  auto found = w.pinned.find(static_cast<char*>(address));
  if (found != w.pinned.end()) found->second.in_use = false;
}

bool left(const Pinned& block) {
  for (auto& user : block.users)
    if (line_of(user.first).done < user.second) return false;
  return true;
}

struct PinnedMemory final : at::HostAllocator {
  c10::DataPtr allocate(size_t asked) override {
    begin();
    if (!asked) return {nullptr, nullptr, &free_pinned, Device(c10::kCPU)};
    auto& w = world();
    std::lock_guard<std::recursive_mutex> guard(w.mutex);
    size_t bytes = 1;
    while (bytes < asked) bytes *= 2;
    for (auto& [at, block] : w.pinned)
      if (!block.in_use && block.bytes == bytes && left(block)) {
        block.in_use = true;
        block.users.clear();
        return {at, at, &free_pinned, Device(c10::kCPU)};
      }
    // As a driver's, it is no anonymous memory of the process.
    void* at = mmap(nullptr, rounded(bytes, kPage), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    TORCH_CHECK(at != MAP_FAILED, "no page-locked memory");
    w.pinned[static_cast<char*>(at)] = {bytes, true, {}};
    w.pinned_bytes += bytes;
    w.pinned_peak = std::max(w.pinned_peak, w.pinned_bytes);
    return {at, at, &free_pinned, Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
  bool record_event(void* address, void*, Stream stream) override {
    used_on(address, stream);
    return true;
  }
  void empty_cache() override {
    auto& w = world();
    std::lock_guard<std::recursive_mutex> guard(w.mutex);
    for (auto it = w.pinned.begin(); it != w.pinned.end();) {
      if (it->second.in_use || !left(it->second)) { ++it; continue; }
      w.pinned_bytes -= it->second.bytes;
      munmap(it->first, rounded(it->second.bytes, kPage));
      it = w.pinned.erase(it);
    }
  }
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override { world().pinned_peak = world().pinned_bytes; }
};

DeviceMemory& device_memory() {
  static auto* made = new DeviceMemory();
  return *made;
}

PinnedMemory& pinned_memory() {
  static auto* made = new PinnedMemory();
  return *made;
}

struct Event {
  Stream stream;
  uint64_t task;
  Clock::time_point at;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kKind; }
  Device exchangeDevice(Device device) const override {
    Device before(kKind, device_of_thread);
    set_current_device(device.index());
    return before;
  }
  Device getDevice() const override { return Device(kKind, device_of_thread); }
  void setDevice(Device device) const override { set_current_device(device.index()); }
  void uncheckedSetDevice(Device device) const noexcept override { device_of_thread = device.index(); }
  Stream getStream(Device device) const override {
    return current_stream(device.has_index() ? device.index() : device_of_thread);
  }
  Stream getDefaultStream(Device device) const override { return Stream(Stream::UNSAFE, device, 0); }
  Stream getNewStream(Device device, int) const override {
    begin();
    std::lock_guard<std::recursive_mutex> guard(lock());
    DeviceIndex index = device.has_index() ? device.index() : device_of_thread;
    auto& lines = world().devices.at(index).lines;
    if (lines.size() < 34) lines.emplace_back();
    // As CUDA's pool: beyond 32 they are shared.
    static std::atomic<size_t> turn{0};
    size_t id = lines.size() < 34 ? lines.size() - 1 : 2 + turn++ % 32;
    return Stream(Stream::UNSAFE, Device(kKind, index), id);
  }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  Stream exchangeStream(Stream stream) const override {
    Stream before = current_stream(stream.device_index());
    stream_of_thread[stream.device_index()] = stream.id();
    return before;
  }
  DeviceIndex deviceCount() const noexcept override { return device_count(); }
  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    begin();
    std::lock_guard<std::recursive_mutex> guard(lock());
    if (!*event) *event = new Event{stream, 0, {}};
    *static_cast<Event*>(*event) = {stream, line_of(stream).sent, Clock::now()};
  }
  void block(void* event, const Stream& stream) const override {
    if (!event) return;
    auto& e = *static_cast<Event*>(event);
    wait_in_stream(stream, e.stream, e.task);
  }
  bool queryEvent(void* event) const override {
    if (!event) return true;
    auto& e = *static_cast<Event*>(event);
    return is_done(e.stream, e.task);
  }
  void synchronizeEvent(void* event) const override {
    if (!event) return;
    auto& e = *static_cast<Event*>(event);
    run_until(e.stream, e.task);
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void* first, void* second, const DeviceIndex) const override {
    return std::chrono::duration<double, std::milli>(static_cast<Event*>(second)->at - static_cast<Event*>(first)->at).count();
  }
  bool queryStream(const Stream& stream) const override { return is_done(stream, last_task(stream)); }
  void synchronizeStream(const Stream& stream) const override { finish(stream); }
  void synchronizeDevice(const DeviceIndex device) const override { finish_device(device); }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const Stream& stream) const override {
    used_on(pointer.get(), stream);
  }
};

// Its numbers are those of a generator of the host of its own.
struct Generator final : c10::GeneratorImpl {
  explicit Generator(DeviceIndex index)
      : GeneratorImpl(Device(kKind, index), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        own(at::detail::createCPUGenerator()) {}
  void set_current_seed(uint64_t seed) override { own.set_current_seed(seed); }
  void set_offset(uint64_t) override {}
  uint64_t get_offset() const override { return 0; }
  uint64_t current_seed() const override { return own.current_seed(); }
  uint64_t seed() override { return const_cast<at::Generator&>(own).seed(); }
  void set_state(const c10::TensorImpl& state) override { own.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return own.unsafeGetGeneratorImpl()->get_state(); }
  GeneratorImpl* clone_impl() const override {
    auto* made = new Generator(device().index());
    made->own = own.clone();
    return made;
  }
  at::Generator own;
};

const at::Generator& default_generator(DeviceIndex index) {
  static auto* made = [] {
    auto* all = new std::vector<at::Generator>();
    for (int i = 0; i < device_count(); ++i) all->push_back(at::make_generator<Generator>(i));
    return all;
  }();
  return made->at(index < 0 ? device_of_thread : index);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  void init() const override { begin(); }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return world().begun; }
  DeviceIndex deviceCount() const override { return device_count(); }
  void setCurrentDevice(DeviceIndex device) const override { set_current_device(device); }
  DeviceIndex getCurrentDevice() const override { return device_of_thread; }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    DeviceIndex before = device_of_thread;
    set_current_device(device);
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return exchangeDevice(device); }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory(); }
  Device getDeviceFromPtr(void* address) const override {
    auto* found = device_at(address);
    TORCH_CHECK(found, "no memory of a pretend device");
    return Device(kKind, found - world().devices.data());
  }
  const at::Generator& getDefaultGenerator(DeviceIndex index) const override { return default_generator(index); }
  at::Generator getNewGenerator(DeviceIndex index) const override {
    return at::make_generator<Generator>(index < 0 ? device_of_thread : index);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    // FSDP2 frees what it has gathered so, and allocates it again.
    c10::Device before = Guard().exchangeDevice(storage.device());
    auto fresh = device_memory().allocate(bytes);
    size_t kept = std::min(bytes, storage.nbytes());
    if (kept) {
      char *to = static_cast<char*>(opened(fresh.get())), *from = static_cast<char*>(opened(storage.data()));
      enqueue(current_stream(storage.device().index()), [=] { std::memcpy(to, from, kept); });
    }
    const_cast<c10::Storage&>(storage).set_data_ptr_noswap(std::move(fresh));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
    Guard().exchangeDevice(before);
  }
};

} // namespace

at::Generator own_generator(const std::optional<at::Generator>& given, DeviceIndex device) {
  const at::Generator& chosen = given && given->defined() ? *given : default_generator(device);
  return static_cast<Generator*>(chosen.unsafeGetGeneratorImpl())->own;
}

std::recursive_mutex& lock() { return world().mutex; }
int device_count() {
  static int made = number_from("ZEROSTART_TEST_NPU_DEVICES", 8);
  return made;
}
DeviceIndex current_device() { return device_of_thread; }
void set_current_device(DeviceIndex device) {
  if (device < 0) return;
  TORCH_CHECK(device < device_count(), "invalid device ordinal ", int(device));
  device_of_thread = device;
}
Stream current_stream(DeviceIndex device) {
  return Stream(Stream::UNSAFE, Device(kKind, device), stream_of_thread[device]);
}
uint64_t enqueue(Stream stream, std::function<void()> task) {
  begin();
  std::lock_guard<std::recursive_mutex> guard(lock());
  Line& line = line_of(stream);
  line.waiting.push_back({std::move(task), Clock::now() + std::chrono::milliseconds(world().delay)});
  while (line.waiting.size() > 1000) run_first(line); // as a driver does whose queue is full
  return ++line.sent;
}
void run_until(Stream stream, uint64_t task) {
  begin();
  std::lock_guard<std::recursive_mutex> guard(lock());
  Line& line = line_of(stream);
  while (line.done < task && !line.waiting.empty()) run_first(line);
  check_failure();
}
uint64_t last_task(Stream stream) {
  begin();
  std::lock_guard<std::recursive_mutex> guard(lock());
  return line_of(stream).sent;
}
void finish(Stream stream) { run_until(stream, last_task(stream)); }
void finish_device(DeviceIndex device) {
  begin();
  std::lock_guard<std::recursive_mutex> guard(lock());
  for (size_t id = 0; id < world().devices.at(device).lines.size(); ++id)
    finish(Stream(Stream::UNSAFE, Device(kKind, device), id));
}
bool is_done(Stream stream, uint64_t task) {
  begin();
  std::lock_guard<std::recursive_mutex> guard(lock());
  return line_of(stream).done >= task;
}
void wait_in_stream(Stream waiting, Stream other, uint64_t task) {
  if (waiting == other || is_done(other, task)) return;
  enqueue(waiting, [=] { run_until(other, task); });
}
Stream collective_stream(DeviceIndex device) { return Stream(Stream::UNSAFE, Device(kKind, device), 1); }

void* opened(const void* address) {
  auto* device = device_at(address);
  if (!device) return const_cast<void*>(address);
  return device->open + (static_cast<const char*>(address) - device->guarded);
}
bool is_device_address(const void* address) { return device_at(address) != nullptr; }
void used_on(const void* address, Stream stream) {
  std::lock_guard<std::recursive_mutex> guard(lock());
  auto& w = world();
  if (auto* device = device_at(address)) {
    size_t offset = static_cast<const char*>(address) - device->guarded;
    auto found = device->blocks.upper_bound(offset);
    if (found == device->blocks.begin()) return;
    --found;
    if (offset < found->first + found->second.bytes && !(found->second.stream == stream))
      found->second.users.emplace_back(stream, 0);
    return;
  }
  auto found = w.pinned.upper_bound(static_cast<char*>(const_cast<void*>(address)));
  if (found == w.pinned.begin()) return;
  --found;
  if (static_cast<const char*>(address) < found->first + found->second.bytes)
    found->second.users.emplace_back(stream, line_of(stream).sent);
}
bool is_pinned(const void* address) {
  auto& w = world();
  std::lock_guard<std::recursive_mutex> guard(w.mutex);
  auto* at = static_cast<char*>(const_cast<void*>(address));
  auto inside = [&](auto& map, auto size) {
    auto found = map.upper_bound(at);
    if (found == map.begin()) return false;
    --found;
    return at < found->first + size(found->second);
  };
  return inside(w.pinned, [](const Pinned& p) { return p.bytes; }) || inside(w.registered, [](size_t n) { return n; });
}

at::Tensor host_view(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.device().type() != kKind) return tensor;
  const auto& storage = tensor.storage();
  c10::Storage opened_storage(
      c10::Storage::use_byte_size_t(), storage.nbytes(),
      c10::DataPtr(opened(storage.data()), c10::Device(c10::kCPU)), nullptr, false);
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      std::move(opened_storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  made._set_conj(tensor.is_conj());
  made._set_neg(tensor.is_neg());
  return made;
}

void stop() {
  auto& w = world();
  w.stopping = true;
  if (w.drain) {
    w.drain->join();
    delete w.drain;
    w.drain = nullptr;
  }
}

static c10::impl::DeviceGuardImplRegistrar guard_registrar(kKind, new Guard());

void bind_collectives(py::module& m);
uint64_t operator_count();
uint64_t wait_count();

} // namespace pretend

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace pretend;
  c10::SetAllocator(kKind, &device_memory());
  at::setHostAllocator(kKind, &pinned_memory());
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  m.def("begin", [] { at::globalContext().lazyInitDevice(kKind); }); // as torch.cuda's, which torch notes
  m.def("is_begun", [] { return world().begun.load(); });
  m.def("stop", [] { py::gil_scoped_release free; stop(); });
  m.def("device_count", &device_count);
  m.def("current_device", [] { return int(current_device()); });
  m.def("set_device", [](int device) { set_current_device(device); });
  m.def("synchronize", [](int device) { py::gil_scoped_release free; finish_device(device); });
  m.def("pinned_bytes", [] { return world().pinned_bytes; });
  m.def("pinned_peak", [] { return world().pinned_peak; });
  m.def("set_delay", [](int64_t delay) { world().delay = delay; });
  m.def("register_host", [](size_t address, size_t bytes) {
    std::lock_guard<std::recursive_mutex> guard(lock());
    world().registered[reinterpret_cast<char*>(address)] = bytes;
    return 0;
  });
  m.def("unregister_host", [](size_t address) {
    std::lock_guard<std::recursive_mutex> guard(lock());
    world().registered.erase(reinterpret_cast<char*>(address));
    return 0;
  });
  m.def("default_generator", [](int index) { return default_generator(index); });
  m.def("operators", &operator_count);
  m.def("waits", &wait_count);
  m.def("registered_bytes", [] {
    size_t bytes = 0;
    for (auto& one : world().registered) bytes += one.second;
    return bytes;
  });
  bind_collectives(m);
}
