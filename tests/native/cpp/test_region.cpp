#include "host/region.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>
#include <system_error>

#include "check.hpp"

using namespace nccl_stream;

namespace {

std::string unique_name(const char* what) {
    return std::string("cpp-") + what + "-" + std::to_string(getpid());
}

template <typename Call>
int error_of(const Call& call) {
    try {
        call();
    } catch (const std::system_error& error) {
        return error.code().value();
    }
    return 0;
}

unsigned char* bytes_of(const Region& region) {
    return static_cast<unsigned char*>(region.data());
}

}  // namespace

TEST(anonymous_memory_is_zeroed_and_of_the_exact_size) {
    for (const int threads : {1, 3}) {
        const Region region = Region::anonymous(1'000'001, threads);
        CHECK(region.nbytes() == 1'000'001);
        CHECK(
            std::all_of(bytes_of(region), bytes_of(region) + region.nbytes(), [](unsigned char b) { return b == 0; }));
        std::memset(region.data(), 1, region.nbytes());
    }
    CHECK(error_of([] { Region::anonymous(0); }) == EINVAL);
    const int error = error_of([] { Region::anonymous(std::size_t{1} << 60); });
    CHECK(error == ENOMEM || error == EINVAL);
}

TEST(shared_memory_is_one_for_all_and_gone_with_its_creator) {
    const std::string name = unique_name("shared");
    {
        Region created = Region::create_shared(name, 10'000);
        const Region opened = Region::open_shared(name);
        CHECK(opened.nbytes() == 10'000 && opened.data() != created.data());
        bytes_of(created)[9'999] = 7;
        CHECK(bytes_of(opened)[9'999] == 7);
        CHECK(error_of([&] { Region::create_shared(name, 1); }) == EEXIST);
        created.unlink();
        created.unlink();
        CHECK(error_of([&] { Region::open_shared(name); }) == ENOENT);
        // A new one of the same name is not taken away with the old one.
        const Region next = Region::create_shared(name, 1);
        const Region moved = std::move(created);
        CHECK(Region::open_shared(name).nbytes() == 1);
    }
    CHECK(error_of([&] { Region::open_shared(name); }) == ENOENT);
}

TEST(a_name_left_behind_is_replaced_or_removed_and_a_living_one_is_not) {
    const std::string name = unique_name("left");
    for (const bool sweep : {false, true}) {
        const pid_t child = fork();
        if (child == 0) {
            const Region region = Region::create_shared(name, 100);
            _exit(region.nbytes() == 100 ? 0 : 1);  // without its destructor: as in a crash
        }
        int status = 0;
        CHECK(waitpid(child, &status, 0) == child && status == 0);
        CHECK(Region::open_shared(name).nbytes() == 100);
        if (sweep) {
            CHECK(remove_abandoned(name) == std::vector<std::string>{name});
        } else {
            const Region mine = Region::create_shared(name, 200);
            CHECK(remove_abandoned(name).empty() && Region::open_shared(name).nbytes() == 200);
        }
        CHECK(error_of([&] { Region::open_shared(name); }) == ENOENT);
    }
}

TEST(a_forked_child_does_not_take_the_name_away) {
    const std::string name = unique_name("forked");
    Region region = Region::create_shared(name, 100);
    const pid_t child = fork();
    if (child == 0) {
        region.unlink();
        _exit(0);
    }
    CHECK(waitpid(child, nullptr, 0) == child);
    CHECK(Region::open_shared(name).nbytes() == 100);
}

TEST(impossible_names_and_sizes_leave_nothing) {
    CHECK(error_of([] { Region::create_shared("", 1); }) == EINVAL);
    CHECK(error_of([] { Region::create_shared("a/b", 1); }) == EINVAL);
    CHECK(error_of([] { Region::create_shared(std::string("a\0b", 3), 1); }) == EINVAL);
    CHECK(error_of([] { Region::create_shared(std::string(201, 'x'), 1); }) == EINVAL);
    const std::string name = unique_name("size");
    const int error = error_of([&] { Region::create_shared(name, std::size_t{1} << 50); });
    CHECK(error == ENOSPC || error == EFBIG || error == ENOMEM);
    CHECK(error_of([&] { Region::create_shared(name, 0); }) == EINVAL);
    CHECK(error_of([&] { Region::open_shared(name); }) == ENOENT);
}

RUN_TESTS()
