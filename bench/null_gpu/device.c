/* The device, with the properties of an H200 whatever its name and memory; and the names and texts of errors. */
#include "null_gpu.h"
#include <stdio.h>
#include <string.h>

#define NUM_PROCESSORS 132
#define MAJOR 9
#define MINOR 0
#define NUM_REGISTERS 65536
#define MAX_THREADS_PER_PROCESSOR 2048
#define SHARED_BYTES 49152
#define SHARED_BYTES_OF_PROCESSOR 233472
#define L2_BYTES 62914560
#define MEMORY_BUS_BITS 6144

static cudaError_t check_device(const char *call, int device) {
    return device == 0 ? cudaSuccess : refuse(call, cudaErrorInvalidDevice, "there is one device, 0");
}

cudaError_t cudaGetDeviceCount(int *number) {
    *number = 1;
    return cudaSuccess;
}

cudaError_t cudaGetDevice(int *device) {
    *device = 0;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
    return check_device(__func__, device);
}

cudaError_t cudaDriverGetVersion(int *version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int *can_access, int device, int peer) {
    *can_access = 0;
    return cudaSuccess;
}

cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags) {
    return refuse(__func__, cudaErrorInvalidDevice, "there is one device, 0");
}

cudaError_t cudaDeviceGetPCIBusId(char *text, int size, int device) {
    snprintf(text, (size_t)size, "0000:01:00.0");
    return check_device(__func__, device);
}

int device_attribute(int which) {
    switch (which) {
    case cudaDevAttrMaxThreadsPerBlock:
    case cudaDevAttrMaxBlockDimX:
    case cudaDevAttrMaxBlockDimY:
        return MAX_THREADS_PER_BLOCK;
    case cudaDevAttrMaxBlockDimZ:
        return 64;
    case cudaDevAttrMaxGridDimX:
        return MAX_GRID_X;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ:
        return MAX_GRID_Y;
    case cudaDevAttrMaxSharedMemoryPerBlock:
        return SHARED_BYTES;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
        return MAX_SHARED_BYTES;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
        return SHARED_BYTES_OF_PROCESSOR;
    case cudaDevAttrWarpSize:
        return 32;
    case cudaDevAttrMultiProcessorCount:
        return NUM_PROCESSORS;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
        return MAX_THREADS_PER_PROCESSOR;
    case cudaDevAttrMaxRegistersPerBlock:
    case cudaDevAttrMaxRegistersPerMultiprocessor:
        return NUM_REGISTERS;
    case cudaDevAttrComputeCapabilityMajor:
        return MAJOR;
    case cudaDevAttrComputeCapabilityMinor:
        return MINOR;
    case cudaDevAttrClockRate:
        return 1980000;
    case cudaDevAttrMemoryClockRate:
        return 3201000;
    case cudaDevAttrGlobalMemoryBusWidth:
        return MEMORY_BUS_BITS;
    case cudaDevAttrL2CacheSize:
        return L2_BYTES;
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrConcurrentKernels:
    case cudaDevAttrStreamPrioritiesSupported:
    case cudaDevAttrCooperativeLaunch:
    case cudaDevAttrCanMapHostMemory:
    case cudaDevAttrMemoryPoolsSupported:
        return 1;
    default:
        return 0;
    }
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr which, int device) {
    *value = device_attribute(which);
    return check_device(__func__, device);
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device) {
    RETURN_IF_REFUSED(check_device(__func__, device));
    memset(properties, 0, sizeof *properties);
    snprintf(properties->name, sizeof properties->name, "%s", settings.name);
    properties->totalGlobalMem = settings.memory_bytes;
    properties->sharedMemPerBlock = SHARED_BYTES;
    properties->sharedMemPerBlockOptin = MAX_SHARED_BYTES;
    properties->sharedMemPerMultiprocessor = SHARED_BYTES_OF_PROCESSOR;
    properties->regsPerBlock = NUM_REGISTERS;
    properties->regsPerMultiprocessor = NUM_REGISTERS;
    properties->warpSize = 32;
    properties->maxThreadsPerBlock = MAX_THREADS_PER_BLOCK;
    properties->maxThreadsPerMultiProcessor = MAX_THREADS_PER_PROCESSOR;
    properties->maxBlocksPerMultiProcessor = 32;
    properties->maxThreadsDim[0] = 1024;
    properties->maxThreadsDim[1] = 1024;
    properties->maxThreadsDim[2] = 64;
    properties->maxGridSize[0] = MAX_GRID_X;
    properties->maxGridSize[1] = MAX_GRID_Y;
    properties->maxGridSize[2] = MAX_GRID_Y;
    properties->major = MAJOR;
    properties->minor = MINOR;
    properties->multiProcessorCount = NUM_PROCESSORS;
    properties->l2CacheSize = L2_BYTES;
    properties->memoryBusWidth = MEMORY_BUS_BITS;
    properties->unifiedAddressing = 1;
    properties->canMapHostMemory = 1;
    properties->concurrentKernels = 1;
    properties->cooperativeLaunch = 1;
    properties->memoryPoolsSupported = 1;
    properties->totalConstMem = 65536;
    properties->textureAlignment = 512;
    properties->asyncEngineCount = 3;
    return cudaSuccess;
}

/* ---- pools: torch queries them, and uses them only if it is configured to ---- */

cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int device) {
    *pool = (cudaMemPool_t)&settings;
    return check_device(__func__, device);
}

cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr attribute, void *value) {
    *(uint64_t *)value = 0;
    return cudaSuccess;
}

cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr attribute, void *value) {
    return cudaSuccess;
}

cudaError_t cudaMemPoolSetAccess(cudaMemPool_t pool, const struct cudaMemAccessDesc *access, size_t count) {
    return cudaSuccess;
}

cudaError_t cudaMemPoolTrimTo(cudaMemPool_t pool, size_t bytes) {
    return cudaSuccess;
}

cudaError_t cudaProfilerStart(void) {
    return cudaSuccess;
}

cudaError_t cudaProfilerStop(void) {
    return cudaSuccess;
}

/* ---- errors ---- */

cudaError_t cudaGetLastError(void) {
    return last_error(true);
}

cudaError_t cudaPeekAtLastError(void) {
    return last_error(false);
}

static const struct {
    cudaError_t error;
    const char *name;
    const char *text;
} ERRORS[] = {
#define ERROR(error, text) {error, #error, text}
    ERROR(cudaSuccess, "no error"),
    ERROR(cudaErrorInvalidValue, "invalid argument"),
    ERROR(cudaErrorMemoryAllocation, "out of memory"),
    ERROR(cudaErrorInvalidConfiguration, "invalid configuration argument"),
    ERROR(cudaErrorInvalidDevice, "invalid device ordinal"),
    ERROR(cudaErrorInvalidResourceHandle, "invalid resource handle"),
    ERROR(cudaErrorIllegalState, "the operation cannot be performed in the present state"),
    ERROR(cudaErrorNotReady, "device not ready"),
    ERROR(cudaErrorHostMemoryAlreadyRegistered, "part or all of the requested memory range is already mapped"),
    ERROR(cudaErrorHostMemoryNotRegistered, "pointer does not correspond to a registered memory region"),
    ERROR(cudaErrorNotSupported, "operation not supported"),
    ERROR(cudaErrorStreamCaptureUnsupported, "operation not permitted when stream is capturing"),
    ERROR(cudaErrorStreamCaptureInvalidated, "operation failed due to a previous error during capture"),
    ERROR(cudaErrorStreamCaptureMerge, "operation would result in a merge of separate capture sequences"),
    ERROR(cudaErrorStreamCaptureUnmatched, "capture was not ended in the same stream as it began"),
    ERROR(cudaErrorStreamCaptureUnjoined, "capturing stream has unjoined work"),
    ERROR(cudaErrorStreamCaptureIsolation, "dependency created on uncaptured work in another stream"),
    ERROR(cudaErrorStreamCaptureImplicit,
          "operation would make the legacy stream depend on a capturing blocking stream"),
    ERROR(cudaErrorCapturedEvent, "operation not permitted on an event last recorded in a capturing stream"),
    ERROR(cudaErrorStreamCaptureWrongThread,
          "attempt to terminate a thread-local capture sequence from another thread"),
#undef ERROR
};

#define NUM_ERRORS (sizeof ERRORS / sizeof ERRORS[0])

const char *cudaGetErrorName(cudaError_t error) {
    for (size_t i = 0; i < NUM_ERRORS; i++)
        if (ERRORS[i].error == error)
            return ERRORS[i].name;
    return "unrecognized error code";
}

const char *cudaGetErrorString(cudaError_t error) {
    for (size_t i = 0; i < NUM_ERRORS; i++)
        if (ERRORS[i].error == error)
            return ERRORS[i].text;
    return "unrecognized error code";
}
