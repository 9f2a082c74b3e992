// Memory that is mapped once: private to the process, or shared by name with others on the same host.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace nccl_stream {

// The size of a page, and so the alignment of every region, in bytes.
std::size_t page_bytes();

// A mapped range of memory. Errors of the operating system come as std::system_error with the errno that it gave.
//
// Names of shared memory have a prefix of ours added, so that no other program's memory is ever touched. A name belongs
// to the region that created it, for as long as that region has the lock on the file behind it (flock). The kernel
// drops the lock when the process ends, however it ends: a name without a lock was left behind by a crash, and is
// replaced.
class Region {
  public:
    // Private memory, zeroed, its pages already in place; `threads` of them put the pages in place.
    static Region anonymous(std::size_t nbytes, int threads = 1);
    // Shared memory under a new name, zeroed, its pages already in place. EEXIST: a living region has the name.
    // ENOSPC: the file system of the shared memory is too small.
    static Region create_shared(const std::string& name, std::size_t nbytes);
    // The memory that another region created under this name. ENOENT: there is none.
    static Region open_shared(const std::string& name);

    Region(Region&& other) noexcept;
    Region& operator=(Region&&) = delete;
    // Takes the name away, if this region created it, and unmaps the memory. In a forked child the name stays.
    ~Region();

    void* data() const { return data_; }
    std::size_t nbytes() const { return nbytes_; }

    // Takes the name away, if this region created it. Those that have mapped the memory keep it. Idempotent.
    void unlink() noexcept;

  private:
    Region() = default;

    void* data_ = nullptr;
    std::size_t nbytes_ = 0;
    int file_ = -1;     // open only in a creator, where it holds the lock
    long creator_ = 0;  // the process that may take the name away
    std::string name_;
};

// The names that begin with `prefix` and were left behind by processes that are gone; they are taken away.
std::vector<std::string> remove_abandoned(const std::string& prefix);

}  // namespace nccl_stream
