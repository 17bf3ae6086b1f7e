/* Kernels that CUDA's compiler put into torch, and the launches of all kernels. */
#include "null_gpu.h"
#include <dlfcn.h>
#include <string.h>

cudaError_t launch(const char *call, cudaStream_t stream) {
    Work work = {
        .counted_as = KERNELS,
        .num_nodes = 1,
        .launched_ns = settings.kernel_ns,
        .captured_ns = settings.node_ns,
    };
    return enqueue(call, stream, work, NULL);
}

cudaError_t check_shape(const char *call, const unsigned grid[3], const unsigned block[3], size_t shared_bytes) {
    const unsigned most_grid[3] = {MAX_GRID_X, MAX_GRID_Y, MAX_GRID_Y};
    const unsigned most_block[3] = {1024, 1024, 64};
    for (int i = 0; i < 3; i++) {
        if (!grid[i] || grid[i] > most_grid[i])
            return refuse(call, cudaErrorInvalidConfiguration, "a side of the grid is 0 or too long");
        if (!block[i] || block[i] > most_block[i])
            return refuse(call, cudaErrorInvalidConfiguration, "a side of the block is 0 or too long");
    }
    if ((uint64_t)block[0] * block[1] * block[2] > MAX_THREADS_PER_BLOCK)
        return refuse(call, cudaErrorInvalidConfiguration, "the block has too many threads");
    if (shared_bytes > MAX_SHARED_BYTES)
        return refuse(call, cudaErrorInvalidValue, "it exceeds the shared memory of a block");
    return cudaSuccess;
}

static cudaError_t launch_shaped(const char *call, dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream) {
    const unsigned grid_sides[3] = {grid.x, grid.y, grid.z};
    const unsigned block_sides[3] = {block.x, block.y, block.z};
    RETURN_IF_REFUSED(check_shape(call, grid_sides, block_sides, shared_bytes));
    return launch(call, stream);
}

cudaError_t cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared,
                             cudaStream_t stream) {
    return launch_shaped(__func__, grid, block, shared, stream);
}

cudaError_t cudaLaunchCooperativeKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared,
                                        cudaStream_t stream) {
    return launch_shaped(__func__, grid, block, shared, stream);
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *function, void **arguments) {
    return launch_shaped(__func__, config->gridDim, config->blockDim, config->dynamicSmemBytes, config->stream);
}

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *function) {
    memset(attributes, 0, sizeof *attributes);
    attributes->maxThreadsPerBlock = MAX_THREADS_PER_BLOCK;
    attributes->numRegs = 32;
    attributes->ptxVersion = 90;
    attributes->binaryVersion = 90;
    attributes->maxDynamicSharedSizeBytes = 49152;
    return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void *function, enum cudaFuncAttribute attribute, int value) {
    bool is_shared = attribute == cudaFuncAttributeMaxDynamicSharedMemorySize;
    if (is_shared && value > MAX_SHARED_BYTES)
        return refuse(__func__, cudaErrorInvalidValue, "it exceeds the shared memory of a block");
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *function, int threads,
                                                                   size_t shared, unsigned flags) {
    *blocks = 2;
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *function, int threads,
                                                          size_t shared) {
    *blocks = 2;
    return cudaSuccess;
}

/* ---- calls of nvcc's code: it registers kernels when a library is loaded, and launches them in two calls ---- */

static __thread struct {
    dim3 grid;
    dim3 block;
    size_t shared;
    cudaStream_t stream;
} pushed;

void **__cudaRegisterFatBinary(void *binary) {
    static void *image;
    return &image;
}

void __cudaRegisterFatBinaryEnd(void **image) {
}

void __cudaUnregisterFatBinary(void **image) {
}

void __cudaRegisterFunction(void **image, const char *host, char *device, const char *name, int limit, void *thread_id,
                            void *block_id, void *block_dim, void *grid_dim, int *warp_size) {
}

void __cudaRegisterVar(void **image, char *host, char *device, const char *name, int is_external, size_t size,
                       int is_constant, int is_global) {
}

char __cudaInitModule(void **image) {
    return 1;
}

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
    pushed.grid = grid;
    pushed.block = block;
    pushed.shared = shared;
    pushed.stream = stream;
    return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    *grid = pushed.grid;
    *block = pushed.block;
    *shared = pushed.shared;
    *(cudaStream_t *)stream = pushed.stream;
    return cudaSuccess;
}

cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function) {
    *kernel = (cudaKernel_t)function;
    return cudaSuccess;
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments, size_t shared,
                               cudaStream_t stream) {
    return launch_shaped(__func__, grid, block, shared, stream);
}

/* ---- the driver's functions, as torch looks them up: those defined here are found ---- */

static cudaError_t entry_point(const char *name, void **function, enum cudaDriverEntryPointQueryResult *result) {
    *function = dlsym(RTLD_DEFAULT, name);
    if (result)
        *result = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                             unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *result) {
    return entry_point(name, function, result);
}

#if CUDART_VERSION < 13000
cudaError_t cudaGetDriverEntryPoint(const char *name, void **function, unsigned long long flags,
                                    enum cudaDriverEntryPointQueryResult *result) {
    return entry_point(name, function, result);
}
#endif
