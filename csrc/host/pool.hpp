// Hands out ranges of [0, capacity). It never touches the memory that the ranges stand for.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <utility>

namespace nccl_stream {

// A range that is out. `serial` is never used twice by one pool, so that an old copy of a slot is told from a new one.
struct Slot {
    std::uint64_t offset = 0;
    std::uint64_t nbytes = 0;  // as asked for
    std::uint64_t serial = 0;
};

enum class ReserveStatus { kOk, kNoRoom, kTooLarge, kClosed, kInterrupted };
enum class FreeStatus { kOk, kAlreadyFree, kForeign };

struct PoolStatistics {
    std::uint64_t capacity = 0;
    std::uint64_t used = 0;       // bytes in slots, each rounded up to the pool's alignment
    std::uint64_t peak_used = 0;  // the most that `used` has been
    std::uint64_t slots = 0;
    std::uint64_t free_ranges = 0;
    std::uint64_t largest_free = 0;  // the largest slot that fits now
    std::uint64_t waiting = 0;       // calls of reserve that wait for room
    std::uint64_t reserved = 0;      // slots handed out so far
};

// Best fit, lowest address first, neighbours merged at once. All methods may be called from any thread.
//
// A reserve or free takes O(log n) steps for n ranges and, but for the tree nodes of a split, no memory. Only where an
// alignment above the pool's own finds no range that is certainly large enough are the others tried one by one.
class Pool {
  public:
    // Both in bytes; `alignment` a power of two, `capacity` a positive multiple of it. Throws std::invalid_argument.
    Pool(std::uint64_t capacity, std::uint64_t alignment);
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;
    // No call may be in progress.
    ~Pool() = default;

    // Asked about ten times a second while reserve waits, without any lock held; true ends the wait.
    using Interrupted = std::function<bool()>;

    // Reserves `nbytes` (0 is allowed and takes up one unit of alignment) at a multiple of `alignment`, a power of two;
    // what is below the pool's own counts as that.
    //
    // Without room: a timeout of 0 returns kNoRoom at once, another one waits for that many seconds, none waits until
    // there is room. Those that wait are served in the order in which they came; a call that does not wait may overtake
    // them. kTooLarge: not even the empty pool has such a range.
    ReserveStatus reserve(std::uint64_t nbytes, std::uint64_t alignment, std::optional<double> timeout, Slot& slot,
                          const Interrupted& interrupted = nullptr);

    // Returns a slot. Anything but kOk has changed nothing. Works after close().
    FreeStatus free(const Slot& slot);

    PoolStatistics statistics() const;

    // From now on reserve returns kClosed, also where it waits. Idempotent.
    void close();

  private:
    using BySize = std::set<std::pair<std::uint64_t, std::uint64_t>>;  // (size, start) of free ranges
    struct Range {
        std::uint64_t size = 0;
        std::uint64_t serial = 0;  // 0: free
        BySize::node_type node;    // this range's entry of by_size_ while it is out, so that free() cannot fail
    };
    using Ranges = std::map<std::uint64_t, Range>;  // by start, without gaps
    struct Waiter {
        std::uint64_t size;
        std::uint64_t alignment;
        Slot* slot;
        bool served = false;
        std::condition_variable wake;
    };

    bool take(std::uint64_t size, std::uint64_t alignment, Slot& slot);
    BySize::iterator find(std::uint64_t size, std::uint64_t alignment) const;
    void serve_waiters();

    const std::uint64_t capacity_;
    const std::uint64_t alignment_;
    mutable std::mutex mutex_;
    Ranges ranges_;
    BySize by_size_;
    std::deque<Waiter*> waiters_;
    std::uint64_t used_ = 0;
    std::uint64_t peak_used_ = 0;
    std::uint64_t slots_ = 0;
    std::uint64_t last_serial_ = 0;
    bool closed_ = false;
};

}  // namespace nccl_stream
