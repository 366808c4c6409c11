/* Memory of CUDA graphs.
 *
 * An allocation node takes memory when its graph runs, from a pool that the driver keeps per device.
 * A graph is charged while its nodes are added, with the most that its allocations hold at one time
 * in the order of adding; that is where the program can be told that there is no room. After each
 * launch the driver's own figure for that pool is looked at and the charge made no less: branches
 * that run side by side may hold more than the order of adding shows. A graph and what is
 * instantiated from it pay once, until the last of them is destroyed.
 */
#include <string.h>

#include "limiter.h"
#include "hooks.h"

struct graph {
    CUgraph handle; /* NULL: destroyed, though instances may live */
    uint64_t live, peak;
    uint32_t references; /* the graph and its instances; 0: the place is free */
    uint32_t generation; /* so that a pointer's record does not outlive its graph */
};

#define GRAPHS 1024u /* with memory in them, at one time; more are refused */

static struct lock graphs_lock;
static struct graph graphs[GRAPHS];
static uint32_t graphs_high;
static _Atomic uint32_t graphs_alive;
static uint64_t peaks, charged; /* sum of all peaks; what is charged for graphs */

/* ---- captures --------------------------------------------------------------------------------- */

bool graphs_capturing(CUstream stream, CUgraph *graph) {
    int status = CU_STREAM_CAPTURE_STATUS_NONE;
    uint64_t id;
    if (driver_entry(ENTRY_cuStreamIsCapturing) == NULL)
        return false; /* older than graphs */
    /* An error means that some capture forbids the question: then nothing may be done here either. */
    if (CALL(cuStreamIsCapturing, stream, &status) != CUDA_SUCCESS)
        status = CU_STREAM_CAPTURE_STATUS_ACTIVE;
    if (status == CU_STREAM_CAPTURE_STATUS_NONE)
        return false;
    if (graph != NULL) {
        *graph = NULL;
        (void)CALL(cuStreamGetCaptureInfo_v2, stream, &status, &id, graph, NULL, NULL);
    }
    return true;
}

int graphs_relax(void) {
    int mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    (void)CALL(cuThreadExchangeStreamCaptureMode, &mode);
    return mode;
}

void graphs_restore(int mode) { (void)CALL(cuThreadExchangeStreamCaptureMode, &mode); }

/* ---- the table; with the lock held ------------------------------------------------------------ */

static struct graph *find_graph(CUgraph handle) {
    if (handle != NULL)
        for (uint32_t i = 0; i < graphs_high; i++)
            if (graphs[i].references != 0 && graphs[i].handle == handle)
                return &graphs[i];
    return NULL;
}

static struct graph *add_graph(CUgraph handle) {
    uint32_t i = 0;
    while (i < GRAPHS && graphs[i].references != 0)
        i++;
    if (i == GRAPHS)
        return NULL;
    if (i >= graphs_high)
        graphs_high = i + 1;
    graphs[i] = (struct graph){.handle = handle, .references = 1, .generation = graphs[i].generation + 1};
    atomic_fetch_add_explicit(&graphs_alive, 1, memory_order_relaxed);
    return &graphs[i];
}

static void drop_graph(struct graph *graph) {
    if (--graph->references != 0)
        return;
    peaks -= graph->peak;
    graph->handle = NULL;
    atomic_fetch_sub_explicit(&graphs_alive, 1, memory_order_relaxed);
}

static uint64_t owner_of(const struct graph *graph) {
    return (uint64_t)graph->generation << 32 | (uint64_t)(graph - graphs);
}

static struct graph *owned_by(uint64_t owner) {
    uint32_t index = (uint32_t)owner % GRAPHS;
    return graphs[index].references != 0 && graphs[index].generation == owner >> 32 ? &graphs[index] : NULL;
}

/* ---- charging --------------------------------------------------------------------------------- */

void graphs_settle(void) {
    uint64_t reserved = 0;
    CUdevice device;
    lock_take(&graphs_lock);
    if (charged != 0 || peaks != 0) {
        int mode = graphs_relax();
        if (CALL(cuCtxGetDevice, &device) != CUDA_SUCCESS ||
            CALL(cuDeviceGetGraphMemAttribute, device, CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT, &reserved) !=
                CUDA_SUCCESS)
            reserved = 0;
        graphs_restore(mode);
        uint64_t right = reserved > peaks ? reserved : peaks;
        if (right > charged)
            account_charge_anyway(right - charged);
        else
            account_uncharge(charged - right);
        charged = right;
    }
    lock_give(&graphs_lock);
}

/* A graph is not safe to use from two threads, so nothing else adds to this one meanwhile. */
bool graphs_reserve(CUgraph handle, uint64_t bytes, uint64_t *raised) {
    bool room = false;
    *raised = 0;
    if (!account_attach() || bytes > UINT64_MAX / 2)
        return false;
    lock_take(&graphs_lock);
    struct graph *graph = find_graph(handle);
    if (graph == NULL && handle != NULL)
        graph = add_graph(handle);
    if (graph != NULL) {
        uint64_t live = graph->live + bytes;
        uint64_t higher = live > graph->peak ? live - graph->peak : 0;
        uint64_t more = peaks + higher > charged ? peaks + higher - charged : 0;
        room = more == 0 || account_charge(more);
        if (!room) {
            pools_settle();
            room = account_charge(more);
        }
        if (room) {
            graph->live = live;
            graph->peak += higher;
            peaks += higher;
            charged += more;
            *raised = higher;
        } else if (graph->references == 1 && graph->peak == 0) {
            drop_graph(graph);
        }
    }
    lock_give(&graphs_lock);
    if (!room)
        account_refused(bytes);
    return room;
}

void graphs_unreserve(CUgraph handle, uint64_t bytes, uint64_t raised) {
    lock_take(&graphs_lock);
    struct graph *graph = find_graph(handle);
    if (graph != NULL) {
        graph->live -= bytes;
        graph->peak -= raised;
        peaks -= raised;
    }
    lock_give(&graphs_lock);
    graphs_settle();
}

void graphs_own(CUgraph handle, CUdeviceptr pointer, uint64_t bytes) {
    lock_take(&graphs_lock);
    struct graph *graph = find_graph(handle);
    if (graph != NULL)
        records_put(RECORD_GRAPH_PTR, pointer, bytes, owner_of(graph), 1);
    lock_give(&graphs_lock);
}

void graphs_free_node(CUdeviceptr pointer) {
    struct record taken;
    if (!records_take(RECORD_GRAPH_PTR, pointer, &taken))
        return;
    lock_take(&graphs_lock);
    struct graph *graph = owned_by(taken.owner);
    uint64_t bytes = taken.bytes;
    if (graph != NULL)
        graph->live -= bytes < graph->live ? bytes : graph->live;
    lock_give(&graphs_lock);
}

void graphs_launched(CUgraphExec exec) {
    struct record of_exec;
    if (atomic_load_explicit(&graphs_alive, memory_order_relaxed) != 0 &&
        records_get(RECORD_EXEC, (uint64_t)(uintptr_t)exec, &of_exec))
        graphs_settle();
}

void graphs_forget(void) {
    lock_take(&graphs_lock);
    for (uint32_t i = 0; i < graphs_high; i++) {
        graphs[i].handle = NULL;
        graphs[i].references = 0;
    }
    account_uncharge(charged);
    peaks = charged = 0;
    atomic_store_explicit(&graphs_alive, 0, memory_order_relaxed);
    lock_give(&graphs_lock);
}

void graphs_reset(void) {
    memset(graphs, 0, sizeof graphs);
    graphs_high = 0;
    peaks = charged = 0;
    atomic_store_explicit(&graphs_alive, 0, memory_order_relaxed);
    atomic_store_explicit(&graphs_lock.word, 0, memory_order_relaxed);
}

/* ---- entry points ----------------------------------------------------------------------------- */

/* Around adding an allocation node: reserve, and afterwards keep or give back. */
struct reservation {
    CUgraph graph;
    uint64_t bytes, raised;
};

static bool reserve_node(struct reservation *reservation, CUgraph graph, const CUDA_MEM_ALLOC_NODE_PARAMS *p) {
    *reservation = (struct reservation){.graph = graph};
    if (!account_attach())
        return false;
    if (p == NULL || !memory_counts(&p->poolProps.location))
        return true;
    reservation->bytes = p->bytesize;
    return graphs_reserve(graph, p->bytesize, &reservation->raised);
}

static CUresult finish_node(const struct reservation *reservation, CUresult result,
                            const CUDA_MEM_ALLOC_NODE_PARAMS *p) {
    if (reservation->bytes != 0) {
        if (result == CUDA_SUCCESS)
            graphs_own(reservation->graph, p->dptr, reservation->bytes);
        else
            graphs_unreserve(reservation->graph, reservation->bytes, reservation->raised);
    }
    return result;
}

EXPORT CUresult cuGraphAddMemAllocNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies,
                                       size_t count, CUDA_MEM_ALLOC_NODE_PARAMS *parameters) {
    struct reservation r;
    if (!reserve_node(&r, graph, parameters))
        return CUDA_ERROR_OUT_OF_MEMORY;
    return finish_node(&r, CALL(cuGraphAddMemAllocNode, node, graph, dependencies, count, parameters), parameters);
}

EXPORT CUresult cuGraphAddMemFreeNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies,
                                      size_t count, CUdeviceptr pointer) {
    CUresult result = CALL(cuGraphAddMemFreeNode, node, graph, dependencies, count, pointer);
    if (result == CUDA_SUCCESS)
        graphs_free_node(pointer);
    return result;
}

/* The three versions of cuGraphAddNode differ in what they pass through. */
#define ADD_NODE(CALL_DRIVER)                                                                   \
    struct reservation r;                                                                       \
    bool allocates = parameters != NULL && parameters->type == CU_GRAPH_NODE_TYPE_MEM_ALLOC;    \
    if (!reserve_node(&r, graph, allocates ? &parameters->u.alloc : NULL))                      \
        return CUDA_ERROR_OUT_OF_MEMORY;                                                        \
    CUresult result = CALL_DRIVER;                                                              \
    if (result == CUDA_SUCCESS && parameters->type == CU_GRAPH_NODE_TYPE_MEM_FREE)              \
        graphs_free_node(parameters->u.free.dptr);                                              \
    return finish_node(&r, result, allocates ? &parameters->u.alloc : NULL)

EXPORT CUresult cuGraphAddNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies, size_t count,
                               CUgraphNodeParams *parameters) {
    ADD_NODE(CALL(cuGraphAddNode, node, graph, dependencies, count, parameters));
}

EXPORT CUresult cuGraphAddNode_v2(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies,
                                  const void *edges, size_t count, CUgraphNodeParams *parameters) {
    ADD_NODE(CALL(cuGraphAddNode_v2, node, graph, dependencies, edges, count, parameters));
}

EXPORT CUresult cuGraphAddNode_v3(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies,
                                  const void *edges, size_t count, CUgraphNodeParams *parameters) {
    ADD_NODE(CALL(cuGraphAddNode_v3, node, graph, dependencies, edges, count, parameters));
}

static CUresult instantiated(CUresult result, CUgraphExec *exec, CUgraph handle) {
    if (result != CUDA_SUCCESS || atomic_load_explicit(&graphs_alive, memory_order_relaxed) == 0)
        return result;
    lock_take(&graphs_lock);
    struct graph *graph = find_graph(handle);
    if (graph != NULL && records_put(RECORD_EXEC, (uint64_t)(uintptr_t)*exec, 0, owner_of(graph), 1))
        graph->references++;
    lock_give(&graphs_lock);
    graphs_settle();
    return result;
}

EXPORT CUresult cuGraphInstantiate(CUgraphExec *exec, CUgraph graph, CUgraphNode *error, char *log,
                                   size_t log_bytes) {
    return instantiated(CALL(cuGraphInstantiate, exec, graph, error, log, log_bytes), exec, graph);
}

EXPORT CUresult cuGraphInstantiate_v2(CUgraphExec *exec, CUgraph graph, CUgraphNode *error, char *log,
                                      size_t log_bytes) {
    return instantiated(CALL(cuGraphInstantiate_v2, exec, graph, error, log, log_bytes), exec, graph);
}

EXPORT CUresult cuGraphInstantiateWithFlags(CUgraphExec *exec, CUgraph graph, unsigned long long flags) {
    return instantiated(CALL(cuGraphInstantiateWithFlags, exec, graph, flags), exec, graph);
}

EXPORT CUresult cuGraphInstantiateWithParams(CUgraphExec *exec, CUgraph graph, void *parameters) {
    return instantiated(CALL(cuGraphInstantiateWithParams, exec, graph, parameters), exec, graph);
}

EXPORT CUresult cuGraphInstantiateWithParams_ptsz(CUgraphExec *exec, CUgraph graph, void *parameters) {
    return instantiated(CALL(cuGraphInstantiateWithParams_ptsz, exec, graph, parameters), exec, graph);
}

EXPORT CUresult cuGraphExecDestroy(CUgraphExec exec) {
    struct record taken;
    bool known = records_take(RECORD_EXEC, (uint64_t)(uintptr_t)exec, &taken);
    CUresult result = CALL(cuGraphExecDestroy, exec);
    if (!known)
        return result;
    if (result != CUDA_SUCCESS) {
        records_put(RECORD_EXEC, taken.key, 0, taken.owner, 1);
        return result;
    }
    lock_take(&graphs_lock);
    struct graph *graph = owned_by(taken.owner);
    if (graph != NULL)
        drop_graph(graph);
    lock_give(&graphs_lock);
    graphs_settle();
    return result;
}

static void graph_gone(CUgraph handle) {
    lock_take(&graphs_lock);
    struct graph *graph = find_graph(handle);
    if (graph != NULL) {
        graph->handle = NULL;
        drop_graph(graph);
    }
    lock_give(&graphs_lock);
    graphs_settle();
}

EXPORT CUresult cuGraphDestroy(CUgraph handle) {
    /* Not forgotten first, unlike pointers: were the handle given out again meanwhile, the new graph
     * would be taken for the old one, so both happen under the lock. */
    lock_take(&graphs_lock);
    struct graph *graph = find_graph(handle);
    CUresult result = CALL(cuGraphDestroy, handle);
    if (graph != NULL && result == CUDA_SUCCESS) {
        graph->handle = NULL;
        drop_graph(graph);
    }
    lock_give(&graphs_lock);
    if (graph != NULL)
        graphs_settle();
    return result;
}

/* The graph that a capture built may come out under another handle than it was built under. */
static CUresult end_capture(CUresult (*driver)(CUstream, CUgraph *), CUstream stream, CUstream seen, CUgraph *graph) {
    CUgraph before = NULL;
    if (driver == NULL)
        return driver_lacks();
    if (atomic_load_explicit(&graphs_alive, memory_order_relaxed) != 0)
        (void)graphs_capturing(seen, &before);
    CUresult result = driver(stream, graph);
    if (before == NULL)
        return result;
    if (graph == NULL || *graph == NULL || result != CUDA_SUCCESS) {
        graph_gone(before);
    } else if (*graph != before) {
        lock_take(&graphs_lock);
        struct graph *known = find_graph(before);
        if (known != NULL)
            known->handle = *graph;
        lock_give(&graphs_lock);
    }
    return result;
}

EXPORT CUresult cuStreamEndCapture(CUstream stream, CUgraph *graph) {
    return end_capture(DRIVER(cuStreamEndCapture), stream, stream, graph);
}

EXPORT CUresult cuStreamEndCapture_ptsz(CUstream stream, CUgraph *graph) {
    return end_capture(DRIVER(cuStreamEndCapture_ptsz), stream, stream == NULL ? CU_STREAM_PER_THREAD : stream,
                       graph);
}

EXPORT CUresult cuDeviceGraphMemTrim(CUdevice device) {
    CUresult result = CALL(cuDeviceGraphMemTrim, device);
    graphs_settle();
    return result;
}
