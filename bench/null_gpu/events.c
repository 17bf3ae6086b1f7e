/* Events: a reading of a stream's clock, or a place in a capture. */
#include "null_gpu.h"
#include <string.h>

typedef enum { NEVER_RECORDED, RECORDED, CAPTURED } State;

typedef struct {
    Object object;
    bool has_timing;
    State state;
    int64_t at;                             /* RECORDED: the moment */
    uint64_t capture_id;                    /* CAPTURED: its capture, and the nodes that it follows */
    uint32_t follows[MAX_CAPTURED_STREAMS];
    int64_t captured_at;
} Event;

static Event *event_of(cudaEvent_t handle) {
    return is_object(handle, EVENT) ? (Event *)handle : NULL;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *handle, unsigned flags) {
    pthread_mutex_lock(&state_lock);
    Event *event = new_object_locked(EVENT, sizeof *event);
    pthread_mutex_unlock(&state_lock);
    event->has_timing = !(flags & cudaEventDisableTiming);
    *handle = (cudaEvent_t)event;
    return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *handle) {
    return cudaEventCreateWithFlags(handle, cudaEventDefault);
}

cudaError_t cudaEventDestroy(cudaEvent_t handle) {
    Event *event = event_of(handle);
    if (!event)
        return refuse(__func__, cudaErrorInvalidResourceHandle, "the event is already destroyed");
    pthread_mutex_lock(&state_lock);
    destroy_object_locked(event);
    pthread_mutex_unlock(&state_lock);
    return cudaSuccess;
}

static cudaError_t record_locked(const char *call, Event *event, Stream *stream) {
    if (!event || !stream)
        return refuse(call, cudaErrorInvalidResourceHandle, "the event or the stream was destroyed");
    RETURN_IF_REFUSED(check_legacy_locked(call, stream));
    Capture *capture = stream->capture;
    if (!capture) {
        event->state = RECORDED;
        event->at = next_start_locked(stream);
        return cudaSuccess;
    }
    if (capture->is_invalid)
        return refuse(call, cudaErrorStreamCaptureInvalidated, "the stream's capture is already invalid");
    event->state = CAPTURED;
    event->capture_id = capture->id;
    event->captured_at = stream->captured_until;
    memcpy(event->follows, stream->follows, sizeof event->follows);
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t stream_handle) {
    Stream *stream = stream_of(stream_handle);
    pthread_mutex_lock(&state_lock);
    cudaError_t error = record_locked(__func__, event_of(handle), stream);
    pthread_mutex_unlock(&state_lock);
    return error;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t stream_handle, unsigned flags) {
    if (flags & cudaEventRecordExternal)
        return refuse(__func__, cudaErrorNotSupported, "the null GPU has no event nodes");
    return cudaEventRecord(handle, stream_handle);
}

static void follow_locked(Stream *stream, const Event *event) {
    for (int i = 0; i < MAX_CAPTURED_STREAMS; i++)
        if (event->follows[i] > stream->follows[i])
            stream->follows[i] = event->follows[i];
    if (event->captured_at > stream->captured_until)
        stream->captured_until = event->captured_at;
}

/* A stream that waits for an event of a capture becomes part of it. */
static cudaError_t wait_captured_locked(const char *call, Stream *stream, const Event *event) {
    Capture *capture = active_capture_locked(event->capture_id);
    if (!capture) {
        const char *why = "the event was recorded in a capture that has ended";
        if (stream->capture)
            return break_capture_locked(call, stream->capture, cudaErrorCapturedEvent, why);
        return refuse(call, cudaErrorCapturedEvent, why);
    }
    if (capture->is_invalid)
        return refuse(call, cudaErrorStreamCaptureInvalidated, "the event's capture is already invalid");
    if (stream->capture && stream->capture != capture) {
        const char *why = "the stream and the event belong to different captures";
        break_capture_locked(call, stream->capture, cudaErrorStreamCaptureMerge, why);
        return break_capture_locked(call, capture, cudaErrorStreamCaptureMerge, why);
    }
    if (!stream->capture)
        RETURN_IF_REFUSED(join_capture_locked(call, stream, capture));
    follow_locked(stream, event);
    return cudaSuccess;
}

static cudaError_t wait_event_locked(const char *call, Stream *stream, const Event *event) {
    if (!event || !stream)
        return refuse(call, cudaErrorInvalidResourceHandle, "the event or the stream was destroyed");
    RETURN_IF_REFUSED(check_legacy_locked(call, stream));
    if (event->state == NEVER_RECORDED)
        return cudaSuccess;
    if (event->state == CAPTURED)
        return wait_captured_locked(call, stream, event);
    if (!stream->capture) {
        extend_locked(stream, event->at);
        return cudaSuccess;
    }
    const char *why = "a captured stream cannot wait for an event from outside its capture";
    return break_capture_locked(call, stream->capture, cudaErrorStreamCaptureIsolation, why);
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream_handle, cudaEvent_t handle, unsigned flags) {
    if (flags & cudaEventWaitExternal)
        return refuse(__func__, cudaErrorNotSupported, "the null GPU has no event nodes");
    Stream *stream = stream_of(stream_handle);
    pthread_mutex_lock(&state_lock);
    cudaError_t error = wait_event_locked(__func__, stream, event_of(handle));
    pthread_mutex_unlock(&state_lock);
    return error;
}

/* Returns the moment of an event that was recorded outside captures; 0 if it was never recorded. */
static cudaError_t moment_locked(const char *call, const Event *event, int64_t *moment) {
    *moment = 0;
    if (!event)
        return refuse(call, cudaErrorInvalidResourceHandle, "the event was destroyed");
    if (event->state == CAPTURED) {
        const char *why = "the event was last recorded in a capture, so it never happens";
        Capture *capture = active_capture_locked(event->capture_id);
        if (capture)
            return break_capture_locked(call, capture, cudaErrorCapturedEvent, why);
        return refuse(call, cudaErrorCapturedEvent, why);
    }
    if (event->state == RECORDED)
        *moment = event->at;
    return cudaSuccess;
}

static cudaError_t moment_of(const char *call, cudaEvent_t handle, int64_t *moment) {
    pthread_mutex_lock(&state_lock);
    cudaError_t error = moment_locked(call, event_of(handle), moment);
    pthread_mutex_unlock(&state_lock);
    RETURN_IF_REFUSED(error);
    return check_unsafe(call);
}

cudaError_t cudaEventQuery(cudaEvent_t handle) {
    int64_t moment;
    RETURN_IF_REFUSED(moment_of(__func__, handle, &moment));
    count(EVENT_QUERIES, 1);
    return moment <= now_ns() ? cudaSuccess : answer(cudaErrorNotReady);
}

cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
    int64_t moment;
    RETURN_IF_REFUSED(moment_of(__func__, handle, &moment));
    wait_until(EVENT_WAITS, moment);
    return cudaSuccess;
}

static cudaError_t elapsed_time(const char *call, float *milliseconds, cudaEvent_t start, cudaEvent_t end) {
    Event *first = event_of(start);
    Event *second = event_of(end);
    bool has_both = first && second && first->has_timing && second->has_timing;
    if (!has_both || first->state == NEVER_RECORDED || second->state == NEVER_RECORDED)
        return refuse(call, cudaErrorInvalidResourceHandle, "both events must have timing and be recorded");
    int64_t began;
    int64_t ended;
    pthread_mutex_lock(&state_lock);
    cudaError_t error = moment_locked(call, first, &began);
    if (error == cudaSuccess)
        error = moment_locked(call, second, &ended);
    pthread_mutex_unlock(&state_lock);
    RETURN_IF_REFUSED(error);
    int64_t now = now_ns();
    if (began > now || ended > now)
        return answer(cudaErrorNotReady);
    *milliseconds = (float)(1e-6 * (double)(ended - began));
    return cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end) {
    return elapsed_time(__func__, milliseconds, start, end);
}

#if CUDART_VERSION < 13000
cudaError_t cudaEventElapsedTime_v2(float *milliseconds, cudaEvent_t start, cudaEvent_t end) {
    return elapsed_time(__func__, milliseconds, start, end);
}
#endif

/* Memory and events of other processes: two processes do not share a device here. */
cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t *ipc, cudaEvent_t handle) {
    return refuse(__func__, cudaErrorNotSupported, "the null GPU is not shared between processes");
}

cudaError_t cudaIpcOpenEventHandle(cudaEvent_t *handle, cudaIpcEventHandle_t ipc) {
    return refuse(__func__, cudaErrorNotSupported, "the null GPU is not shared between processes");
}

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *ipc, void *pointer) {
    return refuse(__func__, cudaErrorNotSupported, "the null GPU is not shared between processes");
}

cudaError_t cudaIpcOpenMemHandle(void **pointer, cudaIpcMemHandle_t ipc, unsigned flags) {
    return refuse(__func__, cudaErrorNotSupported, "the null GPU is not shared between processes");
}

cudaError_t cudaIpcCloseMemHandle(void *pointer) {
    return refuse(__func__, cudaErrorNotSupported, "the null GPU is not shared between processes");
}
