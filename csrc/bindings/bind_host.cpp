#include "bindings/bindings.hpp"
#include "host/checksum.hpp"

namespace nb = nanobind;

namespace {

const void* address_of(std::uintptr_t address) {
    return reinterpret_cast<const void*>(address);
}

}  // namespace

void bind_host(nb::module_& module) {
    module.def(
        "crc32c",
        [](std::uintptr_t address, std::size_t nbytes, std::uint32_t value) {
            return nccl_stream::crc32c(address_of(address), nbytes, value);
        },
        nb::arg("address"), nb::arg("nbytes"), nb::arg("value") = 0, nb::call_guard<nb::gil_scoped_release>());
}
