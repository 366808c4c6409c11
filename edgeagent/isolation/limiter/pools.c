/* Stream-ordered pools: what is allocated from them and freed into them.
 *
 * A pool keeps memory that was freed into it, so it is charged with what it reserves, where the driver
 * says so, and at least with what was handed out.
 */
#include <string.h>

#include "limiter.h"
#include "hooks.h"

struct pool {
    CUmemoryPool handle;
    uint64_t used, charged;
    bool free_of_charge; /* it is in host memory, beside a card */
    bool destroyed;      /* the driver must not be asked about it any more */
};

#define POOLS 128u /* beyond them, and where the pool is not known: the first, which has no handle */

static struct lock pools_lock;
static struct pool pools[POOLS];
static uint32_t pool_count = 1;
static _Atomic bool pools_slack; /* some pool is charged with more than it handed out */

/* With the lock held. */
static uint32_t pool_index(CUmemoryPool handle) {
    if (handle == NULL)
        return 0;
    uint32_t place = 0;
    for (uint32_t i = 1; i < pool_count; i++) {
        if (pools[i].handle == handle && !pools[i].destroyed)
            return i;
        if (pools[i].destroyed && pools[i].used == 0)
            place = i;
    }
    if (place == 0 && pool_count < POOLS)
        place = pool_count++;
    if (place != 0)
        pools[place] = (struct pool){.handle = handle};
    return place;
}

/* With the lock held: makes the charge what the driver says. */
static void settle_pool(struct pool *pool) {
    uint64_t reserved = 0, right;
    if (pool->free_of_charge)
        return;
    if (pool->handle != NULL && !pool->destroyed &&
        CALL(cuMemPoolGetAttribute, pool->handle, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &reserved) != CUDA_SUCCESS)
        reserved = 0;
    right = reserved > pool->used ? reserved : pool->used;
    if (right > pool->charged)
        account_charge_anyway(right - pool->charged);
    else
        account_uncharge(pool->charged - right);
    pool->charged = right;
}

void pools_settle(void) {
    bool slack = false;
    if (LIKELY(!atomic_load_explicit(&pools_slack, memory_order_relaxed)))
        return;
    int mode = graphs_relax();
    lock_take(&pools_lock);
    for (uint32_t i = 0; i < pool_count; i++) {
        settle_pool(&pools[i]);
        slack |= pools[i].charged > pools[i].used;
    }
    atomic_store_explicit(&pools_slack, slack, memory_order_relaxed);
    lock_give(&pools_lock);
    graphs_restore(mode);
}

/* The device was reset: nothing that came from its pools is left. */
void pools_forget(void) {
    records_drop_kind(RECORD_POOLED);
    lock_take(&pools_lock);
    for (uint32_t i = 0; i < pool_count; i++) {
        account_uncharge(pools[i].free_of_charge ? 0 : pools[i].charged);
        pools[i].used = pools[i].charged = 0;
    }
    lock_give(&pools_lock);
}

void pools_reset(void) {
    memset(pools, 0, sizeof pools);
    pool_count = 1;
    atomic_store_explicit(&pools_slack, false, memory_order_relaxed);
    atomic_store_explicit(&pools_lock.word, 0, memory_order_relaxed);
}

static CUmemoryPool current_pool(void) {
    CUdevice device;
    CUmemoryPool pool;
    if (CALL(cuCtxGetDevice, &device) != CUDA_SUCCESS || CALL(cuDeviceGetMemPool, &pool, device) != CUDA_SUCCESS)
        return NULL;
    return pool;
}

static void forget_use(uint32_t index, uint64_t bytes) {
    lock_take(&pools_lock);
    pools[index].used -= bytes < pools[index].used ? bytes : pools[index].used;
    atomic_store_explicit(&pools_slack, true, memory_order_relaxed);
    lock_give(&pools_lock);
}

/* Counts `bytes` as handed out by the pool; charges only what its slack does not hold. */
static bool count_use(CUmemoryPool handle, uint64_t bytes, uint32_t *index) {
    lock_take(&pools_lock);
    *index = pool_index(handle);
    struct pool *pool = &pools[*index];
    bool free_of_charge = pool->free_of_charge;
    uint64_t more = 0;
    if (bytes > UINT64_MAX / 2 || pool->used > UINT64_MAX / 2) {
        lock_give(&pools_lock);
        account_refused(bytes);
        return false;
    }
    pool->used += bytes;
    if (!free_of_charge && pool->used > pool->charged) {
        more = pool->used - pool->charged;
        pool->charged = pool->used;
    }
    lock_give(&pools_lock);
    if (more == 0 || account_charge(more))
        return true;
    /* The claim is withdrawn before settling, which would otherwise take it for a charge. */
    lock_take(&pools_lock);
    pool->charged -= more;
    pool->used -= bytes;
    lock_give(&pools_lock);
    pools_settle();
    graphs_settle();
    lock_take(&pools_lock);
    more = pool->used + bytes > pool->charged ? pool->used + bytes - pool->charged : 0;
    bool room = more == 0 || account_charge(more);
    if (room) {
        pool->used += bytes;
        pool->charged += more;
    }
    lock_give(&pools_lock);
    if (!room)
        account_refused(bytes);
    return room;
}

typedef CUresult alloc_call(CUdeviceptr *pointer, size_t bytes, CUmemoryPool pool, CUstream stream);

static CUresult alloc_in_graph(alloc_call *driver, CUgraph graph, CUdeviceptr *pointer, size_t bytes,
                               CUmemoryPool pool, CUstream stream) {
    uint64_t cost = memory_round_up(bytes), raised;
    if (!graphs_reserve(graph, cost, &raised))
        return REFUSED;
    CUresult result = driver(pointer, bytes, pool, stream);
    if (result == CUDA_SUCCESS)
        graphs_own(graph, *pointer, cost);
    else
        graphs_unreserve(graph, cost, raised);
    return result;
}

/* `seen` is the stream as the driver's plain functions name it; `pool` NULL: the device's. */
static CUresult alloc_ordered(alloc_call *driver, CUdeviceptr *pointer, size_t bytes, CUmemoryPool pool,
                              CUstream stream, CUstream seen) {
    CUgraph graph;
    uint32_t index;
    uint64_t cost = memory_round_up(bytes);
    if (!account_attach())
        return REFUSED;
    if (graphs_capturing(seen, &graph))
        return alloc_in_graph(driver, graph, pointer, bytes, pool, stream);
    if (!count_use(pool != NULL ? pool : current_pool(), cost, &index))
        return REFUSED;
    CUresult result = driver(pointer, bytes, pool, stream);
    if (result != CUDA_SUCCESS) {
        forget_use(index, cost);
    } else {
        records_put(RECORD_POOLED, *pointer, cost, index, 1);
    }
    int mode = graphs_relax();
    lock_take(&pools_lock);
    settle_pool(&pools[index]);
    if (pools[index].charged > pools[index].used)
        atomic_store_explicit(&pools_slack, true, memory_order_relaxed);
    lock_give(&pools_lock);
    graphs_restore(mode);
    return result;
}

static CUstream per_thread(CUstream stream) { return stream == NULL ? CU_STREAM_PER_THREAD : stream; }

static CUresult from_device_pool(CUdeviceptr *pointer, size_t bytes, CUmemoryPool pool, CUstream stream) {
    (void)pool;
    return CALL(cuMemAllocAsync, pointer, bytes, stream);
}

static CUresult from_device_pool_ptsz(CUdeviceptr *pointer, size_t bytes, CUmemoryPool pool, CUstream stream) {
    (void)pool;
    return CALL(cuMemAllocAsync_ptsz, pointer, bytes, stream);
}

static CUresult from_pool(CUdeviceptr *pointer, size_t bytes, CUmemoryPool pool, CUstream stream) {
    return CALL(cuMemAllocFromPoolAsync, pointer, bytes, pool, stream);
}

static CUresult from_pool_ptsz(CUdeviceptr *pointer, size_t bytes, CUmemoryPool pool, CUstream stream) {
    return CALL(cuMemAllocFromPoolAsync_ptsz, pointer, bytes, pool, stream);
}

EXPORT CUresult cuMemAllocAsync(CUdeviceptr *pointer, size_t bytes, CUstream stream) {
    return alloc_ordered(from_device_pool, pointer, bytes, NULL, stream, stream);
}

EXPORT CUresult cuMemAllocAsync_ptsz(CUdeviceptr *pointer, size_t bytes, CUstream stream) {
    return alloc_ordered(from_device_pool_ptsz, pointer, bytes, NULL, stream, per_thread(stream));
}

EXPORT CUresult cuMemAllocFromPoolAsync(CUdeviceptr *pointer, size_t bytes, CUmemoryPool pool, CUstream stream) {
    return alloc_ordered(from_pool, pointer, bytes, pool, stream, stream);
}

EXPORT CUresult cuMemAllocFromPoolAsync_ptsz(CUdeviceptr *pointer, size_t bytes, CUmemoryPool pool,
                                             CUstream stream) {
    return alloc_ordered(from_pool_ptsz, pointer, bytes, pool, stream, per_thread(stream));
}

/* What a freed device pointer was: takes its record, and says whether there was one. */
static bool take_pointer(CUdeviceptr pointer, struct record *taken) {
    return records_take(RECORD_DEVICE, pointer, taken) || records_take(RECORD_POOLED, pointer, taken);
}

static CUresult freed(CUresult result, const struct record *taken) {
    if (result == CUDA_SUCCESS && taken->kind == RECORD_POOLED) {
        forget_use((uint32_t)taken->owner, taken->bytes);
        return result;
    }
    return memory_let_go(result, taken);
}

EXPORT CUresult cuMemFree_v2(CUdeviceptr pointer) {
    struct record taken;
    if (!take_pointer(pointer, &taken)) {
        CUresult result = CALL(cuMemFree_v2, pointer);
        graphs_settle(); /* it may have been a graph's */
        return result;
    }
    CUresult result = freed(CALL(cuMemFree_v2, pointer), &taken);
    if (taken.kind == RECORD_POOLED)
        pools_settle();
    return result;
}

typedef CUresult free_call(CUdeviceptr pointer, CUstream stream);

static CUresult free_ordered(free_call *driver, CUdeviceptr pointer, CUstream stream, CUstream seen) {
    struct record taken;
    if (graphs_capturing(seen, NULL)) {
        CUresult result = driver(pointer, stream);
        if (result == CUDA_SUCCESS)
            graphs_free_node(pointer);
        return result;
    }
    if (!take_pointer(pointer, &taken))
        return driver(pointer, stream);
    return freed(driver(pointer, stream), &taken);
}

static CUresult free_async(CUdeviceptr pointer, CUstream stream) { return CALL(cuMemFreeAsync, pointer, stream); }

static CUresult free_async_ptsz(CUdeviceptr pointer, CUstream stream) {
    return CALL(cuMemFreeAsync_ptsz, pointer, stream);
}

EXPORT CUresult cuMemFreeAsync(CUdeviceptr pointer, CUstream stream) {
    return free_ordered(free_async, pointer, stream, stream);
}

EXPORT CUresult cuMemFreeAsync_ptsz(CUdeviceptr pointer, CUstream stream) {
    return free_ordered(free_async_ptsz, pointer, stream, per_thread(stream));
}

EXPORT CUresult cuMemPoolCreate(CUmemoryPool *pool, const CUmemPoolProps *properties) {
    if (!account_attach())
        return REFUSED;
    CUresult result = CALL(cuMemPoolCreate, pool, properties);
    if (result == CUDA_SUCCESS) {
        lock_take(&pools_lock);
        uint32_t index = pool_index(*pool);
        if (index != 0)
            pools[index].free_of_charge = !memory_counts(&properties->location);
        lock_give(&pools_lock);
    }
    return result;
}

EXPORT CUresult cuMemPoolDestroy(CUmemoryPool pool) {
    /* Marked first: its handle may be given out again as soon as the driver is done. */
    lock_take(&pools_lock);
    uint32_t index = pool_index(pool);
    if (index != 0)
        pools[index].destroyed = true;
    lock_give(&pools_lock);
    CUresult result = CALL(cuMemPoolDestroy, pool);
    lock_take(&pools_lock);
    if (index != 0 && result != CUDA_SUCCESS)
        pools[index].destroyed = false;
    else if (index != 0)
        settle_pool(&pools[index]);
    lock_give(&pools_lock);
    return result;
}

EXPORT CUresult cuMemPoolTrimTo(CUmemoryPool pool, size_t keep_bytes) {
    CUresult result = CALL(cuMemPoolTrimTo, pool, keep_bytes);
    pools_settle();
    return result;
}
