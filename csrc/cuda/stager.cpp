#include "cuda/stager.hpp"

#include <algorithm>
#include <chrono>
#include <thread>

namespace nccl_stream {

namespace {

constexpr auto kFirstPause = std::chrono::microseconds(20);
constexpr auto kLongestPause = std::chrono::microseconds(500);

}  // namespace

// Streams and events. It lives until the stager and the last of its copies are gone.
class StagerCore {
  public:
    StagerCore(Runtime& runtime, int device, int streams) : runtime(runtime), device(device) {
        DeviceGuard guard(runtime, device);
        try {
            for (int n = 0; n < streams; ++n) {
                StreamHandle stream = nullptr;
                check(runtime, runtime.stream_create(&stream), "cudaStreamCreateWithPriority");
                streams_.push_back(stream);
            }
        } catch (...) {
            destroy();
            throw;
        }
    }
    ~StagerCore() {
        try {
            DeviceGuard guard(runtime, device);
            destroy();
        } catch (const CudaError&) {
            // The context is gone, and the handles with it.
        }
    }

    StreamHandle next_stream() {
        std::lock_guard<std::mutex> lock(mutex_);
        return streams_[next_++ % streams_.size()];
    }

    EventHandle take_event() {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            if (!events_.empty()) {
                EventHandle event = events_.back();
                events_.pop_back();
                return event;
            }
        }
        EventHandle event = nullptr;
        check(runtime, runtime.event_create(&event), "cudaEventCreateWithFlags");
        return event;
    }

    // An event may be given back while it is still to happen: recording it anew does not disturb who waits for it.
    void give_event(EventHandle event) {
        std::lock_guard<std::mutex> lock(mutex_);
        events_.push_back(event);
    }

    Runtime& runtime;
    const int device;

  private:
    void destroy() {
        for (EventHandle event : events_) runtime.event_destroy(event);
        for (StreamHandle stream : streams_) runtime.stream_destroy(stream);
    }

    std::mutex mutex_;
    std::vector<StreamHandle> streams_;
    std::vector<EventHandle> events_;
    std::size_t next_ = 0;
};

namespace {

// An event that goes back unless it is kept.
class BorrowedEvent {
  public:
    explicit BorrowedEvent(StagerCore& core) : core_(core), event_(core.take_event()) {}
    ~BorrowedEvent() {
        if (event_ != nullptr) core_.give_event(event_);
    }
    BorrowedEvent(const BorrowedEvent&) = delete;
    BorrowedEvent& operator=(const BorrowedEvent&) = delete;

    EventHandle get() const { return event_; }
    EventHandle keep() {
        EventHandle event = event_;
        event_ = nullptr;
        return event;
    }

  private:
    StagerCore& core_;
    EventHandle event_;
};

}  // namespace

StagedCopy::~StagedCopy() {
    core_->give_event(event_);
}

bool StagedCopy::done() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (finished_) return true;
    const int code = core_->runtime.event_query(event_);
    if (code == kNotReady) return false;
    check(core_->runtime, code, "cudaEventQuery");
    finished_ = true;
    return true;
}

bool StagedCopy::wait(double timeout_s) {
    // Looking again and again: the runtime's own wait knows no deadline.
    const auto start = std::chrono::steady_clock::now();
    auto pause = kFirstPause;
    while (!done()) {
        const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - start;
        if (timeout_s >= 0 && waited.count() >= timeout_s) return false;
        std::this_thread::sleep_for(pause);
        pause = std::min(2 * pause, kLongestPause);
    }
    return true;
}

Stager::Stager(Runtime& runtime, int device, std::size_t chunk_bytes, int streams) : chunk_bytes_(chunk_bytes) {
    if (chunk_bytes == 0 || streams < 1) throw std::invalid_argument("a stager needs chunk_bytes > 0 and streams > 0");
    core_ = std::make_shared<StagerCore>(runtime, device, streams);
}

std::unique_ptr<StagedCopy> Stager::copy(void* destination, const void* source, std::size_t nbytes,
                                         const Order& order) {
    StagerCore& core = *core_;
    Runtime& runtime = core.runtime;
    DeviceGuard guard(runtime, core.device);
    const StreamHandle stream = core.next_stream();
    BorrowedEvent finished(core);
    if (order.after) {
        BorrowedEvent begun(core);
        check(runtime, runtime.event_record(begun.get(), *order.after), "cudaEventRecord");
        check(runtime, runtime.stream_wait_event(stream, begun.get()), "cudaStreamWaitEvent");
    }
    for (const StagedCopy* other : order.behind) {
        check(runtime, runtime.stream_wait_event(stream, other->event()), "cudaStreamWaitEvent");
    }
    try {
        auto* to = static_cast<char*>(destination);
        const auto* from = static_cast<const char*>(source);
        for (std::size_t offset = 0; offset < nbytes; offset += chunk_bytes_) {
            const std::size_t size = std::min(chunk_bytes_, nbytes - offset);
            check(runtime, runtime.memcpy_async(to + offset, from + offset, size, stream), "cudaMemcpyAsync");
        }
        check(runtime, runtime.event_record(finished.get(), stream), "cudaEventRecord");
        if (order.before) {
            check(runtime, runtime.stream_wait_event(*order.before, finished.get()), "cudaStreamWaitEvent");
        }
    } catch (...) {
        // The caller takes the memory back now: what has been queued must be over.
        runtime.stream_synchronize(stream);
        throw;
    }
    auto copy = std::make_unique<StagedCopy>(core_, finished.get());
    finished.keep();
    return copy;
}

}  // namespace nccl_stream
