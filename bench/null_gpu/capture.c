/* Captures: the calls that they allow, how streams join them, and the resulting graph.
 *
 * The rules are those of the CUDA programming guide ("Prohibited and Unhandled Operations") and of
 * cudaThreadExchangeStreamCaptureMode. CUDA does not list the "potentially unsafe" calls: here they are all calls
 * that allocate, free, register or load, and all that wait for the device or query its progress.
 */
#include "null_gpu.h"
#include <stdatomic.h>
#include <string.h>

static Capture *captures;       /* the ongoing ones, the latest first */
static _Atomic int num_captures; /* so that calls without a capture need no lock */
static uint64_t num_begun;
static __thread enum cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;

/* ---- what is allowed ---- */

/* A thread's own capture forbids unsafe calls unless it is relaxed, another thread's if both modes are global. */
static bool forbids(const Capture *capture) {
    if (thread_mode == cudaStreamCaptureModeRelaxed)
        return false;
    if (pthread_equal(capture->owner, pthread_self()))
        return capture->mode != cudaStreamCaptureModeRelaxed;
    return thread_mode == cudaStreamCaptureModeGlobal && capture->mode == cudaStreamCaptureModeGlobal;
}

cudaError_t check_unsafe(const char *call) {
    if (!num_captures)
        return cudaSuccess;
    cudaError_t error = cudaSuccess;
    pthread_mutex_lock(&state_lock);
    for (Capture *capture = captures; capture; capture = capture->next)
        if (forbids(capture)) {
            const char *why = "an ongoing capture forbids calls like this one";
            error = break_capture_locked(call, capture, cudaErrorStreamCaptureUnsupported, why);
        }
    pthread_mutex_unlock(&state_lock);
    return error;
}

cudaError_t check_no_capture(const char *call) {
    if (!num_captures)
        return cudaSuccess;
    cudaError_t error = cudaSuccess;
    pthread_mutex_lock(&state_lock);
    for (Capture *capture = captures; capture; capture = capture->next) {
        const char *why = "a stream is being captured, so its work does not run";
        error = break_capture_locked(call, capture, cudaErrorStreamCaptureUnsupported, why);
    }
    pthread_mutex_unlock(&state_lock);
    return error;
}

static bool has_blocking_stream(const Capture *capture) {
    for (int i = 0; i < capture->num_streams; i++)
        if (capture->streams[i]->is_blocking)
            return true;
    return false;
}

cudaError_t check_legacy_locked(const char *call, const Stream *stream) {
    cudaError_t error = cudaSuccess;
    if (!stream->is_legacy)
        return error;
    for (Capture *capture = captures; capture; capture = capture->next)
        if (has_blocking_stream(capture)) {
            const char *why = "the legacy default stream would depend on a blocking stream that is being captured";
            error = break_capture_locked(call, capture, cudaErrorStreamCaptureImplicit, why);
        }
    return error;
}

cudaError_t break_capture_locked(const char *call, Capture *capture, cudaError_t error, const char *why) {
    capture->is_invalid = true;
    return refuse(call, error, why);
}

cudaError_t break_capture_of(const char *call, cudaStream_t handle, const char *why) {
    Stream *stream = stream_of(handle);
    if (!num_captures || !stream)
        return cudaSuccess;
    cudaError_t error = cudaSuccess;
    pthread_mutex_lock(&state_lock);
    if (stream->capture)
        error = break_capture_locked(call, stream->capture, cudaErrorStreamCaptureUnsupported, why);
    pthread_mutex_unlock(&state_lock);
    return error;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) {
    enum cudaStreamCaptureMode before = thread_mode;
    thread_mode = *mode;
    *mode = before;
    return cudaSuccess;
}

/* ---- begin and end ---- */

Capture *active_capture_locked(uint64_t id) {
    Capture *capture = captures;
    while (capture && capture->id != id)
        capture = capture->next;
    return capture;
}

cudaError_t join_capture_locked(const char *call, Stream *stream, Capture *capture) {
    const char *why = "the legacy default stream cannot be captured";
    if (stream->is_legacy)
        return break_capture_locked(call, capture, cudaErrorStreamCaptureImplicit, why);
    if (capture->num_streams == MAX_CAPTURED_STREAMS)
        return break_capture_locked(call, capture, cudaErrorNotSupported, "too many streams in one capture");
    stream->capture = capture;
    stream->capture_index = capture->num_streams;
    stream->captured_until = 0;
    memset(stream->follows, 0, sizeof stream->follows);
    capture->streams[capture->num_streams] = stream;
    capture->num_streams++;
    return cudaSuccess;
}

static cudaError_t begin_locked(const char *call, Stream *stream, enum cudaStreamCaptureMode mode) {
    if (!stream)
        return refuse(call, cudaErrorInvalidResourceHandle, "the stream was destroyed");
    if (stream->is_legacy)
        return refuse(call, cudaErrorStreamCaptureUnsupported, "the legacy default stream cannot be captured");
    if (stream->capture)
        return refuse(call, cudaErrorIllegalState, "the stream is being captured already");
    Capture *capture = new_object_locked(CAPTURE, sizeof *capture);
    num_begun++;
    capture->id = num_begun;
    capture->mode = mode;
    capture->owner = pthread_self();
    capture->next = captures;
    captures = capture;
    num_captures++;
    return join_capture_locked(call, stream, capture);
}

cudaError_t cudaStreamBeginCapture(cudaStream_t handle, enum cudaStreamCaptureMode mode) {
    Stream *stream = stream_of(handle);
    pthread_mutex_lock(&state_lock);
    cudaError_t error = begin_locked(__func__, stream, mode);
    pthread_mutex_unlock(&state_lock);
    return error;
}

/* Returns whether a stream has work in the capture that the first one does not follow. */
static bool is_unjoined(const Capture *capture) {
    const Stream *origin = capture->streams[0];
    for (int i = 1; i < capture->num_streams; i++)
        if (capture->streams[i]->follows[i] > origin->follows[i])
            return true;
    return false;
}

static void remove_locked(Capture *capture) {
    for (int i = 0; i < capture->num_streams; i++)
        capture->streams[i]->capture = NULL;
    Capture **link = &captures;
    while (*link != capture)
        link = &(*link)->next;
    *link = capture->next;
    num_captures--;
    destroy_object_locked(capture);
}

static cudaError_t end_locked(const char *call, Stream *stream, Graph **graph) {
    if (!stream)
        return refuse(call, cudaErrorInvalidResourceHandle, "the stream was destroyed");
    Capture *capture = stream->capture;
    if (!capture)
        return refuse(call, cudaErrorIllegalState, "the stream is not being captured");
    const char *elsewhere = "the capture began in another stream";
    if (capture->streams[0] != stream)
        return break_capture_locked(call, capture, cudaErrorStreamCaptureUnmatched, elsewhere);
    bool is_bound = capture->mode != cudaStreamCaptureModeRelaxed;
    if (is_bound && !pthread_equal(capture->owner, pthread_self()))
        return refuse(call, cudaErrorStreamCaptureWrongThread, "another thread began this non-relaxed capture");
    /* From here on the capture ends, successfully or not. */
    cudaError_t error = cudaSuccess;
    if (capture->is_invalid)
        error = refuse(call, cudaErrorStreamCaptureInvalidated, "an earlier call invalidated the capture");
    else if (is_unjoined(capture))
        error = refuse(call, cudaErrorStreamCaptureUnjoined, "a stream has work that the first one does not follow");
    if (error == cudaSuccess) {
        *graph = new_object_locked(GRAPH, sizeof **graph);
        (*graph)->num_nodes = capture->num_nodes;
        (*graph)->run_ns = stream->captured_until;
        count(CAPTURES, 1);
    }
    remove_locked(capture);
    return error;
}

cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t *graph_handle) {
    Stream *stream = stream_of(handle);
    Graph *graph = NULL;
    pthread_mutex_lock(&state_lock);
    cudaError_t error = end_locked(__func__, stream, &graph);
    pthread_mutex_unlock(&state_lock);
    *graph_handle = (cudaGraph_t)graph;
    return error;
}

/* ---- queries ---- */

/* A query of the legacy stream invalidates nothing, but is refused while a blocking stream is being captured. */
static cudaError_t status_of(const char *call, cudaStream_t handle, enum cudaStreamCaptureStatus *status,
                             uint64_t *id) {
    Stream *stream = stream_of(handle);
    if (!stream)
        return refuse(call, cudaErrorInvalidResourceHandle, "the stream was destroyed");
    *status = cudaStreamCaptureStatusNone;
    *id = 0;
    if (!num_captures)
        return cudaSuccess;
    bool is_implicit = false;
    pthread_mutex_lock(&state_lock);
    for (Capture *capture = captures; capture && stream->is_legacy; capture = capture->next)
        is_implicit |= has_blocking_stream(capture);
    if (stream->capture) {
        bool is_invalid = stream->capture->is_invalid;
        *status = is_invalid ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive;
        *id = stream->capture->id;
    }
    pthread_mutex_unlock(&state_lock);
    if (is_implicit)
        return refuse(call, cudaErrorStreamCaptureImplicit, "a blocking stream is being captured");
    return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t handle, enum cudaStreamCaptureStatus *status) {
    uint64_t id;
    return status_of(__func__, handle, status, &id);
}

/* Nodes and edges are not available: graphs here are counts. */
static cudaError_t capture_info(const char *call, cudaStream_t handle, enum cudaStreamCaptureStatus *status,
                                unsigned long long *id, cudaGraph_t *graph, size_t *num_dependencies) {
    uint64_t found;
    RETURN_IF_REFUSED(status_of(call, handle, status, &found));
    if (id)
        *id = found;
    if (graph)
        *graph = NULL;
    if (num_dependencies)
        *num_dependencies = 0;
    return cudaSuccess;
}

#if CUDART_VERSION < 13000
cudaError_t cudaStreamGetCaptureInfo_v2(cudaStream_t handle, enum cudaStreamCaptureStatus *status,
                                        unsigned long long *id, cudaGraph_t *graph,
                                        const cudaGraphNode_t **dependencies, size_t *count) {
    return capture_info(__func__, handle, status, id, graph, count);
}
#define CAPTURE_INFO cudaStreamGetCaptureInfo_v3
#else
#define CAPTURE_INFO cudaStreamGetCaptureInfo
#endif

cudaError_t CAPTURE_INFO(cudaStream_t handle, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                         cudaGraph_t *graph, const cudaGraphNode_t **dependencies, const cudaGraphEdgeData **edges,
                         size_t *count) {
    return capture_info(__func__, handle, status, id, graph, count);
}
