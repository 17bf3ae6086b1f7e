/* Streams: each has a clock. Streams run concurrently without slowing each other down. */
#include "null_gpu.h"

#define LEAST_PRIORITY 0
#define GREATEST_PRIORITY (-5)

pthread_mutex_t state_lock = PTHREAD_MUTEX_INITIALIZER;

static Stream legacy = {.object = {.kind = STREAM}, .is_legacy = true, .is_blocking = true};
static __thread Stream *of_thread;
/* Clocks only advance, so the latest moment of all streams, destroyed ones included, is known without a search. */
static int64_t device_until;
static int64_t blocking_until;

static int64_t later(int64_t left, int64_t right) {
    return left > right ? left : right;
}

/* This thread's default stream is made when it is first used, and outlives the thread: its work may continue. */
static Stream *stream_of_thread(void) {
    if (!of_thread) {
        pthread_mutex_lock(&state_lock);
        of_thread = new_object_locked(STREAM, sizeof *of_thread);
        pthread_mutex_unlock(&state_lock);
        of_thread->is_blocking = true;
    }
    return of_thread;
}

Stream *stream_of(cudaStream_t handle) {
    if (!handle || handle == cudaStreamLegacy)
        return &legacy;
    if (handle == cudaStreamPerThread)
        return stream_of_thread();
    return is_object(handle, STREAM) ? (Stream *)handle : NULL;
}

/* Returns when the stream's next work begins. The legacy stream and blocking ones wait for each other. */
int64_t next_start_locked(const Stream *stream) {
    int64_t start = later(now_ns(), stream->busy_until);
    if (stream->is_legacy)
        return later(start, blocking_until);
    return stream->is_blocking ? later(start, legacy.busy_until) : start;
}

void extend_locked(Stream *stream, int64_t moment) {
    stream->busy_until = later(stream->busy_until, moment);
    device_until = later(device_until, stream->busy_until);
    if (stream->is_blocking && !stream->is_legacy)
        blocking_until = later(blocking_until, stream->busy_until);
}

int64_t device_done_locked(void) {
    return device_until;
}

static cudaError_t enqueue_locked(const char *call, Stream *stream, Work work, int64_t *done_at) {
    if (!stream)
        return refuse(call, cudaErrorInvalidResourceHandle, "the stream was destroyed");
    RETURN_IF_REFUSED(check_legacy_locked(call, stream));
    Capture *capture = stream->capture;
    if (capture) {
        if (capture->is_invalid)
            return refuse(call, cudaErrorStreamCaptureInvalidated, "the stream's capture is already invalid");
        capture->num_nodes += work.num_nodes;
        stream->follows[stream->capture_index]++;
        stream->captured_until += work.captured_ns;
        return cudaSuccess;
    }
    *done_at = later(next_start_locked(stream), work.not_before) + work.launched_ns;
    extend_locked(stream, *done_at);
    count(work.counted_as, 1);
    return cudaSuccess;
}

cudaError_t enqueue(const char *call, cudaStream_t handle, Work work, int64_t *done_at) {
    Stream *stream = stream_of(handle);
    int64_t done = 0;
    pthread_mutex_lock(&state_lock);
    cudaError_t error = enqueue_locked(call, stream, work, &done);
    pthread_mutex_unlock(&state_lock);
    if (done_at)
        *done_at = done;
    return error;
}

/* Returns the moment at which all work in the stream is done; refused where the query is forbidden. */
static cudaError_t done_of(const char *call, cudaStream_t handle, int64_t *done) {
    Stream *stream = stream_of(handle);
    if (!stream)
        return refuse(call, cudaErrorInvalidResourceHandle, "the stream was destroyed");
    RETURN_IF_REFUSED(break_capture_of(call, handle, "the stream is being captured, so its work does not run"));
    pthread_mutex_lock(&state_lock);
    cudaError_t error = check_legacy_locked(call, stream);
    *done = later(stream->busy_until, stream->is_legacy ? blocking_until : 0);
    pthread_mutex_unlock(&state_lock);
    RETURN_IF_REFUSED(error);
    return check_unsafe(call);
}

cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
    int64_t done;
    RETURN_IF_REFUSED(done_of(__func__, handle, &done));
    wait_until(STREAM_WAITS, done);
    return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t handle) {
    int64_t done;
    RETURN_IF_REFUSED(done_of(__func__, handle, &done));
    count(STREAM_QUERIES, 1);
    return done <= now_ns() ? cudaSuccess : answer(cudaErrorNotReady);
}

cudaError_t cudaDeviceSynchronize(void) {
    RETURN_IF_REFUSED(check_no_capture(__func__));
    pthread_mutex_lock(&state_lock);
    int64_t done = device_until;
    pthread_mutex_unlock(&state_lock);
    wait_until(DEVICE_WAITS, done);
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *handle, unsigned flags, int priority) {
    pthread_mutex_lock(&state_lock);
    Stream *stream = new_object_locked(STREAM, sizeof *stream);
    pthread_mutex_unlock(&state_lock);
    stream->is_blocking = !(flags & cudaStreamNonBlocking);
    stream->priority = priority;
    if (priority > LEAST_PRIORITY)
        stream->priority = LEAST_PRIORITY;
    if (priority < GREATEST_PRIORITY)
        stream->priority = GREATEST_PRIORITY;
    *handle = (cudaStream_t)stream;
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *handle, unsigned flags) {
    return cudaStreamCreateWithPriority(handle, flags, LEAST_PRIORITY);
}

cudaError_t cudaStreamCreate(cudaStream_t *handle) {
    return cudaStreamCreateWithPriority(handle, cudaStreamDefault, LEAST_PRIORITY);
}

/* Returns at once; the stream's work runs to its end. */
cudaError_t cudaStreamDestroy(cudaStream_t handle) {
    Stream *stream = stream_of(handle);
    if (!stream || stream->is_legacy || stream == of_thread)
        return refuse(__func__, cudaErrorInvalidResourceHandle, "there is no such stream, or it is a default one");
    RETURN_IF_REFUSED(break_capture_of(__func__, handle, "the stream is being captured"));
    pthread_mutex_lock(&state_lock);
    destroy_object_locked(stream);
    pthread_mutex_unlock(&state_lock);
    return cudaSuccess;
}

cudaError_t cudaStreamGetPriority(cudaStream_t handle, int *priority) {
    Stream *stream = stream_of(handle);
    if (!stream)
        return refuse(__func__, cudaErrorInvalidResourceHandle, "the stream was destroyed");
    *priority = stream->priority;
    return cudaSuccess;
}

cudaError_t cudaStreamGetFlags(cudaStream_t handle, unsigned *flags) {
    Stream *stream = stream_of(handle);
    if (!stream)
        return refuse(__func__, cudaErrorInvalidResourceHandle, "the stream was destroyed");
    *flags = stream->is_blocking ? cudaStreamDefault : cudaStreamNonBlocking;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = LEAST_PRIORITY;
    *greatest = GREATEST_PRIORITY;
    return cudaSuccess;
}

/* A host function called by the device would need a thread that follows the clocks. */
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *argument) {
    return refuse(__func__, cudaErrorNotSupported, "the null GPU calls no functions on the host");
}

cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void *argument, unsigned flags) {
    return refuse(__func__, cudaErrorNotSupported, "the null GPU calls no functions on the host");
}
