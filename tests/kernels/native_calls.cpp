// Makes calls of the native library that a file lists, without Python: so a library for another processor can be driven
// in an emulator. `tests/kernels/native_calls.py` writes the file.
//
//     native_calls LIBRARY ISA CALLS RESULT
//
// CALLS consists of words of 64 bits: the number of buffers, and for each its bytes and contents, padded to whole words;
// the number of pointers within buffers, and for each (buffer, offset, target buffer); the number of calls, and for each
// the symbol in eight words, its integer arguments as (is a buffer, number), and its float arguments' bits. RESULT gets the
// contents of all buffers after the calls.
#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

static std::vector<uint64_t> words;
static size_t position = 0;

static uint64_t next() { return words.at(position++); }

int main(int, char** arguments) {
    void* library = dlopen(arguments[1], RTLD_NOW);
    if (!library) return std::fprintf(stderr, "%s\n", dlerror()), 1;
    const auto supports = reinterpret_cast<int (*)(const char*)>(dlsym(library, "penstock_supports"));
    if (!supports(arguments[2])) return std::fprintf(stderr, "this processor lacks %s\n", arguments[2]), 1;
    std::FILE* file = std::fopen(arguments[3], "rb");
    std::fseek(file, 0, SEEK_END);
    words.resize(static_cast<size_t>(std::ftell(file)) / 8);
    std::rewind(file);
    if (std::fread(words.data(), 8, words.size(), file) != words.size()) return 1;
    std::fclose(file);

    std::vector<std::pair<char*, size_t>> buffers(next());
    for (auto& [memory, size] : buffers) {
        size = next();
        memory = static_cast<char*>(std::aligned_alloc(64, (size + 127) / 64 * 64));
        std::memcpy(memory, &words.at(position), size);
        position += (size + 7) / 8;
    }
    for (uint64_t left = next(); left; --left) {
        char* at = buffers.at(next()).first + next();
        const char* target = buffers.at(next()).first;
        std::memcpy(at, &target, sizeof target);
    }
    for (uint64_t left = next(); left; --left) {
        const std::string name = reinterpret_cast<const char*>(&words.at(position));
        position += 8;
        void* symbol = dlsym(library, ("penstock_" + name + "_" + arguments[2]).c_str());
        if (!symbol) return std::fprintf(stderr, "%s\n", dlerror()), 1;
        int64_t n[24] = {};
        const uint64_t integers = next();
        for (uint64_t i = 0; i < integers; ++i) {
            const bool is_buffer = next();
            const uint64_t value = next();
            n[i] = is_buffer ? reinterpret_cast<int64_t>(buffers.at(value).first) : static_cast<int64_t>(value);
        }
        float f[4] = {};
        const uint64_t floats = next();
        for (uint64_t i = 0; i < floats; ++i) {
            const uint64_t bits = next();
            std::memcpy(&f[i], &bits, 4);
        }
        // The calling conventions of Linux on x86-64 and on arm64 place integers and floats independently of each other,
        // the integers beyond those in registers in words on the stack, and a function ignores arguments that it lacks.
        reinterpret_cast<void (*)(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                                  int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                                  int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, float, float, float, float)>(
            symbol)(n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], n[8], n[9], n[10], n[11], n[12], n[13], n[14], n[15],
                    n[16], n[17], n[18], n[19], n[20], n[21], n[22], n[23], f[0], f[1], f[2], f[3]);
    }
    file = std::fopen(arguments[4], "wb");
    for (const auto& [memory, size] : buffers) std::fwrite(memory, 1, size, file);
    return std::fclose(file);
}
