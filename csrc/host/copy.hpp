#pragma once

#include <cstddef>

namespace nccl_stream {

// Copies `nbytes` from `src` to `dst`; the ranges must not overlap. Large copies write past the cache: they would only
// push everything else out of it, and a line that is written past it need not be fetched first.
//
// `threads`: how many may share the work, the caller's included. A part below a few MiB gets no thread of its own.
void copy_bytes(void* dst, const void* src, std::size_t nbytes, int threads = 1);

// The size above which copies go past the cache, in bytes: a quarter of the cache, so that source and destination
// fill half of it at most.
std::size_t streaming_threshold();

// Which copy loop runs on this machine: "avx512", "avx2" or "memcpy".
const char* copy_kind();

}  // namespace nccl_stream
