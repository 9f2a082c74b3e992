// Copies between host and device that nobody waits for: on streams of their own, in chunks, each with an event that
// tells when it is over.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "cuda/runtime.hpp"

namespace nccl_stream {

class StagerCore;

// One copy on its way. Any thread may ask it.
class StagedCopy {
  public:
    StagedCopy(std::shared_ptr<StagerCore> core, EventHandle event) : core_(std::move(core)), event_(event) {}
    ~StagedCopy();
    StagedCopy(const StagedCopy&) = delete;
    StagedCopy& operator=(const StagedCopy&) = delete;

    // Whether the bytes are in place and neither side is touched any more. Throws CudaError.
    bool done();
    // Waits for that, at most so many seconds (negative: for ever); returns whether it came. Throws CudaError.
    bool wait(double timeout_s);
    EventHandle event() const { return event_; }

  private:
    std::shared_ptr<StagerCore> core_;
    EventHandle event_;
    std::mutex mutex_;
    bool finished_ = false;
};

class Stager {
  public:
    // What a copy is ordered by, all of it on the device; the host never waits.
    struct Order {
        std::optional<StreamHandle> after;   // starts behind the work that this stream has queued
        std::optional<StreamHandle> before;  // later work of this stream starts behind the copy
        std::vector<StagedCopy*> behind;     // starts behind these other copies
    };

    // streams: how many copies may be in progress side by side. chunk_bytes: a large copy is cut into such pieces, so
    // that one on another stream does not wait for all of it.
    Stager(Runtime& runtime, int device, std::size_t chunk_bytes, int streams);

    // Queues a copy. Both sides must stay until it is over. Throws CudaError, and then nothing of it is in progress.
    std::unique_ptr<StagedCopy> copy(void* destination, const void* source, std::size_t nbytes, const Order& order);

  private:
    std::shared_ptr<StagerCore> core_;
    const std::size_t chunk_bytes_;
};

}  // namespace nccl_stream
