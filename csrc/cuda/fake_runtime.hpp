// A CUDA runtime of the imagination: streams and events with their rules of order, on host memory. Work is done one
// operation at a time, from whichever stream may go on, in an order that a seed decides; any call can be made to fail.
// For tests.
#pragma once

#include <algorithm>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <random>
#include <string>

#include "cuda/runtime.hpp"

namespace nccl_stream {

class FakeRuntime : public Runtime {
  public:
    // steps_per_query: operations that are done whenever somebody asks whether an event has happened.
    FakeRuntime(std::uint32_t seed, int num_devices, int steps_per_query)
        : random_(seed), num_devices_(num_devices), steps_per_query_(steps_per_query) {}

    int get_device(int* device) override;
    int set_device(int device) override;
    int stream_create(StreamHandle* stream) override;
    int stream_destroy(StreamHandle stream) override;
    int stream_wait_event(StreamHandle stream, EventHandle event) override;
    int stream_synchronize(StreamHandle stream) override;
    int event_create(EventHandle* event) override;
    int event_destroy(EventHandle event) override;
    int event_record(EventHandle event, StreamHandle stream) override;
    int event_query(EventHandle event) override;
    int memcpy_async(void* destination, const void* source, std::size_t nbytes, StreamHandle stream) override;
    int find_kernels() override;
    int launch_strided(const StridedBatch& batch, bool gather, StreamHandle stream) override;
    int launch_crc32c(const void* data, std::size_t nbytes, std::uint32_t* raw, StreamHandle stream) override;
    std::string describe(int code) const override;

    // The nth call (from 1, counted from now) of this method returns code instead of doing anything.
    void fail(const std::string& call, int nth, int code);
    // Queues work of somebody else: fills memory with a byte.
    void fill(void* memory, std::size_t nbytes, int byte, StreamHandle stream);
    // Does one operation; false when none can go on.
    bool step();
    // Operations queued and not done.
    std::size_t pending();
    // How often a method was called.
    int calls(const std::string& call);
    // Streams and events that exist.
    std::size_t live();

  private:
    struct Operation {
        std::function<void()> run;
        std::size_t event = 0;  // to wait for, when not 0
        std::uint64_t version = 0;
    };
    struct Event {
        std::uint64_t recorded = 0;
        std::uint64_t happened = 0;
    };

    // Counts a call; what it shall return, kSuccess unless told otherwise. The lock is held.
    int begin(const std::string& call);
    bool step_locked();
    bool has_stream(StreamHandle stream) const { return stream == nullptr || streams_.count(key(stream)) != 0; }
    static std::size_t key(const void* handle) { return reinterpret_cast<std::size_t>(handle); }

    std::mutex mutex_;
    std::mt19937 random_;
    const int num_devices_;
    const int steps_per_query_;
    int device_ = 0;
    std::size_t next_handle_ = 0x1000;
    std::map<std::size_t, bool> streams_;                      // those that were not destroyed
    std::map<std::size_t, std::deque<Operation>> operations_;  // also of streams that were
    std::map<std::size_t, Event> events_;
    std::map<std::size_t, Event> dead_events_;  // destroyed, but streams may still wait for them
    std::map<std::string, int> calls_;
    std::map<std::string, std::map<int, int>> failures_;
};

}  // namespace nccl_stream
