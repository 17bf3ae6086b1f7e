// Memory of one thread for the kernels.
#pragma once

#include <stdlib.h>

#include <cstdint>

namespace {

// Memory of this thread that grows to the largest requested size, so that a step allocates nothing.
class Scratch {
public:
    char* reserve(int64_t bytes) {
        if (bytes > size_) {
            free(memory_);
            size_ = (bytes + 4095) / 4096 * 4096;
            memory_ = nullptr;
            if (posix_memalign(&memory_, 64, size_)) abort();
        }
        return static_cast<char*>(memory_);
    }
    ~Scratch() { free(memory_); }

private:
    void* memory_ = nullptr;
    int64_t size_ = 0;
};

}  // namespace
