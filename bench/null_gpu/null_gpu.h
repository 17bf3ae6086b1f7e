/* The null GPU: the declarations that its files share.
 *
 * A stand-in for CUDA's runtime, driver and cuBLAS on a machine without a GPU. Memory is the host's, kernels do
 * nothing, and every stream has a clock instead: work advances it, events carry its reading, and a wait lasts until
 * that moment has passed. Calls that CUDA forbids are refused with CUDA's own error.
 *
 *     base.c      settings, time, counts and the report, refusals
 *     memory.c    allocations, and the piece that contains a pointer
 *     copies.c    copies and fills
 *     streams.c   streams' clocks
 *     events.c    events
 *     capture.c   the calls that a capture allows, and the resulting graph
 *     graphs.c    instantiating and launching graphs
 *     launches.c  kernels that CUDA's compiler put into torch, and all launches
 *     driver.c    the driver's functions that Triton and torch call
 *     blas.c      cuBLAS
 *     device.c    the device's properties, the texts of errors
 *
 * Moments and times are nanoseconds (int64_t), moments of CLOCK_MONOTONIC. Functions whose names end in _locked
 * require state_lock.
 */
#ifndef NULL_GPU_H
#define NULL_GPU_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Maximum number of streams in one capture; a dependency is the number of nodes of each of them that it follows. */
#define MAX_CAPTURED_STREAMS 32

/* Declarations are private to these files: a preloaded library must not hide the names of other libraries. */
#pragma GCC visibility push(hidden)

/* ---- base.c ---- */

typedef struct {
    int64_t kernel_ns;        /* time of a kernel, a copy or a fill in a stream */
    int64_t node_ns;          /* time of a node of a graph */
    double copy_bytes_per_ns; /* between host and device; 0: copies take no time for their bytes */
    size_t memory_bytes;      /* the device's memory */
    const char *name;
    bool is_strict; /* refused calls are reported */
    bool is_reporting;
} Settings;

extern Settings settings;

typedef enum {
    KERNELS,
    GRAPH_LAUNCHES,
    GRAPH_NODES, /* of all graphs launched */
    CAPTURES,
    COPIES,
    COPIED_BYTES,
    FILLS,
    ALLOCATIONS,
    FREES,
    STREAM_QUERIES,
    EVENT_QUERIES,
    REFUSALS,
    /* Waits of the host for the device: */
    STREAM_WAITS,
    EVENT_WAITS,
    DEVICE_WAITS,
    COPY_WAITS, /* for the end of a copy */
    FREE_WAITS, /* for the end of all work, before memory is freed */
    NUM_COUNTS
} Count;

void count(Count which, int64_t by);
int64_t now_ns(void);
/* Waits on the host until `moment`; the wait and its time are counted as `which`. */
void wait_until(Count which, int64_t moment);
/* Reports the refusal once, keeps it as the runtime's last error, and returns it. `call` is the caller's __func__. */
cudaError_t refuse(const char *call, cudaError_t error, const char *why);
/* The same, without a report, for an answer that is not a fault: not ready. */
cudaError_t answer(cudaError_t error);
cudaError_t last_error(bool is_cleared);

#define RETURN_IF_REFUSED(expression)      \
    do {                                   \
        cudaError_t refused_ = expression; \
        if (refused_ != cudaSuccess)       \
            return refused_;               \
    } while (0)

/* The header of every handle's object. Destroyed ones are kept for a while, so that their use is reported. */
typedef enum { NO_OBJECT, STREAM, EVENT, GRAPH, EXECUTABLE, CAPTURE, NUM_OBJECTS } Kind;

typedef struct Object {
    Kind kind; /* NO_OBJECT: destroyed */
    struct Object *next_destroyed;
} Object;

void *new_object_locked(Kind kind, size_t size); /* zeros */
void destroy_object_locked(void *object);
bool is_object(const void *object, Kind kind);

/* ---- memory.c ---- */

typedef enum { PAGEABLE, DEVICE, PINNED, REGISTERED } Place;

typedef struct {
    uintptr_t start;
    size_t size; /* bytes */
    Place place;
} Piece;

Piece piece_of(const void *pointer); /* PAGEABLE with size 0 if nothing was allocated or registered there */
void *symbols_room(void);            /* the device memory of all symbols */

/* ---- streams.c ---- */

extern pthread_mutex_t state_lock; /* guards streams, events, captures and graphs */

struct Capture;

typedef struct {
    Object object;
    bool is_legacy;
    bool is_blocking; /* ordered with the legacy stream */
    int priority;
    int64_t busy_until;
    struct Capture *capture; /* NULL if the stream is not being captured */
    int capture_index;
    uint32_t follows[MAX_CAPTURED_STREAMS]; /* nodes of each captured stream that come before this one's next */
    int64_t captured_until;                 /* ns from the graph's start to this stream's next node */
} Stream;

/* The work that one call adds to a stream. */
typedef struct {
    Count counted_as;
    int64_t num_nodes;
    int64_t launched_ns;
    int64_t captured_ns;
    int64_t not_before; /* a moment */
} Work;

Stream *stream_of(cudaStream_t handle); /* NULL: destroyed */
int64_t next_start_locked(const Stream *stream);
void extend_locked(Stream *stream, int64_t moment);
int64_t device_done_locked(void);
/* `done_at` may be NULL; it receives the moment at which the work is done, 0 if the work was captured. */
cudaError_t enqueue(const char *call, cudaStream_t handle, Work work, int64_t *done_at);

/* ---- capture.c ---- */

typedef struct Capture {
    Object object;
    uint64_t id;
    enum cudaStreamCaptureMode mode;
    pthread_t owner;
    bool is_invalid;
    Stream *streams[MAX_CAPTURED_STREAMS]; /* the first one began the capture */
    int num_streams;
    int64_t num_nodes;
    struct Capture *next;
} Capture;

/* Refuses a potentially unsafe call while a capture forbids it. An ongoing capture that forbids such a call becomes
 * invalid. */
cudaError_t check_unsafe(const char *call);
/* The legacy stream is every blocking stream at once, so it cannot be used while one of them is captured. */
cudaError_t check_legacy_locked(const char *call, const Stream *stream);
/* Refuses a call that would wait for all streams while any capture is ongoing. */
cudaError_t check_no_capture(const char *call);
Capture *active_capture_locked(uint64_t id); /* NULL: it has ended */
cudaError_t join_capture_locked(const char *call, Stream *stream, Capture *capture);
cudaError_t break_capture_locked(const char *call, Capture *capture, cudaError_t error, const char *why);
/* Does nothing and succeeds if the stream is not being captured. */
cudaError_t break_capture_of(const char *call, cudaStream_t handle, const char *why);

/* ---- graphs.c ---- */

typedef struct {
    Object object;
    int64_t num_nodes;
    int64_t run_ns;     /* the time along its longest path */
    int64_t busy_until; /* an executable graph runs one launch at a time */
} Graph;

/* ---- launches.c ---- */

cudaError_t launch(const char *call, cudaStream_t stream);
cudaError_t check_shape(const char *call, const unsigned grid[3], const unsigned block[3], size_t shared_bytes);

/* ---- device.c ---- */

#define MAX_THREADS_PER_BLOCK 1024
#define MAX_SHARED_BYTES 232448 /* per block that opts in */
#define MAX_GRID_X 2147483647
#define MAX_GRID_Y 65535

int device_attribute(int which); /* a cudaDeviceAttr, or a CUdevice_attribute: they share their numbers */

#pragma GCC visibility pop
#endif
