#include "host/pool.hpp"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <new>
#include <stdexcept>

namespace nccl_stream {

namespace {

constexpr std::chrono::milliseconds kInterruptPoll{100};

bool is_power_of_two(std::uint64_t value) {
    return value != 0 && (value & (value - 1)) == 0;
}

std::uint64_t round_up(std::uint64_t value, std::uint64_t unit) {
    return (value + unit - 1) & ~(unit - 1);
}

}  // namespace

Pool::Pool(std::uint64_t capacity, std::uint64_t alignment) : capacity_(capacity), alignment_(alignment) {
    if (!is_power_of_two(alignment)) {
        throw std::invalid_argument("the alignment of a pool must be a power of two");
    }
    if (capacity == 0 || capacity % alignment != 0) {
        throw std::invalid_argument("the capacity of a pool must be a positive multiple of its alignment");
    }
    ranges_[0].size = capacity;
    by_size_.emplace(capacity, 0);
}

// Every entry of by_size_ before the one returned is too small, every one from lower_bound(size + slack) on fits.
Pool::BySize::iterator Pool::find(std::uint64_t size, std::uint64_t alignment) const {
    const std::uint64_t slack = alignment - alignment_;
    auto fits = [&](const std::pair<std::uint64_t, std::uint64_t>& range) {
        const std::uint64_t padding = round_up(range.second, alignment) - range.second;
        return range.first >= padding && range.first - padding >= size;
    };
    auto found = by_size_.lower_bound({size, 0});
    if (slack == 0 || (found != by_size_.end() && fits(*found))) {
        return found;
    }
    const auto certain = by_size_.lower_bound({size + slack, 0});
    return certain != by_size_.end() ? certain : std::find_if(found, certain, fits);
}

bool Pool::take(std::uint64_t size, std::uint64_t alignment, Slot& slot) {
    const auto found = find(size, alignment);
    if (found == by_size_.end()) {
        return false;
    }
    const std::uint64_t start = found->second;
    const std::uint64_t padding = round_up(start, alignment) - start;
    const std::uint64_t rest = found->first - padding - size;
    const auto range = ranges_.find(start);

    // What can run out of memory comes first, and is undone by what it returns.
    Ranges::iterator middle = range, tail = ranges_.end();
    try {
        if (padding != 0) {
            middle = ranges_.emplace_hint(std::next(range), start + padding, Range{});
            middle->second.node = BySize{{0, 0}}.extract(std::pair<std::uint64_t, std::uint64_t>{0, 0});
        }
        if (rest != 0) {
            tail = ranges_.emplace_hint(std::next(middle), start + padding + size, Range{});
            tail->second.node = BySize{{0, 0}}.extract(std::pair<std::uint64_t, std::uint64_t>{0, 0});
        }
    } catch (...) {
        if (tail != ranges_.end()) {
            ranges_.erase(tail);
        }
        if (middle != range) {
            ranges_.erase(middle);
        }
        throw;
    }

    BySize::node_type node = by_size_.extract(found);
    auto put_back = [this](Ranges::iterator free_range, std::uint64_t nbytes, BySize::node_type entry) {
        free_range->second.size = nbytes;
        entry.value() = {nbytes, free_range->first};
        by_size_.insert(std::move(entry));
    };
    if (tail != ranges_.end()) {
        put_back(tail, rest, std::move(tail->second.node));
    }
    if (middle != range) {
        put_back(range, padding, std::move(node));
    } else {
        middle->second.node = std::move(node);
    }
    middle->second.size = size;
    middle->second.serial = ++last_serial_;
    used_ += size;
    peak_used_ = std::max(peak_used_, used_);
    ++slots_;
    slot.offset = middle->first;
    slot.serial = last_serial_;
    return true;
}

ReserveStatus Pool::reserve(std::uint64_t nbytes, std::uint64_t alignment, std::optional<double> timeout, Slot& slot,
                            const Interrupted& interrupted) {
    if (!is_power_of_two(alignment)) {
        throw std::invalid_argument("an alignment must be a power of two");
    }
    alignment = std::max(alignment, alignment_);
    if (nbytes > capacity_) {
        return ReserveStatus::kTooLarge;
    }
    const std::uint64_t size = std::max(alignment_, round_up(nbytes, alignment_));
    if (size > capacity_) {
        return ReserveStatus::kTooLarge;
    }
    using Clock = std::chrono::steady_clock;
    const bool waits = !timeout || *timeout > 0;
    // A year is as good as for ever, and does not overflow the clock.
    const auto limit = std::chrono::duration<double>(std::min(timeout.value_or(0), 365.0 * 86400));
    const auto deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(limit);

    std::unique_lock<std::mutex> lock(mutex_);
    slot.nbytes = nbytes;
    if (closed_) {
        return ReserveStatus::kClosed;
    }
    if ((waiters_.empty() || !waits) && take(size, alignment, slot)) {
        return ReserveStatus::kOk;
    }
    if (!waits) {
        return ReserveStatus::kNoRoom;
    }
    Waiter waiter{size, alignment, &slot, false, {}};
    waiters_.push_back(&waiter);
    // However this ends without a slot, those behind may fit where this one did not.
    auto give_up = [&](ReserveStatus status) {
        waiters_.erase(std::find(waiters_.begin(), waiters_.end(), &waiter));
        serve_waiters();
        return status;
    };
    while (true) {
        auto next = Clock::now() + kInterruptPoll;
        if (timeout) {
            next = std::min(next, deadline);
        }
        waiter.wake.wait_until(lock, next, [&] { return waiter.served || closed_; });
        if (waiter.served) {
            return ReserveStatus::kOk;
        }
        if (closed_) {
            return give_up(ReserveStatus::kClosed);
        }
        if (timeout && Clock::now() >= deadline) {
            return give_up(ReserveStatus::kNoRoom);
        }
        if (interrupted) {
            lock.unlock();
            const bool stop = interrupted();
            lock.lock();
            if (stop && waiter.served) {
                lock.unlock();
                free(slot);
                return ReserveStatus::kInterrupted;
            }
            if (stop) {
                return give_up(ReserveStatus::kInterrupted);
            }
        }
        serve_waiters();  // in case it could not be done when the room came up
    }
}

void Pool::serve_waiters() {
    while (!closed_ && !waiters_.empty()) {
        Waiter& first = *waiters_.front();
        try {
            if (!take(first.size, first.alignment, *first.slot)) {
                return;
            }
        } catch (const std::bad_alloc&) {
            return;  // not the fault of whoever frees; the waiter tries again soon
        }
        first.served = true;
        waiters_.pop_front();
        first.wake.notify_one();
    }
}

FreeStatus Pool::free(const Slot& slot) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (slot.serial == 0 || slot.serial > last_serial_) {
        return FreeStatus::kForeign;
    }
    auto range = ranges_.find(slot.offset);
    if (range == ranges_.end() || range->second.serial != slot.serial) {
        return FreeStatus::kAlreadyFree;
    }
    BySize::node_type node = std::move(range->second.node);
    range->second.serial = 0;
    used_ -= range->second.size;
    --slots_;
    const auto next = std::next(range);
    if (next != ranges_.end() && next->second.serial == 0) {
        by_size_.erase({next->second.size, next->first});
        range->second.size += next->second.size;
        ranges_.erase(next);
    }
    if (range != ranges_.begin()) {
        const auto before = std::prev(range);
        if (before->second.serial == 0) {
            by_size_.erase({before->second.size, before->first});
            before->second.size += range->second.size;
            ranges_.erase(range);
            range = before;
        }
    }
    node.value() = {range->second.size, range->first};
    by_size_.insert(std::move(node));
    serve_waiters();
    return FreeStatus::kOk;
}

PoolStatistics Pool::statistics() const {
    std::lock_guard<std::mutex> lock(mutex_);
    PoolStatistics result;
    result.capacity = capacity_;
    result.used = used_;
    result.peak_used = peak_used_;
    result.slots = slots_;
    result.free_ranges = by_size_.size();
    result.largest_free = by_size_.empty() ? 0 : by_size_.rbegin()->first;
    result.waiting = waiters_.size();
    result.reserved = last_serial_;
    return result;
}

void Pool::close() {
    std::lock_guard<std::mutex> lock(mutex_);
    closed_ = true;
    for (Waiter* waiter : waiters_) {
        waiter->wake.notify_one();
    }
}

}  // namespace nccl_stream
