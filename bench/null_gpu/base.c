/* Settings, time, counts and the report, refusals, and the objects behind handles. */
#include "null_gpu.h"
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* The kernel wakes a sleeping thread about this much too late, so the rest of a wait polls the clock. */
#define WAKE_NS 50000
/* The number of destroyed objects of a kind that are kept before the oldest one is reused. */
#define NUM_KEPT 1024
#define MAX_TOLD 256

Settings settings;

static _Atomic int64_t counts[NUM_COUNTS];
static _Atomic int64_t waited_ns[NUM_COUNTS];
static __thread cudaError_t thread_error;

static const char *const COUNT_NAMES[NUM_COUNTS] = {
    [KERNELS] = "kernels",
    [GRAPH_LAUNCHES] = "graph_launches",
    [GRAPH_NODES] = "graph_nodes",
    [CAPTURES] = "captures",
    [COPIES] = "copies",
    [COPIED_BYTES] = "copied_bytes",
    [FILLS] = "fills",
    [ALLOCATIONS] = "allocations",
    [FREES] = "frees",
    [STREAM_QUERIES] = "stream_queries",
    [EVENT_QUERIES] = "event_queries",
    [REFUSALS] = "refusals",
    [STREAM_WAITS] = "stream_waits",
    [EVENT_WAITS] = "event_waits",
    [DEVICE_WAITS] = "device_waits",
    [COPY_WAITS] = "copy_waits",
    [FREE_WAITS] = "free_waits",
};

/* ---- settings ---- */

static double setting(const char *name, double otherwise) {
    const char *text = getenv(name);
    return text ? atof(text) : otherwise;
}

/* Prints one line for each process that called CUDA. Counts with a time are the host's waits. */
static void report(void) {
    bool is_used = false;
    for (int i = 0; i < NUM_COUNTS; i++)
        is_used |= counts[i] != 0;
    if (!is_used)
        return;
    char line[2048];
    int length = snprintf(line, sizeof line, "null_gpu: process %d:", (int)getpid());
    for (int i = 0; i < NUM_COUNTS; i++) {
        const char *comma = i ? "," : "";
        long long number = counts[i];
        length += snprintf(line + length, sizeof line - length, "%s %s %lld", comma, COUNT_NAMES[i], number);
        if (i >= STREAM_WAITS)
            length += snprintf(line + length, sizeof line - length, " (%.3f ms)", 1e-6 * waited_ns[i]);
    }
    fprintf(stderr, "%s\n", line);
}

__attribute__((constructor)) static void begin(void) {
    settings.kernel_ns = (int64_t)setting("NULL_GPU_KERNEL_NS", 0);
    settings.node_ns = (int64_t)setting("NULL_GPU_NODE_NS", 0);
    settings.copy_bytes_per_ns = setting("NULL_GPU_COPY_GB_S", 0);
    settings.memory_bytes = (size_t)(setting("NULL_GPU_MEMORY_GIB", 139) * (1 << 30));
    settings.name = getenv("NULL_GPU_NAME");
    if (!settings.name)
        settings.name = "null GPU";
    settings.is_strict = setting("NULL_GPU_STRICT", 1) != 0;
    settings.is_reporting = setting("NULL_GPU_REPORT", 0) != 0;
    if (settings.is_reporting)
        atexit(report);
}

/* ---- counts and time ---- */

void count(Count which, int64_t by) {
    atomic_fetch_add_explicit(&counts[which], by, memory_order_relaxed);
}

/* Returns a count by its name, or -1: for tests and for scripts that call it through ctypes. */
__attribute__((visibility("default"))) int64_t null_gpu_count(const char *name) {
    for (int i = 0; i < NUM_COUNTS; i++)
        if (strcmp(COUNT_NAMES[i], name) == 0)
            return counts[i];
    return -1;
}

int64_t now_ns(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

void wait_until(Count which, int64_t moment) {
    int64_t began = now_ns();
    int64_t now = began;
    while (now < moment) {
        int64_t left = moment - now;
        if (left > WAKE_NS) {
            int64_t sleep_ns = left - WAKE_NS;
            struct timespec time = {sleep_ns / 1000000000, sleep_ns % 1000000000};
            nanosleep(&time, NULL);
        }
        now = now_ns();
    }
    count(which, 1);
    atomic_fetch_add_explicit(&waited_ns[which], now - began, memory_order_relaxed);
}

/* ---- refusals ---- */

/* Returns whether this call is refused with this error for the first time. */
static bool is_news(const char *call, cudaError_t error) {
    static struct {
        const char *call;
        cudaError_t error;
    } told[MAX_TOLD];
    static int num_told;
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    bool is_new = true;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < num_told; i++)
        if (told[i].call == call && told[i].error == error)
            is_new = false;
    if (is_new && num_told < MAX_TOLD) {
        told[num_told].call = call;
        told[num_told].error = error;
        num_told++;
    }
    pthread_mutex_unlock(&lock);
    return is_new;
}

cudaError_t refuse(const char *call, cudaError_t error, const char *why) {
    count(REFUSALS, 1);
    if (settings.is_strict && is_news(call, error)) {
        const char *name = cudaGetErrorName(error);
        fprintf(stderr, "null_gpu: %s refused: %s (%d): %s\n", call, name, (int)error, why);
    }
    /* The driver and cuBLAS do not touch the runtime's last error. */
    bool is_runtime = strstr(call, "cuda") != NULL;
    return is_runtime ? answer(error) : error;
}

cudaError_t answer(cudaError_t error) {
    thread_error = error;
    return error;
}

cudaError_t last_error(bool is_cleared) {
    cudaError_t error = thread_error;
    if (is_cleared)
        thread_error = cudaSuccess;
    return error;
}

/* ---- objects ---- */

static struct {
    Object *oldest;
    Object *newest;
    int count;
} destroyed[NUM_OBJECTS];

void *new_object_locked(Kind kind, size_t size) {
    Object *object = NULL;
    if (destroyed[kind].count > NUM_KEPT) {
        object = destroyed[kind].oldest;
        destroyed[kind].oldest = object->next_destroyed;
        destroyed[kind].count--;
        memset(object, 0, size);
    } else {
        object = calloc(1, size);
    }
    if (!object)
        abort();
    object->kind = kind;
    return object;
}

void destroy_object_locked(void *pointer) {
    Object *object = pointer;
    Kind kind = object->kind;
    object->kind = NO_OBJECT;
    object->next_destroyed = NULL;
    if (destroyed[kind].count)
        destroyed[kind].newest->next_destroyed = object;
    else
        destroyed[kind].oldest = object;
    destroyed[kind].newest = object;
    destroyed[kind].count++;
}

bool is_object(const void *object, Kind kind) {
    return object && ((const Object *)object)->kind == kind;
}
