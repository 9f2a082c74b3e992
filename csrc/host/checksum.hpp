// CRC-32C (Castagnoli), as used by iSCSI and many storage systems.
#pragma once

#include <cstddef>
#include <cstdint>

namespace nccl_stream {

// The checksum of `nbytes` at `data`, continued from `value`, the checksum of what came before (0 at the start).
std::uint32_t crc32c(const void* data, std::size_t nbytes, std::uint32_t value = 0);

}  // namespace nccl_stream
