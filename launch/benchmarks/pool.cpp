// Times an allocation and a free in the native pool; built and run by native.py. Prints nanoseconds, one per round.
#include <time.h>

#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "host/pool.hpp"

namespace {

// What this thread has used of the processor, so that what else runs on the machine counts less.
double processor_seconds() {
    timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

}  // namespace

// pool LIVE ROUNDS: with LIVE slots of mixed sizes out, replaces one at random, again and again.
int main(int argc, char** argv) {
    const std::size_t live = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 1000;
    const int rounds = argc > 2 ? std::atoi(argv[2]) : 7;
    constexpr int kPairs = 100'000;
    nccl_stream::Pool pool(std::uint64_t{1} << 44, 256);
    std::mt19937 random(1);
    std::vector<std::uint32_t> sizes(kPairs), victims(kPairs);
    for (int i = 0; i < kPairs; ++i) {
        sizes[i] = random() % (8u << 20);
        victims[i] = static_cast<std::uint32_t>(random() % live);
    }
    std::vector<nccl_stream::Slot> slots(live);
    for (std::size_t i = 0; i < live; ++i) {
        pool.reserve(sizes[i % kPairs], 256, 0.0, slots[i]);
    }
    for (int round = 0; round < rounds; ++round) {
        const double start = processor_seconds();
        for (int i = 0; i < kPairs; ++i) {
            nccl_stream::Slot& slot = slots[victims[i]];
            if (pool.free(slot) != nccl_stream::FreeStatus::kOk ||
                pool.reserve(sizes[i], 256, 0.0, slot) != nccl_stream::ReserveStatus::kOk) {
                return 1;
            }
        }
        const double took = processor_seconds() - start;
        std::printf("%.0f\n", took * 1e9 / kPairs);
    }
    return 0;
}
