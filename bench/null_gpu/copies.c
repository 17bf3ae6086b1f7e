/* Copies and fills. Bytes that may be read later are moved during the call. */
#include "null_gpu.h"
#include <string.h>

/* Larger copies move no bytes: nothing computes with them, and weights would take as much memory as on a GPU. The
 * results of a step that the host reads back are far smaller. */
#define MOST_MOVED_BYTES ((size_t)1 << 20)

static void move(void *to, const void *from, size_t size) {
    if (size <= MOST_MOVED_BYTES)
        memmove(to, from, size);
}

static void fill(void *to, int value, size_t size) {
    memset(to, value, size < MOST_MOVED_BYTES ? size : MOST_MOVED_BYTES);
}

/* `count` rows of `width` bytes, which begin `to_pitch` and `from_pitch` bytes apart. */
typedef struct {
    char *to;
    const char *from;
    size_t to_pitch;
    size_t from_pitch;
    size_t width;
    size_t count;
} Rows;

typedef struct {
    Place from;
    Place to;
    int64_t bus_ns; /* time between host and device */
} Way;

/* Checks one side of a copy: it must be within one allocation, and on the device if the copy's kind says so. */
static cudaError_t check_side(const char *call, const void *pointer, size_t size, bool is_device, Place *place) {
    Piece piece = piece_of(pointer);
    *place = piece.place;
    if (piece.place == PAGEABLE && is_device)
        return refuse(call, cudaErrorInvalidValue, "the device memory was never allocated, or was freed");
    if (piece.place != PAGEABLE && (uintptr_t)pointer - piece.start + size > piece.size)
        return refuse(call, cudaErrorInvalidValue, "the range extends beyond its allocation");
    return cudaSuccess;
}

static cudaError_t find_way(const char *call, Rows rows, enum cudaMemcpyKind kind, Way *way) {
    bool is_from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
    bool is_to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
    size_t from_size = (rows.count - 1) * rows.from_pitch + rows.width;
    size_t to_size = (rows.count - 1) * rows.to_pitch + rows.width;
    RETURN_IF_REFUSED(check_side(call, rows.from, from_size, is_from_device, &way->from));
    RETURN_IF_REFUSED(check_side(call, rows.to, to_size, is_to_device, &way->to));
    bool is_over_bus = (way->from == DEVICE) != (way->to == DEVICE);
    bool takes_time = is_over_bus && settings.copy_bytes_per_ns > 0;
    way->bus_ns = takes_time ? (int64_t)(rows.width * rows.count / settings.copy_bytes_per_ns) : 0;
    return cudaSuccess;
}

static Work copy_work(int64_t bus_ns) {
    return (Work){
        .counted_as = COPIES,
        .num_nodes = 1,
        .launched_ns = settings.kernel_ns + bus_ns,
        .captured_ns = settings.node_ns + bus_ns,
    };
}

static Work fill_work(void) {
    return (Work){
        .counted_as = FILLS,
        .num_nodes = 1,
        .launched_ns = settings.kernel_ns,
        .captured_ns = settings.node_ns,
    };
}

static cudaError_t copy_async(const char *call, Rows rows, enum cudaMemcpyKind kind, cudaStream_t stream) {
    if (!rows.width || !rows.count)
        return cudaSuccess;
    Way way;
    RETURN_IF_REFUSED(find_way(call, rows, kind, &way));
    if (way.from == PAGEABLE || way.to == PAGEABLE)
        RETURN_IF_REFUSED(break_capture_of(call, stream, "a graph cannot copy pageable memory"));
    int64_t done_at;
    RETURN_IF_REFUSED(enqueue(call, stream, copy_work(way.bus_ns), &done_at));
    if (!done_at)
        return cudaSuccess;
    count(COPIED_BYTES, (int64_t)(rows.width * rows.count));
    /* A copy into pageable memory returns when the bytes have arrived; one from it, when they are staged. */
    if (way.to == PAGEABLE)
        wait_until(COPY_WAITS, done_at);
    for (size_t row = 0; row < rows.count; row++)
        move(rows.to + row * rows.to_pitch, rows.from + row * rows.from_pitch, rows.width);
    return cudaSuccess;
}

static Rows one_row(void *to, const void *from, size_t size) {
    return (Rows){.to = to, .from = from, .width = size, .count = 1};
}

/* Copies in the legacy stream. The copy is done on return, except within the device. */
static cudaError_t copy_now(const char *call, void *to, const void *from, size_t size, enum cudaMemcpyKind kind) {
    RETURN_IF_REFUSED(check_unsafe(call));
    if (!size)
        return cudaSuccess;
    Way way;
    RETURN_IF_REFUSED(find_way(call, one_row(to, from, size), kind, &way));
    int64_t done_at;
    RETURN_IF_REFUSED(enqueue(call, cudaStreamLegacy, copy_work(way.bus_ns), &done_at));
    count(COPIED_BYTES, (int64_t)size);
    if (way.from != DEVICE || way.to != DEVICE)
        wait_until(COPY_WAITS, done_at);
    move(to, from, size);
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind, cudaStream_t stream) {
    return copy_async(__func__, one_row(to, from, size), kind, stream);
}

cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                              size_t height, enum cudaMemcpyKind kind, cudaStream_t stream) {
    Rows rows = {to, from, to_pitch, from_pitch, width, height};
    return copy_async(__func__, rows, kind, stream);
}

cudaError_t cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device, size_t size,
                                cudaStream_t stream) {
    return copy_async(__func__, one_row(to, from, size), cudaMemcpyDeviceToDevice, stream);
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind) {
    return copy_now(__func__, to, from, size, kind);
}

cudaError_t cudaMemcpyToSymbol(const void *symbol, const void *from, size_t size, size_t offset,
                               enum cudaMemcpyKind kind) {
    return copy_now(__func__, (char *)symbols_room() + offset, from, size, kind);
}

cudaError_t cudaMemsetAsync(void *to, int value, size_t size, cudaStream_t stream) {
    if (!size)
        return cudaSuccess;
    Place place;
    RETURN_IF_REFUSED(check_side(__func__, to, size, true, &place));
    int64_t done_at;
    RETURN_IF_REFUSED(enqueue(__func__, stream, fill_work(), &done_at));
    if (done_at)
        fill(to, value, size);
    return cudaSuccess;
}

/* The host does not wait: this is a fill in the legacy stream. */
cudaError_t cudaMemset(void *to, int value, size_t size) {
    RETURN_IF_REFUSED(check_unsafe(__func__));
    return cudaMemsetAsync(to, value, size, cudaStreamLegacy);
}
