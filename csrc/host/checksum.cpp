#include "host/checksum.hpp"

#include <array>
#include <cstring>

#if defined(__x86_64__) && defined(__GNUC__)
#define NCCL_STREAM_X86 1
#include <nmmintrin.h>
#elif defined(__aarch64__) && defined(__linux__)
#define NCCL_STREAM_ARM 1
#include <arm_acle.h>
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace nccl_stream {

namespace {

// Polynomials over GF(2) modulo the Castagnoli polynomial, with the bits in the order of the checksum: bit 31 is x^0.
constexpr std::uint32_t kPolynomial = 0x82F63B78u;  // 0x1EDC6F41, reflected
constexpr std::uint32_t kOne = 0x80000000u;

constexpr std::uint32_t times_x(std::uint32_t a) {
    return (a >> 1) ^ (a & 1 ? kPolynomial : 0u);
}

constexpr std::uint32_t multiply(std::uint32_t a, std::uint32_t b) {
    std::uint32_t product = 0;
    for (std::uint32_t bit = kOne; bit != 0; bit >>= 1) {
        product ^= a & bit ? b : 0u;
        b = times_x(b);
    }
    return product;
}

// x^(8 * nbytes): what a checksum's state is multiplied by when that many zero bytes follow.
constexpr std::uint32_t shift_by(std::uint64_t nbytes) {
    std::uint32_t result = kOne, square = kOne >> 8;
    for (; nbytes != 0; nbytes >>= 1) {
        if (nbytes & 1) {
            result = multiply(result, square);
        }
        square = multiply(square, square);
    }
    return result;
}

using ByteTables = std::array<std::array<std::uint32_t, 256>, 8>;

// Entry [k][b] is byte b followed by k zero bytes.
constexpr ByteTables make_byte_tables() {
    ByteTables tables{};
    for (std::uint32_t byte = 0; byte < 256; ++byte) {
        std::uint32_t state = byte;
        for (int bit = 0; bit < 8; ++bit) {
            state = times_x(state);
        }
        tables[0][byte] = state;
    }
    for (std::size_t k = 1; k < 8; ++k) {
        for (std::uint32_t byte = 0; byte < 256; ++byte) {
            const std::uint32_t before = tables[k - 1][byte];
            tables[k][byte] = (before >> 8) ^ tables[0][before & 0xFF];
        }
    }
    return tables;
}

constexpr ByteTables kByteTables = make_byte_tables();

// Multiplies by one fixed polynomial, a byte at a time.
class Multiplier {
  public:
    constexpr explicit Multiplier(std::uint32_t factor) : tables_{} {
        for (std::size_t k = 0; k < 4; ++k) {
            for (std::uint32_t bit = 0; bit < 8; ++bit) {
                tables_[k][std::size_t{1} << bit] = multiply(factor, 1u << (8 * k + bit));
            }
            for (std::size_t byte = 1; byte < 256; ++byte) {
                tables_[k][byte] = tables_[k][byte & (byte - 1)] ^ tables_[k][byte & (~byte + 1)];
            }
        }
    }
    std::uint32_t operator()(std::uint32_t value) const {
        return tables_[0][value & 0xFF] ^ tables_[1][(value >> 8) & 0xFF] ^ tables_[2][(value >> 16) & 0xFF] ^
               tables_[3][value >> 24];
    }

  private:
    std::array<std::array<std::uint32_t, 256>, 4> tables_;
};

std::uint64_t load64(const unsigned char* bytes) {
    std::uint64_t word;
    std::memcpy(&word, bytes, sizeof(word));
    return word;
}

std::uint32_t table_state(std::uint32_t state, const unsigned char* bytes, std::size_t nbytes) {
    for (; nbytes >= 8; bytes += 8, nbytes -= 8) {
        std::uint32_t next = 0;
        for (std::size_t k = 0; k < 8; ++k) {
            const std::uint32_t carried = k < 4 ? (state >> (8 * k)) & 0xFF : 0u;
            next ^= kByteTables[7 - k][bytes[k] ^ carried];
        }
        state = next;
    }
    for (; nbytes != 0; ++bytes, --nbytes) {
        state = (state >> 8) ^ kByteTables[0][(state ^ *bytes) & 0xFF];
    }
    return state;
}

#if defined(NCCL_STREAM_X86) || defined(NCCL_STREAM_ARM)

// The instruction takes 8 bytes and has its result after three cycles, but one can start every cycle: three stretches
// of the data at a time keep it busy. Joining them costs a few table look-ups, so the first stretches are long; the
// shorter ones serve what is left.
constexpr std::size_t kLong = 8192;
constexpr std::size_t kMiddle = 1024;
constexpr std::size_t kShort = 128;
constexpr Multiplier kAfterLong{shift_by(kLong)};
constexpr Multiplier kAfterMiddle{shift_by(kMiddle)};
constexpr Multiplier kAfterShort{shift_by(kShort)};
constexpr std::size_t kLine = 64;
constexpr std::size_t kAhead = 512;  // how far before its use a line is asked for, in bytes; the best of those tried

#ifdef NCCL_STREAM_X86
#define NCCL_STREAM_CRC_TARGET __attribute__((target("sse4.2")))
#define NCCL_STREAM_CRC8(state, byte) _mm_crc32_u8(static_cast<std::uint32_t>(state), byte)
#define NCCL_STREAM_CRC64(state, word) _mm_crc32_u64(state, word)
using State = std::uint64_t;
#else
#define NCCL_STREAM_CRC_TARGET __attribute__((target("+crc")))
#define NCCL_STREAM_CRC8(state, byte) __crc32cb(state, byte)
#define NCCL_STREAM_CRC64(state, word) __crc32cd(state, word)
using State = std::uint32_t;
#endif

template <std::size_t kStretch>
NCCL_STREAM_CRC_TARGET State three_stretches(State state, const unsigned char*& bytes, std::size_t& nbytes,
                                             const Multiplier& after) {
    for (; nbytes >= 3 * kStretch; bytes += 3 * kStretch, nbytes -= 3 * kStretch) {
        State second = 0, third = 0;
        for (std::size_t line = 0; line < kStretch; line += kLine) {
            __builtin_prefetch(bytes + line + kAhead);
            __builtin_prefetch(bytes + kStretch + line + kAhead);
            __builtin_prefetch(bytes + 2 * kStretch + line + kAhead);
            for (std::size_t i = line; i < line + kLine; i += 8) {
                state = NCCL_STREAM_CRC64(state, load64(bytes + i));
                second = NCCL_STREAM_CRC64(second, load64(bytes + kStretch + i));
                third = NCCL_STREAM_CRC64(third, load64(bytes + 2 * kStretch + i));
            }
        }
        state = after(static_cast<std::uint32_t>(state)) ^ second;
        state = after(static_cast<std::uint32_t>(state)) ^ third;
    }
    return state;
}

NCCL_STREAM_CRC_TARGET std::uint32_t hardware_state(std::uint32_t start, const unsigned char* bytes,
                                                    std::size_t nbytes) {
    State state = start;
    for (; nbytes != 0 && reinterpret_cast<std::uintptr_t>(bytes) % 8 != 0; ++bytes, --nbytes) {
        state = NCCL_STREAM_CRC8(state, *bytes);
    }
    state = three_stretches<kLong>(state, bytes, nbytes, kAfterLong);
    state = three_stretches<kMiddle>(state, bytes, nbytes, kAfterMiddle);
    state = three_stretches<kShort>(state, bytes, nbytes, kAfterShort);
    for (; nbytes >= 8; bytes += 8, nbytes -= 8) {
        state = NCCL_STREAM_CRC64(state, load64(bytes));
    }
    for (; nbytes != 0; ++bytes, --nbytes) {
        state = NCCL_STREAM_CRC8(state, *bytes);
    }
    return static_cast<std::uint32_t>(state);
}

bool has_instruction() {
#ifdef NCCL_STREAM_X86
    return __builtin_cpu_supports("sse4.2");
#else
    return (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0;
#endif
}

#endif

struct Choice {
    std::uint32_t (*advance)(std::uint32_t, const unsigned char*, std::size_t);
    const char* kind;
};

const Choice& choice() {
    static const Choice value = [] {
#if defined(NCCL_STREAM_X86)
        if (has_instruction()) {
            return Choice{&hardware_state, "sse4.2"};
        }
#elif defined(NCCL_STREAM_ARM)
        if (has_instruction()) {
            return Choice{&hardware_state, "armv8"};
        }
#endif
        return Choice{&table_state, "table"};
    }();
    return value;
}

}  // namespace

std::uint32_t crc32c(const void* data, std::size_t nbytes, std::uint32_t value) {
    return ~choice().advance(~value, static_cast<const unsigned char*>(data), nbytes);
}

std::uint32_t crc32c_combine(std::uint32_t first, std::uint32_t second, std::uint64_t second_nbytes) {
    return multiply(first, shift_by(second_nbytes)) ^ second;
}

std::uint32_t crc32c_portable(const void* data, std::size_t nbytes, std::uint32_t value) {
    return ~table_state(~value, static_cast<const unsigned char*>(data), nbytes);
}

const char* crc32c_kind() {
    return choice().kind;
}

}  // namespace nccl_stream
