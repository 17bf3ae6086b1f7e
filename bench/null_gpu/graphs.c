/* Graphs: a number of nodes and the time along their longest path. */
#include "null_gpu.h"

static Graph *graph_of(const void *handle, Kind kind) {
    return is_object(handle, kind) ? (Graph *)handle : NULL;
}

static cudaError_t instantiate(const char *call, cudaGraphExec_t *executable_handle, cudaGraph_t handle) {
    Graph *graph = graph_of(handle, GRAPH);
    if (!graph)
        return refuse(call, cudaErrorInvalidValue, "the graph was destroyed, or its capture failed");
    pthread_mutex_lock(&state_lock);
    Graph *executable = new_object_locked(EXECUTABLE, sizeof *executable);
    pthread_mutex_unlock(&state_lock);
    executable->num_nodes = graph->num_nodes;
    executable->run_ns = graph->run_ns;
    *executable_handle = (cudaGraphExec_t)executable;
    return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *executable, cudaGraph_t graph, unsigned long long flags) {
    return instantiate(__func__, executable, graph);
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *executable, cudaGraph_t graph, unsigned long long flags) {
    return instantiate(__func__, executable, graph);
}

/* In a stream that is being captured it becomes a graph within a graph. */
cudaError_t cudaGraphLaunch(cudaGraphExec_t handle, cudaStream_t stream) {
    Graph *graph = graph_of(handle, EXECUTABLE);
    if (!graph)
        return refuse(__func__, cudaErrorInvalidValue, "the executable graph was destroyed");
    Work work = {
        .counted_as = GRAPH_LAUNCHES,
        .num_nodes = graph->num_nodes,
        .launched_ns = graph->run_ns,
        .captured_ns = graph->run_ns,
        .not_before = graph->busy_until,
    };
    int64_t done_at;
    RETURN_IF_REFUSED(enqueue(__func__, stream, work, &done_at));
    if (done_at) {
        graph->busy_until = done_at;
        count(GRAPH_NODES, graph->num_nodes);
    }
    return cudaSuccess;
}

static cudaError_t destroy(const char *call, Graph *graph) {
    if (!graph)
        return refuse(call, cudaErrorInvalidValue, "the graph is already destroyed");
    pthread_mutex_lock(&state_lock);
    destroy_object_locked(graph);
    pthread_mutex_unlock(&state_lock);
    return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t handle) {
    return destroy(__func__, graph_of(handle, GRAPH));
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t handle) {
    return destroy(__func__, graph_of(handle, EXECUTABLE));
}

cudaError_t cudaGraphGetNodes(cudaGraph_t handle, cudaGraphNode_t *nodes, size_t *num_nodes) {
    Graph *graph = graph_of(handle, GRAPH);
    if (!graph)
        return refuse(__func__, cudaErrorInvalidValue, "the graph was destroyed, or its capture failed");
    if (nodes)
        return refuse(__func__, cudaErrorNotSupported, "the null GPU only counts nodes");
    *num_nodes = (size_t)graph->num_nodes;
    return cudaSuccess;
}

cudaError_t cudaGraphDebugDotPrint(cudaGraph_t graph, const char *path, unsigned flags) {
    return refuse(__func__, cudaErrorNotSupported, "the null GPU only counts nodes");
}

#if CUDART_VERSION < 13000
cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t node, cudaGraphNode_t *nodes, size_t *count) {
    return refuse(__func__, cudaErrorNotSupported, "the null GPU only counts nodes");
}
#else
cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t node, cudaGraphNode_t *nodes, cudaGraphEdgeData *edges,
                                         size_t *count) {
    return refuse(__func__, cudaErrorNotSupported, "the null GPU only counts nodes");
}
#endif
