#include "host/parallel.hpp"

#include <algorithm>
#include <functional>
#include <system_error>
#include <thread>
#include <vector>

namespace nccl_stream {

void parallel_for(std::size_t total, std::size_t unit, int threads,
                  const std::function<void(std::size_t, std::size_t)>& body) {
    const std::size_t units = (total + unit - 1) / unit;
    const std::size_t parts =
        std::clamp<std::size_t>(static_cast<std::size_t>(std::max(threads, 1)), 1, std::max<std::size_t>(units, 1));
    if (parts == 1) {
        body(0, total);
        return;
    }
    const std::size_t step = (units + parts - 1) / parts * unit;
    std::vector<std::thread> others;
    others.reserve(parts - 1);
    std::size_t begin = 0;
    for (; others.size() + 1 < parts && begin + step < total; begin += step) {
        try {
            others.emplace_back(std::cref(body), begin, begin + step);
        } catch (const std::system_error&) {
            break;
        }
    }
    body(begin, total);
    for (std::thread& other : others) {
        other.join();
    }
}

}  // namespace nccl_stream
