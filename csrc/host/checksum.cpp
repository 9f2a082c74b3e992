#include "host/checksum.hpp"

namespace nccl_stream {

std::uint32_t crc32c(const void* data, std::size_t nbytes, std::uint32_t value) {
    const auto* bytes = static_cast<const unsigned char*>(data);
    std::uint32_t state = ~value;
    for (std::size_t i = 0; i < nbytes; ++i) {
        state ^= bytes[i];
        for (int bit = 0; bit < 8; ++bit) {
            state = (state >> 1) ^ (state & 1 ? 0x82F63B78u : 0u);
        }
    }
    return ~state;
}

}  // namespace nccl_stream
