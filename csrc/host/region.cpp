#include "host/region.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <system_error>
#include <utility>

#include "host/parallel.hpp"

namespace nccl_stream {

namespace {

constexpr char kDirectory[] = "/dev/shm/";  // where Linux keeps POSIX shared memory
constexpr char kPrefix[] = "nccl_stream.";
constexpr int kCreateTries = 8;  // each lost race means that somebody else got on

[[noreturn]] void fail(int error, const std::string& what) {
    throw std::system_error(error, std::generic_category(), what);
}

// A file descriptor that closes itself.
class File {
  public:
    explicit File(int descriptor) : descriptor_(descriptor) {}
    File(File&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)) {}
    File& operator=(File&&) = delete;
    ~File() {
        if (descriptor_ >= 0) {
            close(descriptor_);
        }
    }
    int get() const { return descriptor_; }
    int release() { return std::exchange(descriptor_, -1); }
    explicit operator bool() const { return descriptor_ >= 0; }

  private:
    int descriptor_;
};

std::string posix_name(const std::string& name) {
    if (name.empty() || name.size() > 200 || name.find_first_of(std::string("/\0", 2)) != std::string::npos) {
        fail(EINVAL, "a name of shared memory has 1 to 200 bytes and no slash");
    }
    return "/" + (kPrefix + name);
}

bool lock(const File& file) {
    return flock(file.get(), LOCK_EX | LOCK_NB) == 0;
}

bool has_name(const File& file, const std::string& posix) {
    struct stat ours, named;
    const File other(shm_open(posix.c_str(), O_RDONLY | O_CLOEXEC, 0));
    return other && fstat(file.get(), &ours) == 0 && fstat(other.get(), &named) == 0 && ours.st_ino == named.st_ino &&
           ours.st_dev == named.st_dev;
}

// Takes the name away when no process holds its lock. False: it is in use, or cannot be opened.
bool remove_if_abandoned(const std::string& posix) {
    const File file(shm_open(posix.c_str(), O_RDWR | O_CLOEXEC, 0));
    if (!file) {
        return errno == ENOENT;
    }
    if (!lock(file)) {
        return false;
    }
    if (has_name(file, posix)) {
        shm_unlink(posix.c_str());
    }
    return true;
}

// A new file under this name, locked.
File create_file(const std::string& posix) {
    for (int i = 0; i < kCreateTries; ++i) {
        File file(shm_open(posix.c_str(), O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0600));
        if (!file && errno != EEXIST) {
            fail(errno, "shared memory '" + posix + "'");
        }
        // Between the creation and the lock somebody may take the file for an abandoned one.
        if (file && lock(file) && has_name(file, posix)) {
            return file;
        }
        if (!file && !remove_if_abandoned(posix)) {
            break;
        }
    }
    fail(EEXIST, "shared memory '" + posix + "' belongs to a living process");
}

void* map(std::size_t nbytes, int flags, int file, const std::string& what) {
    void* data = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, flags, file, 0);
    if (data == MAP_FAILED) {
        fail(errno, what);
    }
    return data;
}

// Writes to each page once, so that the first use does not pay for it.
void touch(void* data, std::size_t nbytes, int threads) {
    parallel_for(nbytes, page_bytes(), threads, [data](std::size_t begin, std::size_t end) {
        auto* bytes = static_cast<volatile char*>(data);
        for (std::size_t i = begin; i < end; i += page_bytes()) {
            bytes[i] = 0;
        }
    });
}

}  // namespace

std::size_t page_bytes() {
    static const std::size_t value = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    return value;
}

Region Region::anonymous(std::size_t nbytes, int threads) {
    Region region;
    const std::string what = "mapping " + std::to_string(nbytes) + " bytes";
    region.data_ = map(nbytes, MAP_PRIVATE | MAP_ANONYMOUS, -1, what);
    region.nbytes_ = nbytes;
#ifdef MADV_HUGEPAGE
    madvise(region.data_, nbytes, MADV_HUGEPAGE);  // fewer TLB misses where the system agrees
#endif
    touch(region.data_, nbytes, threads);
    return region;
}

Region Region::create_shared(const std::string& name, std::size_t nbytes) {
    const std::string posix = posix_name(name);
    const std::string what = "shared memory '" + posix + "' of " + std::to_string(nbytes) + " bytes";
    Region region;
    File file = create_file(posix);
    region.file_ = file.release();
    region.creator_ = getpid();
    region.name_ = posix;  // from here on, the destructor takes the name away
    // Without this a full file system would end the process at the first write into a page that it cannot give.
    if (const int error = posix_fallocate(region.file_, 0, static_cast<off_t>(nbytes))) {
        fail(error, what);
    }
    region.data_ = map(nbytes, MAP_SHARED | MAP_POPULATE, region.file_, what);
    region.nbytes_ = nbytes;
    return region;
}

Region Region::open_shared(const std::string& name) {
    const std::string posix = posix_name(name);
    const std::string what = "shared memory '" + posix + "'";
    const File file(shm_open(posix.c_str(), O_RDWR | O_CLOEXEC, 0));
    if (!file) {
        fail(errno, what);
    }
    struct stat status;
    if (fstat(file.get(), &status) != 0) {
        fail(errno, what);
    }
    if (status.st_size <= 0) {
        fail(ENODATA, what + " has no size yet");
    }
    Region region;
    region.nbytes_ = static_cast<std::size_t>(status.st_size);
    region.data_ = map(region.nbytes_, MAP_SHARED | MAP_POPULATE, file.get(), what);
    return region;
}

Region::Region(Region&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      nbytes_(std::exchange(other.nbytes_, 0)),
      file_(std::exchange(other.file_, -1)),
      creator_(other.creator_),
      name_(std::exchange(other.name_, std::string())) {}

Region::~Region() {
    unlink();
    if (data_ != nullptr) {
        munmap(data_, nbytes_);
    }
}

void Region::unlink() noexcept {
    if (file_ < 0) {
        return;
    }
    const File file(std::exchange(file_, -1));
    if (creator_ == getpid() && has_name(file, name_)) {
        shm_unlink(name_.c_str());
    }
}

std::vector<std::string> remove_abandoned(const std::string& prefix) {
    std::vector<std::string> removed;
    const std::unique_ptr<DIR, int (*)(DIR*)> directory(opendir(kDirectory), &closedir);
    if (!directory) {
        return removed;
    }
    const std::string full_prefix = kPrefix + prefix;
    std::vector<std::string> names;
    while (const dirent* entry = readdir(directory.get())) {
        const std::string name = entry->d_name;
        if (name.compare(0, full_prefix.size(), full_prefix) == 0) {
            names.push_back(name);
        }
    }
    std::sort(names.begin(), names.end());
    for (const std::string& name : names) {
        if (remove_if_abandoned("/" + name)) {
            removed.push_back(name.substr(sizeof(kPrefix) - 1));
        }
    }
    return removed;
}

}  // namespace nccl_stream
