#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <system_error>

#include "bindings/bindings.hpp"
#include "host/checksum.hpp"
#include "host/copy.hpp"
#include "host/pack.hpp"
#include "host/pool.hpp"
#include "host/region.hpp"

namespace nb = nanobind;
using namespace nccl_stream;

namespace {

void* at(std::uintptr_t address) {
    return reinterpret_cast<void*>(address);
}

std::vector<std::int64_t> integers(nb::handle tuple) {
    std::vector<std::int64_t> values;
    values.reserve(nb::len(tuple));
    for (nb::handle value : nb::borrow<nb::tuple>(tuple)) {
        values.push_back(nb::cast<std::int64_t>(value));
    }
    return values;
}

std::vector<Placement> placements_of(const nb::list& tensors, const nb::list& offsets, std::uint64_t slot_nbytes) {
    std::vector<Placement> result;
    const std::size_t count = nb::len(tensors);
    if (nb::len(offsets) != count) {
        throw nb::value_error("there must be one offset for each tensor");
    }
    result.reserve(count);
    for (std::size_t i = 0; i < count; ++i) {
        const nb::tuple tensor = nb::borrow<nb::tuple>(tensors[i]);
        const std::vector<std::int64_t> shape = integers(tensor[2]);
        const std::vector<std::int64_t> strides = integers(tensor[3]);
        if (shape.size() != strides.size()) {
            throw nb::value_error("a shape and its strides must have one length");
        }
        result.push_back({CopyPlan(at(nb::cast<std::uintptr_t>(tensor[0])), nb::cast<std::size_t>(tensor[1]),
                                   shape.size(), shape.data(), strides.data()),
                          nb::cast<std::uint64_t>(offsets[i])});
    }
    std::size_t index = 0;
    if (!places_are_sound(result, slot_nbytes, index)) {
        const std::string what = "tensor " + std::to_string(index) + " of " +
                                 std::to_string(result[index].plan.nbytes()) + " bytes at offset " +
                                 std::to_string(result[index].offset) + " lies outside the slot of " +
                                 std::to_string(slot_nbytes) + " bytes, or overlaps another";
        throw nb::value_error(what.c_str());
    }
    return result;
}

bool interpreter_ends() {
#if PY_VERSION_HEX >= 0x030D0000
    return Py_IsFinalizing() != 0;
#else
    return _Py_IsFinalizing() != 0;
#endif
}

// Waits without the GIL; a signal whose handler raises ends the wait with what it raised.
nb::tuple reserve(Pool& pool, std::uint64_t nbytes, std::uint64_t alignment, std::optional<double> timeout) {
    Slot slot;
    ReserveStatus status;
    {
        nb::gil_scoped_release release;
        status = pool.reserve(nbytes, alignment, timeout, slot, [] {
            if (interpreter_ends()) {
                return false;  // a daemon thread that is still here must not touch Python any more
            }
            nb::gil_scoped_acquire acquire;
            return PyErr_CheckSignals() != 0;
        });
    }
    if (status == ReserveStatus::kInterrupted) {
        throw nb::python_error();
    }
    return nb::make_tuple(status, slot.offset, slot.serial);
}

int region_buffer(PyObject* self, Py_buffer* view, int flags) {
    const Region* region = nb::inst_ptr<Region>(self);
    return PyBuffer_FillInfo(view, self, region->data(), static_cast<Py_ssize_t>(region->nbytes()), 0, flags);
}

PyType_Slot kRegionSlots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(&region_buffer)}, {0, nullptr}};

void raise_os_error(const std::exception_ptr& pointer, void*) {
    try {
        std::rethrow_exception(pointer);
    } catch (const std::system_error& error) {
        const nb::object arguments = nb::make_tuple(error.code().value(), error.what());
        PyErr_SetObject(PyExc_OSError, arguments.ptr());
    }
}

void bind_pool(nb::module_& module) {
    nb::enum_<ReserveStatus>(module, "ReserveStatus")
        .value("OK", ReserveStatus::kOk)
        .value("NO_ROOM", ReserveStatus::kNoRoom)
        .value("TOO_LARGE", ReserveStatus::kTooLarge)
        .value("CLOSED", ReserveStatus::kClosed);
    nb::enum_<FreeStatus>(module, "FreeStatus")
        .value("OK", FreeStatus::kOk)
        .value("ALREADY_FREE", FreeStatus::kAlreadyFree)
        .value("FOREIGN", FreeStatus::kForeign);
    nb::class_<PoolStatistics>(module, "PoolCounts")
        .def_ro("capacity", &PoolStatistics::capacity)
        .def_ro("used", &PoolStatistics::used)
        .def_ro("peak_used", &PoolStatistics::peak_used)
        .def_ro("slots", &PoolStatistics::slots)
        .def_ro("free_ranges", &PoolStatistics::free_ranges)
        .def_ro("largest_free", &PoolStatistics::largest_free)
        .def_ro("waiting", &PoolStatistics::waiting)
        .def_ro("reserved", &PoolStatistics::reserved);
    nb::class_<Pool>(module, "Pool")
        .def(nb::init<std::uint64_t, std::uint64_t>(), nb::arg("capacity"), nb::arg("alignment"))
        .def("reserve", &reserve, nb::arg("nbytes"), nb::arg("alignment"), nb::arg("timeout").none())
        .def(
            "free",
            [](Pool& pool, std::uint64_t offset, std::uint64_t serial) { return pool.free(Slot{offset, 0, serial}); },
            nb::arg("offset"), nb::arg("serial"))
        .def("statistics", &Pool::statistics)
        .def("close", &Pool::close);
}

void bind_region(nb::module_& module) {
    using Free = nb::call_guard<nb::gil_scoped_release>;
    nb::class_<Region>(module, "Region", nb::type_slots(kRegionSlots), nb::is_weak_referenceable())
        .def_static("anonymous", &Region::anonymous, nb::arg("nbytes"), nb::arg("threads") = 1, Free())
        .def_static("create_shared", &Region::create_shared, nb::arg("name"), nb::arg("nbytes"), Free())
        .def_static("open_shared", &Region::open_shared, nb::arg("name"), Free())
        .def_prop_ro("address", [](const Region& region) { return reinterpret_cast<std::uintptr_t>(region.data()); })
        .def_prop_ro("nbytes", &Region::nbytes)
        .def("unlink", &Region::unlink);  // with the GIL, which keeps two calls apart
    module.def("remove_abandoned", &remove_abandoned, nb::arg("prefix"), Free());
    module.def("page_bytes", &page_bytes);
}

}  // namespace

void bind_host(nb::module_& module) {
    nb::register_exception_translator(&raise_os_error);
    module.def(
        "crc32c",
        [](std::uintptr_t address, std::size_t nbytes, std::uint32_t value) {
            return crc32c(at(address), nbytes, value);
        },
        nb::arg("address"), nb::arg("nbytes"), nb::arg("value") = 0, nb::call_guard<nb::gil_scoped_release>());
    module.def(
        "crc32c_buffer",
        [](nb::handle data, std::uint32_t value) {
            Py_buffer view;
            if (PyObject_GetBuffer(data.ptr(), &view, PyBUF_SIMPLE) != 0) {
                throw nb::python_error();
            }
            {
                const nb::gil_scoped_release release;
                value = crc32c(view.buf, static_cast<std::size_t>(view.len), value);
            }
            PyBuffer_Release(&view);
            return value;
        },
        nb::arg("data"), nb::arg("value") = 0);
    module.def("crc32c_kind", &crc32c_kind);
    module.def(
        "copy_bytes",
        [](std::uintptr_t dst, std::uintptr_t src, std::size_t nbytes, int threads) {
            copy_bytes(at(dst), at(src), nbytes, threads);
        },
        nb::arg("dst"), nb::arg("src"), nb::arg("nbytes"), nb::arg("threads") = 1,
        nb::call_guard<nb::gil_scoped_release>());
    module.def("copy_kind", &copy_kind);
    module.def(
        "pack",
        [](const nb::list& tensors, const nb::list& offsets, std::uintptr_t slot, std::uint64_t slot_nbytes,
           int threads) {
            const std::vector<Placement> placements = placements_of(tensors, offsets, slot_nbytes);
            const nb::gil_scoped_release release;
            pack(placements, at(slot), threads);
        },
        nb::arg("tensors"), nb::arg("offsets"), nb::arg("slot"), nb::arg("slot_nbytes"), nb::arg("threads") = 1);
    module.def(
        "unpack",
        [](const nb::list& tensors, const nb::list& offsets, std::uintptr_t slot, std::uint64_t slot_nbytes,
           int threads) {
            const std::vector<Placement> placements = placements_of(tensors, offsets, slot_nbytes);
            const nb::gil_scoped_release release;
            unpack(placements, at(slot), threads);
        },
        nb::arg("tensors"), nb::arg("offsets"), nb::arg("slot"), nb::arg("slot_nbytes"), nb::arg("threads") = 1);
    bind_pool(module);
    bind_region(module);
}
