#include "cuda/fake_runtime.hpp"

#include <cstring>
#include <vector>

#include "cuda/crc_math.hpp"
#include "cuda/strided.hpp"

namespace nccl_stream {

namespace {

// Codes of the CUDA runtime.
constexpr int kInvalidValue = 1;
constexpr int kInvalidDevice = 101;
constexpr int kInvalidHandle = 400;
constexpr int kStandstill = 999;

using Lock = std::lock_guard<std::mutex>;

}  // namespace

int FakeRuntime::begin(const std::string& call) {
    const int count = ++calls_[call];
    auto& failures = failures_[call];
    const auto found = failures.find(count);
    if (found == failures.end()) return kSuccess;
    const int code = found->second;
    failures.erase(found);
    return code;
}

void FakeRuntime::fail(const std::string& call, int nth, int code) {
    Lock lock(mutex_);
    failures_[call][calls_[call] + nth] = code;
}

int FakeRuntime::get_device(int* device) {
    Lock lock(mutex_);
    *device = device_;
    return begin("get_device");
}

int FakeRuntime::set_device(int device) {
    Lock lock(mutex_);
    if (const int code = begin("set_device")) return code;
    if (device < 0 || device >= num_devices_) return kInvalidDevice;
    device_ = device;
    return kSuccess;
}

int FakeRuntime::stream_create(StreamHandle* stream) {
    Lock lock(mutex_);
    if (const int code = begin("stream_create")) return code;
    streams_[++next_handle_] = true;
    *stream = reinterpret_cast<StreamHandle>(next_handle_);
    return kSuccess;
}

int FakeRuntime::stream_destroy(StreamHandle stream) {
    Lock lock(mutex_);
    if (const int code = begin("stream_destroy")) return code;
    return streams_.erase(key(stream)) != 0 ? kSuccess : kInvalidHandle;
}

int FakeRuntime::stream_wait_event(StreamHandle stream, EventHandle event) {
    Lock lock(mutex_);
    if (const int code = begin("stream_wait_event")) return code;
    const auto found = events_.find(key(event));
    if (!has_stream(stream) || found == events_.end()) return kInvalidHandle;
    operations_[key(stream)].push_back({[] {}, found->first, found->second.recorded});
    return kSuccess;
}

int FakeRuntime::stream_synchronize(StreamHandle stream) {
    Lock lock(mutex_);
    if (const int code = begin("stream_synchronize")) return code;
    if (!has_stream(stream)) return kInvalidHandle;
    while (!operations_[key(stream)].empty()) {
        if (!step_locked()) return kStandstill;
    }
    return kSuccess;
}

int FakeRuntime::event_create(EventHandle* event) {
    Lock lock(mutex_);
    if (const int code = begin("event_create")) return code;
    events_[++next_handle_] = {};
    *event = reinterpret_cast<EventHandle>(next_handle_);
    return kSuccess;
}

int FakeRuntime::event_destroy(EventHandle event) {
    Lock lock(mutex_);
    if (const int code = begin("event_destroy")) return code;
    const auto found = events_.find(key(event));
    if (found == events_.end()) return kInvalidHandle;
    dead_events_.insert(*found);
    events_.erase(found);
    return kSuccess;
}

int FakeRuntime::event_record(EventHandle event, StreamHandle stream) {
    Lock lock(mutex_);
    if (const int code = begin("event_record")) return code;
    const auto found = events_.find(key(event));
    if (!has_stream(stream) || found == events_.end()) return kInvalidHandle;
    const std::uint64_t version = ++found->second.recorded;
    operations_[key(stream)].push_back({[this, id = found->first, version] {
        auto& where = events_.count(id) != 0 ? events_ : dead_events_;
        where[id].happened = std::max(where[id].happened, version);
    }});
    return kSuccess;
}

int FakeRuntime::event_query(EventHandle event) {
    Lock lock(mutex_);
    if (const int code = begin("event_query")) return code;
    const auto found = events_.find(key(event));
    if (found == events_.end()) return kInvalidHandle;
    for (int n = 0; n < steps_per_query_; ++n) step_locked();
    return found->second.happened >= found->second.recorded ? kSuccess : kNotReady;
}

int FakeRuntime::memcpy_async(void* destination, const void* source, std::size_t nbytes, StreamHandle stream) {
    Lock lock(mutex_);
    if (const int code = begin("memcpy_async")) return code;
    if (!has_stream(stream)) return kInvalidHandle;
    if (destination == nullptr || source == nullptr) return kInvalidValue;
    operations_[key(stream)].push_back({[=] { std::memcpy(destination, source, nbytes); }});
    return kSuccess;
}

int FakeRuntime::find_kernels() {
    Lock lock(mutex_);
    return begin("find_kernels");
}

int FakeRuntime::launch_strided(const StridedBatch& batch, bool gather, StreamHandle stream) {
    Lock lock(mutex_);
    if (const int code = begin("launch_strided")) return code;
    if (!has_stream(stream)) return kInvalidHandle;
    operations_[key(stream)].push_back({[=] {
        for (int n = 0; n < batch.count; ++n) {
            const StridedPiece& piece = batch.pieces[n];
            for (std::uint64_t index = 0; index < piece.num_units; ++index) move_one(piece, index, gather);
        }
    }});
    return kSuccess;
}

int FakeRuntime::launch_crc32c(const void* data, std::size_t nbytes, std::uint32_t* raw, StreamHandle stream) {
    Lock lock(mutex_);
    if (const int code = begin("launch_crc32c")) return code;
    if (!has_stream(stream)) return kInvalidHandle;
    operations_[key(stream)].push_back({[=] {
        std::vector<std::uint32_t> table(256);
        for (std::uint32_t n = 0; n < 256; ++n) table[n] = crc_table_entry(n);
        const CrcPowers powers = crc_powers();
        *raw = 0;
        for (std::size_t start = 0; start < nbytes; start += kCrcSegmentBytes) {
            *raw ^= crc_share(static_cast<const unsigned char*>(data), nbytes, start / kCrcSegmentBytes, table.data(),
                              powers);
        }
    }});
    return kSuccess;
}

std::string FakeRuntime::describe(int) const {
    return "error of the imagination";
}

void FakeRuntime::fill(void* memory, std::size_t nbytes, int byte, StreamHandle stream) {
    Lock lock(mutex_);
    operations_[key(stream)].push_back({[=] { std::memset(memory, byte, nbytes); }});
}

bool FakeRuntime::step() {
    Lock lock(mutex_);
    return step_locked();
}

bool FakeRuntime::step_locked() {
    std::vector<std::deque<Operation>*> able;
    for (auto& entry : operations_) {
        if (entry.second.empty()) continue;
        const Operation& next = entry.second.front();
        auto& where = events_.count(next.event) != 0 ? events_ : dead_events_;
        if (next.event == 0 || where[next.event].happened >= next.version) able.push_back(&entry.second);
    }
    if (able.empty()) return false;
    auto& queue = *able[std::uniform_int_distribution<std::size_t>(0, able.size() - 1)(random_)];
    const Operation operation = std::move(queue.front());
    queue.pop_front();
    operation.run();
    return true;
}

std::size_t FakeRuntime::pending() {
    Lock lock(mutex_);
    std::size_t count = 0;
    for (const auto& entry : operations_) count += entry.second.size();
    return count;
}

int FakeRuntime::calls(const std::string& call) {
    Lock lock(mutex_);
    return calls_[call];
}

std::size_t FakeRuntime::live() {
    Lock lock(mutex_);
    return streams_.size() + events_.size();
}

}  // namespace nccl_stream
