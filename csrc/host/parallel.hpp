#pragma once

#include <cstddef>
#include <functional>

namespace nccl_stream {

// Calls body(begin, end) for consecutive parts of [0, total), on up to `threads` threads of which the caller's is one,
// and returns when all are done. Parts begin at multiples of `unit`. `body` must not throw.
//
// The threads live for this call only: at the sizes where several of them pay, starting them costs next to nothing, and
// nothing is left over that a fork or the end of the process could trip over. Where the system gives no more threads,
// the caller's does the work.
void parallel_for(std::size_t total, std::size_t unit, int threads,
                  const std::function<void(std::size_t, std::size_t)>& body);

}  // namespace nccl_stream
