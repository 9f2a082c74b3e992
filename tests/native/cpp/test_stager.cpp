#include "cuda/stager.hpp"

#include <atomic>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "check.hpp"
#include "cuda/crc_math.hpp"
#include "cuda/fake_runtime.hpp"
#include "cuda/strided.hpp"
#include "host/checksum.hpp"

using namespace nccl_stream;

namespace {

using Bytes = std::vector<unsigned char>;

bool all_are(const Bytes& bytes, int value) {
    for (unsigned char byte : bytes) {
        if (byte != value) return false;
    }
    return true;
}

void finish(FakeRuntime& runtime) {
    while (runtime.step()) {
    }
    CHECK(runtime.pending() == 0);
}

}  // namespace

TEST(source_is_free_at_once_on_the_stream_that_writes_it) {
    for (std::uint32_t seed = 0; seed < 200; ++seed) {
        FakeRuntime runtime(seed, 1, 1);
        StreamHandle producer = nullptr;
        CHECK(runtime.stream_create(&producer) == kSuccess);
        Stager stager(runtime, 0, 16, 3);
        Bytes source(100);
        std::vector<std::unique_ptr<StagedCopy>> copies;
        std::vector<Bytes> targets(10, Bytes(100));
        for (int value = 0; value < 10; ++value) {
            runtime.fill(source.data(), source.size(), value + 1, producer);
            copies.push_back(stager.copy(targets[value].data(), source.data(), 100, {producer, producer, {}}));
        }
        runtime.fill(source.data(), source.size(), 99, producer);
        for (int value = 0; value < 10; ++value) {
            CHECK(copies[value]->wait(-1));
            CHECK(all_are(targets[value], value + 1));
        }
        finish(runtime);
    }
}

TEST(any_call_that_fails_is_named_and_nothing_goes_on) {
    const char* const calls[] = {"get_device", "event_create", "event_record", "stream_wait_event", "memcpy_async"};
    for (const char* call : calls) {
        for (int nth = 1; nth < 9; ++nth) {
            FakeRuntime runtime(static_cast<std::uint32_t>(nth), 1, 1);
            StreamHandle producer = nullptr;
            CHECK(runtime.stream_create(&producer) == kSuccess);
            Stager stager(runtime, 0, 16, 2);
            Bytes source(64, 1), target(64), other(64);
            const auto before = stager.copy(other.data(), source.data(), 64, {});
            runtime.fail(call, nth, 2);
            try {
                const auto copy = stager.copy(target.data(), source.data(), 64, {producer, producer, {before.get()}});
                CHECK(copy->wait(-1) && all_are(target, 1));
            } catch (const CudaError& error) {
                CHECK(error.code == 2 && std::strstr(error.what(), " failed: ") != nullptr);
                const Bytes at_once = target;
                finish(runtime);
                CHECK(target == at_once);
            }
            finish(runtime);
        }
    }
}

TEST(copies_outlive_their_stager_and_everything_goes_with_the_last) {
    FakeRuntime runtime(3, 1, 1);
    Bytes source(64, 1), target(64);
    std::unique_ptr<StagedCopy> copy;
    {
        Stager stager(runtime, 0, 16, 2);
        copy = stager.copy(target.data(), source.data(), 64, {});
    }
    CHECK(copy->wait(-1) && all_are(target, 1));
    copy.reset();
    CHECK(runtime.live() == 0);
}

TEST(many_threads_share_a_stager) {
    FakeRuntime runtime(5, 1, 2);
    Stager stager(runtime, 0, 64, 3);
    std::atomic<int> wrong{0};
    std::vector<std::thread> threads;
    for (int thread = 0; thread < 8; ++thread) {
        threads.emplace_back([&, thread] {
            for (int round = 0; round < 50; ++round) {
                Bytes source(200, static_cast<unsigned char>(thread + round)), target(200);
                const auto copy = stager.copy(target.data(), source.data(), 200, {});
                if (!copy->wait(-1) || target != source) ++wrong;
            }
        });
    }
    for (std::thread& thread : threads) thread.join();
    CHECK(wrong == 0);
}

TEST(wait_knows_a_deadline) {
    FakeRuntime runtime(0, 1, 0);
    Stager stager(runtime, 0, 64, 1);
    Bytes source(10), target(10);
    const auto copy = stager.copy(target.data(), source.data(), 10, {});
    CHECK(!copy->done() && !copy->wait(0.0) && !copy->wait(0.002));
    finish(runtime);
    CHECK(copy->wait(0.0) && copy->done());
}

TEST(impossible_arguments_are_refused) {
    FakeRuntime runtime(0, 1, 1);
    CHECK_THROWS(std::invalid_argument, Stager(runtime, 0, 0, 1));
    CHECK_THROWS(std::invalid_argument, Stager(runtime, 0, 1, 0));
    CHECK_THROWS(CudaError, Stager(runtime, 1, 1, 1));
    CHECK_THROWS(std::invalid_argument, plan_piece({nullptr, 0, {}, {}}, nullptr));
    CHECK_THROWS(std::invalid_argument, plan_piece({nullptr, 4, {2}, {}}, nullptr));
    CHECK_THROWS(std::invalid_argument, plan_piece({nullptr, 4, {2}, {-1}}, nullptr));
}

TEST(tensors_of_any_strides_become_flat_and_come_back) {
    std::mt19937 random(7);
    const std::size_t itemsizes[] = {1, 2, 4, 8, 16};
    for (int round = 0; round < 2000; ++round) {
        const std::size_t itemsize = itemsizes[random() % 5];
        const std::size_t num_dims = random() % 6;
        std::vector<std::int64_t> sizes(num_dims), strides(num_dims);
        std::int64_t extent = 1, count = 1;
        for (std::size_t dim = num_dims; dim-- > 0;) {
            sizes[dim] = 1 + random() % 4;
            strides[dim] = extent;
            extent *= sizes[dim] * (1 + random() % 2);
            count *= sizes[dim];
        }
        for (std::size_t dim = 1; dim < num_dims; ++dim) {
            if (random() % 2) {
                std::swap(sizes[dim], sizes[dim - 1]);
                std::swap(strides[dim], strides[dim - 1]);
            }
        }
        const std::size_t shift = itemsize < 16 ? itemsize * (random() % 3) : 8 * (random() % 2);
        Bytes memory(shift + static_cast<std::size_t>(extent) * itemsize);
        for (auto& byte : memory) byte = static_cast<unsigned char>(random());
        const std::size_t flat_shift = random() % 3;
        Bytes flat(flat_shift + static_cast<std::size_t>(count) * itemsize);
        const StridedPiece piece = plan_piece({memory.data() + shift, itemsize, sizes, strides}, &flat[flat_shift]);
        CHECK(piece.num_units * piece.unit_bytes == static_cast<std::uint64_t>(count) * itemsize);
        for (std::uint64_t index = 0; index < piece.num_units; ++index) move_one(piece, index, true);
        for (std::int64_t element = 0; element < count; ++element) {
            std::int64_t rest = element, offset = 0;
            for (std::size_t dim = num_dims; dim-- > 0;) {
                offset += rest % sizes[dim] * strides[dim];
                rest /= sizes[dim];
            }
            const unsigned char* expected = memory.data() + shift + static_cast<std::size_t>(offset) * itemsize;
            CHECK(std::memcmp(&flat[flat_shift + static_cast<std::size_t>(element) * itemsize], expected, itemsize) ==
                  0);
        }
        const Bytes before = memory;
        for (std::uint64_t index = 0; index < piece.num_units; ++index) move_one(piece, index, false);
        CHECK(memory == before);
    }
}

TEST(shares_of_segments_make_the_checksum) {
    std::mt19937 random(9);
    std::vector<std::uint32_t> table(256);
    for (std::uint32_t n = 0; n < 256; ++n) table[n] = crc_table_entry(n);
    const CrcPowers powers = crc_powers();
    for (std::size_t nbytes : {std::size_t{0}, std::size_t{1}, kCrcSegmentBytes - 1, kCrcSegmentBytes,
                               kCrcSegmentBytes + 1, 5 * kCrcSegmentBytes + 17}) {
        Bytes data(nbytes);
        for (auto& byte : data) byte = static_cast<unsigned char>(random());
        std::uint32_t raw = 0;
        for (std::size_t index = 0; index * kCrcSegmentBytes < nbytes; ++index) {
            raw ^= crc_share(data.data(), nbytes, index, table.data(), powers);
        }
        for (std::uint32_t value : {0u, 0x12345678u, 0xFFFFFFFFu}) {
            CHECK(crc_finish(raw, nbytes, value) == crc32c(data.data(), nbytes, value));
        }
    }
}

RUN_TESTS()
