/* The entry points that take memory, and those that tell how much there is.
 *
 * One pattern: charge, ask the driver, take the charge back if it refused, remember what the handle
 * cost. When freeing: forget first, since another thread may be given the same handle the moment the
 * driver has it back.
 */
#include <string.h>

#include "limiter.h"
#include "hooks.h"

#define GRANULE 512u /* the driver gives out no less */
#define REFUSED CUDA_ERROR_OUT_OF_MEMORY

static uint64_t round_up(uint64_t bytes) {
    return bytes > UINT64_MAX - GRANULE ? bytes : (bytes + GRANULE - 1) & ~(uint64_t)(GRANULE - 1);
}

bool memory_charge(uint64_t bytes) {
    if (UNLIKELY(!account_attach()))
        return false;
    if (LIKELY(account_charge(bytes)))
        return true;
    memory_settle();
    graphs_settle();
    if (account_charge(bytes))
        return true;
    account_refused(bytes);
    return false;
}

static uint64_t key_of(const void *handle) { return (uint64_t)(uintptr_t)handle; }

/* After the driver answered: keep the charge under the handle, or give it back. */
static CUresult keep(CUresult result, enum record_kind kind, uint64_t key, uint64_t bytes) {
    CUcontext context = NULL;
    if (result != CUDA_SUCCESS) {
        account_uncharge(bytes);
        return result;
    }
    (void)CALL(cuCtxGetCurrent, &context);
    records_put(kind, key, bytes, key_of(context), 1); /* if that fails the charge stays: it errs upwards */
    return result;
}

/* Around a free: `taken` is what was forgotten before the driver was asked. */
static CUresult let_go(CUresult result, const struct record *taken) {
    if (result == CUDA_SUCCESS)
        account_uncharge(taken->bytes);
    else
        records_put(taken->kind, taken->key, taken->bytes, taken->owner, taken->count);
    return result;
}

/* ---- what a program is told ------------------------------------------------------------------- */

EXPORT CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device) {
    if (!account_know_limits())
        return REFUSED;
    CUresult result = CALL(cuDeviceTotalMem_v2, bytes, device);
    if (result == CUDA_SUCCESS && bytes != NULL && *bytes > account_limits()->memory_bytes)
        *bytes = account_limits()->memory_bytes;
    return result;
}

EXPORT CUresult cuMemGetInfo_v2(size_t *free, size_t *total) {
    if (!account_attach())
        return REFUSED;
    CUresult result = CALL(cuMemGetInfo_v2, free, total);
    if (result != CUDA_SUCCESS)
        return result;
    memory_settle();
    graphs_settle();
    uint64_t limit = account_limits()->memory_bytes, used = account_used();
    uint64_t left = used < limit ? limit - used : 0;
    if (free != NULL && *free > left)
        *free = left;
    if (total != NULL && *total > limit)
        *total = limit;
    return result;
}

static unsigned int fit(size_t bytes) { return bytes > UINT32_MAX ? UINT32_MAX : (unsigned int)bytes; }

EXPORT CUresult cuDeviceTotalMem(unsigned int *bytes, CUdevice device) {
    size_t wide = 0;
    CUresult result = cuDeviceTotalMem_v2(&wide, device);
    if (result == CUDA_SUCCESS && bytes != NULL)
        *bytes = fit(wide);
    return result;
}

EXPORT CUresult cuMemGetInfo(unsigned int *free, unsigned int *total) {
    size_t wide_free = 0, wide_total = 0;
    CUresult result = cuMemGetInfo_v2(&wide_free, &wide_total);
    if (result == CUDA_SUCCESS && free != NULL)
        *free = fit(wide_free);
    if (result == CUDA_SUCCESS && total != NULL)
        *total = fit(wide_total);
    return result;
}

/* ---- contexts --------------------------------------------------------------------------------- */

EXPORT CUresult cuCtxCreate(CUcontext *context, unsigned int flags, CUdevice device) {
    return account_attach() ? CALL(cuCtxCreate, context, flags, device) : REFUSED;
}

EXPORT CUresult cuCtxCreate_v2(CUcontext *context, unsigned int flags, CUdevice device) {
    return account_attach() ? CALL(cuCtxCreate_v2, context, flags, device) : REFUSED;
}

EXPORT CUresult cuCtxCreate_v3(CUcontext *context, void *affinity, int count, unsigned int flags,
                               CUdevice device) {
    return account_attach() ? CALL(cuCtxCreate_v3, context, affinity, count, flags, device) : REFUSED;
}

EXPORT CUresult cuCtxCreate_v4(CUcontext *context, void *parameters, unsigned int flags, CUdevice device) {
    return account_attach() ? CALL(cuCtxCreate_v4, context, parameters, flags, device) : REFUSED;
}

/* ---- plain device memory ---------------------------------------------------------------------- */

EXPORT CUresult cuMemAlloc_v2(CUdeviceptr *pointer, size_t bytes) {
    uint64_t cost = round_up(bytes);
    if (!memory_charge(cost))
        return REFUSED;
    CUresult result = CALL(cuMemAlloc_v2, pointer, bytes);
    return keep(result, RECORD_DEVICE, result == CUDA_SUCCESS ? *pointer : 0, cost);
}

EXPORT CUresult cuMemAllocManaged(CUdeviceptr *pointer, size_t bytes, unsigned int flags) {
    uint64_t cost = round_up(bytes);
    if (!memory_charge(cost))
        return REFUSED;
    CUresult result = CALL(cuMemAllocManaged, pointer, bytes, flags);
    return keep(result, RECORD_DEVICE, result == CUDA_SUCCESS ? *pointer : 0, cost);
}

EXPORT CUresult cuMemAllocPitch_v2(CUdeviceptr *pointer, size_t *pitch, size_t width, size_t height,
                                   unsigned int element) {
    uint64_t row = round_up(width), cost; /* the pitch is known only afterwards */
    if (__builtin_mul_overflow(row, height, &cost) || !memory_charge(cost))
        return REFUSED;
    CUresult result = CALL(cuMemAllocPitch_v2, pointer, pitch, width, height, element);
    if (result == CUDA_SUCCESS && *pitch > row) {
        uint64_t more = (*pitch - row) * height;
        if (!memory_charge(more)) {
            (void)CALL(cuMemFree_v2, *pointer);
            result = REFUSED;
        } else {
            cost += more;
        }
    }
    return keep(result, RECORD_DEVICE, result == CUDA_SUCCESS ? *pointer : 0, cost);
}

/* The entry points of before CUDA 3.2, with 32-bit pointers: closed. */
EXPORT CUresult cuMemAlloc(unsigned int *pointer, unsigned int bytes) {
    (void)pointer, (void)bytes;
    return REFUSED;
}

EXPORT CUresult cuMemAllocPitch(unsigned int *pointer, unsigned int *pitch, unsigned int width,
                                unsigned int height, unsigned int element) {
    (void)pointer, (void)pitch, (void)width, (void)height, (void)element;
    return REFUSED;
}

EXPORT CUresult cuArrayCreate(CUarray *array, const void *description) {
    (void)array, (void)description;
    return REFUSED;
}

EXPORT CUresult cuArray3DCreate(CUarray *array, const void *description) {
    (void)array, (void)description;
    return REFUSED;
}

/* ---- stream-ordered pools --------------------------------------------------------------------- */

/* A pool keeps memory that was freed into it, so it is charged with what it reserves, where the
 * driver says so, and at least with what was handed out. */
struct pool {
    CUmemoryPool handle;
    uint64_t used, charged;
    bool free_of_charge; /* it is in host memory, beside a card */
    bool destroyed;      /* the driver must not be asked about it any more */
};

#define POOLS 128u /* beyond them, and where the pool is not known: the first, which has no handle */

#define DEVICES 64

static CUcontext _Atomic primaries[DEVICES]; /* the primary context of each device, once seen */
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

static bool counts(const CUmemLocation *location) {
    return location->type == CU_MEM_LOCATION_TYPE_DEVICE || location->type == CU_MEM_LOCATION_TYPE_INVALID ||
           account_limits()->unified;
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

void memory_settle(void) {
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
static void forget_pools(void) {
    records_drop_kind(RECORD_POOLED);
    lock_take(&pools_lock);
    for (uint32_t i = 0; i < pool_count; i++) {
        account_uncharge(pools[i].free_of_charge ? 0 : pools[i].charged);
        pools[i].used = pools[i].charged = 0;
    }
    lock_give(&pools_lock);
}

void memory_reset(void) {
    for (int i = 0; i < DEVICES; i++)
        atomic_store_explicit(&primaries[i], NULL, memory_order_relaxed);
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
    memory_settle();
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
    uint64_t cost = round_up(bytes), raised;
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
    uint64_t cost = round_up(bytes);
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
    return let_go(result, taken);
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
        memory_settle();
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
            pools[index].free_of_charge = !counts(&properties->location);
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
    memory_settle();
    return result;
}

/* ---- virtual memory management ---------------------------------------------------------------- */

/* Physical memory lives as long as a handle or a mapping of it does. */
static struct lock physical_lock;
static uint64_t last_physical;

/* With the lock held: one handle or mapping less. */
static void drop_physical(uint64_t number) {
    struct record physical;
    if (!records_take(RECORD_PHYSICAL, number, &physical))
        return;
    if (physical.count > 1)
        records_put(RECORD_PHYSICAL, number, physical.bytes, physical.owner, physical.count - 1);
    else
        account_uncharge(physical.bytes);
}

enum { CHARGED, FREE_OF_CHARGE }; /* `owner` of a RECORD_PHYSICAL */

static void know_physical(CUmemHandle handle, uint64_t bytes, uint64_t charging) {
    lock_take(&physical_lock);
    uint64_t number = ++last_physical;
    records_put(RECORD_PHYSICAL, number, bytes, charging, 1);
    records_put(RECORD_HANDLE, handle, 0, number, 1);
    lock_give(&physical_lock);
}

EXPORT CUresult cuMemCreate(CUmemHandle *handle, size_t bytes, const CUmemAllocationProp *properties,
                            unsigned long long flags) {
    if (!account_attach())
        return REFUSED;
    bool counted = properties == NULL || counts(&properties->location);
    uint64_t cost = counted ? round_up(bytes) : 0;
    if (!memory_charge(cost))
        return REFUSED;
    CUresult result = CALL(cuMemCreate, handle, bytes, properties, flags);
    if (result == CUDA_SUCCESS)
        know_physical(*handle, cost, counted ? CHARGED : FREE_OF_CHARGE);
    else
        account_uncharge(cost);
    return result;
}

/* Its size shows only when it is mapped: charged there. */
EXPORT CUresult cuMemImportFromShareableHandle(CUmemHandle *handle, void *os_handle, int type) {
    if (!account_attach())
        return REFUSED;
    CUresult result = CALL(cuMemImportFromShareableHandle, handle, os_handle, type);
    if (result == CUDA_SUCCESS)
        know_physical(*handle, 0, CHARGED);
    return result;
}

EXPORT CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t offset, CUmemHandle handle,
                         unsigned long long flags) {
    struct record of_handle, physical;
    uint64_t more = 0;
    if (!account_attach())
        return REFUSED;
    lock_take(&physical_lock);
    bool known = records_get(RECORD_HANDLE, handle, &of_handle) &&
                 records_get(RECORD_PHYSICAL, of_handle.owner, &physical);
    if (known && physical.owner == CHARGED && bytes <= SIZE_MAX - offset && bytes + offset > physical.bytes)
        more = bytes + offset - physical.bytes;
    if (more != 0 && !memory_charge(more)) {
        lock_give(&physical_lock);
        return REFUSED;
    }
    CUresult result = CALL(cuMemMap, address, bytes, offset, handle, flags);
    if (result != CUDA_SUCCESS) {
        account_uncharge(more);
    } else if (known) {
        records_put(RECORD_PHYSICAL, of_handle.owner, physical.bytes + more, physical.owner, physical.count + 1);
        records_put(RECORD_MAPPING, address, bytes, of_handle.owner, 1);
    }
    lock_give(&physical_lock);
    return result;
}

EXPORT CUresult cuMemUnmap(CUdeviceptr address, size_t bytes) {
    struct record mapping;
    lock_take(&physical_lock);
    CUresult result = CALL(cuMemUnmap, address, bytes);
    for (CUdeviceptr at = address; result == CUDA_SUCCESS && at - address < bytes; at += mapping.bytes) {
        if (!records_take(RECORD_MAPPING, at, &mapping) || mapping.bytes == 0)
            break;
        drop_physical(mapping.owner);
    }
    lock_give(&physical_lock);
    return result;
}

EXPORT CUresult cuMemRetainAllocationHandle(CUmemHandle *handle, void *address) {
    struct record of_handle, mapping, physical;
    lock_take(&physical_lock);
    CUresult result = CALL(cuMemRetainAllocationHandle, handle, address);
    if (result == CUDA_SUCCESS) {
        if (records_get(RECORD_HANDLE, *handle, &of_handle))
            records_put(RECORD_HANDLE, *handle, 0, of_handle.owner, of_handle.count + 1);
        else if ((records_get(RECORD_MAPPING, key_of(address), &mapping) ||
                  records_covering(RECORD_MAPPING, key_of(address), &mapping)) &&
                 records_get(RECORD_PHYSICAL, mapping.owner, &physical)) {
            records_put(RECORD_PHYSICAL, mapping.owner, physical.bytes, physical.owner, physical.count + 1);
            records_put(RECORD_HANDLE, *handle, 0, mapping.owner, 1);
        }
    }
    lock_give(&physical_lock);
    return result;
}

EXPORT CUresult cuMemRelease(CUmemHandle handle) {
    struct record of_handle;
    lock_take(&physical_lock);
    bool known = records_take(RECORD_HANDLE, handle, &of_handle);
    CUresult result = CALL(cuMemRelease, handle);
    if (known && (result != CUDA_SUCCESS || of_handle.count > 1))
        records_put(RECORD_HANDLE, handle, 0, of_handle.owner, of_handle.count - (result == CUDA_SUCCESS));
    else if (known)
        drop_physical(of_handle.owner);
    lock_give(&physical_lock);
    return result;
}

/* ---- memory of other APIs --------------------------------------------------------------------- */

EXPORT CUresult cuImportExternalMemory(CUexternalMemory *memory,
                                       const CUDA_EXTERNAL_MEMORY_HANDLE_DESC *description) {
    uint64_t cost = description == NULL ? 0 : round_up(description->size);
    if (!memory_charge(cost))
        return REFUSED;
    CUresult result = CALL(cuImportExternalMemory, memory, description);
    return keep(result, RECORD_EXTERNAL, result == CUDA_SUCCESS ? key_of(*memory) : 0, cost);
}

EXPORT CUresult cuDestroyExternalMemory(CUexternalMemory memory) {
    struct record taken;
    bool known = records_take(RECORD_EXTERNAL, key_of(memory), &taken);
    CUresult result = CALL(cuDestroyExternalMemory, memory);
    return known ? let_go(result, &taken) : result;
}

/* ---- arrays ----------------------------------------------------------------------------------- */

/* Bits of one texel of `channels` channels; the most it could be where the format is not known. */
static uint64_t texel_bits(unsigned int format, unsigned int channels) {
    switch (format) {
    case 0x01: case 0x08: /* 8-bit integers */
        return 8ull * channels;
    case 0x02: case 0x09: case 0x10: /* 16-bit integers, half */
        return 16ull * channels;
    case 0x03: case 0x0a: case 0x20: /* 32-bit integers, float */
        return 32ull * channels;
    case 0xb0: /* NV12 */
        return 12;
    case 0x91: case 0x92: case 0x97: case 0x98: /* BC1, BC4: 8 bytes for 4x4 */
        return 4;
    case 0x93: case 0x94: case 0x95: case 0x96: case 0x99: case 0x9a: case 0x9b: case 0x9c: case 0x9d: case 0x9e:
        return 8; /* BC2, 3, 5, 6, 7: 16 bytes for 4x4 */
    case 0xc0: case 0xc6: /* normalised 8-bit, 1, 2, 4 channels */
        return 8;
    case 0xc1: case 0xc7: case 0xc3: case 0xc9:
        return 16;
    case 0xc2: case 0xc8: case 0xc4: case 0xca: case 0x50:
        return 32;
    case 0xc5: case 0xcb:
        return 64;
    default:
        return 128;
    }
}

static uint64_t at_least_one(uint64_t value) { return value == 0 ? 1 : value; }

/* Saturates: what cannot be multiplied cannot be allocated. */
static uint64_t times(uint64_t a, uint64_t b) {
    uint64_t product;
    return __builtin_mul_overflow(a, b, &product) ? UINT64_MAX : product;
}

static uint64_t array_bytes(const CUDA_ARRAY3D_DESCRIPTOR *d, unsigned int levels) {
    uint64_t width = at_least_one(d->Width), height = at_least_one(d->Height), depth = at_least_one(d->Depth);
    uint64_t bits = texel_bits(d->Format, d->NumChannels), total = 0;
    if (d->Flags & (CUDA_ARRAY3D_SPARSE | CUDA_ARRAY3D_DEFERRED_MAPPING))
        return 0; /* backed by cuMemCreate */
    for (unsigned int level = 0; level < at_least_one(levels) && level < 64; level++) {
        uint64_t texels = times(times(width, height), depth), bytes = times(texels, bits);
        bytes = bytes == UINT64_MAX ? UINT64_MAX / 2 : bytes / 8;
        total = total > UINT64_MAX / 2 - bytes ? UINT64_MAX / 2 : total + bytes;
        width = at_least_one(width / 2);
        height = at_least_one(height / 2);
        if (!(d->Flags & CUDA_ARRAY3D_LAYERED))
            depth = at_least_one(depth / 2);
    }
    return round_up(total);
}

EXPORT CUresult cuArray3DCreate_v2(CUarray *array, const CUDA_ARRAY3D_DESCRIPTOR *description) {
    uint64_t cost = description == NULL ? 0 : array_bytes(description, 1);
    if (!memory_charge(cost))
        return REFUSED;
    CUresult result = CALL(cuArray3DCreate_v2, array, description);
    return keep(result, RECORD_ARRAY, result == CUDA_SUCCESS ? key_of(*array) : 0, cost);
}

EXPORT CUresult cuArrayCreate_v2(CUarray *array, const CUDA_ARRAY_DESCRIPTOR *d) {
    uint64_t cost = 0;
    if (d != NULL) {
        CUDA_ARRAY3D_DESCRIPTOR wide = {d->Width, d->Height, 0, d->Format, d->NumChannels, 0};
        cost = array_bytes(&wide, 1);
    }
    if (!memory_charge(cost))
        return REFUSED;
    CUresult result = CALL(cuArrayCreate_v2, array, d);
    return keep(result, RECORD_ARRAY, result == CUDA_SUCCESS ? key_of(*array) : 0, cost);
}

EXPORT CUresult cuArrayDestroy(CUarray array) {
    struct record taken;
    bool known = records_take(RECORD_ARRAY, key_of(array), &taken);
    CUresult result = CALL(cuArrayDestroy, array);
    return known ? let_go(result, &taken) : result;
}

EXPORT CUresult cuMipmappedArrayCreate(CUmipmappedArray *array, const CUDA_ARRAY3D_DESCRIPTOR *description,
                                       unsigned int levels) {
    uint64_t cost = description == NULL ? 0 : array_bytes(description, levels);
    if (!memory_charge(cost))
        return REFUSED;
    CUresult result = CALL(cuMipmappedArrayCreate, array, description, levels);
    return keep(result, RECORD_MIPMAP, result == CUDA_SUCCESS ? key_of(*array) : 0, cost);
}

EXPORT CUresult cuMipmappedArrayDestroy(CUmipmappedArray array) {
    struct record taken;
    bool known = records_take(RECORD_MIPMAP, key_of(array), &taken);
    CUresult result = CALL(cuMipmappedArrayDestroy, array);
    return known ? let_go(result, &taken) : result;
}

/* ---- host memory: the GPU's own on an integrated one ------------------------------------------- */

static bool charge_host(uint64_t bytes, uint64_t *cost) {
    *cost = 0;
    if (!account_attach())
        return false;
    if (!account_limits()->unified)
        return true;
    *cost = round_up(bytes);
    return memory_charge(*cost);
}

static CUresult keep_host(CUresult result, enum record_kind kind, void *pointer, uint64_t cost) {
    return cost == 0 ? result : keep(result, kind, key_of(pointer), cost);
}

EXPORT CUresult cuMemHostAlloc(void **pointer, size_t bytes, unsigned int flags) {
    uint64_t cost;
    if (!charge_host(bytes, &cost))
        return REFUSED;
    CUresult result = CALL(cuMemHostAlloc, pointer, bytes, flags);
    return keep_host(result, RECORD_HOST, result == CUDA_SUCCESS ? *pointer : NULL, cost);
}

EXPORT CUresult cuMemAllocHost_v2(void **pointer, size_t bytes) {
    uint64_t cost;
    if (!charge_host(bytes, &cost))
        return REFUSED;
    CUresult result = CALL(cuMemAllocHost_v2, pointer, bytes);
    return keep_host(result, RECORD_HOST, result == CUDA_SUCCESS ? *pointer : NULL, cost);
}

EXPORT CUresult cuMemAllocHost(void **pointer, unsigned int bytes) { return cuMemAllocHost_v2(pointer, bytes); }

EXPORT CUresult cuMemFreeHost(void *pointer) {
    struct record taken;
    bool known = records_take(RECORD_HOST, key_of(pointer), &taken);
    CUresult result = CALL(cuMemFreeHost, pointer);
    return known ? let_go(result, &taken) : result;
}

EXPORT CUresult cuMemHostRegister(void *pointer, size_t bytes, unsigned int flags) {
    uint64_t cost;
    if (!charge_host(bytes, &cost))
        return REFUSED;
    CUresult result = CALL(cuMemHostRegister, pointer, bytes, flags);
    return keep_host(result, RECORD_REGISTERED, pointer, cost);
}

EXPORT CUresult cuMemHostRegister_v2(void *pointer, size_t bytes, unsigned int flags) {
    uint64_t cost;
    if (!charge_host(bytes, &cost))
        return REFUSED;
    CUresult result = CALL(cuMemHostRegister_v2, pointer, bytes, flags);
    return keep_host(result, RECORD_REGISTERED, pointer, cost);
}

EXPORT CUresult cuMemHostUnregister(void *pointer) {
    struct record taken;
    bool known = records_take(RECORD_REGISTERED, key_of(pointer), &taken);
    CUresult result = CALL(cuMemHostUnregister, pointer);
    return known ? let_go(result, &taken) : result;
}

/* ---- the end of a context --------------------------------------------------------------------- */

typedef CUresult destroy_call(CUcontext context);

/* Forgotten first: another thread may be given the same addresses the moment they are free. */
static CUresult destroy(destroy_call *driver, CUcontext context) {
    if (driver == NULL)
        return driver_lacks();
    compute_forget(context);
    uint64_t bytes = context == NULL ? 0 : records_drop_context(key_of(context));
    CUresult result = driver(context);
    if (result == CUDA_SUCCESS)
        account_uncharge(bytes);
    return result;
}

EXPORT CUresult cuCtxDestroy(CUcontext context) { return destroy(DRIVER(cuCtxDestroy), context); }

EXPORT CUresult cuCtxDestroy_v2(CUcontext context) { return destroy(DRIVER(cuCtxDestroy_v2), context); }

EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    if (!account_attach())
        return REFUSED;
    CUresult result = CALL(cuDevicePrimaryCtxRetain, context, device);
    if (result == CUDA_SUCCESS && device >= 0 && device < DEVICES)
        atomic_store_explicit(&primaries[device], *context, memory_order_relaxed);
    return result;
}

typedef CUresult device_call(CUdevice device);

/* Releasing ends the primary context when nobody else holds it, resetting always. */
static CUresult end_primary(device_call *driver, CUdevice device) {
    unsigned int flags;
    int active = 1;
    CUcontext primary = NULL;
    if (driver == NULL)
        return driver_lacks();
    if (device >= 0 && device < DEVICES)
        primary = atomic_load_explicit(&primaries[device], memory_order_relaxed);
    if (primary != NULL)
        compute_forget(primary);
    CUresult result = driver(device);
    if (primary != NULL && result == CUDA_SUCCESS &&
        CALL(cuDevicePrimaryCtxGetState, device, &flags, &active) == CUDA_SUCCESS && !active) {
        account_uncharge(records_drop_context(key_of(primary)));
        forget_pools();
        graphs_forget();
    }
    return result;
}

EXPORT CUresult cuDevicePrimaryCtxRelease(CUdevice device) {
    return end_primary(DRIVER(cuDevicePrimaryCtxRelease), device);
}

EXPORT CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
    return end_primary(DRIVER(cuDevicePrimaryCtxRelease_v2), device);
}

EXPORT CUresult cuDevicePrimaryCtxReset(CUdevice device) {
    return end_primary(DRIVER(cuDevicePrimaryCtxReset), device);
}

EXPORT CUresult cuDevicePrimaryCtxReset_v2(CUdevice device) {
    return end_primary(DRIVER(cuDevicePrimaryCtxReset_v2), device);
}
