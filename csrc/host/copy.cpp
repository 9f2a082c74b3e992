#include "host/copy.hpp"

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "host/parallel.hpp"

#if defined(__x86_64__) && defined(__GNUC__)
#define NCCL_STREAM_X86 1
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace nccl_stream {

namespace {

constexpr std::size_t kBytesPerThread = std::size_t{2}
                                        << 20;  // a thread takes about as long to start as 100 KiB to copy

using CopyLoop = void (*)(char* dst, const char* src, std::size_t nbytes);

void copy_plain(char* dst, const char* src, std::size_t nbytes) {
    std::memcpy(dst, src, nbytes);
}

#ifdef NCCL_STREAM_X86

constexpr std::size_t kLine = 64;
constexpr std::size_t kBlock = 2 * kLine;
constexpr std::size_t kAhead = 512;  // how far before its use a line is asked for, in bytes; the best of those tried

// Both loops want `dst` aligned to a line and `nbytes` a multiple of kBlock.

__attribute__((target("avx2"))) void stream_avx2(char* dst, const char* src, std::size_t nbytes) {
    for (std::size_t i = 0; i < nbytes; i += kBlock) {
        const auto* from = reinterpret_cast<const __m256i*>(src + i);
        auto* to = reinterpret_cast<__m256i*>(dst + i);
        _mm_prefetch(src + i + kAhead, _MM_HINT_T0);
        _mm_prefetch(src + i + kAhead + kLine, _MM_HINT_T0);
        const __m256i a = _mm256_loadu_si256(from);
        const __m256i b = _mm256_loadu_si256(from + 1);
        const __m256i c = _mm256_loadu_si256(from + 2);
        const __m256i d = _mm256_loadu_si256(from + 3);
        _mm256_stream_si256(to, a);
        _mm256_stream_si256(to + 1, b);
        _mm256_stream_si256(to + 2, c);
        _mm256_stream_si256(to + 3, d);
    }
    _mm_sfence();
}

__attribute__((target("avx512f"))) void stream_avx512(char* dst, const char* src, std::size_t nbytes) {
    for (std::size_t i = 0; i < nbytes; i += kBlock) {
        _mm_prefetch(src + i + kAhead, _MM_HINT_T0);
        _mm_prefetch(src + i + kAhead + kLine, _MM_HINT_T0);
        const __m512i a = _mm512_loadu_si512(src + i);
        const __m512i b = _mm512_loadu_si512(src + i + kLine);
        _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + i), a);
        _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + i + kLine), b);
    }
    _mm_sfence();
}

// The size of the last cache that this core uses, in bytes; 0 where the processor does not say. sysconf() counts the
// caches of other cores in on some machines.
std::size_t last_cache_bytes() {
    for (const unsigned leaf : {0x8000001Du, 4u}) {  // AMD's and Intel's, of one form
        for (unsigned index = 0; index < 16; ++index) {
            unsigned a = 0, b = 0, c = 0, d = 0;
            if (!__get_cpuid_count(leaf, index, &a, &b, &c, &d) || (a & 0x1F) == 0) {
                break;
            }
            if (((a >> 5) & 7) == 3) {
                return std::size_t{(b >> 22) + 1} * (((b >> 12) & 0x3FF) + 1) * ((b & 0xFFF) + 1) *
                       (std::size_t{c} + 1);
            }
        }
    }
    return 0;
}

template <CopyLoop kStream>
void copy_streaming(char* dst, const char* src, std::size_t nbytes) {
    const std::size_t head = std::min(nbytes, (kLine - reinterpret_cast<std::uintptr_t>(dst) % kLine) % kLine);
    const std::size_t body = (nbytes - head) / kBlock * kBlock;
    std::memcpy(dst, src, head);
    kStream(dst + head, src + head, body);
    std::memcpy(dst + head + body, src + head + body, nbytes - head - body);
}

#endif

struct Choice {
    CopyLoop loop;
    const char* kind;
};

const Choice& choice() {
    static const Choice value = [] {
#ifdef NCCL_STREAM_X86
        if (__builtin_cpu_supports("avx512f")) {
            return Choice{&copy_streaming<&stream_avx512>, "avx512"};
        }
        if (__builtin_cpu_supports("avx2")) {
            return Choice{&copy_streaming<&stream_avx2>, "avx2"};
        }
#endif
        return Choice{&copy_plain, "memcpy"};
    }();
    return value;
}

}  // namespace

std::size_t streaming_threshold() {
    static const std::size_t value = [] {
        std::size_t cache = 0;
#ifdef NCCL_STREAM_X86
        cache = last_cache_bytes();
#endif
        return std::max<std::size_t>((cache != 0 ? cache : std::size_t{32} << 20) / 4, std::size_t{1} << 20);
    }();
    return value;
}

const char* copy_kind() {
    return choice().kind;
}

void copy_bytes(void* dst, const void* src, std::size_t nbytes, int threads) {
    auto* to = static_cast<char*>(dst);
    const auto* from = static_cast<const char*>(src);
    const CopyLoop loop = nbytes > streaming_threshold() ? choice().loop : &copy_plain;
    const int useful = static_cast<int>(std::min<std::size_t>(nbytes / kBytesPerThread, 1024));
    if (threads <= 1 || useful <= 1) {
        if (nbytes != 0) {
            loop(to, from, nbytes);
        }
        return;
    }
    parallel_for(nbytes, 4096, std::min(threads, useful),
                 [=](std::size_t begin, std::size_t end) { loop(to + begin, from + begin, end - begin); });
}

}  // namespace nccl_stream
