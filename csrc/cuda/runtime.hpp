// The few calls of the CUDA runtime that this library makes. Everything else is written against this interface, so that
// it runs, and fails on demand, on a machine without a GPU.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace nccl_stream {

struct StridedBatch;

using StreamHandle = void*;  // a cudaStream_t; null is the default stream
using EventHandle = void*;   // a cudaEvent_t

// Codes of the CUDA runtime.
constexpr int kSuccess = 0;
constexpr int kNotReady = 600;

class Runtime {
  public:
    virtual ~Runtime() = default;

    virtual int get_device(int* device) = 0;
    virtual int set_device(int device) = 0;
    virtual int stream_create(StreamHandle* stream) = 0;  // does not synchronise with the default stream
    virtual int stream_destroy(StreamHandle stream) = 0;
    virtual int stream_wait_event(StreamHandle stream, EventHandle event) = 0;
    virtual int stream_synchronize(StreamHandle stream) = 0;
    virtual int event_create(EventHandle* event) = 0;  // without timing
    virtual int event_destroy(EventHandle event) = 0;
    virtual int event_record(EventHandle event, StreamHandle stream) = 0;
    virtual int event_query(EventHandle event) = 0;  // kSuccess, kNotReady or an error
    virtual int memcpy_async(void* destination, const void* source, std::size_t nbytes, StreamHandle stream) = 0;
    // Kernels; see strided.hpp and crc_math.hpp.
    virtual int find_kernels() = 0;  // kSuccess when the current device can run them
    virtual int launch_strided(const StridedBatch& batch, bool gather, StreamHandle stream) = 0;
    virtual int launch_crc32c(const void* data, std::size_t nbytes, std::uint32_t* raw, StreamHandle stream) = 0;

    virtual std::string describe(int code) const = 0;
};

// The CUDA runtime itself; only in builds with CUDA. Importing the library does not touch it.
Runtime& cuda_runtime();

class CudaError : public std::runtime_error {
  public:
    CudaError(const std::string& call, const std::string& what, int code)
        : std::runtime_error(call + " failed: " + what), code(code) {}

    const int code;
};

// Throws unless the call succeeded.
inline void check(const Runtime& runtime, int code, const char* call) {
    if (code != kSuccess) throw CudaError(call, runtime.describe(code) + " (" + std::to_string(code) + ")", code);
}

// Makes a device the calling thread's current one, and puts back what was.
class DeviceGuard {
  public:
    DeviceGuard(Runtime& runtime, int device) : runtime_(runtime) {
        check(runtime, runtime.get_device(&before_), "cudaGetDevice");
        if (before_ != device) {
            check(runtime, runtime.set_device(device), "cudaSetDevice");
            changed_ = true;
        }
    }
    ~DeviceGuard() {
        if (changed_) runtime_.set_device(before_);
    }
    DeviceGuard(const DeviceGuard&) = delete;
    DeviceGuard& operator=(const DeviceGuard&) = delete;

  private:
    Runtime& runtime_;
    int before_ = 0;
    bool changed_ = false;
};

}  // namespace nccl_stream
