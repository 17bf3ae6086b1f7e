/* The driver's functions that Triton and torch call. Their errors have the runtime's numbers, except for one. */
#include "null_gpu.h"
#include <string.h>

#define MAX_TENSOR_MAP_BOX 256

/* The targets of handles: only their addresses matter. */
static char context;
static char module;
static char function;

static CUresult as_driver(cudaError_t error) {
    return error == cudaErrorInvalidConfiguration ? CUDA_ERROR_INVALID_VALUE : (CUresult)error;
}

#define RETURN_IF_DRIVER_REFUSED(expression)        \
    do {                                            \
        CUresult refused_ = as_driver(expression);  \
        if (refused_ != CUDA_SUCCESS)               \
            return refused_;                        \
    } while (0)

CUresult cuInit(unsigned flags) {
    return CUDA_SUCCESS;
}

CUresult cuDriverGetVersion(int *version) {
    *version = CUDA_VERSION;
    return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char **text) {
    *text = cudaGetErrorString((cudaError_t)error);
    return CUDA_SUCCESS;
}

CUresult cuGetErrorName(CUresult error, const char **text) {
    *text = cudaGetErrorName((cudaError_t)error);
    return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    *device = 0;
    return ordinal == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

CUresult cuDeviceGetCount(int *number) {
    *number = 1;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute which, CUdevice device) {
    *value = device_attribute((int)which);
    return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *current) {
    *current = (CUcontext)&context;
    return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext current) {
    return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice *device) {
    *device = 0;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetLimit(size_t *value, CUlimit limit) {
    *value = 0;
    return CUDA_SUCCESS;
}

CUresult cuCtxSetLimit(CUlimit limit, size_t value) {
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *primary, CUdevice device) {
    *primary = (CUcontext)&context;
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *is_active) {
    *flags = 0;
    *is_active = 1;
    return CUDA_SUCCESS;
}

/* Loading allocates device memory, so a capture forbids it: kernels must be launched once before it. */
CUresult cuModuleLoadData(CUmodule *loaded, const void *image) {
    RETURN_IF_DRIVER_REFUSED(check_unsafe(__func__));
    *loaded = (CUmodule)&module;
    return CUDA_SUCCESS;
}

CUresult cuModuleUnload(CUmodule unloaded) {
    RETURN_IF_DRIVER_REFUSED(check_unsafe(__func__));
    return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction *found, CUmodule within, const char *name) {
    *found = (CUfunction)&function;
    return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction of) {
    *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? MAX_THREADS_PER_BLOCK : 0;
    return CUDA_SUCCESS;
}

CUresult cuFuncSetAttribute(CUfunction of, CUfunction_attribute attribute, int value) {
    bool is_shared = attribute == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
    if (is_shared && value > MAX_SHARED_BYTES)
        return as_driver(refuse(__func__, cudaErrorInvalidValue, "it exceeds the shared memory of a block"));
    return CUDA_SUCCESS;
}

CUresult cuFuncSetCacheConfig(CUfunction of, CUfunc_cache config) {
    return CUDA_SUCCESS;
}

CUresult cuOccupancyMaxActiveClusters(int *clusters, CUfunction of, const CUlaunchConfig *config) {
    *clusters = 66;
    return CUDA_SUCCESS;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction launched, void **arguments, void **extra) {
    const unsigned grid[3] = {config->gridDimX, config->gridDimY, config->gridDimZ};
    const unsigned block[3] = {config->blockDimX, config->blockDimY, config->blockDimZ};
    RETURN_IF_DRIVER_REFUSED(check_shape(__func__, grid, block, config->sharedMemBytes));
    return as_driver(launch(__func__, config->hStream));
}

CUresult cuLaunchKernel(CUfunction launched, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                        unsigned block_y, unsigned block_z, unsigned shared, CUstream stream, void **arguments,
                        void **extra) {
    const unsigned grid[3] = {grid_x, grid_y, grid_z};
    const unsigned block[3] = {block_x, block_y, block_z};
    RETURN_IF_DRIVER_REFUSED(check_shape(__func__, grid, block, shared));
    return as_driver(launch(__func__, stream));
}

/* Triton queries this for every tensor: memory that no device can reach is refused. */
CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr pointer) {
    Piece piece = piece_of((const void *)pointer);
    if (piece.place == PAGEABLE)
        return as_driver(refuse(__func__, cudaErrorInvalidValue, "the device cannot reach this memory"));
    switch (attribute) {
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
        *(CUdeviceptr *)value = pointer;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        *(unsigned *)value = piece.place == DEVICE ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
        *(int *)value = 0;
        return CUDA_SUCCESS;
    default:
        return as_driver(refuse(__func__, cudaErrorNotSupported, "the null GPU does not know this attribute"));
    }
}

CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *base,
                                const cuuint64_t *sizes, const cuuint64_t *strides, const cuuint32_t *box,
                                const cuuint32_t *element_strides, CUtensorMapInterleave interleave,
                                CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                                CUtensorMapFloatOOBfill fill) {
    for (cuuint32_t i = 0; i < rank; i++)
        if (box[i] == 0 || box[i] > MAX_TENSOR_MAP_BOX)
            return as_driver(refuse(__func__, cudaErrorInvalidValue, "a side of the box is 0 or longer than 256"));
    memset(map, 0, sizeof *map);
    return CUDA_SUCCESS;
}
