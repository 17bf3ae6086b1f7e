/* cuBLAS, without its headers: only the stream of a product matters, and the handle has it. */
#include "null_gpu.h"
#include <stdlib.h>

enum { SUCCESS = 0, ALLOCATION_FAILED = 3, EXECUTION_FAILED = 13 }; /* cublasStatus_t */

typedef struct {
    cudaStream_t stream;
    int math_mode;
    int pointer_mode; /* 0: scalars are in host memory */
} Handle;

/* ---- handles ---- */

/* Allocates device memory, so a capture forbids it. */
int cublasCreate_v2(Handle **handle) {
    if (check_unsafe(__func__) != cudaSuccess)
        return ALLOCATION_FAILED;
    *handle = calloc(1, sizeof **handle);
    return *handle ? SUCCESS : ALLOCATION_FAILED;
}

int cublasDestroy_v2(Handle *handle) {
    free(handle);
    return SUCCESS;
}

int cublasSetStream_v2(Handle *handle, cudaStream_t stream) {
    handle->stream = stream;
    return SUCCESS;
}

int cublasGetStream_v2(Handle *handle, cudaStream_t *stream) {
    *stream = handle->stream;
    return SUCCESS;
}

int cublasSetWorkspace_v2(Handle *handle, void *workspace, size_t size) {
    return SUCCESS;
}

int cublasSetMathMode(Handle *handle, int mode) {
    handle->math_mode = mode;
    return SUCCESS;
}

int cublasGetMathMode(Handle *handle, int *mode) {
    *mode = handle->math_mode;
    return SUCCESS;
}

int cublasSetPointerMode_v2(Handle *handle, int mode) {
    handle->pointer_mode = mode;
    return SUCCESS;
}

int cublasGetPointerMode_v2(Handle *handle, int *mode) {
    *mode = handle->pointer_mode;
    return SUCCESS;
}

/* ---- products: the arguments after the handle are ignored ---- */

#define PRODUCT(name)                                                                        \
    int name(Handle *handle) {                                                               \
        return launch(#name, handle->stream) == cudaSuccess ? SUCCESS : EXECUTION_FAILED;    \
    }

PRODUCT(cublasGemmEx)
PRODUCT(cublasGemmStridedBatchedEx)
PRODUCT(cublasSgemmEx)
PRODUCT(cublasSgemm_v2)
PRODUCT(cublasDgemm_v2)
PRODUCT(cublasSgemmStridedBatched)
PRODUCT(cublasDgemmStridedBatched)
PRODUCT(cublasSgemv_v2)
PRODUCT(cublasDgemv_v2)

/* ---- cuBLASLt ---- */

/* The contents of descriptors do not matter. */
static char described;

static int make(void **object) {
    *object = &described;
    return SUCCESS;
}

int cublasLtCreate(void **handle) {
    return make(handle);
}

int cublasLtDestroy(void *handle) {
    return SUCCESS;
}

int cublasLtMatmulDescCreate(void **description) {
    return make(description);
}

int cublasLtMatmulDescDestroy(void *description) {
    return SUCCESS;
}

int cublasLtMatmulDescSetAttribute(void *description) {
    return SUCCESS;
}

int cublasLtMatmulPreferenceCreate(void **preference) {
    return make(preference);
}

int cublasLtMatmulPreferenceDestroy(void *preference) {
    return SUCCESS;
}

int cublasLtMatmulPreferenceSetAttribute(void *preference) {
    return SUCCESS;
}

int cublasLtMatrixLayoutCreate(void **layout) {
    return make(layout);
}

int cublasLtMatrixLayoutDestroy(void *layout) {
    return SUCCESS;
}

int cublasLtMatrixLayoutSetAttribute(void *layout) {
    return SUCCESS;
}

/* Finds one algorithm; torch's zeros in `results` describe it: success, no workspace. */
int cublasLtMatmulAlgoGetHeuristic(void *handle, void *description, void *a, void *b, void *c, void *d,
                                   void *preference, int num_wanted, void *results, int *num_found) {
    *num_found = 1;
    return SUCCESS;
}

int cublasLtMatmul(void *handle, void *description, void *alpha, void *a, void *a_layout, void *b, void *b_layout,
                   void *beta, void *c, void *c_layout, void *d, void *d_layout, void *algorithm, void *workspace,
                   size_t workspace_size, cudaStream_t stream) {
    return launch(__func__, stream) == cudaSuccess ? SUCCESS : EXECUTION_FAILED;
}
