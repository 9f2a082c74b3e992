// CRC-32C over pieces that are summed independently. A raw sum starts from zero and is not inverted at the end; it is
// linear, so that the sum of a whole is the exclusive or of its pieces' sums, each shifted by the bytes behind it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/strided.hpp"

namespace nccl_stream {

constexpr std::uint32_t kCrcPolynomial = 0x82F63B78;  // Castagnoli's, reflected (RFC 3720, appendix B.4)
constexpr std::size_t kCrcSegmentBytes = 4096;        // what one thread of the kernel sums
constexpr int kCrcPowers = 48;                        // enough for 2^45 bytes

// Reflected polynomials: bit 31 is the coefficient of x^0.
NCCL_STREAM_ANYWHERE inline std::uint32_t crc_multiply(std::uint32_t a, std::uint32_t b) {
    std::uint32_t product = 0;
    for (std::uint32_t bit = 0x80000000u; bit != 0; bit >>= 1) {
        if (a & bit) product ^= b;
        b = (b >> 1) ^ (b & 1 ? kCrcPolynomial : 0);
    }
    return product;
}

// x^(2^k) modulo the polynomial.
struct CrcPowers {
    std::uint32_t of[kCrcPowers];
};

inline CrcPowers crc_powers() {
    CrcPowers powers{};
    powers.of[0] = 0x40000000u;  // x
    for (int k = 1; k < kCrcPowers; ++k) powers.of[k] = crc_multiply(powers.of[k - 1], powers.of[k - 1]);
    return powers;
}

// The sum of something that has nbytes zero bytes behind it.
NCCL_STREAM_ANYWHERE inline std::uint32_t crc_shift(std::uint32_t raw, std::uint64_t nbytes, const CrcPowers& powers) {
    for (int k = 3; nbytes != 0; ++k, nbytes >>= 1) {  // 2^3 bits to the byte
        if (nbytes & 1) raw = crc_multiply(powers.of[k], raw);
    }
    return raw;
}

NCCL_STREAM_ANYWHERE inline std::uint32_t crc_table_entry(std::uint32_t value) {
    for (int bit = 0; bit < 8; ++bit) value = (value >> 1) ^ (value & 1 ? kCrcPolynomial : 0);
    return value;
}

// The raw sum of a segment; table as crc_table_entry gives it.
NCCL_STREAM_ANYWHERE inline std::uint32_t crc_segment(const unsigned char* data, std::size_t nbytes,
                                                      const std::uint32_t* table) {
    std::uint32_t raw = 0;
    for (std::size_t n = 0; n < nbytes; ++n) raw = (raw >> 8) ^ table[(raw ^ data[n]) & 0xFF];
    return raw;
}

// What segment number index contributes to the raw sum of all nbytes.
NCCL_STREAM_ANYWHERE inline std::uint32_t crc_share(const unsigned char* data, std::size_t nbytes, std::size_t index,
                                                    const std::uint32_t* table, const CrcPowers& powers) {
    const std::size_t start = index * kCrcSegmentBytes;
    const std::size_t end = start + kCrcSegmentBytes < nbytes ? start + kCrcSegmentBytes : nbytes;
    return crc_shift(crc_segment(data + start, end - start, table), nbytes - end, powers);
}

// The checksum of what had the checksum value, followed by nbytes with this raw sum.
inline std::uint32_t crc_finish(std::uint32_t raw, std::uint64_t nbytes, std::uint32_t value) {
    return crc_shift(value ^ 0xFFFFFFFFu, nbytes, crc_powers()) ^ raw ^ 0xFFFFFFFFu;
}

}  // namespace nccl_stream
