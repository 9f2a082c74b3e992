#include "host/pool.hpp"

#include <atomic>
#include <cstdlib>
#include <map>
#include <random>
#include <stdexcept>
#include <thread>
#include <vector>

#include "check.hpp"

using namespace nccl_stream;

namespace {

constexpr double kPatience = 60.0;

void wait_for(const Pool& pool, std::uint64_t waiting) {
    while (pool.statistics().waiting != waiting) {
        std::this_thread::yield();
    }
}

bool is_whole(const Pool& pool) {
    const PoolStatistics now = pool.statistics();
    return now.used == 0 && now.slots == 0 && now.free_ranges == 1 && now.largest_free == now.capacity;
}

}  // namespace

TEST(random_operations_keep_ranges_apart_and_statistics_exact) {
    std::mt19937 random(1);
    for (int round = 0; round < 30; ++round) {
        const std::uint64_t unit = std::uint64_t{1} << (random() % 9);
        const std::uint64_t capacity = unit * (1 + random() % 300);
        Pool pool(capacity, unit);
        std::map<std::uint64_t, Slot> out;
        for (int step = 0; step < 600; ++step) {
            if (out.empty() || random() % 2) {
                Slot slot;
                const std::uint64_t alignment = std::uint64_t{1} << (random() % 12);
                const std::uint64_t nbytes = random() % (unit * 20);
                const ReserveStatus status = pool.reserve(nbytes, alignment, 0.0, slot);
                if (status != ReserveStatus::kOk) {
                    CHECK(status == ReserveStatus::kNoRoom || nbytes > capacity - unit);
                    continue;
                }
                const auto size = [&](const Slot& s) { return std::max(unit, (s.nbytes + unit - 1) / unit * unit); };
                CHECK(slot.offset % std::max(alignment, unit) == 0 && slot.nbytes == nbytes);
                CHECK(slot.offset + size(slot) <= capacity);
                const auto after = out.lower_bound(slot.offset);
                CHECK(after == out.end() || slot.offset + size(slot) <= after->first);
                CHECK(after == out.begin() || std::prev(after)->first + size(std::prev(after)->second) <= slot.offset);
                out[slot.offset] = slot;
            } else {
                auto victim = std::next(out.begin(), static_cast<long>(random() % out.size()));
                CHECK(pool.free(victim->second) == FreeStatus::kOk);
                CHECK(pool.free(victim->second) == FreeStatus::kAlreadyFree);
                out.erase(victim);
            }
            CHECK(pool.statistics().slots == out.size());
        }
        for (const auto& entry : out) {
            CHECK(pool.free(entry.second) == FreeStatus::kOk);
        }
        CHECK(is_whole(pool));
    }
}

TEST(best_fit_takes_the_smallest_then_the_lowest_range) {
    Pool pool(100, 1);
    Slot slots[10];
    for (Slot& slot : slots) {
        CHECK(pool.reserve(10, 1, 0.0, slot) == ReserveStatus::kOk);
    }
    pool.free(slots[1]);
    pool.free(slots[2]);  // 20 free at 10
    pool.free(slots[4]);  // 10 free at 40
    pool.free(slots[8]);  // 10 free at 80
    Slot slot;
    CHECK(pool.reserve(9, 1, 0.0, slot) == ReserveStatus::kOk && slot.offset == 40);
    CHECK(pool.reserve(10, 1, 0.0, slot) == ReserveStatus::kOk && slot.offset == 80);
    CHECK(pool.reserve(11, 1, 0.0, slot) == ReserveStatus::kOk && slot.offset == 10);
    CHECK(pool.reserve(8, 16, 0.0, slot) == ReserveStatus::kNoRoom);
    CHECK(pool.statistics().largest_free == 9);
}

TEST(an_alignment_finds_the_only_range_that_fits) {
    Pool pool(1024, 16);
    Slot first, second, third;
    CHECK(pool.reserve(16, 16, 0.0, first) == ReserveStatus::kOk);
    CHECK(pool.reserve(512, 512, 0.0, second) == ReserveStatus::kOk && second.offset == 512);
    CHECK(pool.reserve(257, 256, 0.0, third) == ReserveStatus::kNoRoom);
    CHECK(pool.reserve(256, 256, 0.0, third) == ReserveStatus::kOk && third.offset == 256);
    pool.free(first);
    pool.free(third);
    pool.free(second);
    CHECK(is_whole(pool));
}

TEST(foreign_and_stale_slots_are_told_apart) {
    Pool pool(64, 16);
    Slot slot, next;
    CHECK(pool.reserve(0, 1, 0.0, slot) == ReserveStatus::kOk && pool.statistics().used == 16);
    CHECK(pool.free(Slot{0, 0, 0}) == FreeStatus::kForeign);
    CHECK(pool.free(Slot{slot.offset, 0, slot.serial + 1}) == FreeStatus::kForeign);
    CHECK(pool.free(Slot{16, 0, slot.serial}) == FreeStatus::kAlreadyFree);
    CHECK(pool.free(slot) == FreeStatus::kOk);
    CHECK(pool.reserve(1, 1, 0.0, next) == ReserveStatus::kOk && next.offset == slot.offset);
    CHECK(pool.free(slot) == FreeStatus::kAlreadyFree);
    CHECK(pool.statistics().slots == 1);
}

TEST(impossible_arguments_are_refused) {
    CHECK_THROWS(std::invalid_argument, Pool(0, 16));
    CHECK_THROWS(std::invalid_argument, Pool(24, 16));
    CHECK_THROWS(std::invalid_argument, Pool(16, 0));
    CHECK_THROWS(std::invalid_argument, Pool(16, 12));
    Pool pool(64, 16);
    Slot slot;
    CHECK_THROWS(std::invalid_argument, pool.reserve(1, 3, 0.0, slot));
    CHECK(pool.reserve(65, 1, std::nullopt, slot) == ReserveStatus::kTooLarge);
    CHECK(pool.reserve(~std::uint64_t{0}, 1, std::nullopt, slot) == ReserveStatus::kTooLarge);
    CHECK(is_whole(pool));
}

TEST(waiters_are_served_in_order) {
    Pool pool(100, 1);
    Slot held[2];
    CHECK(pool.reserve(50, 1, 0.0, held[0]) == ReserveStatus::kOk);
    CHECK(pool.reserve(50, 1, 0.0, held[1]) == ReserveStatus::kOk);
    std::atomic<int> turn{0};
    int large_turn = -1, small_turn = -1;
    std::thread large([&] {
        Slot slot;
        CHECK(pool.reserve(100, 1, std::nullopt, slot) == ReserveStatus::kOk);
        large_turn = turn++;
        CHECK(pool.free(slot) == FreeStatus::kOk);
    });
    wait_for(pool, 1);
    std::thread small([&] {
        Slot slot;
        CHECK(pool.reserve(1, 1, kPatience, slot) == ReserveStatus::kOk);
        small_turn = turn++;
    });
    wait_for(pool, 2);
    pool.free(held[0]);
    CHECK(pool.statistics().waiting == 2);
    pool.free(held[1]);
    CHECK(pool.statistics().waiting <= 1);  // whoever frees serves
    large.join();
    small.join();
    CHECK(large_turn == 0 && small_turn == 1);
}

TEST(a_wait_ends_by_deadline_interruption_and_close) {
    Pool pool(16, 16);
    Slot held, slot;
    CHECK(pool.reserve(1, 1, 0.0, held) == ReserveStatus::kOk);
    CHECK(pool.reserve(1, 1, 0.01, slot) == ReserveStatus::kNoRoom);
    int asked = 0;
    CHECK(pool.reserve(1, 1, std::nullopt, slot, [&] { return ++asked == 2; }) == ReserveStatus::kInterrupted);
    CHECK(pool.statistics().waiting == 0);
    // Served while it is being interrupted: the slot must not be lost.
    CHECK(pool.reserve(1, 1, std::nullopt, slot, [&] { return pool.free(held) == FreeStatus::kOk; }) ==
          ReserveStatus::kInterrupted);
    CHECK(is_whole(pool));
    CHECK(pool.reserve(1, 1, 0.0, held) == ReserveStatus::kOk);
    std::thread waiting([&] {
        Slot mine;
        CHECK(pool.reserve(1, 1, std::nullopt, mine) == ReserveStatus::kClosed);
    });
    wait_for(pool, 1);
    pool.close();
    pool.close();
    waiting.join();
    CHECK(pool.reserve(1, 1, 0.0, slot) == ReserveStatus::kClosed);
    CHECK(pool.free(held) == FreeStatus::kOk);
}

TEST(many_threads_share_a_small_pool_without_sharing_memory) {
    constexpr std::uint64_t kCapacity = 1 << 14;
    Pool pool(kCapacity, 64);
    std::vector<unsigned char> memory(kCapacity);  // a range that two threads hold would be a data race here
    std::vector<std::thread> threads;
    const char* wanted = std::getenv("NCCL_STREAM_TEST_THREADS");  // valgrind runs one at a time, and slowly
    const unsigned num_threads = wanted == nullptr ? 2000 : static_cast<unsigned>(std::atoi(wanted));
    constexpr int kRounds = 10;
    for (unsigned seed = 0; seed < num_threads; ++seed) {
        threads.emplace_back([&, seed] {
            std::mt19937 random(seed);
            const auto mark = static_cast<unsigned char>(seed);
            for (int round = 0; round < kRounds; ++round) {
                Slot slot;
                const std::uint64_t nbytes = random() % (kCapacity / 4) + 1;
                CHECK(pool.reserve(nbytes, random() % 2 ? 64 : 1024, kPatience, slot) == ReserveStatus::kOk);
                std::fill_n(memory.begin() + static_cast<long>(slot.offset), slot.nbytes, mark);
                std::this_thread::yield();
                CHECK(memory[slot.offset] == mark && memory[slot.offset + slot.nbytes - 1] == mark);
                CHECK(pool.free(slot) == FreeStatus::kOk);
            }
        });
    }
    for (std::thread& thread : threads) {
        thread.join();
    }
    CHECK(is_whole(pool) && pool.statistics().reserved == num_threads * kRounds && pool.statistics().waiting == 0);
}

RUN_TESTS()
