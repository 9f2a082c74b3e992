// CRC-32C (Castagnoli; RFC 3720, appendix B.4), the checksum that processors have an instruction for.
#pragma once

#include <cstddef>
#include <cstdint>

namespace nccl_stream {

// The checksum of `nbytes` at `data`, continued from `value`, the checksum of what came before (0 at the start).
std::uint32_t crc32c(const void* data, std::size_t nbytes, std::uint32_t value = 0);

// The checksum of two pieces one after the other, from those of each and the size of the second.
std::uint32_t crc32c_combine(std::uint32_t first, std::uint32_t second, std::uint64_t second_nbytes);

// The same as crc32c() without any special instruction. For tests and comparisons.
std::uint32_t crc32c_portable(const void* data, std::size_t nbytes, std::uint32_t value = 0);

// What crc32c() uses on this machine: "sse4.2", "armv8" or "table".
const char* crc32c_kind();

}  // namespace nccl_stream
