// The pretend accelerator: its devices, their memory, and what their streams are still to do.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <functional>
#include <mutex>

namespace pretend {

constexpr c10::DeviceType kKind = c10::DeviceType::PrivateUse1;

// One lock for all that follows: a device does one thing at a time, and no task needs Python.
std::recursive_mutex& lock();

// Devices.
int device_count();
c10::DeviceIndex current_device(); // Of this thread, as CUDA's.
void set_current_device(c10::DeviceIndex device);

// Streams. A task runs late: when somebody waits for it, or some milliseconds after it was sent.
c10::Stream current_stream(c10::DeviceIndex device);
uint64_t enqueue(c10::Stream stream, std::function<void()> task);
void run_until(c10::Stream stream, uint64_t task); // Waits, as a host does.
void finish(c10::Stream stream);
void finish_device(c10::DeviceIndex device);
uint64_t last_task(c10::Stream stream);
bool is_done(c10::Stream stream, uint64_t task);
void wait_in_stream(c10::Stream waiting, c10::Stream other, uint64_t task);
c10::Stream collective_stream(c10::DeviceIndex device);

// Memory. The host cannot touch what an address of a device points to; the device has it mapped once more.
void* opened(const void* address); // The device's own view of an address; of the host's memory itself.
bool is_device_address(const void* address);
void used_on(const void* address, c10::Stream stream); // Not given to anybody else before the stream is there.
bool is_pinned(const void* address);

// A tensor of the host over the device's memory, for the code of a kernel.
at::Tensor host_view(const at::Tensor& tensor);

} // namespace pretend
