/* Allocations. Pieces are in the C library's search tree, ordered by address: a pointer finds the piece around it. */
#include "null_gpu.h"
#include <search.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* CUDA gives device memory in pages of this size, so allocations are rounded up to it. */
#define DEVICE_PAGE ((size_t)2 << 20)
#define HOST_PAGE ((size_t)4096)
#define SYMBOL_BYTES ((size_t)1 << 20)

static pthread_mutex_t memory_lock = PTHREAD_MUTEX_INITIALIZER;
static void *pieces;
static size_t used_bytes;

/* Pieces that overlap are equal, so a piece of one byte finds the one that contains it. */
static int compare(const void *left_pointer, const void *right_pointer) {
    const Piece *left = left_pointer;
    const Piece *right = right_pointer;
    if (left->start + left->size <= right->start)
        return -1;
    return right->start + right->size <= left->start;
}

static Piece *find_locked(const void *pointer) {
    Piece wanted = {(uintptr_t)pointer, 1, PAGEABLE};
    Piece **found = tfind(&wanted, &pieces, compare);
    return found ? *found : NULL;
}

Piece piece_of(const void *pointer) {
    Piece found = {(uintptr_t)pointer, 0, PAGEABLE};
    pthread_mutex_lock(&memory_lock);
    Piece *piece = find_locked(pointer);
    if (piece)
        found = *piece;
    pthread_mutex_unlock(&memory_lock);
    return found;
}

/* Returns whether the range was free. */
static bool add(uintptr_t start, size_t size, Place place) {
    Piece *piece = malloc(sizeof *piece);
    if (!piece)
        abort();
    *piece = (Piece){start, size, place};
    pthread_mutex_lock(&memory_lock);
    Piece **found = tsearch(piece, &pieces, compare);
    bool is_new = found && *found == piece;
    pthread_mutex_unlock(&memory_lock);
    if (!is_new)
        free(piece);
    return is_new;
}

/* Forgets the piece of this `place` that begins at `pointer`. Returns its size, 0 if there is none. */
static size_t forget(const void *pointer, Place place) {
    size_t size = 0;
    pthread_mutex_lock(&memory_lock);
    Piece *piece = find_locked(pointer);
    if (piece && piece->start == (uintptr_t)pointer && piece->place == place) {
        size = piece->size;
        tdelete(piece, &pieces, compare);
        free(piece);
        if (place == DEVICE)
            used_bytes -= size;
    }
    pthread_mutex_unlock(&memory_lock);
    return size;
}

/* Returns zeros that take no memory until they are written, or NULL if no address space is left. */
static void *map(size_t size, size_t page) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    char *raw = mmap(NULL, size + page, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (raw == MAP_FAILED)
        return NULL;
    uintptr_t start = ((uintptr_t)raw + page - 1) & ~(uintptr_t)(page - 1);
    size_t before = start - (uintptr_t)raw;
    if (before)
        munmap(raw, before);
    if (page > before)
        munmap((void *)(start + size), page - before);
    /* A write to one byte must not take two megabytes. */
    madvise((void *)start, size, MADV_NOHUGEPAGE);
    return (void *)start;
}

static size_t round_up(size_t size, size_t page) {
    return (size + page - 1) & ~(page - 1);
}

/* Reserves device memory if there is enough left; returns whether there was. Host memory is not counted. */
static bool take(size_t size, Place place) {
    if (place != DEVICE)
        return true;
    pthread_mutex_lock(&memory_lock);
    bool fits = size <= settings.memory_bytes - used_bytes;
    used_bytes += fits ? size : 0;
    pthread_mutex_unlock(&memory_lock);
    return fits;
}

static void give_back(size_t size, Place place) {
    pthread_mutex_lock(&memory_lock);
    used_bytes -= place == DEVICE ? size : 0;
    pthread_mutex_unlock(&memory_lock);
}

static cudaError_t allocate(const char *call, void **pointer, size_t size, Place place) {
    *pointer = NULL;
    count(ALLOCATIONS, 1);
    if (!size)
        return cudaSuccess;
    size_t page = place == DEVICE ? DEVICE_PAGE : HOST_PAGE;
    size_t rounded = size < SIZE_MAX / 2 ? round_up(size, page) : size;
    if (!take(rounded, place))
        return refuse(call, cudaErrorMemoryAllocation, "the device's memory is full");
    void *start = map(rounded, page);
    if (!start) {
        give_back(rounded, place);
        return refuse(call, cudaErrorMemoryAllocation, "this process has no address space left");
    }
    if (!add((uintptr_t)start, rounded, place)) {
        munmap(start, rounded);
        give_back(rounded, place);
        return refuse(call, cudaErrorMemoryAllocation, "memory was unmapped while it was still registered");
    }
    *pointer = start;
    return cudaSuccess;
}

static cudaError_t release(const char *call, void *pointer, Place place) {
    if (!pointer)
        return cudaSuccess;
    size_t size = forget(pointer, place);
    if (!size)
        return refuse(call, cudaErrorInvalidValue, "nothing was allocated there, or it was already freed");
    munmap(pointer, size);
    count(FREES, 1);
    return cudaSuccess;
}

/* Any stream may still use the memory, so CUDA waits for all of them. */
static void wait_for_device(void) {
    pthread_mutex_lock(&state_lock);
    int64_t done = device_done_locked();
    pthread_mutex_unlock(&state_lock);
    wait_until(FREE_WAITS, done);
}

cudaError_t cudaMalloc(void **pointer, size_t size) {
    RETURN_IF_REFUSED(check_unsafe(__func__));
    return allocate(__func__, pointer, size, DEVICE);
}

cudaError_t cudaFree(void *pointer) {
    RETURN_IF_REFUSED(check_unsafe(__func__));
    if (pointer)
        wait_for_device();
    return release(__func__, pointer, DEVICE);
}

/* Stream-ordered calls: they do not wait, and a capture allows them. */
cudaError_t cudaMallocAsync(void **pointer, size_t size, cudaStream_t stream) {
    return allocate(__func__, pointer, size, DEVICE);
}

cudaError_t cudaFreeAsync(void *pointer, cudaStream_t stream) {
    return release(__func__, pointer, DEVICE);
}

cudaError_t cudaHostAlloc(void **pointer, size_t size, unsigned flags) {
    RETURN_IF_REFUSED(check_unsafe(__func__));
    return allocate(__func__, pointer, size, PINNED);
}

cudaError_t cudaMallocHost(void **pointer, size_t size) {
    return cudaHostAlloc(pointer, size, 0);
}

cudaError_t cudaFreeHost(void *pointer) {
    RETURN_IF_REFUSED(check_unsafe(__func__));
    if (pointer)
        wait_for_device();
    return release(__func__, pointer, PINNED);
}

cudaError_t cudaHostRegister(void *pointer, size_t size, unsigned flags) {
    RETURN_IF_REFUSED(check_unsafe(__func__));
    if (!pointer || !size)
        return refuse(__func__, cudaErrorInvalidValue, "the pointer or the size is 0");
    if (!add((uintptr_t)pointer, size, REGISTERED))
        return refuse(__func__, cudaErrorHostMemoryAlreadyRegistered, "some of it is already allocated or registered");
    return cudaSuccess;
}

cudaError_t cudaHostUnregister(void *pointer) {
    RETURN_IF_REFUSED(check_unsafe(__func__));
    wait_for_device();
    if (!forget(pointer, REGISTERED))
        return refuse(__func__, cudaErrorHostMemoryNotRegistered, "no registered memory begins there");
    return cudaSuccess;
}

cudaError_t cudaHostGetDevicePointer(void **device, void *host, unsigned flags) {
    if (piece_of(host).place == PAGEABLE)
        return refuse(__func__, cudaErrorInvalidValue, "the memory is not pinned");
    *device = host;
    return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
    pthread_mutex_lock(&memory_lock);
    *free_bytes = settings.memory_bytes - used_bytes;
    pthread_mutex_unlock(&memory_lock);
    *total_bytes = settings.memory_bytes;
    return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *pointer) {
    Place place = piece_of(pointer).place;
    memset(attributes, 0, sizeof *attributes);
    attributes->type = cudaMemoryTypeUnregistered;
    attributes->device = cudaInvalidDeviceId;
    if (place == PAGEABLE)
        return cudaSuccess;
    attributes->type = place == DEVICE ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
    attributes->device = 0;
    attributes->devicePointer = (void *)pointer;
    attributes->hostPointer = place == DEVICE ? NULL : (void *)pointer;
    return cudaSuccess;
}

static void *symbols;

static void make_symbols(void) {
    symbols = map(SYMBOL_BYTES, DEVICE_PAGE);
    if (!symbols)
        abort();
    add((uintptr_t)symbols, SYMBOL_BYTES, DEVICE);
}

void *symbols_room(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, make_symbols);
    return symbols;
}

cudaError_t cudaGetSymbolAddress(void **pointer, const void *symbol) {
    *pointer = symbols_room();
    return cudaSuccess;
}
