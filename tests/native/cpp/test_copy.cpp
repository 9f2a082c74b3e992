#include <cstring>
#include <random>
#include <vector>

#include "check.hpp"
#include "host/checksum.hpp"
#include "host/copy.hpp"
#include "host/pack.hpp"
#include "host/parallel.hpp"

using namespace nccl_stream;

namespace {

using Bytes = std::vector<unsigned char>;

std::mt19937 random_bits(7);

Bytes random_bytes(std::size_t nbytes) {
    Bytes bytes(nbytes);
    for (unsigned char& byte : bytes) {
        byte = static_cast<unsigned char>(random_bits());
    }
    return bytes;
}

// One element after the other, in the order of the indices.
void gather(const unsigned char* data, std::size_t itemsize, const std::vector<std::int64_t>& shape,
            const std::vector<std::int64_t>& strides, std::size_t dim, Bytes& result) {
    if (dim == shape.size()) {
        result.insert(result.end(), data, data + itemsize);
        return;
    }
    for (std::int64_t i = 0; i < shape[dim]; ++i) {
        gather(data + i * strides[dim] * static_cast<std::int64_t>(itemsize), itemsize, shape, strides, dim + 1,
               result);
    }
}

}  // namespace

TEST(crc32c_hardware_equals_table_for_any_size_start_and_alignment) {
    CHECK(crc32c("123456789", 9) == 0xE3069283u && crc32c_portable("123456789", 9) == 0xE3069283u);
    std::printf("   uses %s\n", crc32c_kind());
    const Bytes data = random_bytes(200'000);
    for (int i = 0; i < 400; ++i) {
        const std::size_t nbytes = i < 300 ? random_bits() % 4000 : random_bits() % 190'000;
        const std::size_t skip = random_bits() % 16;
        const auto value = static_cast<std::uint32_t>(random_bits());
        const std::uint32_t whole = crc32c(data.data() + skip, nbytes, value);
        CHECK(whole == crc32c_portable(data.data() + skip, nbytes, value));
        const std::size_t cut = nbytes ? random_bits() % nbytes : 0;
        const std::uint32_t first = crc32c(data.data() + skip, cut, value);
        CHECK(whole == crc32c(data.data() + skip + cut, nbytes - cut, first));
        CHECK(whole == crc32c_combine(first, crc32c(data.data() + skip + cut, nbytes - cut), nbytes - cut));
    }
}

TEST(copy_bytes_is_exact_at_every_size_alignment_and_thread_count) {
    std::printf("   uses %s above %zu bytes\n", copy_kind(), streaming_threshold());
    const std::size_t large = streaming_threshold() + 12345;
    for (const std::size_t nbytes : {std::size_t{0}, std::size_t{1}, std::size_t{100}, std::size_t{1} << 20, large}) {
        for (const int threads : {1, 2, 5}) {
            const std::size_t to = random_bits() % 70, from = random_bits() % 70;
            const Bytes src = random_bytes(nbytes + from);
            Bytes dst(nbytes + to + 64, 0x55);
            copy_bytes(dst.data() + to, src.data() + from, nbytes, threads);
            CHECK(nbytes == 0 || std::memcmp(dst.data() + to, src.data() + from, nbytes) == 0);
            for (std::size_t i = 0; i < to; ++i) {
                CHECK(dst[i] == 0x55);
            }
            for (std::size_t i = nbytes + to; i < dst.size(); ++i) {
                CHECK(dst[i] == 0x55);
            }
        }
    }
}

TEST(packing_equals_a_copy_element_by_element_and_unpacking_is_its_inverse) {
    for (int round = 0; round < 600; ++round) {
        const std::size_t itemsize = std::size_t{1} << (random_bits() % 5);
        const std::size_t ndim = random_bits() % 5;
        std::vector<std::int64_t> shape(ndim), strides(ndim);
        std::vector<std::size_t> order(ndim);
        for (std::size_t i = 0; i < ndim; ++i) {
            shape[i] = random_bits() % 12 == 0 ? 0 : 1 + random_bits() % (ndim > 2 ? 7 : 70);
            order[i] = i;
        }
        std::shuffle(order.begin(), order.end(), random_bits);
        std::int64_t extent = 1;
        for (const std::size_t dim : order) {
            const std::int64_t step = 1 + random_bits() % 2;
            strides[dim] = extent * step;
            extent = strides[dim] * std::max<std::int64_t>(shape[dim], 1);
        }
        const Bytes original = random_bytes(static_cast<std::size_t>(extent) * itemsize + 1);
        Bytes tensor = original;
        Bytes expected;
        gather(original.data() + 1, itemsize, shape, strides, 0, expected);
        const std::size_t offset = random_bits() % 9;
        Bytes slot(expected.size() + offset + 5, 0x55);
        const std::vector<Placement> placements = {
            {CopyPlan(tensor.data() + 1, itemsize, ndim, shape.data(), strides.data()), offset}};
        std::size_t index = 0;
        CHECK(placements[0].plan.nbytes() == expected.size());
        CHECK(places_are_sound(placements, expected.size() + offset, index));
        CHECK(expected.empty() || !places_are_sound(placements, expected.size() + offset - 1, index));
        pack(placements, slot.data(), 1 + random_bits() % 3);
        CHECK(expected.empty() || std::memcmp(slot.data() + offset, expected.data(), expected.size()) == 0);
        for (std::size_t i = expected.size() + offset; i < slot.size(); ++i) {
            CHECK(slot[i] == 0x55);
        }
        std::fill(tensor.begin() + 1, tensor.end(), static_cast<unsigned char>(0));
        unpack(placements, slot.data(), 1 + random_bits() % 3);
        Bytes again;
        gather(tensor.data() + 1, itemsize, shape, strides, 0, again);
        CHECK(again == expected);
    }
}

TEST(packing_large_tensors_with_threads_equals_one_thread) {
    const std::int64_t shape[] = {1000, 700}, strides[] = {1, 1003};
    const Bytes tensor = random_bytes(1003 * 700 * 4);
    const std::vector<Placement> placements = {
        {CopyPlan(const_cast<unsigned char*>(tensor.data()), 4, 2, shape, strides), 3},
        {CopyPlan(const_cast<unsigned char*>(tensor.data()), 1, 0, nullptr, nullptr), 0}};
    Bytes one(2'800'003), four(2'800'003);
    pack(placements, one.data(), 1);
    pack(placements, four.data(), 4);
    CHECK(one == four);
}

TEST(places_that_overlap_are_found) {
    unsigned char memory[8];
    const std::int64_t shape[] = {4}, strides[] = {1}, none[] = {0};
    const CopyPlan four(memory, 1, 1, shape, strides), nothing(memory, 1, 1, none, strides);
    std::size_t index = 0;
    CHECK(places_are_sound({{four, 4}, {four, 0}, {nothing, 2}, {nothing, 8}}, 8, index));
    CHECK(!places_are_sound({{four, 3}, {four, 0}}, 8, index) && index == 0);
    CHECK(!places_are_sound({{four, 5}}, 8, index));
    CHECK(!places_are_sound({{four, ~std::uint64_t{0}}}, 8, index));
    CHECK(!places_are_sound({{nothing, 9}}, 8, index));
}

TEST(parallel_for_covers_each_part_once) {
    for (const std::size_t total :
         {std::size_t{0}, std::size_t{1}, std::size_t{63}, std::size_t{64}, std::size_t{1000}}) {
        for (const int threads : {-1, 1, 2, 3, 16, 2000}) {
            std::vector<int> seen(total, 0);
            parallel_for(total, 64, threads, [&](std::size_t begin, std::size_t end) {
                CHECK(begin % 64 == 0);
                for (std::size_t i = begin; i < end; ++i) {
                    ++seen[i];
                }
            });
            for (const int count : seen) {
                CHECK(count == 1);
            }
        }
    }
}

RUN_TESTS()
